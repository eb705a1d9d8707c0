// Memory by kind through a step, recorded from the step itself on the Plan device. `plan --timeline` writes it and
// scripts/plot.py draws it.
#pragma once

#include <numeric>
#include <vector>

#include "training/plan.h"

namespace streambp {

inline std::size_t total(const Bytes& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}); }

// Divides a step into parts of equal work (FLOPs) and keeps the peak of each part.
class Timeline {
 public:
  Timeline(std::size_t parts, double flops) : parts(parts), flops(flops) {}

  // Records that memory use changed to `bytes` after `flops_so_far` FLOPs.
  void record(double flops_so_far, const Bytes& bytes) {
    const double last = static_cast<double>(parts.size() - 1);
    const auto now = static_cast<std::size_t>(std::min(last, flops_so_far / flops * static_cast<double>(parts.size())));
    for (; part < now; ++part) keep(part, held);
    keep(now, held);
    keep(now, held = bytes);
  }

  std::vector<Bytes> parts;
  const double flops;

 private:
  void keep(std::size_t i, const Bytes& bytes) {
    if (total(bytes) > total(parts[i])) parts[i] = bytes;
  }

  std::size_t part = 0;
  Bytes held{};
};

Timeline timeline(const StepSettings& settings, Index rows, const Schedule& schedule, std::size_t parts);

}  // namespace streambp
