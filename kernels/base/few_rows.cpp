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
#include "kernels/base/pairs.h"

namespace streambp::cpu {

template <class E, class T>
constexpr Index kElementsOfBlock = elements<E, T>(kBlock);

// Row j of w, in elements.
template <class E, class T>
ElementsOfRow<E, T> row_of(Matrix<const T> w, Index j) {
  return {w.row(j), w.cols};
}

// ROWS rows of x, in elements, times up to a vector of rows of w.
template <int ROWS, class E, class T>
void multiply_transposed(Matrix<Sum<E>> y, Input<E> x, Matrix<const T> w) {
  constexpr Index n = kLanes<E>;
  Sum<E> totals[ROWS * n] = {};
  const Matrix<Sum<E>> total(totals, ROWS, n);
  for (Index i = 0; i < ROWS; ++i) std::copy_n(y.row(i), w.rows, total.row(i));
  for (Index begin = 0; begin < x.cols; begin += kElementsOfBlock<E, T>) {
    const Index end = least(begin + kElementsOfBlock<E, T>, x.cols);
    Vector<Sum<E>> sums[ROWS];
    with_fused<E>([&](auto fused) {
      std::fill_n(sums, ROWS, Vector<Sum<E>>{});
      Vector<E> square[n];
      Index k = begin;
      for (; w.rows == n && k + n <= least(end, row_of<E>(w, 0).whole()); k += n) {
#pragma GCC unroll 16
        for (Index j = 0; j < n; ++j) square[j] = row_of<E>(w, j).vector(k);
        transpose<E>(square);
#pragma GCC unroll 16
        for (Index j = 0; j < n; ++j) {
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i) sums[i] = fused(square[j], x(i, k + j), sums[i]);
        }
      }
      for (; k < end; ++k) {
        E column[n] = {};
        for (Index j = 0; j < w.rows; ++j) column[j] = row_of<E>(w, j)[k];
        for (int i = 0; i < ROWS; ++i) sums[i] = fused(load(column), x(i, k), sums[i]);
      }
    });
    for (int i = 0; i < ROWS; ++i) store(total.row(i), load(total.row(i)) + sums[i]);
  }
  for (Index i = 0; i < ROWS; ++i) std::copy_n(total.row(i), w.rows, y.row(i));
}

template <int ROWS, class E, class T>
void multiply_up_to_four(Matrix<Sum<E>> y, Input<E> x, Matrix<const T> w) {
  if constexpr (ROWS > 1) {
    if (x.rows < ROWS) return multiply_up_to_four<ROWS - 1, E>(y, x, w);
  }
  for (Index j = 0; j < w.rows; j += kLanes<E>) {
    const Rows rows = {j, least(j + kLanes<E>, w.rows)};
    multiply_transposed<ROWS, E>(y.columns(rows), x, w.slice(rows));
  }
}

// ROWS rows of w times all rows of x, which are packed: VECTORS vectors for each element.
template <int ROWS, int VECTORS, class E, class T>
void multiply_packed(Matrix<Sum<E>> y, const E* x, Index inner, Matrix<const T> w) {
  constexpr Index width = VECTORS * kLanes<E>;
  Sum<E> values[ROWS * width] = {};
  const Matrix<Sum<E>> total(values, ROWS, width);  // yᵀ
  for (int j = 0; j < ROWS; ++j) {
    for (Index i = 0; i < y.rows; ++i) total(j, i) = y(i, j);
  }
  for (Index begin = 0; begin < inner; begin += kElementsOfBlock<E, T>) {
    Vector<Sum<E>> sums[ROWS][VECTORS];
    const Index end = least(begin + kElementsOfBlock<E, T>, inner);
    E copies[ROWS][kElementsOfBlock<E, T>];
    Matrix<const E> block;
    if constexpr (std::is_same_v<E, T>) {
      block = w.columns(begin, end - begin);
    } else {
      for (int j = 0; j < ROWS; ++j) copy_elements(copies[j], {begin, end}, row_of<E>(w, j));
      block = {copies[0], ROWS, end - begin, kElementsOfBlock<E, T>};
    }
    with_fused<E>([&](auto fused) {
      for (auto& row : sums) std::fill_n(row, VECTORS, Vector<Sum<E>>{});
      for (Index k = 0; k < end - begin; ++k) {
        const E* const packed = x + (begin + k) * width;
#pragma GCC unroll 12
        for (int j = 0; j < ROWS; ++j) {
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) sums[j][v] = fused(load(packed + v * kLanes<E>), block(j, k), sums[j][v]);
        }
      }
    });
    for (int j = 0; j < ROWS; ++j) {
      for (int v = 0; v < VECTORS; ++v) {
        Sum<E>* to = total.row(j) + v * kLanes<E>;
        store(to, load(to) + sums[j][v]);
      }
    }
  }
  for (int j = 0; j < ROWS; ++j) {
    for (Index i = 0; i < y.rows; ++i) y(i, j) = total(j, i);
  }
}

