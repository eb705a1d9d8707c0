// Vectors of an instruction set, and what the matrix products do with them.
#pragma once

#include <utility>

#include "kernels/base/inner_loops.h"

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#ifndef STREAMBP_INSTRUCTIONS
#error "only files that are compiled for several instruction sets include this: see inner_loops.h"
#endif

namespace streambp::cpu::STREAMBP_INSTRUCTIONS {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 4;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kVectors = 2;
#else
constexpr int kVectorBytes = 16, kVectors = 4;
#endif

template <class A>
struct VectorOf {  // loose: pairs of bfloat16 may begin at any of them
  using Aligned [[gnu::vector_size(kVectorBytes)]] = A;
  using Loose [[gnu::vector_size(kVectorBytes), gnu::aligned(alignof(BFloat16)), gnu::may_alias]] = A;
};
template <class A>
using Vector = typename VectorOf<A>::Aligned;
template <class A>
constexpr int kLanes = kVectorBytes / sizeof(A);

template <class A>
Vector<A> load(const A* from) {
  return *reinterpret_cast<const typename VectorOf<A>::Loose*>(from);
}
template <class A>
void store(A* to, Vector<A> x) {
  *reinterpret_cast<typename VectorOf<A>::Loose*>(to) = x;
}
template <class V, int N>
void clear(V (&vectors)[N]) {
  for (V& x : vectors) x = V{};
}

// Slices of a matrix, unchecked
template <class T>
Matrix<T> rows_of(const Matrix<T>& m, Index begin, Index count) {
  return {m.row(begin), count, m.cols, m.stride};
}
template <class T>
Matrix<T> columns_of(const Matrix<T>& m, Index begin, Index count) {
  return {m.data + begin, m.rows, count, m.stride};
}

// x y + sum, rounded once
#if defined(__AVX512F__)
inline Vector<float> fused(Vector<float> x, float y, Vector<float> sum) {
  return _mm512_fmadd_ps(x, _mm512_set1_ps(y), sum);
}
inline Vector<double> fused(Vector<double> x, double y, Vector<double> sum) {
  return _mm512_fmadd_pd(x, _mm512_set1_pd(y), sum);
}
#elif defined(__AVX2__)
inline Vector<float> fused(Vector<float> x, float y, Vector<float> sum) {
  return _mm256_fmadd_ps(x, _mm256_set1_ps(y), sum);
}
inline Vector<double> fused(Vector<double> x, double y, Vector<double> sum) {
  return _mm256_fmadd_pd(x, _mm256_set1_pd(y), sum);
}
#elif defined(__aarch64__)
inline Vector<float> fused(Vector<float> x, float y, Vector<float> sum) { return vfmaq_n_f32(sum, x, y); }
inline Vector<double> fused(Vector<double> x, double y, Vector<double> sum) { return vfmaq_n_f64(sum, x, y); }
#endif

// The even lanes of the result come from a, the odd ones from b: a0 b0 a1 b1 ..., from the lower or upper halves.
template <int UPPER, class A, int... I>
Vector<A> interleave(Vector<A> a, Vector<A> b, std::integer_sequence<int, I...>) {
  constexpr int n = kLanes<A>;
  return __builtin_shufflevector(a, b, (UPPER * n / 2 + I / 2 + I % 2 * n)...);
}

// Transposes a square of vectors. Interleaving row i with row i + n/2, for all i, moves the highest bit of the row
// number to the lowest bit of the column number; after log2(n) times, rows and columns are exchanged.
template <class A>
void transpose(Vector<A> (&x)[kLanes<A>]) {
  constexpr int n = kLanes<A>;
  constexpr auto lanes = std::make_integer_sequence<int, n>();
#pragma GCC unroll 4
  for (int times = 1; times < n; times *= 2) {
    Vector<A> y[n];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      y[2 * i] = interleave<0, A>(x[i], x[i + n / 2], lanes);
      y[2 * i + 1] = interleave<1, A>(x[i], x[i + n / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) x[i] = y[i];
  }
}

}  // namespace streambp::cpu::STREAMBP_INSTRUCTIONS
