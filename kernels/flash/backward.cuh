// Flash attention, backward, in two kernels:
//
//   queries     dQ: a thread block owns a tile of queries and loops over their keys, first to last, as in forward
//   keys        dK, dV: a thread block owns 64 keys (32 of wide heads) of one key/value head and loops over their queries, last
//               to first, and for each tile of queries over the heads of the group
//
// P is recomputed from the row's lse. Sums stay in registers. S and dP are computed twice, once in each kernel. In
// return, one thread block owns every sum and adds in a fixed order: without atomics, and with the same bits in every
// run and for any chunk.
#pragma once

#include "kernels/flash/tiles.cuh"

namespace streambp::cuda {

// --- dQ, over the keys of a tile of queries ---

template <int DIM>
struct FlashQueriesMemory {
  SharedTile<Flash<DIM>::kQueries, DIM> q, dout;
  SharedTile<Flash<DIM>::kBackwardKeys, DIM> k_even, k_odd, v;

  static constexpr bool kAhead = Flash<DIM>::kAhead;
  static constexpr std::size_t kBytes =
      sizeof(BFloat16) * (2 * decltype(q)::kSize + (kAhead ? 3 : 2) * decltype(v)::kSize);
  __device__ explicit FlashQueriesMemory(BFloat16* memory)
      : q{memory},
        dout{q.data + q.kSize},
        k_even{dout.data + dout.kSize},
        k_odd{k_even.data + (kAhead ? k_even.kSize : 0)},
        v{k_odd.data + k_odd.kSize} {}
};

template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kTileThreads, Flash<DIM>::kBlocks)
    flash_queries_kernel(FlashInput in, AttentionUpstream<BFloat16> upstream, Matrix<BFloat16> dq, int last_tile) {
  using Size = Flash<DIM>;
  constexpr int M = Size::kM, KEYS = Size::kBackwardKeys;
  const int h = blockIdx.y;
  const int number = last_tile - static_cast<int>(blockIdx.x);  // longest first
  const QueryTile<Size> tile(in, number * Size::kQueries, Size::kQueries, {h});
  const int warp_row = Size::warp_row(M), first_col = Size::part() * Size::kWidth;
  const auto keys = in.head(in.k, in.kv_head(h)), values = in.head(in.v, in.kv_head(h));

  const auto [q, dout, k_even, k_odd, v] = FlashQueriesMemory<DIM>(shared_memory<BFloat16>());
  const int first = tile.begin - in.rows_begin();
  const int first_key = tile.first / KEYS * KEYS, end = tile.end < in.rows_end() ? tile.end : in.rows_end();
  load(q, in.head(in.q, h), first, static_cast<int>(in.rows.size()), in.aligned);
  load(dout, in.head(upstream.dout, h), first, static_cast<int>(in.rows.size()), in.aligned);
  load(k_even, keys, first_key, in.rows_end(), in.aligned);

  PerRow<M> lse, delta;
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row(m, half), i = row - in.rows_begin();
      lse.x[m][half] = in.computes(row) ? upstream.lse(i, h) * kLog2E : 0;
      delta.x[m][half] = in.computes(row) ? upstream.delta(i, h) : 0;
    }
  }
  Numbers<M, Size::kWidth / 8> sum;
  sum.fill(0);
  const float scale = in.scale * kLog2E;
  bool even = true;
  for (int begin = first_key; begin < end; begin += KEYS, even = !even) {
    const auto k = even ? k_even : k_odd, next_k = even ? k_odd : k_even;
    ptx::cp_async_wait<0>();
    __syncthreads();  // k has arrived; all warps are done with the old k and v
    load(v, values, begin, in.rows_end(), in.aligned);
    if constexpr (Size::kAhead) load(next_k, keys, begin + KEYS, in.rows_end(), in.aligned);
    Numbers<M, KEYS / 8> p, dp;
    p.fill(0), dp.fill(0);
    multiply_transposed(p, q, warp_row, k);
    [[maybe_unused]] Numbers<M, KEYS / 8> slopes;
    if constexpr (CAPPED) cap_scores(p, in.cap), slopes = cap_slopes(p, in.cap);
    tile.hide_invisible(in, p, begin);
    p.for_each([&](float& x, int m, int half, int) { x = ptx::exp2_approx(fmaf(x, scale, -lse.x[m][half])); });
    if constexpr (CAPPED) multiply_by(p, slopes);
    ptx::cp_async_wait<Size::kAhead ? 1 : 0>();
    __syncthreads();  // v has arrived
    multiply_transposed(dp, dout, warp_row, v);
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < KEYS / 8; ++n) {
        for (int i = 0; i < 4; ++i) p.x[m][n][i] *= dp.x[m][n][i] - delta.x[m][i / 2];
      }
    }
    multiply(sum, LeftOperand<M, KEYS / 16>(p), k, first_col);
    if constexpr (!Size::kAhead) {
      __syncthreads();  // all warps are done with k
      load(k, keys, begin + KEYS, in.rows_end(), in.aligned);
    }
  }
  ptx::cp_async_wait<0>();
  sum.for_each([&](float& x, int m, int half, int n) {
    const int row = tile.row(m, half), col = first_col + n;
    if (!in.computes(row) || col >= in.shape.head_dim) return;
    dq(row - in.rows_begin(), h * in.shape.head_dim + col) = BFloat16(x * in.scale);
  });
}

