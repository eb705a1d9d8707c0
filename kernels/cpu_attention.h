// Attention on the CPU, by tiles of queries and tiles of keys, with the products of gemm.h.
//
// A tile of queries holds every query once for each head of its group: the heads of a group share their keys and
// values, so one product serves all of them. Row i of head g is row i * group + g of the tile. Its scores are a row of
// the product with a tile of keys, and stay in the cache.
//
// All queries and keys of a tile belong to one document, and tiles of keys count from its first token. So the results
// of a query depend neither on other queries nor on where its document lies in the stream. dK and dV of a tile of keys
// are summed over tiles of queries from last to first; these end at multiples of their size, like chunks. dQ is summed
// over tiles of keys from first to last.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/attention_shape.h"
#include "kernels/base/gemm.h"
#include "kernels/base/math.cuh"
#include "kernels/base/row_sums.h"
#include "kernels/elementwise.cuh"

namespace streambp::cpu {

constexpr Index kKeys = 128;  // keys of a tile
static_assert(kTile % kKeys == 0 && kPage % kKeys == 0);

// Queries of a tile, a power of two, so that tiles divide chunks.
inline Index queries_of_tile(const AttentionShape& shape) {
  require(shape.head_dim <= kBlock && shape.group() <= kBlock, "attention: groups of ", shape.group(), " heads of ",
          shape.head_dim, " are too large");
  return static_cast<Index>(std::bit_floor(static_cast<std::uint64_t>(kBlock / shape.group())));
}

// Queries of one document, as rows of the stream. document: its first token.
struct QueryTile {
  Rows rows;
  Index document;
};

// size: the most queries of a tile. Tiles end at multiples of it.
inline std::vector<QueryTile> query_tiles(const AttentionSpan& span, Index size) {
  std::vector<QueryTile> tiles;
  for (Index row = span.rows.begin; row < span.rows.end; ++row) {
    const Index document = span.mask.key_begin(0, row);
    if (tiles.empty() || tiles.back().document != document || row % size == 0) tiles.push_back({{row, row}, document});
    tiles.back().rows.end = row + 1;
  }
  return tiles;
}

// The first tile of keys that a query attends to, counted from the start of its document.
inline Index first_tile_of_keys(Index query, const AttentionSpan& span) {
  const Index document = span.mask.key_begin(0, query);
  return (keys_of(query, span.mask.key_begin, span.shape.window).begin - document) / kKeys;
}

// The keys of a tile before `end`, as rows of the stream.
inline Rows keys_of_tile(Index tile, Index document, Index end) {
  const Rows keys = piece(tile, kKeys, end - document);
  return {document + keys.begin, document + keys.end};
}

// The queries that attend to a key of `keys`. They are contiguous, because the first key of a row never decreases from
// row to row of a document.
inline Rows queries_of(Rows queries, Rows keys, const AttentionSpan& span) {
  Index begin = most(queries.begin, keys.begin), end = most(queries.end, begin);
  while (end > begin && keys_of(end - 1, span.mask.key_begin, span.shape.window).begin >= keys.end) --end;
  return {begin, end};
}

// The columns of a tile of keys that a query attends to. May be empty.
inline Rows visible(Index query, Rows keys, const AttentionSpan& span) {
  const Rows all = keys_of(query, span.mask.key_begin, span.shape.window);
  const Index begin = std::clamp(all.begin - keys.begin, Index{0}, keys.size());
  return {begin, std::clamp(all.end - keys.begin, begin, keys.size())};
}

// Whether all queries attend to all of the keys. If the first and the last one do, so do those between them.
inline bool all_visible(Rows queries, Rows keys, const AttentionSpan& span) {
  return queries.size() == 0 || (visible(queries.begin, keys, span).size() == keys.size() &&
                                 visible(queries.end - 1, keys, span).size() == keys.size());
}

// row[j] = f(j) for visible columns, 0 elsewhere.
template <class A, class F>
void replace_row(A* row, Index n, Rows visible, F&& f) {
  std::fill(row, row + visible.begin, A(0));
#pragma omp simd
  for (Index j = visible.begin; j < visible.end; ++j) row[j] = f(j);
  std::fill(row + visible.end, row + n, A(0));
}

// The rows of one group of heads, as the rows of a tile: q has `group` heads side by side.
template <class A, class T>
Matrix<A> stack(const LeftBlock<A>& block, Matrix<const T> q, Index dim, A factor = 1) {
  const Index group = q.cols / dim;
  const Matrix<A> all = block.matrix(q.rows * group, dim);
  for (Index i = 0; i < q.rows; ++i) {
    for (Index g = 0; g < group; ++g) {
      const T* from = q.row(i) + g * dim;
      A* to = all.row(i * group + g);
      for (Index d = 0; d < dim; ++d) to[d] = static_cast<A>(from[d]) * factor;
    }
  }
  return all;
}

// A probability of 0 times a value that is NaN or infinite is NaN. So where some rows do not see all keys of a tile, its
// rows of K or V that are not finite become 0 in the product. Returns these rows, and replaces `m` by a copy without them.
template <class T>
std::vector<Index> take_out_not_finite(Matrix<const T>& m, std::vector<T>& copy) {
  std::vector<Index> rows;
  for (Index i = 0; i < m.rows; ++i) {
    const T* row = m.row(i);
    if (sum_of(m.cols, [=](Index j) { return Accumulator<T>(0) * row[j]; }) != 0) rows.push_back(i);
  }
  if (rows.empty()) return rows;
  copy.resize(m.size());
  const Matrix<T> finite(copy.data(), m.rows, m.cols);
  for (Index i = 0; i < m.rows; ++i) std::copy_n(m.row(i), m.cols, finite.row(i));
  for (const Index i : rows) std::fill_n(finite.row(i), m.cols, T(0));
  m = finite;
  return rows;
}

// --- Forward ---

// Queries of a tile, so few that every thread gets work. Results do not depend on it.
inline Index queries_of_tile_for_threads(Index queries, const AttentionShape& shape) {
  constexpr Index few = 16;
  Index size = queries_of_tile(shape);
  while (size > few && queries * shape.kv_heads < 2 * omp_get_max_threads() * size) size /= 2;
  return size;
}

// The maximum of the scores of a row so far, and their Σ exp(score - maximum).
template <class A>
struct RunningSoftmax {
  A maximum = -INFINITY, sum = 0;
};

// One row of scores: S becomes P = exp(S - maximum). If the maximum rises, the output so far is rescaled.
template <class A>
void online_softmax_row(A* s, Index n, Rows visible, RunningSoftmax<A>& running, A* output, Index dim) {
  A maximum = running.maximum;
#pragma omp simd reduction(max : maximum)
  for (Index j = visible.begin; j < visible.end; ++j) maximum = s[j] > maximum ? s[j] : maximum;
  if (maximum > running.maximum) {
    const A shrink = running.sum == 0 ? A(0) : exponential(running.maximum - maximum);
    running.sum *= shrink;
    for (Index d = 0; d < dim; ++d) output[d] *= shrink;
    running.maximum = maximum;
  }
  std::fill(s, s + visible.begin, A(0));
  A* seen = s + visible.begin;
  running.sum += replace_and_sum(seen, visible.size(), [=](A score) { return exponential(score - maximum); });
  std::fill(s + visible.end, s + n, A(0));
}

template <class T>
class AttentionTile {
 public:
  using A = Accumulator<T>;

