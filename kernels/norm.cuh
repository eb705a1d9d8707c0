// RMSNorm and LayerNorm, over the rows of a matrix. A norm per head is the same thing on a reshaped view.
//
//   μ = mean(x) for LayerNorm, 0 for RMSNorm        r = 1 / sqrt(mean((x - μ)²) + eps)
//
//   forward          x̂ = (x - μ) r          y = x̂ * (offset + weight) + bias          offset: 1 in Gemma, else 0
//   backward         g = dy * (offset + weight)
//                    dx += r (g - x̂ mean(g * x̂) - mean(g))          the last term for LayerNorm only
//                    dweight += Σ_rows dy * x̂        dbias += Σ_rows dy
//
// The statistics are computed again in the backward pass: cheaper than keeping them. dx is added to because x is the
// residual stream, whose gradient is already there; a norm of heads starts from zero.
#pragma once

#include <cmath>

#include "kernels/base/device.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/elementwise.cuh"

namespace streambp {

struct NormStyle {
  double eps;
  bool centered = false;  // LayerNorm
  double offset = 0;
};

// The bias is empty for RMSNorm.
template <class T>
struct NormWeights {
  Matrix<T> weight, bias;
};

template <class T>
struct NormInput {
  Matrix<const T> x;
  NormWeights<T> weights;
  NormStyle style;
};

namespace run {

template <class T>
struct Statistics {
  T mean, scale;
};

template <class T>
Statistics<T> statistics(const T* x, Index n, double eps, bool centered) {
  double mean = 0, squares = 0;
  if (centered) {
#pragma omp simd reduction(+ : mean)
    for (Index j = 0; j < n; ++j) mean += static_cast<double>(x[j]);
    mean /= static_cast<double>(n);
  }
#pragma omp simd reduction(+ : squares)
  for (Index j = 0; j < n; ++j) squares += (static_cast<double>(x[j]) - mean) * (static_cast<double>(x[j]) - mean);
  return {static_cast<T>(mean), static_cast<T>(1 / std::sqrt(squares / static_cast<double>(n) + eps))};
}

template <class T>
void norm(Cpu&, Matrix<T> y, Input<T> x, Input<T> weight, Input<T> bias, NormStyle style) {
  const T offset = static_cast<T>(style.offset);
#pragma omp parallel for if (x.size() > kWorthThreads)
  for (Index i = 0; i < x.rows; ++i) {
    const auto [mean, scale] = statistics(x.row(i), x.cols, style.eps, style.centered);
#pragma omp simd
    for (Index j = 0; j < x.cols; ++j) {
      const T scaled = (x(i, j) - mean) * scale * (offset + weight(0, j));
      y(i, j) = bias ? scaled + bias(0, j) : scaled;
    }
  }
}

// Leaves the group's sums for dweight and dbias in dweight_sum and dbias_sum.
template <class T, class G>
void norm_backward_group(Matrix<T> dx, Input<T> dy, Input<T> x, Input<T> weight, NormStyle style, bool accumulate,
                         G* dweight_sum, G* dbias_sum) {
  const T offset = static_cast<T>(style.offset);
  std::fill_n(dweight_sum, x.cols, G(0));
  if (dbias_sum) std::fill_n(dbias_sum, x.cols, G(0));
  for (Index i = 0; i < x.rows; ++i) {
    const auto [mean, scale] = statistics(x.row(i), x.cols, style.eps, style.centered);
    const T *x_row = x.row(i), *dy_row = dy.row(i), *w = weight.data;
    T* dx_row = dx.row(i);
    double sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
    for (Index j = 0; j < x.cols; ++j) {
      const T g = dy_row[j] * (offset + w[j]), normed = (x_row[j] - mean) * scale;
      sum_g += static_cast<double>(g);
      sum_gx += static_cast<double>(g * normed);
    }
    const T mean_g = style.centered ? static_cast<T>(sum_g / static_cast<double>(x.cols)) : T(0);
    const T mean_gx = static_cast<T>(sum_gx / static_cast<double>(x.cols));
#pragma omp simd
    for (Index j = 0; j < x.cols; ++j) {
      const T dy_j = dy_row[j], normed = (x_row[j] - mean) * scale;
      const T d = scale * (dy_j * (offset + w[j]) - normed * mean_gx - mean_g);
      dweight_sum[j] += dy_j * normed;
      if (dbias_sum) dbias_sum[j] += dy_j;
      dx_row[j] = accumulate ? dx_row[j] + d : d;  // last: dx may be dy or x
    }
  }
}

// Fills dweight and dbias with a row of sums for each group of rows.
template <class T, class G>
void norm_backward(Cpu&, Matrix<T> dx, Matrix<G> dweight, Matrix<G> dbias, Input<T> dy, Input<T> x, Input<T> weight,
                   NormStyle style, bool accumulate) {
#pragma omp parallel for
  for (Index g = 0; g < dweight.rows; ++g) {
    const Rows group = {g * kGroup, least(x.rows, (g + 1) * kGroup)};
    norm_backward_group(dx.slice(group), dy.slice(group), x.slice(group), weight, style, accumulate, dweight.row(g),
                        dbias ? dbias.row(g) : nullptr);
  }
}

#ifdef STREAMBP_CUDA

// The mean and the scale of a row, computed by a warp.
template <int N, class T>
__device__ Statistics<float> warp_statistics(const T* x, Index n, float eps, bool centered) {
  const int lane = threadIdx.x % cuda::kWarp;
  float mean = 0, squares = 0;
  for (Index j = lane * N; j < n && centered; j += cuda::kWarp * N) {
    const auto value = cuda::load<N>(x + j);
    for (int k = 0; k < N; ++k) mean += value.x[k];
  }
  if (centered) mean = cuda::warp_sum(mean) / static_cast<float>(n);
  for (Index j = lane * N; j < n; j += cuda::kWarp * N) {
    const auto value = cuda::load<N>(x + j);
    for (int k = 0; k < N; ++k) squares += (value.x[k] - mean) * (value.x[k] - mean);
  }
  return {mean, 1 / std::sqrt(cuda::warp_sum(squares) / static_cast<float>(n) + eps)};
}

// A warp for each row.
template <int N, class T>
__global__ void __launch_bounds__(cuda::kThreads)
    norm_kernel(Matrix<T> y, Matrix<const T> x, Matrix<const T> weight, Matrix<const T> bias, float eps, bool centered,
                float offset) {
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  const Index i = static_cast<Index>(blockIdx.x) * (cuda::kThreads / cuda::kWarp) + warp;
  if (i >= x.rows) return;
  const auto [mean, scale] = warp_statistics<N>(x.row(i), x.cols, eps, centered);
  for (Index j = lane * N; j < x.cols; j += cuda::kWarp * N) {
    auto value = cuda::load<N>(x.row(i) + j);
    const auto w = cuda::load<N>(weight.data + j);
    for (int k = 0; k < N; ++k) value.x[k] = (value.x[k] - mean) * scale * (offset + w.x[k]);
    if (bias) {
      const auto b = cuda::load<N>(bias.data + j);
      for (int k = 0; k < N; ++k) value.x[k] += b.x[k];
    }
    cuda::store(y.row(i) + j, value);
  }
}

template <class T>
void norm(Cuda& dev, Matrix<T> y, Input<T> x, Input<T> weight, Input<T> bias, NormStyle style) {
  const auto kernel = cuda::packable(y, x, weight, bias) ? norm_kernel<cuda::kPack, T> : norm_kernel<1, T>;
  const Index blocks = ceil_div(x.rows, cuda::kThreads / cuda::kWarp);
  cuda::launch(dev, kernel, cuda::grid_of(blocks), cuda::kThreads, 0, y, x, weight, bias, static_cast<float>(style.eps),
               style.centered, static_cast<float>(style.offset));
}

// Each number of `values` becomes its sum over the threads of the block. scratch: a number for each of them and warp.
template <int N>
__device__ void block_sums(float (&values)[N], float* scratch) {
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp, warps = blockDim.x / cuda::kWarp;
  for (float& value : values) value = cuda::warp_sum(value);
  if (warps == 1) return;
  for (int k = 0; k < N && lane == 0; ++k) scratch[warp * N + k] = values[k];
  __syncthreads();
  for (int k = 0; k < N; ++k) {
    values[k] = scratch[k];
    for (int w = 1; w < warps; ++w) values[k] += scratch[w * N + k];
  }
  __syncthreads();
}

// A block for each group of rows, kRowsAtOnce of them at a time so that enough reads are under way; a thread keeps to
// its columns, and their sums for dweight and dbias to its part of the shared memory.
constexpr int kRowsAtOnce = 4, kNormThreads = 512;
template <int N, class T>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_backward_kernel(Matrix<T> dx, Matrix<float> dweight, Matrix<float> dbias, Matrix<const T> dy,
                         Matrix<const T> x, Matrix<const T> weight, float eps, bool centered, float offset,
                         bool accumulate) {
  const Index n = x.cols, first = static_cast<Index>(threadIdx.x) * N, step = static_cast<Index>(blockDim.x) * N;
  float* dweight_sum = cuda::shared_memory<float>();
  float* dbias_sum = dweight_sum + n;
  float* scratch = dweight_sum + (dbias ? 2 : 1) * n;
  for (Index j = first; j < n; j += step) {
    cuda::store(dweight_sum + j, cuda::Floats<N>());
    if (dbias) cuda::store(dbias_sum + j, cuda::Floats<N>());
  }
  const Index group = blockIdx.x, end = least(x.rows, (group + 1) * kGroup);
  for (Index begin = group * kGroup; begin < end; begin += kRowsAtOnce) {
    float mean[kRowsAtOnce] = {};
    if (centered) {
      for (Index j = first; j < n; j += step) {
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (begin + r >= end) continue;
          const auto value = cuda::load<N>(x.row(begin + r) + j);
          for (int k = 0; k < N; ++k) mean[r] += value.x[k];
        }
      }
      block_sums(mean, scratch);
      for (float& m : mean) m /= static_cast<float>(n);
    }
    float sums[3 * kRowsAtOnce] = {};  // of each row: Σ (x - μ)², Σ g (x - μ), Σ g
    for (Index j = first; j < n; j += step) {
      const auto w = cuda::load<N>(weight.data + j);
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (begin + r >= end) continue;
        const auto value = cuda::load<N>(x.row(begin + r) + j), d = cuda::load<N>(dy.row(begin + r) + j);
        for (int k = 0; k < N; ++k) {
          const float g = d.x[k] * (offset + w.x[k]), distance = value.x[k] - mean[r];
          sums[3 * r] += distance * distance;
          sums[3 * r + 1] += g * distance;
          sums[3 * r + 2] += g;
        }
      }
    }
    block_sums(sums, scratch);
    float scale[kRowsAtOnce], mean_gx[kRowsAtOnce], mean_g[kRowsAtOnce];
    for (int r = 0; r < kRowsAtOnce; ++r) {
      scale[r] = 1 / std::sqrt(sums[3 * r] / static_cast<float>(n) + eps);
      mean_gx[r] = sums[3 * r + 1] * scale[r] / static_cast<float>(n);
      mean_g[r] = centered ? sums[3 * r + 2] / static_cast<float>(n) : 0;
    }
    for (Index j = first; j < n; j += step) {
      const auto w = cuda::load<N>(weight.data + j);
      auto dw = cuda::load<N>(dweight_sum + j);
      cuda::Floats<N> db;
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const Index i = begin + r;
        if (i >= end) continue;
        const auto value = cuda::load<N>(x.row(i) + j), d = cuda::load<N>(dy.row(i) + j);
        auto result = accumulate ? cuda::load<N>(dx.row(i) + j) : cuda::Floats<N>();
        for (int k = 0; k < N; ++k) {
          const float normed = (value.x[k] - mean[r]) * scale[r];
          result.x[k] += scale[r] * (d.x[k] * (offset + w.x[k]) - normed * mean_gx[r] - mean_g[r]);
          dw.x[k] += d.x[k] * normed;
          db.x[k] += d.x[k];
        }
        cuda::store(dx.row(i) + j, result);  // last: dx may be dy or x
      }
      cuda::store(dweight_sum + j, dw);
      if (!dbias) continue;
      const auto sum = cuda::load<N>(dbias_sum + j);
      for (int k = 0; k < N; ++k) db.x[k] += sum.x[k];
      cuda::store(dbias_sum + j, db);
    }
  }
  for (Index j = first; j < n; j += step) {
    cuda::store(dweight.row(group) + j, cuda::load<N>(dweight_sum + j));
    if (dbias) cuda::store(dbias.row(group) + j, cuda::load<N>(dbias_sum + j));
  }
}

