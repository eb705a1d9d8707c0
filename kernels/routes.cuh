// The rows of a chunk, sorted by the experts that they are routed to.
//
//   gather            packed[p] = x[source[p]]
//   combine           y[i] = residual[i] + Σ_j weight[i][j] packed[place[i][j]]
//
//   gather backward   dx[i] = Σ_j dpacked[place[i][j]]: combine, with weights of 1
//   combine backward  If packed[p] = W a[p], and dy was gathered, da = dyᵀ W does not have the weights yet. With p = place[i][j]:
//                     dweight[i][j] = da[p] · a[p]       da[p] = weight[i][j] da[p]       a[p] = weight[i][j] a[p]
//                     then dW = dyᵀ a. So nobody needs `packed` again, which is wider than a.
//
// An expert's rows keep their order. Sums over j begin with the expert that has the lowest number.
#pragma once

#include "kernels/elementwise.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

struct Routes {
  Matrix<std::int32_t> chosen;  // the experts of each row, in ascending order
  Matrix<std::int32_t> place;   // where they have this row
  Matrix<std::int32_t> source;  // of each place: its row
  Matrix<std::int32_t> begin;   // where an expert's places begin; the last number is where they end

  constexpr Index experts() const { return begin.cols - 1; }
  constexpr Index size() const { return source.cols; }
  // Of a place.
  STREAMBP_INLINE Index expert_of(Index place) const {
    Index low = 0, high = experts() - 1;
    while (low < high) {
      const Index middle = (low + high + 1) / 2;
      begin(0, middle) <= place ? low = middle : high = middle - 1;
    }
    return low;
  }
};

template <class Device>
Routes allocate_routes(Device& dev, Index rows, Index chosen, Index experts) {
  require(rows <= INT32_MAX / chosen, "experts: ", rows, " rows with ", chosen,
          " experts each are too many for a chunk");
  const auto numbers = [&](Index rows, Index cols) { return allocate<std::int32_t>(dev, rows, cols, Kind::chunk); };
  return {numbers(rows, chosen), numbers(rows, chosen), numbers(1, rows * chosen), numbers(1, experts + 1)};
}

// Computes places from the experts that are chosen.
template <class Device>
void sort_by_expert(Device& dev, const Routes& routes) {
  auto op = dev.operation("sort by expert", 0, 4.0 * 4.0 * routes.size());
  if constexpr (Device::computes) compute_sort_by_expert(dev, routes);
}

template <class Device, class T>
void gather_rows(Device& dev, Matrix<T> packed, Input<T> x, const Routes& routes) {
  require_shape("gather", "output", packed, routes.size(), x.cols);
  auto op = dev.operation("gather", 0, 2.0 * sizeof(T) * packed.size());
  if constexpr (Device::computes) compute_gather_rows(dev, packed, x, routes);
}

// Without weights they are 1. Sums are in the type of the weights.
template <class Device, class T>
void combine_rows(Device& dev, Matrix<T> y, Input<T> packed, Input<Accumulator<T>> weights, const Routes& routes,
                  Input<T> residual = {}) {
  require_shape("combine", "input", packed, routes.size(), y.cols);
  if (weights) require_shape("combine", "weights", weights, y.rows, routes.chosen.cols);
  auto op = dev.operation("combine", 2.0 * packed.size(), sizeof(T) * (packed.size() + 2.0 * y.size()));
  if constexpr (Device::computes) compute_combine_rows(dev, y, packed, weights, routes, residual);
}

// Overwrites a and da with their products with the weights.
template <class Device, class T>
void combine_rows_backward(Device& dev, Matrix<Accumulator<T>> dweights, Matrix<T> da, Matrix<T> a,
                           Input<Accumulator<T>> weights, const Routes& routes) {
  require_shape("combine backward", "a", a, routes.size(), da.cols);
  require_shape("combine backward", "dweights", dweights, weights.rows, weights.cols);
  auto op = dev.operation("combine backward", 4.0 * a.size(), 4.0 * sizeof(T) * a.size());
  if constexpr (Device::computes) compute_combine_rows_backward(dev, dweights, da, a, weights, routes);
}

