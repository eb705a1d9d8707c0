// The settings of the walk: how many rows go through a layer at a time, and what is kept for backward, and where.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/base/far.h"
#include "parallel/division.h"

namespace streambp {

// What stays in memory between forward and backward. `nothing` is for forward only.
enum class Keep { nothing, inputs, activations };

// Where a step keeps its data.
struct Places {
  Place inputs = Place::near;     // saved inputs of layers
  Place optimizer = Place::near;  // the optimizer's state
  Place attention = Place::nowhere;
  Place weights = Place::near, gradients = Place::near;  // the matrices of layers

  bool operator==(const Places&) const = default;
};

struct Schedule {
  Keep keep;
  Index chunk;       // rows of a layer's activations that exist at once, a multiple of kTile
  Index head_chunk;  // rows of logits that exist at once
  Place inputs = Place::near;
  Place attention = Place::nowhere;  // attention's outputs; with Keep::inputs only

  // Chunks of whole tiles of this rank, as many for every lane.
  Schedule in_whole_tiles(const Division& d) const {
    Schedule result = *this;
    for (Index* size : {&result.chunk, &result.head_chunk}) {
      require(*size % d.tile == 0 || *size >= d.own(), "chunks of ", *size, " rows are not a multiple of ", d.tile,
              " rows, the tile by which this device sums weight gradients");
      if (d.lanes > 1) *size = round_up(*size, d.tile * d.lanes);
    }
    return result;
  }

  static Schedule full(Index rows) { return {Keep::activations, round_up(rows, kTile), round_up(rows, kTile)}; }
  static Schedule checkpoint(Index rows) { return {Keep::inputs, round_up(rows, kTile), round_up(rows, kTile)}; }
  static Schedule stream(Index chunk, Index head_chunk) { return {Keep::inputs, chunk, head_chunk}; }
};

// The chunks of a stream, first to last.
inline std::vector<Rows> chunks(Index rows, Index chunk) {
  require(chunk > 0 && chunk % kTile == 0, "a chunk must be a positive multiple of ", kTile, " rows, not ", chunk);
  std::vector<Rows> result;
  for (Index begin = 0; begin < rows; begin += chunk) result.push_back({begin, std::min(rows, begin + chunk)});
  return result;
}
// Ranks that share a stream have `chunk` rows each of a chunk.
inline std::vector<DividedRows> chunks(const Division& division, Index chunk) {
  std::vector<DividedRows> result;
  for (const Rows all : chunks(division.rows, chunk * division.ranks))
    result.push_back({all, division.own(all), result.size()});
  return result;
}
template <class Chunk>
std::vector<Chunk> last_to_first(const std::vector<Chunk>& chunks) {
  return {chunks.rbegin(), chunks.rend()};
}

}  // namespace streambp
