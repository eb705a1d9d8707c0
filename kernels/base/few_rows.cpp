// Products with few rows, as in decoding. All of w is used once, so the speed of memory should be the limit. But gemm()
// packs w, and for one row of x that takes longer than the product. Here, w is read where it lies:
//
//   y += x w      its columns are side by side in a vector
//   y += x wᵀ     1 to 4 rows: squares of w are transposed in registers, so that its rows are side by side in a vector
//                 5 to 16 rows: x is packed with its rows side by side in a vector, and each number of w multiplies all
//
// The sums have gemm()'s order, so the bits are the same.

#include "kernels/base/pairs.h"

namespace streambp::cpu::STREAMBP_INSTRUCTIONS {

template <class T>
constexpr Index kElementsOfBlock = elements<T>(kBlock);

// Row j of w, in elements.
template <class T>
ElementsOfRow<T> row_of(Matrix<const T> w, Index j) {
  return {w.row(j), w.cols};
}

// ROWS rows of x, in elements, times VECTORS vectors of columns of w.
template <int ROWS, int VECTORS, class T>
void multiply_columns(Matrix<Accumulator<T>> y, Input<Element<T>> x, Matrix<const T> w) {
  using E = Element<T>;
  for (Index begin = 0; begin < x.cols; begin += kElementsOfBlock<T>) {
    Vector<Sum<E>> sums[ROWS][VECTORS];
    with_fused<E>([&](auto fused) {
      for (auto& row : sums) clear(row);
      for (Index k = begin; k < least(begin + kElementsOfBlock<T>, x.cols); ++k) {
        const ElementsOfColumns<T> columns{w, k};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          const Vector<E> some = columns.vector(v * kLanes<E>);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i) sums[i][v] = fused(some, x(i, k), sums[i][v]);
        }
      }
    });
    for (int i = 0; i < ROWS; ++i) {
      for (int v = 0; v < VECTORS; ++v) {
        Sum<E>* to = y.row(i) + v * kLanes<E>;
        store(to, load(to) + sums[i][v]);
      }
    }
  }
}

// All rows and columns, ROWS and VECTORS at a time and then the rest in smaller tiles. The columns fill their vectors.
template <int ROWS, int VECTORS, class T>
void multiply_all_columns(Matrix<Accumulator<T>> y, Input<Element<T>> x, Matrix<const T> w) {
  constexpr Index width = VECTORS * kLanes<Element<T>>;
  Index i = 0, j = 0;
  for (; j + width <= w.cols; j += width) {
    for (i = 0; i + ROWS <= x.rows; i += ROWS) {
      multiply_columns<ROWS, VECTORS>(columns_of(rows_of(y, i, ROWS), j, width), rows_of(x, i, ROWS),
                                      columns_of(w, j, width));
    }
    if constexpr (ROWS > 1) {
      const Index rest = x.rows - i;
      multiply_all_columns<ROWS / 2, VECTORS>(columns_of(rows_of(y, i, rest), j, width), rows_of(x, i, rest),
                                              columns_of(w, j, width));
    }
  }
  if constexpr (VECTORS > 1) {
    const Index rest = w.cols - j;
    multiply_all_columns<ROWS, VECTORS / 2>(columns_of(y, j, rest), x, columns_of(w, j, rest));
  }
}

// ROWS rows of x, in elements, times up to a vector of rows of w.
template <int ROWS, class T>
void multiply_transposed(Matrix<Accumulator<T>> y, Input<Element<T>> x, Matrix<const T> w) {
  using E = Element<T>;
  constexpr Index n = kLanes<E>;
  Sum<E> totals[ROWS * n] = {};
  const Matrix<Sum<E>> total(totals, ROWS, n);
  for (Index i = 0; i < ROWS; ++i) {
    for (Index j = 0; j < w.rows; ++j) total(i, j) = y(i, j);
  }
  for (Index begin = 0; begin < x.cols; begin += kElementsOfBlock<T>) {
    const Index end = least(begin + kElementsOfBlock<T>, x.cols);
    Vector<Sum<E>> sums[ROWS];
    with_fused<E>([&](auto fused) {
      clear(sums);
      Vector<E> square[n];
      Index k = begin;
      for (; w.rows == n && k + n <= least(end, row_of(w, 0).whole()); k += n) {
#pragma GCC unroll 16
        for (Index j = 0; j < n; ++j) square[j] = row_of(w, j).vector(k);
        transpose<E>(square);
#pragma GCC unroll 16
        for (Index j = 0; j < n; ++j) {
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i) sums[i] = fused(square[j], x(i, k + j), sums[i]);
        }
      }
      for (; k < end; ++k) {
        E column[n] = {};
        for (Index j = 0; j < w.rows; ++j) column[j] = row_of(w, j)[k];
        for (int i = 0; i < ROWS; ++i) sums[i] = fused(load(column), x(i, k), sums[i]);
      }
    });
    for (int i = 0; i < ROWS; ++i) store(total.row(i), load(total.row(i)) + sums[i]);
  }
  for (Index i = 0; i < ROWS; ++i) {
    for (Index j = 0; j < w.rows; ++j) y(i, j) = total(i, j);
  }
}

