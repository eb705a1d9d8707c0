// All optimizers.
#pragma once

#include <memory>

#include "training/optimizers/adamw.h"
#include "training/optimizers/adamw_8bit.h"
#include "training/optimizers/muon.h"

namespace streambp {

// For evaluation, or when only the gradient is needed.
template <class Device, class T, class G>
class NoOptimizer : public Optimizer<Device, T, G> {
 public:
  using Optimizer<Device, T, G>::Optimizer;

 protected:
  void update(Device&, const std::vector<Updated<T, G>>&) override { fail("there is no optimizer"); }
};

template <class Device, class T, class G>
std::unique_ptr<Optimizer<Device, T, G>> make_optimizer(OptimizerChoice choice, const Group& ranks) {
  const OptimizerKind kind = choice.kind;
  const Place place = choice.places.optimizer;
  if (kind == OptimizerKind::adamw) return std::make_unique<AdamWOptimizer<Device, T, G, Accumulator<T>>>(ranks, place);
  if (kind == OptimizerKind::adamw_bf16) return std::make_unique<AdamWOptimizer<Device, T, G, T>>(ranks, place);
  if (kind == OptimizerKind::adamw_8bit) return std::make_unique<AdamW8BitOptimizer<Device, T, G>>(ranks, place);
  if (kind == OptimizerKind::muon) return std::make_unique<MuonOptimizer<Device, T, G>>(ranks, place);
  return std::make_unique<NoOptimizer<Device, T, G>>(ranks, place);
}

}  // namespace streambp
