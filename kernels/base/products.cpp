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
//
// This file is compiled once for each instruction set: see inner_loops.h.

#include "kernels/base/pairs.h"

namespace streambp::cpu::STREAMBP_INSTRUCTIONS {

// The innermost loop multiplies elements of type E: numbers, or pairs of bfloat16.
constexpr int kRows = 6;
template <class E>
constexpr Index kPanel = kVectors* kLanes<E>;
static_assert(kVectors * kVectorBytes <= kMostPanelBytes);
template <class E>
constexpr Index kStride = LeftBlock<Sum<E>>::kStride;

// --- The innermost loop ---

// ROWS rows of c times VECTORS vectors of its columns. Matrices are passed by reference: a copy would be written in pieces and
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
    for (auto& row : sums) clear(row);
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
    const Matrix<Sum<E>> part = columns_of(c, j, least(kPanel<E>, c.cols - j));
    op == Op::as_is ? multiply_panel<kVectors, Op::as_is>(part, a, panel, inner, update)
                    : multiply_panel<kVectors, Op::transposed>(part, a, panel, inner, update);
  }
}

template <class T>
void multiply(Matrix<Accumulator<T>> c, const Accumulator<T>* a, Op op, const Accumulator<T>* panels, Index inner,
              Update update) {
  using E = Element<T>;
  in_mode_of<T>([&] {
    multiply_panels<E>(c, reinterpret_cast<const E*>(a), op, reinterpret_cast<const E*>(panels), elements<T>(inner),
                       update);
  });
}

// --- Packing ---

// Panel p holds the columns from p kPanel on: panel[k][j] = b(k, p kPanel + j).
template <class T>
void pack_rows(Element<T>* panels, Matrix<const T> b) {
  using E = Element<T>;
  const Index inner = elements<T>(b.rows);
  for (Index k = 0; k < inner; ++k) {
    const ElementsOfColumns<T> row{b, k};
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
template <class T>
void pack_transposed(Element<T>* panel, Matrix<const T> b) {
  using E = Element<T>;
  constexpr Index n = kLanes<E>;
  const Index inner = elements<T>(b.cols);
  const auto row = [b](Index j) { return ElementsOfRow<T>{b.row(j), b.cols}; };
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
void pack_right(Accumulator<T>* panels, Matrix<const T> b, Op op) {
  using E = Element<T>;
  E* panel = reinterpret_cast<E*>(panels);
  if (op == Op::as_is) return pack_rows(panel, b);
  for (Index j = 0; j < b.rows; j += kPanel<E>, panel += elements<T>(b.cols) * kPanel<E>) {
    pack_transposed(panel, rows_of(b, j, least(kPanel<E>, b.rows - j)));
  }
}

template <class T>
void copy_left(Accumulator<T>* block, Matrix<const T> m, Op op) {
  using E = Element<T>;
  E* to = reinterpret_cast<E*>(block);
  if (op == Op::as_is) {
    for (Index i = 0; i < m.rows; ++i, to += kStride<E>) {
      copy_elements(to, {0, elements<T>(m.cols)}, ElementsOfRow<T>{m.row(i), m.cols});
    }
  } else {
    for (Index k = 0; k < elements<T>(m.rows); ++k, to += kStride<E>)
      copy_elements(to, {0, m.cols}, ElementsOfColumns<T>{m, k});
  }
}

template <class T>  // in few_rows.cpp
void multiply_few_rows(Matrix<Accumulator<T>> y, Matrix<const T> x, Matrix<const T> w, Op op, Accumulator<T>* scratch);

template <class T>  // in softmax_rows.cpp
void softmax_row(const ScoreRow<Accumulator<T>>& row, RunningSoftmax<Accumulator<T>>& running, Accumulator<T>* output,
                 Index dim, T* rounded);
template <class T>
void softmax_backward_row(const ScoreRow<Accumulator<T>>& row, Accumulator<T>* ds, Accumulator<T> lse,
                          Accumulator<T> delta, T* rounded_p, T* rounded_ds);

template <class T>
InnerLoops<T> inner_loops() {
  return {copy_left<T>, pack_right<T>, multiply<T>, multiply_few_rows<T>, softmax_row<T>, softmax_backward_row<T>};
}

#ifdef __AVX512BF16__
bool multiplies_pairs() { return has_the_order_of_pairs(); }
#else
template InnerLoops<float> inner_loops();
template InnerLoops<double> inner_loops();
#endif
template InnerLoops<BFloat16> inner_loops();

}  // namespace streambp::cpu::STREAMBP_INSTRUCTIONS
