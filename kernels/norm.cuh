// RMSNorm and LayerNorm over the rows of a matrix. A norm per head works on a reshaped view.
//
//   μ = mean(x) for LayerNorm, 0 for RMSNorm        r = 1 / sqrt(mean((x - μ)²) + eps)
//
//   forward          x̂ = (x - μ) r          y = x̂ * (offset + weight) + bias          offset: 1 in Gemma, else 0
//                    without weights y = x̂
//   backward         g = dy * (offset + weight), without weights g = dy
//                    dx = r (g - x̂ mean(g * x̂) - mean(g))          the last term for LayerNorm only
//                    dweight += Σ_rows dy * x̂        dbias += Σ_rows dy
//
// The backward pass recomputes the statistics, which is cheaper than storing them. With Update::add it adds to dx,
// the gradient of the residual stream; with Update::assign it overwrites dx.
#pragma once

#include <cmath>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/base/row_sums.h"
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

// W: the type of the weights
template <class T, class W = T>
struct NormInput {
  Matrix<const T> x;
  NormWeights<W> weights;
  NormStyle style;
  Index heads = 1;  // rows of x for each row of the stream
};

// For each element.
inline double norm_flops(const NormStyle& style) { return style.centered ? 7 : 4; }

template <class Device, class T, class W = T>
void norm(Device& dev, Matrix<T> y, const std::type_identity_t<NormInput<T, W>>& in) {
  require_shape("norm", "input", in.x, y.rows, y.cols);
  if (in.weights.weight) require_shape("norm", "weight", in.weights.weight, 1, y.cols);
  if (in.weights.bias) require_shape("norm", "bias", in.weights.bias, 1, y.cols);
  auto op = dev.operation("norm", norm_flops(in.style) * static_cast<double>(y.size()), 2.0 * sizeof(T) * y.size());
  if constexpr (Device::computes) compute_norm(dev, y, in);
}

// With Update::assign, dx may alias dy or x. Gradients of weights are summed in one or several lanes. Empty ones are not
// computed: their weights are frozen.
template <class Device, class T, class W = T, class G>
void norm_backward(Device& dev, Matrix<T> dx, const NormWeights<G>& dweights, Input<T> dy,
                   const std::type_identity_t<NormInput<T, W>>& in, Update update) {
  const Index rows = in.x.rows, cols = in.x.cols, groups = ceil_div(rows, kGroup);
  require_shape("norm backward", "dy", dy, rows, cols);
  require_shape("norm backward", "dx", dx, rows, cols);
  if (dweights.weight) require_shape("norm backward", "dweight", dweights.weight, dweights.weight.rows, cols);
  if (dweights.bias) require_shape("norm backward", "dbias", dweights.bias, dweights.bias.rows, cols);
  auto scope = dev.scope();
  NormWeights<G> group_sums;  // a row for kGroup rows each
  group_sums.weight = allocate<G>(dev, dweights.weight ? groups : 0, cols, Kind::chunk);
  group_sums.bias = allocate<G>(dev, dweights.bias ? groups : 0, cols, Kind::chunk);
  auto op = dev.operation("norm backward", (in.style.centered ? 17.0 : 13.0) * in.x.size(),
                          (update == Update::add ? 4.0 : 3.0) * sizeof(T) * in.x.size());
  if constexpr (Device::computes) {
    compute_norm_backward(dev, dx, group_sums, dy, in, update);
    const Index tile = dev.tile * in.heads;
    if (dweights.weight) add_groups_to_lanes(dev, dweights.weight, group_sums.weight, tile);
    if (dweights.bias) add_groups_to_lanes(dev, dweights.bias, group_sums.bias, tile);
  }
}

// --- CPU ---

template <class T>
struct NormStatistics {
  T mean, scale;
};

