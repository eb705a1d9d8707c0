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

// Queries and keys of unit length, and P and W of each block. They are those of a segment, in the memory of a team; a GPU
// computes those of a chunk once, for all teams.
template <class A>
struct DeltaKeys {
  Matrix<A> q, k, p, w;
  constexpr DeltaKeys of_head(Index head, const DeltaShape& s) const {
    const auto part = [&](Matrix<A> m, Index cols) { return Matrix<A>(m.data + head * cols, m.rows, cols, m.stride); };
    return {part(q, s.key_dim), part(k, s.key_dim), part(p, kDeltaBlock), part(w, kDeltaBlock)};
  }
};

// The memory of a team. A segment is what a document has of a tile. `near` is what many threads read often, and is in a
// GPU's shared memory; without a place for it, it is behind the rest.
enum class DeltaPass { states, gradients };
template <class A>
struct DeltaMemory {
  A *next, *next_near;
  Index size = 0, near_size = 0;

  DeltaKeys<A> of;                  // its head's keys
  bool of_chunk = false;            // and not of a segment
  Matrix<A> dq, dk;                 // rows of a segment: gradients of its q and k
  Matrix<A> before, u;              // states before each block; U
  Matrix<A> state, dstate;          // of each value head; in the same memory
  Matrix<A> ks, qs, kds, dout, db;  // rows of a block, as wide as values
  Matrix<A> keys, products;         // rows of a block, as wide as keys
  Matrix<A> dou, dbu, dp, dw;       // pairs of rows of a block
  Matrix<A> d, m, t;                // the same, near
  // a number for each row, the last for each row of a state
  Matrix<A> decay, beta, from_start, to_end, at_end, dg, of_state;

  // prepared: the keys of a chunk, or empty
  constexpr DeltaMemory(A* memory, A* near, const DeltaShape& s, const DeltaPart& part, DeltaPass pass,
                        const DeltaKeys<A>& prepared)
      : next(memory), next_near(near), of_chunk(prepared.q) {
    if (of_chunk)
      of = prepared.of_head(part.key_head, s);
    else
      take(kTile, s.key_dim, of.q, of.k), take(kTile, kDeltaBlock, of.p, of.w);
    const Index width = part.columns.size();
    take(kTile, width, u), take(part.group.size() * s.key_dim, width, state);
    take(kDeltaBlock, width, ks, qs, kds, dout, db), take(kDeltaBlock, s.key_dim, keys);
    dstate = state;
    if (pass == DeltaPass::gradients) {
      take(kTile, s.key_dim, dq, dk), take(kTile / kDeltaBlock * s.key_dim, width, before);
      take(kDeltaBlock, s.key_dim, products), take(kDeltaBlock, kDeltaBlock, dou, dbu, dp, dw);
    }
    if (!near) next_near = next;
    take_near(kDeltaBlock, kDeltaBlock, d, m, t);
    take_near(1, kDeltaBlock, decay, beta, from_start, to_end, at_end, dg), take_near(1, s.key_dim, of_state);
  }

 private:
  constexpr void take(Index rows, Index cols, auto&... x) { ((x = taken(next, size, {nullptr, rows, cols})), ...); }
  // Columns are in different banks of shared memory, as rows are.
  constexpr void take_near(Index rows, Index cols, auto&... x) {
    ((x = taken(next_near, near_size, {nullptr, rows, cols, cols + 1})), ...);
  }
  constexpr Matrix<A> taken(A*& next, Index& size, Matrix<A> m) {
    m.data = next;
    if (next) next += m.rows * m.stride;
    size += m.rows * m.stride;
    return m;
  }
};

// Some rows of a matrix, without the check of slice(), which would throw.
template <class A>
constexpr Matrix<A> rows_of(Matrix<A> m, Index begin, Index count) {
  return {m.row(begin), count, m.cols, m.stride};
}

}  // namespace streambp