// --- CPU ---

inline void compute_sort_by_expert(Cpu&, const Routes& r) {
  std::fill_n(r.begin.data, r.begin.cols, 0);
  for (Index i = 0; i < r.size(); ++i) ++r.begin(0, r.chosen.data[i] + 1);
  for (Index e = 0; e < r.experts(); ++e) r.begin(0, e + 1) += r.begin(0, e);
  std::vector<std::int32_t> next(r.begin.data, r.begin.data + r.experts());
  for (Index i = 0; i < r.size(); ++i) {
    const std::int32_t place = next[static_cast<std::size_t>(r.chosen.data[i])]++;
    r.place.data[i] = place, r.source(0, place) = static_cast<std::int32_t>(i / r.chosen.cols);
  }
}

template <class T>
void compute_gather_rows(Cpu&, Matrix<T> packed, Input<T> x, const Routes& routes) {
#pragma omp parallel for
  for (Index p = 0; p < packed.rows; ++p) std::copy_n(x.row(routes.source(0, p)), x.cols, packed.row(p));
}

template <class T>
void compute_combine_rows(Cpu&, Matrix<T> y, Input<T> packed, Input<Accumulator<T>> weights, const Routes& routes,
                          Input<T> residual) {
  using A = Accumulator<T>;
#pragma omp parallel
  {
    std::vector<A> sums(static_cast<std::size_t>(y.cols));
    A* sum = sums.data();
#pragma omp for
    for (Index i = 0; i < y.rows; ++i) {
      if (residual) {
        for (Index c = 0; c < y.cols; ++c) sum[c] = A(residual(i, c));
      } else {
        std::fill_n(sum, y.cols, A(0));
      }
      for (Index j = 0; j < routes.chosen.cols; ++j) {
        const A weight = weights ? weights(i, j) : A(1);
        const T* row = packed.row(routes.place(i, j));
        for (Index c = 0; c < y.cols; ++c) sum[c] = multiply_add(weight, A(row[c]), sum[c]);
      }
      for (Index c = 0; c < y.cols; ++c) y(i, c) = sum[c];
    }
  }
}

