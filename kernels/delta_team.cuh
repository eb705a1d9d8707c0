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
          values[n] = f(i < rows ? i : begin, j);
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
    const int n = static_cast<int>(x.rows), pitch = static_cast<int>(lower ? x.stride : -x.stride);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kBlock * kBlock; i += kDeltaThreads) {
      const int r = i % kBlock, s = i / kBlock, row = lower ? r : n - 1 - s, col = lower ? s : n - 1 - r;
      tile[i] = s < r && r < n ? t(row, col) : 0;
    }
    __syncthreads();
    for (int j = static_cast<int>(threadIdx.x); j < x.cols; j += kDeltaThreads) {
      float *column = x.row(lower ? 0 : n - 1) + j, y[kBlock];
#pragma unroll
      for (int i = 0; i < kBlock; ++i) y[i] = i < n ? column[i * pitch] : 0;
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
#ifdef __CUDACC__
      asm volatile("" : "+l"(column));  // or the compiler keeps 64 addresses in registers until here
#endif
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        if (i < n) column[i * pitch] = y[i];
    }
    __syncthreads();
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

  // A slice of an operand on its way through registers: tile(k, x) = m(x, k), or m(k, x) unless rows are x; zero outside of
  // m. The numbers of a thread are `steps` apart. If rows are x, a warp loads 8 columns of 4 rows, which are full sectors of
  // 32 bytes, and stores them into different banks.
  template <int WIDTH>
  struct Slice {
    static constexpr int kCount = WIDTH * kSlice / kDeltaThreads;
    const float* from;
    int xs, ks, x, k, x_step, k_step, row, col;
    float values[kCount];

    __device__ Slice(const Matrix<float>& m, bool rows_are_x) {
      const int i = static_cast<int>(threadIdx.x), stride = static_cast<int>(m.stride);
      const int rows = static_cast<int>(m.rows), cols = static_cast<int>(m.cols);
      from = m.data;
      if (rows_are_x) {
        xs = rows, ks = cols, x = i / 8 % 4 + i / (4 * kSlice) * 4, k = i % 8 + i / kWarp % (kSlice / 8) * 8;
        x_step = kDeltaThreads / kSlice, k_step = 0, row = stride, col = 1;
      } else {
        xs = cols, ks = rows, x = i % WIDTH, k = i / WIDTH;
        x_step = 0, k_step = kDeltaThreads / WIDTH, row = 1, col = stride;
      }
    }
    __device__ void load(int x0, int k0) {
      const float* first = from + static_cast<Index>(x0 + x) * row + static_cast<Index>(k0 + k) * col;
      const int step = x_step * row + k_step * col;
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        values[n] = x0 + x + n * x_step < xs && k0 + k + n * k_step < ks ? first[n * step] : 0;
    }
    __device__ void put(float* tile) const {
#pragma unroll
      for (int n = 0; n < kCount; ++n) tile[(k + n * k_step) * kStride<WIDTH> + x + n * x_step] = values[n];
    }
  };

  template <int COLS>
  [[gnu::noinline]] __device__ static void product(Matrix<float> c, Matrix<float> a, cpu::Op op_a, Matrix<float> b,
                                                   cpu::Op op_b, Update update) {
    constexpr int kTogether = COLS < 4 ? COLS : 4, kWidth = COLS * kSide;
    float *tile_a = shared_memory<float>(), *tile_b = tile_a + kSlice * kStride<kRows>;
    Slice<kRows> of_a(a, op_a == cpu::Op::as_is);
    Slice<kWidth> of_b(b, op_b == cpu::Op::transposed);
    const int inner = static_cast<int>(op_a == cpu::Op::as_is ? a.cols : a.rows);
    const int row = static_cast<int>(threadIdx.x) / kSide * 4, col = static_cast<int>(threadIdx.x) % kSide * kTogether;
    for (int i = 0; i < c.rows; i += kRows) {
      for (int j = 0; j < c.cols; j += kWidth) {
        Floats<COLS> sum[4];
        of_a.load(i, 0), of_b.load(j, 0);
        for (int k = 0; k < inner; k += kSlice) {
          of_a.put(tile_a), of_b.put(tile_b);
          __syncthreads();
          if (k + kSlice < inner) of_a.load(i, k + kSlice), of_b.load(j, k + kSlice);
#pragma unroll 8
          for (int n = 0; n < kSlice; ++n)
            multiply(sum, tile_a + n * kStride<kRows> + row, tile_b + n * kStride<kWidth> + col);
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
