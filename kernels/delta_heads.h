// The arithmetic of the gated delta rule (kernels/delta_rule.cuh): one key head, and the value heads that share it, for the
// rows of a chunk. It is written for a team of threads: a thread of a CPU, or the threads of a block of a GPU.
//
// Rows are computed in blocks of up to kDeltaBlock, counted from the first row of their document. With G the sum of g over the
// rows of a block so far, and S the state before it:
//
//   D_ij = exp(G_i - G_j)     P = tril(Q Kᵀ)     W = K Kᵀ below the diagonal     T_ij = β_i D_ij W_ij     M = D ∘ P
//   (I + T) U = diag(β) (V - diag(exp G) K S)
//   O  = diag(exp G) Q S + M U
//   S' = exp(G_last) S + Kᵀ diag(exp(G_last - G)) U
//
// docs/beyond-attention.md derives this, and the backward pass.
#pragma once

#include "kernels/base/gemm.h"
#include "kernels/base/math.cuh"
#include "kernels/base/row_sums.h"
#include "kernels/delta_shape.h"

namespace streambp {

template <class Team, class T>
class DeltaHeads {
 public:
  using A = Accumulator<T>;

  constexpr DeltaHeads(const Team& team, const DeltaMemory<A>& memory, const DeltaInput<T>& in,
                       const DeltaSpan<A>& span, const DeltaPart& part)
      : team(team), memory(memory), in(in), span(span), s(span.shape), part(part) {}

  // Writes the states after all tiles of the chunk, and the output, unless that is empty.
  constexpr void forward(Matrix<T> out) {
    if (span.rows.begin > 0) copy(memory.state, states_of(span.states, span.cached ? 0 : span.rows.begin / kTile - 1));
    for_each_segment(span.rows, [&] {
      if (!memory.of_chunk) normalise();
      for (Index g = part.group.begin; g < part.group.end; ++g) {
        for (block = 0; block < blocks(); ++block) {
          begin_block(g);
          solve(g, state(g));
          if (out) write_output(out, g);
          update(state(g), state(g));
        }
      }
      if ((segment.end % kTile == 0 || segment.end == span.rows.end) && !span.cached)
        copy(states_of(span.states, (segment.end - 1) / kTile), memory.state);
    });
    if (span.cached && span.rows.end % kDeltaBlock == 0) copy(states_of(span.states, 0), memory.state);
  }

  // Queries and keys of some rows of a chunk
  constexpr void prepare(Rows rows) {
    for_each_segment(rows, [&] { normalise(); });
  }

  // Of some rows. dstates: the gradients of the states after them. They become those of the states before them.
  constexpr void backward(Rows rows, const DeltaGradient<T>& to, Matrix<A> dstates, Matrix<const T> dout) {
    copy(memory.dstate, states_of(dstates, 0));
    for_each_segment_backward(rows, [&] {
      clear(rows_of(memory.dq, 0, segment.size())), clear(rows_of(memory.dk, 0, segment.size()));
      for (Index g = part.group.begin; g < part.group.end; ++g) {
        states_before_blocks(g);
        for (block = blocks() - 1; block >= 0; --block) block_backward(to, dout, g);
      }
      normalise_backward(to);
    });
    copy(states_of(dstates, 0), memory.dstate);
  }

  // Only the gradients of states: `after` each tile of the chunk, too. With them, its tiles are independent.
  constexpr void states_backward(Matrix<A> after, Matrix<A> dstates, Matrix<const T> dout) {
    copy(memory.dstate, states_of(dstates, 0)), copy(states_of(after, after.rows - 1), memory.dstate);
    for_each_segment_backward(span.rows, [&] {
      for (Index g = part.group.begin; g < part.group.end; ++g) {
        for (block = blocks() - 1; block >= 0; --block) {
          begin_block(g);
          remainder_backward(dout, g);
          if (has_state()) state_backward(g);
        }
      }
      if (segment.begin > span.rows.begin && segment.begin % kTile == 0)
        copy(states_of(after, (segment.begin - span.rows.begin) / kTile - 1), memory.dstate);
    });
    copy(states_of(dstates, 0), memory.dstate);
  }

 private:
  using Op = cpu::Op;

  // --- Places ---

