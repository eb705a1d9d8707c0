// Shared by the flash attention kernels: tile sizes, inputs and the mask.
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/base/math.cuh"
#include "kernels/base/tiles.cuh"

namespace streambp::cuda {

constexpr float kLog2E = 1.44269504f;

// Tile sizes for heads of up to DIM columns. They fit 255 registers per thread and 99 KB of shared memory.
template <int DIM>
struct Flash {
  static constexpr bool wide = DIM > 128;
  // Wider heads than 256: two warps share their rows. Each computes all scores of the rows, and sums half of the columns.
  static constexpr int kParts = DIM > 256 ? 2 : 1, kRowWarps = kTileWarps / kParts, kWidth = DIM / kParts;
  static constexpr bool kAhead = kParts == 1;        // whether backward has memory to load an operand a step ahead
  static constexpr int kBlocks = DIM <= 64 ? 3 : 2;  // at once on a multiprocessor; decides the number of registers
  // forward, and backward for dQ: a tile of queries goes over keys
  static constexpr int kM = wide ? 1 : 2;               // 16 M queries per warp
  static constexpr int kQueries = kRowWarps * 16 * kM;  // queries of a tile
  static constexpr int kForwardKeys = wide ? 32 : 64;   // keys per step, forward
  static constexpr int kBackwardKeys = wide ? 16 : 32;  // keys per step, backward
  // backward for dK, dV: a tile of keys goes over queries
  static constexpr int kKeys = kRowWarps * 16;               // keys of a tile
  static constexpr int kQueriesAtOnce = wide ? 16 : 64;      // queries per step
  static constexpr int kColumns = wide ? 128 : DIM;          // columns of dK and dV that a warp sums
  static constexpr int kPieces = DIM / (kColumns * kParts);  // of these columns, a thread block for each

  // Of a warp. Without parts, the compiler sees that there are none.
  __device__ static int part() { return kParts == 1 ? 0 : static_cast<int>(threadIdx.x) / kWarp / kRowWarps; }
  __device__ static int warp_row(int m = 1) {
    return (static_cast<int>(threadIdx.x) / kWarp - part() * kRowWarps) * 16 * m;
  }
};

// The inputs of all kernels. q holds the rows `rows` of the stream; k and v hold all rows.
struct FlashInput {
  Matrix<const BFloat16> q, k, v;
  Matrix<const std::int32_t> key_begin;
  Rows rows;
  AttentionShape shape;
  float scale;
  float cap;     // of scores before they are scaled; 0: none
  bool aligned;  // rows start at multiples of 16 bytes

  __device__ Matrix<const BFloat16> head(Matrix<const BFloat16> m, Index h) const {
    return {m.data + h * shape.head_dim, m.rows, shape.head_dim, m.stride};
  }
  __device__ int group() const { return static_cast<int>(shape.group()); }
  __device__ int kv_head(int h) const { return h / group(); }
  __device__ bool computes(int row) const { return rows.begin <= row && row < rows.end; }
  // The first key that a row of the stream attends to. A row that is not computed attends to no key.
  __device__ int first_key(int row) const {
    return computes(row) ? static_cast<int>(keys_of(row, key_begin, shape.window).begin) : row + 1;
  }
  __device__ int rows_begin() const { return static_cast<int>(rows.begin); }
  __device__ int rows_end() const { return static_cast<int>(rows.end); }
};

// Scores become cap tanh(score / cap), with tanh(z) = 1 - 2 / (1 + exp(2z)).
template <int M, int N>
__device__ void cap_scores(Numbers<M, N>& s, float cap) {
  const float rate = 2 * kLog2E / cap;
  s.for_each([&](float& x, int, int, int) { x = cap - __fdividef(2 * cap, 1 + ptx::exp2_approx(x * rate)); });
}
// The slopes of capped scores.
template <int M, int N>
__device__ Numbers<M, N> cap_slopes(Numbers<M, N> s, float cap) {
  const float inverse = 1 / cap;
  s.for_each([&](float& x, int, int, int) { x = 1 - x * inverse * (x * inverse); });
  return s;
}

template <int M, int N>
__device__ void multiply_by(Numbers<M, N>& numbers, const Numbers<M, N>& factors) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) (&numbers.x[0][0][0])[i] *= (&factors.x[0][0][0])[i];
}

// The query and the head of a row of a tile, and the place of a key in memory. In training, all rows of a tile have the
// same head, and keys follow each other.
struct OneHead {
  int h;
  __device__ int shift(int) const { return 0; }
  __device__ int query(int row) const { return row; }
  __device__ int head(int) const { return h; }
};

// A thread block's tile of queries, rows begin .. end of the stream, and the keys they attend to.
template <class Size, int M = Size::kM, class Heads = OneHead>
struct QueryTile {
  int begin, end;
  Heads heads;
  int first, last;  // the smallest and the largest first key of the rows

  __device__ QueryTile(const FlashInput& in, int begin, int size, Heads heads)
      : begin(begin), end(begin + size), heads(heads) {
    first = in.first_key(begin < in.rows_begin() ? in.rows_begin() : begin);
    last = in.first_key((end < in.rows_end() ? end : in.rows_end()) - 1);
  }
  __device__ int row_of_tile(int m, int half) const { return Size::warp_row(M) + row_of(m, half); }
  __device__ int row(int m, int half) const { return begin + heads.query(row_of_tile(m, half)); }
  __device__ int head(int m, int half) const { return heads.head(row_of_tile(m, half)); }
  // Whether every row of the tile attends to all keys in key .. key + count.
  __device__ bool all_visible(const FlashInput& in, int key, int count) const {
    const bool whole = in.rows_begin() <= begin && end <= in.rows_end();
    return whole && last <= key && key + count <= begin + 1;
  }
  // Sets the scores of masked keys to -infinity. The first column of the tile is key `key`.
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

}  // namespace streambp::cuda
