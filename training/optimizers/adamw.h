// AdamW with moments in float32 (float64 for float64 weights), and float32 master weights beside bfloat16 ones. Or all in
// the type of the weights, with stochastic rounding. The formula is in kernels/adamw.cuh.
#pragma once

#include "training/optimizer.h"

namespace streambp {

// M: the type of the moments.
template <class Device, class T, class G, class M>
class AdamWOptimizer : public Optimizer<Device, T, G> {
 public:
  AdamWOptimizer(const Group& ranks, Place place) : Optimizer<Device, T, G>(ranks, place) {
    this->template add_state<M>("m.");
    this->template add_state<M>("v.");
    if (sizeof(M) > sizeof(T)) this->add_master();
  }

 protected:
  void update(Device& dev, const std::vector<Updated<T, G>>& round) override {
    this->template update_with_adamw<M>(dev, round, 0, 1);
  }
};

}  // namespace streambp