template <class T>
void norm_backward(Cuda& dev, Matrix<T> dx, Matrix<float> dweight, Matrix<float> dbias, Input<T> dy, Input<T> x,
                   Input<T> weight, NormStyle style, bool accumulate) {
  const bool packed = cuda::packable(dx, dweight, dbias, dy, x, weight);
  const auto kernel = packed ? norm_backward_kernel<cuda::kPack, T> : norm_backward_kernel<1, T>;
  const Index threads = least(kNormThreads, round_up(ceil_div(x.cols, packed ? cuda::kPack : 1), cuda::kWarp));
  const Index shared = (dbias ? 2 : 1) * x.cols + threads / cuda::kWarp * 3 * kRowsAtOnce;
  require(shared * sizeof(float) <= 99 << 10, "norm backward: rows of ", x.cols, " are too wide for a GPU");
  cuda::launch(dev, kernel, cuda::grid_of(dweight.rows), static_cast<int>(threads),
               static_cast<std::size_t>(shared) * sizeof(float), dx, dweight, dbias, dy, x, weight,
               static_cast<float>(style.eps), style.centered, static_cast<float>(style.offset), accumulate);
}

#endif

}  // namespace run

template <class Device, class T>
void norm(Device& dev, Matrix<T> y, const std::type_identity_t<NormInput<T>>& input) {
  const auto& [x, weights, style] = input;
  require_shape("norm", "input", x, y.rows, y.cols);
  require_shape("norm", "weight", weights.weight, 1, y.cols);
  auto op = dev.operation("norm", (style.centered ? 7.0 : 4.0) * x.size(), 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) run::norm<T>(dev, y, x, weights.weight, weights.bias, style);
}

