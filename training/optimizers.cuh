// All optimizers.
#pragma once

#include <memory>

#include "training/optimizers/adamw.cuh"

namespace streambp {

// For evaluation, or when only the gradient is needed.
template <class Device, class T, class G>
class NoOptimizer : public Optimizer<Device, T, G> {
 public:
  using Optimizer<Device, T, G>::Optimizer;

 protected:
  void update(Device&, const Updated<T, G>&, const AdamW&) override { fail("there is no optimizer"); }
};

template <class Device, class T, class G>
std::unique_ptr<Optimizer<Device, T, G>> make_optimizer(OptimizerKind kind, const Group& ranks) {
  if (kind == OptimizerKind::adamw) return std::make_unique<AdamWOptimizer<Device, T, G, Accumulator<T>>>(ranks);
  if (kind == OptimizerKind::adamw_pure) return std::make_unique<AdamWOptimizer<Device, T, G, T>>(ranks);
  return std::make_unique<NoOptimizer<Device, T, G>>(ranks);
}

}  // namespace streambp
