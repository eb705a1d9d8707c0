// Exponential and sigmoid. Compilers can vectorise them, and they also run on GPUs.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace streambp {

inline double exponential(double x) { return std::exp(x); }

// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, and a polynomial for exp(r): accurate to 2 ulp. The
// result is clamped to normal numbers, so it is never infinite or zero. There is no branch.
constexpr float exponential(float x) {
#ifdef __CUDA_ARCH__  // the hardware computes 2^t; `lost` compensates the rounding of t = x log2 e
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float t = x * 1.44269504f, lost = fmaf(x, 1.44269504f, -t) + x * 1.92596299e-8f;
  float y = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(t));
  return fmaf(y, lost * 0.693147181f, y);
#endif
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const float shifted = x * 1.44269504f + shift;
  const float n = shifted - shift;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two pieces, the first exact in n * piece
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const std::uint32_t power = (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(shift) + 127u)
                              << 23;
  return p * std::bit_cast<float>(power);
}

template <class T>
constexpr T sigmoid(T x) {
#ifdef __CUDA_ARCH__
  return __fdividef(1, 1 + exponential(-x));
#endif
  return T(1) / (T(1) + exponential(-x));
}

}  // namespace streambp
