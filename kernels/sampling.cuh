// Sampling: a token for each row of logits, and its log-prob. What is sampled from: cpu_sampling.h.
//
// The random number of a row is a pure function of the seed, the number of its completion and the length of its text. So
// a token depends neither on the rows beside it nor on the order in which completions are sampled.
#pragma once

#include <bit>

#include "kernels/base/device.cuh"
#include "kernels/cpu_sampling.h"

namespace streambp {

// Of each row.
struct DrawIndex {
  Matrix<const std::int32_t> completions, lengths;

  constexpr double uniform(std::uint64_t seed, Index row) const {
    return Random(seed, static_cast<std::uint64_t>(completions(0, row)))
        .uniform(static_cast<std::uint64_t>(lengths(0, row)));
  }
};

// Writes a draw for each row; in a row with a logit that is not finite, Draw::of_bad_logit.
template <class Device, class A>
void sample(Device& dev, Matrix<Draw> draws, Matrix<A> logits, const DrawIndex& index, const Sampling& s) {
  require_shape("sampling", "draws", draws, 1, logits.rows);
  require_shape("sampling", "completions", index.completions, 1, logits.rows);
  require_shape("sampling", "lengths", index.lengths, 1, logits.rows);
  auto op = dev.operation("sampling", 0, sizeof(A) * static_cast<double>(logits.size()));
  if constexpr (Device::computes) compute_sample(dev, draws, logits, index, s);
}

// --- CPU ---

template <class A>
void compute_sample(Cpu&, Matrix<Draw> draws, Matrix<A> logits, const DrawIndex& index, const Sampling& s) {
#pragma omp parallel for if (logits.rows > 1)
  for (Index i = 0; i < logits.rows; ++i) {
    draws(0, i) =
        draw(std::span<const A>(logits.row(i), static_cast<std::size_t>(logits.cols)), s, index.uniform(s.seed, i));
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// A number for each token of a row: its token id, or how likely it is. Both are ordered so that the tokens that count first
// have the larger numbers: those with smaller ids; those that are more likely, and of equally likely ones the smaller.
struct TokenOrder {
  static constexpr int logit_bits = 32;
  int id_bits;

  // Only on the host: nvcc compiles the functions of <bit> for the GPU without a warning, but to nothing.
  explicit TokenOrder(const Matrix<float>& logits)
      : id_bits(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(logits.cols)))) {}

  __device__ std::uint64_t by_id(Index id) const { return (std::uint64_t{1} << id_bits) - 1 - id; }
  __device__ Index id(std::uint64_t number) const { return static_cast<Index>(by_id(0) - number); }
  __device__ std::uint64_t by_logit(float x, Index id) const {
    const auto bits = std::bit_cast<std::uint32_t>(x == 0 ? 0.0f : x);  // -0 equals 0
    const std::uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<std::uint64_t>(ordered) << id_bits | by_id(id);
  }
};

// A row of logits, read by all threads of a thread block.
template <int N>
struct LogitsOfRow {
  const float* x;
  Index n;

  // Σ f(logit, id) over all tokens, in a fixed order. A thread adds few numbers, so float32 is enough for it, and much
  // faster than float64 on a GeForce.
  template <class F>
  __device__ double total(F&& f) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float own = 0;
    for (Index j = static_cast<Index>(threadIdx.x) * N; j < n; j += Index{kHeadThreads} * N) {
      const auto pack = load<N>(x + j);
      for (int k = 0; k < N; ++k) own += f(pack.x[k], j + k);
    }
    double sum = warp_sum(static_cast<double>(own));
    auto* warps = shared_memory<double>();
    if (lane == 0) warps[warp] = sum;
    __syncthreads();
    sum = warps[lane];
    __syncthreads();
    return warp_sum(sum);
  }

  // The first token, in the order of falling numbers, at which Σ mass reaches `wanted`. Returns its number. Found bit by
  // bit: a bit is set if the tokens with this number or a larger one have enough mass.
  template <class Number, class Mass>
  __device__ std::uint64_t quantile(double wanted, int bits, Number&& number, Mass&& mass) const {
    std::uint64_t found = 0;
    for (int bit = bits - 1; bit >= 0; --bit) {
      const std::uint64_t next = found | std::uint64_t{1} << bit;
      const auto mass_from_next = [&](float x, Index id) { return number(x, id) >= next ? mass(x, id) : 0.0f; };
      if (total(mass_from_next) >= wanted) found = next;
    }
    return found;
  }
};

// One thread block per row.
template <int N>
__global__ void __launch_bounds__(kHeadThreads)
    sample_kernel(Matrix<Draw> draws, Matrix<float> logits, TokenOrder order, DrawIndex index, Sampling s) {
  const Index i = blockIdx.x;
  const LogitsOfRow<N> row{logits.row(i), logits.cols};
  const auto by_id = [&](float, Index id) { return order.by_id(id); };
  const auto by_logit = [&](float x, Index id) { return order.by_logit(x, id); };
  const auto finish = [&](const Draw& draw) {
    if (threadIdx.x == 0) draws(0, i) = draw;
  };

  const auto bad = [](float x, Index) { return std::isfinite(x) ? 0.0f : 1.0f; };
  if (row.total(bad) > 0) {
    const Index id = order.id(row.quantile(1, order.id_bits, by_id, bad));
    return finish(Draw::of_bad_logit(id, row.x[id]));
  }
  const Softmax softmax = softmax_of<N>(row.x, row.n);
  const auto sharpness = static_cast<float>(1 / (s.temperature > 1e-30 ? s.temperature : 1e-30));
  std::uint64_t last = 0;  // the number of the least likely token that is kept
  const auto weight = [&](float x, Index id) {
    return order.by_logit(x, id) < last ? 0.0f : exponential((x - softmax.maximum) * sharpness);
  };
  const int bits = order.logit_bits + order.id_bits;
  const auto one = [](float, Index) { return 1.0f; };
  const auto take = [&](Index id) { finish({id, static_cast<double>(softmax.logp(row.x[id]))}); };
  if (s.temperature == 0) return take(order.id(row.quantile(1, bits, by_logit, one) & order.by_id(0)));
  if (s.top_k > 0) last = row.quantile(static_cast<double>(s.top_k), bits, by_logit, one);
  if (s.top_p < 1) last = row.quantile(s.top_p * row.total(weight), bits, by_logit, weight);
  const double wanted = index.uniform(s.seed, i) * row.total(weight);
  take(order.id(row.quantile(wanted, order.id_bits, by_id, weight)));
}

}  // namespace cuda

inline void compute_sample(Cuda& dev, Matrix<Draw> draws, Matrix<float> logits, const DrawIndex& index,
                           const Sampling& s) {
  const auto kernel = cuda::packable(logits) ? cuda::sample_kernel<cuda::kPack> : cuda::sample_kernel<1>;
  cuda::launch(dev, kernel, cuda::grid_of(logits.rows), cuda::kHeadThreads, cuda::kWarp * sizeof(double), draws, logits,
               cuda::TokenOrder(logits), index, s);
}

#endif

}  // namespace streambp
