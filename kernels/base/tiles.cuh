// Matrix tiles in shared memory and in registers, and their operations: load, multiply, row_max, row_sum. The attention
// kernels are built from them.
//
//   SharedTile<ROWS, COLS>    bfloat16 in shared memory, for all warps of the thread block
//   Numbers<M, N>             float32, 16 M rows x 8 N columns, in the registers of a warp
//   LeftOperand<M, K>         bfloat16, 16 M rows x 16 K columns, in registers too: the left operand of a product
//   PerRow<M>                 float32, one value for each of the 16 M rows
//
// Tensor cores multiply 16 x 16 by 16 x 8. A fragment is spread over the warp: lane l holds rows l / 4 and l / 4 + 8 of
// every 16, and in them columns 2 (l % 4) and 2 (l % 4) + 1 of every 8. Results and left operands have the same layout,
// so a result becomes an operand without any data movement.
#pragma once

#include "kernels/base/matrix.cuh"
#include "kernels/base/ptx.cuh"

namespace streambp::cuda {

// Warps and threads of a thread block that works on tiles.
constexpr int kTileWarps = 4, kTileThreads = kTileWarps * kWarp;

// Rows are padded by 16 bytes, so that the 8 rows read by ldmatrix are in different banks.
template <int ROWS, int COLS>
struct SharedTile {
  static constexpr int kStride = COLS + 8, kSize = ROWS * kStride;
  static_assert(ROWS % 16 == 0 && COLS % 16 == 0);
  BFloat16* data;

  __device__ BFloat16* at(int row, int col) const { return data + row * kStride + col; }
};

// Starts copying rows first, first + 1, ... of a matrix into the tile, with the whole thread block. Rows outside 0 ..
// end and columns beyond the matrix become zero. `aligned`: the rows of the matrix start at multiples of 16 bytes.
template <int ROWS, int COLS>
__device__ void load(SharedTile<ROWS, COLS> tile, Matrix<const BFloat16> m, int first, int end, bool aligned) {
  constexpr int pieces = COLS / 8;
  const bool whole = 0 <= first && first + ROWS <= end && COLS <= m.cols;
  auto inside = [&](int row, int col) { return 0 <= first + row && first + row < end && col < m.cols; };
  if (!aligned) {
    for (int i = threadIdx.x; i < ROWS * COLS; i += kTileThreads) {
      const int row = i / COLS, col = i % COLS;
      *tile.at(row, col) = inside(row, col) ? m(first + row, col) : BFloat16(0);
    }
  } else if constexpr (kTileThreads % pieces == 0) {  // a thread copies the same columns in all its rows
    constexpr int step = kTileThreads / pieces, steps = (ROWS + step - 1) / step;
    const int begin = threadIdx.x / pieces, col = threadIdx.x % pieces * 8;
    const BFloat16* from = m.row(first + begin) + col;
    auto copy = [&](auto&& is_valid) {
#pragma unroll
      for (int i = 0; i < steps; ++i, from += step * m.stride) {
        const int row = begin + i * step;
        const bool valid = is_valid(row, col);
        if (ROWS % step == 0 || row < ROWS) ptx::cp_async_16(tile.at(row, col), valid ? from : m.data, valid);
      }
    };
    whole ? copy([](int, int) { return true; }) : copy(inside);  // most tiles need no comparisons
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * pieces; i += kTileThreads) {
      const int row = i / pieces, col = i % pieces * 8;
      const bool valid = inside(row, col);
      ptx::cp_async_16(tile.at(row, col), valid ? m.row(first + row) + col : m.data, valid);
    }
  }
  ptx::cp_async_commit();
}

template <int M, int N>
struct Numbers {
  float x[M][N][4];

  __device__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) (&x[0][0][0])[i] = value;
  }

  // Calls f(element, m, half, col). m and half identify the row, as in PerRow's x[m][half]; col is relative to the
  // tile.
  template <class F>
  __device__ void for_each(F&& f) {
    const int col = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int k = 0; k < 4; ++k) f(x[m][n][k], m, k / 2, n * 8 + col + k % 2);
      }
    }
  }
};

template <int M>
struct PerRow {
  float x[M][2];

  __device__ void fill(float value) {
#pragma unroll
    for (int i = 0; i < M * 2; ++i) (&x[0][0])[i] = value;
  }
};

// The row of x[m][half], relative to the first row of the warp.
__device__ inline int row_of(int m, int half) { return m * 16 + half * 8 + static_cast<int>(threadIdx.x) % kWarp / 4; }

