// Small operations: zero, scale, soft cap, add, combine, convert between types, transpose, column sums, sums of squares.
//
//   add_column_sums    out[j] += Σ_i x[i][j]
//   row_squares        sums[i] = Σ_j x[i][j]², in float64
//
// What is done to all tensors of a model takes a list of matrices, which a GPU handles in few launches (base/jobs.cuh).
//
// A sum over rows, such as the gradient of a bias, adds partial sums over kGroup rows each, from last to first: the
// order does not depend on the chunk.
#pragma once

#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/base/row_sums.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/jobs.cuh"
#endif

namespace streambp {

// The elements of y = f(y, x), in the type of the arithmetic.
template <class A>
struct Multiple {
  A factor;
  constexpr A operator()(A y, A) const { return factor * y; }
};
template <class A, class T>
struct MultipleOf {
  const T* factor;
  constexpr A operator()(A y, A) const { return static_cast<A>(*factor) * y; }
};
template <class A>
struct WeightedSum {
  A a, b;
  constexpr A operator()(A y, A x) const { return multiply_add(a, y, b * x); }
};
template <class A>
struct SoftCap {
  A cap;
  constexpr A operator()(A y, A) const { return soft_capped(y, cap); }
};
struct PlainSum {
  constexpr auto operator()(auto y, auto x) const { return y + x; }
};
struct Converted {
  constexpr auto operator()(auto, auto x) const { return x; }
};

// y = f(y, x)
template <class T, class U>
struct Operands {
  Matrix<T> y;
  Matrix<U> x;
};

// x = 0
template <class Device, class T>
void zero(Device& dev, const std::vector<Matrix<T>>& all) {
  double size = 0;
  for (const Matrix<T>& x : all) size += static_cast<double>(x.size());
  auto op = dev.operation("zero", 0, sizeof(T) * size);
  if constexpr (Device::computes) compute_zero(dev, all);
}
template <class Device, class T>
void zero(Device& dev, Matrix<T> x) {
  zero(dev, std::vector<Matrix<T>>{x});
}

// x *= factor
template <class Device, class T>
void scale(Device& dev, Matrix<T> x, double factor) {
  auto op = dev.operation("scale", 1.0 * x.size(), 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes)
    compute_update<T, T>(dev, {{x, x}}, Multiple<Accumulator<T>>{static_cast<Accumulator<T>>(factor)});
}

// The same, with a factor on the device.
template <class Device, class T>
void scale(Device& dev, Matrix<T> x, Matrix<T> factor) {
  auto op = dev.operation("scale", 1.0 * x.size(), 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) compute_update<T, T>(dev, {{x, x}}, MultipleOf<Accumulator<T>, T>{factor.data});
}

// x = cap tanh(x / cap)
template <class Device, class T>
void soft_cap(Device& dev, Matrix<T> x, double cap) {
  auto op = dev.operation("soft cap", 8.0 * x.size(), 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes)
    compute_update<T, T>(dev, {{x, x}}, SoftCap<Accumulator<T>>{static_cast<Accumulator<T>>(cap)});
}

// y += x, in the type of y
template <class Device, class T, class U>
void add(Device& dev, const std::vector<Operands<T, U>>& all) {
  double size = 0;
  for (const auto& [y, x] : all) {
    require_shape("add", "x", x, y.rows, y.cols);
    size += static_cast<double>(x.size());
  }
  auto op = dev.operation("add", size, (2.0 * sizeof(T) + sizeof(U)) * size);
  if constexpr (Device::computes) compute_update(dev, all, PlainSum{});
}
template <class Device, class T, class U>
void add(Device& dev, Matrix<T> y, Matrix<U> x) {
  add(dev, std::vector<Operands<T, U>>{{y, x}});
}

// y = a y + b x, in the type of y
template <class Device, class T, class U>
void combine(Device& dev, double a, Matrix<T> y, double b, Matrix<U> x) {
  require_shape("combine", "x", x, y.rows, y.cols);
  auto op = dev.operation("combine", 3.0 * x.size(), (2.0 * sizeof(T) + sizeof(U)) * x.size());
  using A = Accumulator<T>;
  if constexpr (Device::computes)
    compute_update<T, U>(dev, {{y, x}}, WeightedSum<A>{static_cast<A>(a), static_cast<A>(b)});
}

// y = xᵀ
template <class Device, class T>
void transpose(Device& dev, Matrix<T> y, Input<T> x) {
  require_shape("transpose", "x", x, y.cols, y.rows);
  auto op = dev.operation("transpose", 0, 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) compute_transpose(dev, y, x);
}

// y = x, in the type of y
template <class Device, class T, class U>
void convert(Device& dev, Matrix<T> y, Matrix<U> x) {
  require_shape("convert", "x", x, y.rows, y.cols);
  auto op = dev.operation("convert", 0, (1.0 * sizeof(T) + sizeof(U)) * x.size());
  if constexpr (Device::computes) compute_update<T, U>(dev, {{y, x}}, Converted{});
}

// out += the sum over the rows of x, in one or several lanes
template <class Device, class G, class T>
void add_column_sums(Device& dev, Matrix<G> out, Matrix<T> x) {
  require_shape("column sums", "output", out, out.rows, x.cols);
  auto scope = dev.scope();
  auto partial = allocate<G>(dev, ceil_div(x.rows, kGroup), x.cols, Kind::chunk);
  auto op = dev.operation("bias gradient", 1.0 * x.size(), 1.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) {
    group_sums(dev, partial, x);
    add_groups_to_lanes(dev, out, partial, dev.tile);
  }
}

// Adds the sums of groups of kGroup rows to the lanes, which take tiles of `tile` rows in turn.
template <class Device, class G>
void add_groups_to_lanes(Device& dev, Matrix<G> out, Matrix<G> groups, Index tile) {
  for_each_tile_of_lanes(out.rows, groups.rows, ceil_div(tile, kGroup),
                         [&](Index lane, Rows of_tile) { add_groups(dev, out.lane(lane, 1), groups.slice(of_tile)); });
}

// sums[i] = Σ_j x[i][j]²
template <class T>
struct RowSquares {
  Matrix<double> sums;
  Matrix<T> x;
};
template <class Device, class T>
void row_squares(Device& dev, const std::vector<RowSquares<T>>& all) {
  double size = 0;
  for (const auto& [sums, x] : all) {
    require_shape("row squares", "sums", sums, 1, x.rows);
    size += static_cast<double>(x.size());
  }
  auto op = dev.operation("gradient norm", 2.0 * size, sizeof(T) * size);
  if constexpr (Device::computes) compute_row_squares(dev, all);
}
template <class Device, class T>
void row_squares(Device& dev, Matrix<double> sums, Matrix<T> x) {
  row_squares(dev, std::vector<RowSquares<T>>{{sums, x}});
}

// --- CPU ---

// Calls f(i, j) for each element, or f(i) for each row, where each takes some work.
template <class F>
void compute_elements(Cpu&, Index rows, Index cols, const F& f) {
#pragma omp parallel for if (rows * cols > kWorthThreads)
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < cols; ++j) f(i, j);
}
template <class F>
void compute_rows(Cpu&, Index rows, const F& f) {
#pragma omp parallel for
  for (Index i = 0; i < rows; ++i) f(i);
}

