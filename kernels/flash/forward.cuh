// Flash attention, forward: a thread block owns 32 to 128 queries of one head and loops over their keys, first to
// last, in segments of kSegment keys. Each segment begins its own softmax. Its sums are then added to those of the segments
// before it, which wait in global memory: 128 KB of traffic for 0.27 GFLOP with heads of 128.
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

// What keys add up to for the rows of a warp: the maximum of their scores, and the sums of P and of P V relative to it.
template <int M, int N>
struct Attended {
  PerRow<M> maximum, sum;
  Numbers<M, N> output;

  __device__ Attended() { maximum.fill(-INFINITY), sum.fill(0), output.fill(0); }
};

// Sums over earlier and later keys are relative to their own maxima. The factors that make both relative to the larger one.
struct Rescaling {
  float maximum, earlier, later;

  __device__ Rescaling(float of_earlier, float of_later, float scale) : maximum(fmaxf(of_earlier, of_later)) {
    earlier = ptx::exp2_approx((of_earlier - finite(maximum)) * scale);
    later = ptx::exp2_approx((of_later - finite(maximum)) * scale);
  }
  __device__ float add(float a, float b) const { return fmaf(a, earlier, b * later); }
};

// Sums of a chunk's rows in global memory (allocate_sums in attention.cuh).
struct StoredSums {
  Matrix<float> m;
  Index width, heads;

  __device__ float& output(Index i, Index col) const { return m(i, col); }
  __device__ float& maximum(Index i, Index h) const { return m(i, width + h); }
  __device__ float& sum(Index i, Index h) const { return m(i, width + heads + h); }
};
__device__ inline StoredSums stored_sums(Matrix<float> m, const AttentionShape& shape) {
  return {m, shape.q_width(), shape.heads};
}

// Calls f(element, m, half, i, h, col) for the elements of a tile's output: row i of the chunk, head h, and column col of
// the output.
template <class Size, int M, int N, class Heads, class F>
__device__ void for_each_output(const FlashInput& in, const QueryTile<Size, M, Heads>& tile, Numbers<M, N>& numbers,
                                F&& f) {
  const int first_col = Size::part() * Size::kWidth;
  numbers.for_each([&](float& x, int m, int half, int n) {
    const int col = first_col + n, row = tile.row(m, half), i = row - in.rows_begin(), h = tile.head(m, half);
    if (in.computes(row) && col < in.shape.head_dim) f(x, m, half, i, h, h * in.shape.head_dim + col);
  });
}

// Adds the sums of the keys before these.
template <class Size, int M, int N, class Heads>
__device__ void add_earlier(Attended<M, N>& a, const StoredSums& earlier, const FlashInput& in,
                            const QueryTile<Size, M, Heads>& tile) {
  const float scale = in.scale * kLog2E;
  PerRow<M> of_earlier, of_later;
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row(m, half), i = row - in.rows_begin(), h = tile.head(m, half);
      if (!in.computes(row)) continue;
      const Rescaling rescaling(earlier.maximum(i, h), a.maximum.x[m][half], scale);
      a.sum.x[m][half] = rescaling.add(earlier.sum(i, h), a.sum.x[m][half]);
      a.maximum.x[m][half] = rescaling.maximum;
      of_earlier.x[m][half] = rescaling.earlier, of_later.x[m][half] = rescaling.later;
    }
  }
  for_each_output(in, tile, a.output, [&](float& x, int m, int half, int i, int, Index col) {
    x = fmaf(earlier.output(i, col), of_earlier.x[m][half], x * of_later.x[m][half]);
  });
}

template <class Size, int M, int N, class Heads>
__device__ void store(const StoredSums& to, Attended<M, N>& a, const FlashInput& in,
                      const QueryTile<Size, M, Heads>& tile) {
  for_each_output(in, tile, a.output, [&](float x, int m, int half, int i, int h, Index col) {
    to.output(i, col) = x;
    if (col == h * in.shape.head_dim) to.maximum(i, h) = a.maximum.x[m][half], to.sum(i, h) = a.sum.x[m][half];
  });
}

