// Products in bfloat16. Processors with AVX512_BF16 have an instruction that adds two products to a float32 sum, twice as
// many in a cycle as fused multiply-adds do:
//
//   sum = fma(a[1], b[1], sum)        sum = fma(a[0], b[0], sum)        subnormal numbers, given or computed, become zero
//
// All products of bfloat16 are summed like this. Without the instruction, operands are packed as float32, in this order,
// and subnormal numbers are flushed to zero.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/vectors.h"

namespace streambp::cpu::STREAMBP_INSTRUCTIONS {

// Two bfloat16 for consecutive k; the first one is in the lower half.
using Pair = std::uint32_t;

#ifdef __AVX512BF16__
inline Vector<float> fused(Vector<Pair> x, Pair y, Vector<float> sum) {
  return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(x),
                          std::bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(y))));
}
#endif

// While it lives, this thread replaces subnormal operands and results by zero.
class FlushToZero {
 public:
#ifdef __x86_64__
  FlushToZero() : before_(_mm_getcsr()) { set(before_ | 0x8040); }
  ~FlushToZero() { set(before_); }

 private:
  static void set(unsigned mode) {
    asm volatile("" ::: "memory");  // loads and stores stay on their side, and with them the arithmetic between them
    _mm_setcsr(mode);
    asm volatile("" ::: "memory");
  }
  unsigned before_;
#else
  FlushToZero(bool on = true) {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    set(on ? before_ | kFlush : before_ & ~kFlush);
  }
  ~FlushToZero() { set(before_); }

 private:
  static constexpr std::uint64_t kFlush = 1 << 24;
  static void set(std::uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
  std::uint64_t before_;
#endif
};

#ifdef __aarch64__
// Arm decides before rounding whether a result is subnormal, x86 after it. So they differ where a result is rounded up to
// the smallest normal number. Arm reports that it has flushed a result; then this function computes it as x86 does.
inline Vector<float> fused_as_on_x86(Vector<float> x, float y, Vector<float> sum) {
  constexpr float smallest = 0x1p-126f;
  const FlushToZero gradual(false);
  asm volatile("" : "+w"(x), "+w"(sum));  // nothing below is computed before
  const auto flushed = [](float x) { return std::abs(x) < smallest ? std::copysign(0.0f, x) : x; };
  for (int i = 0; i < kLanes<float>; ++i) {
    const float a = flushed(x[i]), b = flushed(y), result = std::fma(a, b, sum[i]);
    // The smallest sum that x86 rounds to `smallest`, with 24 bits and any exponent. A product is exact in float64.
    const double least = std::copysign(0x1p-126 - 0x1p-151, result),
                 excess = std::fma(double{a}, double{b}, sum[i] - least);
    sum[i] = std::abs(result) == smallest && excess * least < 0 ? std::copysign(0.0f, result) : flushed(result);
  }
  asm volatile("" : "+w"(sum));
  return sum;
}

// Whether this thread, in a FlushToZero, has flushed a result since the last call.
inline bool flushed_a_result() {
  std::uint64_t mode, status;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("mrs %0, fpsr" : "=r"(status)::"memory");
  asm volatile("msr fpsr, %0" ::"r"(status & ~std::uint64_t{8}) : "memory");
  return mode >> 24 & status >> 3 & 1;
}
#endif

// Calls sum_up(fused): a loop of fused multiply-adds.
template <class E, class F>
void with_fused(F&& sum_up) {
#ifdef __aarch64__
  if constexpr (std::is_same_v<E, float>) {
    flushed_a_result();
    sum_up([](auto x, auto y, auto sum) { return fused(x, y, sum); });
    if (flushed_a_result()) sum_up([](auto x, auto y, auto sum) { return fused_as_on_x86(x, y, sum); });
    return;
  }
#endif
  sum_up([](auto x, auto y, auto sum) { return fused(x, y, sum); });
}

#ifdef __AVX512BF16__
// Whether the instruction of this processor does exactly what is defined above.
inline bool has_the_order_of_pairs() {
  const FlushToZero flush;
  // Ones, ties, results near the smallest normal number, subnormal numbers, cancellation, overflow.
  constexpr Pair values[] = {0x3f803f80, 0x3f813b80, 0x00800080, 0x3f7f00ff, 0x0001807f, 0xbf803f80, 0x7f7f2f80};
  constexpr float sums[] = {0, -1, 0x1p-126f, -0x1.fffffep-126f, 0x1.000002p0f, 0x1p-149f};
  const auto number = [](Pair bits) { return std::bit_cast<float>(bits); };
  for (const Pair x : values) {
    for (const Pair y : values) {
      for (const float start : sums) {
        const Vector<float> sum = start - Vector<float>{}, once = fused(x + Vector<Pair>{}, y, sum),
                            odd = fused(number(x & 0xffff0000u) - Vector<float>{}, number(y & 0xffff0000u), sum),
                            both = fused(number(x << 16) - Vector<float>{}, number(y << 16), odd);
        if (std::memcmp(&once, &both, sizeof(once)) != 0) return false;
      }
    }
  }
  return true;
}
#endif

// --- Elements: what the innermost loop multiplies ---

// float32 and float64: the numbers themselves. bfloat16: pairs, or float32 numbers in the order of pairs.
template <class T>
struct ElementOf {
  using Type = T;
};
template <>
struct ElementOf<BFloat16> {
#ifdef __AVX512BF16__
  using Type = Pair;
#else
  using Type = float;
#endif
};
template <class T>
using Element = typename ElementOf<T>::Type;
template <class E>
using Sum = std::conditional_t<std::is_same_v<E, Pair>, float, E>;

// The elements for n consecutive numbers.
template <class T>
constexpr Index elements(Index n) {
  if constexpr (std::is_same_v<Element<T>, T>) return n;
  return std::is_same_v<Element<T>, Pair> ? ceil_div(n, 2) : round_up(n, 2);
}

// Calls sum_up(), with FlushToZero for bfloat16.
template <class T, class F>
void in_mode_of(F&& sum_up) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const FlushToZero flush;
    sum_up();
  } else {
    sum_up();
  }
}

