// How the rows of a token stream are divided: tile t belongs to rank t mod R of the ranks that share the stream; of a rank's
// tiles, tile t to lane t mod L (memory/sums.h says what a lane is).
#pragma once

#include <vector>

#include "kernels/base/matrix.cuh"

namespace streambp {

struct Division {
  Index rows = 0, tile = kTile;  // of the stream
  Index rank = 0, ranks = 1;
  Index lanes = 1;

  // How many of the first n rows of the stream belong to this rank.
  Index own(Index n) const {
    const Index tiles = n / tile, last = n % tile;
    return (tiles + ranks - 1 - rank) / ranks * tile + (tiles % ranks == rank ? last : 0);
  }
  Index own() const { return own(rows); }
  Rows own(Rows part) const { return {own(part.begin), own(part.end)}; }
  // The place in the stream of one of this rank's rows.
  Index place(Index row) const { return (row / tile * ranks + rank) * tile + row % tile; }
  Index lane(Index row) const { return row / tile % lanes; }

  // The rank's share of numbers per row of the stream.
  template <class T>
  std::vector<T> own(const std::vector<T>& all) const {
    std::vector<T> mine(own());
    for (Index i = 0; i < own(); ++i) mine[i] = all[place(i)];
    return mine;
  }
};

// Some rows of the stream: all of them, and where this rank's are among its own rows.
struct DividedRows {
  Rows all, own;
  std::size_t number = 0;  // of a chunk: its place among the chunks of the stream
  DividedRows(Rows rows) : all(rows), own(rows) {}
  DividedRows(Rows all, Rows own, std::size_t number = 0) : all(all), own(own), number(number) {}
};

}  // namespace streambp
