// Quantised experts are dequantised when a row first chooses them: of 128 experts, a generated token uses 8.
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
    for (const auto& [w, q] : all) {
      const Rows rows = piece(e, w.rows / ready.cols, w.rows);
      if (q.blocks) compute_dequantise<T>(dev, w.slice(rows), q.blocks.slice(rows), {});
      if (q.codes) compute_dequantise(dev, w, q, {rows.begin * w.cols, rows.end * w.cols});
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// Thread blocks per expert. Those of experts that need no work return at once.
constexpr Index kBlocksOfExpert = 64;

// Q: FourBits, or Blocks.
template <int N, class T, class Q>
__global__ void __launch_bounds__(kThreads)
    dequantise_chosen_kernel(Matrix<T> experts, Index width, Q q, Matrix<const std::int32_t> begin,
                             Matrix<const std::int32_t> ready) {
  const Index e = blockIdx.y, step = static_cast<Index>(gridDim.x) * kThreads * N;
  if (ready(0, e) || begin(0, e) == begin(0, e + 1)) return;
  for (Index j = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) * N; j < experts.cols; j += step) {
    const Index at = e * experts.cols + j;
    if constexpr (std::is_same_v<Q, Blocks>) {
      const Index column = at % width;
      store(experts.row(e) + j - column + q.columns.original(column),
            dequantised<N>(q, size_of_block(q.type), at / width, column));
    } else {
      store(experts.row(e) + j, dequantised<N>(q, at));
    }
  }
}

}  // namespace cuda

template <class T>
void compute_dequantise_chosen(Cuda& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                               Matrix<std::int32_t> ready) {
  const Matrix<std::int32_t> begin = routes.begin;
  for (const auto& [weight, q] : all) {
    const Matrix<T> experts = weight.reshape(weight.size() / ready.cols);  // a row each
    const bool packs = weight.cols % cuda::kPack == 0 && cuda::packable(experts);
    const Index width = weight.cols, blocks = ceil_div(experts.cols, (packs ? cuda::kPack : 1) * cuda::kThreads);
    const auto dequantise = [&]<class Q>(const Q& q) {
      constexpr auto in_packs = cuda::dequantise_chosen_kernel<cuda::kPack, T, Q>;
      cuda::launch(dev, packs ? in_packs : cuda::dequantise_chosen_kernel<1, T, Q>,
                   cuda::grid_of(least(blocks, cuda::kBlocksOfExpert), ready.cols), cuda::kThreads, 0, experts, width,
                   q, begin, ready);
    };
    if (q.blocks) dequantise(q.blocks);
    if (q.codes) dequantise(q);
  }
  auto mark = [=] __device__(auto n, Index, Index first) {
    for (Index e = first; e < first + n(); ++e)
      if (begin(0, e) < begin(0, e + 1)) ready(0, e) = 1;
  };
  cuda::for_each_pack(dev, 1, ready.cols, mark, ready);
}

#endif

}  // namespace streambp
