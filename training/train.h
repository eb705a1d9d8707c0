// A training run. Fill in a Run, make its engine, and call train(), the loop in train.cu; an Observer is told what happens.
// The program does the same: commands/train_task.h makes a Run from options, and commands/train_report.h is its Observer.
#pragma once

#include "data/documents/sources.h"
#include "data/files/run_directory.h"
#include "data/progress.h"
#include "training/checkpoint_timer.h"
#include "training/grpo/online_grpo.h"

namespace streambp {

struct Run {
  // The model
  fs::path model;          // the model to fine-tune, which a resumed run rarely needs; empty: it starts from scratch
  fs::path start;          // the model or checkpoint with the first weights; empty: random weights
  fs::path adapters;       // the first adapters of that model; empty: new ones, or none
  std::uint64_t seed = 1;  // of random weights

  // A step
  StepSettings settings;
  Schedule schedule;
  OptimizerSettings optimizer;
  Index batch = 1, length = 0, micro_batches = 1;  // documents or packs of a micro-batch, and their rows at most
  Index pack = 0;                                  // documents: rows that a pack is filled to; 0: `length`
  double steps_per_epoch = 0;                      // about; 0: the data has no epochs
  Capacity memory = 0;                             // of the whole run

  // The data
  Source source;
  std::shared_ptr<Documents> documents;    // fine-tuning: what `source` reads, but not for on-line GRPO
  std::unique_ptr<OnlineGrpo> grpo;        // on-line GRPO: makes its batches itself
  std::vector<fs::path> reference_caches;  // directories for reference log-probs

  // When to evaluate, save and stop, in steps
  Index evaluation_interval = 100;  // 0: only at the end
  Index checkpoint_interval = CheckpointTimer::kByTime;
  Index stop_after = 0;         // 0: after the last one
  Index stop_when_worse = 0;    // stop after so many evaluations in a row without a lower held-out loss; 0: never
  double checkpoint_bytes = 0;  // of a checkpoint, about

  // What checkpoints say
  std::optional<ModelLayout> layout;
  Json options;           // whatever the caller needs to resume
  std::string base;       // identifies the base of adapters
  std::string reference;  // identifies the reference model, where the objective needs one

  Index rows() const {  // of a micro-batch's stream
    return layout_of(settings.config).rows_of_packs(batch, length);
  }
  Index tokens_per_step() const {  // about
    return documents ? std::llround(documents->tokens_per_step()) : batch * length * micro_batches;
  }
  Index last_step() const { return stop_after > 0 ? std::min(stop_after, optimizer.steps) : optimizer.steps; }
  bool trains_adapters() const { return !settings.config.adapters.empty(); }
  // On-line GRPO samples at the beginning of a round, so a run can only resume between rounds.
  bool can_resume_after(Index step) const { return !grpo || grpo->begins_round(step + 1); }
  // Off-line groups without "old_logps" are assumed to be sampled by the reference model.
  bool needs_reference_logps() const {
    const bool sampled_by_it = documents && documents->file.groups() && documents->file.old().empty();
    return !grpo && (settings.objective.has_reference() || sampled_by_it);
  }
};

struct StepReport {
  Index step;
  const std::vector<Batch>& batches;
  const StepResult& result;
  const DeviceBase& device;
  double seconds;
};

// What a run tells its caller, on every rank. An error thrown by step() or evaluation() ends the run, which saves
// a checkpoint first.
class Observer {
 public:
  virtual ~Observer() = default;

  virtual void progress(const Progress&) {}  // of what precedes the first step
  // The weights are loaded. `first_step` steps are done already.
  virtual void begin(Index /*first_step*/) {}
  // From here on, the run asks whether to stop: at the end of a step, with a checkpoint.
  virtual void steps_begin() {}
  virtual bool interrupted() noexcept { return false; }
  // Between these two calls, the device computes the step.
  virtual void step_begins(Index /*step*/, const std::vector<Batch>&, DeviceBase&) {}
  virtual void step_ends() noexcept {}
  virtual void step(const StepReport&) {}
  virtual void evaluation(Index /*step*/, const Evaluation&) {}
  virtual void saved(Index /*step*/, const fs::path&) {}
  virtual void note(const std::string&) {}  // worth the user's attention
};

struct Ended {
  Index step;  // the last one
  bool interrupted;
};

// Runs the steps that are left, from the checkpoint in `directory` if there is one. All ranks must call it.
Ended train(Engine& engine, Run& run, RunDirectory& directory, Observer& observer);

// Its beginning: loads or initialises the weights and the optimizer, attaches reference log-probs where the objective needs
// them, and opens the directory. Returns the number of steps that are done already.
Index begin_run(Engine& engine, Run& run, RunDirectory& directory, Observer& observer);

}  // namespace streambp
