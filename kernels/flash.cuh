// Attention in bfloat16 on tensor cores, tile by tile; see attention.cuh for the formulas.
//
//   forward             a block has 64 or 128 queries of one head and goes over the keys that they see, first to last
//   backward, queries   the same walk again; P is recomputed from the row's lse, and dQ adds up in registers
//   backward, keys      a block has 64 keys of one key/value head and goes over the queries that see them, last to
//                       first, and for each tile of queries over the heads of the group; dK, dV add up in registers
//
// The scores of a tile never leave the registers: as the result of one product they have the layout that the next one
// wants on its left. Going over the keys in one kernel and over the queries in another computes S and dP twice, and in
// return every sum has one owner and one order: no atomics, the same bits each time and for any chunk.
//
// Copies from global memory run while tensor cores work: one tile ahead for the operand that is needed first.
#pragma once

#include "kernels/attention_shape.cuh"
#include "kernels/base/tiles.cuh"

namespace streambp::cuda {

constexpr float kLog2E = 1.44269504f;

// Sizes of tiles for heads of up to DIM numbers: what fits 255 registers a thread and 99 KB of shared memory a block.
template <int DIM>
struct Flash {
  static constexpr bool wide = DIM > 128;
  static constexpr int kM = wide ? 1 : 2;                // a warp has 16 M queries
  static constexpr int kQueries = kTileWarps * 16 * kM;  // a block
  static constexpr int kForwardKeys = wide ? 32 : 64;    // keys at a time, forward
  static constexpr int kBackwardKeys = wide ? 16 : 32;   // and backward
  static constexpr int kKeys = kTileWarps * 16;          // a block of the kernel that goes over queries,
  static constexpr int kQueriesAtOnce = wide ? 16 : 64;  // queries at a time in it,
  static constexpr int kColumns = wide ? DIM / 2 : DIM;  // and columns of dK and dV
};

// What the kernels read. Matrices of queries have the rows `rows` of the stream, those of keys all of them.
struct FlashInput {
  Matrix<const BFloat16> q, k, v;
  Matrix<const std::int32_t> key_begin;
  Rows rows;
  AttentionShape shape;
  float scale;
  bool aligned;

  __device__ Matrix<const BFloat16> head(Matrix<const BFloat16> m, Index h) const {
    return {m.data + h * shape.head_dim, m.rows, shape.head_dim, m.stride};
  }
  __device__ int kv_head(int h) const { return h / static_cast<int>(shape.heads / shape.kv_heads); }
  __device__ bool computes(int row) const { return rows.begin <= row && row < rows.end; }
  // The first key of a row of the stream; of rows that are not computed, none.
  __device__ int first_key(int row) const {
    return computes(row) ? static_cast<int>(keys_of(row, key_begin, shape.window).begin) : row + 1;
  }
  __device__ int rows_begin() const { return static_cast<int>(rows.begin); }
  __device__ int rows_end() const { return static_cast<int>(rows.end); }
};

// A block's tile of queries, from row `begin` of the stream, and the keys that they see.
template <int M>
struct QueryTile {
  int begin, end;
  int first, last;  // the first key that any of them sees, and the first key that all of them see

  __device__ QueryTile(const FlashInput& in, int tile, int size) : begin(tile * size), end(begin + size) {
    first = in.first_key(begin < in.rows_begin() ? in.rows_begin() : begin);
    last = in.first_key((end < in.rows_end() ? end : in.rows_end()) - 1);
  }
  __device__ int row(int m, int half) const {
    return begin + static_cast<int>(threadIdx.x) / kWarp * 16 * M + row_of(m, half);
  }
  // Does every row of the tile see all of these keys?
  __device__ bool all_visible(const FlashInput& in, int key, int count) const {
    const bool whole = in.rows_begin() <= begin && end <= in.rows_end();
    return whole && last <= key && key + count <= begin + 1;
  }
  // Scores of keys from `key` on that a row does not see become -infinity.
  template <int N>
  __device__ void hide_invisible(const FlashInput& in, Numbers<M, N>& scores, int key) const {
    if (all_visible(in, key, 8 * N)) return;
    int first_key[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) first_key[m][half] = in.first_key(row(m, half)) - key;
    }
    scores.for_each([&](float& x, int m, int half, int col) {
      const bool visible = first_key[m][half] <= col && col <= row(m, half) - key;
      x = visible ? x : -INFINITY;
    });
  }
};

