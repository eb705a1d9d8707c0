// The end of the language model: from a chunk of logits to log-probabilities of the targets and back.
//
//   forward          logp[t] = logits[t][target] - log Σ_v exp(logits[t][v])
//   backward         dlogits[t] = w[t] (onehot(target) - softmax(logits[t])),      w[t] = d loss / d logp[t]
//
// The gradient takes the place of the logits. A row without a target (-1) has logp 0 and gradient 0.
#pragma once

#include <cmath>

#include "device.cuh"
#include "math.cuh"
#include "matrix.cuh"

namespace streambp {

namespace cpu {

// Leaves exp(x - max) in the row and returns {logp of the target, Σ exp(x - max)}.
template <class T>
std::pair<T, T> softmax_row(T* x, Index n, std::int32_t target) {
  T maximum = x[0], sum = 0;
#pragma omp simd reduction(max : maximum)
  for (Index j = 0; j < n; ++j) maximum = x[j] > maximum ? x[j] : maximum;
  const T shifted_target = x[target] - maximum;
#pragma omp simd reduction(+ : sum)
  for (Index j = 0; j < n; ++j) {
    x[j] = exponential(x[j] - maximum);
    sum += x[j];
  }
  return {shifted_target - std::log(sum), sum};
}

template <class T>
void log_probabilities(Matrix<T> logp, Matrix<T> logits, Matrix<const std::int32_t> targets, Input<T> w) {
#pragma omp parallel for schedule(dynamic, 8)
  for (Index i = 0; i < logits.rows; ++i) {
    const std::int32_t target = targets(0, i);
    T* row = logits.row(i);
    if (target < 0) {
      logp(0, i) = 0;
      if (w) std::fill_n(row, logits.cols, T(0));
      continue;
    }
    const auto [row_logp, sum] = softmax_row(row, logits.cols, target);
    logp(0, i) = row_logp;
    if (!w) continue;
    const T factor = -w(0, i) / sum;
#pragma omp simd
    for (Index j = 0; j < logits.cols; ++j) row[j] *= factor;
    row[target] += w(0, i);
  }
}

}  // namespace cpu

// Writes logp. With weights w the logits become dlogits; without, they are left in pieces.
template <class Device, class T, class A>
void log_probabilities(Device& dev, Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                       Input<A> w = {}) {
  require_shape("head", "log-probabilities", logp, 1, logits.rows);
  require_shape("head", "targets", targets, 1, logits.rows);
  if (w) require_shape("head", "weights", w, 1, logits.rows);
  auto op = dev.operation("softmax", 5.0 * logits.size(), 2.0 * sizeof(T) * logits.size());
  if constexpr (Device::computes) cpu::log_probabilities(logp, logits, targets, w);
}

}  // namespace streambp
