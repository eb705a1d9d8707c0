// When to save a checkpoint during a run.
#pragma once

#include "kernels/base/matrix.cuh"

namespace streambp {

class CheckpointTimer {
 public:
  static constexpr Index kByTime = -1;
  static constexpr double kSeconds = 600;  // between automatic checkpoints

  // every: the number of steps between checkpoints; 0: only at the end; kByTime: about every ten minutes.
  // bytes: the size of a checkpoint, about.
  CheckpointTimer(Index every, double now, double bytes = 0)
      : every_(every), due_(now + kSeconds), saved_(now), cost_(bytes / kBytesPerSecond) {}

  bool by_time() const { return every_ == kByTime; }
  bool due(Index step, double now) const { return by_time() ? now >= due_ : every_ > 0 && step % every_ == 0; }
  // Saving takes at most 5% of the time, even on a slow disk.
  void saved(double begun, double now) {
    saved_best(begun, now);
    due_ = now + std::max(kSeconds, 20 * cost_);
  }
  // The best checkpoint makes way for the next one, so the newest two are saved all the same.
  void saved_best(double begun, double now) {
    saved_ = now;
    cost_ = now - begun;
  }
  // Whether that holds with one more checkpoint. Those that take less than a second always may be saved.
  bool affordable(double now) const { return every_ != 0 && (cost_ < 1 || now - saved_ >= 20 * cost_); }

 private:
  static constexpr double kBytesPerSecond = 1e9;

  Index every_;
  double due_, saved_, cost_;  // seconds
};

}  // namespace streambp
