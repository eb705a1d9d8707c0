// Sums over a row on the CPU, in an order that is the same for any vector width: element j is added to partial sum
// j mod kLanes, and the partial sums are then added pairwise.
#pragma once

#include "kernels/base/matrix.cuh"

namespace streambp::cpu {

constexpr Index kLanes = 16;

// Σ f(j) for 0 <= j < n, in the type of f's result
template <class F>
auto sum_of(Index n, F&& f) {
  decltype(f(Index{0})) lanes[kLanes] = {};
  Index j = 0;
  for (; j + kLanes <= n; j += kLanes) {
#pragma omp simd
    for (Index lane = 0; lane < kLanes; ++lane) lanes[lane] += f(j + lane);
  }
  for (Index lane = 0; j + lane < n; ++lane) lanes[lane] += f(j + lane);
  for (Index half = kLanes / 2; half > 0; half /= 2) {
    for (Index lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace streambp::cpu
