// Flash attention, forward: a thread block owns 32 to 128 queries of one head and loops over their keys, first to
// last.
#pragma once

#include "kernels/flash/tiles.cuh"

namespace streambp::cuda {

// The maximum of a row without keys so far is -infinity; -infinity - -infinity would be NaN.
__device__ inline float finite(float maximum) { return maximum == -INFINITY ? 0 : maximum; }

// One step of the online softmax: P = exp2((S - maximum) scale) in s. Updates maximum and sum, and rescales the output
// so far.
template <int M, int N, int D>
__device__ void online_softmax(Numbers<M, N>& s, PerRow<M>& maximum, PerRow<M>& sum, Numbers<M, D>& o, float scale) {
  PerRow<M> shrink = maximum, offset;
  bool raised = false;  // a maximum; seldom after the first tiles, and else there is nothing to rescale
  row_max(maximum, s);
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      offset.x[m][half] = -finite(maximum.x[m][half]) * scale;
      shrink.x[m][half] = ptx::exp2_approx((shrink.x[m][half] - finite(maximum.x[m][half])) * scale);
      raised |= shrink.x[m][half] != 1;
      sum.x[m][half] *= shrink.x[m][half];
    }
  }
  s.for_each([&](float& x, int m, int half, int) { x = ptx::exp2_approx(fmaf(x, scale, offset.x[m][half])); });
  add_row_sum(sum, s);
  if (__any_sync(0xffffffffu, raised)) o.for_each([&](float& x, int m, int half, int) { x *= shrink.x[m][half]; });
}

// A thread block's shared memory.
template <int DIM, int QUERIES>
struct FlashMemory {
  SharedTile<QUERIES, DIM> q;
  SharedTile<Flash<DIM>::kForwardKeys, DIM> k, v;

  static constexpr std::size_t kBytes = sizeof(BFloat16) * (decltype(q)::kSize + 2 * decltype(k)::kSize);
  __device__ explicit FlashMemory(BFloat16* memory) : q{memory}, k{q.data + q.kSize}, v{k.data + k.kSize} {}
};

// A tile of queries, which are on their way to shared memory, attends to the keys of a head.
template <bool CAPPED, int DIM, int QUERIES, int M, class Heads>
__device__ void attend(const FlashMemory<DIM, QUERIES>& memory, const FlashInput& in,
                       const QueryTile<Flash<DIM>, M, Heads>& tile, int kv_head, const AttentionOutput<BFloat16>& out) {
  using Size = Flash<DIM>;
  constexpr int KEYS = Size::kForwardKeys;
  static_assert(QUERIES == Size::kRowWarps * 16 * M && kPage % KEYS == 0);
  const auto [q, k, v] = memory;
  const int warp_row = Size::warp_row(M), first_col = Size::part() * Size::kWidth;
  const auto keys = in.head(in.k, kv_head), values = in.head(in.v, kv_head);
  const int first_key = tile.first / KEYS * KEYS, end = tile.end < in.rows_end() ? tile.end : in.rows_end();
  const auto load_rows = [&](auto to, const Matrix<const BFloat16>& from, int begin) {
    const int shift = begin < in.rows_end() ? tile.heads.shift(begin) : 0;  // there is no page after the last key
    load(to, from, begin + shift, in.rows_end() + shift, in.aligned);
  };
  load_rows(k, keys, first_key);

  Numbers<M, Size::kWidth / 8> o;
  PerRow<M> maximum, sum;
  o.fill(0), maximum.fill(-INFINITY), sum.fill(0);
  const float scale = in.scale * kLog2E;
  for (int begin = first_key; begin < end; begin += KEYS) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // k has arrived; all warps are done with the old v
    load_rows(v, values, begin);
    Numbers<M, KEYS / 8> s;
    s.fill(0);
    multiply_transposed(s, q, warp_row, k);
    const auto await_values = [&] {
      ptx::cp_async_wait<0>();
      __syncthreads();  // v has arrived; all warps are done with the old k
      load_rows(k, keys, begin + KEYS);
    };
    if constexpr (Size::wide) await_values();
    if constexpr (CAPPED) cap_scores(s, in.cap);
    tile.hide_invisible(in, s, begin);
    online_softmax(s, maximum, sum, o, scale);
    if constexpr (!Size::wide) await_values();  // late, so that the softmax of a warp overlaps with products of others
    multiply(o, LeftOperand<M, KEYS / 16>(s), v, first_col);
  }
  ptx::cp_async_wait<0>();

  finish_row_sum(sum);
  PerRow<M> inverse;
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) inverse.x[m][half] = 1 / sum.x[m][half];
  }
  o.for_each([&](float& x, int m, int half, int n) {
    const int col = first_col + n;
    const int row = tile.row(m, half), i = row - in.rows_begin(), h = tile.head(m, half);
    if (!in.computes(row)) return;
    if (col < in.shape.head_dim) out.attended(i, h * in.shape.head_dim + col) = BFloat16(x * inverse.x[m][half]);
    if (col == 0) out.lse(i, h) = maximum.x[m][half] * in.scale + std::log(sum.x[m][half]);
  });
}

template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kTileThreads, Flash<DIM>::kBlocks)
    flash_kernel(FlashInput in, AttentionOutput<BFloat16> out, int last_tile) {
  using Size = Flash<DIM>;
  const int h = blockIdx.y, number = last_tile - static_cast<int>(blockIdx.x);  // longest first
  const QueryTile<Size> tile(in, number * Size::kQueries, Size::kQueries, {h});
  const FlashMemory<DIM, Size::kQueries> memory(shared_memory<BFloat16>());
  load(memory.q, in.head(in.q, h), tile.begin - in.rows_begin(), static_cast<int>(in.rows.size()), in.aligned);
  attend<CAPPED>(memory, in, tile, in.kv_head(h), out);
}

}  // namespace streambp::cuda
