// Elementary functions with the same bits on every CPU, whatever its C library: they consist of additions,
// multiplications and explicit fused multiply-adds. Compilers can vectorise those for rows of a matrix, because they
// have no branches. They are accurate to 2 ulp. GPUs run them too, where those of double give the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace streambp {

// A loop over elements is vectorised only if all functions it calls are inlined, which GCC stops doing in large files.
#define STREAMBP_INLINE [[gnu::always_inline]] constexpr

// x y + z, rounded once. A template, because Clang does not know the functions in constants.
template <class T>
STREAMBP_INLINE T multiply_add(T x, T y, T z) {
  if constexpr (std::is_same_v<T, float>) {
    return __builtin_fmaf(x, y, z);
  } else {
    return __builtin_fma(x, y, z);
  }
}

// polynomial(x, a, b, c, ...) = a + b x + c x² + ...
template <class T>
STREAMBP_INLINE T polynomial(T, T last) {
  return last;
}
template <class T, class... Rest>
STREAMBP_INLINE T polynomial(T x, T first, Rest... rest) {
  return multiply_add(polynomial(x, rest...), x, first);
}

// x = n ln 2 + r with |r| <= ln 2 / 2, and 2^n. x is clamped so that 2^n exp(r) is a normal number.
template <class T>
struct Reduced {
  T r, power;
};

STREAMBP_INLINE Reduced<float> reduced(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const float shifted = multiply_add(x, 1.44269504f, shift), n = shifted - shift;
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, x));  // ln 2 as a sum of two
  const std::uint32_t power = (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(shift) + 127u)
                              << 23;
  return {r, std::bit_cast<float>(power)};
}

STREAMBP_INLINE Reduced<double> reduced(double x) {
  x = x < -708.0 ? -708.0 : x;
  x = x > 709.0 ? 709.0 : x;
  const double shift = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = multiply_add(x, 1.4426950408889634, shift), n = shifted - shift;
  const double r = multiply_add(n, -2.3190468138462996e-17, multiply_add(n, -0.6931471805599453, x));
  const std::uint64_t power = (std::bit_cast<std::uint64_t>(shifted) - std::bit_cast<std::uint64_t>(shift) + 1023u)
                              << 52;
  return {r, std::bit_cast<double>(power)};
}

// (exp(r) - 1 - r) / r²
STREAMBP_INLINE float exponential_tail(float r) {
  return polynomial(r, 5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f, 8.3334519073e-3f, 1.3981999507e-3f,
                    1.9875691500e-4f);
}
STREAMBP_INLINE double exponential_tail(double r) {
  return polynomial(r, 1 / 2.0, 1 / 6.0, 1 / 24.0, 1 / 120.0, 1 / 720.0, 1 / 5040.0, 1 / 40320.0, 1 / 362880.0,
                    1 / 3628800.0, 1 / 39916800.0, 1 / 479001600.0, 1 / 6227020800.0);
}

// exp(x) = 2^n exp(r). The result is never infinite or zero.
STREAMBP_INLINE float exponential(float x) {
#ifdef __CUDA_ARCH__  // the hardware computes 2^t; `lost` compensates the rounding of t = x log2 e
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float t = x * 1.44269504f, lost = fmaf(x, 1.44269504f, -t) + x * 1.92596299e-8f;
  float y = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(t));
  return fmaf(y, lost * 0.693147181f, y);
#endif
  const auto [r, power] = reduced(x);
  return polynomial(r, 1.0f, 1.0f, exponential_tail(r)) * power;
}
STREAMBP_INLINE double exponential(double x) {
  const auto [r, power] = reduced(x);
  return polynomial(r, 1.0, 1.0, exponential_tail(r)) * power;
}

// exp(x) - 1 = 2^n (exp(r) - 1) + (2^n - 1), which does not cancel near 0
template <class T>
STREAMBP_INLINE T exponential_minus_one(T x) {
#ifdef __CUDA_ARCH__
  return ::expm1(x);
#endif
  const auto [r, power] = reduced(x);
  return multiply_add(multiply_add(r * r, exponential_tail(r), r), power, power - 1);
}

