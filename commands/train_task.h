// The task of a training run: data, settings, schedule and memory. They are decided before training or writing starts.
#pragma once

#include <memory>
#include <optional>

#include "commands/train_options.h"
#include "data/documents/sources.h"
#include "training/grpo/online_grpo.h"
#include "training/plan.h"
#include "training/run_directory.h"

namespace streambp {

struct TrainTask {
  std::filesystem::path start;     // the model or checkpoint with the first weights; empty: random weights
  std::filesystem::path adapters;  // the first adapters of that model; empty: new ones, or none
  StepSettings settings;
  Schedule schedule;
  Source source;
  std::optional<ModelLayout> layout;     // of the checkpoints
  std::shared_ptr<const Text> text;      // from scratch
  std::optional<TokenFile> token_file;   // fine-tuning, but not on-line GRPO
  std::shared_ptr<Documents> documents;  // packed from it
  std::unique_ptr<OnlineGrpo> grpo;      // on-line
  std::string base;                      // identifies the base of adapters
  std::string reference;                 // identifies the reference model, where the objective needs one
  Capacity memory = 0;                   // of the whole run
  std::vector<std::string> notes;        // for the user

  // Off-line groups without "old_logps" are assumed to be sampled by the reference model.
  bool needs_reference_logps() const {
    const bool sampled_by_it = token_file && token_file->groups() && token_file->old().empty();
    return !grpo && (settings.objective.has_reference() || sampled_by_it);
  }
};

// Decides everything that the options leave open. A refused run leaves no files behind.
TrainTask prepare(TrainOptions& options, RunDirectory& directory);

// Attaches reference log-probs to the documents: from the cache of an earlier run, or computed by `engine`, which has
// the weights that the run starts from.
void attach_reference_logps(Engine& engine, TrainTask& task, const TrainOptions& options,
                            const RunDirectory& directory);

}  // namespace streambp
