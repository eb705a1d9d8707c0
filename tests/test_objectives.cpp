// The objectives: their gradients against the oracle in all modes, and the batches that they refuse.
#include "tests/golden.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

struct Case {
  std::string name;
  Objective objective;
  bool on_policy = false;  // without old log-probs
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> cases() {
  using enum ObjectiveKind;
  return {
      {"sft", {.kind = sft}},
      {"sft_documents", {.kind = sft, .mean = Mean::documents}},
      {"dpo", {.kind = dpo}},
      {"dpo_smoothed", {.kind = dpo, .beta = 0.7, .label_smoothing = 0.2}},
      {"dpo_ipo", {.kind = dpo, .preference = Preference::ipo, .beta = 0.3}},
      {"dpo_simpo", {.kind = dpo, .preference = Preference::simpo, .beta = 2, .margin = 0.8}},
      {"grpo", {.kind = grpo, .mean = Mean::documents}},
      {"grpo_on_policy", {.kind = grpo, .mean = Mean::documents, .kl = 0.1}, true},
      {"grpo_kl", {.kind = grpo, .mean = Mean::documents, .clip_high = 0.3, .kl = 0.2}},
      {"bnpo", {.kind = grpo, .mean = Mean::tokens, .kl = 0.05}},
      {"dr_grpo", {.kind = grpo, .mean = Mean::length, .length = 400}},
  };
}

Batch for_case(const Case& p, Batch batch) {
  if (p.on_policy) batch.old.clear();
  return batch;
}

// Documents of unequal length that end inside tiles and chunks, each with something to learn.
const Lengths kLengths = sized<Lengths>({5, 270, 3, 170, 60, 37, 20, 9}, {5, 260, 3, 17, 6, 37, 20, 9});

struct Setting {
  Config config;
  Batch batch;
};
Setting setting(const char* family, const Lengths& lengths = kLengths) {
  for (const Family& f : families()) {
    if (f.name != family) continue;
    const Batch batch = packed(f.config, lengths);
    const Schedule schedule = Schedule::stream(kTile, kTile);
    return {f.config,
            with_objective_data(batch, run_gradient<Cpu, double>(f.config, batch, schedule, random_weights()).logp)};
  }
  throw std::logic_error(family);
}

class EveryObjective : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Objectives, EveryObjective, testing::ValuesIn(cases()), PrintFamily());

std::vector<Schedule> schedules(Index rows) {
  if (kSanitized) return {Schedule::full(rows), Schedule::stream(kTile, 2 * kTile)};
  return {Schedule::full(rows), Schedule::checkpoint(rows), Schedule::stream(kTile, kTile),
          Schedule::stream(2 * kTile, 3 * kTile), Schedule::stream(4 * kTile, kTile)};
}

TEST_P(EveryObjective, GradientMatchesTheOracleInAllModesBitForBit) {
  const auto [c, all] = setting("llama3");
  const Batch batch = for_case(GetParam(), all);
  const Objective& objective = GetParam().objective;
  const oracle::Result truth = oracle_gradient(c, batch, random_weights(), objective);
  std::optional<GradientRun> first, narrow;
  for (const Schedule& schedule : schedules(batch.size())) {
    const GradientRun run = run_gradient<Cpu, double>(c, batch, schedule, random_weights(), objective);
    expect_oracle(run, truth);
    if (!first) first = run;
    expect_same_bits(run, *first);

    const GradientRun single = run_gradient<Cpu, float>(c, batch, schedule, random_weights(), objective);
    EXPECT_LE(single.gradient.difference(run.gradient).relative, 1e-5);
    if (!narrow) narrow = single;
    expect_same_bits(single, *narrow);
  }
}

// With DPO's formula as the caller's own loss, the gradient has the bits of --objective dpo.
TEST(OwnLosses, HaveTheBitsOfTheSameFormulaOfOurs) {
  const auto [c, batch] = setting("llama3");
  const Objective dpo = {.kind = ObjectiveKind::dpo, .beta = 0.7};
  Objective own = {.kind = ObjectiveKind::own};
  own.loss = [&](const Batch& of, const std::vector<double>& logps, std::vector<double>& weights) {
    return measure_pairs(dpo, of, Counts(of), logps, weights).loss;
  };
  for (const Schedule& schedule : schedules(batch.size())) {
    const GradientRun ours = run_gradient<Cpu, float>(c, batch, schedule, random_weights(), dpo),
                      theirs = run_gradient<Cpu, float>(c, batch, schedule, random_weights(), own);
    EXPECT_TRUE(theirs.gradient == ours.gradient && theirs.loss == ours.loss);
    EXPECT_EQ(theirs.peak, theirs.planned);
  }
  const auto refused = [&] {
    return error_of([&] { run_gradient<Cpu, float>(c, batch, Schedule::full(batch.size()), random_weights(), own); });
  };
  own.loss = [](const Batch&, const std::vector<double>&, std::vector<double>& weights) { return weights.clear(), 0; };
  EXPECT_TRUE(contains(refused(), "0 weights for"));
  own.loss = {};
  EXPECT_TRUE(contains(refused(), "it has none"));
}

