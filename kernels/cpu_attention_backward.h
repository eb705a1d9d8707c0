// Attention on the CPU, backward, by tiles of queries and keys as in cpu_attention.h.
//
// dK and dV of a tile of keys are summed over tiles of queries from last to first; these end at multiples of their size,
// like chunks. dQ is summed over tiles of keys from first to last.
#pragma once

#include <atomic>

#include "kernels/cpu_attention.h"

namespace streambp::cpu {

// Keys of one document, as rows of the stream. number: the tile's index in the document. queries: the document's tiles
// of queries.
struct KeyTile {
  Index number;
  Rows keys, queries;
};

// The tiles of keys that the queries attend to.
inline std::vector<KeyTile> key_tiles(const std::vector<QueryTile>& queries, const AttentionSpan& span) {
  std::vector<KeyTile> tiles;
  for (auto begin = queries.begin(); begin != queries.end();) {
    const auto end = std::find_if(begin, queries.end(), [&](auto& tile) { return tile.document != begin->document; });
    const Index last = (end - 1)->rows.end;
    for (Index t = first_tile_of_keys(begin->rows.begin, span); begin->document + t * kKeys < last; ++t) {
      tiles.push_back({t, keys_of_tile(t, begin->document, last), {begin - queries.begin(), end - queries.begin()}});
    }
    begin = end;
  }
  return tiles;
}

// Tiles of keys add to the dQ of a tile of queries in order: each waits until the one before has added its share.
class Turns {
 public:
  Turns(Index count) : next_(static_cast<std::size_t>(count)) {}
  void start(Index tile, Index first) { at(tile).store(first, std::memory_order_relaxed); }
  void wait(Index tile, Index turn) {
    for (Index now; (now = at(tile).load(std::memory_order_acquire)) != turn;) at(tile).wait(now);
  }
  void finish(Index tile, Index turn) {
    at(tile).store(turn + 1, std::memory_order_release);
    at(tile).notify_all();
  }

 private:
  std::atomic<Index>& at(Index tile) { return next_[tile]; }
  std::vector<std::atomic<Index>> next_;
};

// The backward pass of a tile of keys.
template <class T>
class AttentionBackwardTile {
 public:
  using A = Accumulator<T>;

  void take(Matrix<const T> k, Matrix<const T> v) {
    const auto each_part = [&](auto&& f) {
      for (Index p = 0; p < parts_of(k.cols); ++p) f(parts_[p], piece(p, kBlock, k.cols));
    };
    each_part([&](Part& part, Rows columns) {
      part.k_transposed.pack(k.columns(columns), Op::transposed);
      part.v_transposed.pack(v.columns(columns), Op::transposed);
    });
    take_out_not_finite(k, finite_);  // where a row sees them, dS is NaN already
    each_part([&](Part& part, Rows columns) { part.k.pack(k.columns(columns), Op::as_is); });
  }

  // For the queries of span.rows: adds to dk and dv of the keys, and computes the keys' share of dQ. All matrices of
  // queries have these rows and the columns of a group.
  void compute(Matrix<A> dk, Matrix<A> dv, const AttentionUpstream<T>& upstream, Matrix<const T> q, Rows keys,
               const AttentionSpan& span) {
    const Index dim = span.shape.head_dim, group = q.cols / dim;
    const ScoreScale<T> scale(span.shape);
    const Index rows = q.rows * group;
    const Matrix<A> p = p_.matrix(rows, keys.size()), ds = ds_.matrix(rows, keys.size());
    Matrix<T> scaled_q[kParts], dout[kParts];
    for (Index i = 0; i < parts_of(dim); ++i) {
      const Rows columns = piece(i, kBlock, dim);
      const Update update = i == 0 ? Update::assign : Update::add;
      const Part& part = parts_[i];
      scaled_q[i] = stack(part.q, q, dim, columns, scale.of_queries);
      dout[i] = stack(part.dout, upstream.dout, dim, columns);
      multiply(p, part.q.operand(scaled_q[i], Op::as_is), part.k_transposed, update);
      multiply(ds, part.dout.operand(dout[i], Op::as_is), part.v_transposed, update);
    }
    for (Index row = 0; row < p.rows; ++row) {
      const Index query = row / group, head = row % group;
      const Rows seen = visible(span.rows.begin + query, keys, span);
      inner_loops<T>().softmax_backward_row(
          {p.row(row), p.cols, seen, scale.of_scores, static_cast<A>(span.shape.score_cap)}, ds.row(row),
          upstream.lse(query, head), upstream.delta(query, head), p_.rounded(p).row(row), ds_.rounded(ds).row(row));
    }
    dq_ = Matrix<A>(partial_.data(), ds.rows, dim);
    for (Index i = 0; i < parts_of(dim); ++i) {
      const Rows columns = piece(i, kBlock, dim);
      right_.pack(dout[i], Op::as_is);
      multiply(dv.columns(columns), p_.operand(p, Op::transposed), right_, Update::add);
      right_.pack(scaled_q[i], Op::as_is);
      multiply(dk.columns(columns), ds_.operand(ds, Op::transposed), right_, Update::add);
      multiply(dq_.columns(columns), ds_.operand(ds, Op::as_is), parts_[i].k, Update::assign);
    }
  }