  // in.q and out: the rows of the tile and the columns of a group. in.k, in.v: all rows of the group's key/value head. The
  // keys of a tile follow each other in one page.
  void compute(const AttentionOutput<T>& out, const AttentionInput<T>& in, const QueryTile& tile,
               const AttentionSpan& span) {
    const auto& [queries, document] = tile;
    const Index dim = span.shape.head_dim, group = in.q.cols / dim;
    const Matrix<A> q = stack(queries_, in.q, dim, static_cast<A>(span.shape.scale()));
    const Matrix<A> o(output_.data(), q.rows, dim);
    std::fill_n(o.data, o.size(), A(0));
    std::fill_n(running_, q.rows, RunningSoftmax<A>{});
    for (Index t = first_tile_of_keys(queries.begin, span); document + t * kKeys < queries.end; ++t) {
      const Rows keys = keys_of_tile(t, document, queries.end), seeing = queries_of(queries, keys, span),
                 rows = {(seeing.begin - queries.begin) * group, (seeing.end - queries.begin) * group};
      const Index shift = in.pages.shift(keys.begin);
      const Rows of_cache = {keys.begin + shift, keys.end + shift};
      const Matrix<A> s = scores_.matrix(q.rows, keys.size()).slice(rows);
      keys_.pack(in.k.slice(of_cache), Op::transposed);
      multiply<A>(s, q.slice(rows), Op::as_is, keys_, Update::assign);
      for (Index i = 0; i < s.rows; ++i) {
        const Index row = rows.begin + i;
        online_softmax_row(s.row(i), s.cols, visible(queries.begin + row / group, keys, span), running_[row],
                           o.row(row), dim);
      }
      Matrix<const T> v = in.v.slice(of_cache);
      std::vector<Index> not_finite;
      if (!all_visible(seeing, keys, span)) not_finite = take_out_not_finite(v, finite_);
      values_.pack(v, Op::as_is);
      multiply<A>(o.slice(rows), s, Op::as_is, values_, Update::add);
      for (const Index key : not_finite) {
        for (Index i = 0; i < s.rows; ++i) {
          const Rows seen = visible(queries.begin + (rows.begin + i) / group, keys, span);
          for (Index d = 0; d < dim && seen.begin <= key && key < seen.end; ++d)
            o(rows.begin + i, d) += s(i, key) * static_cast<A>(in.v(of_cache.begin + key, d));
        }
      }
    }
    for (Index row = 0; row < o.rows; ++row) {
      T* to = out.attended.row(row / group) + row % group * dim;
      for (Index d = 0; d < dim; ++d) to[d] = o(row, d) / running_[row].sum;
      out.lse(row / group, row % group) = running_[row].maximum + logarithm(running_[row].sum);
    }
  }