// The loss of a step does not depend on how its documents are split into micro-batches.
TEST_P(EveryObjective, AccumulationMatchesASingleBatch) {
  const auto [c, all] = setting("llama3");
  const Batch batch = for_case(GetParam(), all);
  std::vector<Batch> pairs;
  const std::vector<Rows> documents = batch.documents();
  for (std::size_t i = 0; i < documents.size(); i += 2)
    pairs.push_back(part_of(batch, {documents[i].begin, documents[i + 1].end}));
  const auto gradient_of = [&, c = c](const std::vector<Batch>& batches) {
    return run_gradient<Cpu, double>(c, batches, Schedule::stream(kTile, kTile), random_weights(),
                                     GetParam().objective);
  };
  const GradientRun truth = gradient_of({batch}), in_pairs = gradient_of(pairs);
  EXPECT_LE(in_pairs.gradient.difference(truth.gradient).relative, 1e-11);
  EXPECT_NEAR(in_pairs.loss, truth.loss, 1e-12);
  ASSERT_EQ(in_pairs.others.size(), truth.others.size());
  for (const auto& [name, value] : truth.others) EXPECT_NEAR(in_pairs.others.at(name), value, 1e-12) << name;
}

// An objective needs only a few additional vectors of N numbers.
TEST_P(EveryObjective, NeedsLittleMoreMemoryThanSft) {
  const Config c = known_models().at("qwen3-0.6b");
  const Index n = 8192;
  StepSettings settings{c, DType::bf16, OptimizerKind::adamw, 2};
  const Schedule schedule = schedule_for(Mode::stream, c, n, 2048);
  const std::size_t supervised = plan(settings, n, schedule).peak;
  settings.objective = GetParam().objective;
  EXPECT_LE(plan(settings, n, schedule).peak, supervised + 3 * n * sizeof(float));
}

// The logits of a token are computed once, unless its weight depends on other tokens.
TEST_P(EveryObjective, ComputesLogitsOnlyAsOftenAsNeeded) {
  const Config c = families()[2].config;
  auto softmaxes = [&](const Objective& objective) {
    Plan dev;
    Trainer<Plan, float> trainer(dev, c, 1000, OptimizerKind::none, objective);
    trainer.plan_step(1, Schedule::stream(kTile, kTile), OptimizerKind::none);
    for (const Work& work : dev.work()) {
      if (std::string(work.name) == "softmax") return work.flops;
    }
    return 0.0;
  };
  const int passes = GetParam().objective.kind == ObjectiveKind::dpo ? 2 : 1;
  EXPECT_EQ(softmaxes(GetParam().objective), passes * softmaxes({}));
}

// A temperature divides logits after their cap, in log-probs and in their gradient.
TEST(Objective, TemperatureDividesLogits) {
  auto [c, batch] = setting("nanochat", {9, 24, 3, 12});
  ASSERT_GT(c.logit_cap, 0);
  const Objective objective{.kind = ObjectiveKind::grpo, .mean = Mean::documents, .kl = 0.1, .temperature = 0.4};
  const GradientRun tempered =
      run_gradient<Cpu, double>(c, batch, Schedule::stream(kTile, kTile), random_weights(), objective);
  const oracle::Result plain = oracle_gradient(c, batch, random_weights(), Objective{});
  for (std::size_t t = 0; t < batch.targets.size(); ++t) {
    if (batch.targets[t] < 0) continue;
    const double* logits = &plain.logits[t * static_cast<std::size_t>(c.vocab)];
    double sum = 0;
    for (Index v = 0; v < c.vocab; ++v) sum += std::exp(logits[v] / objective.temperature);
    EXPECT_NEAR(tempered.logp[t], logits[batch.targets[t]] / objective.temperature - std::log(sum), 1e-9);
  }
  c.logit_cap /= objective.temperature, c.logit_scale /= objective.temperature;
  expect_oracle(tempered, oracle_gradient(c, batch, random_weights(), objective));
}

// The formulas of TRL's trainers, evaluated by PyTorch in float64 (scripts/make_objective_golden.py).
Objective objective_of(const Json& settings) {
  Objective o;
  const std::string kind = settings.at("objective");
  o.beta = settings.value("beta", o.beta);
  o.label_smoothing = settings.value("label_smoothing", 0.0);
  o.margin = settings.value("margin", o.margin);
  o.clip_low = settings.value("clip_low", o.clip_low);
  o.clip_high = settings.value("clip_high", o.clip_high);
  o.kl = settings.value("kl", 0.0);
  o.length = settings.value("max_length", 0);
  if (kind == "dpo") {
    o.kind = ObjectiveKind::dpo;
    const std::map<std::string, Preference> losses = {
        {"sigmoid", Preference::sigmoid}, {"ipo", Preference::ipo}, {"simpo", Preference::simpo}};
    o.preference = losses.at(settings.at("loss"));
  } else if (kind == "grpo") {
    o.kind = ObjectiveKind::grpo;
    const std::map<std::string, Mean> means = {
        {"grpo", Mean::documents}, {"bnpo", Mean::tokens}, {"dr_grpo", Mean::length}};
    o.mean = means.at(settings.at("normalise"));
  } else if (settings.value("mean", "tokens") == "documents") {
    o.mean = Mean::documents;
  }
  return o;
}

