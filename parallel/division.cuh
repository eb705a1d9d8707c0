// How the rows of a token stream are divided: block b of rows, one tile, belongs to rank b mod R of the ranks that share
// the stream; within a process, to lane b mod L. Every rank and every lane sums its own weight gradients, and these sums
// are added in order. So R ranks give the bits of one process with R lanes.
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

  // The rank's part of numbers per row of the stream.
  template <class T>
  std::vector<T> own(const std::vector<T>& all) const {
    std::vector<T> mine(static_cast<std::size_t>(own()));
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = all[static_cast<std::size_t>(place(static_cast<Index>(i)))];
    return mine;
  }
};

// Some rows of the stream: all of them, and where this rank's are among its own.
struct DividedRows {
  Rows all, own;
  DividedRows(Rows rows) : all(rows), own(rows) {}
  DividedRows(Rows all, Rows own) : all(all), own(own) {}
};

// Rows of a chunk that add to the weight gradients of one lane.
struct LanePart {
  Rows rows;  // of the chunk
  Index lane;
};

// The parts of some of this rank's rows, last to first. With one lane, all rows are one part.
inline std::vector<LanePart> lane_parts(const Division& d, Rows own) {
  if (d.lanes == 1) return {{{0, own.size()}, 0}};
  std::vector<LanePart> parts;
  for (Index end = own.end; end > own.begin;) {
    const Index begin = std::max(own.begin, (end - 1) / d.tile * d.tile);
    parts.push_back({Rows{begin, end}.relative_to(own), d.lane(begin)});
    end = begin;
  }
  return parts;
}

}  // namespace streambp
