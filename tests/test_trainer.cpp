// A training step, text data, and the comparison of gradients.
#include "tests/training.h"

namespace streambp {
namespace {

// --- a step ---

TEST(Trainer, RatesFollowTheirSchedule) {
  using enum RateSchedule;
  const auto rates = [](RateSchedule schedule, Index cooldown = 0) {
    std::vector<double> all;
    for (Index step = 1; step <= 9; ++step)
      all.push_back(learning_rate(
          {.rate = 8, .final_rate_fraction = 0.25, .warmup = 2, .steps = 8, .schedule = schedule, .cooldown = cooldown},
          step));
    return all;
  };
  EXPECT_EQ(rates(constant), std::vector<double>({4, 8, 8, 8, 8, 8, 8, 8, 8}));
  EXPECT_EQ(rates(linear), std::vector<double>({4, 8, 7, 6, 5, 4, 3, 2, 2}));
  EXPECT_EQ(rates(wsd, 4), std::vector<double>({4, 8, 8, 8, 6.5, 5, 3.5, 2, 2}));
  EXPECT_EQ(rates(wsd, 7), rates(linear));  // it begins after the warm-up
  EXPECT_DOUBLE_EQ(rates(cosine)[4], 2 + 6 * 0.5);
  EXPECT_DOUBLE_EQ(rates(cosine)[7], 2);
  EXPECT_EQ(learning_rate({.rate = 8, .warmup = 20, .steps = 8}, 5), 2) << "a warm-up that is longer than the run";
}

// Rounded to bfloat16 after each micro-batch, a sum of many loses part of what the last ones add. Hence --grad-dtype auto.
TEST(Trainer, SumsOfManyMicroBatchesNeedAFloat32Gradient) {
  const Config c = make_config("qwen3", {67, 32, 2, 4, 2, 8, 64, 300, false});
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const auto gradient = [&]<class G>(Index count, G) {
    std::vector<Batch> batches;
    for (Index i = 0; i < count; ++i) batches.push_back(packed(c, {40}, static_cast<std::uint64_t>(i)));
    return run_gradient<Cpu, BFloat16, G>(c, batches, schedule, random_weights()).gradient.values;
  };
  std::map<Index, double> error;
  for (const Index count : {1, 4, 16, 64}) {
    const auto narrow = gradient(count, BFloat16()), wide = gradient(count, 0.0f);
    double difference = 0, squares = 0;
    for (std::size_t i = 0; i < wide.size(); ++i) {
      for (std::size_t j = 0; j < wide[i].size(); ++j) {
        difference += std::pow(narrow[i][j] - wide[i][j], 2), squares += std::pow(wide[i][j], 2);
      }
    }
    error[count] = std::sqrt(difference / squares);
    std::printf("%ld micro-batches: a sum in bfloat16 differs by %.4f from one in float32\n", count, error[count]);
  }
  EXPECT_LT(error[1], 0.003);
  EXPECT_GT(error[16], 1.5 * error[1]);
  EXPECT_GT(error[64], 2 * error[1]);
}

// Three steps of two unequal micro-batches, with warm-up and clipping, against the oracle's gradient and AdamW written
// out.
TEST(Trainer, StepsMatchAdamWOnTheOraclesGradient) {
  const Config c = families()[4].config;  // has biases and norms, which have no weight decay
  const std::vector<Batch> batches = {packed(c, {90, 7}, 1), packed(c, {300, 31}, 2)};
  const OptimizerSettings s{.rate = 0.01, .warmup = 2, .steps = 5, .decay = 0.3, .clip = 0.05};
  const StepSettings settings{c, DType::f64, OptimizerKind::adamw, 2};
  const Schedule schedule = Schedule::stream(kTile, kTile);
  Cpu dev(plan(settings, batches[1].size(), schedule).peak);
  Trainer<Cpu, double> trainer(dev, c, batches[1].size(), OptimizerKind::adamw);
  trainer.initialise(3, 0.15);

  std::vector<Owned<double>> storage;
  Tensors<double> weights(c);
  for (auto& e : table(c, weights)) *e.matrix = storage.emplace_back(e.parameter.rows, e.parameter.cols, 0);
  Model<double> naive{c, weights};
  Cpu host(0);
  initialise(host, naive, 3, 0.15);
  std::map<std::string, std::vector<double>> m, v;
  const double rates[] = {0.005, 0.01, 0.001 + 0.009 * 0.5 * (1 + std::cos(M_PI / 3))};

  for (Index step = 1; step <= 3; ++step) {
    const StepResult result = trainer.step(batches, schedule, s, step);
    const double n = static_cast<double>(batches[0].target_count() + batches[1].target_count());
    std::map<std::string, std::vector<double>> gradient;
    double loss = 0, squares = 0;
    for (const Batch& batch : batches) {
      std::vector<double> w;
      for (std::int32_t target : batch.targets) w.push_back(target < 0 ? 0 : -1 / n);
      const oracle::Result part = oracle::gradient(c, naive.weights, batch, oracle::linear(w));
      loss += part.loss;
      for (const auto& [key, values] : part.gradient) {
        auto& sum = gradient[key];
        sum.resize(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
      }
    }
    for (const auto& [key, values] : gradient) {
      for (double g : values) squares += g * g;
    }
    const double norm = std::sqrt(squares), scale = 0.05 / norm;
    ASSERT_LT(scale, 1) << "the test must clip";
    EXPECT_NEAR(result.measures.loss, loss, 1e-9);
    EXPECT_NEAR(result.gradient.norm, norm, 1e-9);
    EXPECT_NEAR(learning_rate(s, step), rates[step - 1], 1e-15);
    for (auto& e : table(c, naive.weights)) {
      const std::string key = oracle::key(e.parameter);
      m[key].resize(gradient[key].size()), v[key].resize(gradient[key].size());
      const bool is_vector = e.parameter.rows == 1;
      for (std::size_t i = 0; i < gradient[key].size(); ++i) {
        const double g = scale * gradient[key][i];
        double &mi = m[key][i], &vi = v[key][i], &w = e.matrix->data[i];
        mi = 0.9 * mi + 0.1 * g;
        vi = 0.95 * vi + 0.05 * g * g;
        const auto t = static_cast<double>(step);
        const double m_hat = mi / (1 - std::pow(0.9, t)), v_hat = vi / (1 - std::pow(0.95, t));
        w -= rates[step - 1] * (m_hat / (std::sqrt(v_hat) + 1e-8) + (is_vector ? 0 : 0.3) * w);
      }
    }
    const HostGradient now = host_gradient(dev, c, trainer.model.weights);
    EXPECT_LE(now.difference(host_gradient(host, c, naive.weights)).relative, 1e-8) << "step " << step;
  }
}

TEST(Trainer, BFloat16FollowsTheLossCurveOfFloat32) {
  const Index steps = sized<Index>(12, 3);
  const auto f32 = losses<Cpu, float, float>(OptimizerKind::adamw, steps);
  const std::pair<const char*, std::vector<double>> curves[] = {
      {"master weights", losses<Cpu, BFloat16, BFloat16>(OptimizerKind::adamw, steps)},
      {"float32 gradient", losses<Cpu, BFloat16, float>(OptimizerKind::adamw, steps)},
      {"bfloat16 only", losses<Cpu, BFloat16, BFloat16>(OptimizerKind::adamw_bf16, steps)},
      {"8-bit moments", losses<Cpu, BFloat16, BFloat16>(OptimizerKind::adamw_8bit, steps)},
      {"8-bit moments of float32", losses<Cpu, float, float>(OptimizerKind::adamw_8bit, steps)}};
  EXPECT_LT(f32.back(), f32.front() - sized(0.5, 0.0));
  for (const auto& [types, curve] : curves) {
    for (std::size_t i = 0; i < curve.size(); ++i) {
      EXPECT_NEAR(curve[i], f32[i], 3e-2 * f32[i]) << types << ", step " << i + 1;
    }
  }
}

// Each row adds 1e37 to the gradient of the last norm, which overflows in float32. The loss does not.
TEST(Trainer, NamesTheTensorWhereAGradientIsNotFinite) {
  const Config c = make_config("llama", {13, 8, 3, 2, 1, 4, 12, 0, false});
  const Batch batch = packed(c, {60});
  Cpu dev(std::size_t{1} << 24);
  Trainer<Cpu, float> trainer(dev, c, batch.size(), OptimizerKind::adamw);
  trainer.initialise(1);
  Tensors<float>& w = trainer.model.weights;
  const auto fill = [](Matrix<float> m, float x) { std::fill_n(m.data, m.size(), x); };
  fill(w.embedding.tokens, 1), fill(w.norm.weight, 1e-30f), fill(w.head.weight, -3e38f);
  fill(w.head.weight.slice({0, 1}), 3e38f);  // is always predicted
  EXPECT_ERROR(trainer.step({batch}, Schedule::full(batch.size()), {.steps = 10}, 1), ", first in model.norm.weight");
}

TEST(Trainer, TheSeedDecidesStochasticRounding) {
  const Config c = families()[2].config;
  const Batch batch = packed(c, {60});
  auto trained = [&](std::uint64_t seed) {
    Cpu dev(std::size_t{1} << 24);
    Trainer<Cpu, BFloat16> trainer(dev, c, batch.size(), OptimizerKind::adamw_bf16);
    trainer.initialise(1, 0.1);
    trainer.step({batch}, Schedule::full(batch.size()), {.steps = 10, .seed = seed}, 1);
    return host_gradient(dev, c, trainer.model.weights);
  };
  EXPECT_TRUE(trained(1) == trained(1));
  EXPECT_FALSE(trained(1) == trained(2));
}

TEST(Trainer, AFailedStepKeepsTheWeightsAndFreesTheGradient) {
  const Config c = families()[2].config;
  const Batch batch = packed(c, {60});
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const StepSettings settings{c, DType::f32, OptimizerKind::adamw, 1};
  auto trained = [&](bool broken_first) {
    Cpu dev(plan(settings, batch.size(), schedule).peak);
    Trainer<Cpu, float> trainer(dev, c, batch.size(), OptimizerKind::adamw);
    trainer.initialise(1, 0.1);
    if (broken_first) {
      float& weight = trainer.model.weights.norm.weight(0, 0);
      const float start = std::exchange(weight, INFINITY);
      EXPECT_THROW(trainer.step({batch}, schedule, OptimizerSettings{.steps = 10}, 1), Error);
      weight = start;
    }
    trainer.step({batch}, schedule, OptimizerSettings{.steps = 10}, 1);
    return host_gradient(dev, c, trainer.model.weights);
  };
  EXPECT_TRUE(trained(true) == trained(false));
}

TEST(Trainer, EvaluationMatchesTheTrainingLossForAnyChunk) {
  for (const Family& family : walked_families()) {
    Config c = family.config;
    c.balanced = false;  // an evaluation is without this loss
    const Batch batch = packed(c, sized<Lengths>({300, 1, 330}, {260, 1, 30}));
    const StepSettings settings{c, DType::f64, OptimizerKind::none, 1};
    const Schedule schedule = Schedule::stream(kTile, kTile);
    const Index rows = layout_of(c).rows(batch);
    Cpu dev(plan(settings, rows, schedule).peak);
    Trainer<Cpu, double> trainer(dev, c, rows, OptimizerKind::none);
    trainer.initialise(3, 0.15);
    const double loss = trainer.accumulate(batch, Counts(batch), schedule).loss;
    trainer.release_gradient();
    EXPECT_EQ(measure({}, batch, Counts(batch), trainer.evaluate(batch, schedule)).loss, loss) << family.name;
  }
}

TEST(Trainer, ResidualProjectionsStartSmaller) {
  const Config c = make_config("llama", {300, 64, 8, 4, 2, 16, 128, 0, false});
  std::vector<Owned<float>> storage;
  Model<float> model{c, Tensors<float>(c)};
  for (auto& e : table(c, model.weights)) *e.matrix = storage.emplace_back(e.parameter.rows, e.parameter.cols, 0);
  Cpu host(0);
  initialise(host, model, 1);
  auto deviation = [](Matrix<float> w) {
    double sum = 0;
    for (Index i = 0; i < w.size(); ++i) sum += static_cast<double>(w.data[i]) * static_cast<double>(w.data[i]);
    return std::sqrt(sum / static_cast<double>(w.size()));
  };
  EXPECT_NEAR(deviation(model.weights.layers[0].up.weight), 0.02, 0.001);
  EXPECT_NEAR(deviation(model.weights.layers[0].down.weight), 0.02 / 4, 0.0003);
  EXPECT_NEAR(deviation(model.weights.layers[7].o.weight), 0.02 / 4, 0.0003);
  EXPECT_EQ(model.weights.norm.weight(0, 5), 1);
}

// The FLOPs of a small step, added up by hand.
TEST(Trainer, CountedFlopsMatchAHandCount) {
  const Config c = make_config("llama", {50, 8, 1, 2, 1, 4, 12, 0, false});
  const Index n = 10;
  Plan dev;
  Trainer<Plan, float> trainer(dev, c, n, OptimizerKind::none);
  trainer.plan_step(1, Schedule::full(n), OptimizerKind::none);
  std::map<std::string, double> flops;
  for (const Work& w : dev.work()) flops[std::string(w.name)] = w.flops;
  // q 8x8, k and v 4x8, o 8x8, gate, up and down 12x8, head 50x8; two FLOPs per weight and token
  const double weights = 64 + 32 + 32 + 64 + 3 * 96 + 400;
  EXPECT_EQ(flops["matmul"], 2 * 10 * weights);
  EXPECT_EQ(flops["matmul dx"], 2 * 10 * weights);
  EXPECT_EQ(flops["matmul dw"], 2 * 10 * weights);
  const double pairs = 2 * 10 * 11 / 2;                       // heads times the triangle
  EXPECT_EQ(flops["attention"], 2 * 2 * 4 * pairs);           // Q Kᵀ and P V
  EXPECT_EQ(flops["attention backward"], 5 * 2 * 4 * pairs);  // S, dP, dV, dK, dQ
}

// --- text ---

TEST(TextData, TrainingNeverSeesTheHeldOutPart) {
  std::string bytes(9000, 'a');
  bytes += std::string(1000, 'b');
  for (std::size_t i = 50; i < bytes.size(); i += 97) bytes[i] = '\n';
  const Text text(bytes, 0.1, 100, "test");
  std::set<std::int32_t> trained, evaluated;
  for (Index step = 0; step < 200; ++step) {
    const Batch batch = text.batch(1, step, 0, 4, 100);
    EXPECT_EQ(batch.size(), 400);
    trained.insert(batch.tokens.begin(), batch.tokens.end());
    trained.insert(batch.targets.begin(), batch.targets.end());
    for (Index t = 0; t + 1 < 100; ++t)
      ASSERT_EQ(batch.targets[static_cast<std::size_t>(t)], batch.tokens[static_cast<std::size_t>(t + 1)]);
  }
  for (Index i = 0; i < 8; ++i) {
    const Batch batch = text.evaluation_batch(i, 8, 2, 100);
    evaluated.insert(batch.tokens.begin(), batch.tokens.end());
    evaluated.insert(batch.targets.begin(), batch.targets.end());
  }
  EXPECT_EQ(trained, (std::set<std::int32_t>{'a', '\n'}));
  EXPECT_EQ(evaluated, (std::set<std::int32_t>{'b', '\n'}));
}

TEST(TextData, BatchesDependOnlyOnSeedStepAndMicroBatch) {
  const Text text(stories(1, 50000), 0.1, 200, "test");
  const Batch batch = text.batch(1, 5, 0, 2, 200);
  EXPECT_EQ(batch.tokens, text.batch(1, 5, 0, 2, 200).tokens);
  EXPECT_NE(batch.tokens, text.batch(2, 5, 0, 2, 200).tokens);
  EXPECT_NE(batch.tokens, text.batch(1, 6, 0, 2, 200).tokens);
  EXPECT_NE(batch.tokens, text.batch(1, 5, 1, 2, 200).tokens);
  EXPECT_EQ(batch.key_begin[250], 200);
  EXPECT_EQ(batch.positions[250], 50);
}

// --- the comparison of gradients ---

TEST(GradientComparison, DetectsEveryBitAndEveryNaN) {
  const Config c = families()[2].config;
  const Batch batch = packed(c, {50});
  const GradientRun run = run_gradient<Cpu, double>(c, batch, Schedule::full(50), random_weights());
  EXPECT_TRUE(run.gradient == run.gradient);
  EXPECT_EQ(run.gradient.difference(run.gradient).relative, 0);
  auto changed = [&](auto&& change) {
    HostGradient other = run.gradient;
    change(other.values[5][3]);
    return other;
  };
  EXPECT_FALSE(changed([](double& x) { x = std::nextafter(x, 1e9); }) == run.gradient);
  EXPECT_FALSE(changed([](double& x) { x = -0.0; }) == changed([](double& x) { x = 0.0; }));
  const HostGradient nan = changed([](double& x) { x = std::nan(""); });
  EXPECT_TRUE(nan == nan);
  EXPECT_EQ(nan.difference(run.gradient).relative, INFINITY);
  EXPECT_EQ(run.gradient.difference(nan).relative, INFINITY);
  const Difference moved = changed([](double& x) { x += 1; }).difference(run.gradient);
  EXPECT_EQ(moved.tensor, run.gradient.parameters[5].name);
  EXPECT_GT(moved.relative, 0);
}

}  // namespace
}  // namespace streambp
