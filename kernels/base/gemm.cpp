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

#include "kernels/base/vectors.h"

namespace streambp::cpu {

constexpr int kRows = 6;
template <class A>
constexpr Index kPanel = kVectors* kLanes<A>;
constexpr Index kPackedColumns = 128;  // of b, in some panels
static_assert(kPackedColumns % kPanel<float> == 0);

// --- The innermost loop ---

// ROWS rows of c times VECTORS vectors of its columns.
template <int ROWS, int VECTORS, Op OP, class A>
void multiply_tile(Matrix<A> c, const A* a, const A* b, Index inner, Update update) {
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {  // fetch the tile of c while the sums are computed
    for (int line = 0; line < VECTORS * kVectorBytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(c.row(i)) + line, 1);
    }
  }
  Vector<A> sums[ROWS][VECTORS] = {};
  for (Index k = 0; k < inner; ++k) {
    Vector<A> x[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) x[v] = load(b + k * kPanel<A> + v * kLanes<A>);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
      constexpr Index stride = LeftBlock<A>::kStride;
      const A y = OP == Op::as_is ? a[i * stride + k] : a[k * stride + i];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sums[i][v] = fused(x[v], y, sums[i][v]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      A* to = c.row(i) + v * kLanes<A>;
      store(to, update == Update::add ? load(to) + sums[i][v] : sums[i][v]);
    }
  }
}

// The same if c ends within a vector.
template <int ROWS, int VECTORS, Op OP, class A>
void multiply_ragged_tile(Matrix<A> c, const A* a, const A* b, Index inner, Update update) {
  A sums[ROWS * VECTORS * kLanes<A>];
  const Matrix<A> all(sums, ROWS, VECTORS * kLanes<A>);
  multiply_tile<ROWS, VECTORS, OP>(all, a, b, inner, Update::assign);
  for (Index i = 0; i < ROWS; ++i) {
    for (Index j = 0; j < c.cols; ++j) c(i, j) = update == Update::add ? c(i, j) + all(i, j) : all(i, j);
  }
}

// All rows, ROWS at a time and then the rest in smaller tiles.
template <int ROWS, int VECTORS, Op OP, class A>
void multiply_rows(Matrix<A> c, const A* a, const A* b, Index inner, Update update) {
  constexpr Index step = OP == Op::as_is ? LeftBlock<A>::kStride : 1;  // from one row of op(a) to the next
  const auto tile =
      c.cols == VECTORS * kLanes<A> ? multiply_tile<ROWS, VECTORS, OP, A> : multiply_ragged_tile<ROWS, VECTORS, OP, A>;
  Index i = 0;
  for (; i + ROWS <= c.rows; i += ROWS) {
    tile({c.row(i), ROWS, c.cols, c.stride}, a + i * step, b, inner, update);
  }
  if constexpr (ROWS > 1) {
    const Matrix<A> rest(c.row(i), c.rows - i, c.cols, c.stride);
    multiply_rows<(ROWS > 4 ? 4 : ROWS / 2), VECTORS, OP>(rest, a + i * step, b, inner, update);
  }
}

// A panel, with as many vectors as its columns need.
template <int VECTORS, Op OP, class A>
void multiply_panel(Matrix<A> c, const A* a, const A* b, Index inner, Update update) {
  if constexpr (VECTORS > 1) {
    if (c.cols <= (VECTORS - 1) * kLanes<A>) return multiply_panel<VECTORS - 1, OP>(c, a, b, inner, update);
  }
  multiply_rows<kRows, VECTORS, OP>(c, a, b, inner, update);
}

template <class A>
void multiply(Matrix<A> c, Input<A> a, Op op, const RightPanels<A>& b, Update update) {
  require(a.stride == LeftBlock<A>::kStride, "gemm: the left operand is not in a block");
  require(c.rows == (op == Op::as_is ? a.rows : a.cols) && c.cols == b.cols &&
              b.rows == (op == Op::as_is ? a.cols : a.rows),
          "gemm: the operands do not fit together");
  const A* panel = b.data();
  for (Index j = 0; j < c.cols; j += kPanel<A>, panel += b.rows * kPanel<A>) {
    const Matrix<A> part = c.columns(j, least(kPanel<A>, c.cols - j));
    op == Op::as_is ? multiply_panel<kVectors, Op::as_is>(part, a.data, panel, b.rows, update)
                    : multiply_panel<kVectors, Op::transposed>(part, a.data, panel, b.rows, update);
  }
}

// --- Packing ---

