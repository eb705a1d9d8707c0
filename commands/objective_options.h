// The options of the training objective, for all commands that compute or plan a gradient.
#pragma once

#include "commands/option_table.h"
#include "data/documents/token_file.h"
#include "training/objectives.h"

namespace streambp {

struct ObjectiveOptions {
  std::string objective = "sft", mean = "", preference = "sigmoid";
  double beta = 0.1, label_smoothing = 0, margin = 0.5, clip_low = 0.2, clip_high = 0.2, kl = 0;

  void add_to(OptionTable& options);

  // Refuses options that have no effect with this objective.
  void check() const;
  // Refuses data of the wrong kind.
  void require_kind(const TokenFile& file) const;
  // length: the divisor of --mean length.
  Objective settings(Index length) const;

 private:
  OptionTable* options_ = nullptr;
};

}  // namespace streambp
