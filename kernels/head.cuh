// The language-model head: log-probs of the targets from a chunk of logits, and the gradient of the logits.
//
//   forward          logp[t] = logits[t][target] - log Σ_v exp(logits[t][v])
//   backward         dlogits[t] = w[t] (onehot(target) - softmax(logits[t])),      w[t] = d loss / d logp[t]
//
// A row without a target (-1) has logp 0 and gradient 0. Where the logits are capped, y = cap tanh(x / cap), the gradient is
// that of x.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/base/row_sums.h"
#include "kernels/token_weights.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

// dlogits lies in the memory of the logits. Without weights there is no gradient.
template <class T>
struct GradientOfLogits {
  Matrix<T> dlogits;
  TokenWeights<Accumulator<T>> weights;
  Accumulator<T> cap = 0;
};

// Writes logp. Overwrites the logits.
template <class Device, class A>
void log_probabilities(Device& dev, Matrix<A> logp, Matrix<A> logits, Matrix<const std::int32_t> targets) {
  log_probabilities_and_gradient(dev, logp, logits, targets, GradientOfLogits<A>{});
}

// Writes logp. Returns the gradient in the type T, which overwrites the logits. cap: of the logits; 0: none.
template <class T, class Device, class A>
Matrix<T> log_probabilities_backward(Device& dev, Matrix<A> logp, Matrix<A> logits, Matrix<const std::int32_t> targets,
                                     const std::type_identity_t<TokenWeights<A>>& w, double cap = 0) {
  require_shape(w, logits.rows);
  const Matrix<T> same_memory(reinterpret_cast<T*>(logits.data), logits.rows, logits.cols,
                              logits.stride * static_cast<Index>(sizeof(A) / sizeof(T)));
  log_probabilities_and_gradient(dev, logp, logits, targets, GradientOfLogits<T>{same_memory, w, static_cast<A>(cap)});
  return same_memory;
}

// Writes logp and the gradient.
template <class Device, class T>
void log_probabilities_and_gradient(Device& dev, Matrix<Accumulator<T>> logp, Matrix<Accumulator<T>> logits,
                                    Matrix<const std::int32_t> targets, const GradientOfLogits<T>& gradient) {
  using A = Accumulator<T>;
  require_shape("head", "log-probs", logp, 1, logits.rows);
  require_shape("head", "targets", targets, 1, logits.rows);
  auto op = dev.operation("softmax", 5.0 * logits.size(), (sizeof(A) + sizeof(T)) * logits.size());
  if constexpr (Device::computes) compute_log_probabilities(dev, logp, logits, targets, gradient);
}

// --- CPU ---

namespace cpu {

// The softmax of a row of logits x is exp(x - maximum) / sum.
template <class A>
struct Softmax {
  A maximum, sum;
  A logp(A x) const { return x - maximum - logarithm(sum); }
};

// Calls keep(j, exp(x[j] - maximum)) for every logit; it may overwrite x[j]. Training and generation both use this
// function, so the log-prob of a sampled token has the same bits in both.
template <class A, class F>
Softmax<A> softmax_of(const A* x, Index n, F&& keep) {
  A maximum = x[0];
#pragma omp simd reduction(max : maximum)
  for (Index j = 0; j < n; ++j) maximum = x[j] > maximum ? x[j] : maximum;
  const A sum = sum_of(n, [=](Index j) {
    const A term = exponential(x[j] - maximum);
    keep(j, term);
    return term;
  });
  return {maximum, sum};
}

// Rounds the n numbers of a row to the type of `to`, in the same memory.
template <class T, class A>
void round_in_place(T* to, const A* from, Index n) {
  if constexpr (!std::is_same_v<T, A>) {
    constexpr Index block = 64;
    for (Index begin = 0; begin < n; begin += block) {
      const auto count = static_cast<std::size_t>(least(block, n - begin));
      A numbers[block];
      T rounded[block];
      std::memcpy(numbers, from + begin, count * sizeof(A));
      for (std::size_t j = 0; j < count; ++j) rounded[j] = numbers[j];
      std::memcpy(to + begin, rounded, count * sizeof(T));
    }
  }
}

}  // namespace cpu

