// The progress reports of a training run: on the console, and in metrics.jsonl.
#pragma once

#include <chrono>
#include <memory>

#include "commands/step_progress.h"
#include "commands/train_task.h"
#include "training/evaluation.h"

namespace streambp {

class TrainReport {
 public:
  // machine_rate: FLOP/s of large matrix products, the baseline of utilisation.
  TrainReport(RunDirectory& directory, const TrainOptions& options, Index first_step, double machine_rate)
      : directory_(directory), options_(options), first_step_(first_step), machine_rate_(machine_rate) {}

  // Called before the first step.
  void begin(const TrainTask& task) const;

  // Nothing for on-line GRPO: it samples its batches in the step, so how much it will compute is not known.
  std::unique_ptr<StepProgress> progress(Index step, const TrainTask& task, const std::vector<Batch>& batches,
                                         DeviceBase& device) const;
  void step(Index step, const std::vector<Batch>& batches, const StepResult& result, const DeviceBase& device,
            double seconds);
  void evaluation(Index step, const Evaluation& evaluation, ObjectiveKind objective);
  void reward(Index step, double reward);

 private:
  using Clock = std::chrono::steady_clock;

  RunDirectory& directory_;
  const TrainOptions& options_;
  const Index first_step_;
  const double machine_rate_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace streambp