// With Update::assign, dx may be dy or x.
template <class Device, class T, class G>
void norm_backward(Device& dev, Matrix<T> dx, const NormWeights<G>& dweights, Input<T> dy,
                   const std::type_identity_t<NormInput<T>>& input, Update update) {
  const auto& [x, weights, style] = input;
  const auto& [dweight, dbias] = dweights;
  require_shape("norm backward", "dy", dy, x.rows, x.cols);
  require_shape("norm backward", "dx", dx, x.rows, x.cols);
  require_shape("norm backward", "dweight", dweight, 1, x.cols);
  auto scope = dev.scope();
  const Index groups = ceil_div(x.rows, kGroup);
  auto dweight_sums = dev.template allocate<G>(groups, x.cols, Kind::chunk);
  auto dbias_sums = dev.template allocate<G>(dbias ? groups : 0, x.cols, Kind::chunk);
  auto op = dev.operation("norm backward", (style.centered ? 17.0 : 13.0) * x.size(),
                          (update == Update::add ? 4.0 : 3.0) * sizeof(T) * x.size());
  if constexpr (Device::computes) {
    run::norm_backward<T>(dev, dx, dweight_sums, dbias_sums, dy, x, weights.weight, style, update == Update::add);
    run::add_groups(dev, dweight, dweight_sums);
    if (dbias) run::add_groups(dev, dbias, dbias_sums);
  }
}

}  // namespace streambp