// --- Forward ---

// A row that has seen no key yet has a maximum of -infinity, which is not to meet another one.
__device__ inline float finite(float maximum) { return maximum == -INFINITY ? 0 : maximum; }

template <int DIM>
__global__ void __launch_bounds__(kTileThreads)
    flash_kernel(FlashInput in, Matrix<BFloat16> out, Matrix<float> lse, int last_tile) {
  using Size = Flash<DIM>;
  constexpr int M = Size::kM, KEYS = Size::kForwardKeys;
  const int h = blockIdx.y;
  const QueryTile<M> tile(in, last_tile - static_cast<int>(blockIdx.x), Size::kQueries);  // long ones first
  const int warp_row = threadIdx.x / kWarp * 16 * M;
  const auto keys = in.head(in.k, in.kv_head(h)), values = in.head(in.v, in.kv_head(h));

  const SharedTile<Size::kQueries, DIM> q{shared_memory<BFloat16>()};
  const SharedTile<KEYS, DIM> k{q.data + q.kSize}, v{k.data + k.kSize};
  const int first_key = tile.first / KEYS * KEYS, end = tile.end < in.rows_end() ? tile.end : in.rows_end();
  load(q, in.head(in.q, h), tile.begin - in.rows_begin(), static_cast<int>(in.rows.size()), in.aligned);
  load(k, keys, first_key, in.rows_end(), in.aligned);

  Numbers<M, DIM / 8> o;
  PerRow<M> maximum, sum;
  o.fill(0), maximum.fill(-INFINITY), sum.fill(0);
  const float scale = in.scale * kLog2E;
  for (int begin = first_key; begin < end; begin += KEYS) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // k is there, and nobody reads the old v any more
    load(v, values, begin, in.rows_end(), in.aligned);
    Numbers<M, KEYS / 8> s;
    s.fill(0);
    multiply_transposed(s, q, warp_row, k);
    ptx::cp_async_wait<0>();
    __syncthreads();  // v is there, and nobody reads the old k any more
    load(k, keys, begin + KEYS, in.rows_end(), in.aligned);

    tile.hide_invisible(in, s, begin);
    PerRow<M> shrink = maximum;
    row_max(maximum, s);
    for (int m = 0; m < M; ++m) {
      for (int half = 0; half < 2; ++half) {
        shrink.x[m][half] = ptx::exp2_approx((shrink.x[m][half] - finite(maximum.x[m][half])) * scale);
        sum.x[m][half] *= shrink.x[m][half];
      }
    }
    s.for_each([&](float& x, int m, int half, int) { x = ptx::exp2_approx((x - finite(maximum.x[m][half])) * scale); });
    add_row_sum(sum, s);
    o.for_each([&](float& x, int m, int half, int) { x *= shrink.x[m][half]; });
    multiply(o, LeftOperand<M, KEYS / 16>(s), v);
  }
  ptx::cp_async_wait<0>();

  finish_row_sum(sum);
  PerRow<M> inverse;
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) inverse.x[m][half] = 1 / sum.x[m][half];
  }
  o.for_each([&](float& x, int m, int half, int col) {
    const int row = tile.row(m, half), i = row - in.rows_begin();
    if (!in.computes(row)) return;
    if (col < in.shape.head_dim) out(i, h * in.shape.head_dim + col) = BFloat16(x * inverse.x[m][half]);
    if (col == 0) lse(i, h) = maximum.x[m][half] * in.scale + std::log(sum.x[m][half]);
  });
}

// --- Backward, over the keys of a tile of queries: dQ ---

struct FlashGradient {
  Matrix<const BFloat16> dout;
  Matrix<const float> lse, delta;
};

