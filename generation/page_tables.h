// Which pages of a key/value cache each sequence holds. Sequences that begin with the same tokens share pages.
// attention_shape.h explains how attention finds its keys in them.
#pragma once

#include <utility>
#include <vector>

#include "kernels/attention_shape.h"

namespace streambp {

class PageTables {
 public:
  using Table = std::vector<std::int32_t>;

  PageTables(Index pages, Index sequences) : users_(pages), tables_(sequences) {
    for (Index page = pages; page > 0; --page) free_.push_back(static_cast<std::int32_t>(page - 1));
  }

  const Table& of(Index sequence) const { return tables_[sequence]; }
  Index free() const { return static_cast<Index>(free_.size()); }
  bool is_shared(std::int32_t page) const { return users_[page] > 1; }
  // Whether a table has changed since the last call.
  bool changed() { return std::exchange(changed_, false); }

  // Gives the sequence these pages, which others hold too, in place of its own.
  void share(Index sequence, Table pages) {
    for (const std::int32_t page : pages) ++users_[page];
    release(sequence);
    tables_[sequence] = std::move(pages);
  }

  // Adds free pages until the sequence has room for so many tokens.
  void grow(Index sequence, Index tokens) {
    Table& table = tables_[sequence];
    const Index more = ceil_div(tokens, kPage) - static_cast<Index>(table.size());
    require(more <= free(), "the cache of keys and values has ", free(), " free pages, and a sequence needs ", more);
    for (Index i = 0; i < more; ++i) table.push_back(take());
    changed_ |= more > 0;
  }

  // Replaces the last page of a sequence by a free one. Returns the old page.
  std::int32_t replace_last(Index sequence) {
    const std::int32_t before = std::exchange(tables_[sequence].back(), take());
    drop(before);
    changed_ = true;
    return before;
  }

  void release(Index sequence) {
    for (const std::int32_t page : std::exchange(tables_[sequence], {})) drop(page);
    changed_ = true;
  }

 private:
  std::int32_t take() {
    const std::int32_t page = free_.back();
    free_.pop_back();
    ++users_[page];
    return page;
  }
  void drop(std::int32_t page) {
    if (--users_[page] == 0) free_.push_back(page);
  }

  std::vector<Index> users_;   // of each page
  std::vector<Table> tables_;  // of each sequence
  Table free_;
  bool changed_ = true;
};

}  // namespace streambp