// All rows of w, ROWS at a time and then the rest in smaller tiles.
template <int ROWS, int VECTORS, class E, class T>
void multiply_all_packed(Matrix<Sum<E>> y, const E* x, Index inner, Matrix<const T> w) {
  Index j = 0;
  for (; j + ROWS <= w.rows; j += ROWS) {
    multiply_packed<ROWS, VECTORS, E>(y.columns(j, ROWS), x, inner, w.slice({j, j + ROWS}));
  }
  if constexpr (ROWS > 1) {
    multiply_all_packed<ROWS / 2, VECTORS, E>(y.columns(j, w.rows - j), x, inner, w.slice({j, w.rows}));
  }
}

template <int VECTORS, class E, class T>
void multiply_up_to_sixteen(Matrix<Sum<E>> y, Input<E> x, Matrix<const T> w) {
  constexpr Index width = VECTORS * kLanes<E>;
  if constexpr (VECTORS > 1) {
    if (x.rows <= width - kLanes<E>) return multiply_up_to_sixteen<VECTORS - 1, E>(y, x, w);
  }
  thread_local std::vector<E> packed;
  packed.assign(static_cast<std::size_t>(x.cols * width), E(0));
  for (Index i = 0; i < x.rows; ++i) {
    for (Index k = 0; k < x.cols; ++k) packed[k * width + i] = x(i, k);
  }
  multiply_all_packed<VECTORS == 1 ? 12 : 6, VECTORS, E>(y, packed.data(), x.cols, w);
}

template <class T>
void multiply_few_rows(Matrix<Accumulator<T>> y, Matrix<const T> x, Matrix<const T> w) {
  require(x.rows <= kFewRows && y.rows == x.rows && y.cols == w.rows && x.cols == w.cols,
          "product of few rows: the operands do not fit together");
  with_elements<T>([&]<class E>(E) {
    Matrix<const E> in_elements;
    if constexpr (std::is_same_v<E, T>) {
      in_elements = x;
    } else {
      thread_local std::vector<E> copy;
      const Matrix<E> to(nullptr, x.rows, elements<E, T>(x.cols));
      copy.resize(static_cast<std::size_t>(to.size()));
      in_elements = Matrix<const E>(copy.data(), to.rows, to.cols);
      for (Index i = 0; i < x.rows; ++i) copy_elements(copy.data() + i * to.cols, {0, to.cols}, row_of<E>(x, i));
    }
    x.rows <= 4 ? multiply_up_to_four<4, E>(y, in_elements, w)
                : multiply_up_to_sixteen<kFewRows / kLanes<E>, E>(y, in_elements, w);
  });
}

template void multiply_few_rows(Matrix<float>, Matrix<const float>, Matrix<const float>);
template void multiply_few_rows(Matrix<float>, Matrix<const BFloat16>, Matrix<const BFloat16>);
template void multiply_few_rows(Matrix<double>, Matrix<const double>, Matrix<const double>);

}  // namespace streambp::cpu