 private:
  LeftBlock<A> queries_, scores_;
  RightPanels<A> keys_{kKeys}, values_{kBlock};
  Buffer<A> output_{kBlock * kBlock};
  RunningSoftmax<A> running_[kBlock];
  std::vector<T> finite_;
};

// A tile of the span's queries, for one group of heads.
template <class T>
void attend(const AttentionOutput<T>& out, const AttentionInput<T>& in, const QueryTile& tile, Index kv_head,
            const AttentionSpan& span) {
  thread_local AttentionTile<T> memory;
  const Rows rows = tile.rows.relative_to(span.rows);
  auto heads = [&](auto m) { return m.slice(rows).columns(piece(kv_head, m.cols / span.shape.kv_heads, m.cols)); };
  auto keys = [&](auto m) { return m.columns(kv_head * span.shape.head_dim, span.shape.head_dim); };
  memory.compute({heads(out.attended), heads(out.lse)}, {heads(in.q), keys(in.k), keys(in.v), in.pages}, tile, span);
}

// --- Backward ---

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

// Tiles of keys add to the dQ of a tile of queries in order: each waits until the one before has added its part.
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
    k_transposed_.pack(k, Op::transposed);
    v_transposed_.pack(v, Op::transposed);
    take_out_not_finite(k, finite_);  // where a row sees them, dS is NaN already
    k_.pack(k, Op::as_is);
  }

  // For the queries of span.rows: adds to dk and dv of the keys, and computes the keys' part of dQ. All matrices of
  // queries have these rows and the columns of a group.
  void compute(Matrix<A> dk, Matrix<A> dv, const AttentionUpstream<T>& upstream, Matrix<const T> q, Rows keys,
               const AttentionSpan& span) {
    const Index dim = span.shape.head_dim, group = q.cols / dim;
    const Matrix<A> scaled_q = stack(q_, q, dim, static_cast<A>(span.shape.scale())),
                    dout = stack(dout_, upstream.dout, dim), p = p_.matrix(scaled_q.rows, keys.size()),
                    ds = ds_.matrix(scaled_q.rows, keys.size());
    multiply<A>(p, scaled_q, Op::as_is, k_transposed_, Update::assign);
    multiply<A>(ds, dout, Op::as_is, v_transposed_, Update::assign);
    for (Index row = 0; row < p.rows; ++row) {
      const Rows row_visible = visible(span.rows.begin + row / group, keys, span);
      A *p_row = p.row(row), *ds_row = ds.row(row);
      const A lse = upstream.lse(row / group, row % group), delta = upstream.delta(row / group, row % group);
      replace_row(p_row, keys.size(), row_visible, [=](Index j) { return exponential(p_row[j] - lse); });
      replace_row(ds_row, keys.size(), row_visible, [=](Index j) { return p_row[j] * (ds_row[j] - delta); });
    }
    right_.pack(Matrix<const A>(dout), Op::as_is);
    multiply<A>(dv, p, Op::transposed, right_, Update::add);
    right_.pack(Matrix<const A>(scaled_q), Op::as_is);
    multiply<A>(dk, ds, Op::transposed, right_, Update::add);
    dq_ = Matrix<A>(partial_.data(), ds.rows, dim);
    multiply<A>(dq_, ds, Op::as_is, k_, Update::assign);
  }

  // Adds the part of dQ that compute() left.
  void add_to(Matrix<A> dq, const AttentionShape& shape) const {
    const Index group = dq.cols / shape.head_dim;
    const A scale = static_cast<A>(shape.scale());
    for (Index row = 0; row < dq_.rows; ++row) {
      A* to = dq.row(row / group) + row % group * shape.head_dim;
      for (Index d = 0; d < shape.head_dim; ++d) to[d] += scale * dq_(row, d);
    }
  }

 private:
  RightPanels<A> k_transposed_{kKeys}, k_{kBlock}, v_transposed_{kKeys}, right_{kBlock};
  LeftBlock<A> q_, dout_, p_, ds_;
  Buffer<A> partial_{kBlock * kBlock};
  std::vector<T> finite_;
  Matrix<A> dq_;
};

}  // namespace streambp::cpu

namespace streambp {

template <class T>
void compute_attention(Cpu&, const AttentionOutput<T>& out, const AttentionInput<T>& in, const AttentionSpan& span) {
  const auto tiles = cpu::query_tiles(span, cpu::queries_of_tile_for_threads(span.rows.size(), span.shape));
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (std::size_t t = tiles.size(); t > 0; --t) {  // the last tiles of a document take longest
    for (Index kv_head = 0; kv_head < span.shape.kv_heads; ++kv_head) cpu::attend(out, in, tiles[t - 1], kv_head, span);
  }
}

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
