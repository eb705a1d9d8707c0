// A short convolution along the token stream, for each channel alone. Gated, by b and c:
//
//   u[t] = b[t] * x[t]          z[t] = Σ_k w[k] u[t - k]          y[t] = c[t] * z[t]          0 <= k < width
//
//   backward         dz[t] = dy[t] * c[t]        dc[t] = dy[t] * z[t]        dw[k] += Σ_t dz[t] u[t - k]
//                    du[t] = Σ_k w[k] dz[t + k]  db[t] = du[t] * x[t]        dx[t] = du[t] * b[t]
//
// Without b and c:  u[t] = x[t]    y[t] = silu(z[t])    dz[t] = dy[t] silu'(z[t])    dx[t] = du[t]
//
// u is rounded to the type of activations. Terms from other documents are left out. Tiles of kTile rows depend on each other
// only through their edges: u of the last width - 1 rows of a tile, which the next tile reads, and the terms of du that the
// next tile adds to these rows. A sum over k adds the farthest row first, so a document's numbers do not depend on its place
// among tiles.
//
// In files, taps(channel, i) is w[width - 1 - i].
#pragma once

#include "kernels/activation.cuh"
#include "kernels/attention_shape.h"
#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/elementwise.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif

namespace streambp {

constexpr Index kMostTaps = 7;

// A chunk of rows on its way through a convolution: b, c and x of this rank's rows. Both b and c, or neither.
template <class T>
struct ConvolutionChunk {
  Matrix<T> b, c, x;
  Matrix<const T> taps;
  Matrix<const T> edges = {};                 // of all tiles of the stream up to the chunk's end
  Matrix<const std::int32_t> key_begin = {};  // of all rows of the stream
  Index first = 0;                            // row of the chunk in the stream
  Index tile = kTile, rank = 0, ranks = 1;    // tile i of the chunk is one of rank i mod ranks

