// What is trained: adapters and frozen parameters, in every family and mode, against the oracle and bit for bit.
#include <regex>

#include "data/files/adapters.h"
#include "tests/support.cuh"
#include "training/blocks.h"

namespace streambp {
namespace {

const Lengths kSomeDocuments = {5, 270, 1, 30};

// Adapters of different ranks on all linear layers except every fifth; the base is frozen.
Config with_adapters(Config c) {
  Index number = 0;
  for (const std::string& name : linear_layers(c, "")) {
    if (++number % 5 != 0) c.adapters[name] = {1 + number % 4, 0.7 * static_cast<double>(number % 3 + 1)};
  }
  c.trained.emplace();
  return c;
}

// Only the parameters that match an expression are trained.
Config with_trained(Config c, const std::string& expression) {
  Tensors<float> none(c);
  c.trained.emplace();
  for (const auto& e : table(c, none)) {
    if (std::regex_match(e.parameter.name, std::regex(expression))) c.trained->insert(e.parameter.name);
  }
  return c;
}

std::vector<std::pair<std::string, Schedule>> some_schedules(Index rows) {
  return {{"full", Schedule::full(rows)},
          {"checkpoint", Schedule::checkpoint(rows)},
          {"stream", Schedule::stream(kTile, kTile)},
          {"stream by two tiles", Schedule::stream(2 * kTile, kTile)}};
}

template <class T>
GradientRun run(const Config& c, const Batch& batch, const Schedule& schedule) {
  return run_gradient<Cpu, T>(c, batch, schedule, random_weights());
}

class PartsOfEveryFamily : public testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Trained, PartsOfEveryFamily, testing::ValuesIn(walked_families()), PrintFamily());

TEST_P(PartsOfEveryFamily, AdaptersMatchTheOracle) {
  const Config c = with_adapters(with_all_experts(GetParam().config));
  const Batch batch = packed(c, kSomeDocuments);
  const oracle::Result truth = oracle_gradient(c, batch, random_weights());
  const GradientRun exact = run<double>(c, batch, Schedule::stream(kTile, kTile));
  expect_oracle(exact, truth);
  for (const Parameter& p : exact.gradient.parameters) EXPECT_TRUE(p.adapter()) << p.name << " is not frozen";
  const Schedule full = Schedule::full(batch.size());
  EXPECT_LE(run<float>(c, batch, full).gradient.difference(exact.gradient).relative, 1e-5);
  EXPECT_LE(run<BFloat16>(c, batch, full).gradient.difference(exact.gradient).relative, 0.1);
}

template <class T>
void expect_equal_bits_of_adapters(const Config& c) {
  const Batch batch = packed(c, kSomeDocuments);
  const GradientRun first = run<T>(c, batch, Schedule::full(batch.size()));
  for (const auto& [name, schedule] : some_schedules(batch.size())) {
    expect_same_bits(run<T>(c, batch, schedule), first, name);
  }
}
TEST_P(PartsOfEveryFamily, AdaptersHaveTheSameBitsInAllModes) {
  const Config c = with_adapters(GetParam().config);
  expect_equal_bits_of_adapters<float>(c);
  expect_equal_bits_of_adapters<BFloat16>(c);
}

// What is computed for the others has the same bits as if nothing were frozen.
TEST_P(PartsOfEveryFamily, FreezingChangesNoBitOfTheOthers) {
  Config all = with_adapters(GetParam().config);
  all.trained.reset();
  const Batch batch = packed(all, kSomeDocuments);
  const GradientRun truth = run<float>(all, batch, Schedule::stream(kTile, kTile));
  std::map<std::string, std::vector<double>> values;
  for (std::size_t i = 0; i < truth.gradient.parameters.size(); ++i)
    values[oracle::key(truth.gradient.parameters[i])] = truth.gradient.values[i];
  for (const std::string expression : {"", "(model.norm|ln_f).*", ".*norm.*|.*ln_.*", ".*[.]1[.].*", ".*bias",
                                       ".*(embed_tokens|wte).*", "lm_head.weight|.*1.*(down|c_fc).*"}) {
    Config c = with_trained(all, expression);
    for (const Schedule& schedule : {Schedule::full(batch.size()), Schedule::stream(2 * kTile, kTile)}) {
      const GradientRun part = run<float>(c, batch, schedule);
      EXPECT_TRUE(part.gradient == HostGradient(part.gradient, values)) << expression;
      EXPECT_EQ(part.logp, truth.logp) << expression;
      EXPECT_EQ(part.peak, part.planned) << expression;
    }
    c.adapters.clear();                   // then backward can stop early
    if (trained_count(c) == 0) continue;  // all were adapters
    std::vector<HostGradient> gradients;
    for (const auto& [name, schedule] : some_schedules(batch.size())) {
      const GradientRun part = run<float>(c, batch, schedule);
      gradients.push_back(part.gradient);
      EXPECT_TRUE(part.gradient == gradients[0]) << expression << ", " << name;
      EXPECT_EQ(part.peak, part.planned) << expression << ", " << name;
    }
  }
}

Usage planned(const Config& c, Mode mode = Mode::stream) {
  return plan({c, DType::f32, OptimizerKind::adamw}, 4096, schedule_for(mode, c, 4096, kTile));
}
std::size_t of(const Usage& usage, Kind kind) { return usage.by_kind[static_cast<std::size_t>(kind)]; }

// Nothing is stored for a frozen parameter, and nothing is saved of layers below the lowest trained one.
TEST(Trained, AFrozenParameterTakesNoMemory) {
  const Config c = make_config("qwen3", {256, 64, 8, 4, 2, 16, 128, 0, false});
  const Config top = with_trained(c, "model.layers.[67].*"), lora = with_adapters(c);
  const Usage all = planned(c), part = planned(top), thin = planned(lora);
  auto bytes = [](const Config& c, std::size_t of_number, auto&& counts) {
    Tensors<float> none(c);
    std::size_t sum = 0;
    for (const auto& e : rows_where(table(c, none), counts))
      sum += Arena::round_up(static_cast<std::size_t>(e.parameter.rows * e.parameter.cols) * of_number);
    return sum;
  };
  auto trained_ones = [](const Parameter& p) { return p.trained; };
  auto every_one = [](const Parameter&) { return true; };
  const std::size_t row = 4096 * 64 * sizeof(float);
  EXPECT_EQ(of(all, Kind::saved), 9 * row);  // 8 layers' inputs and the output
  EXPECT_EQ(of(part, Kind::saved), 3 * row);
  EXPECT_EQ(of(all, Kind::optimizer), 2 * bytes(c, 4, every_one));
  EXPECT_EQ(of(part, Kind::optimizer), 2 * bytes(top, 4, trained_ones));
  EXPECT_EQ(of(thin, Kind::optimizer), 2 * bytes(lora, 4, trained_ones));
  EXPECT_EQ(of(thin, Kind::weights), bytes(lora, 4, every_one));
  EXPECT_EQ(of(planned(top, Mode::full), Kind::saved), 3 * row);
}

// The products of a step: a full one has 2 forward, 2 of recomputation and 4 backward per weight and token.
TEST(Trained, AFrozenWeightNeedsNoProductForItsGradient) {
  const Config c = make_config("llama", {8192, 256, 4, 4, 4, 64, 1024, 0, false});
  auto flops = [&](const Config& c) {
    return plan({c, DType::f32, OptimizerKind::none}, 256, Schedule::stream(kTile, kTile)).flops;
  };
  const double head_only = flops(with_trained(c, "lm_head.weight")), all = flops(c);
  const double weights = static_cast<double>(parameter_count(with_trained(c, "")) - 8192 * 256);  // without embedding
  EXPECT_NEAR(all / (256 * weights), 7.5, 0.4);  // the head is not recomputed
  EXPECT_NEAR(head_only / (256 * weights), 2 + 4.0 * 8192 * 256 / weights, 0.4);
}

TEST(Trained, NewAdaptersChangeNothing) {
  for (const Family& family : walked_families()) {
    Config c = with_adapters(family.config);
    const Batch batch = packed(c, {40});
    auto initial = [](auto& dev, auto& model) { initialise(dev, model, 3); };
    const Schedule schedule = Schedule::full(batch.size());
    const GradientRun with = run_gradient<Cpu, float>(c, batch, schedule, initial);
    const GradientRun without = run_gradient<Cpu, float>(family.config, batch, schedule, initial);
    EXPECT_EQ(with.logp, without.logp) << family.name;
    std::map<std::string, double> largest;  // of the gradients of a and of b
    for (std::size_t i = 0; i < with.gradient.parameters.size(); ++i) {
      for (double x : with.gradient.values[i]) {
        double& most = largest[with.gradient.parameters[i].init == Init::adapter_a ? "a" : "b"];
        most = std::max(most, std::abs(x));
      }
    }
    EXPECT_EQ(largest["a"], 0) << family.name;
    EXPECT_GT(largest["b"], 0) << family.name;
  }
}

TEST(Blocks, EveryBlockHasItsTurnInEveryCycle) {
  const Index layers = 6;
  for (const BlockOrder order : {BlockOrder::ascending, BlockOrder::descending, BlockOrder::random}) {
    const BlockSettings s{.layers = 2, .steps = 5, .order = order, .seed = 3};
    std::set<std::vector<Index>> orders;
    for (Index cycle = 0; cycle < 20; ++cycle) {
      std::vector<Index> turns;
      for (Index step = cycle * 15 + 1; step <= (cycle + 1) * 15; ++step) {
        const Index block = block_of_step(s, layers, step);
        if (step_of_turn(s, step) == 1) turns.push_back(block);
        EXPECT_EQ(block, turns.back()) << "step " << step;
      }
      orders.insert(turns);
      EXPECT_EQ(std::set<Index>(turns.begin(), turns.end()), (std::set<Index>{0, 1, 2}));
    }
    EXPECT_EQ(orders.size(), order == BlockOrder::random ? 5u : 1u);  // of 6
    if (order == BlockOrder::descending) {
      EXPECT_EQ(*orders.begin(), (std::vector<Index>{2, 1, 0}));
    }
  }
  const Config c = make_config("llama", {64, 16, 6, 2, 2, 8, 32, 0, false});
  EXPECT_EQ(names_of_block(c, {.layers = 2}, 2).size(), 18u);
  EXPECT_TRUE(names_of_block(c, {.layers = 2}, 2).contains("model.layers.5.mlp.down_proj.weight"));
}

// If the first step of a turn fails, the state is still that of the turn before, and the step can be repeated.
TEST(Blocks, AFailedStepKeepsTheTurnBefore) {
  const Config c = make_config("llama", {64, 16, 2, 2, 2, 8, 32, 0, false});
  const BlockSettings blocks{.layers = 1, .steps = 2, .order = BlockOrder::ascending};
  const OptimizerSettings settings{.steps = 6, .blocks = blocks};
  Config first = c;
  first.trained = names_of_block(c, blocks, 0);
  const Batch batch = packed(c, {40, 20});
  const Schedule schedule = Schedule::full(batch.size());
  auto weights_after = [&](bool fails) {
    Cpu dev(std::size_t{1} << 24);
    Trainer<Cpu, float> trainer(dev, first, batch.size(), OptimizerKind::adamw);
    trainer.initialise(1);
    for (Index step = 1; step <= 5; ++step) {
      if (fails && step == 3) {
        float& weight = trainer.model.weights.norm.weight(0, 0);
        const float good = std::exchange(weight, NAN);
        std::vector<double> before, after;
        auto state = [&](std::vector<double>& numbers) {
          trainer.optimizer->for_each_state(trainer.model.config, [&](const std::string&, const auto& rows) {
            for (const auto& e : rows)
              for (const auto x : to_host(dev, *e.matrix)) numbers.push_back(static_cast<double>(x));
          });
        };
        state(before);
        EXPECT_THROW(trainer.step({batch}, schedule, settings, step), Error);
        state(after);
        EXPECT_EQ(before, after);
        EXPECT_EQ(*trainer.model.config.trained, names_of_block(c, blocks, 0));
        weight = good;
      }
      trainer.step({batch}, schedule, settings, step);
    }
    EXPECT_EQ(*trainer.model.config.trained, names_of_block(c, blocks, 0));  // step 5 is its turn again
    return host_gradient(dev, c, trainer.model.weights);
  };
  EXPECT_TRUE(weights_after(true) == weights_after(false));
}

}  // namespace
}  // namespace streambp
