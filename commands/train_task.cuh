// The task of a training run: its data, settings, schedule and memory, decided before anything is trained or written.
#pragma once

#include <memory>
#include <optional>

#include "commands/train_options.cuh"
#include "data/documents/sources.cuh"
#include "training/grpo/online_grpo.cuh"
#include "training/plan.cuh"
#include "training/run_directory.cuh"

namespace streambp {

struct TrainTask {
  StepSettings settings;
  Schedule schedule;
  Source source;
  std::optional<ModelLayout> layout;     // of the checkpoints
  std::shared_ptr<const Text> text;      // from scratch
  std::optional<TokenFile> token_file;   // fine-tuning, but not on-line GRPO
  std::shared_ptr<Documents> documents;  // packed from it
  std::unique_ptr<OnlineGrpo> grpo;      // on-line
  std::string reference;                 // identifies the reference model, where the objective needs one
  std::size_t memory = 0;                // of the whole run
  std::vector<std::string> notes;        // for the user

  // Off-line groups without "old_logps" were sampled by the reference model, as far as we know.
  bool needs_reference_logps() const {
    const bool sampled_by_it = token_file && token_file->groups() && token_file->old().empty();
    return !grpo && (settings.objective.has_reference() || sampled_by_it);
  }
};

// Decides what the options leave open. A refused run leaves no files behind.
TrainTask prepare(TrainOptions& options, RunDirectory& directory);

// Gives the documents their reference log-probs: cached by an earlier run, or computed now by `engine`.
void attach_reference_logps(Engine& engine, TrainTask& task, const TrainOptions& options,
                            const RunDirectory& directory);

}  // namespace streambp
