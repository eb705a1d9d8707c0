// Sums over a row on the CPU, in an order that is the same for any vector width: element j is added to partial sum
// j mod kPartialSums, and the partial sums are then added pairwise.
#pragma once

#include "kernels/base/matrix.cuh"

namespace streambp::cpu {

constexpr Index kPartialSums = 16;

// Σ f(j) for 0 <= j < n, in the type of f's result. f is called once for each j, in any order.
template <class F>
auto sum_of(Index n, F&& f) {
  decltype(f(Index{0})) sums[kPartialSums] = {};
  Index j = 0;
  for (; j + kPartialSums <= n; j += kPartialSums) {
#pragma omp simd
    for (Index i = 0; i < kPartialSums; ++i) sums[i] += f(j + i);
  }
  for (Index i = 0; j + i < n; ++i) sums[i] += f(j + i);
  for (Index half = kPartialSums / 2; half > 0; half /= 2) {
    for (Index i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace streambp::cpu
