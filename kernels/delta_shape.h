// The operands of the gated delta rule, and the memory that its arithmetic (kernels/delta_heads.h) needs.
#pragma once

#include "kernels/base/matrix.cuh"

namespace streambp {

// Rows are computed in blocks of up to this many, counted from the first row of their document.
constexpr Index kDeltaBlock = 64;
static_assert(kTile % kDeltaBlock == 0);

// Value heads share key heads in groups.
struct DeltaShape {
  Index key_heads, value_heads, key_dim, value_dim;
  constexpr Index group() const { return value_heads / key_heads; }
};

// The rows of a chunk.
template <class T>
struct DeltaInput {
  Matrix<const T> q, k, v, beta;
  Matrix<const Accumulator<T>> decay;  // g
};
template <class T>
struct DeltaGradient {
  Matrix<T> dq, dk, dv;
  Matrix<Accumulator<T>> dbeta, ddecay;
};

// The place of the chunk in the stream. states: a row for each tile of the stream, after which they are those of all value
// heads.
template <class A>
struct DeltaSpan {
  Rows rows;
  Matrix<const std::int32_t> key_begin;
  DeltaShape shape;
  Matrix<A> states;
  bool cached = false;  // in generation: `states` has one row, before the rows, and after them if they are whole blocks
};

// The memory of a team. A segment is what a document has of a tile.
template <class A>
struct DeltaMemory {
  A* next;
  Index size = 0;

  Matrix<A> q, k, dq, dk;                                    // rows of a segment, of unit length; and their gradients
  Matrix<A> p, w;                                            // of each block of a segment
  Matrix<A> before, u;                                       // states before each block; U
  Matrix<A> state, dstate;                                   // of each value head
  Matrix<A> ks, qs, kds, dout, db;                           // rows of a block, as wide as values
  Matrix<A> keys, products;                                  // rows of a block, as wide as keys
  Matrix<A> d, m, t, dou, dbu, dp, dw;                       // pairs of rows of a block
  Matrix<A> beta, from_start, to_end, at_end, dg, of_state;  // a number for each row, the last for each row of a state

  constexpr DeltaMemory(A* memory, const DeltaShape& s) : next(memory) {
    for (auto* x : {&q, &k, &dq, &dk}) *x = take(kTile, s.key_dim);
    for (auto* x : {&p, &w}) *x = take(kTile, kDeltaBlock);
    before = take(kTile / kDeltaBlock * s.key_dim, s.value_dim), u = take(kTile, s.value_dim);
    for (auto* x : {&state, &dstate}) *x = take(s.group() * s.key_dim, s.value_dim);
    for (auto* x : {&ks, &qs, &kds, &dout, &db}) *x = take(kDeltaBlock, s.value_dim);
    for (auto* x : {&keys, &products}) *x = take(kDeltaBlock, s.key_dim);
    for (auto* x : {&d, &m, &t, &dou, &dbu, &dp, &dw}) *x = take(kDeltaBlock, kDeltaBlock);
    for (auto* x : {&beta, &from_start, &to_end, &at_end, &dg}) *x = take(1, kDeltaBlock);
    of_state = take(1, s.key_dim);
  }

 private:
  constexpr Matrix<A> take(Index rows, Index cols) {
    const Matrix<A> m(next, rows, cols);
    if (next) next += rows * cols;
    size += rows * cols;
    return m;
  }
};

// Some rows of a matrix, without the check of slice(), which would throw.
template <class A>
constexpr Matrix<A> rows_of(Matrix<A> m, Index begin, Index count) {
  return {m.row(begin), count, m.cols, m.stride};
}

}  // namespace streambp
