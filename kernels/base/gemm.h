// Matrix products by one CPU thread, at the speed of a tuned library and with every sum in a fixed order:
//
//   c(i, j) += Σ_blocks Σ_k a(i, k) b(k, j)          blocks of kBlock values of k, in order
//
// The sum over a block starts from zero and adds one product after the other with fused multiply-adds. So an element
// depends on its row of a and its column of b only: it has the same bits in a product of any size, on any number of
// threads, and for any vector width.
//
// gemm() multiplies matrices of any size; multiply_few_rows() is faster for decoding, which is a product of few rows with
// all weights. Attention keeps its operands packed over several products and uses the parts:
//
//   LeftBlock       some rows of a, copied close together, for the L2 cache
//   RightPanels     b in panels: the columns that the innermost loop computes at once
//   multiply        c = a b or c += a b
#pragma once

#include <memory>
#include <new>

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

// The left operand: at most kBlock x kBlock numbers. The distance between rows is a constant, so that it is part of the
// instructions of the innermost loop, and is not a power of two, so that rows do not compete for the same cache sets.
template <class A>
class LeftBlock {
 public:
  static constexpr Index kStride = kBlock + 64 / sizeof(A);

  LeftBlock() : memory_(kBlock * kStride) {}
  Matrix<A> matrix(Index rows, Index cols) const {
    require(rows <= kBlock && cols <= kBlock, "a block of ", rows, "x", cols, " is too large");
    return {memory_.data(), rows, cols, kStride};
  }
  template <class T>
  Matrix<A> copy(Matrix<const T> m) const;

 private:
  Buffer<A> memory_;
};

// The right operand: b or its transpose, of at most kBlock rows.
template <class A>
class RightPanels {
 public:
  explicit RightPanels(Index most_cols);
  template <class T>
  void pack(Matrix<const T> b, Op op);

  Index rows = 0, cols = 0;
  const A* data() const { return memory_.data(); }

 private:
  Index most_cols_;
  Buffer<A> memory_;
};

// c = op(a) b, or c += op(a) b. a must lie in a LeftBlock.
template <class A>
void multiply(Matrix<A> c, Input<A> a, Op op, const RightPanels<A>& b, Update update);

// c += op_a(a) op_b(b), for a c of at most kBlock rows
template <class A, class T>
void gemm(Matrix<A> c, Matrix<const T> a, Op op_a, Matrix<const T> b, Op op_b);

// y += x wᵀ for at most kFewRows rows of x: the same bits, but w is read where it lies. A bfloat16 must be converted
// first, which is worth it for fewer rows.
template <class T>
constexpr Index kFewRows = std::is_same_v<T, BFloat16> ? 4 : 16;
template <class A, class T>
void multiply_few_rows(Matrix<A> y, Matrix<const T> x, Matrix<const T> w);

}  // namespace streambp::cpu
