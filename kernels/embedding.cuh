// Embedding:
//
//   forward          x[i] = scale tokens[token[i]] + positions[position[i]]       (second term: learned positions only)
//   backward         dtokens[token[i]] += scale dx[i]                              scale: √hidden in Gemma, else 1
//                    dpositions[position[i]] += dx[i]                              rows i from last to first
//
// In the backward pass, the gradient of a table row is the sum over all rows of the stream that use it. by_token and
// by_position list rows of the stream so that these are adjacent, from last to first.
#pragma once

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/four_bits.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

// The token and the position of each row; without tokens, row i of the table is for row i. For the backward pass, by_token
// lists the rows sorted by lane, then by token, and by_position by lane, then by position.
struct EmbeddingIndex {
  Matrix<const std::int32_t> tokens, positions;
  Matrix<const std::int32_t> by_token = {}, by_position = {};
  Index lanes = 1;
};

// With RoPE the table of positions is empty; without `tokens`, that table is quantised.
template <class T>
struct EmbeddingTables {
  Matrix<T> tokens, positions;
  FourBits quantised = {};
};

template <class Device, class T>
void embedding(Device& dev, Matrix<T> x, const EmbeddingIndex& index,
               const std::type_identity_t<EmbeddingTables<T>>& tables, double scale) {
  if (index.tokens) require_shape("embedding", "tokens", index.tokens, 1, x.rows);
  require_shape("embedding", "positions", index.positions, 1, x.rows);
  if (!tables.tokens) {
    dequantise(dev, x, tables.quantised.blocks, index.tokens);
    if (scale == 1 && !tables.positions) return;
    return embedding(dev, x, {{}, index.positions}, {x, tables.positions}, scale);
  }
  require_shape("embedding", "tokens' table", tables.tokens, tables.tokens.rows, x.cols);
  if (tables.positions) require_shape("embedding", "positions' table", tables.positions, tables.positions.rows, x.cols);
  auto op = dev.operation("embedding", tables.positions ? x.size() : 0, 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) compute_embedding(dev, x, index, tables, static_cast<T>(scale));
}

// The gradient of a table in one or several lanes, one below the other, and the rows of the stream that add to it.
template <class G>
struct TableSums {
  Matrix<G> sums;
  Matrix<const std::int32_t> indices, sorted;
  Index rows, lanes, tile;  // of the table

  // The row of `sums` to which row i of the stream adds.
  constexpr Index row(Index i) const { return i / tile % lanes * rows + indices(0, i); }
};

// An empty table is frozen, or with RoPE there are no positions.
template <class Device, class T, class G>
void embedding_backward(Device& dev, const EmbeddingTables<G>& dtables, const EmbeddingIndex& index, Matrix<T> dx,
                        double scale) {
  require_shape("embedding backward", "tokens", index.tokens, 1, dx.rows);
  if (dtables.positions)
    require_shape("embedding backward", "rows by position", index.by_position, 1, index.by_token.cols);
  if (dtables.tokens) require_shape("embedding backward", "dtable", dtables.tokens, dtables.tokens.rows, dx.cols);
  if (!dtables.tokens && !dtables.positions) return;
  const double size = static_cast<double>(index.by_token.cols * dx.cols);
  auto op = dev.operation("embedding dw", size, (1.0 * sizeof(T) + 2.0 * sizeof(G)) * size);
  if constexpr (Device::computes) {
    const auto table = [&](Matrix<G> sums, Matrix<const std::int32_t> rows, Matrix<const std::int32_t> sorted) {
      return TableSums<G>{sums, rows, sorted, sums.rows / index.lanes, index.lanes, dev.tile};
    };
    if (dtables.tokens)
      scatter_add_rows(dev, table(dtables.tokens, index.tokens, index.by_token), dx, static_cast<T>(scale));
    if (dtables.positions)
      scatter_add_rows(dev, table(dtables.positions, index.positions, index.by_position), dx, T(1));
  }
}

// --- CPU ---

template <class T>
void compute_embedding(Cpu&, Matrix<T> x, const EmbeddingIndex& index, const EmbeddingTables<T>& tables, T scale) {
  using A = Accumulator<T>;
#pragma omp parallel for if (x.size() > kWorthThreads)
  for (Index i = 0; i < x.rows; ++i) {
    const T* token = tables.tokens.row(index.tokens ? index.tokens(0, i) : i);
    const T* position = tables.positions ? tables.positions.row(index.positions(0, i)) : nullptr;
    if (position) {  // two loops, as in norm.cuh
      for (Index j = 0; j < x.cols; ++j) x(i, j) = A(scale) * token[j] + A(position[j]);
    } else {
      for (Index j = 0; j < x.cols; ++j) x(i, j) = A(scale) * token[j];
    }
  }
}

// Threads split the columns, so every sum adds its rows in order.
template <class T, class G>
void scatter_add_rows(Cpu&, const TableSums<G>& table, Matrix<T> dx, T scale) {
  constexpr Index block = 64;
#pragma omp parallel for
  for (Index b = 0; b < ceil_div(dx.cols, block); ++b) {
    for (Index slot = 0; slot < table.sorted.cols; ++slot) {
      const Index i = table.sorted(0, slot);
      G* row = table.sums.row(table.row(i));
      for (Index j = b * block; j < std::min(dx.cols, (b + 1) * block); ++j) row[j] += G(scale) * dx(i, j);
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class T>
void compute_embedding(Cuda& dev, Matrix<T> x, const EmbeddingIndex& index, const EmbeddingTables<T>& tables,
                       T table_scale) {
  const Matrix<const std::int32_t> tokens = index.tokens, positions = index.positions;
  const Matrix<T> token_table = tables.tokens, position_table = tables.positions;
  const auto scale = static_cast<float>(table_scale);
  auto f = [=] __device__(auto n, Index i, Index j) {
    auto value = cuda::load<n()>(token_table.row(tokens ? tokens(0, i) : i) + j);
    for (int k = 0; k < n(); ++k) value.x[k] *= scale;
    if (position_table) {
      const auto position = cuda::load<n()>(position_table.row(positions(0, i)) + j);
      for (int k = 0; k < n(); ++k) value.x[k] += position.x[k];
    }
    cuda::store(x.row(i) + j, value);
  };
  cuda::for_each_pack(dev, x.rows, x.cols, f, x, token_table, position_table);
}

// The thread at the first slot of an index sums all slots of that index.
template <class T, class G>
void scatter_add_rows(Cuda& dev, const TableSums<G>& table, Matrix<T> dx, T table_scale) {
  const auto scale = static_cast<float>(table_scale);
  auto f = [=] __device__(auto n, Index first, Index j) {
    const auto row_of = [&](Index slot) { return table.row(table.sorted(0, slot)); };
    const Index row = row_of(first);
    if (first > 0 && row_of(first - 1) == row) return;
    auto sum = cuda::load<n()>(table.sums.row(row) + j);
    for (Index slot = first; slot < table.sorted.cols && row_of(slot) == row; ++slot) {
      const auto term = cuda::load<n()>(dx.row(table.sorted(0, slot)) + j);
      for (int k = 0; k < n(); ++k) sum.x[k] = multiply_add(scale, term.x[k], sum.x[k]);
    }
    cuda::store(table.sums.row(row) + j, sum);
  };
  cuda::for_each_pack(dev, table.sorted.cols, dx.cols, f, table.sums, dx);
}

#endif

}  // namespace streambp
