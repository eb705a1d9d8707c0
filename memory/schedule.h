// The settings of the walk: how many rows go through a layer at a time, and what each layer keeps for backward, and where.
#pragma once

#include <algorithm>
#include <vector>

#include "model/parts.h"
#include "parallel/division.h"

namespace streambp {

// One for each layer of a model, or the same for all.
class KeptSets {
 public:
  KeptSets(const KeptParts& all = KeptParts::inputs()) : all_(all) {}

  const KeptParts& of(Index layer) const { return layers_.empty() ? all_ : layers_[static_cast<std::size_t>(layer)]; }
  KeptSets with(Part part, Place place = Place::near) const {
    KeptSets result = all_.with(part, place);
    for (const KeptParts& layer : layers_) result.layers_.push_back(layer.with(part, place));
    return result;
  }
  // In one of a model's layers.
  KeptSets with(Index layer, Index layers, Part part, Place place = Place::near) const {
    KeptSets result = *this;
    result.layers_.resize(static_cast<std::size_t>(layers), all_);
    KeptParts& parts = result.layers_[static_cast<std::size_t>(layer)];
    parts = parts.with(part, place);
    return result;
  }

  bool operator==(const KeptSets&) const = default;

 private:
  KeptParts all_;
  std::vector<KeptParts> layers_;
};

// Where a step keeps its data.
struct Places {
  Place inputs = Place::near;                            // saved inputs of layers
  Place optimizer = Place::near;                         // the optimizer's state
  Place weights = Place::near, gradients = Place::near;  // the matrices of layers

  bool operator==(const Places&) const = default;
};

struct Schedule {
  KeptSets kept;
  Index chunk;       // rows of a layer's activations that exist at once, a multiple of kTile
  Index head_chunk;  // rows of logits that exist at once
  Index block = 0;   // rows that go through all layers before the next ones do, in chunks; 0: all

  // Chunks of whole tiles of this rank, as many for every lane.
  Schedule in_whole_tiles(const Division& d) const {
    Schedule result = *this;
    for (Index* size : {&result.chunk, &result.head_chunk}) {
      require(*size % d.tile == 0 || *size >= d.own(), "chunks of ", *size, " rows are not a multiple of ", d.tile,
              " rows, the tile by which this device sums weight gradients");
      if (d.lanes > 1) *size = round_up(*size, d.tile * d.lanes);
    }
    if (block > 0) result.block = round_up(block, result.chunk);
    return result;
  }

  static Schedule full(Index rows) { return {KeptParts::everything(), round_up(rows, kTile), round_up(rows, kTile)}; }
  static Schedule checkpoint(Index rows) { return {KeptParts::inputs(), round_up(rows, kTile), round_up(rows, kTile)}; }
  static Schedule stream(Index chunk, Index head_chunk, const KeptSets& kept = KeptParts::inputs()) {
    return {kept, chunk, head_chunk};
  }
};

// The chunks of a stream, first to last.
inline std::vector<Rows> chunks(Index rows, Index chunk) {
  require(chunk > 0 && chunk % kTile == 0, "a chunk must be a positive multiple of ", kTile, " rows, not ", chunk);
  std::vector<Rows> result;
  for (Index begin = 0; begin < rows; begin += chunk) result.push_back({begin, std::min(rows, begin + chunk)});
  return result;
}

// Rows that go through all layers before the next ones do.
struct Block {
  DividedRows rows;
  bool last;                                     // of the stream
  std::vector<DividedRows> chunks, head_chunks;  // their own rows count from the block's first own row

  // This rank's rows of a chunk, among all of its own.
  Rows own(const DividedRows& chunk) const {
    return {rows.own.begin + chunk.own.begin, rows.own.begin + chunk.own.end};
  }
};

// Ranks that share a stream have `chunk` rows each of a chunk.
inline std::vector<DividedRows> chunks(const Division& division, const DividedRows& block, Index chunk) {
  std::vector<DividedRows> result;
  for (const Rows part : chunks(block.all.size(), chunk * division.ranks)) {
    const Rows all = {block.all.begin + part.begin, block.all.begin + part.end}, own = division.own(all);
    result.push_back({all, {own.begin - block.own.begin, own.end - block.own.begin}, result.size()});
  }
  return result;
}

// The blocks of a stream, first to last. longest: of the streams of all ranks; they all have the same number of blocks, so
// that they exchange weights equally often. The last blocks of a shorter stream are empty.
inline std::vector<Block> blocks(const Division& division, const Schedule& schedule, Index longest) {
  longest = std::max(longest, division.rows);
  const Index size = schedule.block > 0 ? schedule.block * division.ranks : std::max<Index>(longest, 1);
  std::vector<Block> result;
  for (Index begin = 0; begin == 0 || begin < longest; begin += size) {
    const Rows all = {std::min(begin, division.rows), std::min(begin + size, division.rows)};
    const DividedRows rows = {all, division.own(all), result.size()};
    result.push_back({rows, begin + size >= longest, chunks(division, rows, schedule.chunk),
                      chunks(division, rows, schedule.head_chunk)});
  }
  return result;
}

template <class T>
std::vector<T> last_to_first(const std::vector<T>& all) {
  return {all.rbegin(), all.rend()};
}

}  // namespace streambp
