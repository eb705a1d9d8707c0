// The causal summary of a layer: all that its rows need to know of earlier rows. Or the gradient of one, to which later
// rows add.
#pragma once

#include <optional>
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/elementwise.cuh"

namespace streambp {

// The size of a layer's summary.
struct SummaryShape {
  Index edge = 0;                    // rows for each tile; 0: a row for each row of the stream
  Index columns;                     // of each matrix
  std::optional<Index> window = {};  // how many rows before a block it must cover; none: all
};

// Each mixer uses its own matrices; the others are empty.
template <class T>
struct Summary {
  Matrix<T> k, v;        // of attention: a row for each row of the stream
  Matrix<T> edges = {};  // of a convolution: some rows for each tile
  Index edge = 0;        // rows of edges for each tile

  // The summary of some rows, which begin with a tile.
  Summary slice(Rows rows) const {
    if (edge > 0) return {{}, {}, edges.slice({rows.begin / kTile * edge, ceil_div(rows.end, kTile) * edge}), edge};
    return {k.slice(rows), v.slice(rows), {}};
  }
  std::vector<Matrix<T>> matrices() const { return edge > 0 ? std::vector{edges} : std::vector{k, v}; }
};

// Of some rows of the stream, on one of the ranks that share it.
template <class T, class Device>
Summary<T> allocate_summary(Device& dev, const SummaryShape& shape, Index rows, Index ranks = 1) {
  const auto matrix = [&](Index rows, Index columns) { return allocate<T>(dev, rows, columns, Kind::keys_values); };
  if (shape.edge > 0) return {{}, {}, matrix(ceil_div(rows, kTile) * shape.edge, shape.columns), shape.edge};
  const Matrix<T> k = matrix(rows, shape.columns / ranks);
  return {k, matrix(rows, shape.columns / ranks), {}};
}

template <class Device, class T>
void zero(Device& dev, const Summary<T>& summary) {
  zero(dev, summary.matrices());
}

template <class Device, class T>
void copy(Device& dev, const Summary<T>& to, const Summary<T>& from) {
  const auto matrices = from.matrices();
  for (std::size_t i = 0; const Matrix<T>& m : to.matrices()) dev.copy(m, matrices[i++]);
}

// A chunk of rows on its way through a mixer.
template <class T, class Activations>
struct MixerChunk {
  StreamRows at;
  Matrix<T> x;      // of this rank's rows of the chunk
  Summary<T> past;  // of the whole stream
  Activations a;
};

}  // namespace streambp