template <class T>
STREAMBP_INLINE T sigmoid(T x) {
#ifdef __CUDA_ARCH__
  return __fdividef(1, 1 + exponential(-x));
#endif
  return T(1) / (T(1) + exponential(-x));
}

// A soft cap: y = cap tanh(x / cap), with tanh(z) = e / (e + 2) and e = exp(2z) - 1.
template <class T>
STREAMBP_INLINE T soft_capped(T x, T cap) {
  const T e = exponential_minus_one(2 * x / cap);
  return cap * (e / (e + 2));
}
// dy / dx
template <class T>
STREAMBP_INLINE T soft_cap_slope(T y, T cap) {
  return 1 - y / cap * (y / cap);
}

// log(x) = e ln 2 + log(m) with x = 2^e m and 1/√2 <= m < √2. With s = (m - 1) / (m + 1):
// log(m) = 2 (s + s³/3 + s⁵/5 + ...)
constexpr double logarithm(double x) {
  if (x > 0 && x < 0x1p-1022) return logarithm(x * 0x1p54) - 54 * 0.6931471805599453;  // subnormal
  if (!(x > 0 && x <= 0x1.fffffffffffffp1023)) return std::log(x);                     // zero, negative, infinite, NaN
  constexpr std::uint64_t root_half = 0x3fe6a09e667f3bcd;                              // the bits of 1/√2
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  const auto e = static_cast<std::int64_t>(bits - root_half) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<std::uint64_t>(e) << 52)), n = static_cast<double>(e);
  const double s = (m - 1) / (m + 1), square = s * s;
  const double low = multiply_add(n, 2.3190468138462996e-17,
                                  2 * s * square *
                                      polynomial(square, 1 / 3.0, 1 / 5.0, 1 / 7.0, 1 / 9.0, 1 / 11.0, 1 / 13.0,
                                                 1 / 15.0, 1 / 17.0, 1 / 19.0, 1 / 21.0, 1 / 23.0));
  return multiply_add(n, 0.6931471805599453, 2 * s + low);
}
inline float logarithm(float x) { return static_cast<float>(logarithm(static_cast<double>(x))); }

// log(1 + x) for a finite x > -1: log(u) with u = 1 + x rounded, and a term for what the rounding lost
constexpr double logarithm_one_plus(double x) {
  const double u = 1 + x;
  return logarithm(u) + (x - (u - 1)) / u;
}

// log σ(x), also where σ(x) underflows
inline double log_sigmoid(double x) {
  const double rest = logarithm_one_plus(exponential(x < 0 ? x : -x));
  return x < 0 ? x - rest : -rest;
}

// log(1 + exp(x))
constexpr double softplus(double x) { return (x > 0 ? x : 0) + logarithm_one_plus(exponential(x < 0 ? x : -x)); }

// x^y for x > 0
inline double power(double x, double y) { return exponential(y * logarithm(x)); }

struct SineCosine {
  double sine, cosine;
};

// The angle is reduced to r in -π/4 .. π/4 by a multiple n of π/2, which is given as a sum of three.
constexpr SineCosine sine_cosine(double x) {
  const double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the integer n in the low bits
  const double shifted = x * 0.6366197723675814 + shift, n = shifted - shift;
  const double r = multiply_add(n, 1.4973849048591698e-33,
                                multiply_add(n, -6.123233995736766e-17, multiply_add(n, -1.5707963267948966, x)));
  const double square = r * r;
  const double s = multiply_add(r * square,
                                polynomial(square, -1 / 6.0, 1 / 120.0, -1 / 5040.0, 1 / 362880.0, -1 / 39916800.0,
                                           1 / 6227020800.0, -1 / 1307674368000.0, 1 / 355687428096000.0),
                                r);
  const double c =
      multiply_add(square,
                   polynomial(square, -1 / 2.0, 1 / 24.0, -1 / 720.0, 1 / 40320.0, -1 / 3628800.0, 1 / 479001600.0,
                              -1 / 87178291200.0, 1 / 20922789888000.0, -1 / 6402373705728000.0),
                   1.0);
  const auto quarter = std::bit_cast<std::uint64_t>(shifted);
  const double sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
  return {quarter & 2 ? -sine : sine, (quarter + 1) & 2 ? -cosine : cosine};
}

}  // namespace streambp