namespace cpu {

template <class T>
NormStatistics<Accumulator<T>> norm_statistics(const T* x, Index n, const NormStyle& style) {
  using A = Accumulator<T>;
  const auto count = static_cast<double>(n);
  const double mean = style.centered ? sum_of(n, [=](Index j) { return static_cast<double>(x[j]); }) / count : 0;
  const double squares = sum_of(n, [=](Index j) {
    const double distance = static_cast<double>(x[j]) - mean;
    return distance * distance;
  });
  return {static_cast<A>(mean), static_cast<A>(1 / std::sqrt(squares / count + style.eps))};
}

template <class T, class U, class W>
void norm_row(T* to, const U* from, Index n, const NormWeights<W>& weights, const NormStyle& style) {
  using A = Accumulator<T>;
  const NormStatistics<A> row = norm_statistics(from, n, style);
  const A offset = static_cast<A>(style.offset);
  const W *w = weights.weight.data, *b = weights.bias.data;
  const auto standard = [=](Index j) { return (A(from[j]) - row.mean) * row.scale; };
  const auto scaled = [=](Index j) { return standard(j) * (offset + A(w[j])); };
  // a loop for each case: a choice within one would become a masked load from address 0, which is slow
  if (!w) {
#pragma omp simd
    for (Index j = 0; j < n; ++j) to[j] = standard(j);
  } else if (b) {
#pragma omp simd
    for (Index j = 0; j < n; ++j) to[j] = scaled(j) + A(b[j]);
  } else {
#pragma omp simd
    for (Index j = 0; j < n; ++j) to[j] = scaled(j);
  }
}

// The backward pass of kGroup rows. factor(j): what column j is multiplied by. Writes their sums for dweight and dbias to a
// row, or nothing if that is null.
template <class T, class W, class G, class F>
void norm_backward_group(Matrix<T> dx, G* dweight_sum, G* dbias_sum, Input<T> dy, const NormInput<T, W>& in,
                         Update update, F&& factor) {
  using A = Accumulator<T>;
  const Matrix<const T> x = in.x;
  if (dweight_sum) std::fill_n(dweight_sum, x.cols, G(0));
  if (dbias_sum) std::fill_n(dbias_sum, x.cols, G(0));
  for (Index i = 0; i < x.rows; ++i) {
    const NormStatistics<A> row = norm_statistics(x.row(i), x.cols, in.style);
    const T *x_row = x.row(i), *dy_row = dy.row(i);
    T* dx_row = dx.row(i);
    const auto g = [=](Index j) { return A(dy_row[j]) * factor(j); };
    const auto normed = [=](Index j) { return (A(x_row[j]) - row.mean) * row.scale; };
    const double sum_g = in.style.centered ? sum_of(x.cols, [=](Index j) { return static_cast<double>(g(j)); }) : 0;
    const double sum_gx = sum_of(x.cols, [=](Index j) { return static_cast<double>(g(j) * normed(j)); });
    const A mean_g = static_cast<A>(sum_g / static_cast<double>(x.cols));
    const A mean_gx = static_cast<A>(sum_gx / static_cast<double>(x.cols));
    if (dbias_sum) {
      for (Index j = 0; j < x.cols; ++j) dbias_sum[j] += dy_row[j];
    }
    if (dweight_sum) {
      for (Index j = 0; j < x.cols; ++j) dweight_sum[j] += A(dy_row[j]) * normed(j);
    }
#pragma omp simd
    for (Index j = 0; j < x.cols; ++j) {  // last: dx may alias dy or x
      const A d = row.scale * (g(j) - normed(j) * mean_gx - mean_g);
      dx_row[j] = update == Update::add ? A(dx_row[j]) + d : d;
    }
  }
}

}  // namespace cpu

template <class T, class W>
void compute_norm(Cpu&, Matrix<T> y, const NormInput<T, W>& in) {
#pragma omp parallel for if (y.size() > kWorthThreads)
  for (Index i = 0; i < y.rows; ++i) cpu::norm_row(y.row(i), in.x.row(i), y.cols, in.weights, in.style);
}

