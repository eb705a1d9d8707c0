// How a matrix product gets fast. A processor core starts two vector multiply-adds per cycle, but can load only about
// two vectors, and only if they are in the L1 cache; from memory it gets a vector every ten cycles or so. So every
// number must be used many times after it was loaded, at each level:
//
//   registers   The innermost loop computes 6 x 4 vectors of c (6 x 2 if there are 16 registers, as with AVX2). For each
//               k it loads 4 vectors of b and 6 numbers of a, and uses them in 24 multiply-adds. These do not depend on
//               each other, so the core need not wait for one to finish before it starts the next.
//   L1, L2      The loop reads b from a panel, where its vectors lie one after the other, and the panel is used for all
//               rows of a block of a. Both fit into the L2 cache.
//   memory      A block of a is used for all columns of c, and a panel of b for kBlock rows. Several panels are packed
//               at once: a row of one is only a cache line (AVX-512: four), too little to read memory at full speed.
//
// b must have its columns side by side in a vector. If it is given transposed, packing transposes it in registers.

#include "kernels/base/gemm.h"

#include <algorithm>

#include "kernels/base/pairs.h"

namespace streambp::cpu {

// The innermost loop multiplies elements of type E: numbers, or pairs of bfloat16.
constexpr int kRows = 6;
template <class E>
constexpr Index kPanel = kVectors* kLanes<E>;
constexpr Index kPackedColumns = 128;  // of b, in some panels
static_assert(kPackedColumns % kPanel<float> == 0);
template <class E>
constexpr Index kStride = LeftBlock<Sum<E>>::kStride;

// --- The innermost loop ---

// ROWS rows of c times VECTORS vectors of its columns. Matrices are passed by reference: a copy would be written in parts and
// read at once, and the processor would wait for its own stores.
template <int ROWS, int VECTORS, Op OP, class E>
void multiply_tile(const Matrix<Sum<E>>& c, const E* a, const E* b, Index inner, Update update) {
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {  // fetch the tile of c while the sums are computed
    for (int line = 0; line < VECTORS * kVectorBytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(c.row(i)) + line, 1);
    }
  }
  Vector<Sum<E>> sums[ROWS][VECTORS];
  with_fused<E>([&](auto fused) {
#pragma GCC unroll 6
    for (auto& row : sums) std::fill_n(row, VECTORS, Vector<Sum<E>>{});
    for (Index k = 0; k < inner; ++k) {
      Vector<E> x[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) x[v] = load(b + k * kPanel<E> + v * kLanes<E>);
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; ++i) {
        const E y = OP == Op::as_is ? a[i * kStride<E> + k] : a[k * kStride<E> + i];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[i][v] = fused(x[v], y, sums[i][v]);
      }
    }
  });
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      Sum<E>* to = c.row(i) + v * kLanes<E>;
      store(to, update == Update::add ? load(to) + sums[i][v] : sums[i][v]);
    }
  }
}

// The same if c ends within a vector.
template <int ROWS, int VECTORS, Op OP, class E>
void multiply_ragged_tile(const Matrix<Sum<E>>& c, const E* a, const E* b, Index inner, Update update) {
  Sum<E> sums[ROWS * VECTORS * kLanes<E>];
  const Matrix<Sum<E>> all(sums, ROWS, VECTORS * kLanes<E>);
  multiply_tile<ROWS, VECTORS, OP>(all, a, b, inner, Update::assign);
  for (Index i = 0; i < ROWS; ++i) {
    for (Index j = 0; j < c.cols; ++j) c(i, j) = update == Update::add ? c(i, j) + all(i, j) : all(i, j);
  }
}