// The bits of as many bfloat16 as a vector has float32, each in the lower half.
inline Vector<Pair> load_bits(const BFloat16* from) {
  Pair bits[kLanes<Pair>];
  for (int i = 0; i < kLanes<Pair>; ++i) bits[i] = from[i].bits;
  return load(bits);
}

// Element k of all columns of a matrix, whose rows are the numbers. vector(j) reads elements that end at whole() or before.
template <class T>
struct ElementsOfColumns {
  Matrix<const T> m;
  Index k;
  Index whole() const { return m.cols; }
  Vector<T> vector(Index j) const { return load(m.row(k) + j); }
  T operator[](Index j) const { return m(k, j); }
};

#ifdef __AVX512BF16__
template <>
struct ElementsOfColumns<BFloat16> {
  ElementsOfColumns(Matrix<const BFloat16> m, Index k)
      : cols(m.cols),
        even(m.row(2 * k)),
        odd(m.row(least(2 * k + 1, m.rows - 1))),
        mask(2 * k + 1 < m.rows ? ~0u : 0) {}
  Index whole() const { return cols; }
  Vector<Pair> vector(Index j) const { return load_bits(even + j) | (load_bits(odd + j) & mask) << 16; }
  Pair operator[](Index j) const { return even[j].bits | (odd[j].bits & mask) << 16; }

  Index cols;
  const BFloat16 *even, *odd;
  Pair mask;  // 0 if the last pair has one number only
};

#else
template <>
struct ElementsOfColumns<BFloat16> {
  ElementsOfColumns(Matrix<const BFloat16> m, Index k)
      : cols(m.cols), row(m.row(least(k ^ 1, m.rows - 1))), mask((k ^ 1) < m.rows ? ~0u : 0) {}
  Index whole() const { return cols; }
  Vector<float> vector(Index j) const { return std::bit_cast<Vector<float> >((load_bits(row + j) & mask) << 16); }
  float operator[](Index j) const { return std::bit_cast<float>((row[j].bits & mask) << 16); }

  Index cols;
  const BFloat16* row;
  Pair mask;
};
#endif

// The elements of a row of n numbers.
template <class T>
struct ElementsOfRow {
  const T* row;
  Index n;
  Index whole() const { return n; }
  Vector<T> vector(Index k) const { return load(row + k); }
  T operator[](Index k) const { return row[k]; }
};

#ifdef __AVX512BF16__
template <>
struct ElementsOfRow<BFloat16> {
  const BFloat16* row;
  Index n;
  Index whole() const { return n / 2; }
  Vector<Pair> vector(Index k) const { return load(reinterpret_cast<const Pair*>(row + 2 * k)); }
  Pair operator[](Index k) const { return row[2 * k].bits | (2 * k + 1 < n ? Pair{row[2 * k + 1].bits} << 16 : 0); }
};

#else
template <>
struct ElementsOfRow<BFloat16> {
  const BFloat16* row;
  Index n;
  Index whole() const { return n; }
  Vector<float> vector(Index k) const { return std::bit_cast<Vector<float> >(exchanged(load_bits(row + k) << 16)); }
  float operator[](Index k) const { return (k ^ 1) < n ? static_cast<float>(row[k ^ 1]) : 0.0f; }

 private:
  static Vector<Pair> exchanged(Vector<Pair> x) {
    return [x]<int... I>(std::integer_sequence<int, I...>) { return __builtin_shufflevector(x, x, (I ^ 1)...); }
    (std::make_integer_sequence<int, kLanes<Pair> >());
  }
};
#endif

// Some elements of a row or of columns.
template <class E, class Source>
void copy_elements(E* to, Rows some, const Source& source) {
  Index k = some.begin;
  for (; k + kLanes<E> <= least(some.end, source.whole()); k += kLanes<E>, to += kLanes<E>) store(to, source.vector(k));
  for (; k < some.end; ++k) *to++ = source[k];
}

}  // namespace streambp::cpu::STREAMBP_INSTRUCTIONS
