// Progress on the console: of a long step, and of what precedes the first one.
#pragma once

#include <unistd.h>

#include <chrono>

#include "commands/text.h"
#include "data/progress.h"
#include "kernels/base/device.cuh"
#include "parallel/processes.h"

namespace streambp {

constexpr double kLongStep = 10;  // seconds

// Open MPI gives each rank a terminal, even if it writes what comes out of it to a file.
inline bool on_terminal() { return isatty(STDOUT_FILENO) && this_process().count == 1; }

// On a terminal, moves to the beginning of the line and clears it, because it may hold the progress of a step.
inline Escape fresh_line() { return {on_terminal() ? "\r\033[K" : ""}; }

// On a terminal, shows on one line how far the work is.
inline void show_progress(const Progress& progress) {
  static std::string work;  // shown now
  static Stopwatch begun, shown;
  if (!on_terminal()) return;
  const bool done = progress.fraction >= 1, is_new = work != progress.work;
  if (is_new) work = progress.work, begun = {};
  if (!done && !is_new && shown.seconds() < 0.2) return;
  shown = {};
  const double tokens = static_cast<double>(progress.tokens) / 1e6;
  const std::string speed =
      progress.tokens == 0 ? "" : format(", %.1fM tokens, %.2fM tokens/s", tokens, tokens / begun.seconds());
  print("%s", fresh_line());
  if (!done) print("%s: %.0f%%%s", work, 100 * progress.fraction, speed);
  std::fflush(stdout);
}

// The same for work of unknown length, on standard error. An empty text clears the line.
inline void show_work(const std::string& work) {
  if (isatty(STDERR_FILENO)) print_error("\r\033[K%s", work);
}

inline void show_reserved(double share) { show_progress({"reserving far memory", share}); }

// While it exists, shows how much of a step is done: on a terminal, on one line; in a file, a line every ten minutes.
class StepProgress {
 public:
  struct Pace {
    double first, then;  // seconds
  };
  static Pace usual() { return on_terminal() ? Pace{kLongStep, 1} : Pace{600, 600}; }

  // flops() is about as many as the step will take. It is called only if the step is long.
  StepProgress(DeviceBase& device, const std::string& name, const std::function<double()>& flops, Pace pace = usual())
      : device_(device), name_(name), flops_of_step_(flops), pace_(pace) {
    device.on_work = [this](const Work&) {
      if (const double now = watch_.seconds(); now >= next_) show(now), next_ = now + pace_.then;
    };
  }
  ~StepProgress() {
    device_.on_work = nullptr;
    print("%s", fresh_line());
  }
  StepProgress(const StepProgress&) = delete;

 private:
  void show(double seconds) {
    if (flops_ == 0) flops_ = flops_of_step_();
    const double done = std::min(device_.flops() / flops_, 0.999);
    const std::string left = done < 0.01 ? "" : ", about " + human_seconds(seconds * (1 / done - 1)) + " left";
    print("%s%s: %.0f%% done%s%s", fresh_line(), name_, std::floor(100 * done), left,
          Escape{on_terminal() ? "" : "\n"});
    std::fflush(stdout);
  }

  DeviceBase& device_;
  const std::string name_;
  const std::function<double()> flops_of_step_;
  double flops_ = 0;
  const Pace pace_;
  const Stopwatch watch_;
  double next_ = pace_.first;
};

}  // namespace streambp
