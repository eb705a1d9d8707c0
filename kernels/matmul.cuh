// Matrix multiplication: a linear layer with weight w (outputs x inputs) and optional bias and residual.
//
//   forward          y  = x wᵀ + bias + residual
//   backward         dx = dy w              (or dx += dy w)
//                    dw += dyᵀ x
//                    dbias += Σ_rows dy
//
// CPU: threads take units of work, one tile of rows times some columns, as they become free. The order of every sum is
// gemm.h's, so results do not depend on the units. dw adds tiles from last to first.
//
// GPU: cuBLASLt. Its algorithm is chosen once per shape of weight, for one tile of rows, and used for any number of
// rows. It may not split a sum across blocks, so the result of a row does not depend on other rows. dw adds tiles (of
// the device's size) from last to first, in float32. Results of one column have kernels of ours (one_column.cuh).
#pragma once

#include <omp.h>

#include "kernels/base/device.cuh"
#include "kernels/base/gemm.h"
#include "kernels/base/matrix.cuh"
#include "kernels/elementwise.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/cublas.cuh"
#include "kernels/one_column.cuh"
#endif

namespace streambp {

// y = x wᵀ + bias + residual. y may have the type of the sums.
template <class Device, class Y, class T = Y>
void matmul(Device& dev, Matrix<Y> y, Input<T> x, Input<T> w, Input<T> bias = {}, Input<Y> residual = {}) {
  require_shape("matmul", "input", x, y.rows, w.cols);
  require_shape("matmul", "output", y, x.rows, w.rows);
  if (bias) require_shape("matmul", "bias", bias, 1, y.cols);
  if (residual) require_shape("matmul", "residual", residual, y.rows, y.cols);
  auto op = dev.operation("matmul", 2.0 * y.size() * w.cols,
                          sizeof(T) * (x.size() + w.size()) + sizeof(Y) * (y.size() + residual.size()));
  if constexpr (Device::computes) compute_matmul<Y, T>(dev, y, x, w, bias, residual);
}

// dx = dy w, or dx += dy w. dx may have the type of the sums.
template <class Device, class X, class T = X>
void matmul_backward_input(Device& dev, Matrix<X> dx, Input<T> dy, Input<T> w, Update update) {
  require_shape("matmul backward", "dy", dy, dx.rows, w.rows);
  require_shape("matmul backward", "dx", dx, dy.rows, w.cols);
  auto op = dev.operation("matmul dx", 2.0 * dx.size() * w.rows,
                          sizeof(X) * dx.size() * (update == Update::add ? 2 : 1) + sizeof(T) * (w.size() + dy.size()));
  if constexpr (Device::computes) compute_matmul_backward_input<X, T>(dev, dx, dy, w, update);
}

// dw += dyᵀ x, dbias += Σ dy, in one or several lanes. Empty ones are not computed: their weights are frozen.
template <class Device, class T, class G>
void matmul_backward_weight(Device& dev, Matrix<G> dw, Matrix<G> dbias, Matrix<T> dy, Input<T> x) {
  require_shape("matmul backward", "input", x, dy.rows, x.cols);
  if (dw) {
    const Index lanes = dw.rows / dy.cols;
    require_shape("matmul backward", "dw", dw, lanes * dy.cols, x.cols);
    auto op = dev.operation("matmul dw", 2.0 * x.size() * dy.cols,
                            2.0 * sizeof(G) * dw.size() + sizeof(T) * (x.size() + dy.size()));
    for_each_tile_of_lanes(lanes, x.rows, dev.tile, [&](Index lane, Rows rows) {
      if constexpr (Device::computes)
        compute_matmul_backward_weight(dev, dw.lane(lane, dy.cols), dy.slice(rows), x.slice(rows));
    });
  }
  if (dbias) add_column_sums(dev, dbias, dy);
}

// --- CPU ---

namespace cpu {

constexpr Index kUnitColumns = 768;  // at most

// Columns of a unit of work. Few rows, as in generation, are divided more finely, so that all threads have work.
inline Index unit_columns(Index rows, Index cols) {
  constexpr Index few = 64;
  const Index units = 2 * omp_get_max_threads(), columns = ceil_div(cols * ceil_div(rows, kTile), units);
  return std::clamp(round_up(columns, few), few, kUnitColumns);
}

// Calls f(rows, columns) for all units of a matrix.
template <class F>
void for_each_unit(Index rows, Index cols, F&& f) {
  const Index width = unit_columns(rows, cols), tiles = ceil_div(rows, kTile), blocks = ceil_div(cols, width);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (Index b = 0; b < blocks; ++b) {
    for (Index t = 0; t < tiles; ++t) f(piece(t, kTile, rows), piece(b, width, cols));
  }
}

// Calls f(sums), which computes a unit of `out`: in place, or for bfloat16 in float32, to be rounded once at the end.
template <class T, class F>
void compute_in_sums(Matrix<T> out, F&& f) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, A>) {
    f(out);
  } else {
    thread_local const Buffer<A> buffer(kTile * kUnitColumns);
    const Matrix<A> sums(buffer.data(), out.rows, out.cols);
    f(sums);
    for (Index i = 0; i < out.rows; ++i) {
      for (Index j = 0; j < out.cols; ++j) out(i, j) = sums(i, j);
    }
  }
}

