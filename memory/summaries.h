// What passes from block to block of a stream: the causal summaries of layers, K and V of all rows that a block attends to,
// and their gradients; and the residual stream, whose memory holds its gradient in the end.
//
//   one block        a layer's K, V, dK, dV are the caller's: they exist while the layer is computed
//   several blocks   a block attends to rows of blocks before it, and its backward pass adds to their dK, dV. So K, V, dK
//                    and dV of all rows stay until the step's end. Of a layer with a window shorter than a block,
//                    only the rows in the window before each block stay, and of dK and dV those before the current block
//
// In a layer with a window, attention then works on a part of the stream as if it were the stream:
//
//   rows            0            block 1            block 2            N
//   block 2 sees                          [ before  | its own rows     ]
#pragma once

#include <vector>

#include "kernels/elementwise.cuh"
#include "memory/schedule.h"
#include "model/softmax_attention.h"

namespace streambp {

// The rows before a block that layers with a window see: those of the window, and of the tile of keys that holds its first.
inline Index rows_before_block(const Config& c) {
  constexpr Index tile_of_keys = 128;
  return c.window > 0 ? round_up(c.window + tile_of_keys, kTile) : 0;
}

// Whether K and V of all rows of the layer stay, of several blocks of so many rows.
inline bool stays_in_blocks(const Config& c, Index layer, Index block) {
  return !c.is_local(layer) || rows_before_block(c) >= block;
}

template <class Device, class T>
class Summaries {
  using A = Accumulator<T>;

 public:
  // first: the lowest layer that backward reaches
  Summaries(Device& dev, const Config& c, const Stream& stream, const std::vector<Block>& blocks, const Group& ranks,
            Index first)
      : dev_(dev),
        c_(c),
        stream_(stream),
        ranks_(ranks),
        several_blocks_(blocks.size() > 1),
        before_(rows_before_block(c)),
        block_(blocks.front().rows.all.size()),
        residual_of_all_rows_(!several_blocks_ || trains_embedding(c)),
        residual_(streambp::allocate<T>(dev, residual_of_all_rows_ ? stream.size() : blocks.front().rows.own.size(),
                                        c.hidden, Kind::saved)),
        layers_(several_blocks_ ? static_cast<std::size_t>(c.layers) : 0) {
    for (Index l = 0; l < static_cast<Index>(layers_.size()); ++l) {
      const Index rows = stays(l) ? stream.division.rows : before_;
      if (stays(l)) at(l).kv = {allocate<T>(rows)};
      for (std::size_t i = 1; i < blocks.size() && !stays(l); ++i) at(l).kv.push_back(allocate<T>(rows));
      if (l >= first) at(l).dkv = allocate<A>(rows);
      if (l >= first && stays(l)) zero(dev, at(l).dkv);
      any_window_ |= !stays(l);
    }
    for (const Block& block : blocks) masks_.push_back(mask_of(block));
  }
  Summaries(const Summaries&) = delete;

  // The residual stream of all rows, if the embedding is trained, and of a block.
  Matrix<T> residual() const { return residual_; }
  Matrix<T> residual(const Block& block) const {
    return residual_.slice(residual_of_all_rows_ ? block.rows.own : Rows{0, block.rows.own.size()});
  }

  // Whether K and V of all rows of the layer stay.
  bool stays(Index layer) const { return several_blocks_ && stays_in_blocks(c_, layer, block_); }

  // Rows of a chunk, and the mask, as attention sees them in this layer.
  StreamRows rows(Index layer, const Block& block, const DividedRows& chunk) const {
    const Index first = seen(layer, block).begin;
    const Mask& mask = masks_[block.rows.number];
    const DocumentMask whole = {stream_.key_begin, stream_.key_begin_on_host};
    return {{chunk.all.begin - first, chunk.all.end - first},
            stream_.positions.columns(block.own(chunk)),
            first == 0 ? whole : DocumentMask{mask.key_begin, mask.on_host}};
  }

