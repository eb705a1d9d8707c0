// The threads of a block of a GPU as a team for the gated delta rule (kernels/delta_heads.h).
//
// A product has 64 x 128 results (or narrower) at a time, 4 x 8 in the registers of each thread. Slices of the operands go
// through shared memory. An element adds its products in order, so its bits do not depend on the size.
#pragma once

#include "kernels/base/packs.cuh"
#include "kernels/delta_heads.h"

namespace streambp::cuda {

constexpr int kDeltaThreads = 256, kDeltaWarps = kDeltaThreads / kWarp;

struct DeltaTeam {
  static constexpr int kSide = 16, kSlice = 32;  // threads are a square; values of k in a slice
  static constexpr int kRows = 4 * kSide, kBlock = kDeltaBlock;
  // A row of a tile begins 4 banks after that before it.
  template <int WIDTH>
  static constexpr int kStride = WIDTH + 4;
  static constexpr int kSharedNumbers = kSlice * (kStride<kRows> + kStride<8 * kSide>);
  static_assert(kSharedNumbers >= kBlock * kBlock);

  // f(i) by a thread
  template <class F>
  __device__ void by_thread(Index n, F&& f) const {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kDeltaThreads) f(i);
    __syncthreads();
  }
  // f(i) by all lanes of a warp, which share the work of sum, add and across.
  template <class F>
  __device__ void by_warp(Index n, F&& f) const {
    for (int i = warp(); i < n; i += kDeltaWarps) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ auto sum(Index n, F&& f) const {
    decltype(f(Index{0})) sum = 0;
    for (int j = lane(); j < n; j += kWarp) sum += f(j);
    return warp_sum(sum);
  }
  template <class V, class F>
  __device__ V add(V start, Rows range, F&& f) const {
    return start + sum(range.size(), [&](Index j) { return f(range.begin + j); });
  }
  template <class F>
  __device__ void across(Index n, F&& f) const {
    for (int j = lane(); j < n; j += kWarp) f(j);
  }
  template <class F>
  __device__ void each(Index rows, Index cols, F&& f) const {
    for (int i = warp(); i < rows; i += kDeltaWarps)
      for (int j = lane(); j < cols; j += kWarp) f(i, j);
    __syncthreads();
  }
  // to(i, j) = f(i, j). A thread loads what it needs for several rows before it stores the first, to wait only once.
  template <class M, class F>
  __device__ void assign(Matrix<M> to, F&& f) const {
    constexpr int kMany = 8;
    const int rows = static_cast<int>(to.rows), cols = static_cast<int>(to.cols);
    for (int j = lane(); j < cols; j += kWarp) {
      for (int begin = warp(); begin < rows; begin += kMany * kDeltaWarps) {
        decltype(f(Index{0}, Index{0})) values[kMany];
#pragma unroll
        for (int n = 0; n < kMany; ++n) {
          const int i = begin + n * kDeltaWarps;
          values[n] = f(i < rows ? i : rows - 1, j);
        }
#pragma unroll
        for (int n = 0; n < kMany; ++n)
          if (const int i = begin + n * kDeltaWarps; i < rows) to(i, j) = values[n];
      }
    }
    __syncthreads();
  }

  __device__ void product(Matrix<float> c, Matrix<float> a, cpu::Op op_a, Matrix<float> b, cpu::Op op_b,
                          Update update) const {
    if (c.cols > 4 * kSide) return product<8>(c, a, op_a, b, op_b, update);
    if (c.cols > 2 * kSide) return product<4>(c, a, op_a, b, op_b, update);
    product<2>(c, a, op_a, b, op_b, update);
  }

  // x becomes (I + t)⁻¹ x or (I + tᵀ)⁻¹ x, by a thread for each column. Reversed rows and columns of tᵀ are lower, too.
  [[gnu::noinline]] __device__ void solve(Matrix<float> t, cpu::Op op, Matrix<float> x) const {
    float* tile = shared_memory<float>();  // the columns of t are its rows
    const bool lower = op == cpu::Op::as_is;
    const int n = static_cast<int>(x.rows), last = lower ? 0 : n - 1, step = lower ? 1 : -1;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kBlock * kBlock; i += kDeltaThreads) {
      const int r = i % kBlock, s = i / kBlock, row = lower ? r : n - 1 - s, col = lower ? s : n - 1 - r;
      tile[i] = s < r && r < n ? t(row, col) : 0;
    }
    __syncthreads();
    for (int j = static_cast<int>(threadIdx.x); j < x.cols; j += kDeltaThreads) {
      float y[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) y[i] = i < n ? x(last + step * i, j) : 0;
#pragma unroll
      for (int s = 0; s < kBlock; ++s) {
#pragma unroll
        for (int r = s / 4 * 4; r < kBlock; r += 4) {
          const Floats<4> factor = load<4>(tile + s * kBlock + r);
#pragma unroll
          for (int m = 0; m < 4; ++m)
            if (r + m > s) y[r + m] = multiply_add(-factor.x[m], y[s], y[r + m]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        if (i < n) x(last + step * i, j) = y[i];
    }
    __syncthreads();
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  // tile(k, x) = m(x0 + x, k0 + k), or with rows and columns exchanged; zero outside of m.
  template <int WIDTH>
  __device__ static void stage(float* tile, const Matrix<float>& m, bool rows_are_x, int x0, int k0) {
    const int stride = static_cast<int>(m.stride), xs = static_cast<int>(rows_are_x ? m.rows : m.cols) - x0,
              ks = static_cast<int>(rows_are_x ? m.cols : m.rows) - k0;
    constexpr int kCount = WIDTH * kSlice;
    if (rows_are_x) {  // a warp has 4 rows and 8 columns: full sectors of 32 bytes, and different banks
      const float* from = m.row(x0) + k0;
#pragma unroll
      for (int n = 0; n < kCount / kDeltaThreads; ++n) {
        const int i = n * kDeltaThreads + static_cast<int>(threadIdx.x);
        const int k = i % 8 + i / kWarp % (kSlice / 8) * 8, x = i / 8 % 4 + i / (4 * kSlice) * 4;
        tile[k * kStride<WIDTH> + x] = x < xs && k < ks ? from[x * stride + k] : 0;
      }
    } else {
      const float* from = m.row(k0) + x0;
#pragma unroll
      for (int n = 0; n < kCount / kDeltaThreads; ++n) {
        const int i = n * kDeltaThreads + static_cast<int>(threadIdx.x), k = i / WIDTH, x = i % WIDTH;
        tile[k * kStride<WIDTH> + x] = x < xs && k < ks ? from[k * stride + x] : 0;
      }
    }
  }

  template <int COLS>
  [[gnu::noinline]] __device__ static void product(Matrix<float> c, Matrix<float> a, cpu::Op op_a, Matrix<float> b,
                                                   cpu::Op op_b, Update update) {
    constexpr int kTogether = COLS < 4 ? COLS : 4, kWidth = COLS * kSide;
    float *of_a = shared_memory<float>(), *of_b = of_a + kSlice * kStride<kRows>;
    const int inner = static_cast<int>(op_a == cpu::Op::as_is ? a.cols : a.rows);
    const int row = static_cast<int>(threadIdx.x) / kSide * 4, col = static_cast<int>(threadIdx.x) % kSide * kTogether;
    for (int i = 0; i < c.rows; i += kRows) {
      for (int j = 0; j < c.cols; j += kWidth) {
        Floats<COLS> sum[4];
        for (int k = 0; k < inner; k += kSlice) {
          stage<kRows>(of_a, a, op_a == cpu::Op::as_is, i, k);
          stage<kWidth>(of_b, b, op_b == cpu::Op::transposed, j, k);
          __syncthreads();
#pragma unroll 8
          for (int n = 0; n < kSlice; ++n)
            multiply(sum, of_a + n * kStride<kRows> + row, of_b + n * kStride<kWidth> + col);
          __syncthreads();
        }
#pragma unroll
        for (int m = 0; m < COLS; m += kTogether) put<kTogether>(c, i + row, j + col + m * kSide, sum, m, update);
      }
    }
    __syncthreads();
  }

  // sum += x yᵀ for 4 rows, and for columns that are 4 together at most
  template <int COLS>
  __device__ static void multiply(Floats<COLS> (&sum)[4], const float* x, const float* y) {
    constexpr int kTogether = COLS < 4 ? COLS : 4;
    const Floats<4> rows = load<4>(x);
#pragma unroll
    for (int m = 0; m < COLS; m += kTogether) {
      const Floats<kTogether> cols = load<kTogether>(y + m * kSide);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) sum[i].x[m + j] = multiply_add(rows.x[i], cols.x[j], sum[i].x[m + j]);
      }
    }
  }

  // Writes 4 rows of N columns, as far as c has them.
  template <int N, int COLS>
  __device__ static void put(const Matrix<float>& c, int row, int col, const Floats<COLS> (&sum)[4], int first,
                             Update update) {
    const bool together =
        c.stride % N == 0 && c.cols % N == 0 && reinterpret_cast<std::uintptr_t>(c.data) % (4 * N) == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i >= c.rows) continue;
      float* to = c.row(row + i) + col;
      if (together && col < c.cols) {
        Floats<N> values = update == Update::add ? load<N>(to) : Floats<N>{};
#pragma unroll
        for (int j = 0; j < N; ++j) values.x[j] += sum[i].x[first + j];
        store(to, values);
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (col + j < c.cols) to[j] = update == Update::add ? to[j] + sum[i].x[first + j] : sum[i].x[first + j];
      }
    }
  }
};

}  // namespace streambp::cuda
