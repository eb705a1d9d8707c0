// Flash attention in generation: a thread block owns the next queries of one sequence and all heads of a group, so it reads the
// group's K and V once. Row r of its tile is head r % heads of query r / heads. The loop over keys is that of training, and
// a row's bits depend on no other row of its tile: they are those of training for a stream that begins with the sequence.
// Where rows are too few to fill a GPU, each segment of their keys has its own thread block, and a second kernel adds up.
#pragma once

#include "kernels/flash/forward.cuh"

namespace streambp::cuda {

template <int DIM>
constexpr int kCachedRows = Flash<DIM>::kRowWarps * 16;  // of a tile
template <int DIM>
using CachedMemory = FlashMemory<DIM, kCachedRows<DIM>>;

// Heads of a group, at most one for each of the ROWS of a tile. blockIdx.y counts the stacks of all groups.
template <int ROWS>
struct HeadStack {
  int kv_head, first, count;
  Pages pages;  // of the thread block's sequence

  static constexpr Index per_group(const AttentionShape& shape) { return ceil_div(shape.group(), ROWS); }
  __device__ HeadStack(const AttentionShape& shape, const Pages& pages) : pages(pages) {
    const int group = static_cast<int>(shape.group()), stacks = static_cast<int>(per_group(shape));
    const int before = static_cast<int>(blockIdx.y) % stacks * ROWS;
    kv_head = static_cast<int>(blockIdx.y) / stacks;
    first = kv_head * group + before;
    count = static_cast<int>(least(group - before, ROWS));
  }
  __device__ int query(int row) const { return row / count; }
  __device__ int head(int row) const { return first + row % count; }
  __device__ int shift(int key) const { return static_cast<int>(pages.shift(key)); }
};

// Thread block i owns the chunk's rows from row i to the end of its sequence or of its tile, if row i is the first of them.
// The tiles of a sequence begin at multiples of `size` tokens. Returns the number of rows, or 0.
__device__ inline int rows_of_block(const SequenceIndex& rows, int size) {
  const Index i = blockIdx.x;
  auto continues = [&](Index row) {
    return rows.sequences(0, row - 1) == rows.sequences(0, row) && rows.positions(0, row) % size != 0;
  };
  if (i > 0 && continues(i)) return 0;
  Index end = i + 1;
  while (end < rows.positions.cols && continues(end)) ++end;
  return static_cast<int>(end - i);
}

// blockIdx.z: the segment of keys, or 0 for all of them.
template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kTileThreads)
    flash_cached_kernel(FlashInput in, SequenceIndex rows, AttentionOutput<BFloat16> out) {
  constexpr int ROWS = kCachedRows<DIM>;
  const Index i = blockIdx.x, dim = in.shape.head_dim, segments = gridDim.z;
  const HeadStack<ROWS> heads(in.shape, rows.pages_of(i));
  const int queries = rows_of_block(rows, ROWS / heads.count);
  const int position = rows.positions(0, i), begin = static_cast<int>(blockIdx.z * kSegment);
  if (queries == 0 || position + queries <= begin) return;
  const CachedMemory<DIM> memory(shared_memory<BFloat16>());
  for (int at = threadIdx.x; at < ROWS * DIM; at += kTileThreads) {
    const int row = at / DIM, col = at % DIM;
    const bool used = row < queries * heads.count && col < dim;
    *memory.q.at(row, col) = used ? in.q(i + heads.query(row), heads.head(row) * dim + col) : BFloat16(0);
  }
  in.rows = {position, position + queries};
  const QueryTile<Flash<DIM>, 1, HeadStack<ROWS>> tile(in, position, queries, heads);
  const auto of_queries = [&](auto m, Index rows_of_one) {
    return decltype(m){m.row(i * rows_of_one + blockIdx.z), queries, m.cols, m.stride * rows_of_one};
  };
  if (segments == 1) {
    out = {of_queries(out.attended, 1), of_queries(out.lse, 1), of_queries(out.sums, 1)};
    return attend<CAPPED>(memory, in, tile, heads.kv_head, out);
  }
  auto sums = attend_to<CAPPED>(begin, end_of_segment(in, tile, begin), false, memory, in, tile, heads.kv_head);
  store(stored_sums(of_queries(out.sums, segments), in.shape), sums, in, tile);
  ptx::cp_async_wait<0>();
}

// Adds up the segments of a row as attend() does. A thread for each column.
template <class T>
__global__ void add_segments_kernel(FlashInput in, SequenceIndex rows, AttentionOutput<T> out, Index segments) {
  const Index i = blockIdx.y, col = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (col >= out.attended.cols) return;
  const Index h = col / in.shape.head_dim, first = i * segments, last = first + rows.positions(0, i) / kSegment;
  const StoredSums sums = stored_sums(out.sums, in.shape);
  float maximum = sums.maximum(first, h), sum = sums.sum(first, h), x = sums.output(first, col);
  for (Index s = first + 1; s <= last; ++s) {
    const Rescaling rescaling(maximum, sums.maximum(s, h), in.scale * kLog2E);
    sum = rescaling.add(sum, sums.sum(s, h)), x = rescaling.add(x, sums.output(s, col));
    maximum = rescaling.maximum;
  }
  out.attended(i, col) = T(x * (1 / sum));
  if (col % in.shape.head_dim == 0) out.lse(i, h) = maximum * in.scale + std::log(sum);
}

}  // namespace streambp::cuda
