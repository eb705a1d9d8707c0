// Dynamic maps: numbers of -1 .. 1 in 8 bits, with seven decades and most precision near the largest (Dettmers 2016).
// Decade d, from 10^(d-7) to 10^(d-6), is divided into n cells, and a code stands for the middle of its cell:
//
//   value = (0.1 + 0.9 (j + 1/2) / n) 10^(d-6),  j = 0 .. n-1,  d = 0 .. 6
//
// Unsigned: n = 2^(d+1), which makes 254 codes, and 0 and 1. Signed: n = 2^d, with both signs, and 0 and 1. In both, the
// number u = n + j tells j and d: its leading bit is n.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/base/math.cuh"

namespace streambp {

enum class Sign { none, both };

// 10^(d-6), without a table: so loops vectorise
constexpr float decade_end(int d) {
  return 1e-6f * ((d & 1) != 0 ? 10.0f : 1.0f) * ((d & 2) != 0 ? 100.0f : 1.0f) * ((d & 4) != 0 ? 10000.0f : 1.0f);
}

template <Sign S>
struct DynamicMap {
  static constexpr int kFirst = S == Sign::none ? 1 : 0;                 // n = 2^(d + kFirst)
  static constexpr std::uint32_t kZero = kFirst, kOne = 128u << kFirst;  // the u of these two

  // The value of u. With n = 2^e, 2u + 1 = 2^(e+1) (1 + (j + 1/2) / n).
  static constexpr float value(std::uint32_t u) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(2 * u + 1));
    const int d = static_cast<int>(bits >> 23) - 128 - kFirst;
    const float fraction = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u);
    const float inside = multiply_add(fraction, 0.9f, -0.8f) * decade_end(d);
    return u == kZero ? 0 : u == kOne ? 1 : inside;
  }

  // The u with the nearest value, for x of 0 .. 1.
  static constexpr std::uint32_t nearest(float x) {
    constexpr float ends[] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1};
    float n = 1 << kFirst, scale = 1e6f;
    for (int d = 1; d <= 6; ++d) {  // decade d begins halfway between two values
      const float next = static_cast<float>(1 << (d + kFirst));
      const bool above = x >= ends[d - 1] * (1 + 1.8f / next);
      n = above ? next : n, scale = above ? 1 / ends[d] : scale;
    }
    const float cell = multiply_add(x, scale, -0.1f) * n * (1 / 0.9f);
    const float j = cell > 0 ? (cell < n - 1 ? cell : n - 1) : 0;
    const auto u = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + static_cast<std::int32_t>(j));
    const bool zero = x < 0.5f * value(kZero + 1), one = x >= 0.5f + 0.5f * value(kOne - 1);
    return zero ? kZero : one ? kOne : u;
  }

  static constexpr float decode(std::uint8_t code) {
    if constexpr (S == Sign::none) return value(code + kFirst);
    const int k = code - 127;
    const float magnitude = value(static_cast<std::uint32_t>(k < 0 ? -k : k));
    return k < 0 ? -magnitude : magnitude;
  }
  static constexpr std::uint8_t encode(float x) {
    if constexpr (S == Sign::none) return static_cast<std::uint8_t>(nearest(x) - kFirst);
    const auto u = static_cast<int>(nearest(x < 0 ? -x : x));
    return static_cast<std::uint8_t>(x < 0 ? most_negative(127 - u) : 127 + u);
  }

 private:
  static constexpr int most_negative(int code) { return code < 0 ? 0 : code; }  // there is no -1
};

}  // namespace streambp
