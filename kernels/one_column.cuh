// Matrix products with one output on a GPU, such as the gate of a shared expert or an adapter of rank 1. cuBLASLt computes
// them with other bits where it has other rows, so we do it.
#pragma once

#include "kernels/base/packs.cuh"

namespace streambp::cuda {

constexpr int kColumnWarps = 16;  // of a block that sums over rows

// y[i] = Σ_k x[i][k] w[k] + bias + residual[i], or the same added to y: a warp for each row. The numbers of w are `step` apart.
template <class Y, class T>
__global__ void __launch_bounds__(kThreads)
    one_column_kernel(Matrix<Y> y, Matrix<const T> x, const T* w, Index step, const T* bias, Matrix<const Y> residual) {
  const Index i = static_cast<Index>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (i >= y.rows) return;
  float sum = 0;
  for (Index k = threadIdx.x % kWarp; k < x.cols; k += kWarp)
    sum = multiply_add(static_cast<float>(x(i, k)), static_cast<float>(w[k * step]), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp > 0) return;
  if (bias) sum += static_cast<float>(*bias);
  y(i, 0) = residual.data ? static_cast<float>(residual(i, 0)) + sum : sum;
}
template <class Y, class T>
void one_column(Cuda& dev, Matrix<Y> y, Matrix<const T> x, const T* w, Index step, const T* bias,
                Matrix<const Y> residual) {
  launch(dev, one_column_kernel<Y, T>, grid_of(ceil_div(y.rows, kThreads / kWarp)), kThreads, 0, y, x, w, step, bias,
         residual);
}

// dw[j] += Σ_i dy[i] x[i][j] for 32 columns: each warp sums every 16th row, and the sums of the warps are added in order.
template <class T>
__global__ void __launch_bounds__(kColumnWarps* kWarp)
    one_row_kernel(Matrix<float> dw, Matrix<const T> dy, Matrix<const T> x) {
  auto* sums = shared_memory<float[kWarp]>();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Index j = static_cast<Index>(blockIdx.x) * kWarp + lane;
  float sum = 0;
  for (Index i = warp; i < x.rows && j < x.cols; i += kColumnWarps)
    sum = multiply_add(static_cast<float>(dy(i, 0)), static_cast<float>(x(i, j)), sum);
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || j >= x.cols) return;
  for (int w = 1; w < kColumnWarps; ++w) sum += sums[w][lane];
  dw(0, j) += sum;
}
template <class T>
void one_row(Cuda& dev, Matrix<float> dw, Matrix<const T> dy, Matrix<const T> x) {
  constexpr int threads = kColumnWarps * kWarp;
  launch(dev, one_row_kernel<T>, grid_of(ceil_div(x.cols, kWarp)), threads, threads * sizeof(float), dw, dy, x);
}

}  // namespace streambp::cuda