template <class T>
void compute_combine_rows_backward(Cpu&, Matrix<Accumulator<T>> dweights, Matrix<T> da, Matrix<T> a,
                                   Input<Accumulator<T>> weights, const Routes& routes) {
  using A = Accumulator<T>;
#pragma omp parallel for
  for (Index i = 0; i < weights.rows; ++i) {
    for (Index j = 0; j < weights.cols; ++j) {
      T *da_row = da.row(routes.place(i, j)), *a_row = a.row(routes.place(i, j));
      const A weight = weights(i, j);
      dweights(i, j) = cpu::sum_of(a.cols, [=](Index c) { return A(da_row[c]) * A(a_row[c]); });
      for (Index c = 0; c < a.cols; ++c) da_row[c] = weight * A(da_row[c]), a_row[c] = weight * A(a_row[c]);
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

constexpr int kSortThreads = 512;

// Of the threads of a block: how many before this one say yes, and how many in all.
struct Votes {
  int before, all;
};
__device__ inline Votes count_votes(bool yes) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int* of_warps = shared_memory<int>();
  const unsigned votes = __ballot_sync(0xffffffffu, yes);
  __syncthreads();  // all threads have read the last counts
  if (lane == 0) of_warps[warp] = __popc(votes);
  __syncthreads();
  Votes result = {__popc(votes & ((1u << lane) - 1)), 0};
  for (int w = 0; w < kSortThreads / kWarp; ++w) {
    if (w < warp) result.before += of_warps[w];
    result.all += of_warps[w];
  }
  return result;
}

// A thread block for each expert. Its places begin after those of the experts below it.
static __global__ void __launch_bounds__(kSortThreads) sort_by_expert_kernel(Routes r) {
  const auto expert = static_cast<std::int32_t>(blockIdx.x);
  const auto chosen = [&](Index i) { return i < r.size() ? r.chosen.data[i] : static_cast<std::int32_t>(r.experts()); };
  int place = 0;
  for (Index begin = 0; begin < r.size(); begin += kSortThreads)
    place += count_votes(chosen(begin + threadIdx.x) < expert).all;
  if (threadIdx.x == 0) r.begin(0, expert) = place;
  for (Index begin = 0; begin < r.size(); begin += kSortThreads) {
    const Index i = begin + threadIdx.x;
    const bool ours = chosen(i) == expert;
    const Votes votes = count_votes(ours);
    if (ours) {
      r.place.data[i] = place + votes.before;
      r.source(0, place + votes.before) = static_cast<std::int32_t>(i / r.chosen.cols);
    }
    place += votes.all;
  }
  if (threadIdx.x == 0 && expert + 1 == r.experts()) r.begin(0, r.experts()) = place;
}

// A warp for each row and expert.
template <class T>
__global__ void __launch_bounds__(kThreads)
    combine_rows_kernel(Matrix<float> dweights, Matrix<T> da, Matrix<T> a, Matrix<const float> weights, Routes routes) {
  const Index n = static_cast<Index>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (n >= routes.size()) return;
  const Index p = routes.place.data[n], i = n / weights.cols, j = n % weights.cols;
  const float weight = weights(i, j);
  float sum = 0;
  for (Index c = threadIdx.x % kWarp; c < a.cols; c += kWarp) {
    const float x = static_cast<float>(a(p, c)), dx = static_cast<float>(da(p, c));
    sum = multiply_add(dx, x, sum);
    da(p, c) = weight * dx, a(p, c) = weight * x;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) dweights(i, j) = sum;
}

}  // namespace cuda

inline void compute_sort_by_expert(Cuda& dev, const Routes& routes) {
  cuda::launch(dev, cuda::sort_by_expert_kernel, cuda::grid_of(routes.experts()), cuda::kSortThreads,
               sizeof(int) * cuda::kSortThreads / cuda::kWarp, routes);
}

template <class T>
void compute_gather_rows(Cuda& dev, Matrix<T> packed, Input<T> x, const Routes& routes) {
  auto f = [=] __device__(auto n, Index p, Index c) {
    cuda::store(packed.row(p) + c, cuda::load<n()>(x.row(routes.source(0, p)) + c));
  };
  cuda::for_each_pack(dev, packed.rows, packed.cols, f, packed, x);
}

template <class T>
void compute_combine_rows(Cuda& dev, Matrix<T> y, Input<T> packed, Input<float> weights, const Routes& routes,
                          Input<T> residual) {
  auto f = [=] __device__(auto n, Index i, Index c) {
    auto sum = residual.data ? cuda::load<n()>(residual.row(i) + c) : cuda::Floats<n()>();
    for (Index j = 0; j < routes.chosen.cols; ++j) {
      const float weight = weights.data ? weights(i, j) : 1;
      const auto term = cuda::load<n()>(packed.row(routes.place(i, j)) + c);
      for (int k = 0; k < n(); ++k) sum.x[k] = multiply_add(weight, term.x[k], sum.x[k]);
    }
    cuda::store(y.row(i) + c, sum);
  };
  cuda::for_each_pack(dev, y.rows, y.cols, f, y, packed, residual);
}

template <class T>
void compute_combine_rows_backward(Cuda& dev, Matrix<float> dweights, Matrix<T> da, Matrix<T> a, Input<float> weights,
                                   const Routes& routes) {
  cuda::launch(dev, cuda::combine_rows_kernel<T>, cuda::grid_of(ceil_div(routes.size(), cuda::kThreads / cuda::kWarp)),
               cuda::kThreads, 0, dweights, da, a, weights, routes);
}

#endif

}  // namespace streambp