  constexpr Index blocks() const { return ceil_div(segment.size(), kDeltaBlock); }
  constexpr Index first() const { return block * kDeltaBlock; }  // row of the block in the segment
  constexpr Index count() const { return least(kDeltaBlock, segment.size() - first()); }
  constexpr Index row(Index i) const { return segment.begin - span.rows.begin + first() + i; }  // in the chunk
  constexpr bool has_state() const { return segment.begin + first() > document; }
  constexpr Index head(Index g) const { return part.key_head * s.group() + g; }
  constexpr Matrix<A> state(Index g) const {
    return rows_of(memory.state, (g - part.group.begin) * s.key_dim, s.key_dim);
  }
  constexpr Matrix<A> dstate(Index g) const {
    return rows_of(memory.dstate, (g - part.group.begin) * s.key_dim, s.key_dim);
  }
  constexpr Matrix<A> before(Index block) const { return rows_of(memory.before, block * s.key_dim, s.key_dim); }
  constexpr Matrix<A> of_block(Matrix<A> of_segment) const { return rows_of(of_segment, first(), count()); }
  // Of the head's keys
  constexpr Index first_key() const { return memory.of_chunk ? segment.begin - span.rows.begin : 0; }
  constexpr Matrix<A> q() const { return rows_of(memory.of.q, first_key() + first(), count()); }
  constexpr Matrix<A> k() const { return rows_of(memory.of.k, first_key() + first(), count()); }
  constexpr Matrix<A> p() const { return pairs(rows_of(memory.of.p, first_key() + first(), count())); }
  constexpr Matrix<A> w() const { return pairs(rows_of(memory.of.w, first_key() + first(), count())); }
  constexpr Matrix<A> rows(Matrix<A> x) const { return rows_of(x, 0, count()); }
  constexpr Matrix<A> row_of(Matrix<A> x) const { return {x.data, 1, count(), x.stride}; }
  constexpr Matrix<A> pairs(Matrix<A> x) const { return {x.data, count(), count(), x.stride}; }
  constexpr Index width() const { return part.columns.size(); }
  constexpr A value(Index i, Index j, Index g) const { return A(in.v(row(i), first_column(g) + j)); }
  constexpr Index first_column(Index g) const { return head(g) * s.value_dim + part.columns.begin; }
  // The block of a matrix with the values of all heads
  template <class M>
  constexpr Matrix<M> values(Matrix<M> x, Index g) const {
    return {x.row(row(0)) + first_column(g), count(), width(), x.stride};
  }
  // The states of the team's value heads in a row of all states
  constexpr Matrix<A> states_of(Matrix<A> states, Index row) const {
    A* first = states.row(row) + head(part.group.begin) * s.key_dim * s.value_dim + part.columns.begin;
    return {first, part.group.size() * s.key_dim, width(), s.value_dim};
  }

  constexpr void copy(Matrix<A> to, Matrix<A> from) {
    team.assign(to, [&](Index i, Index j) { return from(i, j); });
  }
  constexpr void clear(Matrix<A> x) {
    team.assign(x, [](Index, Index) { return A(0); });
  }

  // Calls f() for each segment of some rows.
  constexpr void for_each_segment(Rows rows, auto&& f) {
    for (Index begin = rows.begin; begin < rows.end; begin = segment.end) {
      document = span.key_begin(0, begin);
      segment = {begin, begin + 1};  // the end is searched for: documents follow each other
      for (Index end = least(rows.end, (begin / kTile + 1) * kTile); segment.end < end;) {
        const Index middle = (segment.end + end) / 2;
        span.key_begin(0, middle) == document ? segment.end = middle + 1 : end = middle;
      }
      f();
    }
  }
  // The same, the last first, with the gradients of their states
  constexpr void for_each_segment_backward(Rows rows, auto&& f) {
    for (Index end = rows.end; end > rows.begin; end = segment.begin) {
      document = span.key_begin(0, end - 1);
      segment = {most(document, (end - 1) / kTile * kTile), end};
      if (end < span.rows.end && span.key_begin(0, end) != document) clear(memory.dstate);
      if (!memory.of_chunk) normalise();
      f();
    }
    if (document == rows.begin) clear(memory.dstate);
  }

  // --- Queries and keys of a segment ---

