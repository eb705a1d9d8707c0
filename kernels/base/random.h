// Counter-based random numbers: a pure function of (seed, stream, index). There is no state to save, every element can
// be computed independently, and the values are the same on every machine, on GPUs, and for any number of threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/base/math.cuh"

namespace streambp {

// SplitMix64's finaliser: flipping an input bit flips every output bit with probability 1/2.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Random {
  std::uint64_t key;
  constexpr explicit Random(std::uint64_t seed, std::uint64_t stream = 0)
      : key(mix(mix(seed) ^ (stream * 0xd1342543de82ef95u))) {}

  constexpr std::uint64_t bits(std::uint64_t index) const { return mix(key ^ mix(index)); }
  // Uniform in (0, 1).
  constexpr double uniform(std::uint64_t index) const {
    return (static_cast<double>(bits(index) >> 11) + 0.5) * 0x1p-53;
  }
  // Uniform in 0 .. n-1, with a negligible bias of n / 2^64.
  std::uint64_t below(std::uint64_t n, std::uint64_t index) const { return bits(index) % n; }
  // Standard normal (Box-Muller). A template, because Clang does not know std::sqrt in constants.
  template <class Number = double>
  constexpr Number normal(std::uint64_t index) const {
    const Number radius = std::sqrt(-2 * logarithm(uniform(2 * index)));
    return radius * sine_cosine(6.283185307179586 * uniform(2 * index + 1)).cosine;
  }
};

// A random permutation of 0 .. n-1.
inline std::vector<std::int64_t> shuffled(std::size_t n, const Random& random) {
  std::vector<std::int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.below(i, i)]);
  return order;
}

}  // namespace streambp
