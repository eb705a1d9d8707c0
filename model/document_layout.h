// Which rows of the stream the tokens of a batch take.
//
// The blocks of a recurrence are counted from a document's first row. A document that reaches into another tile starts at
// a multiple of the block, so that no block straddles two tiles, and hence no chunk: the gradient of the earlier rows of
// such a block would be a sum in two parts, and its bits would depend on the chunk.
//
// The unused rows before such a document repeat the last token of the document before it, without a target: no token sees
// them, and their gradient is zero. They end at a multiple of the block, so they stay in the tile where that document ends
// anyway, and it obeys the rule as before.
#pragma once

#include "kernels/delta_shape.h"
#include "model/stream.h"

namespace streambp {

// The rule. A later or a longer document never ends earlier, so to start each one as early as the rule allows takes the
// fewest rows.
struct DocumentLayout {
  Index block = 1;  // of a recurrence; 1: there is none, and rows are tokens

  // Where a document of `length` tokens starts, and ends, if `free` is the first free row.
  Index start(Index free, Index length) const {
    return free / kTile == (free + length - 1) / kTile ? free : round_up(free, block);
  }
  Index end(Index free, Index length) const { return start(free, length) + length; }

  Index rows(const TokenBatch& batch) const {
    if (block == 1) return batch.size();
    Index rows = 0;
    for (const Rows document : batch.documents()) rows = end(rows, document.size());
    return rows;
  }
  // Enough rows for the documents of so many packs, if those of each alone take at most `rows`.
  Index rows_of_packs(Index packs, Index rows) const {
    return (packs - 1) * round_up(rows, block > 1 ? kTile : 1) + rows;
  }
  // The most rows that so many documents leave unused.
  Index most_unused(Index documents) const { return (documents - 1) * (block - 1); }
  // Tokens of so many documents that fit whatever their lengths are.
  Index tokens_that_fit(Index rows, Index documents) const {
    return std::max(std::min(rows, kTile), rows - most_unused(documents));
  }
};

inline DocumentLayout layout_of(const Config& c) { return {c.has_delta_rule() ? kDeltaBlock : 1}; }

// The map between the tokens of a batch and its rows.
class RowMap {
 public:
  RowMap() = default;
  RowMap(const DocumentLayout& layout, const TokenBatch& batch) {
    if (layout.rows(batch) == batch.size()) return;
    for (const Rows document : batch.documents()) {
      tokens_.resize(static_cast<std::size_t>(layout.start(std::ssize(tokens_), document.size())), document.begin - 1);
      for (Index t = document.begin; t < document.end; ++t) tokens_.push_back(t);
    }
  }

  // Every row has the token of the same number.
  bool is_identity() const { return tokens_.empty(); }

  // The rows of the batch, if they differ from its tokens.
  TokenBatch rows(const TokenBatch& batch) const {
    TokenBatch rows;
    for (std::size_t row = 0; row < tokens_.size(); ++row) {
      const auto t = static_cast<std::size_t>(tokens_[row]);
      const bool begins = !is_unused(row) && batch.key_begin[t] == tokens_[row];
      rows.tokens.push_back(batch.tokens[t]), rows.positions.push_back(batch.positions[t]);
      rows.targets.push_back(is_unused(row) ? -1 : batch.targets[t]);
      rows.key_begin.push_back(begins ? static_cast<std::int32_t>(row) : rows.key_begin.back());
    }
    return rows;
  }
  // From numbers of tokens, that of a row; 0 if it is unused.
  double of_row(const std::vector<double>& numbers, Index row) const {
    const auto i = static_cast<std::size_t>(row);
    return is_identity() ? numbers[i] : is_unused(i) ? 0 : numbers[static_cast<std::size_t>(tokens_[i])];
  }
  // From numbers of rows, those of the tokens.
  template <class T>
  std::vector<T> of_tokens(std::vector<T> numbers) const {
    std::size_t tokens = 0;
    for (std::size_t row = 0; row < tokens_.size(); ++row)
      if (!is_unused(row)) numbers[tokens++] = numbers[row];
    if (!is_identity()) numbers.resize(tokens);
    return numbers;
  }

 private:
  bool is_unused(std::size_t row) const { return row > 0 && tokens_[row] == tokens_[row - 1]; }

  std::vector<Index> tokens_;  // of each row; an unused one has that of the row before. Empty: the identity
};

}  // namespace streambp