  // 1 / |x|
  constexpr A unit_scale(const T* x) const {
    const double squares = team.sum(s.key_dim, [&](Index j) { return double(A(x[j])) * double(A(x[j])); });
    return static_cast<A>(1 / std::sqrt(squares + 1e-6));
  }
  constexpr A query_scale() const { return static_cast<A>(1 / std::sqrt(static_cast<double>(s.key_dim))); }
  // A row of the segment in the chunk, and its part of this head
  constexpr auto* of_head(auto matrix, Index i) const {
    return matrix.row(segment.begin - span.rows.begin + i) + part.key_head * s.key_dim;
  }

  constexpr void normalise() {
    team.by_warp(segment.size(), [&](Index i) {
      const T *q = of_head(in.q, i), *k = of_head(in.k, i);
      const A of_q = unit_scale(q) * query_scale(), of_k = unit_scale(k);
      A *unit_q = memory.of.q.row(first_key() + i), *unit_k = memory.of.k.row(first_key() + i);
      team.across(s.key_dim, [&](Index j) { unit_q[j] = of_q * A(q[j]), unit_k[j] = of_k * A(k[j]); });
    });
    for (block = 0; block < blocks(); ++block) {
      team.product(p(), q(), Op::as_is, k(), Op::transposed, Update::assign);
      team.product(w(), k(), Op::as_is, k(), Op::transposed, Update::assign);
    }
  }
  // y = r x with r = 1 / |x|:  dx = r (dy - r² x (x dy))
  constexpr void normalise_backward(const DeltaGradient<T>& to) {
    const auto row_backward = [&](T* dx, const T* x, const A* dy, A factor) {
      const A r = unit_scale(x), dot = team.sum(s.key_dim, [&](Index j) { return A(x[j]) * dy[j]; });
      team.across(s.key_dim, [&](Index j) { dx[j] = factor * r * (dy[j] - r * r * dot * A(x[j])); });
    };
    team.by_warp(segment.size(), [&](Index i) {
      row_backward(of_head(to.dq, i), of_head(in.q, i), memory.dq.row(i), query_scale());
      row_backward(of_head(to.dk, i), of_head(in.k, i), memory.dk.row(i), A(1));
    });
  }

  // --- A block of a value head ---

  // β, exp(G), exp(G_last - G), D, M and T. Sums of g are in float64.
  constexpr void begin_block(Index g) {
    const Matrix<A> d = pairs(memory.d), p = this->p(), w = this->w();
    team.assign(row_of(memory.decay), [&](Index, Index i) { return in.decay(row(i), head(g)); });
    team.assign(row_of(memory.beta), [&](Index, Index i) { return A(in.beta(row(i), head(g))); });
    team.by_thread(count(), [&](Index i) {
      double sum = 0;
      for (Index j = i; j >= 0; --j) {
        d(i, j) = static_cast<A>(sum);
        sum += static_cast<double>(memory.decay(0, j));
      }
      memory.from_start(0, i) = decayed(static_cast<A>(sum));
    });
    team.assign(d, [&](Index i, Index j) { return j <= i ? decayed(d(i, j)) : A(0); });
    team.assign(pairs(memory.m), [&](Index i, Index j) { return d(i, j) * p(i, j); });
    team.assign(pairs(memory.t),
                [&](Index i, Index j) { return j < i ? memory.beta(0, i) * d(i, j) * w(i, j) : A(0); });
    team.assign(row_of(memory.to_end), [&](Index, Index i) { return d(count() - 1, i); });
  }

  // exp(x) of x <= 0. What is left of a state that was forgotten is nothing.
  static constexpr A decayed(A x) { return x < (sizeof(A) == 4 ? -87 : -708) ? A(0) : exponential(x); }

  // K S and U
  constexpr void solve(Index g, Matrix<A> state) {
    const Matrix<A> u = of_block(memory.u), ks = rows(memory.ks);
    if (has_state()) team.product(ks, k(), Op::as_is, state, Op::as_is, Update::assign);
    team.assign(u, [&](Index i, Index j) { return memory.beta(0, i) * remainder(i, j, g); });
    team.solve(pairs(memory.t), Op::as_is, u);
  }
  // V - diag(exp G) K S
  constexpr A remainder(Index i, Index j, Index g) const {
    return has_state() ? value(i, j, g) - memory.from_start(0, i) * memory.ks(i, j) : value(i, j, g);
  }

