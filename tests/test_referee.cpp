// The referee: which defect explains another trainer's gradient.
#include "tests/referees.h"

namespace streambp {
namespace {

const std::vector<Types> kAllTypes = {{DType::f32}, {DType::bf16}, {DType::bf16, false}};

std::vector<Family> judged_families() {
  const std::set<std::string> chosen =
      sized<std::set<std::string>>({"gpt2", "qwen3", "phi3", "gemma3", "granite_hybrid"}, {"llama_biases"});
  std::vector<Family> all = families();
  std::erase_if(all, [&](const Family& family) { return !chosen.contains(family.name); });
  if (!kSanitized) all.push_back({"qwen3_5", small_hybrid()});
  return all;
}

class RefereesOfFamilies : public Referees, public testing::WithParamInterface<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, RefereesOfFamilies, testing::ValuesIn(judged_families()), PrintFamily());

// The gradient of a defect, computed in float32: the referee names this defect, or one with the same gradient.
TEST_P(RefereesOfFamilies, NameEveryDefect) {
  const auto& [family, c] = GetParam();
  save_random_model(dir / "model", c);
  CaseGradients gradients([&](Engine& engine) { engine.load(dir / "model"); });
  const TrainingCase correct{c, recorded(c)};
  int seen = 0;
  for (const Defect& defect : all_defects()) {
    TrainingCase wrong = correct;
    if (defect.solved || !defect.apply(wrong) || wrong.needs_oracle()) continue;
    write(c, gradients.compute(wrong, {DType::f32}));
    const std::vector<Explanation> found = explain(correct, gradients);
    if (found
            .empty()) {  // this step cannot show it, because positions are relative, or documents shorter than the window
      EXPECT_TRUE(std::set<std::string>({"positions-joined", "padding-positions", "window-ignored", "window-short",
                                         "window-long", "score-scale"})
                      .contains(defect.name))
          << defect.name;
      continue;
    }
    ++seen;
    const auto names = [&](const Explanation& e) { return e.defects.size() == 1 && e.defects[0] == &defect; };
    EXPECT_TRUE(names(found.front())) << defect.name;
    EXPECT_EQ(found.front().factor, 1) << defect.name;
  }
  EXPECT_GE(seen, 14);
}

TEST_F(SmallReferees, AcceptACorrectGradientInEveryType) {
  for (const Types types : {Types{DType::f64}, Types{DType::f32}, Types{DType::bf16}, Types{DType::bf16, false}}) {
    write(correct.config, gradients.compute(correct, types));
    const std::size_t explained =
        with_referee(correct, gradients, kAllTypes, [](Referee& referee) { return referee.explained(); });
    EXPECT_LE(explained, types.dtype == DType::bf16 ? 2u : 0u) << types.name();
  }
}

TEST_F(SmallReferees, KnowFactorsWithAMeaning) {
  const auto n = static_cast<double>(correct.step.targets());
  for (const auto& [factor, said] : {std::pair{-1.0, "wrong sign"},
                                     {0.5, "divided by the 2 ranks"},
                                     {n / (n - 1), "one learned token too few"},
                                     {1024.0, "loss scale of 1024"}}) {
    const auto all = factors_of(correct.step);
    const auto found = std::ranges::find(all, factor, &Factor::value);
    ASSERT_NE(found, all.end()) << said;
    EXPECT_PRED2(contains, found->meaning, said);
  }
}

TEST_F(SmallReferees, NameFactorsAlsoOfDefects) {
  TrainingCase means = correct;
  ASSERT_TRUE(named("micro-batch-means").apply(means));
  for (const auto& [of, factor, said] :
       {std::tuple{correct, static_cast<double>(correct.step.targets()), "the sum over the"},
        {means, 4.0, "not divided by the 4 micro-batches"}}) {
    CaseGradients::Result wrong = in_float32(of);
    for (auto& values : wrong.values)
      for (double& x : values) x *= factor;
    write(correct.config, wrong);
    const std::vector<Explanation> found = explain(correct, gradients, {{DType::f32}, {DType::bf16}});
    ASSERT_FALSE(found.empty()) << said;
    EXPECT_PRED2(contains, found.front().factor_meaning, said);
    EXPECT_EQ(found.front().defects.empty(), of.mean == MeanOver::step) << said;
  }
}

// zero_grad() between micro-batches: each rank keeps its last one. Computed without the defect's own code.
TEST_F(SmallReferees, NameWhatTwoRanksClear) {
  TrainingCase wrong = correct;
  wrong.step.batches = {correct.step.batches[1], correct.step.batches[3]};
  write(correct.config, in_float32(wrong));
  EXPECT_EQ(explain(correct, gradients).front().defects, std::vector<const Defect*>{&named("last-micro-batch")});
}

// A gradient that is exactly zero, of one learned token, and of noise.
TEST_F(SmallReferees, DoNotAcceptWhatNothingExplains) {
  CaseGradients::Result wrong = in_float32(correct);
  for (auto& values : wrong.values) std::ranges::fill(values, 0);
  write(correct.config, wrong);
  const std::vector<Explanation> zero = explain(correct, gradients);
  EXPECT_TRUE(zero.front().factor == 0 && zero.front().factor_meaning == "it is zero");
  correct.step.batches.resize(1);
  Batch& batch = correct.step.batches[0].batch;
  for (std::size_t t = 0; t < batch.targets.size(); ++t) {
    if (t != 30) batch.targets[t] = -1;
    batch.advantages[t] = batch.targets[t] >= 0;
  }
  ASSERT_EQ(correct.step.targets(), 1);
  write(correct.config, in_float32(correct));
  EXPECT_TRUE(explain(correct, gradients).empty());
  for (auto& values : wrong.values)
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = Random(1).normal(i);
  write(correct.config, wrong);
  EXPECT_TRUE(explain(correct, gradients).empty());
}

// Defects of different groups: the loss's mean and labels, documents and positions, the model.
TEST_P(RefereesOfFamilies, NameRandomPairsOfDefects) {
  const auto& [family, c] = GetParam();
  save_random_model(dir / "model", c);
  CaseGradients gradients([&](Engine& engine) { engine.load(dir / "model"); });
  const TrainingCase correct{c, recorded(c)};
  const auto group = [](const Defect* d) {
    const auto before = [d](const std::string& name) {
      return d < &*std::ranges::find_if(
                     all_defects(), [&](const Defect& other) { return other.name == name; });
    };
    return before("documents-joined") ? 0 : before("window-ignored") ? 1 : 2;
  };
  std::vector<std::vector<const Defect*>> pairs;
  for (const Defect& a : all_defects()) {
    for (const Defect& b : all_defects()) {
      TrainingCase wrong = correct;
      if (a.solved || b.solved) continue;
      if (group(&a) < group(&b) && a.apply(wrong) && b.apply(wrong) && !wrong.needs_oracle()) pairs.push_back({&a, &b});
    }
  }
  ASSERT_GE(pairs.size(), 20u);
  const Index wanted = from_environment("STREAMBP_PAIRS", sized(2, 1));
  Index seen = 0, named = 0;
  for (std::uint64_t i = 0; seen < wanted && i < 10 * pairs.size(); ++i) {
    const auto& pair = pairs[Random(1).below(pairs.size(), i)];
    TrainingCase wrong = correct;
    for (const Defect* defect : pair) defect->apply(wrong);
    write(c, gradients.compute(wrong, {DType::f32}));
    const std::vector<Explanation> found = explain(correct, gradients);
    if (found.empty() ? is_right(correct, gradients) : found.front().defects.size() < 2) continue;  // at most one shows
    ++seen;
    const bool listed = std::ranges::any_of(found, [&](const Explanation& e) { return e.defects == pair; });
    named += listed;
    if (!listed) std::printf("not named: %s and %s\n", pair[0]->name, pair[1]->name);
  }
  std::printf("%ld of %ld pairs named\n", named, seen);
  EXPECT_EQ(seen, wanted);
  EXPECT_GE(named * 100, seen * 85);
}

TEST_F(SmallReferees, NameTensorsThatAreMissingOrCountedTwice) {
  for (const double factor : {0.0, 2.0, 0.75}) {
    CaseGradients::Result wrong = in_float32(correct);
    std::size_t changed = 0;
    for (std::size_t i = 0; i < wrong.values.size(); ++i) {
      if (!wrong.parameters[i].name.starts_with("model.layers.1.")) continue;
      ++changed;
      for (double& x : wrong.values[i]) x *= factor;
    }
    write(correct.config, wrong);
    const auto multiple =
        with_referee(correct, gradients, {{DType::f32}}, [](Referee& referee) { return referee.multiple(); });
    ASSERT_TRUE(multiple) << factor;
    EXPECT_NEAR(multiple->factor, factor, 1e-5);
    EXPECT_EQ(multiple->names.size(), changed);
  }
}

// The head's part of a tied embedding is the whole gradient of rows that the step does not read.
TEST_F(SmallReferees, NameThePartOfATiedEmbeddingThatIsMissing) {
  correct.config = make_config("qwen2", {61, 16, 2, 2, 1, 8, 24, 0, true});
  save_random_model(dir / "tied", correct.config);
  CaseGradients of_tied([this](Engine& engine) { engine.load(dir / "tied"); });
  std::set<std::int32_t> read;
  for (RecordedBatch& b : correct.step.batches)
    for (const std::int32_t token : b.batch.tokens) read.insert(token);
  for (const std::string part : {"the head's part", "the embedding's part"}) {
    CaseGradients::Result wrong = of_tied.compute(correct, {DType::f32});
    for (std::size_t i = 0; i < wrong.values[0].size(); ++i) {
      const bool is_read = read.contains(static_cast<std::int32_t>(i / 16));
      wrong.values[0][i] *= is_read ? 0.5 : part == "the head's part" ? 0 : 1;
    }
    write(correct.config, wrong);
    const auto found =
        with_referee(correct, of_tied, {{DType::f32}}, [](Referee& referee) { return referee.wrong_tied_part(); });
    EXPECT_EQ(found, part == "the head's part" ? Referee::TiedPart::head : Referee::TiedPart::embedding);
  }
}

// What only the oracle computes: a strength and its place follow from the gradient.
TEST_F(SmallReferees, SolveForTheStrengthAndThePlaceOfADefect) {
  correct.config = make_config("qwen3", {13, 8, 2, 4, 2, 4, 12, 0, false});
  save_random_model(dir / "model", correct.config);
  correct.step.batches = {correct.step.batches[1], correct.step.batches[2]}, correct.step.files = 1;
  for (RecordedBatch& b : correct.step.batches)
    for (auto* tokens : {&b.batch.tokens, &b.batch.targets})
      for (std::int32_t& token : *tokens) token = token < 0 ? token : token % 13;
  for (const auto& [name, place, strength, said] : {std::tuple{"label-smoothing", -1, 0.1, "strength 0.1"},
                                                    {"branch-keys", 1, 0.5, "times 0.5, in layer 1"},
                                                    {"branch-mlp-skip", -1, -1.0, "times 2, in all layers"},
                                                    {"micro-batch-scaled", 1, 1.0, "micro-batch 1 2 times"},
                                                    {"attention-window", 3, 1.0, "of 3 tokens"},
                                                    {"heads-in-turn", -1, 1.0, ""}}) {
    TrainingCase wrong = correct;
    ASSERT_TRUE(named(name).apply(wrong)) << name;
    wrong.wrong.strength = strength;
    const std::string what = name;
    if (what == "micro-batch-scaled") wrong.scaled = place;
    if (what == "attention-window") wrong.config.window = place, wrong.wrong = {};
    if (what == "branch-keys") wrong.wrong.layer = place;
    expect_found(wrong, name, said);
  }
}

// If only one defect of a pair is known, it is named, with the last tensor that it explains.
TEST_F(SmallReferees, NameTheKnownHalfOfAPair) {
  correct.step.batches = {correct.step.batches[1], correct.step.batches[2]}, correct.step.files = 1;
  TrainingCase means = correct;
  ASSERT_TRUE(named("micro-batch-means").apply(means));
  CaseGradients::Result wrong = in_float32(means);
  for (std::size_t i = 0; i < wrong.values.size(); ++i)
    for (std::size_t j = 0; j < wrong.values[i].size(); ++j)
      if (wrong.parameters[i].name.starts_with("model.layers.0.")) wrong.values[i][j] *= 1 + Random(1).normal(j);
  write(correct.config, wrong);
  const std::vector<Explanation> found = explain(correct, gradients);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.front().defects, std::vector<const Defect*>{&named("micro-batch-means")});
  EXPECT_EQ(found.front().leading, 2u + 12u);  // the head, the last norm, layer 1
}

