#include "kernels/base/gemm.h"

#include "kernels/base/inner_loops.h"

namespace streambp::cpu {

// --- Operands ---

template <class T>
Left<T> LeftBlock<T>::copy(Matrix<const T> m, Op op) const {
  require(m.rows <= kBlock && m.cols <= kBlock, "a block of ", m.rows, "x", m.cols, " is too large");
  inner_loops<T>().copy_left(memory_.data(), m, op);
  return {memory_.data(), op, op == Op::as_is ? m.rows : m.cols, op == Op::as_is ? m.cols : m.rows};
}

template <class T>
Left<T> Left<T>::slice(Rows some) const {
  require(0 <= some.begin && some.begin <= some.end && some.end <= rows, "gemm: rows outside the operand");
  return {data + some.begin * (op == Op::as_is ? LeftBlock<T>::kStride : 1), op, some.size(), inner};
}

template <class T>
RightPanels<T>::RightPanels(Index most_cols)
    : most_cols_(most_cols), memory_(kBlock * round_up(most_cols, kMostPanelBytes / sizeof(Accumulator<T>))) {}

template <class T>
void RightPanels<T>::pack(Matrix<const T> b, Op op) {
  rows = op == Op::as_is ? b.rows : b.cols;
  cols = op == Op::as_is ? b.cols : b.rows;
  require(rows <= kBlock && cols <= most_cols_, "panels of ", rows, "x", cols, " are too large");
  inner_loops<T>().pack_right(memory_.data(), b, op);
}

// --- Products ---

constexpr Index kPackedColumns = 128;  // of b, in some panels

template <class T>
void multiply(Matrix<Accumulator<T>> c, const Left<T>& a, const RightPanels<T>& b, Update update) {
  require(c.rows == a.rows && c.cols == b.cols && a.inner == b.rows, "gemm: the operands do not fit together");
  inner_loops<T>().multiply(c, a.data, a.op, b.data(), b.rows, update);
}

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

template <class T>
void multiply_few_rows(Matrix<Accumulator<T>> y, Matrix<const T> x, Matrix<const T> w, Op op) {
  const auto [inner, cols] = op == Op::as_is ? std::pair(w.rows, w.cols) : std::pair(w.cols, w.rows);
  require(x.rows <= kFewRows && y.rows == x.rows && y.cols == cols && x.cols == inner,
          "product of few rows: the operands do not fit together");
  if (op == Op::as_is && cols % kMostLanes != 0) return gemm<T>(y, x, Op::as_is, w, op);
  if (y.empty()) return;
  thread_local std::vector<Accumulator<T>> scratch;
  const auto size = static_cast<std::size_t>(2 * kFewRows * round_up(x.cols, 2));
  if (scratch.size() < size) scratch.resize(size);
  inner_loops<T>().multiply_few_rows(y, x, w, op, scratch.data());
}

#define STREAMBP_PRODUCTS(T)                                                                     \
  template struct Left<T>;                                                                       \
  template class LeftBlock<T>;                                                                   \
  template class RightPanels<T>;                                                                 \
  template void multiply(Matrix<Accumulator<T>>, const Left<T>&, const RightPanels<T>&, Update); \
  template void gemm(Matrix<Accumulator<T>>, Matrix<const T>, Op, Matrix<const T>, Op);          \
  template void multiply_few_rows(Matrix<Accumulator<T>>, Matrix<const T>, Matrix<const T>, Op);

STREAMBP_PRODUCTS(float)
STREAMBP_PRODUCTS(double)
STREAMBP_PRODUCTS(BFloat16)

}  // namespace streambp::cpu
