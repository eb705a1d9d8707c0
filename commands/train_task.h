// The task of a training run: what its options ask for, and what they leave open, decided before training or writing
// starts.
#pragma once

#include "commands/train_options.h"
#include "training/train.h"

namespace streambp {

struct TrainTask {
  Run run;
  std::size_t plain_memory = 0;    // of a step that keeps layer inputs only
  std::string prompt;              // of the sample at the end
  std::vector<std::string> parts;  // of the data, described, if there are several
  std::string first_learned;       // of the data
  std::vector<std::string> notes;  // for the user
};

// Opens the run's directory, and decides everything that the options leave open. A refused run leaves no files behind.
TrainTask prepare(TrainOptions& options, std::optional<RunDirectory>& directory);

}  // namespace streambp