template <class Size, int M, int N, class Heads>
__device__ void write(const AttentionOutput<BFloat16>& out, Attended<M, N>& a, const FlashInput& in,
                      const QueryTile<Size, M, Heads>& tile) {
  PerRow<M> inverse;
  for (int m = 0; m < M; ++m) {
    for (int half = 0; half < 2; ++half) inverse.x[m][half] = 1 / a.sum.x[m][half];
  }
  for_each_output(in, tile, a.output, [&](float x, int m, int half, int i, int h, Index col) {
    out.attended(i, col) = BFloat16(x * inverse.x[m][half]);
    if (col == h * in.shape.head_dim) out.lse(i, h) = a.maximum.x[m][half] * in.scale + std::log(a.sum.x[m][half]);
  });
}

// A tile of queries, which are on their way to shared memory, attends to keys begin .. end of a head. Leaves the keys after
// them on their way, too. on_its_way: whether the first tile of keys is, after a call for the keys before `begin`.
template <bool CAPPED, int DIM, int QUERIES, int M, class Heads>
__device__ auto attend_to(int begin, int end, bool on_its_way, const FlashMemory<DIM, QUERIES>& memory,
                          const FlashInput& in, const QueryTile<Flash<DIM>, M, Heads>& tile, int kv_head) {
  using Size = Flash<DIM>;
  constexpr int KEYS = Size::kForwardKeys;
  static_assert(QUERIES == Size::kRowWarps * 16 * M && kPage % KEYS == 0 && kSegment % KEYS == 0);
  const auto [q, k, v] = memory;
  const int warp_row = Size::warp_row(M), first_col = Size::part() * Size::kWidth;
  const auto keys = in.head(in.k, kv_head), values = in.head(in.v, kv_head);
  const auto load_rows = [&](auto to, const Matrix<const BFloat16>& from, int begin) {
    const int shift = begin < in.rows_end() ? tile.heads.shift(begin) : 0;  // there is no page after the last key
    load(to, from, begin + shift, in.rows_end() + shift, in.aligned);
  };
  if (!on_its_way) load_rows(k, keys, begin);

  Attended<M, Size::kWidth / 8> a;
  const float scale = in.scale * kLog2E;
  for (; begin < end; begin += KEYS) {
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
    online_softmax(s, a.maximum, a.sum, a.output, scale);
    if constexpr (!Size::wide) await_values();  // late, so that the softmax of a warp overlaps with products of others
    multiply(a.output, LeftOperand<M, KEYS / 16>(s), v, first_col);
  }
  finish_row_sum(a.sum);
  return a;
}

// The first row that begins a document in a tile, after the first row that is computed. Such a row is its own first key.
template <class Tile>
__device__ int second_document(const FlashInput& in, const Tile& tile) {
  int before = tile.begin < in.rows_begin() ? in.rows_begin() : tile.begin, found = tile.last;
  while (found - before > 1) {
    const int middle = before + (found - before) / 2;
    (in.first_key(middle) > tile.first ? found : before) = middle;
  }
  return found;
}

// The end of the segment of keys that begins at `begin`. Keys are cut as in the document of the tile's first computed row, and
// not after the next document begins: documents that begin in the tile have one segment there.
template <class Tile>
__device__ int end_of_segment(const FlashInput& in, const Tile& tile, int begin) {
  const int end = begin + static_cast<int>(kSegment), last = tile.end < in.rows_end() ? tile.end : in.rows_end();
  if (in.shape.window > 0 || end >= last) return last;
  return tile.first == tile.last || end <= second_document(in, tile) ? end : last;
}

// A tile of queries attends to all its keys. What a thread stores, others read after the barriers of the loop.
template <bool CAPPED, int DIM, int QUERIES, int M, class Heads>
__device__ void attend(const FlashMemory<DIM, QUERIES>& memory, const FlashInput& in,
                       const QueryTile<Flash<DIM>, M, Heads>& tile, int kv_head, const AttentionOutput<BFloat16>& out) {
  const int first = tile.first / Flash<DIM>::kForwardKeys * Flash<DIM>::kForwardKeys;
  const int last = tile.end < in.rows_end() ? tile.end : in.rows_end();
  for (int begin = first, end; begin < last; begin = end) {
    end = end_of_segment(in, tile, begin);
    auto a = attend_to<CAPPED>(begin, end, begin > first, memory, in, tile, kv_head);
    const StoredSums sums = stored_sums(out.sums, in.shape);
    if (begin > first) {
      add_earlier(a, sums, in, tile);
      __syncthreads();  // all threads of a row have read its maximum
    }
    if (end < last) {
      store(sums, a, in, tile);
    } else {
      write(out, a, in, tile);
    }
  }
  ptx::cp_async_wait<0>();
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
