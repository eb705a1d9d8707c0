// Experts in 4 bits are dequantised when a row first chooses them: of 128 experts, a generated token uses 8.
#pragma once

#include <initializer_list>

#include "kernels/four_bits.cuh"
#include "kernels/routes.cuh"

namespace streambp {

// The weights of all experts, one below the other.
template <class T>
struct ExpertsIn4Bits {
  Matrix<T> weight;
  FourBits quantised;
};

// Dequantises the experts that the routes use and that are not ready yet, and marks them in `ready`, a number each. The
// work is counted where a layer is taken, for all experts.
template <class Device, class T>
void dequantise_chosen(Device& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                       Matrix<std::int32_t> ready) {
  require_shape("experts", "marks", ready, 1, routes.experts());
  auto op = dev.operation("dequantise", 0, 0);
  if constexpr (Device::computes) compute_dequantise_chosen(dev, all, routes, ready);
}

// --- CPU ---

template <class T>
void compute_dequantise_chosen(Cpu& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                               Matrix<std::int32_t> ready) {
  for (Index e = 0; e < ready.cols; ++e) {
    if (ready(0, e) || routes.begin(0, e) == routes.begin(0, e + 1)) continue;
    ready(0, e) = 1;
    for (const auto& [w, q] : all) compute_dequantise(dev, w, q, piece(e, w.size() / ready.cols, w.size()));
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// Thread blocks per expert. Those of experts that need no work return at once.
constexpr Index kBlocksOfExpert = 64;

template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    dequantise_chosen_kernel(Matrix<T> experts, FourBits q, Matrix<const std::int32_t> begin,
                             Matrix<const std::int32_t> ready) {
  const Index e = blockIdx.y, step = static_cast<Index>(gridDim.x) * kThreads * N;
  if (ready(0, e) || begin(0, e) == begin(0, e + 1)) return;
  for (Index j = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) * N; j < experts.cols; j += step)
    store(experts.row(e) + j, dequantised<N>(q, e * experts.cols + j));
}

}  // namespace cuda

template <class T>
void compute_dequantise_chosen(Cuda& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                               Matrix<std::int32_t> ready) {
  const Matrix<std::int32_t> begin = routes.begin;
  for (const auto& [weight, q] : all) {
    const Matrix<T> experts = weight.reshape(weight.size() / ready.cols);  // a row each
    const bool packs = experts.cols % cuda::kPack == 0 && cuda::packable(experts);
    const Index blocks = ceil_div(experts.cols, (packs ? cuda::kPack : 1) * cuda::kThreads);
    cuda::launch(dev, packs ? cuda::dequantise_chosen_kernel<cuda::kPack, T> : cuda::dequantise_chosen_kernel<1, T>,
                 cuda::grid_of(least(blocks, cuda::kBlocksOfExpert), ready.cols), cuda::kThreads, 0, experts, q, begin,
                 ready);
  }
  auto mark = [=] __device__(auto n, Index, Index first) {
    for (Index e = first; e < first + n(); ++e)
      if (begin(0, e) < begin(0, e + 1)) ready(0, e) = 1;
  };
  cuda::for_each_pack(dev, 1, ready.cols, mark, ready);
}

#endif

}  // namespace streambp
