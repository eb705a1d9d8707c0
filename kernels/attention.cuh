// Causal grouped-query attention over the token stream. Row i attends to keys [first(i), i]:
//
//   first(i) = max(key_begin[i], i - window + 1)         key_begin: the start of the document of row i
//
//   forward          S = scale Q Kᵀ        P = softmax(S)        O = P V        lse = log Σ exp(S)
//   backward         P = exp(S - lse)      dV += Pᵀ dO           dP = dO Vᵀ
//                    dS = P * (dP - rowsum(dO * O))
//                    dQ = scale dS K       dK += scale dSᵀ Q
//
// Everything happens in tiles of kAttentionTile queries x kAttentionTile keys, so no N x N matrix ever exists. Forward
// keeps a running maximum and sum per row (online softmax): when a tile of keys raises the maximum, what was summed is
// scaled down.
//
// A call computes the query rows `rows` of the stream against keys 0 .. rows.end. dK and dV of a tile of keys add up
// queries from the last tile to the first, heads of a group in order: the same order whatever the chunk.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/attention_shape.cuh"
#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/matmul.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/flash.cuh"
#include "kernels/plain_attention.cuh"
#endif

namespace streambp {

template <class T>
struct AttentionInput {
  Matrix<const T> q, k, v;
};
template <class T>
struct AttentionOutput {
  Matrix<T> attended;
  Matrix<Accumulator<T>> lse;
};
template <class T>
struct AttentionGradient {
  Matrix<T> dq;
  Matrix<Accumulator<T>> dk, dv;
};

// Smaller than kTile, since half of the tiles on the diagonal is wasted; a divisor of it, so that chunks are whole
// tiles.
constexpr Index kAttentionTile = 128;
static_assert(kTile % kAttentionTile == 0);

namespace run {

// A tile of scores between the query rows and the key rows `queries` and `keys` of the stream.
template <class T>
struct ScoreTile {
  Rows queries, keys;
  Matrix<T> values;
};

// The part of a row of the tile that the row attends to, as columns of the tile; possibly empty.
template <class T>
Rows visible(const ScoreTile<T>& tile, Index i, Matrix<const std::int32_t> key_begin, Index window) {
  const Rows keys = keys_of(tile.queries.begin + i, key_begin, window);
  const Index begin = std::clamp(keys.begin - tile.keys.begin, Index{0}, tile.keys.size());
  return {begin, std::clamp(keys.end - tile.keys.begin, begin, tile.keys.size())};
}

// Applies f to the numbers a row attends to and writes zero for the others.
template <class T, class F>
void replace_row(T* row, Index n, Rows visible, F&& f) {
  std::fill(row, row + visible.begin, T(0));
#pragma omp simd
  for (Index j = visible.begin; j < visible.end; ++j) row[j] = f(j);
  std::fill(row + visible.end, row + n, T(0));
}

// P = exp(S - m) on the tile; moves the running maximum and sum, and scales the output summed so far.
template <class T>
void online_softmax_row(T* s, Index n, Rows visible, T& maximum, T& sum, T* output, Index head_dim) {
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

// S = scale Q Kᵀ, and O += P V. A tile with a few queries, such as the one of a text that is being generated, takes as
// long as reading K and V: as in matmul.cuh by loops of our own.
constexpr Index kFewQueries = 8;

template <class T>
void multiply_keys(Matrix<T> s, T scale, Input<T> q, Input<T> k) {
  if (q.rows > kFewQueries) return gemm<T>(scale, q, Op::as_is, k, Op::transposed, 0, s);
  cpu::few_rows<kFewQueries, T>(s, q, k);
  for (Index i = 0; i < s.rows; ++i) {
    for (Index j = 0; j < s.cols; ++j) s(i, j) *= scale;
  }
}

template <class T>
void add_values(Matrix<T> out, Input<T> p, Input<T> v) {
  if (p.rows > kFewQueries) return gemm<T>(1, p, Op::as_is, v, Op::as_is, 1, out);
  const Index ahead = ceil_div(cpu::kOnTheirWay, v.cols) * v.stride;
  for (Index j = 0; j < v.rows; ++j) {
    for (Index d = 0; d < v.cols; d += cpu::kLanes) __builtin_prefetch(v.row(j) + d + ahead);
    for (Index i = 0; i < out.rows; ++i) {
      const T weight = p(i, j);
#pragma omp simd
      for (Index d = 0; d < v.cols; ++d) out(i, d) += weight * v(j, d);
    }
  }
}

// One head of one tile of query rows. q and out: the tile's rows and the head's columns; k, v: all rows.
template <class T>
void attention_tile(Matrix<T> out, Matrix<T> lse, Input<T> q, Input<T> k, Input<T> v,
                    Matrix<const std::int32_t> key_begin, Rows queries, const AttentionShape& shape, T* scores) {
  std::vector<T> maximum(static_cast<std::size_t>(q.rows), -INFINITY), sum(static_cast<std::size_t>(q.rows), T(0));
  for (Index i = 0; i < out.rows; ++i) std::fill_n(out.row(i), out.cols, T(0));
  const Index first_key = keys_of(queries.begin, key_begin, shape.window).begin;
  for (Index tile = first_key / kAttentionTile; tile * kAttentionTile < queries.end; ++tile) {
    const Rows keys = {tile * kAttentionTile, std::min((tile + 1) * kAttentionTile, queries.end)};
    const ScoreTile<T> s{queries, keys, {scores, q.rows, keys.size()}};
    multiply_keys<T>(s.values, static_cast<T>(shape.scale()), q, k.slice(keys));
    for (Index i = 0; i < q.rows; ++i) {
      const auto r = static_cast<std::size_t>(i);
      online_softmax_row(s.values.row(i), keys.size(), visible(s, i, key_begin, shape.window), maximum[r], sum[r],
                         out.row(i), out.cols);
    }
    add_values<T>(out, s.values, v.slice(keys));
  }
  for (Index i = 0; i < out.rows; ++i) {
    const auto r = static_cast<std::size_t>(i);
    for (Index j = 0; j < out.cols; ++j) out(i, j) /= sum[r];
    lse(i, 0) = maximum[r] + std::log(sum[r]);
  }
}

// One head of one tile of query rows: assigns dq, adds to dk and dv.
template <class T>
void attention_backward_tile(Matrix<T> dq, Matrix<T> dk, Matrix<T> dv, Input<T> dout, Input<T> q, Input<T> k,
                             Input<T> v, Input<T> lse, Input<T> delta, Matrix<const std::int32_t> key_begin,
                             Rows queries, const AttentionShape& shape, T* p_data, T* dp_data) {
  const T scale = static_cast<T>(shape.scale());
  const Index first_tile = keys_of(queries.begin, key_begin, shape.window).begin / kAttentionTile;
  for (Index tile = first_tile; tile * kAttentionTile < queries.end; ++tile) {
    const Rows keys = {tile * kAttentionTile, std::min((tile + 1) * kAttentionTile, queries.end)};
    const ScoreTile<T> p{queries, keys, {p_data, q.rows, keys.size()}};
    const Matrix<T> dp(dp_data, q.rows, keys.size());
    gemm<T>(scale, q, Op::as_is, k.slice(keys), Op::transposed, 0, p.values);
    gemm<T>(1, dout, Op::as_is, v.slice(keys), Op::transposed, 0, dp);
    for (Index i = 0; i < q.rows; ++i) {
      const Rows row_visible = visible(p, i, key_begin, shape.window);
      T *p_row = p.values.row(i), *dp_row = dp.row(i);
      const T row_lse = lse(i, 0), row_delta = delta(i, 0);
      replace_row(p_row, keys.size(), row_visible, [=](Index j) { return exponential(p_row[j] - row_lse); });
      replace_row(dp_row, keys.size(), row_visible, [=](Index j) { return p_row[j] * (dp_row[j] - row_delta); });
    }
    gemm<T>(1, p.values, Op::transposed, dout, Op::as_is, 1, dv.slice(keys));
    gemm<T>(scale, dp, Op::transposed, q, Op::as_is, 1, dk.slice(keys));
    gemm<T>(scale, dp, Op::as_is, k.slice(keys), Op::as_is, tile == first_tile ? 0 : 1, dq);
  }
}

template <class T>
void attention(Cpu&, Matrix<T> out, Matrix<T> lse, Input<T> q, Input<T> k, Input<T> v,
               Matrix<const std::int32_t> key_begin, Rows rows, const AttentionShape& shape) {
  const Index dim = shape.head_dim, group = shape.heads / shape.kv_heads;
  const Index first_tile = rows.begin / kAttentionTile, tiles = ceil_div(rows.end, kAttentionTile) - first_tile;
#pragma omp parallel
  {
    std::vector<T> scores(kAttentionTile * kAttentionTile);
#pragma omp for collapse(2) schedule(dynamic)
    for (Index h = 0; h < shape.heads; ++h) {
      for (Index t = tiles - 1; t >= 0; --t) {  // the longest work first
        const Rows queries = {std::max(rows.begin, (first_tile + t) * kAttentionTile),
                              std::min(rows.end, (first_tile + t + 1) * kAttentionTile)};
        const Rows local = {queries.begin - rows.begin, queries.end - rows.begin};
        const Index kv = h / group * dim;
        attention_tile<T>(out.slice(local).columns(h * dim, dim), lse.slice(local).columns(h, 1),
                          q.slice(local).columns(h * dim, dim), k.columns(kv, dim), v.columns(kv, dim), key_begin,
                          queries, shape, scores.data());
      }
    }
  }
}

// delta = rowsum(dO * O) of each head
template <class T>
void attention_delta(Cpu&, Matrix<T> delta, Input<T> dout, Input<T> out) {
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
void attention_backward(Cpu&, Matrix<T> dq, Matrix<T> dk, Matrix<T> dv, Input<T> dout, Input<T> q, Input<T> k,
                        Input<T> v, Input<T> lse, Input<T> delta, Matrix<const std::int32_t> key_begin, Rows rows,
                        const AttentionShape& shape) {
  const Index dim = shape.head_dim, group = shape.heads / shape.kv_heads;
  const Index first_tile = rows.begin / kAttentionTile, tiles = ceil_div(rows.end, kAttentionTile) - first_tile;
#pragma omp parallel
  {
    std::vector<T> p(kAttentionTile * kAttentionTile), dp(kAttentionTile * kAttentionTile);
#pragma omp for schedule(dynamic)
    for (Index kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      for (Index t = tiles - 1; t >= 0; --t) {  // last to first
        const Rows queries = {std::max(rows.begin, (first_tile + t) * kAttentionTile),
                              std::min(rows.end, (first_tile + t + 1) * kAttentionTile)};
        const Rows local = {queries.begin - rows.begin, queries.end - rows.begin};
        for (Index h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          auto head = [&](auto m) { return m.slice(local).columns(h * dim, dim); };
          auto kv = [&](auto m) { return m.columns(kv_head * dim, dim); };
          attention_backward_tile<T>(head(dq), kv(dk), kv(dv), head(dout), head(q), kv(k), kv(v),
                                     lse.slice(local).columns(h, 1), delta.slice(local).columns(h, 1), key_begin,
                                     queries, shape, p.data(), dp.data());
        }
      }
    }
  }
}

}  // namespace run

// q, attended: rows.size() x (heads * head_dim); lse: rows.size() x heads; k, v: the stream x (kv_heads * head_dim).
template <class Device, class T>
void attention(Device& dev, const AttentionOutput<T>& output, const std::type_identity_t<AttentionInput<T>>& input,
               const AttentionSpan& span) {
  const auto& [q, k, v] = input;
  const auto& [out, lse] = output;
  const auto& [mask, rows, shape] = span;
  const Index dim = shape.head_dim;
  require_shape("attention", "queries", q, rows.size(), shape.heads * dim);
  require_shape("attention", "output", out, rows.size(), shape.heads * dim);
  require_shape("attention", "lse", lse, rows.size(), shape.heads);
  require(k.cols == shape.kv_heads * dim && v.cols == k.cols && k.rows >= rows.end, "attention: keys are too small");
  auto op = dev.operation("attention", 4.0 * attention_pairs(span) * static_cast<double>(shape.heads * dim),
                          sizeof(T) * (2.0 * q.size() + 2.0 * k.cols * rows.end));
  if constexpr (Device::computes) run::attention(dev, out, lse, q, k, v, mask.key_begin, rows, shape);
}

// Assigns dq; adds to dk and dv of all rows up to rows.end.
template <class Device, class T>
void attention_backward(Device& dev, const AttentionGradient<T>& gradient, Input<T> dout,
                        const std::type_identity_t<AttentionInput<T>>& input,
                        const std::type_identity_t<AttentionOutput<T>>& output, const AttentionSpan& span) {
  const auto& [q, k, v] = input;
  const auto& [dq, dk, dv] = gradient;
  const auto& [mask, rows, shape] = span;
  using A = Accumulator<T>;
  require_shape("attention backward", "dout", dout, rows.size(), shape.heads * shape.head_dim);
  require_shape("attention backward", "dq", dq, rows.size(), shape.heads * shape.head_dim);
  require(dk.cols == k.cols && dv.cols == v.cols && dk.rows >= rows.end, "attention backward: dk or dv is too small");
  auto scope = dev.scope();
  const auto delta = allocate<A>(dev, rows.size(), shape.heads, Kind::chunk);
  auto op = dev.operation("attention backward",
                          10.0 * attention_pairs(span) * static_cast<double>(shape.heads * shape.head_dim),
                          sizeof(T) * (4.0 * q.size() + 2.0 * k.cols * rows.end) + sizeof(A) * 4.0 * k.cols * rows.end);
  if constexpr (Device::computes) {
    run::attention_delta<T>(dev, delta, dout, output.attended);
    run::attention_backward(dev, dq, dk, dv, dout, q, k, v, output.lse, delta, mask.key_begin, rows, shape);
  }
}

}  // namespace streambp