// Reduces over the four threads that share a row. All four get the result.
template <class F>
__device__ float over_row(float x, F&& f) {
  x = f(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return f(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// result = max(result, the maximum of each row)
template <int M, int N>
__device__ void row_max(PerRow<M>& result, Numbers<M, N>& numbers) {
  numbers.for_each([&](float x, int m, int half, int) { result.x[m][half] = fmaxf(result.x[m][half], x); });
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (float& x : result.x[m]) x = over_row(x, [](float a, float b) { return fmaxf(a, b); });
  }
}

// Accumulates each thread's share of the row sums. Call finish_row_sum once at the end to add those of a warp.
template <int M, int N>
__device__ void add_row_sum(PerRow<M>& result, Numbers<M, N>& numbers) {
  numbers.for_each([&](float x, int m, int half, int) { result.x[m][half] += x; });
}
template <int M>
__device__ void finish_row_sum(PerRow<M>& result) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (float& x : result.x[m]) x = over_row(x, [](float a, float b) { return a + b; });
  }
}

template <int M, int K>
struct LeftOperand {
  std::uint32_t x[M][K][4];

  // Rounds to bfloat16.
  __device__ explicit LeftOperand(const Numbers<M, 2 * K>& numbers) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const float(&left)[4] = numbers.x[m][2 * k], (&right)[4] = numbers.x[m][2 * k + 1];
        x[m][k][0] = ptx::pack_bf16(left[0], left[1]);
        x[m][k][1] = ptx::pack_bf16(left[2], left[3]);
        x[m][k][2] = ptx::pack_bf16(right[0], right[1]);
        x[m][k][3] = ptx::pack_bf16(right[2], right[3]);
      }
    }
  }
};

// result += a bᵀ, for the rows of a that start at `row` and those of b that start at `col`, which become the columns of the
// result. Either operand may be stored transposed.
template <bool A_TRANSPOSED, bool B_TRANSPOSED, int M, int N, int A_ROWS, int A_COLS, int B_ROWS, int B_COLS>
__device__ void multiply_shared(Numbers<M, N>& result, SharedTile<A_ROWS, A_COLS> a, int row,
                                SharedTile<B_ROWS, B_COLS> b, int col) {
  constexpr int inner = A_TRANSPOSED ? A_ROWS : A_COLS;
  static_assert(inner == (B_TRANSPOSED ? B_ROWS : B_COLS) && N % 2 == 0);
  const int lane = threadIdx.x % kWarp, half = lane / 16 * 8, quarter = lane / 8 % 2 * 8, eighth = lane % 8;
// A wide tile is unrolled in part, which takes fewer registers.
#pragma unroll(inner > 256 ? 8 : inner / 16)
  for (int k = 0; k < inner; k += 16) {
    std::uint32_t left[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int i = row + m * 16 + quarter;
      A_TRANSPOSED ? ptx::ldmatrix_x4_trans(left[m], a.at(k + half + eighth, i))
                   : ptx::ldmatrix_x4(left[m], a.at(i + eighth, k + half));
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      std::uint32_t r[4];
      const int j = col + n * 8 + half;
      B_TRANSPOSED ? ptx::ldmatrix_x4_trans(r, b.at(k + quarter + eighth, j))
                   : ptx::ldmatrix_x4(r, b.at(j + eighth, k + quarter));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        ptx::mma_m16n8k16(result.x[m][n], left[m], {r[0], r[1]});
        ptx::mma_m16n8k16(result.x[m][n + 1], left[m], {r[2], r[3]});
      }
    }
  }
}
template <int M, int N, int A_ROWS, int B_ROWS, int COLS>
__device__ void multiply_transposed(Numbers<M, N>& result, SharedTile<A_ROWS, COLS> a, int row,
                                    SharedTile<B_ROWS, COLS> b) {
  static_assert(B_ROWS == 8 * N);
  multiply_shared<false, false>(result, a, row, b, 0);
}

// result += a b, for the columns of b that start at `col`.
template <int M, int N, int K, int ROWS, int COLS>
__device__ void multiply(Numbers<M, N>& result, const LeftOperand<M, K>& a, SharedTile<ROWS, COLS> b, int col = 0) {
  static_assert(ROWS == 16 * K && N % 2 == 0);
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      std::uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, b.at(k * 16 + lane % 16, col + n * 8 + lane / 16 * 8));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        ptx::mma_m16n8k16(result.x[m][n], a.x[m][k], {r[0], r[1]});
        ptx::mma_m16n8k16(result.x[m][n + 1], a.x[m][k], {r[2], r[3]});
      }
    }
  }
}

}  // namespace streambp::cuda
