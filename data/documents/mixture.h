// Packs of several parts of the data, mixed by weight.
//
// Each part is packed separately. An epoch has as many packs as the parts together, and takes from each part a number of
// packs in proportion to its weight, in a random order. Parts go through their own epochs: a part with more weight than
// data repeats, always in a new order, and of a part with less weight each epoch continues where the last one ended. So
// pack n depends only on (parts, seed, n), and a resumed run needs no state.
#pragma once

#include "data/documents/packing.h"

namespace streambp {

class Mixture {
 public:
  struct Part {
    Packing packing;
    double weight;  // share of the tokens, in proportion to the other parts
  };

  Mixture(std::vector<Part> parts, std::uint64_t seed) : parts_(std::move(parts)), seed_(seed) {
    double weights = 0;
    for (Part& part : parts_) {
      packs_.push_back(part.packing.packs());
      weights += packs_for(packs_.size() - 1), size_ += packs_.back();
    }
    for (std::size_t part = 0; part < parts_.size(); ++part) {
      const double share = packs_for(part) / weights * static_cast<double>(size_);
      taken_.push_back(std::max<Index>(1, std::llround(share)));
    }
    size_ = std::accumulate(taken_.begin(), taken_.end(), Index{0});
  }

  // The number of packs in so many epochs: of one part its own, which differ a little.
  double packs(double epochs = 1) {
    if (parts_.size() > 1) return epochs * static_cast<double>(size_);
    const double known = std::min(epochs, 1000.0), whole = std::floor(known);  // counting more would take long
    Packing& packing = parts_[0].packing;
    const Index begin = packing.packs(static_cast<Index>(whole)),
                end = packing.packs(static_cast<Index>(std::ceil(known)));
    return (static_cast<double>(begin) + (known - whole) * static_cast<double>(end - begin)) * (epochs / known);
  }
  // How often an epoch uses the documents of a part, about.
  double passes(std::size_t part) const {
    return static_cast<double>(taken_[part]) / static_cast<double>(packs_[part]);
  }
  // The part's share of the tokens.
  double share(std::size_t part) const { return tokens(part) / tokens(); }
  // Of an epoch.
  double tokens() const {
    double all = 0;
    for (std::size_t part = 0; part < parts_.size(); ++part) all += tokens(part);
    return all;
  }

  // Pack n of the run, counted over all epochs.
  std::span<const PackedPiece> pack(Index n) {
    if (n / size_ != epoch_) arrange(n / size_);
    const auto [part, number] = order_[n % size_];
    return parts_[part].packing.pack(epoch_ * taken_[part] + number);
  }

 private:
  // Packs of one part differ little in their tokens.
  double tokens_per_pack(std::size_t part) const {
    return static_cast<double>(parts_[part].packing.tokens()) / static_cast<double>(packs_[part]);
  }
  double packs_for(std::size_t part) const { return parts_[part].weight / tokens_per_pack(part); }
  double tokens(std::size_t part) const { return static_cast<double>(taken_[part]) * tokens_per_pack(part); }

  void arrange(Index epoch) {
    epoch_ = epoch;
    std::vector<std::size_t> parts;
    for (std::size_t part = 0; part < parts_.size(); ++part)
      parts.insert(parts.end(), static_cast<std::size_t>(taken_[part]), part);
    order_.clear();
    std::vector<Index> next(parts_.size(), 0);
    for (const Index i : shuffled(std::ssize(parts), Random(seed_, mix(static_cast<std::uint64_t>(epoch)) + 3))) {
      const std::size_t part = parts[i];
      order_.push_back({part, next[part]++});
    }
  }

  struct Pick {
    std::size_t part;
    Index number;  // of the part's packs in this epoch
  };

  std::vector<Part> parts_;
  std::uint64_t seed_;
  std::vector<Index> packs_, taken_;  // of each part: packs of its first epoch, and in an epoch of the mixture
  Index size_ = 0, epoch_ = -1;
  std::vector<Pick> order_;
};

}  // namespace streambp
