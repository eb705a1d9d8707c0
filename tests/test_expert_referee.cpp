// The referee of mixtures of experts.
#include "tests/referees.h"

namespace streambp {
namespace {

// Two layers of four experts. Nobody chooses expert 2: its logits are those of experts 0 and 1, which come first.
class ExpertReferees : public SmallReferees {
 protected:
  void SetUp() override {
    correct.config = make_config("qwen3_moe", {13, 8, 2, 2, 1, 4, 12, 0, false});
    correct.config.experts = 4, correct.config.expert_mlp = 5;
    SmallReferees::SetUp();
    save_random_model(dir / "model", correct.config, [](Model<float>& m) {
      for (Layer<float>& layer : m.weights.layers) {
        const Matrix<float>& router = layer.routed.router.weight;
        for (const Index e : {1, 2}) std::copy_n(router.row(0), router.cols, router.row(e));
      }
    });
    correct.step.batches = {correct.step.batches[1]}, correct.step.files = 1;
  }

  // change(name, its numbers for expert 3) of the experts of layer 1, and whatever(name, all numbers) of other tensors
  template <class F, class Other>
  CaseGradients::Result changed(F&& change, Other&& other) {
    CaseGradients::Result wrong = in_float32(correct);
    for (std::size_t i = 0; i < wrong.values.size(); ++i) {
      const Parameter& p = wrong.parameters[i];
      std::span<double> values = wrong.values[i];
      if (of_experts(p.name) && p.name.starts_with("model.layers.1."))
        change(p.name, values.last(values.size() / 4));
      else
        other(p.name, values);
    }
    return wrong;
  }
};

constexpr auto kNothing = [](const std::string&, std::span<double>) {};
constexpr auto kZero = [](const std::string&, std::span<double> values) { std::ranges::fill(values, 0); };

TEST_F(ExpertReferees, NameAnExpertWithoutAGradient) {
  write(correct.config, in_float32(correct));
  EXPECT_TRUE(is_right(correct, gradients)) << "an expert that nobody chooses";
  write(correct.config, changed(kZero, kNothing));
  with_referee(correct, gradients, {{DType::f32}}, [](Referee& referee) {
    const auto multiple = referee.multiple();
    ASSERT_TRUE(multiple && multiple->factor == 0);
    EXPECT_EQ(multiple->names, (std::vector<std::string>{"model.layers.1.mlp.experts.down_proj",
                                                         "model.layers.1.mlp.experts.gate_up_proj"}));
    for (const std::string& name : multiple->names) EXPECT_EQ(referee.still_experts(name), std::set<Index>{3}) << name;
  });
}

// What lies below an expert that is detached with its input is wrong, too.
TEST_F(ExpertReferees, NameAnExpertThatIsDetached) {
  const auto twice_below = [](const std::string& name, std::span<double> values) {
    if (name.starts_with("model.layers.0."))
      for (std::size_t i = 0; i < values.size(); i += 2) values[i] *= 2;
  };
  write(correct.config, changed(kZero, twice_below));
  with_referee(correct, gradients, {{DType::f32}}, [](Referee& referee) {
    EXPECT_FALSE(referee.multiple());
    EXPECT_EQ(referee.first_wrong(), "model.layers.1.mlp.experts.down_proj");
    EXPECT_TRUE(referee.is_zero(referee.first_wrong()));
    EXPECT_FALSE(referee.is_zero("model.layers.0.mlp.experts.down_proj"));
  });
}

TEST_F(ExpertReferees, DoNotCallAnExpertStillIfOthersAreWrong) {
  const auto half = [](const std::string&, std::span<double> values) {
    for (double& x : values) x *= 0.5;
  };
  write(correct.config, changed(half, kNothing));
  with_referee(correct, gradients, {{DType::f32}},
               [](Referee& referee) { EXPECT_FALSE(referee.is_zero(referee.first_wrong())); });
}

// As transformers 5.17 with expert parallelism. scripts/check_referee.py judges a step of it.
TEST_F(ExpertReferees, NameWhatRoutersLearnFromOtherRanks) {
  TrainingCase wrong = correct;
  ASSERT_TRUE(named("router-foreign-slots").apply(wrong));
  wrong.wrong.expert_ranks = 4;
  const double loss = gradients.compute(correct, {DType::f64}).loss;
  EXPECT_NEAR(gradients.compute(wrong, {DType::f64}).loss, loss, 1e-12);
  expect_found(wrong, "router-foreign-slots", "with experts on 4 ranks");
}

// Weights are large enough for numbers beyond the clamp, and for sinks that matter.
class GptOssReferees : public SmallReferees {
 protected:
  void SetUp() override {
    correct.config = make_config("gpt_oss", {13, 8, 2, 2, 1, 4, 12, 0, false});
    SmallReferees::SetUp();
    save_random_model(dir / "model", correct.config, [](Model<float>& m) {
      for (const auto& e : table(m.config, m.weights))
        if (of_experts(e.parameter.name) || e.parameter.name.ends_with("sinks"))
          for (Index i = 0; i < e.matrix->size(); ++i) e.matrix->data[i] *= 12;
    });
    correct.step.batches = {correct.step.batches[1]}, correct.step.files = 1;
  }
};

TEST_F(GptOssReferees, NameEachDefect) {
  write(correct.config, in_float32(correct));
  EXPECT_TRUE(is_right(correct, gradients));
  for (const char* name : {"sinks-missing", "sinks-scaled", "gate-up-swapped", "gate-up-halves", "clamp-missing"}) {
    TrainingCase wrong = correct;
    ASSERT_TRUE(named(name).apply(wrong)) << name;
    expect_found(wrong, name);
  }
}

TEST_F(GptOssReferees, NameTheSinksOfOneLayerThatGetNoGradient) {
  CaseGradients::Result wrong = in_float32(correct);
  for (std::size_t i = 0; i < wrong.values.size(); ++i)
    if (wrong.parameters[i].name == "model.layers.1.self_attn.sinks") std::ranges::fill(wrong.values[i], 0);
  write(correct.config, wrong);
  with_referee(correct, gradients, {{DType::f32}}, [](Referee& referee) {
    const auto multiple = referee.multiple();
    ASSERT_TRUE(multiple && multiple->factor == 0);
    EXPECT_EQ(multiple->names, std::vector<std::string>{"model.layers.1.self_attn.sinks"});
  });
}

}  // namespace
}  // namespace streambp