template <class T>
void expect_golden_objectives(const std::string& model, double tolerance) {
  const SafetensorsFile file(golden_folder() / ".." / "golden_objectives" / (model + ".safetensors"));
  const Config c = config_from_json(Json::parse(file.metadata().at("config")), model);
  const Json all = Json::parse(file.metadata().at("cases"));
  ASSERT_GE(all.size(), 13u);
  for (const auto& [name, settings] : all.items()) {
    SCOPED_TRACE(name);
    auto numbers = [&, prefix = name + "/"]<class V>(const std::string& what, V) {
      const Tensor* tensor = file.find(prefix + what);
      return tensor ? streambp::numbers<V>(*tensor) : std::vector<V>();
    };
    constexpr std::int32_t integers = 0;
    const Batch batch{numbers("tokens", integers),    numbers("targets", integers), numbers("positions", integers),
                      numbers("key_begin", integers), numbers("reference", 0.0),    numbers("old", 0.0),
                      numbers("advantage", 0.0)};
    const HostGradient truth = golden_gradient(file, name + "/grad/", c);
    auto weights = [&](auto& dev, auto& m) { read_tensors(dev, file, "weights/", table(m.config, m.weights)); };
    for (const GradientRun& run :
         expect_golden<T>(truth, numbers("loss", 0.0)[0], tolerance, c, batch, weights, objective_of(settings))) {
      for (const std::string ours : {"reward_chosen", "reward_rejected", "accuracy", "margin", "kl", "clip_fraction"}) {
        const std::string theirs = ours.starts_with("reward_") ? "rewards_" + ours.substr(7) : ours;
        const auto metric = numbers("metrics/" + theirs, 0.0);
        if (metric.empty()) continue;
        ASSERT_EQ(run.others.count(ours), 1u) << ours;
        EXPECT_NEAR(run.others.at(ours), metric[0], tolerance * std::max(1.0, std::abs(metric[0]))) << ours;
      }
    }
  }
}
TEST(Objective, TRLsFormulasInFloat64) {
  expect_golden_objectives<double>("qwen3", 1e-10);
  expect_golden_objectives<double>("gpt2", 1e-10);
}
TEST(Objective, TRLsFormulasInFloat32) {
  expect_golden_objectives<float>("qwen3", 1e-5);
  expect_golden_objectives<float>("gpt2", 1e-5);
}

TEST(Objective, DpoBeginsAtTheReferenceModel) {
  const Batch batch = setting("llama2").batch;
  std::vector<double> w;
  Measures m = measure_pairs({.kind = ObjectiveKind::dpo}, batch, Counts(batch), batch.reference, w);
  EXPECT_NEAR(m.loss, std::log(2), 1e-12);
  EXPECT_NEAR(m.others["accuracy"], 0.5, 1e-12) << "a tie counts one half";
}

// The loss is finite even far from the reference model.
TEST(Objective, DpoSurvivesExtremeScores) {
  Batch batch = setting("llama2").batch;
  for (double far : {-1e6, 1e6}) {
    std::vector<double> logp(batch.targets.size()), w;
    for (std::size_t t = 0; t < logp.size(); ++t)
      logp[t] = batch.targets[t] < 0 ? 0 : batch.reference[t] + far * (t % 2);
    for (double smoothing : {0.0, 0.1}) {
      const Objective o{.kind = ObjectiveKind::dpo, .label_smoothing = smoothing};
      EXPECT_TRUE(std::isfinite(measure_pairs(o, batch, Counts(batch), logp, w).loss));
      for (double x : w) EXPECT_TRUE(std::isfinite(x));
    }
  }
}

TEST(Objective, RefusesBatchesWithMissingData) {
  const Batch good = setting("llama2").batch;
  const Objective dpo{.kind = ObjectiveKind::dpo}, grpo{.kind = ObjectiveKind::grpo, .kl = 0.1};
  validate(dpo, good);
  validate(grpo, good);
  auto refused = [&](const Objective& o, auto&& change) {
    Batch bad = good;
    change(bad);
    EXPECT_THROW(validate(o, bad), Error);
  };
  refused(dpo, [](Batch& b) { b.reference.clear(); });
  refused(grpo, [](Batch& b) { b.reference.clear(); });
  refused(grpo, [](Batch& b) { b.advantages.clear(); });
  refused(dpo, [](Batch& b) { b.append({1, 2, 3}, 4); });
  for (const Objective& o : {dpo, grpo}) {
    refused(o, [](Batch& b) { std::fill_n(b.targets.begin(), 5, -1); });  // the first document: an empty completion
  }
  Batch bad = good;
  bad.reference[7] = NAN;
  EXPECT_THROW(validate(families()[2].config, bad), Error);
  bad = good, bad.old.pop_back();
  EXPECT_THROW(validate(families()[2].config, bad), Error);
}

}  // namespace
}  // namespace streambp
