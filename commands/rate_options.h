// Options for the rates of a machine, from which `plan` predicts the time of a step.
#pragma once

#include "commands/option_table.h"
#include "training/fit.h"

namespace streambp {

enum class FarRate { measured, assumed };

class RateOptions {
 public:
  void add_to(OptionTable& options);

  // What the options and the file say, or orders of magnitude: choices do not depend on a measurement made here.
  Rates assumed(const StepSettings& s) const;
  // The same, measured on this CPU where they say nothing.
  Rates measured(const StepSettings& s, FarRate far, const std::string& far_directory) const;
  // Whether a GPU's rates are neither given nor measured.
  bool are_assumed(DeviceKind device) const { return device == DeviceKind::cuda && matmul_ == 0 && file_.empty(); }

 private:
  Rates read(Rates rates) const;

  OptionTable* options_ = nullptr;
  std::string file_;
  double link_ = 50, matmul_ = 0, far_ = 0;
};

}  // namespace streambp