  // Memory for K and V of all rows that the block sees; those of rows before it are there.
  KeysValues<T> keys_values(Index layer, const Block& block) {
    if (stays(layer)) return at(layer).kv.front();
    const Rows rows = seen(layer, block);
    const KeysValues<T> kv = allocate<T>(rows.size());
    if (rows.begin < block.rows.all.begin) copy(kv.slice({0, before_}), before(layer, block.rows.number));
    return kv;
  }
  // Call when K and V of the block are computed.
  void pass_on(Index layer, const Block& block, const KeysValues<T>& kv) {
    if (is_followed(block) && !stays(layer)) copy(before(layer, block.rows.number + 1), end_of(kv));
  }

  // dK and dV of these rows, with all that later blocks have added.
  KeysValues<A> gradient(Index layer, const Block& block) {
    if (stays(layer)) return at(layer).dkv;
    const KeysValues<A> dkv = allocate<A>(seen(layer, block).size());
    zero(dev_, dkv);
    if (is_followed(block)) copy(end_of(dkv), at(layer).dkv);
    return dkv;
  }
  // Call when the block has added to it.
  void pass_back(Index layer, const Block& block, const KeysValues<A>& dkv) {
    if (!stays(layer) && seen(layer, block).begin < block.rows.all.begin) copy(at(layer).dkv, dkv.slice({0, before_}));
  }

 private:
  struct Layer {
    std::vector<KeysValues<T>> kv;  // of all rows, or of the rows before each block but the first
    KeysValues<A> dkv;
  };
  struct Mask {
    Matrix<std::int32_t> key_begin;
    std::vector<std::int32_t> on_host;
  };

  // In a layer with a window; elsewhere, all rows.
  Rows seen(Index layer, const Block& block) const {
    const Rows all = block.rows.all;
    if (!several_blocks_ || stays(layer)) return {0, all.end};
    const bool sees_before = all.begin > 0 && all.size() > 0;
    return {sees_before ? all.begin - before_ : all.begin, all.end};
  }
  KeysValues<T> before(Index layer, std::size_t block) { return at(layer).kv[block - 1]; }
  bool is_followed(const Block& block) const { return several_blocks_ && block.rows.all.end < stream_.division.rows; }
  template <class U>
  KeysValues<U> end_of(const KeysValues<U>& kv) const {
    return kv.slice({kv.k.rows - before_, kv.k.rows});
  }

  // The documents of the rows that a block sees through a window. A document that begins before them has a negative first
  // row: attention's tiles of keys begin with documents, and the bits depend on them.
  Mask mask_of(const Block& block) {
    const Rows all = block.rows.all;
    if (!any_window_ || all.size() == 0 || all.begin == 0) return {};
    const Index first = all.begin - before_;
    Mask mask = {streambp::allocate<std::int32_t>(dev_, 1, all.end - first, Kind::stream), {}};
    for (Index row = first; row < all.end && !stream_.key_begin_on_host.empty(); ++row)
      mask.on_host.push_back(stream_.key_begin_on_host[static_cast<std::size_t>(row)] -
                             static_cast<std::int32_t>(first));
    if constexpr (Device::computes) dev_.upload(mask.key_begin, mask.on_host.data());
    return mask;
  }

  template <class U>
  KeysValues<U> allocate(Index rows) {
    return allocate_keys_values<U>(dev_, c_, rows, ranks_.size);
  }
  template <class U>
  void copy(const KeysValues<U>& to, const KeysValues<U>& from) {
    dev_.copy(to.k, from.k), dev_.copy(to.v, from.v);
  }
  Layer& at(Index layer) { return layers_[static_cast<std::size_t>(layer)]; }

  Device& dev_;
  const Config& c_;
  const Stream& stream_;
  const Group ranks_;
  const bool several_blocks_;
  const Index before_;  // rows before a block that a layer with a window sees
  const Index block_;   // rows of a block
  const bool residual_of_all_rows_;
  const Matrix<T> residual_;
  bool any_window_ = false;
  std::vector<Layer> layers_;
  std::vector<Mask> masks_;  // of each block
};

}  // namespace streambp
