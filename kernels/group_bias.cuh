// The biases of experts' linear layers, for rows that are sorted by expert: one row, with those of all experts side by side.
//
//   forward          y[p] += bias_e               of each place p, where e is its expert
//   backward         dbias_e += Σ dy[p]           tile by tile of the stream, the last tile first, as dw (grouped_matmul.cuh)
//
// The bias of an output that combine (routes.cuh) multiplies by weights takes part in their gradient. With dy gathered, and
// p = place[i][j]:
//
//   dweight[i][j] += dy[p] · bias_e               dy[p] = weight[i][j] dy[p]
#pragma once

#include "kernels/routes.cuh"

namespace streambp {

template <class Device, class T>
void add_group_bias(Device& dev, Matrix<T> y, Input<T> bias, const Routes& routes) {
  require_shape("group bias", "output", y, routes.size(), y.cols);
  require_shape("group bias", "bias", bias, 1, routes.experts() * y.cols);
  auto op = dev.operation("group bias", 1.0 * y.size(), 2.0 * sizeof(T) * y.size());
  if constexpr (Device::computes) compute_add_group_bias(dev, y, bias, routes);
}

// dbias: in one or several lanes; empty: the bias is frozen.
template <class Device, class T>
void group_bias_backward(Device& dev, Matrix<Accumulator<T>> dbias, Input<T> dy, const Routes& routes) {
  if (!dbias) return;
  require_shape("group bias backward", "dy", dy, routes.size(), dy.cols);
  require_shape("group bias backward", "dbias", dbias, dbias.rows, routes.experts() * dy.cols);
  auto op = dev.operation("group bias backward", 1.0 * dy.size(), sizeof(T) * dy.size());
  if constexpr (Device::computes) compute_group_bias_backward<T>(dev, dbias, dy, routes);
}

// Of the output. Adds to dweights, and overwrites dy with its product with the weights.
template <class Device, class T>
void weighted_bias_backward(Device& dev, Matrix<Accumulator<T>> dweights, Matrix<T> dy, Input<T> bias,
                            Input<Accumulator<T>> weights, const Routes& routes) {
  require_shape("weighted bias backward", "dweights", dweights, weights.rows, weights.cols);
  require_shape("weighted bias backward", "bias", bias, 1, routes.experts() * dy.cols);
  auto op = dev.operation("weighted bias backward", 3.0 * dy.size(), 2.0 * sizeof(T) * dy.size());
  if constexpr (Device::computes) compute_weighted_bias_backward(dev, dweights, dy, bias, weights, routes);
}

// --- CPU ---

template <class T>
void compute_add_group_bias(Cpu&, Matrix<T> y, Input<T> bias, const Routes& routes) {
  using A = Accumulator<T>;
#pragma omp parallel for if (y.size() > kWorthThreads)
  for (Index p = 0; p < y.rows; ++p) {
    const T* b = bias.data + routes.expert_of(p) * y.cols;
    T* row = y.row(p);
    for (Index j = 0; j < y.cols; ++j) row[j] = A(row[j]) + A(b[j]);
  }
}

template <class T>
void compute_group_bias_backward(Cpu& dev, Matrix<Accumulator<T>> dbias, Input<T> dy, const Routes& routes) {
  constexpr Index width = 256;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (Index e = 0; e < routes.experts(); ++e) {
    for (Index block = 0; block < ceil_div(dy.cols, width); ++block) {
      const Rows cols = piece(block, width, dy.cols);
      Accumulator<T> sums[width] = {};
      for (Index p = routes.begin(0, e + 1) - 1, first = routes.begin(0, e); p >= first; --p) {
        const T* row = dy.row(p) + cols.begin;
        for (Index j = 0; j < cols.size(); ++j) sums[j] += row[j];
        const Index tile = routes.source(0, p) / kTile;
        if (p > first && routes.source(0, p - 1) / kTile == tile) continue;
        Accumulator<T>* out = dbias.row(tile * kTile / dev.tile % dbias.rows) + e * dy.cols + cols.begin;
        for (Index j = 0; j < cols.size(); ++j) out[j] += sums[j], sums[j] = 0;
      }
    }
  }
}

template <class T>
void compute_weighted_bias_backward(Cpu&, Matrix<Accumulator<T>> dweights, Matrix<T> dy, Input<T> bias,
                                    Input<Accumulator<T>> weights, const Routes& routes) {
  using A = Accumulator<T>;
#pragma omp parallel for
  for (Index i = 0; i < weights.rows; ++i) {
    for (Index j = 0; j < weights.cols; ++j) {
      T* row = dy.row(routes.place(i, j));
      const T* b = bias.data + routes.chosen(i, j) * dy.cols;
      const A weight = weights(i, j);
      dweights(i, j) += cpu::sum_of(dy.cols, [=](Index c) { return A(row[c]) * A(b[c]); });
      for (Index c = 0; c < dy.cols; ++c) row[c] = weight * A(row[c]);
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// A warp for each row and expert.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weighted_bias_kernel(Matrix<float> dweights, Matrix<T> dy, Matrix<const T> bias, Matrix<const float> weights,
                         Routes routes) {
  const Index n = static_cast<Index>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (n >= routes.size()) return;
  const Index i = n / weights.cols, j = n % weights.cols;
  T* row = dy.row(routes.place.data[n]);
  const T* b = bias.data + routes.chosen.data[n] * dy.cols;
  const float weight = weights(i, j);
  float sum = 0;
  for (Index c = threadIdx.x % kWarp; c < dy.cols; c += kWarp) {
    const float x = static_cast<float>(row[c]);
    sum = multiply_add(x, static_cast<float>(b[c]), sum);
    row[c] = weight * x;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) dweights(i, j) += sum;
}

}  // namespace cuda

template <class T>
void compute_add_group_bias(Cuda& dev, Matrix<T> y, Input<T> bias, const Routes& routes) {
  auto f = [=] __device__(auto n, Index p, Index j) {
    auto sum = cuda::load<n()>(y.row(p) + j);
    const auto b = cuda::load<n()>(bias.data + routes.expert_of(p) * y.cols + j);
    for (int k = 0; k < n(); ++k) sum.x[k] += b.x[k];
    cuda::store(y.row(p) + j, sum);
  };
  cuda::for_each_pack(dev, y.rows, y.cols, f, y, bias);
}

template <class T>
void compute_group_bias_backward(Cuda& dev, Matrix<float> dbias, Input<T> dy, const Routes& routes) {
  const Index tile = dev.tile;
  cuda::for_each_column(dev, routes.experts(), dy.cols, [=] __device__(Index e, Index j) {
    float sum = 0;
    for (Index p = routes.begin(0, e + 1) - 1, first = routes.begin(0, e); p >= first; --p) {
      const Index of = routes.source(0, p) / tile;
      sum += static_cast<float>(dy(p, j));
      if (p > first && routes.source(0, p - 1) / tile == of) continue;
      dbias(of % dbias.rows, e * dy.cols + j) += sum;
      sum = 0;
    }
  });
}

template <class T>
void compute_weighted_bias_backward(Cuda& dev, Matrix<float> dweights, Matrix<T> dy, Input<T> bias,
                                    Input<float> weights, const Routes& routes) {
  cuda::launch(dev, cuda::weighted_bias_kernel<T>, cuda::grid_of(ceil_div(routes.size(), cuda::kThreads / cuda::kWarp)),
               cuda::kThreads, 0, dweights, dy, bias, weights, routes);
}

#endif

}  // namespace streambp
