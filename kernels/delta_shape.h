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

// What a team computes: some value heads of a key head, and some columns of their values.
struct DeltaPart {
  Index key_head;
  Rows group, columns;
};
constexpr DeltaPart whole_part(const DeltaShape& s, Index key_head) {
  return {key_head, {0, s.group()}, {0, s.value_dim}};
}
// In passes that go through the rows in order, columns of values are independent: enough small parts for a GPU.
constexpr Index kDeltaColumns = 32;
constexpr Index narrow_parts(const DeltaShape& s) { return s.value_heads * ceil_div(s.value_dim, kDeltaColumns); }
constexpr DeltaPart narrow_part(const DeltaShape& s, Index i) {
  const Index head = i % s.value_heads, g = head % s.group();
  return {head / s.group(), {g, g + 1}, piece(i / s.value_heads, kDeltaColumns, s.value_dim)};
}

// The memory of a team. A segment is what a document has of a tile. `near` is what many threads read often, and is in a
// GPU's shared memory; without a place for it, it is behind the rest.
enum class DeltaPass { states, gradients };
template <class A>
struct DeltaMemory {
  A *next, *next_near;
  Index size = 0, near_size = 0;

  Matrix<A> q, k, dq, dk;           // rows of a segment, of unit length; and their gradients
  Matrix<A> p, w;                   // of each block of a segment
  Matrix<A> before, u;              // states before each block; U
  Matrix<A> state, dstate;          // of each value head; in the same memory
  Matrix<A> ks, qs, kds, dout, db;  // rows of a block, as wide as values
  Matrix<A> keys, products;         // rows of a block, as wide as keys
  Matrix<A> dou, dbu, dp, dw;       // pairs of rows of a block
  Matrix<A> d, m, t;                // the same, near
  Matrix<A> decay, beta, from_start, to_end, at_end, dg,
      of_state;  // a number for each row, the last for each row of a state

  constexpr DeltaMemory(A* memory, A* near, const DeltaShape& s, const DeltaPart& part, DeltaPass pass)
      : next(memory), next_near(near) {
    const Index width = part.columns.size();
    for (auto* x : {&q, &k}) *x = take(kTile, s.key_dim);
    for (auto* x : {&p, &w}) *x = take(kTile, kDeltaBlock);
    u = take(kTile, width), state = dstate = take(part.group.size() * s.key_dim, width);
    for (auto* x : {&ks, &qs, &kds, &dout, &db}) *x = take(kDeltaBlock, width);
    keys = take(kDeltaBlock, s.key_dim);
    if (pass == DeltaPass::gradients) {
      for (auto* x : {&dq, &dk}) *x = take(kTile, s.key_dim);
      before = take(kTile / kDeltaBlock * s.key_dim, width), products = take(kDeltaBlock, s.key_dim);
      for (auto* x : {&dou, &dbu, &dp, &dw}) *x = take(kDeltaBlock, kDeltaBlock);
    }
    if (!near) next_near = next;
    for (auto* x : {&d, &m, &t}) *x = take_near(kDeltaBlock, kDeltaBlock);
    for (auto* x : {&decay, &beta, &from_start, &to_end, &at_end, &dg}) *x = take_near(1, kDeltaBlock);
    of_state = take_near(1, s.key_dim);
  }

 private:
  constexpr Matrix<A> take(Index rows, Index cols) {
    const Matrix<A> m(next, rows, cols);
    if (next) next += rows * cols;
    size += rows * cols;
    return m;
  }
  // Columns are in different banks of shared memory, as rows are.
  constexpr Matrix<A> take_near(Index rows, Index cols) {
    const Matrix<A> m(next_near, rows, cols, cols + 1);
    if (next_near) next_near += rows * m.stride;
    near_size += rows * m.stride;
    return m;
  }
};

// Some rows of a matrix, without the check of slice(), which would throw.
template <class A>
constexpr Matrix<A> rows_of(Matrix<A> m, Index begin, Index count) {
  return {m.row(begin), count, m.cols, m.stride};
}

}  // namespace streambp
