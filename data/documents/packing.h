// Packing: groups documents into token streams (packs) of at most `length` rows with little unused space. A longer
// document is a pack alone.
//
// Best fit in random order: each piece goes into the pack where it leaves the least space. (Longest first fills packs about
// 1 % more, but then all documents of a step have one length, and the model learns less: docs/log.md.) Every epoch has
// new packs, which depend only on (pieces, length, seed, epoch), so a resumed run needs no state. Their number differs a
// little from epoch to epoch. The two documents of a preference are packed as one unit.
#pragma once

#include <numeric>

#include "data/documents/token_file.h"
#include "kernels/base/random.h"
#include "model/batch.h"
#include "model/document_layout.h"

namespace streambp {

// What to do with a document that is too long.
enum class TooLong { split, truncate, drop, refuse };

// Tokens begin .. begin + length of a document.
struct PackedPiece {
  Index document, begin, length;
};

// Cuts documents of these lengths into pieces of at most `longest` tokens.
inline std::vector<PackedPiece> cut(std::span<const Index> lengths, Index longest, TooLong too_long) {
  require(longest > 0, "cannot cut documents into pieces of ", longest, " tokens");
  std::vector<PackedPiece> pieces;
  for (Index d = 0; d < std::ssize(lengths); ++d) {
    require(lengths[d] <= longest || too_long != TooLong::refuse, "document ", d + 1, " has ", lengths[d],
            " tokens, more than ", longest);
    if (lengths[d] > longest && too_long == TooLong::drop) continue;
    const Index end = too_long == TooLong::truncate ? std::min(lengths[d], longest) : lengths[d];
    for (Index begin = 0; begin < end; begin += longest) pieces.push_back({d, begin, std::min(longest, end - begin)});
  }
  return pieces;
}

// Cuts pairs, documents 2i and 2i + 1, to at most `longest` tokens per document and `length` per pair. The longer
// document loses its end, or both are cut to the same length. A pair is compared as a whole, so it is never split.
inline std::vector<PackedPiece> cut_pairs(std::span<const Index> lengths, Index length, Index longest,
                                          TooLong too_long) {
  require(longest > 0, "cannot cut documents into pieces of ", longest, " tokens");
  std::vector<PackedPiece> pieces;
  for (Index d = 0; d + 1 < std::ssize(lengths); d += 2) {
    const Index chosen = std::min(lengths[d], longest), rejected = std::min(lengths[d + 1], longest);
    const PackedPiece pair[] = {{d, 0, std::min(chosen, std::max(length / 2, length - rejected))},
                                {d + 1, 0, std::min(rejected, std::max(length / 2, length - chosen))}};
    const bool whole = pair[0].length == lengths[d] && pair[1].length == lengths[d + 1];
    require(whole || too_long == TooLong::truncate || too_long == TooLong::drop, "pair ", d / 2 + 1, " has ",
            lengths[d] + lengths[d + 1], " tokens, more than ", length, " in all or ", longest, " in a document");
    if (whole || too_long == TooLong::truncate) pieces.insert(pieces.end(), std::begin(pair), std::end(pair));
  }
  return pieces;
}

class Packing {
 public:
  // Every `together` consecutive pieces form a unit: they go into the same pack, in this order.
  Packing(std::vector<PackedPiece> pieces, Index length, std::uint64_t seed, Index together = 1,
          const DocumentLayout& layout = {})
      : length_(length), together_(together), layout_(layout), seed_(seed), pieces_(std::move(pieces)) {
    require(!pieces_.empty(), "there are no documents to pack");
    for (const PackedPiece& piece : pieces_) require(piece.length > 0, "a piece has no tokens");
    arrange(0);
  }

  // The number of packs in the first epochs.
  Index packs(Index epochs = 1) {
    while (std::ssize(before_) <= epochs) arrange(std::ssize(before_) - 1);
    return before_[epochs];
  }
  Index tokens() const {
    return std::accumulate(pieces_.begin(), pieces_.end(), Index{0}, [](Index n, auto& p) { return n + p.length; });
  }

  // Pack n of the run, counted over all epochs.
  std::span<const PackedPiece> pack(Index n) {
    while (n >= before_.back()) arrange(std::ssize(before_) - 1);
    const Index epoch = std::ranges::upper_bound(before_, n) - before_.begin() - 1;
    if (epoch != epoch_) arrange(epoch);
    const Index at = order_[n - before_[epoch]];
    return std::span<const PackedPiece>(packed_).subspan(begin_[at], begin_[at + 1] - begin_[at]);
  }

