// How the rows of a stream use the experts, and what the loss that balances this use adds to the gradient of router logits.
//
//   loss = coefficient E Σ_e F_e P_e
//   F_e    rows that choose expert e, in all layers, divided by the number of rows and layers
//   P_e    the mean of the router's probabilities p = softmax(x) over them
//
// The choice is a constant for backward. With slope_e = coefficient E F_e / (rows and layers):  dx_e += p_e (slope_e - Σ p slope)
//
// Sums are integers (kernels/routing_counts.h).
#pragma once

#include "kernels/router.cuh"
#include "kernels/routes.cuh"
#include "kernels/routing_counts.h"

namespace streambp {

// For a chunk of a layer.
template <class A>
struct ExpertUse {
  Matrix<std::int64_t> sums = {};  // for each expert its rows, then its probabilities, added to; empty: no counting
  Matrix<const A> counted = {};    // 1 for each row that counts, 0 for others; empty: all count
  Matrix<const A> slopes = {};     // of each expert; empty: no gradient

  STREAMBP_INLINE bool counts(Index row) const { return counted.empty() || counted(0, row) != 0; }
};

// The router's probabilities of a row: a softmax over all experts, also where weights are divided by another sum.
template <class A>
struct RowProbabilities {
  RouterRow<A> row;
  A divisor;

  STREAMBP_INLINE RowProbabilities(Matrix<const A> logits, Index i)
      : row({logits, {}, {}}, i), divisor(row.divisor(nullptr, 0)) {}
  STREAMBP_INLINE A operator()(Index e) const { return row.value(e) / divisor; }
};

template <class A>
struct ProbabilitiesOfRow {
  Matrix<A> p;
  Matrix<const A> logits;
  STREAMBP_INLINE void operator()(Index i) const {
    const RowProbabilities<A> row(logits, i);
    for (Index e = 0; e < logits.cols; ++e) p(i, e) = row(e);
  }
};

template <class A>
struct BalanceRow {
  Matrix<A> dlogits;
  Matrix<const A> logits;
  ExpertUse<A> use;
  STREAMBP_INLINE void operator()(Index i) const {
    if (!use.counts(i)) return;
    const RowProbabilities<A> p(logits, i);
    A mean = 0;
    for (Index e = 0; e < logits.cols; ++e) mean += p(e) * use.slopes(0, e);
    for (Index e = 0; e < logits.cols; ++e) dlogits(i, e) += p(e) * (use.slopes(0, e) - mean);
  }
};

// Adds the use of an expert to the sums: `step` threads take rows in turn, and add() adds up theirs.
template <class A, class F>
STREAMBP_INLINE void add_use(const ExpertUse<A>& use, const Routes& routes, Matrix<const A> p, Index expert,
                             Index thread, Index step, F&& add) {
  std::int64_t rows = 0, units = 0;
  for (Index at = routes.begin(0, expert) + thread; at < routes.begin(0, expert + 1); at += step)
    rows += use.counts(routes.source(0, at));
  for (Index i = thread; i < p.rows; i += step)
    if (use.counts(i)) units += static_cast<std::int64_t>(static_cast<double>(p(i, expert)) * kProbabilityUnits + 0.5);
  add(use.sums(0, expert), rows), add(use.sums(0, routes.experts() + expert), units);
}

template <class Device, class A>
void count_use(Device& dev, const ExpertUse<A>& use, const Routes& routes,
               Matrix<const std::type_identity_t<A>> logits) {
  auto scope = dev.scope();
  const auto p = allocate<A>(dev, logits.rows, logits.cols, Kind::chunk);
  auto op = dev.operation("count experts", 4.0 * p.size(), 3.0 * sizeof(A) * p.size());
  if constexpr (Device::computes) {
    compute_rows(dev, p.rows, ProbabilitiesOfRow<A>{p, logits});
    compute_use(dev, use, routes, Matrix<const A>(p));
  }
}

template <class Device, class A>
void balance_backward(Device& dev, Matrix<A> dlogits, Matrix<const std::type_identity_t<A>> logits,
                      const std::type_identity_t<ExpertUse<A>>& use) {
  auto op = dev.operation("balance backward", 8.0 * logits.size(), 3.0 * sizeof(A) * logits.size());
  if constexpr (Device::computes) compute_rows(dev, logits.rows, BalanceRow<A>{dlogits, logits, use});
}

template <class A>
void compute_use(Cpu&, const ExpertUse<A>& use, const Routes& routes, Matrix<const A> p) {
#pragma omp parallel for
  for (Index e = 0; e < p.cols; ++e)
    add_use(use, routes, p, e, 0, 1, [](std::int64_t& sum, std::int64_t mine) { sum += mine; });
}

#ifdef STREAMBP_CUDA

namespace cuda {

// A warp for each expert.
template <class A>
__global__ void __launch_bounds__(kWarp) use_kernel(ExpertUse<A> use, Routes routes, Matrix<const A> p) {
  add_use(use, routes, p, blockIdx.x, threadIdx.x, kWarp, [](std::int64_t& sum, std::int64_t mine) {
    mine = warp_sum(mine);
    if (threadIdx.x == 0) sum += mine;
  });
}

}  // namespace cuda

template <class A>
void compute_use(Cuda& dev, const ExpertUse<A>& use, const Routes& routes, Matrix<const A> p) {
  cuda::launch(dev, cuda::use_kernel<A>, cuda::grid_of(p.cols), cuda::kWarp, 0, use, routes, p);
}

#endif

}  // namespace streambp
