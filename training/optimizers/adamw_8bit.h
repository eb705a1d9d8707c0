// AdamW with moments in 8 bits, and no master weights: 2 bytes a parameter, and scales for every 256 columns of a row.
// Parameters with few elements, such as norms, keep their moments in float32. The formulas are in kernels/adamw_8bit.cuh and
// kernels/adamw.cuh.
#pragma once

#include "kernels/adamw_8bit.cuh"
#include "training/optimizer.h"

namespace streambp {

template <class Device, class T, class G>
class AdamW8BitOptimizer : public Optimizer<Device, T, G> {
 public:
  AdamW8BitOptimizer(const Group& ranks, Place place) : Optimizer<Device, T, G>(ranks, place) {
    this->template add_state<std::uint8_t>("m8.", codes);
    this->template add_state<float>("m8.scale.", scales);
    this->template add_state<std::uint8_t>("v8.", codes);
    this->template add_state<float>("v8.scale.", scales);
    this->template add_state<A>("m.", small_columns);
    this->template add_state<A>("v.", small_columns);
  }

 protected:
  void update(Device& dev, const std::vector<Updated<T, G>>& round) override {
    std::vector<Updated<T, G>> small;
    std::vector<AdamW8bit<T, G>> large;
    for (const auto& u : round) {
      if (is_small(u.parameter)) {
        small.push_back(u);
      } else if (u.weight) {
        const QuantisedMoments state = {{numbers<std::uint8_t>(0, u), numbers<float>(1, u)},
                                        {numbers<std::uint8_t>(2, u), numbers<float>(3, u)}};
        large.push_back({u.weight, u.gradient, state, u.settings});
      }
    }
    this->template update_with_adamw<A>(dev, small, 4, 5);
    adamw_8bit(dev, large);
  }

 private:
  using A = Accumulator<T>;

  static bool is_small(const Parameter& p) { return p.rows * p.cols < 4096; }
  static Index codes(const Parameter& p) { return is_small(p) ? 0 : p.cols; }
  static Index scales(const Parameter& p) { return is_small(p) ? 0 : ceil_div(p.cols, kMomentBlock); }
  static Index small_columns(const Parameter& p) { return is_small(p) ? p.cols : 0; }

  template <class U>
  Matrix<U> numbers(std::size_t state, const Updated<T, G>& u) const {
    return this->template state<U>(state, u);
  }
};

}  // namespace streambp