template <class T>
void compute_log_probabilities(Cpu&, Matrix<Accumulator<T>> logp, Matrix<Accumulator<T>> logits,
                               Matrix<const std::int32_t> targets, const GradientOfLogits<T>& gradient) {
  using A = Accumulator<T>;
  const TokenWeights<A>& w = gradient.weights;
  const A cap = gradient.cap;
#pragma omp parallel for schedule(dynamic, 8)
  for (Index i = 0; i < logits.rows; ++i) {
    const std::int32_t target = targets(0, i);
    A* row = logits.row(i);
    if (target < 0) {
      logp(0, i) = 0;
      if (w) std::fill_n(gradient.dlogits.row(i), logits.cols, T(0));
      continue;
    }
    const A target_logit = row[target];
    const auto softmax = cap > 0 ? cpu::softmax_of(row, logits.cols, [](Index, A) {})  // the slope needs the logit
                                 : cpu::softmax_of(row, logits.cols, [=](Index j, A term) { row[j] = term; });
    logp(0, i) = softmax.logp(target_logit);
    if (!w) continue;
    const A weight = w(i, logp(0, i)), factor = -weight / softmax.sum;
    const auto term_of = [=](A logit) { return exponential(logit - softmax.maximum); };
    const A at_target = factor * term_of(target_logit) + weight;
    if (cap > 0) {
#pragma omp simd
      for (Index j = 0; j < logits.cols; ++j) row[j] = factor * term_of(row[j]) * soft_cap_slope(row[j], cap);
      row[target] = at_target * soft_cap_slope(target_logit, cap);
    } else {
#pragma omp simd
      for (Index j = 0; j < logits.cols; ++j) row[j] *= factor;
      row[target] = at_target;
    }
    cpu::round_in_place(gradient.dlogits.row(i), row, logits.cols);
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// Online softmax: the maximum of the logits seen so far, and their Σ exp(x - maximum).
struct Softmax {
  float maximum = -INFINITY, sum = 0;
  __device__ void merge(const Softmax& other) {
    const float larger = other.maximum > maximum ? other.maximum : maximum;
    if (larger == -INFINITY) return;
    sum = sum * exponential(maximum - larger) + other.sum * exponential(other.maximum - larger);
    maximum = larger;
  }
  __device__ float logp(float x) const { return x - maximum - std::log(sum); }
};

// All lanes get the softmax of the warp.
__device__ inline void merge_lanes(Softmax& softmax) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float maximum = __shfl_xor_sync(0xffffffffu, softmax.maximum, distance);
    softmax.merge({maximum, __shfl_xor_sync(0xffffffffu, softmax.sum, distance)});
  }
}

constexpr int kHeadThreads = 1024;
static_assert(kHeadThreads == kWarp * kWarp);

// The softmax of a row, by all threads of a thread block, which may then use their shared memory again.
template <int N>
__device__ Softmax softmax_of(const float* row, Index n) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Softmax softmax;
  for (Index j = static_cast<Index>(threadIdx.x) * N; j < n; j += Index{kHeadThreads} * N) {
    const auto x = load<N>(row + j);
    Softmax pack;
    for (int k = 0; k < N; ++k) pack.maximum = x.x[k] > pack.maximum ? x.x[k] : pack.maximum;
    for (int k = 0; k < N; ++k) pack.sum += exponential(x.x[k] - pack.maximum);
    softmax.merge(pack);
  }
  merge_lanes(softmax);
  auto* warps = shared_memory<Softmax>();
  if (lane == 0) warps[warp] = softmax;
  __syncthreads();
  softmax = warps[lane];  // there are as many warps as lanes in a warp
  __syncthreads();
  merge_lanes(softmax);
  return softmax;
}

// One thread block per row. The first pass reads the row from memory, the second from the cache.
template <int N, class T>
__global__ void __launch_bounds__(kHeadThreads)
    log_probabilities_kernel(Matrix<float> logp, Matrix<float> logits, Matrix<const std::int32_t> targets,
                             GradientOfLogits<T> gradient) {
  const auto& [dlogits, w, cap] = gradient;
  const Index i = blockIdx.x, first = static_cast<Index>(threadIdx.x) * N, step = Index{kHeadThreads} * N;
  const float* row = logits.row(i);
  const std::int32_t target = targets(0, i);
  if (target < 0) {
    if (threadIdx.x == 0) logp(0, i) = 0;
    for (Index j = first; j < logits.cols && w; j += step) store(dlogits.row(i) + j, Floats<N>());
    return;
  }
  const float target_logit = row[target];  // before any thread overwrites it
  const Softmax softmax = softmax_of<N>(row, logits.cols);
  const float row_logp = softmax.logp(target_logit);
  if (threadIdx.x == 0) logp(0, i) = row_logp;
  if (!w) return;
  const float weight = w(i, row_logp), factor = -weight / softmax.sum;
  for (Index begin = 0; begin < logits.cols; begin += step) {
    const Index j = begin + first;
    Floats<N> x;
    if (j < logits.cols) x = load<N>(row + j);
    // A gradient half as wide as the logits overwrites logits of these columns or earlier ones: all threads have read them.
    if constexpr (sizeof(T) < sizeof(float)) __syncthreads();
    for (int k = 0; k < N; ++k) {
      const float slope = cap > 0 ? soft_cap_slope(x.x[k], cap) : 1;
      x.x[k] = (factor * exponential(x.x[k] - softmax.maximum) + (j + k == target ? weight : 0)) * slope;
    }
    if (j < logits.cols) store(dlogits.row(i) + j, x);
  }
}

}  // namespace cuda

template <class T>
void compute_log_probabilities(Cuda& dev, Matrix<float> logp, Matrix<float> logits, Matrix<const std::int32_t> targets,
                               const GradientOfLogits<T>& gradient) {
  const auto kernel = cuda::packable(logits, gradient.dlogits) ? cuda::log_probabilities_kernel<cuda::kPack, T>
                                                               : cuda::log_probabilities_kernel<1, T>;
  cuda::launch(dev, kernel, cuda::grid_of(logits.rows), cuda::kHeadThreads, cuda::kWarp * sizeof(cuda::Softmax), logp,
               logits, targets, gradient);
}

#endif

}  // namespace streambp