  constexpr Index width() const { return taps.cols; }
  constexpr bool gated() const { return !b.empty(); }
  // The place in the stream of one of this rank's rows.
  constexpr Index place(Index row) const { return first + (row / tile * ranks + rank) * tile + row % tile; }
};

// The rows of a tile's edge, among the edges of all tiles.
constexpr Rows edge_rows(Index tile, Index width) { return {tile * (width - 1), (tile + 1) * (width - 1)}; }

// u = b * x
template <class Device, class T>
void convolution_inputs(Device& dev, Matrix<T> u, Input<T> b, Input<T> x) {
  require_shape("convolution inputs", "b", b, u.rows, u.cols);
  require_shape("convolution inputs", "x", x, u.rows, u.cols);
  auto op = dev.operation("convolution inputs", 1.0 * u.size(), 3.0 * sizeof(T) * u.size());
  if constexpr (Device::computes) compute_convolution_inputs(dev, u, b, x);
}

template <class Device, class T>
void convolution(Device& dev, Matrix<T> y, const std::type_identity_t<ConvolutionChunk<T>>& in) {
  require_shape("convolution", "output", y, in.x.rows, in.x.cols);
  auto op = dev.operation("convolution", (2.0 + 2 * in.width()) * y.size(), 4.0 * sizeof(T) * y.size());
  if constexpr (Device::computes) compute_convolution(dev, y, in);
}

// For each of this rank's tiles, the terms of du that it adds to the edge of the tile before it.
template <class Device, class T>
void convolution_edges_backward(Device& dev, Matrix<Accumulator<T>> dedges, const ConvolutionChunk<T>& in,
                                Input<T> dy) {
  auto op = dev.operation("convolution edges backward", 4.0 * dedges.size(), (2.0 * sizeof(T) + 4) * dedges.size());
  if constexpr (Device::computes) compute_convolution_edges_backward(dev, dedges, in, dy);
}

// The gradients of b, c and x overwrite them. dtaps is added to, in one or several lanes; empty: the taps are frozen.
// dedges: of all tiles of the stream up to the chunk's end, complete.
template <class Device, class T>
void convolution_backward(Device& dev, Matrix<Accumulator<T>> dtaps, const ConvolutionChunk<T>& in, Input<T> dy,
                          Matrix<const Accumulator<T>> dedges) {
  require_shape("convolution backward", "dy", dy, in.x.rows, in.x.cols);
  const double size = static_cast<double>(dy.size());
  auto scope = dev.scope();
  const auto partial =
      allocate<Accumulator<T>>(dev, ceil_div(dy.rows, kTile) * in.width(), dtaps ? dy.cols : 0, Kind::chunk);
  auto op = dev.operation("convolution backward", (4.0 + 6 * in.width()) * size, 7.0 * sizeof(T) * size);
  if constexpr (Device::computes) {
    compute_convolution_backward(dev, partial, in, dy, dedges);
    if (dtaps) compute_add_taps(dev, dtaps, partial, in.width());
  }
}

// --- N columns of a tile, on CPUs and GPUs ---

template <Index N, class A>
struct Columns {
  A at[N] = {};
};

template <Index N, class A, class T>
STREAMBP_INLINE Columns<N, A> load_columns(const T* from) {
  Columns<N, A> result;
#pragma omp simd
  for (Index n = 0; n < N; ++n) result.at[n] = static_cast<A>(from[n]);
  return result;
}
template <Index N, class A, class T>
STREAMBP_INLINE void store_columns(T* to, const Columns<N, A>& from) {
#pragma omp simd
  for (Index n = 0; n < N; ++n) to[n] = from.at[n];
}
template <Index N, class A>
STREAMBP_INLINE void add_product(Columns<N, A>& sum, const Columns<N, A>& a, const Columns<N, A>& b) {
#pragma omp simd
  for (Index n = 0; n < N; ++n) sum.at[n] = multiply_add(a.at[n], b.at[n], sum.at[n]);
}
template <Index N, class A>
STREAMBP_INLINE Columns<N, A> product(const Columns<N, A>& a, const Columns<N, A>& b) {
  Columns<N, A> result;
#pragma omp simd
  for (Index n = 0; n < N; ++n) result.at[n] = a.at[n] * b.at[n];
  return result;
}

// u, rounded to T
template <Index N, class A, class T>
STREAMBP_INLINE Columns<N, A> rounded_product(const T* b, const T* x) {
  Columns<N, A> result;
#pragma omp simd
  for (Index n = 0; n < N; ++n) {
    T rounded;
    rounded = static_cast<A>(b[n]) * static_cast<A>(x[n]);
    result.at[n] = static_cast<A>(rounded);
  }
  return result;
}

// Columns j .. j + N of one of this rank's tiles.
template <Index N, class T>
struct ConvolutionTile {
  using A = Accumulator<T>;
  using Numbers = Columns<N, A>;
  struct Taps {
    Numbers at[kMostTaps];
  };

  const ConvolutionChunk<T>& in;
  Index j, begin, end;  // rows
  Index place;          // of the first in the stream
  Numbers w[kMostTaps];

  STREAMBP_INLINE ConvolutionTile(const ConvolutionChunk<T>& in, Index tile, Index j)
      : in(in), j(j), begin(tile * kTile), end(least(begin + kTile, in.x.rows)), place(in.place(begin)) {
    for (Index k = 0; k < in.width(); ++k)
#pragma omp simd
      for (Index n = 0; n < N; ++n) w[k].at[n] = static_cast<A>(in.taps(j + n, in.width() - 1 - k));
  }

