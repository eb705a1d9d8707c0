// The options of a training run.
#pragma once

#include <cmath>
#include <filesystem>

#include "commands/device_options.h"
#include "commands/grpo_options.h"
#include "commands/memory_options.h"
#include "commands/objective_options.h"
#include "commands/part_options.h"
#include "commands/rank_options.h"
#include "commands/step_progress.h"
#include "data/documents/tokenised.h"
#include "training/checkpoint_timer.h"

namespace streambp {

// In the order of RateSchedule.
inline const std::vector<std::string> kSchedules = {"cosine", "linear", "constant", "wsd"};
// In the order of TooLong.
inline const std::vector<std::string> kTooLong = {"split", "truncate", "drop", "refuse"};

// What fine-tuning takes where no option says otherwise.
struct FineTuning {
  static constexpr double kEpochs = 3, kEpochsOfObjectives = 1;  // of sft; of dpo and grpo
  static constexpr double kObjectives = 0.1;                     // of the rate, for dpo and grpo
  static constexpr Index kWarmup = 20, kWarmupShare = 10;        // steps, but at most one in ten
  static constexpr Index kSteps = 100;                           // of an epoch: what small data is divided into
  static constexpr Index kPack = 4096;                           // tokens, or the share of a step if that is less
  static constexpr Index kFewSteps = 50;                         // in fewer, a run learns little
  static constexpr Index kEvaluations = 10;                      // of a run, at most, and after ten steps at least
  static constexpr double kEvaluating = 0.05;                    // of a run's time, about, at most

  // The rate that learns best falls with a model's width, and of adapters, which begin at zero, more slowly: measured on
  // small models, and near what others use for large ones (docs/log.md).
  static double rate(Index width, bool adapters) {
    const double narrower = 2048.0 / static_cast<double>(width);
    return adapters ? 4e-4 * narrower : 4e-5 * narrower * std::sqrt(narrower);
  }
};

struct TrainOptions {
  OptionTable table;
  ModelOptions model;
  DeviceOptions device;
  ObjectiveOptions objectives;
  GrpoOptions grpo;
  PartOptions part;
  MemoryOptions budget;
  RankOptions ranks;
  OptimizerSettings optimizer{.rate = 4e-3, .warmup = 20, .steps = 520};
  DataOptions tokens = {.progress = show_progress};

  std::vector<std::string> data, evaluation_data;
  std::string adapter, mode = "stream", out, prompt, too_long = "refuse", learn = "answers", save_dtype = "same",
                       schedule = "cosine";
  Index length = 768, pack = 0, batch = 2, micro_batches = 1, chunk = 512, stop_after = 0, sample_length = 700;
  Index evaluation_interval = 100, stop_when_worse = 0, checkpoint_interval = CheckpointTimer::kByTime;
  double epochs = FineTuning::kEpochs, evaluation_fraction = 0.05;
  std::uint64_t seed = 1;
  bool resume = false, resumed = false, tensorboard = false;
  bool repacked = false;  // resumed from a version that packed documents in another order
  Capacity room = 0;      // how much memory each rank may use

  TrainOptions(CLI::App& program, std::function<void()> run);

  // Completes the options, from `state_file` (the checkpoint or run.json of the run to resume) or with the defaults of
  // fine-tuning. Then refuses combinations that make no sense.
  void complete(const std::filesystem::path& state_file);

  bool given(const std::string& flag) const { return table.given(flag); }
  // Starts from a model directory; otherwise a model is trained from scratch.
  bool fine_tunes() const { return !model.model.empty(); }
  bool trains_adapters() const { return part.adapters() || !adapter.empty(); }
  // Samples completions itself.
  bool online_grpo() const { return objectives.objective == "grpo" && grpo.online(); }

 private:
  void add_data_options();
  void add_memory_options();
  void add_optimizer_options();
  void add_output_options();

  void restore(const std::filesystem::path& state_file);
  void check() const;
  void check_memory() const;
  void check_data() const;
  void check_grpo() const;
  void check_ranks() const;
};

}  // namespace streambp
