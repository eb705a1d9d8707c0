// Options for the rates of a machine, from which `plan` predicts the time of a step.
#pragma once

#include "commands/option_table.h"
#include "data/files/files.h"
#include "training/engine.h"
#include "training/fit.h"

namespace streambp {

enum class FarRate { measured, assumed };

class RateOptions {
 public:
  void add_to(OptionTable& options) {
    options_ = &options;
    options.section("Predicted time");
    options.add("--rates", &file_, "Rates measured by bench --profile --json FILE; defaults for the options below");
    options.add("--matmul", &matmul_, "TFLOP/s of large matrix products", checks::positive(),
                "600 for a GPU; measured on this CPU");
    options.add("--far-rate", &far_, "GB/s to or from far memory", checks::positive(),
                "25 for a GPU; measured with a file in --far");
    options.add("--link", &link_, "With --ranks: how fast a rank can send, in GB/s", checks::positive());
  }

  // What the options and the file say, or orders of magnitude: choices do not depend on a measurement made here.
  Rates assumed(const StepSettings& s) const {
    Rates rates = usual_rates(s.device, s.config.head_dim);
    if (!file_.empty()) rates = read(rates);
    const double share = rates.attention / rates.matmul;  // a machine with other rates is expected to have it, too
    if (matmul_ > 0) rates.matmul = matmul_ * 1e12, rates.attention = share * rates.matmul;
    if (far_ > 0) rates.far = far_ * 1e9;
    if (file_.empty() || options_->given("--link")) rates.link = link_ * 1e9;
    return rates;
  }
  // The same, measured on this CPU where they say nothing.
  Rates measured(const StepSettings& s, FarRate far, const std::string& far_directory) const {
    Rates rates = assumed(s);
    if (!file_.empty() || s.device == DeviceKind::cuda) return rates;
    const double share = rates.attention / rates.matmul;
    try {
      if (matmul_ == 0) rates.matmul = matmul_rate(s.device, s.dtype), rates.attention = share * rates.matmul;
      rates.memory = copy_rate(s.device);
      if (far_ == 0 && far == FarRate::measured) rates.far = far_rate(s.device, far_directory);
    } catch (const Error&) {  // a plan needs neither much memory nor a disk
    }
    return rates;
  }
  // Whether a GPU's rates are neither given nor measured.
  bool are_assumed(DeviceKind device) const { return device == DeviceKind::cuda && matmul_ == 0 && file_.empty(); }

 private:
  Rates read(Rates rates) const {
    const Json file = parse_json_file(file_);
    const auto set = [&](const char* name, double& rate) {
      const auto found = file.find(name);
      if (found == file.end()) return;
      require(found->is_number() && *found >= 0, file_, ": ", name, " is not a rate; write the file with bench ",
              "--profile --json");
      if (*found > 0) rate = *found;
    };
    require(file.is_object() && file.contains("matmul_rate"), file_, ": holds no rates; write it with bench ",
            "--profile --json");
    set("matmul_rate", rates.matmul);
    set("attention_rate", rates.attention);
    set("copy_rate", rates.memory);
    set("far_rate", rates.far);
    set("link_rate", rates.link);
    return rates;
  }

  OptionTable* options_ = nullptr;
  std::string file_;
  double link_ = 50, matmul_ = 0, far_ = 0;
};

}  // namespace streambp
