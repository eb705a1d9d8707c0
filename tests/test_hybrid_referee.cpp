// The referee of models with layers of several kinds.
#include "tests/referees.h"

namespace streambp {
namespace {

// Rows of a micro-batch lie one behind the other, but no trainer's convolution reads the row before.
TEST_F(SmallReferees, LeaksStayInTheirRow) {
  correct.config = make_config("lfm2", {31, 16, 3, 2, 1, 8, 24, 0, false});
  save_random_model(dir / "model", correct.config);
  const auto leak = [&] {
    TrainingCase one = correct;
    one.step.batches.resize(1), one.step.files = 1;
    const HostGradient right(one.config, gradients.compute(one, {DType::f64}).values);
    EXPECT_TRUE(named("convolution-leaks").apply(one));
    return HostGradient(one.config, gradients.compute(one, {DType::f64}).values).difference(right).relative;
  };
  EXPECT_GT(leak(), 1e-4);
  correct.step.batches[0].rows = correct.step.batches[0].batch.key_begin;  // a row for each document
  EXPECT_LT(leak(), kExact);
}

TEST_F(SmallReferees, FindTheChunksThatLoseWhatWasBeforeThem) {
  correct.config = make_config("lfm2", {13, 8, 3, 2, 1, 4, 12, 0, false});
  correct.step = recorded(correct.config);
  save_random_model(dir / "model", correct.config);
  correct.step.batches = {correct.step.batches[0], correct.step.batches[2]}, correct.step.files = 1;
  TrainingCase wrong = correct;
  ASSERT_TRUE(named("convolution-reset").apply(wrong));
  wrong.wrong.chunk = 32;
  expect_found(wrong, "convolution-reset", "every 32 rows");
}

class HybridReferees : public SmallReferees {
 protected:
  void SetUp() override {
    correct.config = small_hybrid();
    SmallReferees::SetUp();
    correct.step.batches = {correct.step.batches[1], correct.step.batches[2]}, correct.step.files = 1;
  }
};

// As trainers do that tell only attention where documents begin.
TEST_F(HybridReferees, NameBothLeaksOfADocument) {
  TrainingCase wrong = correct;
  ASSERT_TRUE(named("state-and-convolution-leak").apply(wrong));
  expect_found(wrong, "state-and-convolution-leak");
}

TEST_F(HybridReferees, SolveForThePlaceOfADefect) {
  correct.step.batches.resize(1);
  for (const auto& [name, said] :
       {std::pair{"branch-keys", "times 0.5, in layer 0"}, {"state-reset", "every 16 rows"}}) {
    TrainingCase wrong = correct;
    ASSERT_TRUE(named(name).apply(wrong)) << name;
    if (wrong.wrong.what == "branch-keys") wrong.wrong.layer = 0, wrong.wrong.strength = 0.5;
    expect_found(wrong, name, said);
  }
}

// The gradient of a decay is what remains of terms as large as those of beta. Other trainers round these terms in float32.
TEST_F(HybridReferees, AllowWhatFloat32LosesInADecay) {
  const auto judged = [&](double relative_to_beta) {
    CaseGradients::Result theirs = in_float32(correct);
    const auto of = [&](const std::string& name) -> std::vector<double>& {
      const auto is = [&](const Parameter& p) { return p.name == "model.layers.0.linear_attn." + name; };
      return theirs
          .values[static_cast<std::size_t>(std::ranges::find_if(theirs.parameters, is) - theirs.parameters.begin())];
    };
    const std::vector<double>& beta = of("in_proj_b.weight");
    of("dt_bias")[0] += relative_to_beta * std::sqrt(std::inner_product(beta.begin(), beta.end(), beta.begin(), 0.0));
    write(correct.config, theirs);
    return is_right(correct, gradients);
  };
  EXPECT_TRUE(judged(5e-6));
  EXPECT_FALSE(judged(1e-3));
}

// A local layer, and a global one with keys for values. No weight of a norm is as another, and layers scale their output.
class Gemma4Referees : public SmallReferees {
 protected:
  void SetUp() override {
    Config& c = correct.config = make_config("gemma4", {13, 8, 2, 2, 1, 4, 12, 0, true});
    c.local = {true, false}, c.wide = {false, true}, c.window = 16;
    SmallReferees::SetUp();
    save_random_model(dir / "model", c, [](Model<float>& m) {
      for (const auto& e : table(m.config, m.weights)) {
        const bool norm = e.parameter.name.ends_with("norm.weight"), scale = e.parameter.name.ends_with("layer_scalar");
        for (Index i = 0; i < e.matrix->size() && (norm || scale); ++i)
          e.matrix->data[i] *= scale ? 0.7F : 1 + 0.25F * static_cast<float>(i % 3);
      }
    });
    correct.step.batches = {correct.step.batches[1]}, correct.step.files = 1;
  }
};

TEST_F(Gemma4Referees, NameEachDefect) {
  write(correct.config, in_float32(correct));
  EXPECT_TRUE(is_right(correct, gradients));
  for (const char* name : {"value-norm-missing", "values-after-norm", "layer-scale-missing", "layer-scale-branches",
                           "norm-offset-added", "score-scale", "window-ignored", "all-layers-local"}) {
    TrainingCase wrong = correct;
    ASSERT_TRUE(named(name).apply(wrong)) << name;
    expect_found(wrong, name);
  }
}

}  // namespace
}  // namespace streambp