 private:
  // Pieces of unit i.
  std::span<const PackedPiece> unit(Index i) const { return std::span(pieces_).subspan(i * together_, together_); }
  Index length_of(Index unit) const {
    Index length = 0;
    for (const PackedPiece& piece : this->unit(unit)) length += piece.length;
    return length;
  }
  // Where it ends in a pack with this first free row.
  Index end_of(Index unit, Index free) const {
    for (const PackedPiece& piece : this->unit(unit)) free = layout_.end(free, piece.length);
    return free;
  }

  // A random order that depends on seed, epoch and use.
  std::vector<Index> shuffled(std::size_t n, std::uint64_t use) const {
    return streambp::shuffled(n, Random(seed_, mix(static_cast<std::uint64_t>(epoch_)) + use));
  }

  void arrange(Index epoch) {
    epoch_ = epoch;
    const std::vector<Index> order = shuffled(std::ssize(pieces_) / together_, 1);
    const std::vector<Index> pack_of = best_fit(order);
    if (epoch + 1 == std::ssize(before_)) before_.push_back(before_.back() + packs_);

    // The pieces of all packs, pack by pack.
    begin_.assign(packs_ + 1, 0);
    for (const Index pack : pack_of) begin_[pack + 1] += together_;
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    packed_.resize(pieces_.size());
    std::vector<Index> next(begin_.begin(), begin_.end() - 1);
    for (std::size_t i = 0; i < order.size(); ++i) {
      Index& place = next[pack_of[i]];
      for (const PackedPiece& piece : unit(order[i])) packed_[place++] = piece;
    }
    order_ = shuffled(packs_, 2);
  }

  // The pack of each unit. Units are placed in this order.
  std::vector<Index> best_fit(const std::vector<Index>& order) {
    std::map<Index, std::vector<Index>> packs_with_room;
    std::vector<Index> pack_of(order.size());
    packs_ = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      auto found = packs_with_room.lower_bound(length_of(order[i]));
      while (found != packs_with_room.end() && end_of(order[i], length_ - found->first) > length_) ++found;
      Index free = 0;
      if (found == packs_with_room.end()) {
        pack_of[i] = packs_++;
      } else {
        free = length_ - found->first;
        pack_of[i] = found->second.back();
        found->second.pop_back();
        if (found->second.empty()) packs_with_room.erase(found);
      }
      const Index room = length_ - end_of(order[i], free);
      if (room > 0) packs_with_room[room].push_back(pack_of[i]);
    }
    return pack_of;
  }

  Index length_, together_;
  DocumentLayout layout_;
  std::uint64_t seed_;
  std::vector<PackedPiece> pieces_;  // of all documents
  std::vector<Index> before_ = {0};  // packs of all epochs before each one, as far as they are known
  // The current epoch.
  Index epoch_ = 0, packs_ = 0;
  std::vector<PackedPiece> packed_;  // pack by pack
  std::vector<Index> begin_;         // where each pack begins in packed_, and the end
  std::vector<Index> order_;         // in which packs are used
};

// The data that objectives need in addition to tokens. Log-probs are of all targets of the file; empty: unknown.
struct Known {
  std::span<const float> reference = {}, old = {};
  bool scaled = true;  // advantages divided by the standard deviation of their group
};

// Appends a piece of a document to a batch, as a document. The target of its last token is the document's next one.
inline void append(Batch& batch, const TokenFile& data, const PackedPiece& piece, const Known& known = {}) {
  const Rows rows = {piece.begin, piece.begin + piece.length};
  const std::size_t first = batch.targets.size();
  batch.append(data.tokens(piece.document), rows, data.learn(piece.document));
  const auto log_probs = [&](std::vector<double>& to, std::span<const float> of_all_tokens) {
    if (of_all_tokens.empty()) return;
    const float* from = of_all_tokens.data() + data.begin(piece.document) + rows.begin;
    for (std::size_t i = first; i < batch.targets.size(); ++i)
      to.push_back(batch.targets[i] < 0 ? 0.0 : from[i - first]);
  };
  log_probs(batch.reference, known.reference);
  log_probs(batch.old, known.old);
  if (!data.groups()) return;
  const Advantage advantage = data.advantage(piece.document);
  batch.advantages.resize(batch.targets.size(), known.scaled ? advantage.scaled : advantage.plain);
}

inline void append(Batch& batch, const TokenFile& data, std::span<const PackedPiece> pack, const Known& known = {}) {
  for (const PackedPiece& piece : pack) append(batch, data, piece, known);
}

}  // namespace streambp