// All rows, ROWS at a time and then the rest in smaller tiles.
template <int ROWS, int VECTORS, Op OP, class E>
void multiply_rows(const Matrix<Sum<E>>& c, const E* a, const E* b, Index inner, Update update) {
  constexpr Index step = OP == Op::as_is ? kStride<E> : 1;  // from one row of op(a) to the next
  const auto tile =
      c.cols == VECTORS * kLanes<E> ? multiply_tile<ROWS, VECTORS, OP, E> : multiply_ragged_tile<ROWS, VECTORS, OP, E>;
  Index i = 0;
  for (; i + ROWS <= c.rows; i += ROWS) {
    tile({c.row(i), ROWS, c.cols, c.stride}, a + i * step, b, inner, update);
  }
  if constexpr (ROWS > 1) {
    const Matrix<Sum<E>> rest(c.row(i), c.rows - i, c.cols, c.stride);
    multiply_rows<(ROWS > 4 ? 4 : ROWS / 2), VECTORS, OP>(rest, a + i * step, b, inner, update);
  }
}

// A panel, with as many vectors as its columns need.
template <int VECTORS, Op OP, class E>
void multiply_panel(const Matrix<Sum<E>>& c, const E* a, const E* b, Index inner, Update update) {
  if constexpr (VECTORS > 1) {
    if (c.cols <= (VECTORS - 1) * kLanes<E>) return multiply_panel<VECTORS - 1, OP>(c, a, b, inner, update);
  }
  multiply_rows<kRows, VECTORS, OP>(c, a, b, inner, update);
}

template <class E>
void multiply_panels(const Matrix<Sum<E>>& c, const E* a, Op op, const E* panel, Index inner, Update update) {
  for (Index j = 0; j < c.cols; j += kPanel<E>, panel += inner * kPanel<E>) {
    const Matrix<Sum<E>> part = c.columns(j, least(kPanel<E>, c.cols - j));
    op == Op::as_is ? multiply_panel<kVectors, Op::as_is>(part, a, panel, inner, update)
                    : multiply_panel<kVectors, Op::transposed>(part, a, panel, inner, update);
  }
}

template <class T>
void multiply(Matrix<Accumulator<T>> c, const Left<T>& a, const RightPanels<T>& b, Update update) {
  require(c.rows == a.rows && c.cols == b.cols && a.inner == b.rows, "gemm: the operands do not fit together");
  with_elements<T>([&]<class E>(E) {
    multiply_panels<E>(c, reinterpret_cast<const E*>(a.data), a.op, reinterpret_cast<const E*>(b.data()),
                       elements<E, T>(b.rows), update);
  });
}

template <class T>
Left<T> Left<T>::slice(Rows some) const {
  require(0 <= some.begin && some.begin <= some.end && some.end <= rows, "gemm: rows outside the operand");
  return {data + some.begin * (op == Op::as_is ? LeftBlock<T>::kStride : 1), op, some.size(), inner};
}

// --- Packing ---

// Panel p holds the columns from p kPanel on: panel[k][j] = b(k, p kPanel + j).
template <class E, class T>
void pack_rows(E* panels, Matrix<const T> b) {
  const Index inner = elements<E, T>(b.rows);
  for (Index k = 0; k < inner; ++k) {
    const ElementsOfColumns<E, T> row{b, k};
    E* panel = panels + k * kPanel<E>;
    Index j = 0;
    for (; j + kPanel<E> <= b.cols; j += kPanel<E>, panel += inner * kPanel<E>) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(panel + v * kLanes<E>, row.vector(j + v * kLanes<E>));
    }
    if (j == b.cols) continue;
    for (Index i = 0; i < kPanel<E>; ++i) panel[i] = j + i < b.cols ? row[j + i] : E(0);
  }
}

// panel[k][j] = b(j, k) for the rows of a panel
template <class E, class T>
void pack_transposed(E* panel, Matrix<const T> b) {
  constexpr Index n = kLanes<E>;
  const Index inner = elements<E, T>(b.cols);
  const auto row = [b](Index j) { return ElementsOfRow<E, T>{b.row(j), b.cols}; };
  for (Index j = 0; j < kPanel<E>; j += n) {
    Index k = 0;
    for (; j + n <= b.rows && k + n <= row(j).whole(); k += n) {
      Vector<E> x[n];
#pragma GCC unroll 16
      for (Index i = 0; i < n; ++i) x[i] = row(j + i).vector(k);
      transpose<E>(x);
#pragma GCC unroll 16
      for (Index i = 0; i < n; ++i) store(panel + (k + i) * kPanel<E> + j, x[i]);
    }
    for (; k < inner; ++k) {
      for (Index i = j; i < j + n; ++i) panel[k * kPanel<E> + i] = i < b.rows ? row(i)[k] : E(0);
    }
  }
}