  constexpr void write_output(Matrix<T> out, Index g) {
    const Matrix<A> o = rows(memory.kds), qs = rows(memory.qs);
    team.product(o, pairs(memory.m), Op::as_is, of_block(memory.u), Op::as_is, Update::assign);
    if (has_state()) team.product(qs, q(), Op::as_is, state(g), Op::as_is, Update::assign);
    team.assign(values(out, g), [&](Index i, Index j) {
      return has_state() ? multiply_add(memory.from_start(0, i), qs(i, j), o(i, j)) : o(i, j);
    });
  }

  // The state after the block. It may replace the state before.
  constexpr void update(Matrix<A> after, Matrix<A> state) {
    const Matrix<A> keys = rows(memory.keys), k = this->k();
    team.assign(keys, [&](Index i, Index j) { return memory.to_end(0, i) * k(i, j); });
    const A decay = memory.from_start(0, count() - 1);
    if (has_state()) team.assign(after, [&](Index i, Index j) { return decay * state(i, j); });
    team.product(after, keys, Op::transposed, of_block(memory.u), Op::as_is,
                 has_state() ? Update::add : Update::assign);
  }

  // --- Backward ---

  // Computes the states before all blocks of the segment, and U of each, again.
  constexpr void states_before_blocks(Index g) {
    if (segment.begin > document)
      copy(before(0),
           rows_of(states_of(span.states, segment.begin / kTile - 1), (g - part.group.begin) * s.key_dim, s.key_dim));
    for (block = 0; block < blocks(); ++block) {
      begin_block(g);
      solve(g, before(block));
      if (block + 1 < blocks()) update(before(block + 1), before(block));
    }
  }

  // dU becomes dB = (I + T)⁻ᵀ dU.
  constexpr void remainder_backward(Matrix<const T> dout, Index g) {
    const Matrix<A> dy = rows(memory.dout), db = rows(memory.db), kds = rows(memory.kds);
    team.assign(dy, [&](Index i, Index j) { return A(dout(row(i), first_column(g) + j)); });
    team.product(kds, k(), Op::as_is, dstate(g), Op::as_is, Update::assign);
    team.product(db, pairs(memory.m), Op::transposed, dy, Op::as_is, Update::assign);
    team.assign(db, [&](Index i, Index j) { return multiply_add(memory.to_end(0, i), kds(i, j), db(i, j)); });
    team.solve(pairs(memory.t), Op::transposed, db);
  }

  constexpr void block_backward(const DeltaGradient<T>& to, Matrix<const T> dout, Index g) {
    const Matrix<A> u = of_block(memory.u), dy = rows(memory.dout), db = rows(memory.db);
    begin_block(g);
    if (has_state()) {
      team.product(rows(memory.ks), k(), Op::as_is, before(block), Op::as_is, Update::assign);
      team.product(rows(memory.qs), q(), Op::as_is, before(block), Op::as_is, Update::assign);
    }
    remainder_backward(dout, g);
    team.assign(values(to.dv, g), [&](Index i, Index j) { return memory.beta(0, i) * db(i, j); });
    team.product(pairs(memory.dou), dy, Op::as_is, u, Op::transposed, Update::assign);
    team.product(pairs(memory.dbu), db, Op::as_is, u, Op::transposed, Update::assign);
    gates_backward(to, g);
    queries_keys_backward(g);
    if (has_state()) state_backward(g);
  }