  STREAMBP_INLINE Index number() const { return place / kTile; }  // in the stream
  STREAMBP_INLINE Index document(Index row) const { return in.key_begin(0, place + row - begin); }
  // How many rows before this one its sum has.
  STREAMBP_INLINE Index reach(Index row) const { return least(in.width() - 1, place + row - begin - document(row)); }
  // u of a row of this tile, or of the edge before it.
  STREAMBP_INLINE Numbers u(Index row) const {
    if (row >= begin && !in.gated()) return load_columns<N, A>(in.x.row(row) + j);
    if (row >= begin) return rounded_product<N, A>(in.b.row(row) + j, in.x.row(row) + j);
    return load_columns<N, A>(in.edges.row(edge_rows(number(), in.width()).begin + row - begin) + j);
  }
  STREAMBP_INLINE Numbers z(Index row) const {
    Numbers sum;
    for (Index k = reach(row); k >= 0; --k) add_product(sum, w[k], u(row - k));
    return sum;
  }
  STREAMBP_INLINE Numbers dz(Input<T> dy, Index row) const {
    Numbers slope = in.gated() ? load_columns<N, A>(in.c.row(row) + j) : z(row);
    if (!in.gated()) {
#pragma omp simd
      for (Index n = 0; n < N; ++n) slope.at[n] = ValueAndSlope<Silu, A>(slope.at[n]).slope;
    }
    return product(load_columns<N, A>(dy.row(row) + j), slope);
  }

  STREAMBP_INLINE void forward(Matrix<T> y, Rows rows) const {
    for (Index row = rows.begin; row < rows.end; ++row) {
      Numbers sum = z(row);
      if (in.gated()) {
        sum = product(load_columns<N, A>(in.c.row(row) + j), sum);
      } else {
#pragma omp simd
        for (Index n = 0; n < N; ++n) sum.at[n] = activated(Silu(), sum.at[n]);
      }
      store_columns(y.row(row) + j, sum);
    }
  }

  // The terms of du for the rows before the tile.
  STREAMBP_INLINE void edge_backward(Matrix<A> dedges, Index tile, Input<T> dy) const {
    const Index width = in.width();
    for (Index before = 1; before < width; ++before) {
      Numbers sum;
      for (Index i = least(width - 1 - before, end - begin - 1); i >= 0; --i)
        if (document(begin + i) <= place - before) add_product(sum, w[i + before], dz(dy, begin + i));
      store_columns(dedges.row(edge_rows(tile + 1, width).begin - before) + j, sum);
    }
  }