// bfloat16 sums lose more with every micro-batch. However many there are, that excuses neither a factor nor noise.
TEST_F(SmallReferees, NoNumberOfMicroBatchesExcusesAWrongGradient) {
  correct.config = make_config("qwen2", {13, 8, 1, 1, 1, 8, 8, 0, false});
  save_random_model(dir / "model", correct.config);
  struct Case {
    int micro_batches;
    bool different;
    double factor;  // 0: noise
  };
  for (const auto& [micro_batches, different, factor] :
       {Case{64, false, 0.9}, Case{64, false, 1}, Case{512, false, 2}, Case{1000, false, 0}, Case{1000, true, 1.5}}) {
    correct.step = {};
    for (int i = 0; i < micro_batches; ++i) {
      RecordedBatch b;
      b.batch = packed(correct.config, {3}, different ? i : 1);
      for (const std::int32_t target : b.batch.targets) b.batch.advantages.push_back(target >= 0);
      b.rows.assign(3, 0), b.columns = {0, 1, 2}, b.padded_size = 3;
      correct.step.batches.push_back(b);
    }
    correct.step.files = 1;
    // The trainer's rounding is not ours.
    CaseGradients::Result theirs = gradients.compute(correct, {DType::f32});
    for (std::size_t i = 0; i < theirs.values.size(); ++i) {
      std::vector<double>& values = theirs.values[i];
      const double size = std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0) /
                                    static_cast<double>(values.size()));
      for (std::size_t j = 0; j < values.size(); ++j)
        values[j] = factor * values[j] + (factor > 0 ? 0.002 : 1) * size * Random(1, i).normal(j);
    }
    write(correct.config, theirs);
    const bool accepted = with_referee(correct, gradients, kAllTypes, [](Referee& referee) {
      return referee.explained() < referee.roundings().size() && !referee.undecided();
    });
    EXPECT_EQ(accepted, factor == 1) << micro_batches << " micro-batches times " << factor;
  }
}

}  // namespace
}  // namespace streambp