template <int ROWS, class T>
void multiply_up_to_four(Matrix<Accumulator<T>> y, Input<Element<T>> x, Matrix<const T> w) {
  if constexpr (ROWS > 1) {
    if (x.rows < ROWS) return multiply_up_to_four<ROWS - 1>(y, x, w);
  }
  constexpr Index n = kLanes<Element<T>>;
  for (Index j = 0; j < w.rows; j += n) {
    const Index rows = least(n, w.rows - j);
    multiply_transposed<ROWS>(columns_of(y, j, rows), x, rows_of(w, j, rows));
  }
}

// ROWS rows of w times all rows of x, which are packed: VECTORS vectors for each element.
template <int ROWS, int VECTORS, class T>
void multiply_packed(Matrix<Accumulator<T>> y, const Element<T>* x, Matrix<const T> w) {
  using E = Element<T>;
  const Index inner = elements<T>(w.cols);
  constexpr Index width = VECTORS * kLanes<E>;
  Sum<E> values[ROWS * width] = {};
  const Matrix<Sum<E>> total(values, ROWS, width);  // yᵀ
  for (int j = 0; j < ROWS; ++j) {
    for (Index i = 0; i < y.rows; ++i) total(j, i) = y(i, j);
  }
  for (Index begin = 0; begin < inner; begin += kElementsOfBlock<T>) {
    Vector<Sum<E>> sums[ROWS][VECTORS];
    const Index end = least(begin + kElementsOfBlock<T>, inner);
    E copies[ROWS][kElementsOfBlock<T>];
    Matrix<const E> block;
    if constexpr (std::is_same_v<E, T>) {
      block = columns_of(w, begin, end - begin);
    } else {
      for (int j = 0; j < ROWS; ++j) copy_elements(copies[j], {begin, end}, row_of(w, j));
      block = {copies[0], ROWS, end - begin, kElementsOfBlock<T>};
    }
    with_fused<E>([&](auto fused) {
      for (auto& row : sums) clear(row);
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
template <int ROWS, int VECTORS, class T>
void multiply_all_packed(Matrix<Accumulator<T>> y, const Element<T>* x, Matrix<const T> w) {
  Index j = 0;
  for (; j + ROWS <= w.rows; j += ROWS) {
    multiply_packed<ROWS, VECTORS>(columns_of(y, j, ROWS), x, rows_of(w, j, ROWS));
  }
  if constexpr (ROWS > 1) {
    multiply_all_packed<ROWS / 2, VECTORS>(columns_of(y, j, w.rows - j), x, rows_of(w, j, w.rows - j));
  }
}

template <int VECTORS, class T>
void multiply_up_to_sixteen(Matrix<Accumulator<T>> y, Input<Element<T>> x, Matrix<const T> w, Element<T>* packed) {
  constexpr Index lanes = kLanes<Element<T>>, width = VECTORS * lanes;
  if constexpr (VECTORS > 1) {
    if (x.rows <= width - lanes) return multiply_up_to_sixteen<VECTORS - 1>(y, x, w, packed);
  }
  for (Index k = 0; k < x.cols; ++k) {
    for (Index i = 0; i < width; ++i) packed[k * width + i] = i < x.rows ? x(i, k) : 0;
  }
  multiply_all_packed<VECTORS == 1 ? 12 : 6, VECTORS>(y, packed, w);
}

template <class T>
void multiply_few_rows(Matrix<Accumulator<T>> y, Matrix<const T> x, Matrix<const T> w, Op op, Accumulator<T>* scratch) {
  using E = Element<T>;
  E* copies = reinterpret_cast<E*>(scratch);
  Matrix<const E> in_elements;
  if constexpr (std::is_same_v<E, T>) {
    in_elements = x;
  } else {
    in_elements = {copies, x.rows, elements<T>(x.cols)};
    for (Index i = 0; i < x.rows; ++i, copies += in_elements.cols)
      copy_elements(copies, {0, in_elements.cols}, row_of(x, i));
  }
  in_mode_of<T>([&] {
    if (op == Op::as_is) return multiply_all_columns<4, kVectors>(y, in_elements, w);
    x.rows <= 4 ? multiply_up_to_four<4>(y, in_elements, w)
                : multiply_up_to_sixteen<kFewRows / kLanes<E>>(y, in_elements, w, copies);
  });
}

#ifndef __AVX512BF16__
template void multiply_few_rows(Matrix<float>, Matrix<const float>, Matrix<const float>, Op, float*);
template void multiply_few_rows(Matrix<double>, Matrix<const double>, Matrix<const double>, Op, double*);
#endif
template void multiply_few_rows(Matrix<float>, Matrix<const BFloat16>, Matrix<const BFloat16>, Op, float*);

}  // namespace streambp::cpu::STREAMBP_INSTRUCTIONS
