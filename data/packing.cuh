// Packing: which documents lie together in a token stream, so that streams of at most `length` tokens are well filled.
//
// Best fit, the longest first: each piece of a document goes where it leaves the least room. Pieces of one length are
// exchanged at random in every epoch, and so is the order of the packs; all of it is a function of (pieces, length,
// seed, epoch), so pack n of a run is known without any state. How many packs an epoch has depends on their lengths
// alone.
#pragma once

#include <map>
#include <numeric>
#include <span>
#include <vector>

#include "../kernels/random.cuh"
#include "../stream.cuh"
#include "token_file.cuh"

namespace streambp {

// What becomes of a document that is longer than a pack.
enum class TooLong { split, truncate, refuse };

// Tokens begin .. begin + length of a document.
struct PackedPiece {
  Index document, begin, length;
};

// Documents of these lengths as pieces of at most `longest` tokens.
inline std::vector<PackedPiece> cut(std::span<const Index> lengths, Index longest, TooLong too_long) {
  require(longest > 0, "pieces of ", longest, " tokens hold nothing");
  std::vector<PackedPiece> pieces;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    require(lengths[d] <= longest || too_long != TooLong::refuse, "document ", d + 1, " has ", lengths[d],
            " tokens, more than the ", longest,
            " that --length allows; give a larger one, or let them be cut by --too-long split or truncate");
    const Index end = too_long == TooLong::truncate ? std::min(lengths[d], longest) : lengths[d];
    for (Index begin = 0; begin < end; begin += longest) {
      pieces.push_back({static_cast<Index>(d), begin, std::min(longest, end - begin)});
    }
  }
  return pieces;
}

class Packing {
 public:
  Packing(std::vector<PackedPiece> pieces, Index length, std::uint64_t seed)
      : length_(length), seed_(seed), pieces_(std::move(pieces)) {
    require(!pieces_.empty(), "there are no documents to pack");
    for (const PackedPiece& piece : pieces_) {
      require(0 < piece.length && piece.length <= length, "a piece of ", piece.length,
              " tokens does not fit a pack of ", length);
    }
    arrange(0);
  }

  // Packs of an epoch.
  Index size() const { return static_cast<Index>(begin_.size()) - 1; }
  Index tokens() const {
    return std::accumulate(pieces_.begin(), pieces_.end(), Index{0}, [](Index n, auto& p) { return n + p.length; });
  }

  // Pack n of the run, counted through all epochs.
  std::span<const PackedPiece> pack(Index n) {
    if (n / size() != epoch_) arrange(n / size());
    const Index at = order_[static_cast<std::size_t>(n % size())];
    const auto begin = static_cast<std::size_t>(begin_[static_cast<std::size_t>(at)]);
    const auto end = static_cast<std::size_t>(begin_[static_cast<std::size_t>(at) + 1]);
    return std::span<const PackedPiece>(packed_).subspan(begin, end - begin);
  }

 private:
  // A permutation of 0 .. n-1 that depends on the seed, the epoch and its use.
  std::vector<Index> shuffled(std::size_t n, std::uint64_t use) const {
    std::vector<Index> order(n);
    std::iota(order.begin(), order.end(), Index{0});
    const Random random(seed_, mix(static_cast<std::uint64_t>(epoch_)) + use);
    for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.below(i, i)]);
    return order;
  }

  void arrange(Index epoch) {
    epoch_ = epoch;
    std::vector<Index> order = shuffled(pieces_.size(), 1);
    const auto length_of = [&](Index piece) { return pieces_[static_cast<std::size_t>(piece)].length; };
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return length_of(a) > length_of(b); });
    const std::vector<Index> pack_of = best_fit(order);

    // The pieces of each pack, side by side.
    begin_.assign(static_cast<std::size_t>(packs_) + 1, 0);
    for (const Index pack : pack_of) ++begin_[static_cast<std::size_t>(pack) + 1];
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    packed_.resize(pieces_.size());
    std::vector<Index> next(begin_.begin(), begin_.end() - 1);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto place = static_cast<std::size_t>(next[static_cast<std::size_t>(pack_of[i])]++);
      packed_[place] = pieces_[static_cast<std::size_t>(order[i])];
    }
    order_ = shuffled(static_cast<std::size_t>(packs_), 2);
  }

  // The pack of each piece, in this order.
  std::vector<Index> best_fit(const std::vector<Index>& order) {
    std::map<Index, std::vector<Index>> packs_with_room;
    std::vector<Index> pack_of(order.size());
    packs_ = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const Index need = pieces_[static_cast<std::size_t>(order[i])].length;
      const auto found = packs_with_room.lower_bound(need);
      Index room = length_;
      if (found == packs_with_room.end()) {
        pack_of[i] = packs_++;
      } else {
        room = found->first;
        pack_of[i] = found->second.back();
        found->second.pop_back();
        if (found->second.empty()) packs_with_room.erase(found);
      }
      if (room > need) packs_with_room[room - need].push_back(pack_of[i]);
    }
    return pack_of;
  }

  Index length_;
  std::uint64_t seed_;
  std::vector<PackedPiece> pieces_;  // of all documents
  // The current epoch.
  Index epoch_ = 0, packs_ = 0;
  std::vector<PackedPiece> packed_;  // pack by pack
  std::vector<Index> begin_;         // of each pack in there, and the end
  std::vector<Index> order_;         // in which packs are used
};

// Appends a piece of a document to a batch, as a document of its own. What is learned is predicted, also after the
// piece's last token.
inline void append(Batch& batch, const TokenFile& data, const PackedPiece& piece) {
  const auto tokens = data.tokens(piece.document);
  const auto learn = data.learn(piece.document);
  const auto begin = static_cast<std::size_t>(piece.begin), end = begin + static_cast<std::size_t>(piece.length);
  const auto target = [&](std::size_t i) { return i < tokens.size() && learn[i] ? tokens[i] : -1; };
  const std::size_t first = batch.targets.size();
  batch.append({tokens.begin() + piece.begin, tokens.begin() + piece.begin + piece.length});
  for (std::size_t i = begin; i < end; ++i) batch.targets[first + i - begin] = target(i + 1);
}

inline void append(Batch& batch, const TokenFile& data, std::span<const PackedPiece> pack) {
  for (const PackedPiece& piece : pack) append(batch, data, piece);
}

}  // namespace streambp
