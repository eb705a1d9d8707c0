// What the updates of all optimizers share: their settings, and stochastic rounding.
//
// A bfloat16 weight has 8 significant bits, and most updates are smaller than half of its ulp: rounded to the nearest
// value they would be lost. Stochastic rounding goes up or down at random, with probabilities that make the expected value
// exact. The random bits are a function of (seed, step, parameter, element): no run, rank or shard changes them.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/base/matrix.cuh"
#include "kernels/base/random.h"

namespace streambp {

struct OptimizerStep {
  double rate, beta1, beta2, eps, decay;
  double gradient_scale = 1;    // clipping
  Index step = 1;               // of the run, counted from 1
  Index begun = 0;              // the moments began after this step
  std::uint64_t seed = 1;       // of the run
  std::uint64_t parameter = 0;  // its number in the table
  Index first_row = 0;          // where w begins in that parameter

  Index updates() const { return step - begun; }  // t
  Random random() const { return Random(seed ^ mix(static_cast<std::uint64_t>(step)), parameter); }
};

// Rounds to a value of T. bfloat16: adding 16 random bits and truncating rounds up with probability
// (truncated bits) / 65536. Other types: unchanged.
template <class T>
constexpr Accumulator<T> stochastic_round(Accumulator<T> x, std::uint64_t random_bits) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;  // adding bits to a NaN could turn it into a number
    const auto random = static_cast<std::uint32_t>(random_bits & 0xffffu);
    return std::bit_cast<float>(finite ? (bits + random) & 0xffff0000u : bits);
  } else {
    return x;
  }
}

}  // namespace streambp