// --- dK and dV, over the queries of a tile of keys ---

// The last computed row that attends to a key before `end`. Binary search works because first keys never decrease.
__device__ inline int last_query(const FlashInput& in, int end) {
  int sees = in.rows_begin() - 1, beyond = in.rows_end();
  while (beyond - sees > 1) {
    const int middle = sees + (beyond - sees) / 2;
    (in.first_key(middle) < end ? sees : beyond) = middle;
  }
  return sees;
}

template <int DIM>
struct FlashKeysMemory {
  static constexpr int kRows = Flash<DIM>::kQueriesAtOnce;
  SharedTile<Flash<DIM>::kKeys, DIM> k, v;
  SharedTile<kRows, DIM> q_even, q_odd, dout;
  float *lse, *delta;  // of each query
  int* first_keys;

  static constexpr bool kAhead = Flash<DIM>::kAhead;
  static constexpr std::size_t kBytes =
      sizeof(BFloat16) * (2 * decltype(k)::kSize + (kAhead ? 3 : 2) * decltype(dout)::kSize) +
      kRows * 3 * sizeof(float);
  __device__ explicit FlashKeysMemory(BFloat16* memory)
      : k{memory},
        v{k.data + k.kSize},
        q_even{v.data + v.kSize},
        q_odd{q_even.data + (kAhead ? q_even.kSize : 0)},
        dout{q_odd.data + q_odd.kSize},
        lse(reinterpret_cast<float*>(dout.data + dout.kSize)),
        delta(lse + kRows),
        first_keys(reinterpret_cast<int*>(delta + kRows)) {}
};

// One step handles a tile of queries of one head of the group, starting at row `query` of the stream.
template <int QUERIES>
struct FlashStep {
  int query, head;

  // Tiles from last to first, and for each tile the heads in order.
  __device__ FlashStep next(int kv_head, int group) const {
    return head + 1 < (kv_head + 1) * group ? FlashStep{query, head + 1} : FlashStep{query - QUERIES, kv_head * group};
  }
};