template <class T>
void compute_zero(Cpu&, Matrix<T> x) {
#pragma omp parallel for if (x.size() > kWorthThreads)
  for (Index i = 0; i < x.rows; ++i) std::fill_n(x.row(i), x.cols, T(0));
}
template <class T>
void compute_zero(Cpu& dev, const std::vector<Matrix<T>>& all) {
  for (const Matrix<T>& x : all) compute_zero(dev, x);
}

template <class T, class U, class F>
void compute_update(Cpu&, Matrix<T> y, Matrix<U> x, F f) {
  using A = Accumulator<T>;
#pragma omp parallel for if (x.size() > kWorthThreads)
  for (Index i = 0; i < y.rows; ++i) {
    for (Index j = 0; j < y.cols; ++j) y(i, j) = f(static_cast<A>(y(i, j)), static_cast<A>(x(i, j)));
  }
}
template <class T, class U, class F>
void compute_update(Cpu& dev, const std::vector<Operands<T, U>>& all, F f) {
  for (const auto& [y, x] : all) compute_update(dev, y, x, f);
}

template <class T>
void compute_transpose(Cpu&, Matrix<T> y, Input<T> x) {
  constexpr Index block = 32;  // fits the cache
#pragma omp parallel for if (x.size() > kWorthThreads)
  for (Index b = 0; b < ceil_div(y.rows, block); ++b) {
    const Rows rows = piece(b, block, y.rows);
    for (Index begin = 0; begin < y.cols; begin += block) {
      for (Index i = rows.begin; i < rows.end; ++i) {
        for (Index j = begin; j < least(begin + block, y.cols); ++j) y(i, j) = x(j, i);
      }
    }
  }
}

