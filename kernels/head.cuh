// The language-model head: log-probs of the targets from a chunk of logits, and the gradient of the logits.
//
//   forward          logp[t] = logits[t][target] - log Σ_v exp(logits[t][v])
//   backward         dlogits[t] = w[t] (onehot(target) - softmax(logits[t])),      w[t] = d loss / d logp[t]
//
// A row without a target (-1) has logp 0 and gradient 0. Where the logits are capped, y = cap tanh(x / cap), the gradient is
// that of x.
#pragma once

#include <cmath>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/base/row_sums.h"
#include "kernels/token_weights.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

// Writes logp. Overwrites the logits.
template <class Device, class T, class A>
void log_probabilities(Device& dev, Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets) {
  log_probabilities_and_gradient(dev, logp, logits, targets, TokenWeights<A>{});
}

// Writes logp. The gradient overwrites the logits. It is returned under a new name. cap: of the logits; 0: none.
template <class Device, class T, class A>
Matrix<T> log_probabilities_backward(Device& dev, Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                                     const std::type_identity_t<TokenWeights<A>>& w, double cap = 0) {
  require_shape(w, logits.rows);
  log_probabilities_and_gradient(dev, logp, logits, targets, w, static_cast<A>(cap));
  return logits;
}

// Writes logp and, with weights, the gradient.
template <class Device, class T, class A>
void log_probabilities_and_gradient(Device& dev, Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                                    const TokenWeights<A>& w, A cap = 0) {
  require_shape("head", "log-probs", logp, 1, logits.rows);
  require_shape("head", "targets", targets, 1, logits.rows);
  auto op = dev.operation("softmax", 5.0 * logits.size(), 2.0 * sizeof(T) * logits.size());
  if constexpr (Device::computes) compute_log_probabilities(dev, logp, logits, targets, w, cap);
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
template <class T, class F>
Softmax<Accumulator<T>> softmax_of(const T* x, Index n, F&& keep) {
  using A = Accumulator<T>;
  A maximum = static_cast<A>(x[0]);
#pragma omp simd reduction(max : maximum)
  for (Index j = 0; j < n; ++j) maximum = static_cast<A>(x[j]) > maximum ? static_cast<A>(x[j]) : maximum;
  const A sum = sum_of(n, [=](Index j) {
    const A term = exponential(static_cast<A>(x[j]) - maximum);
    keep(j, term);
    return term;
  });
  return {maximum, sum};
}

}  // namespace cpu

template <class T>
void compute_log_probabilities(Cpu&, Matrix<Accumulator<T>> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                               const TokenWeights<Accumulator<T>>& w, Accumulator<T> cap) {
  using A = Accumulator<T>;
  const auto keep_nothing = [](Index, A) {};
#pragma omp parallel for schedule(dynamic, 8)
  for (Index i = 0; i < logits.rows; ++i) {
    const std::int32_t target = targets(0, i);
    T* row = logits.row(i);
    if (target < 0) {
      logp(0, i) = 0;
      if (w) std::fill_n(row, logits.cols, T(0));
      continue;
    }
    const A target_logit = row[target];
    constexpr bool keeps_terms = std::is_same_v<T, A>;  // bfloat16 would round them
    const auto keep_term = [=](Index j, A term) {
      if constexpr (keeps_terms) row[j] = term;
    };
    const auto softmax = cap > 0 ? cpu::softmax_of(row, logits.cols, keep_nothing)  // the slope needs the logit
                                 : cpu::softmax_of(row, logits.cols, keep_term);
    logp(0, i) = softmax.logp(target_logit);
    if (!w) continue;
    const A weight = w(i, logp(0, i)), factor = -weight / softmax.sum;
    const auto term_of = [=](A logit) { return exponential(logit - softmax.maximum); };
    const A at_target = factor * term_of(target_logit) + weight;
    if (cap > 0) {
#pragma omp simd
      for (Index j = 0; j < logits.cols; ++j) row[j] = factor * term_of(A(row[j])) * soft_cap_slope(A(row[j]), cap);
      row[target] = at_target * soft_cap_slope(target_logit, cap);
    } else {
#pragma omp simd
      for (Index j = 0; j < logits.cols; ++j) row[j] = factor * (keeps_terms ? A(row[j]) : term_of(A(row[j])));
      row[target] = at_target;
    }
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

// The softmax of a row, by all threads of a block, which may then use their shared memory again.
template <int N, class T>
__device__ Softmax softmax_of(const T* row, Index n) {
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
  softmax = warps[lane];  // the number of warps in a block equals the number of lanes in a warp
  __syncthreads();
  merge_lanes(softmax);
  return softmax;
}

// One block per row. The first pass reads the row from memory, the second from the cache.
template <int N, class T>
__global__ void __launch_bounds__(kHeadThreads)
    log_probabilities_kernel(Matrix<float> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                             TokenWeights<float> w, float cap) {
  const Index i = blockIdx.x, first = static_cast<Index>(threadIdx.x) * N, step = Index{kHeadThreads} * N;
  T* row = logits.row(i);
  const std::int32_t target = targets(0, i);
  if (target < 0) {
    if (threadIdx.x == 0) logp(0, i) = 0;
    for (Index j = first; j < logits.cols && w; j += step) store(row + j, Floats<N>());
    return;
  }
  const float target_logit = static_cast<float>(row[target]);  // before any thread overwrites it
  const Softmax softmax = softmax_of<N>(row, logits.cols);
  const float row_logp = softmax.logp(target_logit);
  if (threadIdx.x == 0) logp(0, i) = row_logp;
  if (!w) return;
  const float weight = w(i, row_logp), factor = -weight / softmax.sum;
  for (Index j = first; j < logits.cols; j += step) {
    auto x = load<N>(row + j);
    for (int k = 0; k < N; ++k) {
      const float slope = cap > 0 ? soft_cap_slope(x.x[k], cap) : 1;
      x.x[k] = (factor * exponential(x.x[k] - softmax.maximum) + (j + k == target ? weight : 0)) * slope;
    }
    store(row + j, x);
  }
}

}  // namespace cuda

template <class T>
void compute_log_probabilities(Cuda& dev, Matrix<float> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                               const TokenWeights<float>& w, float cap) {
  const auto kernel =
      cuda::packable(logits) ? cuda::log_probabilities_kernel<cuda::kPack, T> : cuda::log_probabilities_kernel<1, T>;
  cuda::launch(dev, kernel, cuda::grid_of(logits.rows), cuda::kHeadThreads, cuda::kWarp * sizeof(cuda::Softmax), logp,
               logits, targets, w, cap);
}

#endif

}  // namespace streambp