template <int DIM>
__global__ void __launch_bounds__(kTileThreads)
    flash_queries_kernel(FlashInput in, FlashGradient gradient, Matrix<BFloat16> dq, int last_tile) {
  using Size = Flash<DIM>;
  constexpr int M = Size::kM, KEYS = Size::kBackwardKeys;
  const int h = blockIdx.y;
  const QueryTile<M> tile(in, last_tile - static_cast<int>(blockIdx.x), Size::kQueries);  // long ones first
  const int warp_row = threadIdx.x / kWarp * 16 * M;
  const auto keys = in.head(in.k, in.kv_head(h)), values = in.head(in.v, in.kv_head(h));

  const SharedTile<Size::kQueries, DIM> q{shared_memory<BFloat16>()}, dout{q.data + q.kSize};
  const SharedTile<KEYS, DIM> k_even{dout.data + dout.kSize}, k_odd{k_even.data + k_even.kSize},
      v{k_odd.data + k_odd.kSize};
  const int first = tile.begin - in.rows_begin();
  const int first_key = tile.first / KEYS * KEYS, end = tile.end < in.rows_end() ? tile.end : in.rows_end();
  load(q, in.head(in.q, h), first, static_cast<int>(in.rows.size()), in.aligned);
  load(dout, in.head(gradient.dout, h), first, static_cast<int>(in.rows.size()), in.aligned);
  load(k_even, keys, first_key, in.rows_end(), in.aligned);

  PerRow<M> lse, delta;
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row(m, half), i = row - in.rows_begin();
      lse.x[m][half] = in.computes(row) ? gradient.lse(i, h) * kLog2E : 0;
      delta.x[m][half] = in.computes(row) ? gradient.delta(i, h) : 0;
    }
  }
  Numbers<M, DIM / 8> sum;
  sum.fill(0);
  const float scale = in.scale * kLog2E;
  bool even = true;
  for (int begin = first_key; begin < end; begin += KEYS, even = !even) {
    const auto k = even ? k_even : k_odd, next_k = even ? k_odd : k_even;
    ptx::cp_async_wait<0>();
    __syncthreads();  // k is there, and nobody reads the old k and v any more
    load(v, values, begin, in.rows_end(), in.aligned);
    load(next_k, keys, begin + KEYS, in.rows_end(), in.aligned);
    Numbers<M, KEYS / 8> p, dp;
    p.fill(0), dp.fill(0);
    multiply_transposed(p, q, warp_row, k);
    tile.hide_invisible(in, p, begin);
    p.for_each([&](float& x, int m, int half, int) { x = ptx::exp2_approx(x * scale - lse.x[m][half]); });
    ptx::cp_async_wait<1>();
    __syncthreads();  // v is there
    multiply_transposed(dp, dout, warp_row, v);
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < KEYS / 8; ++n) {
        for (int i = 0; i < 4; ++i) p.x[m][n][i] *= (dp.x[m][n][i] - delta.x[m][i / 2]) * in.scale;
      }
    }
    multiply(sum, LeftOperand<M, KEYS / 16>(p), k);
  }
  ptx::cp_async_wait<0>();
  sum.for_each([&](float& x, int m, int half, int col) {
    const int row = tile.row(m, half);
    if (!in.computes(row) || col >= in.shape.head_dim) return;
    dq(row - in.rows_begin(), h * in.shape.head_dim + col) = BFloat16(x);
  });
}

// --- Backward, over the queries of a tile of keys: dK and dV ---

// The last of the rows that are computed whose first key is before `end`, by bisection: first keys only rise.
__device__ inline int last_query(const FlashInput& in, int end) {
  int sees = in.rows_begin() - 1, beyond = in.rows_end();
  while (beyond - sees > 1) {
    const int middle = sees + (beyond - sees) / 2;
    (in.first_key(middle) < end ? sees : beyond) = middle;
  }
  return sees;
}

