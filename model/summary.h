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
  Index state = 0;                   // numbers of a recurrence's state, for each tile; ranks share them
  std::optional<Index> window = {};  // how many rows before a block it must cover; none: all
};

// Each mixer uses its own matrices; the others are empty.
template <class T>
struct Summary {
  Matrix<T> k, v;        // of attention: a row for each row of the stream
  Matrix<T> edges = {};  // of a convolution: some rows for each tile
  Index edge = 0;        // rows of edges for each tile
  // Of a recurrence: a row after each tile. Their gradient has one row, because backward goes from chunk to chunk.
  Matrix<Accumulator<T>> states = {};

  // The summary of some rows, which begin with a tile.
  Summary slice(Rows rows) const {
    if (edge == 0) return {k.slice(rows), v.slice(rows)};
    const Rows tiles = {rows.begin / kTile, ceil_div(rows.end, kTile)};
    return {{},
            {},
            edges.slice({tiles.begin * edge, tiles.end * edge}),
            edge,
            states.rows > 1 ? states.slice(tiles) : states};
  }
  std::vector<Matrix<T>> matrices() const { return edge > 0 ? std::vector{edges} : std::vector{k, v}; }
};

enum class SummaryOf { values, gradient };

// Of some rows of the stream, on one of the ranks that share it.
template <class T, class Device>
Summary<T> allocate_summary(Device& dev, const SummaryShape& shape, Index rows, Index ranks = 1,
                            SummaryOf of = SummaryOf::values) {
  const Index tiles = ceil_div(rows, kTile);
  const auto matrix = [&](Index rows, Index columns) { return allocate<T>(dev, rows, columns, Kind::keys_values); };
  if (shape.edge == 0) {
    const Matrix<T> k = matrix(rows, shape.columns / ranks);
    return {k, matrix(rows, shape.columns / ranks)};
  }
  Summary<T> summary = {{}, {}, matrix(tiles * shape.edge, shape.columns), shape.edge};
  if (shape.state > 0)
    summary.states =
        allocate<Accumulator<T>>(dev, of == SummaryOf::gradient ? 1 : tiles, shape.state / ranks, Kind::keys_values);
  return summary;
}

template <class Device, class T>
void zero(Device& dev, const Summary<T>& summary) {
  zero(dev, summary.matrices());
  if (summary.states) zero(dev, summary.states);
}

template <class Device, class T>
void copy(Device& dev, const Summary<T>& to, const Summary<T>& from) {
  const auto matrices = from.matrices();
  for (std::size_t i = 0; const Matrix<T>& m : to.matrices()) dev.copy(m, matrices[i++]);
  if (to.states) dev.copy(to.states, from.states);
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
