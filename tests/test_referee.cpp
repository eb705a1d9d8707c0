// The referee: another trainer's step and gradient in files, and which defect explains the gradient.
#include "training/verify/referee.h"

#include "tests/byte_model.h"
#include "tests/recorded.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

using Ints = std::vector<std::int64_t>;
using Reals = std::vector<double>;

class RecordedSteps : public TemporaryDirectory {
 protected:
  Config config = make_config("llama", {10, 16, 1, 2, 1, 8, 16, 0, false});

  std::string path(const std::string& name = "batch") const { return (dir / (name + ".safetensors")).string(); }
  TensorFile file(const std::map<std::string, std::string>& metadata = {}) const {
    return TensorFile(path(), metadata);
  }
  RecordedStep step() const { return RecordedStepReader(config).read({path()}); }
  Batch batch() const { return step().batches.at(0).batch; }
};

TEST_F(RecordedSteps, LabelsAreShiftedWithinDocuments) {
  file()
      .add<std::int64_t>("input_ids", {1, 2, 3, 4, 5, 6}, {2, 3})
      .add<std::int64_t>("labels", {1, -100, 3, 4, 5, 6}, {2, 3})
      .write();
  const RecordedStep s = step();
  const Batch& b = s.batches[0].batch;
  EXPECT_EQ(b.tokens, (Tokens{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(b.targets, (Tokens{-1, 3, -1, 5, 6, -1}));
  EXPECT_EQ(b.key_begin, (Tokens{0, 0, 0, 3, 3, 3}));
  EXPECT_EQ(b.positions, (Tokens{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(b.advantages, (Reals{0, 1, 0, 1, 1, 0}));
  EXPECT_EQ(s.outside, 2);
  EXPECT_EQ(s.targets(), 3);
}

TEST_F(RecordedSteps, LabelsMayBeShiftedAlready) {
  file({{"labels", "shifted"}, {"reduction", "sum"}})
      .add<std::int64_t>("input_ids", {1, 2, 3})
      .add<std::int64_t>("labels", {2, -1, 7})
      .write();
  EXPECT_EQ(batch().targets, (Tokens{2, -1, 7}));
  EXPECT_EQ(step().reduction, Reduction::sum);
}

TEST_F(RecordedSteps, PaddingIsLeftOut) {
  file()
      .add<std::int64_t>("input_ids", {0, 1, 2, 3, 4, 0}, {2, 3})
      .add<std::int64_t>("attention_mask", {0, 1, 1, 1, 1, 0}, {2, 3})
      .add<std::int64_t>("labels", {-100, 1, 2, 3, 4, -100}, {2, 3})
      .write();
  EXPECT_EQ(batch().tokens, (Tokens{1, 2, 3, 4}));
  EXPECT_EQ(batch().targets, (Tokens{2, -1, 4, -1}));
  EXPECT_EQ(batch().positions, (Tokens{0, 1, 0, 1}));
  EXPECT_EQ(step().batches[0].padded_size, 6);
}

TEST_F(RecordedSteps, DocumentsOfARowAreFoundInEveryForm) {
  const Tokens begins{0, 0, 2, 2, 2};
  const auto with = [&](const std::string& name, const Ints& values) {
    file()
        .add<std::int64_t>("input_ids", {1, 2, 3, 4, 5}, {1, 5})
        .add<std::int64_t>("labels", {1, 2, 3, 4, 5}, {1, 5})
        .add(name, values, name == "cu_seqlens" ? std::vector<Index>{-1} : std::vector<Index>{1, 5})
        .write();
    EXPECT_EQ(batch().key_begin, begins) << name;
    EXPECT_EQ(batch().targets, (Tokens{2, -1, 4, 5, -1})) << name;
    EXPECT_EQ(step().outside, 2) << name;
    EXPECT_PRED2(contains, step().bounds, name);
  };
  with("position_ids", {0, 1, 0, 1, 2});
  with("cu_seqlens", {0, 2, 5});
  with("document_ids", {7, 7, 3, 3, 3});
  with("attention_mask", {1, 1, 2, 2, 2});
}

TEST_F(RecordedSteps, SeveralMicroBatchesAndRanks) {
  for (const char* name : {"a", "b"})
    TensorFile(path(name))
        .add<std::int64_t>("0.input_ids", {1, 2})
        .add<std::int64_t>("0.labels", {1, 2})
        .add<std::int64_t>("1.input_ids", {3, 4, 5})
        .add<std::int64_t>("1.labels", {3, 4, 5})
        .write();
  const RecordedStep s = RecordedStepReader(config).read({path("a"), path("b")});
  ASSERT_EQ(s.batches.size(), 4u);
  EXPECT_EQ(s.files, 2u);
  EXPECT_EQ(s.batches[2].file, 1u);
  EXPECT_EQ(s.targets(), 6);
}

TEST_F(RecordedSteps, WeightsMayBeGiven) {
  file({{"labels", "shifted"}})
      .add<std::int64_t>("input_ids", {1, 2, 3})
      .add<std::int64_t>("labels", {2, 3, -100})
      .add<double>("weights", {0.5, -0.25, 9})
      .write();
  EXPECT_EQ(batch().advantages, (Reals{0.5, -0.25, 0}));
  EXPECT_EQ(weighted({config, step()})[0].advantages, (Reals{0.5, -0.25, 0}));
}

TEST_F(RecordedSteps, HostileFilesAreRefusedByName) {
  const auto refused = [&](TensorFile f, const std::string& said) {
    f.write();
    EXPECT_ERROR(step(), said);
    EXPECT_ERROR(step(), path());
  };
  const auto ids = [&] { return file().add<std::int64_t>("input_ids", {1, 2, 3, 4}, {2, 2}); };
  const auto both = [&] { return ids().add<std::int64_t>("labels", {1, 2, 3, 4}, {2, 2}); };
  refused(file().add<std::int64_t>("labels", {1}), "has neither \"input_ids\"");
  refused(ids(), "no tensor \"labels\"");
  refused(file().add<std::int64_t>("input_ids", {}, {0, 4}), "is empty");
  refused(file().add<std::int64_t>("input_ids", {1, 2}, {1, 1, 2}), "rows x length");
  refused(ids().add<std::int64_t>("labels", {1, 2}), "has shape");
  refused(ids().add<std::int64_t>("labels", {1, 2, 3, 10}, {2, 2}), "row 1, column 1: label 10");
  refused(file().add<std::int64_t>("input_ids", {1, -2}).add<std::int64_t>("labels", {1, 2}), "token -2");
  refused(file().add<std::int64_t>("input_ids", {1, Index{1} << 40}).add<std::int64_t>("labels", {1, 2}),
          "out of range");
  refused(file().add<double>("input_ids", {1, 2}).add<std::int64_t>("labels", {1, 2}),
          "cannot read type F64 as integers");
  refused(ids().add<std::int64_t>("labels", {-1, -1, -1, -1}, {2, 2}), "no token of the step is learned");
  refused(both().add<std::int64_t>("attention_mask", {1, 1, 1, 0}, {2, 2}), "padding has the label 4");
  refused(ids()
              .add<std::int64_t>("labels", {-1, -1, -1, -1}, {2, 2})
              .add<std::int64_t>("attention_mask", {0, 0, 0, 0}, {2, 2}),
          "masks all tokens");
  refused(both().add<std::int64_t>("cu_seqlens", {0, 2, 2, 4}), "a document is empty");
  refused(both().add<std::int64_t>("cu_seqlens", {0, 3}), "end with 4");
  refused(both().add<std::int64_t>("position_ids", {0, -1, 0, 1}, {2, 2}), "position -1");
  refused(both().add<double>("loss_weights", {1, NAN, 1, 1}, {2, 2}), "row 0, column 1: is nan");
  refused(both().add<double>("loss_weights", {1, -1, 1, 1}, {2, 2}), "negative");
  refused(file().add<std::int64_t>("input_ids", {1}).add<std::int64_t>("labels", {1}, std::vector<Index>()),
          "has shape");
  refused(both().add<std::int64_t>("attention_mask", {1, 0, 1, 1}, {1, 4}), "has shape");
  refused(file()
              .add<std::int64_t>("input_ids", {1, 2, 3})
              .add<std::int64_t>("labels", {1, -1, 3})
              .add<std::int64_t>("attention_mask", {1, 0, 1}),
          "padding must be at the ends");
  refused(both().add<std::int64_t>("atention_mask", {1, 1, 1, 1}, {2, 2}), "is not a tensor of a micro-batch");
  refused(both().add<std::int64_t>("2.input_ids", {1, 1}), "is not a tensor of a micro-batch");
  refused(both().add<double>("loss_weights", {0, 0, 0, 0}, {2, 2}), "a weight of 0");
  refused(both().add<std::int64_t>("cu_seqlens", Ints(9, 0)), "more bounds than tokens");
  both().write();
  EXPECT_ERROR(RecordedStepReader(config).read({path(), path()}), "names a file twice");
  refused(file({{"reduction", "average"}}).add<std::int64_t>("input_ids", {1}),
          "\"average\" is neither \"mean\" nor \"sum\"");
  write_file_atomically(path(), "");
  EXPECT_ERROR(step(), path());
}

TEST(RecordedNames, LoseWhatWrappersAdd) {
  const std::string layer = "model.layers.0.self_attn.q_proj";
  const std::string wrapped[] = {
      "module." + layer + ".weight", "_orig_mod.module." + layer + ".weight",
      "base_model.model." + layer + ".base_layer.weight",
      std::string("_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight")};
  for (const std::string& name : wrapped) EXPECT_EQ(unwrapped(name), layer + ".weight") << name;
  EXPECT_EQ(unwrapped("base_model.model." + layer + ".lora_A.default.weight"), layer + ".lora_A.weight");
  EXPECT_EQ(unwrapped("module.base_model.model." + layer + ".lora_B.weight"), layer + ".lora_B.weight");
  EXPECT_EQ(unwrapped("base_model.model.lm_head.modules_to_save.default.weight"), "lm_head.weight");
}

// --- Defects ---

// Two ranks with two micro-batches each, of unequal rows, some with several documents, some with prompts.
RecordedStep recorded(const Config& c) {
  RecordedStep step;
  std::uint64_t seed = 1;
  for (const std::vector<Lengths>& rows :
       std::vector<std::vector<Lengths>>{{{70, 20}, {31}}, {{12, 9, 40}}, {{33}, {50, 6}}, {{64, 25, 11}}}) {
    RecordedBatch b;
    b.file = step.batches.size() / 2;
    std::vector<Batch> of_rows;
    for (const Lengths& documents : rows) {
      of_rows.push_back(packed(c, documents, ++seed));
      for (Index t = 0; t < of_rows.back().size(); ++t)
        b.rows.push_back(static_cast<std::int32_t>(of_rows.size()) - 1),
            b.columns.push_back(static_cast<std::int32_t>(t) + 5);
    }
    b.batch = end_to_end(of_rows);
    for (const std::int32_t target : b.batch.targets) b.batch.advantages.push_back(target >= 0);
    b.padded_size = 2 * b.batch.size();
    step.batches.push_back(b);
  }
  step.files = 2;
  return step;
}

class Referees : public TemporaryDirectory {
 protected:
  void write(const Config& c, const CaseGradients::Result& gradient) const {
    Tensors<float> tensors(c);
    const Table<float> rows = trained(table(c, tensors));
    std::list<std::vector<float>> memory;
    allocate(memory, rows);
    Cpu host(0);
    for (std::size_t i = 0; i < rows.size(); ++i)
      host.upload(*rows[i].matrix, std::vector<float>(gradient.values[i].begin(), gradient.values[i].end()).data());
    SafetensorsWriter writer(path(), {});
    write_tensors(host, writer, "", rows);
    writer.finish();
  }
  std::string path() const { return (dir / "gradient.safetensors").string(); }

  // The referee's explanations of the gradient that was written; none if it is right.
  std::vector<Explanation> explain(const TrainingCase& correct, CaseGradients& gradients,
                                   const std::vector<Types>& roundings = {{DType::f32}}) const {
    const RecordedGradient recorded({path()}, correct.config);
    Referee referee(correct, DType::f64, recorded, gradients);
    referee.compare(gradients.compute(correct, {DType::f64}));
    for (const Types& types : roundings) referee.compute_rounding(types);
    if (referee.explained() == 0) return {};
    if (referee.explained() < referee.roundings().size()) return referee.explain_better();
    return referee.explain([](const std::string&, bool) { return true; });
  }
};

std::vector<Family> judged_families() {
  const std::set<std::string> chosen =
      sized<std::set<std::string>>({"gpt2", "qwen3", "phi3", "gemma3", "granite_hybrid"}, {"qwen2_untied"});
  std::vector<Family> all = families();
  std::erase_if(all, [&](const Family& family) { return !chosen.contains(family.name); });
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
    if (!defect.apply(wrong)) continue;
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

class SmallReferees : public Referees {
 protected:
  void SetUp() override {
    Referees::SetUp();
    save_random_model(dir / "model", correct.config);
    correct.step = recorded(correct.config);
  }
  CaseGradients::Result in_float32(const TrainingCase& c) { return gradients.compute(c, {DType::f32}); }
  const Defect& named(const std::string& name) const {
    return *std::ranges::find_if(all_defects(), [&](const Defect& d) { return d.name == name; });
  }

  TrainingCase correct{make_config("qwen2", {31, 16, 2, 2, 1, 8, 24, 0, false}), {}};
  CaseGradients gradients{[this](Engine& engine) { engine.load(dir / "model"); }};
};

TEST_F(SmallReferees, AcceptACorrectGradientInEveryType) {
  for (const Types types : {Types{DType::f64}, Types{DType::f32}, Types{DType::bf16}, Types{DType::bf16, false}}) {
    write(correct.config, gradients.compute(correct, types));
    const RecordedGradient recorded({path()}, correct.config);
    Referee referee(correct, DType::f64, recorded, gradients);
    referee.compare(gradients.compute(correct, {DType::f64}));
    for (const Types known : {Types{DType::f32}, Types{DType::bf16}, Types{DType::bf16, false}})
      referee.compute_rounding(known);
    EXPECT_LE(referee.explained(), types.dtype == DType::bf16 ? 2u : 0u) << types.name();
  }
}

TEST_F(SmallReferees, NameFactorsAlsoOfDefects) {
  const auto n = static_cast<double>(correct.step.targets());
  TrainingCase means = correct;
  ASSERT_TRUE(named("micro-batch-means").apply(means));
  for (const auto& [of, factor, said] : {std::tuple{correct, n, "the sum over the"},
                                         {correct, -1.0, "wrong sign"},
                                         {correct, 0.5, "divided by the 2 ranks"},
                                         {correct, n / (n - 1), "one learned token too few"},
                                         {correct, 1024.0, "loss scale of 1024"},
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

TEST_F(SmallReferees, NamePairsOfDefects) {
  for (const auto& [a, b] : {std::pair{"rank-means", "documents-joined"}, {"prompt-learned", "rope-pairs"}}) {
    TrainingCase wrong = correct;
    ASSERT_TRUE(named(a).apply(wrong) && named(b).apply(wrong));
    write(correct.config, in_float32(wrong));
    const std::vector<Explanation> found = explain(correct, gradients);
    ASSERT_FALSE(found.empty()) << a << " and " << b;
    EXPECT_EQ(found.front().defects, (std::vector<const Defect*>{&named(a), &named(b)}));
  }
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
    const RecordedGradient recorded({path()}, correct.config);
    Referee referee(correct, DType::f64, recorded, gradients);
    referee.compare(gradients.compute(correct, {DType::f64}));
    referee.compute_rounding({DType::f32});
    const auto multiple = referee.multiple();
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
    const RecordedGradient recorded({path()}, correct.config);
    Referee referee(correct, DType::f64, recorded, of_tied);
    referee.compare(of_tied.compute(correct, {DType::f64}));
    referee.compute_rounding({DType::f32});
    EXPECT_EQ(referee.wrong_tied_part(),
              part == "the head's part" ? Referee::TiedPart::head : Referee::TiedPart::embedding);
  }
}

}  // namespace
}  // namespace streambp
