// Single-threaded products of small matrices on the CPU: the building blocks of matmul.cuh and attention.cuh.
//
//   gemm        the CBLAS library's product
//   few_rows    y = x wᵀ for a few rows of x: reads w once, so it is bound by memory bandwidth. Used in generation.
#pragma once

#include <cblas.h>

#include "kernels/base/matrix.cuh"

// Only OpenBLAS has this function. Other CBLAS libraries take the number of threads from environment variables.
extern "C" void openblas_set_num_threads(int) __attribute__((weak));

namespace streambp {

namespace cpu {

inline const bool kBlasIsSingleThreaded = [] {
  if (openblas_set_num_threads) openblas_set_num_threads(1);
  return true;
}();

enum class Op : int { as_is = CblasNoTrans, transposed = CblasTrans };

// c = alpha op(a) op(b) + beta c
template <class T>
void gemm(T alpha, Input<T> a, Op op_a, Input<T> b, Op op_b, T beta, Matrix<T> c) {
  const Index inner = op_a == Op::as_is ? a.cols : a.rows;
  const auto m = static_cast<int>(c.rows), n = static_cast<int>(c.cols), k = static_cast<int>(inner);
  const auto lda = static_cast<int>(a.stride), ldb = static_cast<int>(b.stride), ldc = static_cast<int>(c.stride);
  const auto ta = static_cast<CBLAS_TRANSPOSE>(op_a), tb = static_cast<CBLAS_TRANSPOSE>(op_b);
  if constexpr (std::is_same_v<T, float>) {
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a.data, lda, b.data, ldb, beta, c.data, ldc);
  } else {
    cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a.data, lda, b.data, ldb, beta, c.data, ldc);
  }
}

constexpr Index kLanes = 16;       // partial sums of a dot product
constexpr Index kPrefetch = 4096;  // elements to prefetch ahead

// y = x wᵀ for the first ROWS rows of x and COLUMNS rows of w. Both are so small that all sums stay in registers.
template <Index ROWS, Index COLUMNS, class T>
void dots(Matrix<T> y, Input<T> x, Input<T> w) {
  const Index n = x.cols, ahead = ceil_div(kPrefetch, n) * w.stride;
  T sums[COLUMNS][ROWS][kLanes] = {};
  auto add = [&](Index k, Index lanes) {
    for (Index j = 0; j < COLUMNS; ++j) {
      for (Index i = 0; i < ROWS; ++i) {
#pragma omp simd
        for (Index lane = 0; lane < lanes; ++lane) {
          sums[j][i][lane] += x(i, k + lane) * w(j, k + lane);
        }
      }
    }
  };
  Index k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    for (Index j = 0; j < COLUMNS; ++j) __builtin_prefetch(w.row(j) + k + ahead);
    add(k, kLanes);
  }
  add(k, n - k);
  for (Index j = 0; j < COLUMNS; ++j) {
    for (Index i = 0; i < ROWS; ++i) {
      T* sum = sums[j][i];
      for (Index half = kLanes / 2; half > 0; half /= 2) {
        for (Index lane = 0; lane < half; ++lane) sum[lane] += sum[lane + half];
      }
      y(i, j) = sum[0];
    }
  }
}

// y = x wᵀ for a few rows of x: ROWS rows at a time, then the remainder in smaller steps. A row's result does not
// depend on the other rows.
template <Index ROWS, class T>
void few_rows(Matrix<T> y, Input<T> x, Input<T> w) {
  constexpr Index columns = ROWS == 8 ? 1 : ROWS == 4 ? 2 : 4;
  Index i = 0;
  for (; i + ROWS <= x.rows; i += ROWS) {
    const Rows rows = {i, i + ROWS};
    const Matrix<T> y_rows = y.slice(rows);
    const Matrix<const T> x_rows = x.slice(rows);
    Index j = 0;
    for (; j + columns <= w.rows; j += columns) {
      dots<ROWS, columns, T>(y_rows.columns(j, columns), x_rows, w.slice({j, j + columns}));
    }
    for (; j < w.rows; ++j) dots<ROWS, 1, T>(y_rows.columns(j, 1), x_rows, w.slice({j, j + 1}));
  }
  if constexpr (ROWS > 1) few_rows<ROWS / 2, T>(y.slice({i, y.rows}), x.slice({i, x.rows}), w);
}

}  // namespace cpu

}  // namespace streambp