  // The gradients of some rows, and their terms of the gradient of the taps. Goes from the last row to the first, because
  // the gradients may replace b, c and x, and u of earlier rows is still needed.
  STREAMBP_INLINE Taps backward(const ConvolutionChunk<T>& to, Rows rows, Input<T> dy, Matrix<const A> dedges) const {
    const Index width = in.width();
    Numbers later[kMostTaps];  // dz of this row and the rows after it
    Taps dw;
    for (Index row = least(rows.end + width - 1, end) - 1; row >= rows.begin; --row) {
      for (Index k = width - 1; k > 0; --k) later[k] = later[k - 1];
      later[0] = dz(dy, row);
      if (row >= rows.end) continue;
      Numbers du;
      const Index after = end - 1 - row;  // rows of this tile
      if (after < width - 1 && end - begin == kTile)
        du = load_columns<N, A>(dedges.row(edge_rows(number() + 1, width).begin - 1 - after) + j);
      for (Index k = least(width - 1, after); k >= 0; --k)
        if (document(row + k) <= place + row - begin) add_product(du, w[k], later[k]);
      for (Index k = reach(row); k >= 0; --k) add_product(dw.at[k], later[0], u(row - k));
      if (!in.gated()) {
        store_columns(to.x.row(row) + j, du);
        continue;
      }
      const Numbers dc = product(load_columns<N, A>(dy.row(row) + j), z(row));
      const Numbers b = load_columns<N, A>(in.b.row(row) + j), x = load_columns<N, A>(in.x.row(row) + j);
      store_columns(to.c.row(row) + j, dc);
      store_columns(to.b.row(row) + j, product(du, x));
      store_columns(to.x.row(row) + j, product(du, b));
    }
    return dw;
  }
};

// --- CPU ---

namespace cpu {

// Columns at a time: a large loop for vectors, or what is left of the columns.
constexpr Index kConvolutionColumns = 64;

// Calls f(tile, columns, j) for all columns of all tiles.
template <class F>
void for_each_columns(Index rows, Index cols, F&& f) {
  const Index tiles = ceil_div(rows, kTile), blocks = ceil_div(cols, kConvolutionColumns);
#pragma omp parallel for
  for (Index i = 0; i < tiles * blocks; ++i) {
    const Index tile = i / blocks;
    Rows columns = piece(i % blocks, kConvolutionColumns, cols);
    const auto take = [&](auto n) {
      for (; columns.size() >= n(); columns.begin += n()) f(tile, n, columns.begin);
    };
    take(std::integral_constant<Index, kConvolutionColumns>()), take(std::integral_constant<Index, 8>());
    take(std::integral_constant<Index, 1>());
  }
}

}  // namespace cpu

template <class T>
void compute_convolution_inputs(Cpu&, Matrix<T> u, Input<T> b, Input<T> x) {
  for (Index i = 0; i < u.rows; ++i)
    for (Index j = 0; j < u.cols; ++j) u(i, j) = rounded_product<1, Accumulator<T>>(b.row(i) + j, x.row(i) + j).at[0];
}

template <class T>
void compute_convolution(Cpu&, Matrix<T> y, const ConvolutionChunk<T>& in) {
  cpu::for_each_columns(y.rows, y.cols, [&](Index tile, auto n, Index j) {
    ConvolutionTile<n(), T>(in, tile, j).forward(y, piece(tile, kTile, y.rows));
  });
}

template <class T>
void compute_convolution_edges_backward(Cpu&, Matrix<Accumulator<T>> dedges, const ConvolutionChunk<T>& in,
                                        Input<T> dy) {
  cpu::for_each_columns(dy.rows, dy.cols, [&](Index tile, auto n, Index j) {
    ConvolutionTile<n(), T>(in, tile, j).edge_backward(dedges, tile, dy);
  });
}

template <class T>
void compute_convolution_backward(Cpu&, Matrix<Accumulator<T>> dtaps, const ConvolutionChunk<T>& in, Input<T> dy,
                                  Matrix<const Accumulator<T>> dedges) {
  cpu::for_each_columns(dy.rows, dy.cols, [&](Index tile, auto n, Index j) {
    const auto dw = ConvolutionTile<n(), T>(in, tile, j).backward(in, piece(tile, kTile, dy.rows), dy, dedges);
    for (Index k = 0; dtaps && k < in.width(); ++k) store_columns(dtaps.row(tile * in.width() + k) + j, dw.at[k]);
  });
}

// One channel's sums over tiles, from the last to the first.
template <class A>
STREAMBP_INLINE void add_taps(Matrix<A> dtaps, Matrix<A> partial, Index channel, Index lane, Index tiles_of_lane,
                              Index tap) {
  const Index width = dtaps.cols, lanes = dtaps.rows / partial.cols, tiles = partial.rows / width;
  A& sum = dtaps(lane * partial.cols + channel, width - 1 - tap);
  for (Index tile = tiles - 1; tile >= 0; --tile)
    if (tile / tiles_of_lane % lanes == lane) sum += partial(tile * width + tap, channel);
}

template <class A>
void compute_add_taps(Cpu& dev, Matrix<A> dtaps, Matrix<A> partial, Index width) {
#pragma omp parallel for
  for (Index row = 0; row < dtaps.rows; ++row)
    for (Index tap = 0; tap < width; ++tap)
      add_taps(dtaps, partial, row % partial.cols, row / partial.cols, dev.tile / kTile, tap);
}

// --- CUDA: a thread for a column of some rows of a tile ---

#ifdef STREAMBP_CUDA

namespace cuda {

constexpr int kConvolutionRows = 16, kConvolutionThreads = 512;

// A thread block computes 64 bytes of each row of a tile. Gradients replace b, c and x, so copies of these and of dy in shared
// memory come first.
template <class T>
__global__ void __launch_bounds__(kConvolutionThreads)
    convolution_backward_kernel(Matrix<float> dtaps, ConvolutionChunk<T> in, Matrix<const T> dy,
                                Matrix<const float> dedges) {
  constexpr int columns = 64 / sizeof(T), parts = kConvolutionThreads / columns, rows_of_part = kTile / parts;
  const int part = threadIdx.x / columns, column = threadIdx.x % columns;
  const Index tile = blockIdx.y, begin = tile * kTile, end = least(begin + kTile, dy.rows);
  const Index first = static_cast<Index>(blockIdx.x) * columns, j = first + column;
  T* memory = shared_memory<T>();
  const auto copy = [&](Matrix<const T> m) -> Matrix<T> {
    if (!m) return {};
    T* const here = memory;
    memory += kTile * columns;
    for (Index row = begin + part; row < end && j < dy.cols; row += parts)
      here[(row - begin) * columns + column] = m(row, j);
    return {here - begin * columns - first, m.rows, m.cols, columns};
  };
  ConvolutionChunk<T> copies = in;
  copies.b = copy(in.b), copies.c = copy(in.c), copies.x = copy(in.x);
  const Matrix<const T> dy_copy = copy(dy);
  __syncthreads();
  const Rows rows = {begin + part * rows_of_part, least(begin + (part + 1) * rows_of_part, end)};
  typename ConvolutionTile<1, T>::Taps dw;
  if (j < dy.cols) dw = ConvolutionTile<1, T>(copies, tile, j).backward(in, rows, dy_copy, dedges);
  if (!dtaps) return;
  auto* sums = reinterpret_cast<float(*)[parts][columns]>(memory);  // of each tap
  for (int k = 0; k < kMostTaps; ++k) sums[k][part][column] = dw.at[k].at[0];
  __syncthreads();
  if (part >= in.width() || j >= dy.cols) return;
  float sum = 0;
  for (int p = parts - 1; p >= 0; --p) sum += sums[part][p][column];
  dtaps(tile * in.width() + part, j) = sum;
}

}  // namespace cuda

template <class T>
void compute_convolution_inputs(Cuda& dev, Matrix<T> u, Input<T> b, Input<T> x) {
  cuda::for_each_column(dev, u.rows, u.cols, [=] __device__(Index i, Index j) {
    u(i, j) = rounded_product<1, float>(b.row(i) + j, x.row(i) + j).at[0];
  });
}

template <class T>
void compute_convolution(Cuda& dev, Matrix<T> y, const ConvolutionChunk<T>& in) {
  constexpr Index rows = cuda::kConvolutionRows;
  cuda::for_each_column(dev, ceil_div(y.rows, rows), y.cols, [=] __device__(Index part, Index j) {
    const Rows of_part = {part * rows, least((part + 1) * rows, y.rows)};
    ConvolutionTile<1, T>(in, of_part.begin / kTile, j).forward(y, of_part);
  });
}

template <class T>
void compute_convolution_edges_backward(Cuda& dev, Matrix<float> dedges, const ConvolutionChunk<T>& in, Input<T> dy) {
  cuda::for_each_column(dev, ceil_div(dy.rows, kTile), dy.cols, [=] __device__(Index tile, Index j) {
    ConvolutionTile<1, T>(in, tile, j).edge_backward(dedges, tile, dy);
  });
}

template <class T>
void compute_convolution_backward(Cuda& dev, Matrix<float> dtaps, const ConvolutionChunk<T>& in, Input<T> dy,
                                  Matrix<const float> dedges) {
  const std::size_t bytes = (in.gated() ? 4 : 2) * kTile * 64 + sizeof(float) * cuda::kConvolutionThreads * kMostTaps;
  cuda::launch(dev, cuda::convolution_backward_kernel<T>,
               cuda::grid_of(ceil_div(dy.cols, Index{64 / sizeof(T)}), ceil_div(dy.rows, kTile)),
               cuda::kConvolutionThreads, bytes, dtaps, in, dy, dedges);
}

inline void compute_add_taps(Cuda& dev, Matrix<float> dtaps, Matrix<float> partial, Index width) {
  const Index tiles_of_lane = dev.tile / kTile;
  cuda::for_each_column(dev, dtaps.rows / partial.cols, partial.cols, [=] __device__(Index lane, Index channel) {
    for (Index tap = 0; tap < width; ++tap) add_taps(dtaps, partial, channel, lane, tiles_of_lane, tap);
  });
}

#endif

}  // namespace streambp