template <class T>
RightPanels<T>::RightPanels(Index most_cols)
    : most_cols_(most_cols), memory_(kBlock * round_up(most_cols, kPanel<Accumulator<T>>)) {}

template <class T>
void RightPanels<T>::pack(Matrix<const T> b, Op op) {
  rows = op == Op::as_is ? b.rows : b.cols;
  cols = op == Op::as_is ? b.cols : b.rows;
  require(rows <= kBlock && cols <= most_cols_, "panels of ", rows, "x", cols, " are too large");
  with_elements<T>([&]<class E>(E) {
    E* panel = reinterpret_cast<E*>(memory_.data());
    if (op == Op::as_is) return pack_rows(panel, b);
    for (Index j = 0; j < cols; j += kPanel<E>, panel += elements<E, T>(rows) * kPanel<E>) {
      pack_transposed(panel, b.slice({j, least(j + kPanel<E>, cols)}));
    }
  });
}

template <class T>
Left<T> LeftBlock<T>::copy(Matrix<const T> m, Op op) const {
  require(m.rows <= kBlock && m.cols <= kBlock, "a block of ", m.rows, "x", m.cols, " is too large");
  with_elements<T>([&]<class E>(E) {
    E* to = reinterpret_cast<E*>(memory_.data());
    if (op == Op::as_is) {
      for (Index i = 0; i < m.rows; ++i) {
        copy_elements(to + i * kStride, {0, elements<E, T>(m.cols)}, ElementsOfRow<E, T>{m.row(i), m.cols});
      }
    } else {
      for (Index k = 0; k < elements<E, T>(m.rows); ++k) {
        copy_elements(to + k * kStride, {0, m.cols}, ElementsOfColumns<E, T>{m, k});
      }
    }
  });
  return {memory_.data(), op, op == Op::as_is ? m.rows : m.cols, op == Op::as_is ? m.cols : m.rows};
}

// --- A product of any size ---

template <class T>
void gemm(Matrix<Accumulator<T>> c, Matrix<const T> a, Op op_a, Matrix<const T> b, Op op_b) {
  thread_local LeftBlock<T> left_block;
  thread_local RightPanels<T> right(kPackedColumns);
  const Index inner = op_a == Op::as_is ? a.cols : a.rows;
  for (Index block = 0; block < ceil_div(inner, kBlock); ++block) {
    const Rows k = piece(block, kBlock, inner);
    const Left<T> left = left_block.copy(op_a == Op::as_is ? a.columns(k) : a.slice(k), op_a);
    const Matrix<const T> b_rows = op_b == Op::as_is ? b.slice(k) : b.columns(k);
    for (Index j = 0; j < c.cols; j += kPackedColumns) {
      const Rows cols = {j, least(j + kPackedColumns, c.cols)};
      right.pack(op_b == Op::as_is ? b_rows.columns(cols) : b_rows.slice(cols), op_b);
      multiply<T>(c.columns(cols), left, right, Update::add);
    }
  }
}

#define STREAMBP_PRODUCTS(T)                                                                     \
  template struct Left<T>;                                                                       \
  template class LeftBlock<T>;                                                                   \
  template class RightPanels<T>;                                                                 \
  template void multiply(Matrix<Accumulator<T>>, const Left<T>&, const RightPanels<T>&, Update); \
  template void gemm(Matrix<Accumulator<T>>, Matrix<const T>, Op, Matrix<const T>, Op);

STREAMBP_PRODUCTS(float)
STREAMBP_PRODUCTS(double)
STREAMBP_PRODUCTS(BFloat16)

}  // namespace streambp::cpu