  // Adds the share of dQ that compute() left.
  void add_to(Matrix<A> dq, const AttentionShape& shape) const {
    const Index group = dq.cols / shape.head_dim;
    const A scale = ScoreScale<T>(shape).of_queries;
    for (Index row = 0; row < dq_.rows; ++row) {
      A* to = dq.row(row / group) + row % group * shape.head_dim;
      for (Index d = 0; d < shape.head_dim; ++d) to[d] += scale * dq_(row, d);
    }
  }

 private:
  struct Part {
    RightPanels<T> k_transposed{kKeys}, k{kBlock}, v_transposed{kKeys};
    OperandMatrix<T, T> q, dout;
  };
  Part parts_[kParts];
  RightPanels<T> right_{kBlock};
  OperandMatrix<A, T> p_, ds_;
  Buffer<A> partial_{kBlock * kParts * kBlock};
  std::vector<T> finite_;
  Matrix<A> dq_;
};

}  // namespace streambp::cpu

namespace streambp {

// delta = rowsum(dO * O) of each head
template <class T>
void compute_attention_delta(Cpu&, Matrix<Accumulator<T>> delta, Input<T> dout, Input<T> out) {
  using A = Accumulator<T>;
  const Index dim = out.cols / delta.cols;
#pragma omp parallel for
  for (Index i = 0; i < delta.rows; ++i) {
    for (Index h = 0; h < delta.cols; ++h) {
      const T *a = dout.row(i) + h * dim, *b = out.row(i) + h * dim;
      delta(i, h) = cpu::sum_of(dim, [=](Index d) { return static_cast<A>(a[d]) * static_cast<A>(b[d]); });
    }
  }
}

template <class T>
void compute_attention_backward(Cpu& dev, const AttentionGradient<T>& gradient, const AttentionUpstream<T>& upstream,
                                const AttentionInput<T>& in, const AttentionSpan& span) {
  const AttentionShape& shape = span.shape;
  const Index dim = shape.head_dim, group = shape.group(), size = cpu::queries_of_tile(shape);
  require(span.rows.begin % size == 0, "attention: a chunk of the backward pass starts within a tile of queries");
  const std::vector<cpu::QueryTile> query_tiles = cpu::query_tiles(span, size);
  const std::vector<cpu::KeyTile> key_tiles = cpu::key_tiles(query_tiles, span);
  const auto tiles_of_head = static_cast<Index>(query_tiles.size());
  cpu::Turns turns(shape.kv_heads * tiles_of_head);
  for (Index turn = 0; turn < shape.kv_heads * tiles_of_head; ++turn) {
    const cpu::QueryTile& tile = query_tiles[turn % tiles_of_head];
    turns.start(turn, cpu::first_tile_of_keys(tile.rows.begin, span));
  }
  compute_zero(dev, gradient.dq_sums);
  // A thread takes tiles of keys in order, so the tile that others wait for is always being computed.
#pragma omp parallel for collapse(2) schedule(monotonic : dynamic)
  for (const cpu::KeyTile& key_tile : key_tiles) {
    for (Index kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      thread_local cpu::AttentionBackwardTile<T> tile;
      const Rows keys = key_tile.keys;
      auto of_keys = [&](auto m) { return m.slice(keys).columns(kv_head * dim, dim); };
      tile.take(of_keys(in.k), of_keys(in.v));
      for (Index t = key_tile.queries.end - 1; t >= key_tile.queries.begin; --t) {  // last to first
        const Rows queries = query_tiles[t].rows;
        if (queries.end <= keys.begin) break;
        if (key_tile.number < cpu::first_tile_of_keys(queries.begin, span)) continue;
        const Rows seeing = cpu::queries_of(queries, keys, span);
        auto heads = [&](auto m, Index width) {
          return m.slice(seeing.relative_to(span.rows)).columns(kv_head * group * width, group * width);
        };
        if (seeing.size() > 0) {
          tile.compute(of_keys(gradient.dk), of_keys(gradient.dv),
                       {heads(upstream.dout, dim), heads(upstream.lse, 1), heads(upstream.delta, 1)}, heads(in.q, dim),
                       keys, {span.mask, seeing, shape});
        }
        const Index turn = kv_head * tiles_of_head + t;
        turns.wait(turn, key_tile.number);
        if (seeing.size() > 0) tile.add_to(heads(gradient.dq_sums, dim), shape);
        turns.finish(turn, key_tile.number);
      }
    }
  }
  if constexpr (!std::is_same_v<T, Accumulator<T>>) compute_update(dev, gradient.dq, gradient.dq_sums, Converted{});
}

}  // namespace streambp
