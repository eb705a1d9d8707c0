// Small things: fill with zeros, add, convert between types, sums over rows, the sum of squares.
//
//   add_column_sums    out[j] += Σ_i x[i][j]     one partial sum per tile of rows, added up from the last tile
//   sum_of_squares     Σ x²                      in double, row by row, whatever the number of threads
#pragma once

#include <vector>

#include "device.cuh"
#include "matrix.cuh"

namespace streambp {

namespace cpu {

// out[j] += Σ_tiles partial[tile][j], last tile first
template <class G, class T>
void add_tiles(Matrix<G> out, Matrix<T> partial) {
#pragma omp parallel for
  for (Index j = 0; j < out.cols; ++j) {
    for (Index t = partial.rows - 1; t >= 0; --t) out(0, j) += partial(t, j);
  }
}

template <class T>
double sum_of_squares(Matrix<T> x) {
  std::vector<double> rows(static_cast<std::size_t>(x.rows));
#pragma omp parallel for
  for (Index i = 0; i < x.rows; ++i) {
    const T* row = x.row(i);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (Index j = 0; j < x.cols; ++j) sum += static_cast<double>(row[j]) * static_cast<double>(row[j]);
    rows[static_cast<std::size_t>(i)] = sum;
  }
  double sum = 0;
  for (double row : rows) sum += row;
  return sum;
}

}  // namespace cpu

template <class Device, class T>
void zero(Device& dev, Matrix<T> x) {
  auto op = dev.operation("zero", 0, 1.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) {
#pragma omp parallel for
    for (Index i = 0; i < x.rows; ++i) std::fill_n(x.row(i), x.cols, T(0));
  }
}

// y += x, in y's type
template <class Device, class T, class U>
void add(Device& dev, Matrix<T> y, Matrix<U> x) {
  require_shape("add", "x", x, y.rows, y.cols);
  auto op = dev.operation("add", 1.0 * x.size(), (2.0 * sizeof(T) + sizeof(U)) * x.size());
  if constexpr (Device::computes) {
#pragma omp parallel for
    for (Index i = 0; i < x.rows; ++i) {
      for (Index j = 0; j < x.cols; ++j) y(i, j) += static_cast<T>(x(i, j));
    }
  }
}

// y = x, in y's type
template <class Device, class T, class U>
void convert(Device& dev, Matrix<T> y, Matrix<U> x) {
  require_shape("convert", "x", x, y.rows, y.cols);
  auto op = dev.operation("convert", 0, (1.0 * sizeof(T) + sizeof(U)) * x.size());
  if constexpr (Device::computes) {
#pragma omp parallel for
    for (Index i = 0; i < x.rows; ++i) {
      for (Index j = 0; j < x.cols; ++j) y(i, j) = static_cast<T>(x(i, j));
    }
  }
}

template <class Device, class G, class T>
void add_column_sums(Device& dev, Matrix<G> out, Matrix<T> x) {
  require_shape("column sums", "output", out, 1, x.cols);
  auto scope = dev.scope();
  auto partial = dev.template allocate<G>(ceil_div(x.rows, kTile), x.cols, Kind::chunk);
  auto op = dev.operation("bias gradient", 1.0 * x.size(), 1.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) {
#pragma omp parallel for
    for (Index t = 0; t < partial.rows; ++t) {
      G* sum = partial.row(t);
      std::fill_n(sum, x.cols, G(0));
      for (Index i = t * kTile; i < std::min(x.rows, (t + 1) * kTile); ++i) {
        for (Index j = 0; j < x.cols; ++j) sum[j] += x(i, j);
      }
    }
    cpu::add_tiles(out, partial);
  }
}

template <class Device, class T>
double sum_of_squares(Device& dev, Matrix<T> x) {
  auto op = dev.operation("gradient norm", 2.0 * x.size(), 1.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) return cpu::sum_of_squares(x);
  return 0;
}

}  // namespace streambp
