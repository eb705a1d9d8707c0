// When to save a checkpoint during a run.
#pragma once

#include <algorithm>

#include "kernels/base/matrix.cuh"

namespace streambp {

class CheckpointTimer {
 public:
  static constexpr Index kByTime = -1;
  static constexpr double kSeconds = 600;  // between automatic checkpoints

  // every: the number of steps between checkpoints; 0: only at the end; kByTime: about every ten minutes.
  CheckpointTimer(Index every, double now) : every_(every), due_(now + kSeconds) {}

  bool by_time() const { return every_ == kByTime; }
  bool due(Index step, double now) const { return by_time() ? now >= due_ : every_ > 0 && step % every_ == 0; }
  // Saving takes at most 5% of the time, even on a slow disk.
  void saved(double begun, double now) { due_ = now + std::max(kSeconds, 20 * (now - begun)); }

 private:
  Index every_;
  double due_;
};

}  // namespace streambp