template <class G, class T>
void group_sums(Cpu&, Matrix<G> partial, Matrix<T> x) {
#pragma omp parallel for
  for (Index g = 0; g < partial.rows; ++g) {
    G* sum = partial.row(g);
    std::fill_n(sum, x.cols, G(0));
    for (Index i = g * kGroup; i < least(x.rows, (g + 1) * kGroup); ++i) {
      for (Index j = 0; j < x.cols; ++j) sum[j] += x(i, j);
    }
  }
}

// out[j] += Σ_g partial[g][j], last group first
template <class G>
void add_groups(Cpu&, Matrix<G> out, Matrix<G> partial) {
#pragma omp parallel for
  for (Index j = 0; j < out.cols; ++j) {
    for (Index g = partial.rows - 1; g >= 0; --g) out(0, j) += partial(g, j);
  }
}

template <class T>
void compute_row_squares(Cpu&, Matrix<double> sums, Matrix<T> x) {
#pragma omp parallel for if (x.size() > kWorthThreads)
  for (Index i = 0; i < x.rows; ++i) {
    const T* row = x.row(i);
    const auto square = [=](Index j) { return static_cast<double>(row[j]) * static_cast<double>(row[j]); };
    sums(0, i) = cpu::sum_of(x.cols, square);
  }
}
template <class T>
void compute_row_squares(Cpu& dev, const std::vector<RowSquares<T>>& all) {
  for (const auto& [sums, x] : all) compute_row_squares(dev, sums, x);
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

constexpr int kColumns = 128;

template <class F>
__global__ void __launch_bounds__(kColumns) elements_kernel(Index rows, Index cols, F f) {
  const Index j = static_cast<Index>(blockIdx.x) * kColumns + threadIdx.x;
  for (Index i = blockIdx.y; i < rows && j < cols; i += gridDim.y) f(i, j);
}

// Calls f(i, j) in a thread for each column j of `rows` rows, tiles, or sequences.
template <class F>
void for_each_column(Cuda& dev, Index rows, Index cols, F f) {
  if (rows == 0) return;
  launch(dev, elements_kernel<F>, grid_of(ceil_div(cols, kColumns), std::min<Index>(rows, 65535)), kColumns, 0, rows,
         cols, f);
}

template <class T>
struct Zero {
  Matrix<T> x;
  __device__ void operator()(auto n, Index i, Index j) const { store(x.row(i) + j, Floats<n()>()); }
};

template <class T, class U, class F>
struct UpdateElements {
  Matrix<T> y;
  Matrix<U> x;
  F f;
  __device__ void operator()(auto n, Index i, Index j) const {
    auto result = load<n()>(y.row(i) + j);
    const auto other = load<n()>(x.row(i) + j);
    for (int k = 0; k < n(); ++k) result.x[k] = f(result.x[k], other.x[k]);
    store(y.row(i) + j, result);
  }
};

}  // namespace cuda

template <class F>
void compute_elements(Cuda& dev, Index rows, Index cols, const F& f) {
  cuda::for_each_column(dev, rows, cols, f);
}
template <class F>
void compute_rows(Cuda& dev, Index rows, const F& f) {
  cuda::for_each_column(dev, 1, rows, [=] __device__(Index, Index i) { f(i); });
}

template <class T>
void compute_zero(Cuda& dev, const std::vector<Matrix<T>>& all) {
  std::vector<cuda::Elements<cuda::Zero<T>>> jobs;
  for (const Matrix<T>& x : all) jobs.push_back(cuda::elements(cuda::Zero<T>{x}, x));
  cuda::run(dev, jobs);
}

