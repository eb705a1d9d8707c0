// Where a command computes, and in which types.
#pragma once

#include "commands/model_options.cuh"
#include "training/engine.cuh"

namespace streambp {

struct DeviceOptions {
  std::string device = "auto", dtype = "auto", gradient = "auto", optimizer = "adamw";

  // Commands differ in their types and optimizers. The types last as `lasts` says.
  void add_to(OptionTable& options, const std::vector<std::string>& types, const std::vector<std::string>& optimizers,
              Lasts lasts = Lasts::no);

  DeviceKind kind() const;
  StepSettings settings(const Config& config, Index micro_batches) const;
};

// Refuses a step that needs more memory than is free, and says what would fit.
void require_room(const StepSettings& s, Mode mode, Index rows, Index chunk, std::size_t wanted, std::size_t room);

}  // namespace streambp