template <int DIM>
__global__ void __launch_bounds__(kTileThreads)
    flash_keys_kernel(FlashInput in, FlashGradient gradient, Matrix<float> dk, Matrix<float> dv) {
  using Size = Flash<DIM>;
  constexpr int QUERIES = Size::kQueriesAtOnce, COLS = Size::kColumns, N = QUERIES / 8;
  const int dim = static_cast<int>(in.shape.head_dim), group = static_cast<int>(in.shape.heads / in.shape.kv_heads);
  const int kv_head = blockIdx.y / (DIM / COLS);
  const int first_col = blockIdx.y % (DIM / COLS) * COLS;
  const int first_key = static_cast<int>(blockIdx.x) * Size::kKeys;
  const int last_row = last_query(in, first_key + Size::kKeys);
  const int first_row = first_key < in.rows_begin() ? in.rows_begin() : first_key;
  if (last_row < first_row) return;
  const int first_tile = first_row / QUERIES * QUERIES;
  const int warp_row = threadIdx.x / kWarp * 16;

  const SharedTile<Size::kKeys, DIM> k{shared_memory<BFloat16>()}, v{k.data + k.kSize};
  const SharedTile<QUERIES, DIM> q_even{v.data + v.kSize}, q_odd{q_even.data + q_even.kSize},
      dout{q_odd.data + q_odd.kSize};
  auto* lse = reinterpret_cast<float*>(dout.data + dout.kSize);
  float* delta = lse + QUERIES;
  auto* first_keys = reinterpret_cast<int*>(delta + QUERIES);
  // a step takes a tile of queries, from row `query` of the stream, of one head
  struct Step {
    int query, head;
  };
  Step step{last_row / QUERIES * QUERIES, kv_head * group};
  auto after = [&](Step s) {
    return s.head + 1 < (kv_head + 1) * group ? Step{s.query, s.head + 1} : Step{s.query - QUERIES, kv_head * group};
  };
  auto load_queries = [&](SharedTile<QUERIES, DIM> to, Matrix<const BFloat16> m, Step s) {
    const int end = s.query >= first_tile ? in.rows_end() - in.rows_begin() : 0;
    load(to, in.head(m, s.head), s.query - in.rows_begin(), end, in.aligned);
  };
  load(k, in.head(in.k, kv_head), first_key, in.rows_end(), in.aligned);
  load(v, in.head(in.v, kv_head), first_key, in.rows_end(), in.aligned);
  load_queries(q_even, in.q, step);

  Numbers<1, COLS / 8> dk_sum, dv_sum;
  auto for_each_sum = [&](Numbers<1, COLS / 8>& sum, Matrix<float> global, auto&& f) {
    sum.for_each([&](float& x, int m, int half, int col) {
      const int key = first_key + warp_row + row_of(m, half);
      if (key < in.rows_end() && first_col + col < dim) f(x, global(key, kv_head * dim + first_col + col));
    });
  };
  dk_sum.fill(0), dv_sum.fill(0);
  auto take = [](float& x, float& stored) { x = stored; };
  for_each_sum(dk_sum, dk, take), for_each_sum(dv_sum, dv, take);

  const float scale = in.scale * kLog2E;
  for (bool even = true; step.query >= first_tile; step = after(step), even = !even) {
    const auto q = even ? q_even : q_odd, next_q = even ? q_odd : q_even;
    ptx::cp_async_wait<0>();
    __syncthreads();  // q is there, and nobody reads the old q and dout any more
    load_queries(dout, gradient.dout, step);
    load_queries(next_q, in.q, after(step));
    float row_lse = 0, row_delta = 0;
    int row_first_key = 0;
    const int query = step.query + static_cast<int>(threadIdx.x), local = query - in.rows_begin();
    if (threadIdx.x < QUERIES) {
      row_first_key = in.first_key(query);
      if (in.computes(query)) {
        row_lse = gradient.lse(local, step.head) * kLog2E;
        row_delta = gradient.delta(local, step.head);
      }
    }
    Numbers<1, N> p, dp;  // transposed: a row for each key
    p.fill(0), dp.fill(0);
    multiply_transposed(p, k, warp_row, q);
    if (threadIdx.x < QUERIES) {  // read before the product, which hides how long that takes
      lse[threadIdx.x] = row_lse;
      delta[threadIdx.x] = row_delta;
      first_keys[threadIdx.x] = row_first_key;
    }
    ptx::cp_async_wait<1>();
    __syncthreads();  // dout, lse, delta and first_keys are there
    p.for_each([&](float& x, int m, int half, int col) {
      const int key = first_key + warp_row + row_of(m, half);
      const bool visible = first_keys[col] <= key && key <= step.query + col;
      x = visible ? ptx::exp2_approx(x * scale - lse[col]) : 0;
    });
    multiply(dv_sum, LeftOperand<1, QUERIES / 16>(p), dout, first_col);
    multiply_transposed(dp, v, warp_row, dout);
    for (int n = 0; n < N; ++n) {
      for (int j = 0; j < 4; ++j) {
        const int col = n * 8 + threadIdx.x % 4 * 2 + j % 2;
        p.x[0][n][j] *= (dp.x[0][n][j] - delta[col]) * in.scale;
      }
    }
    multiply(dk_sum, LeftOperand<1, QUERIES / 16>(p), q, first_col);
  }
  ptx::cp_async_wait<0>();
  auto put = [](float& x, float& stored) { stored = x; };
  for_each_sum(dk_sum, dk, put), for_each_sum(dv_sum, dv, put);
}