template <class T, class U, class F>
void compute_update(Cuda& dev, const std::vector<Operands<T, U>>& all, F f) {
  std::vector<cuda::Elements<cuda::UpdateElements<T, U, F>>> jobs;
  for (const auto& [y, x] : all) jobs.push_back(cuda::elements(cuda::UpdateElements<T, U, F>{y, x, f}, y, x));
  cuda::run(dev, jobs);
}

template <class T>
void compute_transpose(Cuda& dev, Matrix<T> y, Input<T> x) {
  auto f = [=] __device__(auto n, Index i, Index j) {
    cuda::Floats<n()> values;
    for (int k = 0; k < n(); ++k) values.x[k] = x(j + k, i);
    cuda::store(y.row(i) + j, values);
  };
  cuda::for_each_pack(dev, y.rows, y.cols, f, y);
}

template <class T>
void group_sums(Cuda& dev, Matrix<float> partial, Matrix<T> x) {
  auto f = [=] __device__(auto n, Index g, Index j) {
    cuda::Floats<n()> sum;
    for (Index i = g * kGroup; i < least(x.rows, (g + 1) * kGroup); ++i) {
      const auto term = cuda::load<n()>(x.row(i) + j);
      for (int k = 0; k < n(); ++k) sum.x[k] += term.x[k];
    }
    cuda::store(partial.row(g) + j, sum);
  };
  cuda::for_each_pack(dev, partial.rows, partial.cols, f, partial, x);
}

namespace cuda {

// A thread block sums 32 columns. Each of its warps adds the sums of one tile of rows. Then the tile sums are added one by
// one, so the result does not depend on the number of tiles per call.
constexpr int kTilesAtOnce = 16;
static __global__ void __launch_bounds__(kTilesAtOnce* kWarp)
    add_groups_kernel(Matrix<float> out, Matrix<float> partial) {
  constexpr Index groups = kTile / kGroup;
  auto* sums = shared_memory<float[kWarp]>();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Index column = static_cast<Index>(blockIdx.x) * kWarp + lane, tiles = ceil_div(partial.rows, groups);
  float total = column < out.cols ? out(0, column) : 0;
  for (Index last = tiles - 1; last >= 0; last -= kTilesAtOnce) {
    const Index tile = last - warp;
    float sum = 0;
    if (tile >= 0 && column < out.cols) {
      for (Index g = least(partial.rows, (tile + 1) * groups) - 1; g >= tile * groups; --g) sum += partial(g, column);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    for (int t = 0; t < kTilesAtOnce && last - t >= 0; ++t) total += sums[t][lane];
    __syncthreads();
  }
  if (warp == 0 && column < out.cols) out(0, column) = total;
}

// A job: a warp sums a row.
template <class T>
struct SumRowSquares {
  static constexpr Index kRows = kThreads / kWarp;  // of a block
  RowSquares<T> of;
  bool packed;

  Index blocks() const { return ceil_div(of.x.rows, kRows); }
  __device__ void operator()(Index block) const { packed ? sum<kPack>(block) : sum<1>(block); }

  template <int N>
  __device__ void sum(Index block) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const Index i = block * kRows + warp;
    double sum = 0;
    for (Index j = static_cast<Index>(lane) * N; i < of.x.rows && j < of.x.cols; j += kWarp * N) {
      const auto values = load<N>(of.x.row(i) + j);
      for (int k = 0; k < N; ++k) sum += static_cast<double>(values.x[k]) * static_cast<double>(values.x[k]);
    }
    sum = warp_sum(sum);
    if (lane == 0 && i < of.x.rows) of.sums(0, i) = sum;
  }
};

}  // namespace cuda

inline void add_groups(Cuda& dev, Matrix<float> out, Matrix<float> partial) {
  constexpr int threads = cuda::kTilesAtOnce * cuda::kWarp;
  cuda::launch(dev, cuda::add_groups_kernel, cuda::grid_of(ceil_div(out.cols, cuda::kWarp)), threads,
               threads * sizeof(float), out, partial);
}

template <class T>
void compute_row_squares(Cuda& dev, const std::vector<RowSquares<T>>& all) {
  std::vector<cuda::SumRowSquares<T>> jobs;
  for (const RowSquares<T>& of : all) jobs.push_back({of, cuda::packable(of.x)});
  cuda::run(dev, jobs);
}

#endif

}  // namespace streambp
