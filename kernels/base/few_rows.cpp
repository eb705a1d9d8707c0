// Products with few rows, as in decoding: y += x wᵀ. All of w is used once, so the speed of memory should be the limit.
// But gemm() packs w, and for one row of x that takes longer than the product. Here, w is read where it lies:
//
//   1 to 4 rows     squares of w are transposed in registers, so that its rows are side by side in a vector
//   5 to 16 rows    x is packed with its rows side by side in a vector, and each number of w multiplies all of them
//
// The sums have gemm()'s order, so the bits are the same.

#include <algorithm>
#include <vector>

#include "kernels/base/gemm.h"
#include "kernels/base/math.cuh"
#include "kernels/base/vectors.h"

namespace streambp::cpu {

// total + Σ x w, as gemm() computes an element
template <class A, class T>
A dot(A total, const A* x, const T* w, Index n) {
  for (Index begin = 0; begin < n; begin += kBlock) {
    A sum = 0;
    for (Index k = begin; k < least(begin + kBlock, n); ++k) sum = multiply_add(x[k], static_cast<A>(w[k]), sum);
    total += sum;
  }
  return total;
}

// ROWS rows of x times a vector of rows of w
template <int ROWS, class A, class T>
void multiply_transposed(Matrix<A> y, Input<A> x, Matrix<const T> w) {
  constexpr Index n = kLanes<A>;
  for (Index begin = 0; begin < w.cols; begin += kBlock) {
    const Index end = least(begin + kBlock, w.cols);
    Vector<A> sums[ROWS] = {}, square[n];
    Index k = begin;
    for (; k + n <= end; k += n) {
#pragma GCC unroll 16
      for (Index j = 0; j < n; ++j) square[j] = load_as<A>(w.row(j) + k);
      transpose<A>(square);
#pragma GCC unroll 16
      for (Index j = 0; j < n; ++j) {
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) sums[i] = fused(square[j], x(i, k + j), sums[i]);
      }
    }
    for (; k < end; ++k) {
      A column[n];
      for (Index j = 0; j < n; ++j) column[j] = static_cast<A>(w(j, k));
      for (int i = 0; i < ROWS; ++i) sums[i] = fused(load(column), x(i, k), sums[i]);
    }
    for (int i = 0; i < ROWS; ++i) store(y.row(i), load(y.row(i)) + sums[i]);
  }
}

template <int ROWS, class A, class T>
void multiply_up_to_four(Matrix<A> y, Input<A> x, Matrix<const T> w) {
  if constexpr (ROWS > 1) {
    if (x.rows < ROWS) return multiply_up_to_four<ROWS - 1>(y, x, w);
  }
  constexpr Index n = kLanes<A>;
  Index j = 0;
  for (; j + n <= w.rows; j += n) multiply_transposed<ROWS>(y.columns(j, n), x, w.slice({j, j + n}));
  for (; j < w.rows; ++j) {
    for (int i = 0; i < ROWS; ++i) y(i, j) = dot(y(i, j), x.row(i), w.row(j), w.cols);
  }
}

// ROWS rows of w times all rows of x, which are packed: VECTORS vectors for each k
template <int ROWS, int VECTORS, class A>
void multiply_packed(Matrix<A> y, const A* x, Input<A> w) {
  constexpr Index width = VECTORS * kLanes<A>;
  A values[ROWS * width] = {};
  const Matrix<A> total(values, ROWS, width);  // yᵀ
  for (int j = 0; j < ROWS; ++j) {
    for (Index i = 0; i < y.rows; ++i) total(j, i) = y(i, j);
  }
  for (Index begin = 0; begin < w.cols; begin += kBlock) {
    Vector<A> sums[ROWS][VECTORS] = {};
    for (Index k = begin; k < least(begin + kBlock, w.cols); ++k) {
#pragma GCC unroll 12
      for (int j = 0; j < ROWS; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[j][v] = fused(load(x + k * width + v * kLanes<A>), w(j, k), sums[j][v]);
      }
    }
    for (int j = 0; j < ROWS; ++j) {
      for (int v = 0; v < VECTORS; ++v) {
        A* to = total.row(j) + v * kLanes<A>;
        store(to, load(to) + sums[j][v]);
      }
    }
  }
  for (int j = 0; j < ROWS; ++j) {
    for (Index i = 0; i < y.rows; ++i) y(i, j) = total(j, i);
  }
}

// All rows of w, ROWS at a time and then the rest in smaller tiles.
template <int ROWS, int VECTORS, class A>
void multiply_all_packed(Matrix<A> y, const A* x, Input<A> w) {
  Index j = 0;
  for (; j + ROWS <= w.rows; j += ROWS) multiply_packed<ROWS, VECTORS>(y.columns(j, ROWS), x, w.slice({j, j + ROWS}));
  if constexpr (ROWS > 1) multiply_all_packed<ROWS / 2, VECTORS>(y.columns(j, w.rows - j), x, w.slice({j, w.rows}));
}

template <int VECTORS, class A>
void multiply_up_to_sixteen(Matrix<A> y, Input<A> x, Input<A> w, std::vector<A>& packed) {
  constexpr Index width = VECTORS * kLanes<A>;
  if constexpr (VECTORS > 1) {
    if (x.rows <= width - kLanes<A>) return multiply_up_to_sixteen<VECTORS - 1>(y, x, w, packed);
  }
  packed.assign(static_cast<std::size_t>(x.cols * width), A(0));
  for (Index i = 0; i < x.rows; ++i) {
    for (Index k = 0; k < x.cols; ++k) packed[k * width + i] = x(i, k);
  }
  multiply_all_packed<VECTORS == 1 ? 12 : 6, VECTORS>(y, packed.data(), w);
}

template <class A, class T>
void multiply_few_rows(Matrix<A> y, Matrix<const T> x, Matrix<const T> w) {
  require(x.rows <= kFewRows<T> && y.rows == x.rows && y.cols == w.rows && x.cols == w.cols,
          "product of few rows: the operands do not fit together");
  thread_local std::vector<A> copy;
  if constexpr (std::is_same_v<A, T>) {
    x.rows <= 4 ? multiply_up_to_four<4>(y, x, w) : multiply_up_to_sixteen<kFewRows<T> / kLanes<A>>(y, x, w, copy);
  } else {
    copy.resize(static_cast<std::size_t>(x.size()));
    const Matrix<A> converted(copy.data(), x.rows, x.cols);
    for (Index i = 0; i < x.rows; ++i) std::copy_n(x.row(i), x.cols, converted.row(i));
    multiply_up_to_four<4>(y, converted, w);
  }
}

template void multiply_few_rows(Matrix<float>, Matrix<const float>, Matrix<const float>);
template void multiply_few_rows(Matrix<float>, Matrix<const BFloat16>, Matrix<const BFloat16>);
template void multiply_few_rows(Matrix<double>, Matrix<const double>, Matrix<const double>);

}  // namespace streambp::cpu
