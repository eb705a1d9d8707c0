// RMSNorm and LayerNorm, over the rows of a matrix. A norm per head is the same thing on a reshaped view.
//
//   μ = mean(x) for LayerNorm, 0 for RMSNorm        r = 1 / sqrt(mean((x - μ)²) + eps)
//
//   forward          x̂ = (x - μ) r          y = x̂ * weight + bias
//   backward         g = dy * weight
//                    dx += r (g - x̂ mean(g * x̂) - mean(g))          the last term for LayerNorm only
//                    dweight += Σ_rows dy * x̂        dbias += Σ_rows dy
//
// The statistics are computed again in the backward pass: cheaper than keeping them. dx is added to because x is the
// residual stream, whose gradient is already there; a norm of heads starts from zero.
#pragma once

#include <cmath>

#include "device.cuh"
#include "elementwise.cuh"
#include "matrix.cuh"

namespace streambp {

namespace cpu {

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
void norm(Matrix<T> y, Input<T> x, Input<T> weight, Input<T> bias, double eps, bool centered) {
#pragma omp parallel for
  for (Index i = 0; i < x.rows; ++i) {
    const auto [mean, scale] = statistics(x.row(i), x.cols, eps, centered);
#pragma omp simd
    for (Index j = 0; j < x.cols; ++j) {
      const T scaled = (x(i, j) - mean) * scale * weight(0, j);
      y(i, j) = bias ? scaled + bias(0, j) : scaled;
    }
  }
}

// Leaves the tile's sums for dweight and dbias in dweight_sum and dbias_sum.
template <class T, class G>
void norm_backward_tile(Matrix<T> dx, Input<T> dy, Input<T> x, Input<T> weight, double eps, bool centered,
                        bool accumulate, G* dweight_sum, G* dbias_sum) {
  std::fill_n(dweight_sum, x.cols, G(0));
  if (dbias_sum) std::fill_n(dbias_sum, x.cols, G(0));
  for (Index i = 0; i < x.rows; ++i) {
    const auto [mean, scale] = statistics(x.row(i), x.cols, eps, centered);
    const T *x_row = x.row(i), *dy_row = dy.row(i), *w = weight.data;
    T* dx_row = dx.row(i);
    double sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
    for (Index j = 0; j < x.cols; ++j) {
      const T g = dy_row[j] * w[j], normed = (x_row[j] - mean) * scale;
      sum_g += static_cast<double>(g);
      sum_gx += static_cast<double>(g * normed);
    }
    const T mean_g = centered ? static_cast<T>(sum_g / static_cast<double>(x.cols)) : T(0);
    const T mean_gx = static_cast<T>(sum_gx / static_cast<double>(x.cols));
#pragma omp simd
    for (Index j = 0; j < x.cols; ++j) {
      const T dy_j = dy_row[j], normed = (x_row[j] - mean) * scale;
      const T d = scale * (dy_j * w[j] - normed * mean_gx - mean_g);
      dweight_sum[j] += dy_j * normed;
      if (dbias_sum) dbias_sum[j] += dy_j;
      dx_row[j] = accumulate ? dx_row[j] + d : d;  // last: dx may be dy or x
    }
  }
}

}  // namespace cpu

template <class Device, class T>
void norm(Device& dev, Matrix<T> y, Input<T> x, Input<T> weight, Input<T> bias, double eps, bool centered) {
  require_shape("norm", "input", x, y.rows, y.cols);
  require_shape("norm", "weight", weight, 1, y.cols);
  auto op = dev.operation("norm", (centered ? 7.0 : 4.0) * x.size(), 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) cpu::norm(y, x, weight, bias, eps, centered);
}

// dx += ..., or dx = ... without `accumulate`; then dx may be dy or x.
template <class Device, class T, class G>
void norm_backward(Device& dev, Matrix<T> dx, Matrix<G> dweight, Matrix<G> dbias, Input<T> dy, Input<T> x,
                   Input<T> weight, double eps, bool centered, bool accumulate = true) {
  require_shape("norm backward", "dy", dy, x.rows, x.cols);
  require_shape("norm backward", "dx", dx, x.rows, x.cols);
  require_shape("norm backward", "dweight", dweight, 1, x.cols);
  auto scope = dev.scope();
  const Index tiles = ceil_div(x.rows, kTile);
  auto dweight_sums = dev.template allocate<G>(tiles, x.cols, Kind::chunk);
  auto dbias_sums = dev.template allocate<G>(dbias ? tiles : 0, x.cols, Kind::chunk);
  auto op = dev.operation("norm backward", (centered ? 17.0 : 13.0) * x.size(),
                          (accumulate ? 4.0 : 3.0) * sizeof(T) * x.size());
  if constexpr (Device::computes) {
#pragma omp parallel for
    for (Index t = 0; t < tiles; ++t) {
      const Rows tile = {t * kTile, std::min(x.rows, (t + 1) * kTile)};
      cpu::norm_backward_tile(dx.slice(tile), dy.slice(tile), x.slice(tile), weight, eps, centered, accumulate,
                              dweight_sums.row(t), dbias ? dbias_sums.row(t) : nullptr);
    }
    cpu::add_tiles(dweight, dweight_sums);
    if (dbias) cpu::add_tiles(dbias, dbias_sums);
  }
}

}  // namespace streambp
