// Block coordinate descent (BAdam): only one block of layers is trained at a time, so that gradient and optimizer state
// are those of a few layers. After some steps it is the next block's turn, with a fresh state. Embedding, head and the
// last norm are frozen.
#pragma once

#include <set>

#include "kernels/base/random.h"
#include "model/parameters.h"

namespace streambp {

enum class BlockOrder { ascending, descending, random };

struct BlockSettings {
  Index layers = 0;  // of a block; 0: no blocks, all parameters are trained
  Index steps = 50;  // until the next block's turn
  BlockOrder order = BlockOrder::random;
  std::uint64_t seed = 1;

  explicit operator bool() const { return layers > 0; }
};

// Whether all blocks of so many layers have the same kinds of layers, so that they can take turns with one optimizer state.
inline bool blocks_are_alike(const Config& c, Index layers) {
  for (Index l = layers; l < c.layers; ++l)
    if (c.kind(l) != c.kind(l % layers)) return false;
  return c.layers % layers == 0;
}

// The block of a step; steps count from one. Every block has its turn before any has its next.
inline Index block_of_step(const BlockSettings& s, Index all_layers, Index step) {
  const Index turn = (step - 1) / s.steps, count = ceil_div(all_layers, s.layers), cycle = turn / count;
  if (s.order == BlockOrder::ascending) return turn % count;
  if (s.order == BlockOrder::descending) return count - 1 - turn % count;
  const Random random(s.seed, mix(static_cast<std::uint64_t>(cycle) + 0xb10c));
  return shuffled(static_cast<std::size_t>(count), random)[static_cast<std::size_t>(turn % count)];
}

// The steps since the block's turn began, counted from one.
inline Index step_of_turn(const BlockSettings& s, Index step) { return s ? (step - 1) % s.steps + 1 : step; }

// The names of a block's parameters.
inline std::set<std::string> names_of_block(const Config& c, const BlockSettings& s, Index block) {
  Tensors<float> none(c);
  std::set<std::string> names;
  for (Index l = block * s.layers; l < std::min(c.layers, (block + 1) * s.layers); ++l) {
    for (const auto& e : layer_table(c, l, none.layers[static_cast<std::size_t>(l)])) names.insert(e.parameter.name);
  }
  return names;
}

}  // namespace streambp
