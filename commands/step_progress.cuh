// The progress of a long step, on the console.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>

#include "commands/text.cuh"
#include "kernels/base/device.cuh"

namespace streambp {

constexpr double kLongStep = 10;  // seconds

// On a terminal, moves to the beginning of the line and clears it, because it may hold the progress of a step.
inline const char* fresh_line() { return isatty(STDOUT_FILENO) ? "\r\033[K" : ""; }

// While it exists, shows how much of a step is done: on a terminal, on one line; in a file, a line every ten minutes.
class StepProgress {
 public:
  struct Pace {
    double first, then;  // seconds
  };
  static Pace usual() { return isatty(STDOUT_FILENO) ? Pace{kLongStep, 1} : Pace{600, 600}; }

  // flops: about as many as the step will take
  StepProgress(DeviceBase& device, const std::string& name, double flops, Pace pace = usual())
      : device_(device), name_(name), flops_(flops), pace_(pace) {
    device.on_work = [this] {
      if (const double now = elapsed(); now >= next_) show(now), next_ = now + pace_.then;
    };
  }
  ~StepProgress() {
    device_.on_work = nullptr;
    std::printf("%s", fresh_line());
  }
  StepProgress(const StepProgress&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  void show(double seconds) const {
    const double done = std::clamp(device_.flops() / flops_, 1e-6, 0.999);
    std::printf("%s%s: %.0f%% done, about %s left%s", fresh_line(), name_.c_str(), std::floor(100 * done),
                human_seconds(seconds * (1 / done - 1)).c_str(), isatty(STDOUT_FILENO) ? "" : "\n");
    std::fflush(stdout);
  }
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - begun_).count(); }

  DeviceBase& device_;
  const std::string name_;
  const double flops_;
  const Pace pace_;
  const Clock::time_point begun_ = Clock::now();
  double next_ = pace_.first;
};

}  // namespace streambp
