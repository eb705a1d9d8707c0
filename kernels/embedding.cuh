// Embedding: the first activation of a token, and the gradient on its way back.
//
//   forward          x[i] = table[token[i]] + positions[position[i]]      (the second only where positions are learned)
//   backward         dtable[token[i]] += dx[i]
//                    dpositions[position[i]] += dx[i]                     rows i from the last to the first
#pragma once

#include "device.cuh"
#include "matrix.cuh"

namespace streambp {

namespace cpu {

template <class T>
void embedding(Matrix<T> x, Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> positions, Input<T> table,
               Input<T> position_table) {
#pragma omp parallel for
  for (Index i = 0; i < x.rows; ++i) {
    const T* token_row = table.row(tokens(0, i));
    const T* position_row = position_table ? position_table.row(positions(0, i)) : nullptr;
    for (Index j = 0; j < x.cols; ++j) x(i, j) = position_row ? token_row[j] + position_row[j] : token_row[j];
  }
}

// Threads share out columns, so that each one can add the rows in order.
template <class T, class G>
void scatter_add_rows(Matrix<G> table, Matrix<const std::int32_t> indices, Matrix<T> dx) {
  constexpr Index block = 64;
#pragma omp parallel for
  for (Index b = 0; b < ceil_div(dx.cols, block); ++b) {
    for (Index i = dx.rows - 1; i >= 0; --i) {
      G* row = table.row(indices(0, i));
      for (Index j = b * block; j < std::min(dx.cols, (b + 1) * block); ++j) row[j] += dx(i, j);
    }
  }
}

}  // namespace cpu

template <class Device, class T>
void embedding(Device& dev, Matrix<T> x, Matrix<const std::int32_t> tokens, Matrix<const std::int32_t> positions,
               Input<T> table, Input<T> position_table = {}) {
  require_shape("embedding", "tokens", tokens, 1, x.rows);
  require_shape("embedding", "positions", positions, 1, x.rows);
  require_shape("embedding", "table", table, table.rows, x.cols);
  auto op = dev.operation("embedding", position_table ? x.size() : 0, 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) cpu::embedding(x, tokens, positions, table, position_table);
}

template <class Device, class T, class G>
void embedding_backward(Device& dev, Matrix<G> dtable, Matrix<G> dposition_table, Matrix<const std::int32_t> tokens,
                        Matrix<const std::int32_t> positions, Matrix<T> dx) {
  require_shape("embedding backward", "tokens", tokens, 1, dx.rows);
  require_shape("embedding backward", "dtable", dtable, dtable.rows, dx.cols);
  auto op = dev.operation("embedding dw", dx.size(), (1.0 * sizeof(T) + 2.0 * sizeof(G)) * dx.size());
  if constexpr (Device::computes) {
    cpu::scatter_add_rows(dtable, tokens, dx);
    if (dposition_table) cpu::scatter_add_rows(dposition_table, positions, dx);
  }
}

}  // namespace streambp
