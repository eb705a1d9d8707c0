// Flash attention in generation: a thread block owns the next queries of one sequence and all heads of a group, so it reads the
// group's K and V once. Row r of its tile is head r % heads of query r / heads. The loop over keys is that of training, and
// a row's bits depend on no other row of its tile: they are those of training for a stream that begins with the sequence.
// So keys are not split over thread blocks, and few long sequences do not fill a GPU.
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

template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kTileThreads)
    flash_cached_kernel(FlashInput in, SequenceIndex rows, AttentionOutput<BFloat16> out) {
  constexpr int ROWS = kCachedRows<DIM>;
  const Index i = blockIdx.x, dim = in.shape.head_dim;
  const HeadStack<ROWS> heads(in.shape, rows.pages_of(i));
  const int queries = rows_of_block(rows, ROWS / heads.count);
  if (queries == 0) return;
  const CachedMemory<DIM> memory(shared_memory<BFloat16>());
  for (int at = threadIdx.x; at < ROWS * DIM; at += kTileThreads) {
    const int row = at / DIM, col = at % DIM;
    const bool used = row < queries * heads.count && col < dim;
    *memory.q.at(row, col) = used ? in.q(i + heads.query(row), heads.head(row) * dim + col) : BFloat16(0);
  }
  const int position = rows.positions(0, i);
  in.rows = {position, position + queries};
  out = {{out.attended.row(i), queries, out.attended.cols, out.attended.stride},
         {out.lse.row(i), queries, out.lse.cols, out.lse.stride}};
  attend<CAPPED>(memory, in, QueryTile<Flash<DIM>, 1, HeadStack<ROWS>>(in, position, queries, heads), heads.kv_head,
                 out);
}

}  // namespace streambp::cuda
