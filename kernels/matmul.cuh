// Matrix multiplication: a linear layer with weight w (outputs x inputs) and optional bias and residual.
//
//   forward          y  = x wᵀ + bias + residual
//   backward         dx = dy w              (or dx += dy w)
//                    dw += dyᵀ x
//                    dbias += Σ_rows dy
//
// CPU: the unit of work is one tile of rows times one block of columns, computed by a single-threaded GEMM of the CBLAS
// library; threads share the units. Units have the same shape for any chunk and any number of threads, so every result
// has the same bits. dw adds tiles from last to first. Generation multiplies only a few rows at a time and is bound by
// reading w, so a last tile of at most kFewRows rows uses cpu::few_rows.
//
// GPU: cuBLASLt. Its algorithm is chosen once per shape of weight, for one tile of rows, and used for any number of
// rows. It may not split a sum across blocks, so the result of a row does not depend on other rows. dw adds tiles (of
// the device's size) from last to first, in float32.
#pragma once

#include "kernels/base/device.cuh"
#include "kernels/base/gemm.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/elementwise.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/cublas.cuh"
#endif

namespace streambp {

// y = x wᵀ + bias + residual
template <class Device, class T>
void matmul(Device& dev, Matrix<T> y, Input<T> x, Input<T> w, Input<T> bias = {}, Input<T> residual = {}) {
  require_shape("matmul", "input", x, y.rows, w.cols);
  require_shape("matmul", "output", y, x.rows, w.rows);
  if (bias) require_shape("matmul", "bias", bias, 1, y.cols);
  if (residual) require_shape("matmul", "residual", residual, y.rows, y.cols);
  auto op =
      dev.operation("matmul", 2.0 * y.size() * w.cols, sizeof(T) * (x.size() + w.size() + y.size() + residual.size()));
  if constexpr (Device::computes) compute_matmul(dev, y, x, w, bias, residual);
}

// dx = dy w, or dx += dy w
template <class Device, class T>
void matmul_backward_input(Device& dev, Matrix<T> dx, Input<T> dy, Input<T> w, Update update) {
  require_shape("matmul backward", "dy", dy, dx.rows, w.rows);
  require_shape("matmul backward", "dx", dx, dy.rows, w.cols);
  auto op = dev.operation("matmul dx", 2.0 * dx.size() * w.rows,
                          sizeof(T) * (dx.size() * (update == Update::add ? 2 : 1) + w.size() + dy.size()));
  if constexpr (Device::computes) compute_matmul_backward_input(dev, dx, dy, w, update);
}

// dw += dyᵀ x, dbias += Σ dy
template <class Device, class T, class G>
void matmul_backward_weight(Device& dev, Matrix<G> dw, Matrix<G> dbias, Matrix<T> dy, Input<T> x) {
  require_shape("matmul backward", "dw", dw, dy.cols, x.cols);
  require_shape("matmul backward", "input", x, dy.rows, dw.cols);
  {
    auto op = dev.operation("matmul dw", 2.0 * dw.size() * x.rows,
                            2.0 * sizeof(G) * dw.size() + sizeof(T) * (x.size() + dy.size()));
    if constexpr (Device::computes) compute_matmul_backward_weight(dev, dw, dy, x);
  }
  if (dbias) add_column_sums(dev, dbias, dy);
}

// --- CPU ---

namespace cpu {

constexpr Index kColumns = 384;        // columns of a unit of work
constexpr Index kWeightColumns = 768;  // columns of a unit of dw; it has kColumns rows
constexpr Index kFewRows = 16;         // for more rows the library is as fast

}  // namespace cpu

template <class T>
void matmul_few_rows(Matrix<T> y, Input<T> x, Input<T> w, Input<T> bias, Input<T> residual) {
  constexpr Index block = 32;  // rows of w that a thread takes at a time
#pragma omp parallel for schedule(dynamic)
  for (Index b = 0; b < ceil_div(w.rows, block); ++b) {
    const Rows cols = piece(b, block, w.rows);
    T products[cpu::kFewRows * block];
    const Matrix<T> product(products, y.rows, cols.size());
    cpu::few_rows<8, T>(product, x, w.slice(cols));
    for (Index i = 0; i < y.rows; ++i) {
      for (Index j = cols.begin; j < cols.end; ++j) {
        const T start = residual ? residual(i, j) : T(0);
        y(i, j) = (bias ? start + bias(0, j) : start) + product(i, j - cols.begin);
      }
    }
  }
}

template <class T>
void compute_matmul(Cpu&, Matrix<T> y, Input<T> x, Input<T> w, Input<T> bias, Input<T> residual) {
  const Rows last_tile = {y.rows / kTile * kTile, y.rows};
  if (0 < last_tile.size() && last_tile.size() <= cpu::kFewRows) {
    matmul_few_rows<T>(y.slice(last_tile), x.slice(last_tile), w, bias,
                       residual ? residual.slice(last_tile) : residual);
    y.rows = last_tile.begin;
  }
  const Index tiles = ceil_div(y.rows, kTile), blocks = ceil_div(y.cols, cpu::kColumns);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (Index b = 0; b < blocks; ++b) {
    for (Index t = 0; t < tiles; ++t) {
      const Rows rows = piece(t, kTile, y.rows), cols = piece(b, cpu::kColumns, y.cols);
      const Matrix<T> out = y.slice(rows).columns(cols.begin, cols.size());
      for (Index i = 0; i < out.rows && (bias || residual); ++i) {
        for (Index j = 0; j < out.cols; ++j) {
          const T start = residual ? residual(rows.begin + i, cols.begin + j) : T(0);
          out(i, j) = bias ? start + bias(0, cols.begin + j) : start;
        }
      }
      cpu::gemm<T>(1, x.slice(rows), cpu::Op::as_is, w.slice(cols), cpu::Op::transposed, bias || residual ? 1 : 0, out);
    }
  }
}

template <class T>
void compute_matmul_backward_input(Cpu&, Matrix<T> dx, Input<T> dy, Input<T> w, Update update) {
  const Index tiles = ceil_div(dx.rows, kTile), blocks = ceil_div(dx.cols, cpu::kColumns);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (Index b = 0; b < blocks; ++b) {
    for (Index t = 0; t < tiles; ++t) {
      const Rows rows = piece(t, kTile, dx.rows), cols = piece(b, cpu::kColumns, dx.cols);
      cpu::gemm<T>(1, dy.slice(rows), cpu::Op::as_is, w.columns(cols.begin, cols.size()), cpu::Op::as_is,
                   update == Update::add ? 1 : 0, dx.slice(rows).columns(cols.begin, cols.size()));
    }
  }
}

template <class T>
void compute_matmul_backward_weight(Cpu&, Matrix<T> dw, Input<T> dy, Input<T> x) {
  const Index row_blocks = ceil_div(dw.rows, cpu::kColumns), col_blocks = ceil_div(dw.cols, cpu::kWeightColumns);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (Index r = 0; r < row_blocks; ++r) {
    for (Index c = 0; c < col_blocks; ++c) {
      const Rows rows = piece(r, cpu::kColumns, dw.rows), cols = piece(c, cpu::kWeightColumns, dw.cols);
      for (Index t = ceil_div(x.rows, kTile) - 1; t >= 0; --t) {  // last to first
        const Rows tile = piece(t, kTile, x.rows);
        cpu::gemm<T>(1, dy.slice(tile).columns(rows.begin, rows.size()), cpu::Op::transposed,
                     x.slice(tile).columns(cols.begin, cols.size()), cpu::Op::as_is, 1,
                     dw.slice(rows).columns(cols.begin, cols.size()));
      }
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class T>
void compute_matmul(Cuda& dev, Matrix<T> y, Input<T> x, Input<T> w, Input<T> bias, Input<T> residual) {
  const Input<T> start = residual ? residual : y;
  const Update update = residual ? Update::add : Update::assign;
  cuda::Product{y, CUBLAS_OP_T, w, CUBLAS_OP_N, x, bias.data, start, update, cuda::Along::result}.compute(dev);
}

template <class T>
void compute_matmul_backward_input(Cuda& dev, Matrix<T> dx, Input<T> dy, Input<T> w, Update update) {
  cuda::Product{dx, CUBLAS_OP_N, w, CUBLAS_OP_N, dy, nullptr, dx, update, cuda::Along::result}.compute(dev);
}

template <class T>
void compute_matmul_backward_weight(Cuda& dev, Matrix<float> dw, Matrix<T> dy, Input<T> x) {
  for (Index t = ceil_div(x.rows, dev.tile) - 1; t >= 0; --t) {  // last to first
    const Rows tile = piece(t, dev.tile, x.rows);
    const Input<T> x_tile = x.slice(tile), dy_tile = dy.slice(tile);
    cuda::Product{dw, CUBLAS_OP_N, x_tile, CUBLAS_OP_T, dy_tile, nullptr, dw, Update::add, cuda::Along::sum}.compute(
        dev);
  }
}

#endif

}  // namespace streambp
