// The two large tables of byte pair encoding: pairs of tokens, and words. They are filled once and then only read. Both
// use open addressing and are at most half full, so most lookups access one cache line.
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace streambp {

// (left, right) -> rank and merged token
class PairTable {
 public:
  static constexpr std::uint32_t kNever = ~std::uint32_t{0};
  struct Entry {
    std::int32_t left = -1, right = -1;
    std::uint32_t rank = kNever;
    std::int32_t merged = -1;
  };

  explicit PairTable(std::size_t count = 0) {
    while ((std::size_t{1} << bits_) < 2 * count) ++bits_;
    entries_.resize(std::size_t{1} << bits_);
  }
  // The entry of the pair, or an empty one.
  const Entry& at(std::int32_t left, std::int32_t right) const { return entries_[slot(left, right)]; }
  Entry& at(std::int32_t left, std::int32_t right) { return entries_[slot(left, right)]; }

 private:
  std::size_t slot(std::int32_t left, std::int32_t right) const {
    const auto key = static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
    std::size_t i = (key ^ key >> 29) * 0x9E3779B97F4A7C15u >> (64 - bits_);
    while (entries_[i].left >= 0 && (entries_[i].left != left || entries_[i].right != right)) {
      i = (i + 1) & (entries_.size() - 1);
    }
    return i;
  }

  int bits_ = 1;
  std::vector<Entry> entries_;
};

// Text -> token
class WordTable {
 public:
  explicit WordTable(std::size_t count = 0) {
    while ((std::size_t{1} << bits_) < 2 * count) ++bits_;
    entries_.resize(std::size_t{1} << bits_);
  }
  void add(std::string_view word, std::int32_t id) {
    Entry& entry = entries_[slot(word)];
    entry = {static_cast<std::uint32_t>(text_.size()), static_cast<std::uint32_t>(word.size()), id};
    text_ += word;
    longest_ = std::max(longest_, word.size());
  }
  // The token of the word, or -1.
  std::int32_t find(std::string_view word) const {
    return word.empty() || word.size() > longest_ ? -1 : entries_[slot(word)].id;
  }

 private:
  struct Entry {
    std::uint32_t begin = 0, size = 0;
    std::int32_t id = -1;
  };

  std::size_t slot(std::string_view word) const {
    std::size_t i = XXH3_64bits(word.data(), word.size()) >> (64 - bits_);
    while (entries_[i].id >= 0 && std::string_view(text_).substr(entries_[i].begin, entries_[i].size) != word) {
      i = (i + 1) & (entries_.size() - 1);
    }
    return i;
  }

  int bits_ = 1;
  std::size_t longest_ = 0;
  std::vector<Entry> entries_;
  std::string text_;
};

}  // namespace streambp
