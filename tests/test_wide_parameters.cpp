// Some parameters of a bfloat16 model are in float32: in memory, in files, and for the optimizer.
#include "data/files/checkpoint.h"
#include "tests/commands.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

using Weights = std::vector<std::vector<double>>;

class WideParameters : public TemporaryDirectory {
 protected:
  using Run = Trainer<Cpu, BFloat16>;

  // The wide parameters, or all of them.
  Weights weights(Run& run, bool all = false) {
    Weights values;
    for (const Entry<BFloat16>& e : table(run.model.config, run.model.weights)) {
      if (!e.parameter.wide && !all) continue;
      EXPECT_EQ(e.wide != nullptr, e.parameter.wide);
      e.with_matrix([&](auto m) {
        const auto numbers = to_host(dev, m);
        values.emplace_back(numbers.begin(), numbers.end());
      });
    }
    return values;
  }
  // A model directory with all weights in this type, but the wide ones in another.
  ModelLayout layout(const std::string& dtype, const std::string& of_wide) {
    ModelLayout layout(config);
    for (const Parameter& p : parameters_of(config)) layout.dtypes[p.name] = p.wide ? of_wide : dtype;
    return layout;
  }
  static bool is_bfloat16(double x) { return static_cast<float>(BFloat16(static_cast<float>(x))) == x; }

  const Config config = make_config("qwen3_5", {40, 24, 4, 4, 2, 8, 36, 64, true});
  Cpu dev{std::size_t{1} << 24};
};

TEST_F(WideParameters, AreSavedAsTheyWereLoaded) {
  Run run(dev, config, 1, OptimizerKind::none), again(dev, config, 1, OptimizerKind::none);
  run.initialise(7, 0.1);
  for (const auto& values : weights(run)) EXPECT_FALSE(std::ranges::all_of(values, is_bfloat16));
  for (const char* folder : {"new", "copy"}) fs::create_directories(dir / folder);
  save_model(dev, dir / "new", run.model, layout("BF16", "F32"));
  load_model(dev, dir / "new", again.model);
  EXPECT_EQ(weights(again, true), weights(run, true));
  save_model(dev, dir / "copy", again.model, ModelLayout(dir / "new"));
  EXPECT_EQ(read_file(dir / "copy/model.safetensors"), read_file(dir / "new/model.safetensors"));
  again.initialise(8);
  save_model(dev, dir / "copy", run.model, ModelLayout(config));  // a new model
  load_model(dev, dir / "copy", again.model);
  EXPECT_EQ(weights(again, true), weights(run, true));
}

// The first step of AdamW moves a weight by the rate. This one is far below an ulp of bfloat16.
TEST_F(WideParameters, AreTrainedInFloat32) {
  const Batch batch = packed(config, {20, 9});
  constexpr double rate = 1e-5;
  StepSettings s{config, DType::bf16};
  for (const Place place : {Place::near, Place::far}) {
    for (const auto kind :
         {OptimizerKind::adamw, OptimizerKind::adamw_bf16, OptimizerKind::adamw_8bit, OptimizerKind::muon}) {
      s.places.optimizer = place, s.optimizer = kind;
      const Schedule schedule = schedule_for(Mode::stream, s, batch.size(), kTile);
      Cpu dev(plan(s, batch.size(), schedule).capacity());
      Run run(dev, config, batch.size(), {kind, s.places});
      run.initialise(1, 0.1);
      const Weights before = weights(run);
      run.step({batch}, schedule, {.rate = rate, .schedule = RateSchedule::constant, .clip = 0}, 1);
      const Weights after = weights(run);
      for (std::size_t i = 0; i < before.size(); ++i)
        for (std::size_t j = 0; j < before[i].size(); ++j)
          EXPECT_NEAR(std::abs(after[i][j] - before[i][j]), rate, 0.05 * rate) << static_cast<int>(kind);
    }
  }
}

// A checkpoint of a model in bfloat16 files also has their exact values.
TEST_F(WideParameters, AreExactInCheckpoints) {
  const Batch batch = packed(config, {20, 9});
  for (const char* of_wide : {"F32", "BF16"}) {
    const ModelLayout layout = this->layout("BF16", of_wide);
    Cpu dev(std::size_t{1} << 24);
    Run run(dev, config, batch.size(), OptimizerKind::adamw), again(dev, config, batch.size(), OptimizerKind::adamw);
    run.initialise(1, 0.1);
    run.step({batch}, Schedule::stream(kTile, kTile), {.rate = 1e-5}, 1);
    fs::create_directories(dir / of_wide);
    const Json state = {{"step", 1}, {"options", Json::object()}};
    save_checkpoint(dev, dir / of_wide, run.model, layout, *run.optimizer, state);
    load_checkpoint(dev, dir / of_wide / checkpoint_name(1), again.model, layout, *again.optimizer);
    EXPECT_EQ(weights(again, true), weights(run, true)) << of_wide;
  }
}

// Beside adapters, trained norms are in the adapters' files, also those that have no master weights.
TEST_F(WideParameters, AreSavedWithAdapters) {
  Config adapted = config;
  adapted.trained.emplace();
  for (const Parameter& p : parameters_of(config))
    if (p.name.ends_with("norm.weight")) adapted.trained->insert(p.name);
  const LoraSettings lora = {.rank = 2, .alpha = 4};
  adapted.adapters = new_adapters(adapted, lora);
  ModelLayout layout(config);
  layout.adapter_config = adapter_config(adapted, lora, dir / "base"), layout.base = dir / "base";
  fs::create_directories(layout.base), fs::create_directories(dir / "run");
  const Batch batch = packed(config, {20, 9});
  Cpu dev(std::size_t{1} << 24);
  Run run(dev, adapted, batch.size(), OptimizerKind::adamw), again(dev, adapted, batch.size(), OptimizerKind::adamw);
  run.initialise(1, 0.1);
  save_model(dev, layout.base, run.model, ModelLayout(config));
  run.step({batch}, Schedule::stream(kTile, kTile), {.rate = 1e-5}, 1);
  save_checkpoint(dev, dir / "run", run.model, layout, *run.optimizer, {{"step", 1}, {"options", Json::object()}});
  load_checkpoint(dev, dir / "run" / checkpoint_name(1), again.model, layout, *again.optimizer);
  EXPECT_EQ(weights(again, true), weights(run, true));
}

}  // namespace
}  // namespace streambp
