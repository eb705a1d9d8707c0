// Causal grouped-query attention over the token stream. Row i attends to keys [first(i), i]:
//
//   first(i) = max(key_begin[i], i - window + 1)         key_begin: the start of the document of row i
//
//   forward          S = scale Q Kᵀ        P = softmax(S)        O = P V        lse = log Σ exp(S)
//   backward         P = exp(S - lse)      dV += Pᵀ dO           dP = dO Vᵀ
//                    dS = P * (dP - rowsum(dO * O))
//                    dQ = scale dS K       dK += scale dSᵀ Q
//
// Computed in tiles of kAttentionTile queries x kAttentionTile keys, so no N x N matrix exists. The forward pass keeps
// a running maximum and sum per row (online softmax): when a tile of keys raises the maximum, the sums so far are
// rescaled.
//
// A call computes the query rows span.rows of the stream against keys 0 .. span.rows.end. The dK and dV of a key tile
// are summed over query tiles from last to first, and within a tile over the heads of the group in order. This order is
// the same for any chunk.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/attention_shape.cuh"
#include "kernels/base/device.cuh"
#include "kernels/base/gemm.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/flash.cuh"
#include "kernels/plain_attention.cuh"
#endif

namespace streambp {

// Smaller than kTile, because half of each tile on the diagonal is wasted work. It divides kTile, so a chunk is a whole
// number of attention tiles.
constexpr Index kAttentionTile = 128;
static_assert(kTile % kAttentionTile == 0);

template <class Device, class T>
void attention(Device& dev, const AttentionOutput<T>& out, const std::type_identity_t<AttentionInput<T>>& in,
               const AttentionSpan& span) {
  const auto& [mask, rows, shape] = span;
  const Index q_width = shape.heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
  require_shape("attention", "queries", in.q, rows.size(), q_width);
  require_shape("attention", "output", out.attended, rows.size(), q_width);
  require_shape("attention", "lse", out.lse, rows.size(), shape.heads);
  require(in.k.cols == kv_width && in.v.cols == kv_width && in.k.rows >= rows.end && in.v.rows >= rows.end,
          "attention: keys or values are too small");
  auto op = dev.operation("attention", 4.0 * attention_pairs(span) * static_cast<double>(q_width),
                          sizeof(T) * (2.0 * in.q.size() + 2.0 * kv_width * rows.end));
  if constexpr (Device::computes) compute_attention(dev, out, in, span);
}

// Writes dq. Adds to dk and dv for all rows up to span.rows.end.
template <class Device, class T>
void attention_backward(Device& dev, const AttentionGradient<T>& gradient, Input<T> dout,
                        const std::type_identity_t<AttentionInput<T>>& in,
                        const std::type_identity_t<AttentionOutput<T>>& out, const AttentionSpan& span) {
  using A = Accumulator<T>;
  const auto& [mask, rows, shape] = span;
  const Index q_width = shape.heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
  require_shape("attention backward", "dout", dout, rows.size(), q_width);
  require_shape("attention backward", "dq", gradient.dq, rows.size(), q_width);
  require(gradient.dk.cols == kv_width && gradient.dv.cols == kv_width && gradient.dk.rows >= rows.end &&
              gradient.dv.rows >= rows.end,
          "attention backward: dk or dv is too small");
  auto scope = dev.scope();
  const auto delta = allocate<A>(dev, rows.size(), shape.heads, Kind::chunk);
  auto op = dev.operation(
      "attention backward", 10.0 * attention_pairs(span) * static_cast<double>(q_width),
      sizeof(T) * (4.0 * in.q.size() + 2.0 * kv_width * rows.end) + sizeof(A) * 4.0 * kv_width * rows.end);
  if constexpr (Device::computes) {
    compute_attention_delta<T>(dev, delta, dout, out.attended);
    compute_attention_backward(dev, gradient, AttentionUpstream<T>{dout, out.lse, delta}, in, span);
  }
}

// --- CPU ---

namespace cpu {

// Scores of a tile of query rows and a tile of key rows of the stream.
template <class T>
struct ScoreTile {
  Rows queries, keys;
  Matrix<T> values;
};

// The columns of the tile that row i of the tile attends to. May be empty.
template <class T>
Rows visible(const ScoreTile<T>& tile, Index i, Matrix<const std::int32_t> key_begin, Index window) {
  const Rows keys = keys_of(tile.queries.begin + i, key_begin, window);
  const Index begin = std::clamp(keys.begin - tile.keys.begin, Index{0}, tile.keys.size());
  return {begin, std::clamp(keys.end - tile.keys.begin, begin, tile.keys.size())};
}

// row[j] = f(j) for visible columns, 0 elsewhere.
template <class T, class F>
void replace_row(T* row, Index n, Rows visible, F&& f) {
  std::fill(row, row + visible.begin, T(0));
#pragma omp simd
  for (Index j = visible.begin; j < visible.end; ++j) row[j] = f(j);
  std::fill(row + visible.end, row + n, T(0));
}

// The maximum of the scores of a row so far, and their Σ exp(score - maximum).
template <class T>
struct RunningSoftmax {
  T maximum = -INFINITY, sum = 0;
};

// One row of a tile: P = exp(S - maximum). Updates the running softmax, and rescales the output so far.
template <class T>
void online_softmax_row(T* s, Index n, Rows visible, RunningSoftmax<T>& running, T* output, Index head_dim) {
  auto& [maximum, sum] = running;
  T tile_max = maximum;
#pragma omp simd reduction(max : tile_max)
  for (Index j = visible.begin; j < visible.end; ++j) tile_max = s[j] > tile_max ? s[j] : tile_max;
  if (tile_max > maximum) {
    const T shrink = sum == 0 ? T(0) : exponential(maximum - tile_max);
    sum *= shrink;
    for (Index j = 0; j < head_dim; ++j) output[j] *= shrink;
    maximum = tile_max;
  }
  replace_row(s, n, visible, [=](Index j) { return exponential(s[j] - tile_max); });
  T tile_sum = 0;
#pragma omp simd reduction(+ : tile_sum)
  for (Index j = 0; j < n; ++j) tile_sum += s[j];
  sum += tile_sum;
}

// S = scale Q Kᵀ, and O += P V. With few queries, as in generation, reading K and V dominates, so few_rows and a
// similar loop read each of them once.
constexpr Index kFewQueries = 8;

template <class T>
void multiply_keys(Matrix<T> s, T scale, Input<T> q, Input<T> k) {
  if (q.rows > kFewQueries) return gemm<T>(scale, q, Op::as_is, k, Op::transposed, 0, s);
  few_rows<kFewQueries, T>(s, q, k);
  for (Index i = 0; i < s.rows; ++i) {
    for (Index j = 0; j < s.cols; ++j) s(i, j) *= scale;
  }
}

template <class T>
void add_values(Matrix<T> out, Input<T> p, Input<T> v) {
  if (p.rows > kFewQueries) return gemm<T>(1, p, Op::as_is, v, Op::as_is, 1, out);
  const Index ahead = ceil_div(kPrefetch, v.cols) * v.stride;
  for (Index j = 0; j < v.rows; ++j) {
    for (Index d = 0; d < v.cols; d += kLanes) __builtin_prefetch(v.row(j) + d + ahead);
    for (Index i = 0; i < out.rows; ++i) {
      const T weight = p(i, j);
#pragma omp simd
      for (Index d = 0; d < v.cols; ++d) out(i, d) += weight * v(j, d);
    }
  }
}

// A tile of query rows of one head. in.q and out: the tile's rows and the head's columns; in.k, in.v: all rows.
template <class T>
void attention_tile(const AttentionOutput<T>& out, const AttentionInput<T>& in, const AttentionSpan& span, T* scores) {
  const auto& [mask, queries, shape] = span;
  const Matrix<T> o = out.attended;
  std::vector<RunningSoftmax<T>> running(static_cast<std::size_t>(o.rows));
  for (Index i = 0; i < o.rows; ++i) std::fill_n(o.row(i), o.cols, T(0));
  const Index first_key = keys_of(queries.begin, mask.key_begin, shape.window).begin;
  for (Index tile = first_key / kAttentionTile; tile * kAttentionTile < queries.end; ++tile) {
    const Rows keys = piece(tile, kAttentionTile, queries.end);
    const ScoreTile<T> s{queries, keys, {scores, o.rows, keys.size()}};
    multiply_keys<T>(s.values, static_cast<T>(shape.scale()), in.q, in.k.slice(keys));
    for (Index i = 0; i < o.rows; ++i) {
      online_softmax_row(s.values.row(i), keys.size(), visible(s, i, mask.key_begin, shape.window),
                         running[static_cast<std::size_t>(i)], o.row(i), o.cols);
    }
    add_values<T>(o, s.values, in.v.slice(keys));
  }
  for (Index i = 0; i < o.rows; ++i) {
    const auto [maximum, sum] = running[static_cast<std::size_t>(i)];
    for (Index j = 0; j < o.cols; ++j) o(i, j) /= sum;
    out.lse(i, 0) = maximum + std::log(sum);
  }
}

// The backward pass of the same tile: writes dq, adds to dk and dv. `scores` has room for P and dP.
template <class T>
void attention_backward_tile(const AttentionGradient<T>& gradient, const AttentionUpstream<T>& upstream,
                             const AttentionInput<T>& in, const AttentionSpan& span, T* scores) {
  const auto& [mask, queries, shape] = span;
  const auto& [dout, lse, delta] = upstream;
  const T scale = static_cast<T>(shape.scale());
  const Index rows = in.q.rows,
              first_tile = keys_of(queries.begin, mask.key_begin, shape.window).begin / kAttentionTile;
  for (Index tile = first_tile; tile * kAttentionTile < queries.end; ++tile) {
    const Rows keys = piece(tile, kAttentionTile, queries.end);
    const Matrix<const T> k = in.k.slice(keys), v = in.v.slice(keys);
    const ScoreTile<T> p{queries, keys, {scores, rows, keys.size()}};
    const Matrix<T> dp(scores + kAttentionTile * kAttentionTile, rows, keys.size());
    gemm<T>(scale, in.q, Op::as_is, k, Op::transposed, 0, p.values);
    gemm<T>(1, dout, Op::as_is, v, Op::transposed, 0, dp);
    for (Index i = 0; i < rows; ++i) {
      const Rows row_visible = visible(p, i, mask.key_begin, shape.window);
      T *p_row = p.values.row(i), *dp_row = dp.row(i);
      const T row_lse = lse(i, 0), row_delta = delta(i, 0);
      replace_row(p_row, keys.size(), row_visible, [=](Index j) { return exponential(p_row[j] - row_lse); });
      replace_row(dp_row, keys.size(), row_visible, [=](Index j) { return p_row[j] * (dp_row[j] - row_delta); });
    }
    gemm<T>(1, p.values, Op::transposed, dout, Op::as_is, 1, gradient.dv.slice(keys));
    gemm<T>(scale, dp, Op::transposed, in.q, Op::as_is, 1, gradient.dk.slice(keys));
    gemm<T>(scale, dp, Op::as_is, k, Op::as_is, tile == first_tile ? 0 : 1, gradient.dq);
  }
}

// The tiles of the span's query rows.
struct QueryTiles {
  Rows rows;
  Index first, count;
  explicit QueryTiles(Rows rows)
      : rows(rows), first(rows.begin / kAttentionTile), count(ceil_div(rows.end, kAttentionTile) - first) {}

