// Matrix products by one CPU thread, at the speed of a tuned library and with every sum in a fixed order:
//
//   c(i, j) += Σ_blocks Σ_k a(i, k) b(k, j)          blocks of kBlock values of k, in order
//
// The sum over a block starts from zero and adds one product after the other with fused multiply-adds. So an element
// depends on its row of a and its column of b only: it has the same bits in a product of any size, on any number of
// threads, and for any vector width.
//
// For bfloat16, sums are in float32 and the order is that of the instruction which multiplies pairs: k = 1, 0, 3, 2, 5, 4
// ... (a last pair of one is filled up with zeros), and subnormal numbers count as zero. See pairs.h.
//
// gemm() multiplies matrices of any size; multiply_few_rows() is faster for decoding, which is a product of few rows with
// all weights. Attention keeps its operands packed over several products and uses the pieces:
//
//   LeftBlock       some rows of a, copied close together, for the L2 cache
//   RightPanels     b in panels: the columns that the innermost loop computes at once
//   multiply        c = a b or c += a b
#pragma once

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/base/matrix.cuh"

namespace streambp::cpu {

constexpr Index kBlock = 256;

enum class Op { as_is, transposed };

// Memory that starts at a cache line. It is not initialised.
template <class A>
class Buffer {
 public:
  explicit Buffer(Index size)
      : data_(static_cast<A*>(::operator new(static_cast<std::size_t>(size) * sizeof(A), kCacheLine))) {}
  A* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kCacheLine{64};
  struct Free {
    void operator()(A* data) const { ::operator delete(data, kCacheLine); }
  };
  std::unique_ptr<A, Free> data_;
};

// The left operand of multiply(), op(a), in a LeftBlock.
template <class T>
struct Left {
  const Accumulator<T>* data;  // for bfloat16, what lies there depends on the instructions in use
  Op op;
  Index rows, inner;

  Left slice(Rows some) const;
};

// Memory for a left operand of at most kBlock x kBlock numbers. The distance between rows is a constant, so that it is part
// of the instructions of the innermost loop, and is not a power of two, so that rows do not compete for the same cache sets.
template <class T>
class LeftBlock {
 public:
  using A = Accumulator<T>;
  static constexpr Index kStride = kBlock + 64 / sizeof(A);

  LeftBlock() : memory_(kBlock * kStride) {}
  Left<T> copy(Matrix<const T> m, Op op) const;
  // A matrix in this memory
  Matrix<A> matrix(Index rows, Index cols) const {
    require(rows <= kBlock && cols <= kBlock, "a block of ", rows, "x", cols, " is too large");
    return {memory_.data(), rows, cols, kStride};
  }

 private:
  Buffer<A> memory_;
};

// A matrix that lies in the memory of a LeftBlock, as an operand.
template <class A>
Left<A> as_left(Matrix<A> m, Op op) {
  require(m.stride == LeftBlock<A>::kStride, "gemm: the left operand is not in a block");
  return {m.data, op, op == Op::as_is ? m.rows : m.cols, op == Op::as_is ? m.cols : m.rows};
}

// The right operand: op(b), of at most kBlock rows.
template <class T>
class RightPanels {
 public:
  explicit RightPanels(Index most_cols);
  void pack(Matrix<const T> b, Op op);

  Index rows = 0, cols = 0;
  const Accumulator<T>* data() const { return memory_.data(); }

 private:
  Index most_cols_;
  Buffer<Accumulator<T>> memory_;
};

// c = a b, or c += a b
template <class T>
void multiply(Matrix<Accumulator<T>> c, const Left<T>& a, const RightPanels<T>& b, Update update);

// c += op_a(a) op_b(b), for a c of at most kBlock rows
template <class T>
void gemm(Matrix<Accumulator<T>> c, Matrix<const T> a, Op op_a, Matrix<const T> b, Op op_b);

// y += x op(w) for at most kFewRows rows of x: the same bits, but w is read where it lies.
constexpr Index kFewRows = 16;
template <class T>
void multiply_few_rows(Matrix<Accumulator<T>> y, Matrix<const T> x, Matrix<const T> w, Op op);

}  // namespace streambp::cpu