// y = x wᵀ + bias + residual for a unit.
template <class Y, class T>
void multiply_unit(Matrix<Y> y, Input<T> x, Input<T> w, Input<T> bias = {}, Input<Y> residual = {}) {
  using A = Accumulator<T>;
  compute_in_sums(y, [&](Matrix<A> sums) {
    // `bias ? bias[j] : 0` within a loop would become a masked load from address 0, which is slow.
    for (Index i = 0; i < sums.rows; ++i) {
      if (residual) {
        for (Index j = 0; j < sums.cols; ++j) sums(i, j) = residual(i, j);
      } else {
        std::fill_n(sums.row(i), sums.cols, A(0));
      }
      if (bias) {
        for (Index j = 0; j < sums.cols; ++j) sums(i, j) += bias(0, j);
      }
    }
    y.rows <= kFewRows ? multiply_few_rows<T>(sums, x, w, Op::transposed)
                       : gemm<T>(sums, x, Op::as_is, w, Op::transposed);
  });
}

// dx = dy w, or dx += dy w, for a unit.
template <class X, class T>
void multiply_input_unit(Matrix<X> dx, Input<T> dy, Input<T> w, Update update) {
  using A = Accumulator<T>;
  compute_in_sums(dx, [&](Matrix<A> sums) {
    for (Index i = 0; i < sums.rows; ++i) {
      if (update == Update::add) {
        for (Index j = 0; j < sums.cols; ++j) sums(i, j) = dx(i, j);
      } else {
        std::fill_n(sums.row(i), sums.cols, A(0));
      }
    }
    gemm<T>(sums, dy, Op::as_is, w, Op::as_is);
  });
}

}  // namespace cpu

template <class Y, class T>
void compute_matmul(Cpu&, Matrix<Y> y, Input<T> x, Input<T> w, Input<T> bias, Input<Y> residual) {
  const auto columns = [](auto m, Rows cols) { return m ? m.columns(cols) : m; };
  cpu::for_each_unit(y.rows, y.cols, [&](Rows rows, Rows cols) {
    cpu::multiply_unit<Y, T>(y.slice(rows).columns(cols), x.slice(rows), w.slice(cols), columns(bias, cols),
                             residual ? residual.slice(rows).columns(cols) : residual);
  });
}

template <class X, class T>
void compute_matmul_backward_input(Cpu&, Matrix<X> dx, Input<T> dy, Input<T> w, Update update) {
  cpu::for_each_unit(dx.rows, dx.cols, [&](Rows rows, Rows cols) {
    cpu::multiply_input_unit<X, T>(dx.slice(rows).columns(cols), dy.slice(rows), w.columns(cols), update);
  });
}

template <class T>
void compute_matmul_backward_weight(Cpu&, Matrix<Accumulator<T>> dw, Matrix<T> dy, Input<T> x) {
  cpu::for_each_unit(dw.rows, dw.cols, [&](Rows rows, Rows cols) {
    for (Index t = ceil_div(x.rows, kTile) - 1; t >= 0; --t) {  // last to first
      const Rows tile = piece(t, kTile, x.rows);
      const Input<T> dy_tile = dy.slice(tile).columns(rows.begin, rows.size());
      cpu::gemm<T>(dw.slice(rows).columns(cols.begin, cols.size()), dy_tile, cpu::Op::transposed,
                   x.slice(tile).columns(cols.begin, cols.size()), cpu::Op::as_is);
    }
  });
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class Y, class T>
void compute_matmul(Cuda& dev, Matrix<Y> y, Input<T> x, Input<T> w, Input<T> bias, Input<Y> residual) {
  if (w.rows == 1) return cuda::one_column<Y, T>(dev, y, x, w.data, 1, bias.data, residual);
  const Update update = residual ? Update::add : Update::assign;
  for (const Rows part : cuda::parts_of(w.rows)) {
    const auto of_part = [&](auto m) { return m ? m.columns(part) : m; };
    const Matrix<Y> result = of_part(y);
    cuda::forward_product<T>(result, x, w.slice(part), of_part(bias).data, residual ? of_part(residual) : result,
                             update)
        .compute(dev);
  }
}

template <class X, class T>
void compute_matmul_backward_input(Cuda& dev, Matrix<X> dx, Input<T> dy, Input<T> w, Update update) {
  if (w.cols == 1)
    return cuda::one_column<X, T>(dev, dx, dy, w.data, w.stride, nullptr, update == Update::add ? dx : Matrix<X>());
  for (const Rows part : cuda::parts_of(w.rows)) {
    cuda::input_product<T>(dx, dy.columns(part), w.slice(part), dx, update).compute(dev);
    update = Update::add;
  }
}

template <class T>
void compute_matmul_backward_weight(Cuda& dev, Matrix<float> dw, Matrix<T> dy, Input<T> x) {
  for (Index t = ceil_div(x.rows, dev.tile) - 1; t >= 0; --t) {  // last to first
    const Rows tile = piece(t, dev.tile, x.rows);
    if (dw.rows == 1) {
      cuda::one_row<T>(dev, dw, dy.slice(tile), x.slice(tile));
      continue;
    }
    for (const Rows part : cuda::parts_of(dw.rows)) {
      const Matrix<T> dy_part = dy.slice(tile).columns(part);
      cuda::weight_product<T>(dw.slice(part), dy_part, x.slice(tile), Update::add).compute(dev);
    }
  }
}

#endif

}  // namespace streambp