template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kTileThreads, Flash<DIM>::kBlocks)
    flash_keys_kernel(FlashInput in, AttentionUpstream<BFloat16> upstream, Matrix<float> dk, Matrix<float> dv) {
  using Size = Flash<DIM>;
  constexpr int QUERIES = Size::kQueriesAtOnce, COLS = Size::kColumns, N = QUERIES / 8;
  const int dim = static_cast<int>(in.shape.head_dim), group = in.group();
  const int kv_head = blockIdx.y / Size::kPieces;
  const int first_col = (blockIdx.y % Size::kPieces * Size::kParts + Size::part()) * COLS;
  const int first_key = static_cast<int>(blockIdx.x) * Size::kKeys;
  const int last_row = last_query(in, first_key + Size::kKeys);
  const int first_row = first_key < in.rows_begin() ? in.rows_begin() : first_key;
  if (last_row < first_row) return;
  const int first_tile = first_row / QUERIES * QUERIES;
  const int warp_row = Size::warp_row();

  using Step = FlashStep<QUERIES>;
  const FlashKeysMemory<DIM> memory(shared_memory<BFloat16>());
  const auto &k = memory.k, &v = memory.v;
  const auto& dout = memory.dout;
  auto load_queries = [&](SharedTile<QUERIES, DIM> to, Matrix<const BFloat16> m, Step s) {
    const int end = s.query >= first_tile ? in.rows_end() - in.rows_begin() : 0;
    load(to, in.head(m, s.head), s.query - in.rows_begin(), end, in.aligned);
  };
  load(k, in.head(in.k, kv_head), first_key, in.rows_end(), in.aligned);
  load(v, in.head(in.v, kv_head), first_key, in.rows_end(), in.aligned);
  Step step{last_row / QUERIES * QUERIES, kv_head * group};
  load_queries(memory.q_even, in.q, step);

  Numbers<1, COLS / 8> dk_sum, dv_sum;
  auto for_each_sum = [&](Numbers<1, COLS / 8>& sum, Matrix<float> global, auto&& f) {
    sum.for_each([&](float& x, int m, int half, int col) {
      const int key = first_key + warp_row + row_of(m, half);
      if (key < in.rows_end() && first_col + col < dim) f(x, global(key, kv_head * dim + first_col + col));
    });
  };
  dk_sum.fill(0), dv_sum.fill(0);
  auto read = [](float& x, float& stored) { x = stored; };
  for_each_sum(dk_sum, dk, read), for_each_sum(dv_sum, dv, read);

  const float scale = in.scale * kLog2E;
  for (bool even = true; step.query >= first_tile; step = step.next(kv_head, group), even = !even) {
    const auto q = even ? memory.q_even : memory.q_odd, next_q = even ? memory.q_odd : memory.q_even;
    ptx::cp_async_wait<0>();
    __syncthreads();  // q has arrived; all warps are done with the old q and dout
    load_queries(dout, upstream.dout, step);
    if constexpr (Size::kAhead) load_queries(next_q, in.q, step.next(kv_head, group));
    float row_lse = 0, row_delta = 0;
    int row_first_key = 0;
    const int query = step.query + static_cast<int>(threadIdx.x), local = query - in.rows_begin();
    if (threadIdx.x < QUERIES) {
      row_first_key = in.first_key(query);
      if (in.computes(query)) {
        row_lse = upstream.lse(local, step.head) * kLog2E;
        row_delta = upstream.delta(local, step.head);
      }
    }
    Numbers<1, N> p, dp;  // transposed: one row per key
    p.fill(0), dp.fill(0);
    multiply_transposed(p, k, warp_row, q);
    if (threadIdx.x < QUERIES) {  // loaded before the product, to hide the latency
      memory.lse[threadIdx.x] = row_lse;
      memory.delta[threadIdx.x] = row_delta;
      memory.first_keys[threadIdx.x] = row_first_key;
    }
    ptx::cp_async_wait<Size::kAhead ? 1 : 0>();
    __syncthreads();  // dout, lse, delta and first_keys have arrived
    [[maybe_unused]] Numbers<1, N> slopes;
    if constexpr (CAPPED) cap_scores(p, in.cap), slopes = cap_slopes(p, in.cap);
    const bool all_visible = in.rows_begin() <= step.query && step.query + QUERIES <= in.rows_end() &&
                             memory.first_keys[QUERIES - 1] <= first_key && first_key + Size::kKeys <= step.query + 1;
    if (!all_visible) {
      p.for_each([&](float& x, int m, int half, int col) {
        const int key = first_key + warp_row + row_of(m, half);
        x = memory.first_keys[col] <= key && key <= step.query + col ? x : -INFINITY;
      });
    }
    p.for_each([&](float& x, int, int, int col) { x = ptx::exp2_approx(fmaf(x, scale, -memory.lse[col])); });
    multiply(dv_sum, LeftOperand<1, QUERIES / 16>(p), dout, first_col);
    if constexpr (CAPPED) multiply_by(p, slopes);
    multiply_transposed(dp, v, warp_row, dout);
    for (int n = 0; n < N; ++n) {
      for (int j = 0; j < 4; ++j) {
        const int col = n * 8 + threadIdx.x % 4 * 2 + j % 2;
        p.x[0][n][j] *= (dp.x[0][n][j] - memory.delta[col]) * in.scale;
      }
    }
    multiply(dk_sum, LeftOperand<1, QUERIES / 16>(p), q, first_col);
    if constexpr (!Size::kAhead) {
      __syncthreads();  // all warps are done with q
      load_queries(q, in.q, step.next(kv_head, group));
    }
  }
  ptx::cp_async_wait<0>();
  auto write = [](float& x, float& stored) { stored = x; };
  for_each_sum(dk_sum, dk, write), for_each_sum(dv_sum, dv, write);
}

}  // namespace streambp::cuda
