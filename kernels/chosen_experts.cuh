// Experts in 4 bits come near when a row first chooses them: of 128 experts, a generated token uses 8.
#pragma once

#include <initializer_list>

#include "kernels/nf4.cuh"
#include "kernels/routes.cuh"

namespace streambp {

// The weights of all experts, one below the other.
template <class T>
struct ExpertsIn4Bits {
  Matrix<T> weight;
  Nf4 quantised;
};

// Dequantises the experts that the routes use and that are not near yet, and marks them in `near`, a number each. The work
// is counted where a layer is taken, for all experts.
template <class Device, class T>
void bring_near(Device& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                Matrix<std::int32_t> near) {
  require_shape("experts", "marks", near, 1, routes.experts());
  auto op = dev.operation("dequantise", 0, 0);
  if constexpr (Device::computes) compute_bring_near(dev, all, routes, near);
}

// --- CPU ---

template <class T>
void compute_bring_near(Cpu& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                        Matrix<std::int32_t> near) {
  for (Index e = 0; e < near.cols; ++e) {
    if (near(0, e) || routes.begin(0, e) == routes.begin(0, e + 1)) continue;
    near(0, e) = 1;
    for (const auto& [w, q] : all) compute_dequantise(dev, w, q, piece(e, w.size() / near.cols, w.size()));
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class T>
void compute_bring_near(Cuda& dev, std::initializer_list<ExpertsIn4Bits<T>> all, const Routes& routes,
                        Matrix<std::int32_t> near) {
  const Matrix<std::int32_t> begin = routes.begin;
  for (const auto& experts : all) {
    const Matrix<T> w = experts.weight.reshape(experts.weight.size() / near.cols);  // a row each
    const Nf4 q = experts.quantised;
    auto f = [=] __device__(auto n, Index e, Index j) {
      if (near(0, e) || begin(0, e) == begin(0, e + 1)) return;
      cuda::store(w.row(e) + j, cuda::dequantised<n()>(q, e * w.cols + j));
    };
    cuda::for_each_pack(dev, w.rows, w.cols, f, w);
  }
  auto mark = [=] __device__(auto n, Index, Index first) {
    for (Index e = first; e < first + n(); ++e)
      if (begin(0, e) < begin(0, e + 1)) near(0, e) = 1;
  };
  cuda::for_each_pack(dev, 1, near.cols, mark, near);
}

#endif

}  // namespace streambp
