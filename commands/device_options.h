// Options for the device and the types of a command.
#pragma once

#include "commands/model_options.h"
#include "training/engine.h"

namespace streambp {

struct DeviceOptions {
  std::string device = "auto", dtype = "auto", gradient = "auto", optimizer = "adamw";
  bool planned = false;  // the device need not exist

  enum class Optimizers { none, optional, required };
  // Commands support different types, the default first.
  void add_to(OptionTable& options, const std::vector<std::string>& types, Optimizers optimizers);

  DeviceKind kind() const;
  DType type_on(DeviceKind kind) const;
  StepSettings settings(const Config& config, Index micro_batches) const;
};

}  // namespace streambp
