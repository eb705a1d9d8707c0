// What passes from block to block of a stream: the causal summaries of layers, such as K and V, of all rows that a block
// sees, and their gradients; and the residual stream. In backward, its gradient takes its memory.
//
//   one block        a layer's summary and its gradient are the caller's: they exist while the layer is computed
//   several blocks   a block needs the summary of rows before it, and its backward pass adds to the gradient of that. So both
//                    stay for all rows until the step's end. Of a layer with a window shorter than a block, only the
//                    summaries of the windows before each block stay, and the gradient of the one before the current block
//
// The mixer of a layer with a window then works on some rows of the stream as if they were the stream:
//
//   rows            0            block 1            block 2            N
//   block 2 sees                          [ before  | its own rows     ]
#pragma once

#include <map>
#include <vector>

#include "memory/schedule.h"
#include "model/parameters.h"

namespace streambp {

// Whether the summary of all rows of a layer is kept from block to block, where blocks have so many rows.
inline bool stays_in_blocks(const Config& c, Index layer, Index block) {
  const std::optional<Index> window = summary_shape(c, layer).window;
  return !window || *window >= block;
}

template <class Device, class T>
class Summaries {
  using A = Accumulator<T>;

 public:
  // lowest: the lowest layer that backward reaches; c.layers: none
  Summaries(Device& dev, const Config& c, const Stream& stream, const std::vector<Block>& blocks, const Group& ranks,
            Index lowest)
      : dev_(dev),
        c_(c),
        stream_(stream),
        ranks_(ranks),
        several_blocks_(blocks.size() > 1),
        block_(blocks.front().rows.all.size()),
        residual_of_all_rows_(!several_blocks_ || trains_embedding(c)),
        residual_(streambp::allocate<T>(dev, residual_of_all_rows_ ? stream.size() : blocks.front().rows.own.size(),
                                        c.hidden, Kind::saved)),
        layers_(several_blocks_ ? static_cast<std::size_t>(c.layers) : 0) {
    for (Index l = 0; l < static_cast<Index>(layers_.size()); ++l) {
      const Index rows = stays(l) ? stream.division.rows : window(l);
      if (stays(l)) at(l).summaries = {allocate<T>(l, rows)};
      for (std::size_t i = 1; i < blocks.size() && !stays(l); ++i) at(l).summaries.push_back(allocate<T>(l, rows));
      if (l >= lowest) at(l).gradient = allocate<A>(l, rows, SummaryOf::gradient);
      if (l >= lowest && stays(l)) zero(dev, at(l).gradient);
      if (!stays(l)) masks_.try_emplace(rows);
    }
    for (auto& [rows, masks] : masks_)
      for (const Block& block : blocks) masks.push_back(mask_of(block, rows));
  }
  Summaries(const Summaries&) = delete;

  // The residual stream of all rows, if the embedding is trained, and of a block.
  Matrix<T> residual() const { return residual_; }
  Matrix<T> residual(const Block& block) const {
    return residual_.slice(residual_of_all_rows_ ? block.rows.own : Rows{0, block.rows.own.size()});
  }

  // Whether the summary of all rows of the layer is kept from block to block.
  bool stays(Index layer) const { return several_blocks_ && stays_in_blocks(c_, layer, block_); }

  // Rows of a chunk, and the mask, as the layer's mixer sees them.
  StreamRows rows(Index layer, const Block& block, const DividedRows& chunk) const {
    const Index first = seen(layer, block).begin;
    DocumentMask mask = {stream_.key_begin, stream_.key_begin_on_host};
    if (first > 0) {
      const Mask& of_seen = masks_.at(window(layer))[block.rows.number];
      mask = {of_seen.key_begin, of_seen.on_host};
    }
    return {{chunk.all.begin - first, chunk.all.end - first}, stream_.positions.columns(block.own(chunk)), mask};
  }

  // Memory for the summary of all rows that the block sees. That of the rows before the block is filled in.
  Summary<T> summary(Index layer, const Block& block) {
    if (stays(layer)) return at(layer).summaries.front();
    const Rows rows = seen(layer, block);
    const Summary<T> summary = allocate<T>(layer, rows.size());
    if (rows.begin < block.rows.all.begin)
      copy(dev_, summary.slice({0, window(layer)}), before(layer, block.rows.number));
    return summary;
  }
  // Call when the summary of the block's rows is computed.
  void pass_on(Index layer, const Block& block, const Summary<T>& summary) {
    if (is_followed(block) && !stays(layer))
      copy(dev_, before(layer, block.rows.number + 1), summary.slice(end_of(layer, block)));
  }

  // The gradient of this summary, with all that later blocks have added.
  Summary<A> gradient(Index layer, const Block& block) {
    if (stays(layer)) return at(layer).gradient;
    const Summary<A> gradient = allocate<A>(layer, seen(layer, block).size(), SummaryOf::gradient);
    zero(dev_, gradient);
    if (is_followed(block)) copy(dev_, gradient.slice(end_of(layer, block)), at(layer).gradient);
    return gradient;
  }
  // Call when the block has added to it.
  void pass_back(Index layer, const Block& block, const Summary<A>& gradient) {
    if (!stays(layer) && seen(layer, block).begin < block.rows.all.begin)
      copy(dev_, at(layer).gradient, gradient.slice({0, window(layer)}));
  }

 private:
  struct Layer {
    std::vector<Summary<T>> summaries;  // of all rows, or of the windows before each block but the first
    Summary<A> gradient;
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
    return {sees_before ? all.begin - window(layer) : all.begin, all.end};
  }
  // The rows before a block that a layer sees whose summary does not stay.
  Index window(Index layer) const { return *summary_shape(c_, layer).window; }
  Summary<T> before(Index layer, std::size_t block) { return at(layer).summaries[block - 1]; }
  bool is_followed(const Block& block) const { return several_blocks_ && block.rows.all.end < stream_.division.rows; }
  // The last rows that the block sees, which the next block sees before its own.
  Rows end_of(Index layer, const Block& block) const {
    const Index rows = seen(layer, block).size();
    return {rows - window(layer), rows};
  }

  // The documents of the rows that a block sees through a window. A document that begins before them has a negative first
  // row: attention's tiles of keys begin with documents, and the bits depend on them.
  Mask mask_of(const Block& block, Index window) {
    const Rows all = block.rows.all;
    if (all.size() == 0 || all.begin == 0) return {};
    const Index first = all.begin - window;
    Mask mask = {streambp::allocate<std::int32_t>(dev_, 1, all.end - first, Kind::stream), {}};
    for (Index row = first; row < all.end && !stream_.key_begin_on_host.empty(); ++row)
      mask.on_host.push_back(stream_.key_begin_on_host[static_cast<std::size_t>(row)] -
                             static_cast<std::int32_t>(first));
    if constexpr (Device::computes) dev_.upload(mask.key_begin, mask.on_host.data());
    return mask;
  }

  template <class U>
  Summary<U> allocate(Index layer, Index rows, SummaryOf of = SummaryOf::values) {
    return allocate_summary<U>(dev_, summary_shape(c_, layer), rows, ranks_.size, of);
  }
  Layer& at(Index layer) { return layers_[static_cast<std::size_t>(layer)]; }

  Device& dev_;
  const Config& c_;
  const Stream& stream_;
  const Group ranks_;
  const bool several_blocks_;
  const Index block_;  // rows of a block
  const bool residual_of_all_rows_;
  const Matrix<T> residual_;
  std::vector<Layer> layers_;
  std::map<Index, std::vector<Mask>> masks_;  // by window: of each block
};

}  // namespace streambp