  Rows in_stream(Index t) const {
    const Rows tile = piece(first + t, kAttentionTile, rows.end);
    return {std::max(rows.begin, tile.begin), tile.end};
  }
  Rows in_chunk(Index t) const { return {in_stream(t).begin - rows.begin, in_stream(t).end - rows.begin}; }
};

}  // namespace cpu

template <class T>
void compute_attention(Cpu&, const AttentionOutput<T>& out, const AttentionInput<T>& in, const AttentionSpan& span) {
  const AttentionShape& shape = span.shape;
  const Index dim = shape.head_dim;
  const cpu::QueryTiles tiles(span.rows);
#pragma omp parallel
  {
    std::vector<T> scores(kAttentionTile * kAttentionTile);
#pragma omp for collapse(2) schedule(dynamic)
    for (Index h = 0; h < shape.heads; ++h) {
      for (Index t = tiles.count - 1; t >= 0; --t) {  // longest tiles first
        const Rows chunk = tiles.in_chunk(t);
        const Index kv = h / shape.group() * dim;
        cpu::attention_tile<T>({out.attended.slice(chunk).columns(h * dim, dim), out.lse.slice(chunk).columns(h, 1)},
                               {in.q.slice(chunk).columns(h * dim, dim), in.k.columns(kv, dim), in.v.columns(kv, dim)},
                               {span.mask, tiles.in_stream(t), shape}, scores.data());
      }
    }
  }
}

// delta = rowsum(dO * O) of each head
template <class T>
void compute_attention_delta(Cpu&, Matrix<T> delta, Input<T> dout, Input<T> out) {
  const Index dim = out.cols / delta.cols;
#pragma omp parallel for
  for (Index i = 0; i < delta.rows; ++i) {
    for (Index h = 0; h < delta.cols; ++h) {
      const T *a = dout.row(i) + h * dim, *b = out.row(i) + h * dim;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (Index j = 0; j < dim; ++j) sum += a[j] * b[j];
      delta(i, h) = sum;
    }
  }
}

template <class T>
void compute_attention_backward(Cpu&, const AttentionGradient<T>& gradient, const AttentionUpstream<T>& upstream,
                                const AttentionInput<T>& in, const AttentionSpan& span) {
  const AttentionShape& shape = span.shape;
  const Index dim = shape.head_dim;
  const cpu::QueryTiles tiles(span.rows);
#pragma omp parallel
  {
    std::vector<T> scores(2 * kAttentionTile * kAttentionTile);
#pragma omp for schedule(dynamic)
    for (Index kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      auto kv = [&](auto m) { return m.columns(kv_head * dim, dim); };
      for (Index t = tiles.count - 1; t >= 0; --t) {  // last to first
        const Rows chunk = tiles.in_chunk(t);
        for (Index h = kv_head * shape.group(); h < (kv_head + 1) * shape.group(); ++h) {
          auto head = [&](auto m) { return m.slice(chunk).columns(h * dim, dim); };
          auto column = [&](auto m) { return m.slice(chunk).columns(h, 1); };
          cpu::attention_backward_tile<T>({head(gradient.dq), kv(gradient.dk), kv(gradient.dv)},
                                          {head(upstream.dout), column(upstream.lse), column(upstream.delta)},
                                          {head(in.q), kv(in.k), kv(in.v)}, {span.mask, tiles.in_stream(t), shape},
                                          scores.data());
        }
      }
    }
  }
}

}  // namespace streambp
