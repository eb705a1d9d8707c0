// Another trainer's step, read from files in all their forms.
#include "referee/case_gradients.h"
#include "referee/recorded_gradient.h"
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
  for (const std::string& same : {path(), (dir / "." / "batch.safetensors").string()})
    EXPECT_ERROR(RecordedStepReader(config).read({path(), same}), "names this file twice");
  for (const char* factor : {"weights", "loss_weights"})
    refused(both().add<double>(factor, {1, 1e308, 1, 1}, {2, 2}), "row 0, column 1: a factor of 1e+308 is too large");
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

}  // namespace
}  // namespace streambp