template <class T, class W, class G>
void compute_norm_backward(Cpu&, Matrix<T> dx, const NormWeights<G>& group_sums, Input<T> dy, const NormInput<T, W>& in,
                           Update update) {
  using A = Accumulator<T>;
  const A offset = static_cast<A>(in.style.offset);
  const W* w = in.weights.weight.data;
#pragma omp parallel for
  for (Index g = 0; g < ceil_div(in.x.rows, kGroup); ++g) {
    const Rows rows = piece(g, kGroup, in.x.rows);
    const auto row = [=](Matrix<G> sums) { return sums ? sums.row(g) : nullptr; };
    const auto compute = [&](auto factor) {
      cpu::norm_backward_group<T, W>(dx.slice(rows), row(group_sums.weight), row(group_sums.bias), dy.slice(rows),
                                     {in.x.slice(rows), in.weights, in.style}, update, factor);
    };
    w ? compute([=](Index j) { return offset + A(w[j]); }) : compute([](Index) { return A(1); });
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// Computed by a warp, or by fewer of its lanes: any power of two that covers the row gives the same bits.
template <int N, class T>
__device__ NormStatistics<float> norm_statistics(const T* x, Index n, const NormStyle& style, int lanes = kWarp) {
  const int lane = threadIdx.x % lanes;
  const float eps = static_cast<float>(style.eps);
  float mean = 0, squares = 0;
  for (Index j = lane * N; j < n && style.centered; j += lanes * N) {
    const auto value = load<N>(x + j);
    for (int k = 0; k < N; ++k) mean += value.x[k];
  }
  if (style.centered) mean = warp_sum(mean, lanes) / static_cast<float>(n);
  for (Index j = lane * N; j < n; j += lanes * N) {
    const auto value = load<N>(x + j);
    for (int k = 0; k < N; ++k) {
      const float distance = value.x[k] - mean;
      squares = multiply_add(distance, distance, squares);
    }
  }
  return {mean, 1 / std::sqrt(warp_sum(squares, lanes) / static_cast<float>(n) + eps)};
}

// What elements j .. j + N of a row are multiplied by.
template <int N, class W>
__device__ Floats<N> norm_factors(const NormWeights<W>& weights, float offset, Index j) {
  auto factors = weights.weight ? load<N>(weights.weight.data + j) : Floats<N>();
  for (float& x : factors.x) x = weights.weight ? offset + x : 1;
  return factors;
}

// Elements j .. j + N of a row, normed. Fused multiply-adds are explicit, so that norm_kernel and rope_kernel compute the
// same bits.
template <int N, class W>
__device__ Floats<N> normed(Floats<N> x, Index j, const NormStatistics<float>& row, const NormWeights<W>& weights,
                            const NormStyle& style) {
  const auto factors = norm_factors<N>(weights, static_cast<float>(style.offset), j);
  const auto b = weights.bias ? load<N>(weights.bias.data + j) : Floats<N>();
  for (int k = 0; k < N; ++k) {
    x.x[k] = multiply_add((x.x[k] - row.mean) * row.scale, factors.x[k], b.x[k]);
  }
  return x;
}

// One warp per row.
template <int N, class T, class W>
__global__ void __launch_bounds__(kThreads) norm_kernel(Matrix<T> y, NormInput<T, W> in) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Index i = static_cast<Index>(blockIdx.x) * (kThreads / kWarp) + warp, n = in.x.cols;
  if (i >= in.x.rows) return;
  const auto row = norm_statistics<N>(in.x.row(i), n, in.style);
  for (Index j = lane * N; j < n; j += kWarp * N)
    store(y.row(i) + j, normed(load<N>(in.x.row(i) + j), j, row, in.weights, in.style));
}

// Replaces each value by its sum over all threads of the thread block. scratch: N floats per warp.
template <int N>
__device__ void block_sums(float (&values)[N], float* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (float& value : values) value = warp_sum(value);
  if (warps == 1) return;
  for (int k = 0; k < N && lane == 0; ++k) scratch[warp * N + k] = values[k];
  __syncthreads();
  for (int k = 0; k < N; ++k) {
    values[k] = scratch[k];
    for (int w = 1; w < warps; ++w) values[k] += scratch[w * N + k];
  }
  __syncthreads();
}

constexpr int kRowsAtOnce = 4, kNormThreads = 512;

// The backward pass of kRowsAtOnce rows, starting at `begin`, by a thread block. Several rows at once keep
// enough loads in flight. A thread handles the same columns of every row: first, first + step, ...
template <int N, class T, class W>
struct NormBackwardRows {
  static constexpr int R = kRowsAtOnce;
  const NormInput<T, W>& in;
  Matrix<const T> dy;
  Index begin, end, first, step;
  float offset;
  float mean[R] = {}, scale[R] = {}, mean_gx[R] = {}, mean_g[R] = {};  // of each row

  __device__ void compute_mean(float* scratch) {
    for (Index j = first; j < in.x.cols; j += step) {
      for (int r = 0; r < R; ++r) {
        if (begin + r >= end) continue;
        const auto value = load<N>(in.x.row(begin + r) + j);
        for (int k = 0; k < N; ++k) mean[r] += value.x[k];
      }
    }
    block_sums(mean, scratch);
    for (float& m : mean) m /= static_cast<float>(in.x.cols);
  }

  __device__ void compute_statistics(float* scratch) {
    const float n = static_cast<float>(in.x.cols), eps = static_cast<float>(in.style.eps);
    if (in.style.centered) compute_mean(scratch);
    float sums[3 * R] = {};  // of each row: Σ (x - μ)², Σ g (x - μ), Σ g
    for (Index j = first; j < in.x.cols; j += step) {
      const auto factors = norm_factors<N>(in.weights, offset, j);
      for (int r = 0; r < R; ++r) {
        if (begin + r >= end) continue;
        const auto value = load<N>(in.x.row(begin + r) + j), d = load<N>(dy.row(begin + r) + j);
        for (int k = 0; k < N; ++k) {
          const float g = d.x[k] * factors.x[k], distance = value.x[k] - mean[r];
          sums[3 * r] = multiply_add(distance, distance, sums[3 * r]);
          sums[3 * r + 1] = multiply_add(g, distance, sums[3 * r + 1]);
          sums[3 * r + 2] += g;
        }
      }
    }
    block_sums(sums, scratch);
    for (int r = 0; r < R; ++r) {
      scale[r] = 1 / std::sqrt(sums[3 * r] / n + eps);
      mean_gx[r] = sums[3 * r + 1] * scale[r] / n;
      mean_g[r] = in.style.centered ? sums[3 * r + 2] / n : 0;
    }
  }

  // Writes dx, and adds to the sums for dweight and dbias, which may be null.
  __device__ void write(Matrix<T> dx, Update update, float* dweight_sum, float* dbias_sum) const {
    for (Index j = first; j < in.x.cols; j += step) {
      const auto factors = norm_factors<N>(in.weights, offset, j);
      auto dw = dweight_sum ? load<N>(dweight_sum + j) : Floats<N>();
      Floats<N> db;
      for (int r = 0; r < R; ++r) {
        const Index i = begin + r;
        if (i >= end) continue;
        const auto value = load<N>(in.x.row(i) + j), d = load<N>(dy.row(i) + j);
        auto result = update == Update::add ? load<N>(dx.row(i) + j) : Floats<N>();
        for (int k = 0; k < N; ++k) {
          const float normed = (value.x[k] - mean[r]) * scale[r];
          const float g = multiply_add(d.x[k], factors.x[k], -mean_g[r]);
          result.x[k] = multiply_add(scale[r], multiply_add(-normed, mean_gx[r], g), result.x[k]);
          dw.x[k] = multiply_add(d.x[k], normed, dw.x[k]);
          db.x[k] += d.x[k];
        }
        store(dx.row(i) + j, result);  // written last: dx may alias dy or x
      }
      if (dweight_sum) store(dweight_sum + j, dw);
      if (!dbias_sum) continue;
      const auto sum = load<N>(dbias_sum + j);
      for (int k = 0; k < N; ++k) db.x[k] += sum.x[k];
      store(dbias_sum + j, db);
    }
  }
};

// One thread block per kGroup rows. Their sums for dweight and dbias, where wanted, are in shared memory.
template <int N, class T, class W>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_backward_kernel(Matrix<T> dx, NormWeights<float> group_sums, Matrix<const T> dy, NormInput<T, W> in,
                         Update update) {
  const Index n = in.x.cols, first = static_cast<Index>(threadIdx.x) * N, step = static_cast<Index>(blockDim.x) * N;
  const bool with_weight = static_cast<bool>(group_sums.weight), with_bias = static_cast<bool>(group_sums.bias);
  float* memory = shared_memory<float>();
  float* dweight_sum = with_weight ? memory : nullptr;
  float* dbias_sum = with_bias ? memory + (with_weight ? n : 0) : nullptr;
  float* scratch = memory + ((with_weight ? 1 : 0) + (with_bias ? 1 : 0)) * n;
  for (Index j = first; j < n; j += step) {
    if (with_weight) store(dweight_sum + j, Floats<N>());
    if (with_bias) store(dbias_sum + j, Floats<N>());
  }
  const Rows group = piece(blockIdx.x, kGroup, in.x.rows);
  for (Index begin = group.begin; begin < group.end; begin += kRowsAtOnce) {
    NormBackwardRows<N, T, W> rows{in, dy, begin, group.end, first, step, static_cast<float>(in.style.offset)};
    rows.compute_statistics(scratch);
    rows.write(dx, update, dweight_sum, dbias_sum);
  }
  for (Index j = first; j < n; j += step) {
    if (with_weight) store(group_sums.weight.row(blockIdx.x) + j, load<N>(dweight_sum + j));
    if (with_bias) store(group_sums.bias.row(blockIdx.x) + j, load<N>(dbias_sum + j));
  }
}

}  // namespace cuda

