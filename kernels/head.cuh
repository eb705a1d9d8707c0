// The end of the language model: from a chunk of logits to log-probabilities of the targets and back.
//
//   forward          logp[t] = logits[t][target] - log Σ_v exp(logits[t][v])
//   backward         dlogits[t] = w[t] (onehot(target) - softmax(logits[t])),      w[t] = d loss / d logp[t]
//
// The gradient takes the place of the logits. A row without a target (-1) has logp 0 and gradient 0. A weight is known
// beforehand, or follows from the token's own log-probability (TokenWeights), so that one pass over the logits is enough.
#pragma once

#include <cmath>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/token_weights.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

namespace run {

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
void log_probabilities(Cpu&, Matrix<T> logp, Matrix<T> logits, Matrix<const std::int32_t> targets, TokenWeights<T> w) {
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
    const T weight = w(i, row_logp), factor = -weight / sum;
#pragma omp simd
    for (Index j = 0; j < logits.cols; ++j) row[j] *= factor;
    row[target] += weight;
  }
}

#ifdef STREAMBP_CUDA

// The maximum of some logits and the sum of exp(x - maximum), while more of them come.
struct Softmax {
  float maximum = -INFINITY, sum = 0;
  __device__ void merge(const Softmax& other) {
    const float larger = other.maximum > maximum ? other.maximum : maximum;
    if (larger == -INFINITY) return;
    sum = sum * exponential(maximum - larger) + other.sum * exponential(other.maximum - larger);
    maximum = larger;
  }
};

// A block for each row. The row is read from memory once; the second time it comes from the cache.
constexpr int kHeadThreads = 1024;
template <int N, class T>
__global__ void __launch_bounds__(kHeadThreads)
    log_probabilities_kernel(Matrix<float> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                             TokenWeights<float> w) {
  const Index i = blockIdx.x, first = static_cast<Index>(threadIdx.x) * N, step = Index{kHeadThreads} * N;
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  T* row = logits.row(i);
  const std::int32_t target = targets(0, i);
  if (target < 0) {
    if (threadIdx.x == 0) logp(0, i) = 0;
    for (Index j = first; j < logits.cols && w; j += step) cuda::store(row + j, cuda::Floats<N>());
    return;
  }
  Softmax softmax;
  for (Index j = first; j < logits.cols; j += step) {
    const auto x = cuda::load<N>(row + j);
    Softmax pack;
    for (int k = 0; k < N; ++k) pack.maximum = x.x[k] > pack.maximum ? x.x[k] : pack.maximum;
    for (int k = 0; k < N; ++k) pack.sum += exponential(x.x[k] - pack.maximum);
    softmax.merge(pack);
  }
  auto merge_lanes = [&] {
    for (int distance = cuda::kWarp / 2; distance > 0; distance /= 2) {
      const float maximum = __shfl_xor_sync(0xffffffffu, softmax.maximum, distance);
      softmax.merge({maximum, __shfl_xor_sync(0xffffffffu, softmax.sum, distance)});
    }
  };
  merge_lanes();
  auto* warps = cuda::shared_memory<Softmax>();
  if (lane == 0) warps[warp] = softmax;
  __syncthreads();
  softmax = warps[lane];  // kHeadThreads are as many warps as a warp has lanes
  merge_lanes();
  const float target_logit = static_cast<float>(row[target]);
  __syncthreads();  // all have read the target's logit before one overwrites it
  const float row_logp = target_logit - softmax.maximum - std::log(softmax.sum);
  if (threadIdx.x == 0) logp(0, i) = row_logp;
  if (!w) return;
  const float weight = w(i, row_logp), factor = -weight / softmax.sum;
  for (Index j = first; j < logits.cols; j += step) {
    auto x = cuda::load<N>(row + j);
    for (int k = 0; k < N; ++k) {
      x.x[k] = factor * exponential(x.x[k] - softmax.maximum) + (j + k == target ? weight : 0);
    }
    cuda::store(row + j, x);
  }
}
static_assert(kHeadThreads == cuda::kWarp * cuda::kWarp);

template <class T>
void log_probabilities(Cuda& dev, Matrix<float> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                       TokenWeights<float> w) {
  const auto kernel =
      cuda::packable(logits) ? log_probabilities_kernel<cuda::kPack, T> : log_probabilities_kernel<1, T>;
  cuda::launch(dev, kernel, cuda::grid_of(logits.rows), kHeadThreads, cuda::kWarp * sizeof(Softmax), logp, logits,
               targets, w);
}

#endif

}  // namespace run

template <class T, class A>
void require_head_shapes(Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets) {
  require_shape("head", "log-probabilities", logp, 1, logits.rows);
  require_shape("head", "targets", targets, 1, logits.rows);
}

// Writes logp; the logits are overwritten.
template <class Device, class T, class A>
void log_probabilities(Device& dev, Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets) {
  require_head_shapes(logp, logits, targets);
  auto op = dev.operation("softmax", 5.0 * logits.size(), 2.0 * sizeof(T) * logits.size());
  if constexpr (Device::computes) run::log_probabilities(dev, logp, logits, targets, {});
}

// Writes logp, and returns dlogits, in the memory of the logits.
template <class Device, class T, class A>
Matrix<T> log_probabilities_backward(Device& dev, Matrix<A> logp, Matrix<T> logits, Matrix<const std::int32_t> targets,
                                     const std::type_identity_t<TokenWeights<A>>& w) {
  require_head_shapes(logp, logits, targets);
  require_shape(w, logits.rows);
  auto op = dev.operation("softmax", 5.0 * logits.size(), 2.0 * sizeof(T) * logits.size());
  if constexpr (Device::computes) run::log_probabilities(dev, logp, logits, targets, w);
  return logits;
}

}  // namespace streambp
