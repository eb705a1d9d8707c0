// Attention in generation. The rows of a chunk are the next tokens of several sequences. Row i is token position[i] of a
// sequence with K and V in pages of a cache:
//
//   append           K, V of row i become those of token position[i]
//   attend           row i attends to tokens [first, position[i]] of its sequence, as in attention.cuh,
//                    first = max(0, position[i] - window + 1)
//
// Each is one launch for all sequences (attend: two, if segments have their own thread blocks), or on the CPU one parallel
// region. The bits of a row depend on its sequence alone. They are those of attention() for a stream that begins with the
// sequence.
#pragma once

#include "kernels/attention.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#include "kernels/flash/cached.cuh"
#endif

namespace streambp {

// Writes K and V of the chunk's rows to the cache.
template <class Device, class T>
void append_to_cache(Device& dev, const KeysValues<T>& cache, const std::type_identity_t<KeysValues<T>>& kv,
                     const SequenceRows& rows) {
  require_shape("cache", "keys", kv.k, rows.index.positions.cols, cache.k.cols);
  require_shape("cache", "values", kv.v, rows.index.positions.cols, cache.v.cols);
  auto op = dev.operation("append to cache", 0, 4.0 * sizeof(T) * kv.k.size());
  if constexpr (Device::computes) compute_append(dev, cache, kv, rows);
}

// With few rows, a thread block for each row and head of keys would leave a GPU idle. So each segment of a row has its own.
inline Index few_rows(const AttentionShape& shape) { return 128 / shape.kv_heads; }
inline Index segments_apart(Index rows, Index room, const AttentionShape& shape) {
  return shape.window == 0 && rows <= few_rows(shape) ? ceil_div(room, kSegment) : 1;
}

// in.q: the chunk's rows. in.k, in.v: the cache.
template <class Device, class T>
void cached_attention(Device& dev, const AttentionOutput<T>& out, const std::type_identity_t<AttentionInput<T>>& in,
                      const SequenceRows& rows, const AttentionShape& shape) {
  const Index q_width = shape.heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
  require_shape("cached attention", "queries", in.q, rows.index.positions.cols, q_width);
  require_shape("cached attention", "output", out.attended, in.q.rows, q_width);
  require_shape("cached attention", "lse", out.lse, in.q.rows, shape.heads);
  auto scope = dev.scope();
  const Index room = rows.index.tables.cols * kPage;
  const Index few = few_rows(shape);  // a generator plans its largest chunk, and few rows must not need more
  const Index count = std::max(in.q.rows, few * segments_apart(few, room, shape));
  const auto sums = allocate_sums<T>(dev, count, room, shape);
  double pairs = 0, keys = 0;
  for (const SequencePiece& piece : rows.pieces) {
    require(in.k.cols == kv_width && piece.tokens.end <= room, "cached attention: the cache is too small");
    pairs += attention_pairs({{}, piece.tokens, shape});
    keys += static_cast<double>(piece.tokens.end);
  }
  auto op = dev.operation("attention", 4.0 * pairs * static_cast<double>(q_width),
                          sizeof(T) * (2.0 * in.q.size() + 2.0 * kv_width * keys));
  if constexpr (Device::computes)
    compute_cached_attention(dev, AttentionOutput<T>{out.attended, out.lse, sums}, in, rows, shape);
}

// --- CPU ---

template <class T>
void compute_append(Cpu&, const KeysValues<T>& cache, const KeysValues<T>& kv, const SequenceRows& rows) {
#pragma omp parallel for if (kv.k.size() > kWorthThreads)
  for (Index i = 0; i < kv.k.rows; ++i) {
    const Index to = rows.index.cache_row(i);
    std::copy_n(kv.k.row(i), kv.k.cols, cache.k.row(to));
    std::copy_n(kv.v.row(i), kv.v.cols, cache.v.row(to));
  }
}

template <class T>
void compute_cached_attention(Cpu&, const AttentionOutput<T>& out, const AttentionInput<T>& in,
                              const SequenceRows& rows, const AttentionShape& shape) {
  struct Tile {
    const SequencePiece* piece;
    cpu::QueryTile queries;
  };
  std::vector<Tile> tiles;
  const Index size = cpu::queries_of_tile_for_threads(in.q.rows, shape);
  for (const SequencePiece& piece : rows.pieces) {
    for (const auto& queries : cpu::query_tiles({rows.mask, piece.tokens, shape}, size))
      tiles.push_back({&piece, queries});
  }
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (std::size_t t = tiles.size(); t > 0; --t) {
    for (Index kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      const auto& [piece, queries] = tiles[t - 1];
      const Rows chunk = piece->rows();
      cpu::attend<T>({out.attended.slice(chunk), out.lse.slice(chunk)},
                     {in.q.slice(chunk), in.k, in.v, {rows.index.tables.row(piece->sequence)}}, queries, kv_head,
                     {rows.mask, piece->tokens, shape});
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class T>
void compute_append(Cuda& dev, const KeysValues<T>& cache, const KeysValues<T>& kv, const SequenceRows& rows) {
  auto f = [=, index = rows.index] __device__(auto n, Index i, Index j) {
    const Index to = index.cache_row(i);
    cuda::store(cache.k.row(to) + j, cuda::load<n()>(kv.k.row(i) + j));
    cuda::store(cache.v.row(to) + j, cuda::load<n()>(kv.v.row(i) + j));
  };
  cuda::for_each_pack(dev, kv.k.rows, kv.k.cols, f, kv.k, kv.v, cache.k, cache.v);
}

namespace cuda {

// In float32: a warp for each row and head. The heads of a group are neighbours, so they share K and V in the L1 cache.
static __global__ void __launch_bounds__(kPlainThreads)
    plain_cached_kernel(PlainInput in, SequenceIndex rows, AttentionOutput<float> out) {
  const Index unit = row_of_warp(), i = unit / in.shape.heads;
  if (i >= in.q.rows) return;
  in.pages = rows.pages_of(i);
  in.rows = {rows.positions(0, i) - i, rows.positions(0, i) + 1};
  plain_attend(in, i, unit % in.shape.heads, out);
}

}  // namespace cuda

inline void compute_cached_attention(Cuda& dev, const AttentionOutput<float>& out, const AttentionInput<float>& in,
                                     const SequenceRows& rows, const AttentionShape& shape) {
  cuda::launch(dev, cuda::plain_cached_kernel, cuda::plain_grid(in.q.rows * shape.heads, 1), cuda::kPlainThreads,
               cuda::kPlainThreads * sizeof(float), cuda::plain_input(in, {rows.mask, {0, 0}, shape}), rows.index, out);
}

template <std::same_as<BFloat16> T>
void compute_cached_attention(Cuda& dev, const AttentionOutput<T>& out, const AttentionInput<T>& in,
                              const SequenceRows& rows, const AttentionShape& shape) {
  const cuda::FlashInput input = cuda::flash_input(in, {rows.mask, {0, 0}, shape});
  const Index segments = segments_apart(in.q.rows, rows.index.tables.cols * kPage, shape);
  cuda::with_kernel_for(shape, [&](auto dim, auto capped) {
    const Index stacks = shape.kv_heads * cuda::HeadStack<cuda::kCachedRows<dim()>>::per_group(shape);
    dim3 grid = cuda::grid_of(in.q.rows, stacks);
    grid.z = static_cast<unsigned>(segments);
    cuda::launch(dev, cuda::flash_cached_kernel<dim(), capped()>, grid, cuda::kTileThreads,
                 cuda::CachedMemory<dim()>::kBytes, input, rows.index, out);
  });
  if (segments > 1)
    cuda::launch(dev, cuda::add_segments_kernel<T>,
                 cuda::grid_of(ceil_div(out.attended.cols, cuda::kTileThreads), in.q.rows), cuda::kTileThreads, 0,
                 input, rows.index, out, segments);
}

#endif

}  // namespace streambp