  // dβ and dg
  constexpr void gates_backward(const DeltaGradient<T>& to, Index g) {
    const Matrix<A> w = this->w(), u = of_block(memory.u);
    const Index n = count();
    // the gradient of D_ij, times D_ij
    const auto of_pair = [&](Index i, Index j) {
      return memory.m(i, j) * memory.dou(i, j) - memory.t(i, j) * memory.dbu(i, j);
    };
    team.by_warp(n, [&](Index i) {
      const A *ks = memory.ks.row(i), *qs = memory.qs.row(i), *dy = memory.dout.row(i), *db = memory.db.row(i);
      const A *kds = memory.kds.row(i), factor = memory.beta(0, i);
      const A of_rows = team.sum(width(), [&](Index j) { return db[j] * remainder(i, j, g); });
      const A dbeta =
          team.add(of_rows, {0, i}, [&](Index j) { return -(memory.dbu(i, j) * memory.d(i, j) * w(i, j)); });
      A sum = 0;
      if (has_state())
        sum = memory.from_start(0, i) *
              team.sum(width(), [&](Index j) { return qs[j] * dy[j] - factor * ks[j] * db[j]; });
      sum = team.add(sum, {0, i}, [&](Index j) { return of_pair(i, j); });
      sum = team.add(sum, {i + 1, n}, [&](Index j) { return -of_pair(j, i); });
      const A at_end = memory.to_end(0, i) * team.sum(width(), [&](Index j) { return u(i, j) * kds[j]; });
      team.across(1, [&](Index) {
        to.dbeta(row(i), head(g)) = dbeta, memory.at_end(0, i) = at_end, memory.dg(0, i) = sum - at_end;
      });
    });
    if (has_state()) {
      const Matrix<A> state = before(block), dstate = this->dstate(g);
      team.by_warp(s.key_dim, [&](Index i) {
        const A sum = team.sum(width(), [&](Index j) { return state(i, j) * dstate(i, j); });
        team.across(1, [&](Index) { memory.of_state(0, i) = sum; });
      });
    }
    team.by_warp(1, [&](Index) {
      const Rows rows_of_state = {0, has_state() ? s.key_dim : 0};
      double sum = team.add(0.0, rows_of_state, [&](Index i) { return static_cast<double>(memory.of_state(0, i)); });
      sum *= static_cast<double>(memory.from_start(0, n - 1));
      sum = team.add(sum, {0, n}, [&](Index i) { return static_cast<double>(memory.at_end(0, i)); });
      team.across(1, [&](Index) {
        for (Index i = n - 1; i >= 0; --i) {
          sum += static_cast<double>(memory.dg(0, i));
          to.ddecay(row(i), head(g)) = static_cast<A>(sum);
        }
      });
    });
  }

  constexpr void queries_keys_backward(Index g) {
    const Matrix<A> k = this->k(), q = this->q(), dk = of_block(memory.dk), dq = of_block(memory.dq);
    const Matrix<A> dp = pairs(memory.dp), dw = pairs(memory.dw), products = rows(memory.products);
    team.assign(dp, [&](Index i, Index j) { return memory.d(i, j) * memory.dou(i, j); });
    team.assign(
        dw, [&](Index i, Index j) { return j < i ? -memory.beta(0, i) * memory.d(i, j) * memory.dbu(i, j) : A(0); });
    team.product(dq, dp, Op::as_is, k, Op::as_is, Update::add);
    team.product(dk, dp, Op::transposed, q, Op::as_is, Update::add);
    team.product(dk, dw, Op::as_is, k, Op::as_is, Update::add);
    team.product(dk, dw, Op::transposed, k, Op::as_is, Update::add);
    // y += diag(factor) x stateᵀ
    const auto add_scaled = [&](Matrix<A> y, Matrix<A> x, Matrix<A> state, auto&& factor) {
      team.product(products, x, Op::as_is, state, Op::transposed, Update::assign);
      team.assign(y, [&](Index i, Index j) { return multiply_add(factor(i), products(i, j), y(i, j)); });
    };
    add_scaled(dk, of_block(memory.u), dstate(g), [&](Index i) { return memory.to_end(0, i); });
    if (!has_state()) return;
    add_scaled(dq, rows(memory.dout), before(block), [&](Index i) { return memory.from_start(0, i); });
    add_scaled(dk, rows(memory.db), before(block),
               [&](Index i) { return -memory.beta(0, i) * memory.from_start(0, i); });
  }

  // dS' becomes dS.
  constexpr void state_backward(Index g) {
    const Matrix<A> dstate = this->dstate(g), k = this->k(), q = this->q(), keys = rows(memory.keys);
    const A decay = memory.from_start(0, count() - 1);
    team.assign(dstate, [&](Index i, Index j) { return dstate(i, j) * decay; });
    team.assign(keys, [&](Index i, Index j) { return memory.from_start(0, i) * q(i, j); });
    team.product(dstate, keys, Op::transposed, rows(memory.dout), Op::as_is, Update::add);
    team.assign(keys, [&](Index i, Index j) { return -memory.beta(0, i) * memory.from_start(0, i) * k(i, j); });
    team.product(dstate, keys, Op::transposed, rows(memory.db), Op::as_is, Update::add);
  }

  const Team team;
  const DeltaMemory<A> memory;
  const DeltaInput<T>& in;
  const DeltaSpan<A>& span;
  const DeltaShape s;
  const DeltaPart part;
  Rows segment = {};  // what a document has of a tile
  Index document = 0, block = 0;
};

}  // namespace streambp