// Panel p holds the columns from p kPanel on: panel[k][j] = b(k, p kPanel + j).
template <class A, class T>
void pack_rows(A* panels, Matrix<const T> b) {
  for (Index k = 0; k < b.rows; ++k) {
    const T* row = b.row(k);
    A* panel = panels + k * kPanel<A>;
    Index j = 0;
    for (; j + kPanel<A> <= b.cols; j += kPanel<A>, panel += b.rows * kPanel<A>) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(panel + v * kLanes<A>, load_as<A>(row + j + v * kLanes<A>));
    }
    if (j == b.cols) continue;
    for (Index i = 0; i < kPanel<A>; ++i) panel[i] = j + i < b.cols ? static_cast<A>(row[j + i]) : A(0);
  }
}

// panel[k][j] = b(j, k) for the rows of a panel
template <class A, class T>
void pack_transposed(A* panel, Matrix<const T> b) {
  constexpr Index n = kLanes<A>;
  for (Index j = 0; j < kPanel<A>; j += n) {
    Index k = 0;
    for (; j + n <= b.rows && k + n <= b.cols; k += n) {
      Vector<A> x[n];
#pragma GCC unroll 16
      for (Index i = 0; i < n; ++i) x[i] = load_as<A>(b.row(j + i) + k);
      transpose<A>(x);
#pragma GCC unroll 16
      for (Index i = 0; i < n; ++i) store(panel + (k + i) * kPanel<A> + j, x[i]);
    }
    for (; k < b.cols; ++k) {
      for (Index i = j; i < j + n; ++i) panel[k * kPanel<A> + i] = i < b.rows ? static_cast<A>(b(i, k)) : A(0);
    }
  }
}

template <class A>
RightPanels<A>::RightPanels(Index most_cols)
    : most_cols_(most_cols), memory_(kBlock * round_up(most_cols, kPanel<A>)) {}

template <class A>
template <class T>
void RightPanels<A>::pack(Matrix<const T> b, Op op) {
  rows = op == Op::as_is ? b.rows : b.cols;
  cols = op == Op::as_is ? b.cols : b.rows;
  require(rows <= kBlock && cols <= most_cols_, "panels of ", rows, "x", cols, " are too large");
  A* panel = memory_.data();
  if (op == Op::as_is) return pack_rows(panel, b);
  for (Index j = 0; j < cols; j += kPanel<A>, panel += rows * kPanel<A>) {
    pack_transposed(panel, b.slice({j, least(j + kPanel<A>, cols)}));
  }
}

template <class A>
template <class T>
Matrix<A> LeftBlock<A>::copy(Matrix<const T> m) const {
  const Matrix<A> block = matrix(m.rows, m.cols);
  for (Index i = 0; i < m.rows; ++i) {
    Index j = 0;
    for (; j + kLanes<A> <= m.cols; j += kLanes<A>) store(block.row(i) + j, load_as<A>(m.row(i) + j));
    for (; j < m.cols; ++j) block(i, j) = static_cast<A>(m(i, j));
  }
  return block;
}

// --- A product of any size ---

template <class A, class T>
void gemm(Matrix<A> c, Matrix<const T> a, Op op_a, Matrix<const T> b, Op op_b) {
  thread_local LeftBlock<A> left;
  thread_local RightPanels<A> right(kPackedColumns);
  const Index inner = op_a == Op::as_is ? a.cols : a.rows;
  for (Index block = 0; block < ceil_div(inner, kBlock); ++block) {
    const Rows k = piece(block, kBlock, inner);
    const Matrix<A> rows = left.copy(op_a == Op::as_is ? a.columns(k.begin, k.size()) : a.slice(k));
    const Matrix<const T> b_rows = op_b == Op::as_is ? b.slice(k) : b.columns(k.begin, k.size());
    for (Index j = 0; j < c.cols; j += kPackedColumns) {
      const Rows cols = {j, least(j + kPackedColumns, c.cols)};
      right.pack(op_b == Op::as_is ? b_rows.columns(j, cols.size()) : b_rows.slice(cols), op_b);
      multiply<A>(c.columns(j, cols.size()), rows, op_a, right, Update::add);
    }
  }
}

#define STREAMBP_GEMM(A, T)                                     \
  template Matrix<A> LeftBlock<A>::copy(Matrix<const T>) const; \
  template void RightPanels<A>::pack(Matrix<const T>, Op);      \
  template void gemm(Matrix<A>, Matrix<const T>, Op, Matrix<const T>, Op);
#define STREAMBP_PRODUCTS(A)     \
  template class LeftBlock<A>;   \
  template class RightPanels<A>; \
  template void multiply(Matrix<A>, Input<A>, Op, const RightPanels<A>&, Update);

STREAMBP_PRODUCTS(float)
STREAMBP_PRODUCTS(double)
STREAMBP_GEMM(float, float)
STREAMBP_GEMM(float, BFloat16)
STREAMBP_GEMM(double, double)

}  // namespace streambp::cpu
