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
    std::vector<AdamWUpdate<T, G, AdamWState<M>>> updates;
    for (const auto& u : round) {
      const AdamWState<M> state = {this->master(u), this->template state<M>(0, u), this->template state<M>(1, u)};
      if (u.weight) updates.push_back({u.weight, u.gradient, state, u.settings});
    }
    adamw(dev, updates);
  }
};

}  // namespace streambp