template <class T, class W>
void compute_norm(Cuda& dev, Matrix<T> y, const NormInput<T, W>& in) {
  const bool packed = cuda::packable(y, in.x, in.weights.weight, in.weights.bias);
  const auto kernel = packed ? cuda::norm_kernel<cuda::kPack, T, W> : cuda::norm_kernel<1, T, W>;
  const Index blocks = ceil_div(y.rows, cuda::kThreads / cuda::kWarp);
  cuda::launch(dev, kernel, cuda::grid_of(blocks), cuda::kThreads, 0, y, in);
}

template <class T, class W>
void compute_norm_backward(Cuda& dev, Matrix<T> dx, const NormWeights<float>& group_sums, Input<T> dy,
                           const NormInput<T, W>& in, Update update) {
  const Index cols = in.x.cols;
  const bool packed = cuda::packable(dx, group_sums.weight, group_sums.bias, dy, in.x, in.weights.weight);
  const Index pack = !packed ? 1 : cols < cuda::kWarp * cuda::kPack ? 4 : cuda::kPack;  // a head has work for all lanes
  const auto kernel = pack == 1   ? cuda::norm_backward_kernel<1, T, W>
                      : pack == 4 ? cuda::norm_backward_kernel<4, T, W>
                                  : cuda::norm_backward_kernel<cuda::kPack, T, W>;
  const Index threads = least(cuda::kNormThreads, round_up(ceil_div(cols, pack), cuda::kWarp));
  const Index sums = (group_sums.weight ? 1 : 0) + (group_sums.bias ? 1 : 0);
  const Index shared = sums * cols + threads / cuda::kWarp * 3 * cuda::kRowsAtOnce;
  require(shared * sizeof(float) <= 99 << 10, "norm backward: rows of ", cols, " are too wide for a GPU");
  cuda::launch(dev, kernel, cuda::grid_of(ceil_div(in.x.rows, kGroup)), static_cast<int>(threads),
               static_cast<std::size_t>(shared) * sizeof(float), dx, group_sums, dy, in, update);
}

#endif

}  // namespace streambp