// --- Launches ---

template <class F>
void with_head_dim(Index dim, F&& f) {
  if (dim <= 32) return f(std::integral_constant<int, 32>());
  if (dim <= 64) return f(std::integral_constant<int, 64>());
  if (dim <= 80) return f(std::integral_constant<int, 80>());
  if (dim <= 96) return f(std::integral_constant<int, 96>());
  if (dim <= 128) return f(std::integral_constant<int, 128>());
  if (dim <= 256) return f(std::integral_constant<int, 256>());
  fail("attention: heads of ", dim, " are wider than the 256 that a GPU attends with");
}

template <class... M>
bool rows_aligned(Index head_dim, const M&... m) {
  auto one = [](const auto& m) { return m.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0; };
  return head_dim % 8 == 0 && (one(m) && ...);
}

template <int ROWS, int DIM>
constexpr std::size_t bytes_of = sizeof(BFloat16) * SharedTile<ROWS, DIM>::kSize;

}  // namespace streambp::cuda

namespace streambp::run {

inline void attention(Cuda& dev, Matrix<BFloat16> out, Matrix<float> lse, Input<BFloat16> q, Input<BFloat16> k,
                      Input<BFloat16> v, Matrix<const std::int32_t> key_begin, Rows rows, const AttentionShape& shape) {
  const cuda::FlashInput in{
      q, k, v, key_begin, rows, shape, static_cast<float>(shape.scale()), cuda::rows_aligned(shape.head_dim, q, k, v)};
  cuda::with_head_dim(shape.head_dim, [&](auto dim) {
    using Size = cuda::Flash<dim()>;
    const std::size_t shared = cuda::bytes_of<Size::kQueries, dim()> + 2 * cuda::bytes_of<Size::kForwardKeys, dim()>;
    const Index last = (rows.end - 1) / Size::kQueries, tiles = last - rows.begin / Size::kQueries + 1;
    cuda::launch(dev, cuda::flash_kernel<dim()>, cuda::grid_of(tiles, shape.heads), cuda::kTileThreads, shared, in, out,
                 lse, static_cast<int>(last));
  });
}

inline void attention_backward(Cuda& dev, Matrix<BFloat16> dq, Matrix<float> dk, Matrix<float> dv, Input<BFloat16> dout,
                               Input<BFloat16> q, Input<BFloat16> k, Input<BFloat16> v, Input<float> lse,
                               Input<float> delta, Matrix<const std::int32_t> key_begin, Rows rows,
                               const AttentionShape& shape) {
  const cuda::FlashInput in{q,
                            k,
                            v,
                            key_begin,
                            rows,
                            shape,
                            static_cast<float>(shape.scale()),
                            cuda::rows_aligned(shape.head_dim, q, k, v, dout)};
  const cuda::FlashGradient gradient{dout, lse, delta};
  cuda::with_head_dim(shape.head_dim, [&](auto dim) {
    using Size = cuda::Flash<dim()>;
    const Index last = (rows.end - 1) / Size::kQueries, tiles = last - rows.begin / Size::kQueries + 1;
    cuda::launch(dev, cuda::flash_queries_kernel<dim()>, cuda::grid_of(tiles, shape.heads), cuda::kTileThreads,
                 2 * cuda::bytes_of<Size::kQueries, dim()> + 3 * cuda::bytes_of<Size::kBackwardKeys, dim()>, in,
                 gradient, dq, static_cast<int>(last));
    constexpr Index parts = dim() / Size::kColumns;
    cuda::launch(dev, cuda::flash_keys_kernel<dim()>,
                 cuda::grid_of(ceil_div(rows.end, Size::kKeys), shape.kv_heads * parts), cuda::kTileThreads,
                 2 * cuda::bytes_of<Size::kKeys, dim()> + 3 * cuda::bytes_of<Size::kQueriesAtOnce, dim()> +
                     Size::kQueriesAtOnce * 3 * sizeof(float),
                 in, gradient, dk, dv);
  });
}

}  // namespace streambp::run
