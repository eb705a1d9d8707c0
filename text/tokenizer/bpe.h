// Byte pair encoding: splits a word into symbols (bytes or characters), then merges the neighbours with the lowest rank
// (the leftmost of equals) until no pair can be merged.
//
// Three tables and a heap make it fast. They do not change the result:
//   initial  the token of each symbol
//   pairs    (left token, right token) -> rank and merged token. Symbols that no merge ever joins are not in the table;
//            the word is cut between them and the parts are merged separately.
//   words    every text that merges into one token, so most words need only a lookup
//   heap     the candidates of long words: O(n log n) for n symbols
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <queue>
#include <unordered_map>

#include "text/fields.h"
#include "text/tokenizer/bpe_tables.h"
#include "text/tokenizer/byte_characters.h"

namespace streambp {

class Bpe {
 public:
  static constexpr std::int64_t kLargestId = (1 << 24) - 1;

  enum class Symbols { characters, bytes };  // bytes: the vocabulary is written in byte characters

  // Reads the field "model".
  Bpe(const Fields& f, Symbols symbols) : bytes_(symbols == Symbols::bytes), where_(f.file) {
    f.only("type", "BPE");
    f.only("dropout", 0.0);
    f.only("continuing_subword_prefix", "");
    f.only("end_of_word_suffix", "");
    f.known({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
             "byte_fallback", "ignore_merges", "vocab", "merges"});
    fuse_unknown_ = f.get<bool>("fuse_unk", false);
    byte_fallback_ = f.get<bool>("byte_fallback", false);
    read_vocabulary(f.object("vocab"));
    if (f.has("unk_token")) {
      unknown_text_ = f.get<std::string>("unk_token");
      unknown_ = find(*unknown_text_).value_or(-1);
    }
    find_initial();
    read_merges(f);
    find_words(f.get<bool>("ignore_merges", false));
  }

  // By id; not every id has a token.
  const std::vector<std::string>& texts() const { return texts_; }
  const std::vector<bool>& present() const { return present_; }
  std::size_t count() const { return ids_.size(); }
  std::optional<std::int32_t> find(const std::string& text) const {
    const auto found = ids_.find(text);
    if (found == ids_.end()) return {};
    return found->second;
  }

  // Buffers, reused for every word.
  struct Scratch {
    std::vector<std::int32_t> symbols;
    std::vector<PairTable::Entry> merges;  // of each symbol with the next
    std::vector<std::int32_t> previous, next;
  };

  // Appends the tokens of a word.
  void encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const {
    const std::int32_t whole = words_.find(word);
    if (whole >= 0) return out.push_back(whole);
    if (!split(word, scratch.symbols)) {
      fail(where_, ": the text needs the unknown token ", quote(*unknown_text_),
           ", which the vocabulary does not have");
    }
    merge_parts(scratch, out);
  }

 private:
  void read_vocabulary(const Fields& vocabulary) {
    // Memory is proportional to the largest id, so a small vocabulary must not have a huge id.
    const std::int64_t largest = std::min(kLargestId, 65'536 + 16 * static_cast<std::int64_t>(vocabulary.json.size()));
    for (const auto& [text, id] : vocabulary.json.items()) {
      if (!id.is_number_integer()) fail(vocabulary.file, ": the id of ", quote(text), " is not an integer");
      if (id.get<std::int64_t>() < 0 || id.get<std::int64_t>() > largest) {
        fail(vocabulary.file, ": the id of ", quote(text), " is ", id.dump(), "; a vocabulary of ",
             vocabulary.json.size(), " tokens needs ids from 0 to ", largest);
      }
      const auto i = id.get<std::size_t>();
      if (i >= texts_.size()) texts_.resize(i + 1), present_.resize(i + 1);
      if (present_[i]) fail(vocabulary.file, ": ", quote(texts_[i]), " and ", quote(text), " have the same id ", i);
      texts_[i] = text;
      present_[i] = true;
      ids_[text] = static_cast<std::int32_t>(i);
    }
  }

  // Calls f with every byte or code point.
  template <class F>
  void for_each_symbol(std::string_view text, F&& f) const {
    if (bytes_) {
      for (const char c : text) f(static_cast<unsigned char>(c));
    } else {
      for_each_character(text, f);
    }
  }

  void find_initial() {
    for (std::size_t b = 0; byte_fallback_ && b < 256; ++b) {
      constexpr char kDigits[] = "0123456789ABCDEF";
      byte_tokens_[b] = find(std::string("<0x") + kDigits[b / 16] + kDigits[b % 16] + ">").value_or(-1);
    }
    if (bytes_) {
      for (std::size_t b = 0; b < 256; ++b) initial_.push_back(find(to_utf8(byte_characters()[b])).value_or(-1));
      return;
    }
    for (const auto& [text, id] : ids_) {
      if (text.empty()) continue;
      const Character c = first_character(text);
      if (c.bytes < text.size()) continue;
      if (c.code >= initial_.size()) initial_.resize(c.code + 1, -1);
      initial_[c.code] = id;
    }
  }

  void read_merges(const Fields& f) {
    const std::string where = f.file + ", \"merges\"";
    require(f.has("merges") && f.json.at("merges").is_array(), where, ": expected a list");
    std::vector<PairTable::Entry> merges;
    std::vector<std::pair<std::int32_t, std::int32_t>> neighbours;
    for (const Json& merge : f.json.at("merges")) {
      const std::size_t rank = merges.size();
      const auto [left, right] = parts(where, merge);
      const auto token = [&](const std::string& text) {
        const auto id = find(text);
        if (!id)
          fail(where, ": number ", rank, " needs the token ", quote(text), ", which the vocabulary does not have");
        return *id;
      };
      merges.push_back({token(left), token(right), static_cast<std::uint32_t>(rank), token(left + right)});
      if (left.empty() || right.empty()) continue;
      neighbours.emplace_back(token_of(left.substr(last_character(left))), token_of(right));
    }
    fill_pairs(merges, neighbours);
  }

  // A merge joins the last symbol of its left part with the first of its right part: `neighbours`. They get an entry
  // even if they cannot be merged themselves.
  void fill_pairs(const std::vector<PairTable::Entry>& merges,
                  std::vector<std::pair<std::int32_t, std::int32_t>>& neighbours) {
    // Byte tokens and the unknown token are not spelled in their symbols, so nothing is known about their neighbours.
    cuts_ = std::none_of(merges.begin(), merges.end(),
                         [&](const auto& merge) { return is_opaque(merge.left) || is_opaque(merge.right); });
    std::sort(neighbours.begin(), neighbours.end());
    neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
    pairs_ = PairTable(merges.size() + neighbours.size());
    for (const auto& merge : merges)
      pairs_.at(merge.left, merge.right) = merge;  // of two equal merges, the last one counts
    for (const auto& [left, right] : neighbours) {
      if (left < 0 || right < 0) continue;
      PairTable::Entry& entry = pairs_.at(left, right);
      if (entry.left < 0) entry = {left, right, PairTable::kNever, -1};
    }
  }

  bool is_opaque(std::int32_t id) const {
    return id == unknown_ ||
           (byte_fallback_ && std::find(byte_tokens_.begin(), byte_tokens_.end(), id) != byte_tokens_.end());
  }

  // The token of the first character, or -1.
  std::int32_t token_of(std::string_view text) const {
    return find(std::string(text.substr(0, first_character(text).bytes))).value_or(-1);
  }

  // "a b" in older files, ["a", "b"] in newer ones.
  static std::pair<std::string, std::string> parts(const std::string& where, const Json& merge) {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      return {merge[0], merge[1]};
    }
    if (!merge.is_string()) fail(where, ": ", shown(merge), " is not a pair of strings");
    const auto& text = merge.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      fail(where, ": ", quote(text), " is not two strings with a space between them");
    }
    return {text.substr(0, space), text.substr(space + 1)};
  }

  // With ignore_merges, all tokens of the vocabulary are words; otherwise, a token is a word if its text merges into
  // it.
  void find_words(bool ignore_merges) {
    WordTable words(ids_.size());
    Scratch scratch;
    std::vector<std::int32_t> tokens;
    for (const auto& [text, id] : ids_) {
      const std::optional<std::string> word = bytes_ ? bytes_of(text) : text;
      if (!word || word->empty()) continue;
      if (!ignore_merges) {
        tokens.clear();
        split(*word, scratch.symbols);
        merge_parts(scratch, tokens);
        if (tokens.size() != 1 || tokens[0] != id) continue;
      }
      words.add(*word, id);
    }
    words_ = std::move(words);
  }

  // A symbol that the vocabulary lacks becomes the tokens of its bytes if all of them exist; else the unknown token (one
  // for a run with fuse_unk), if the file names one; else nothing. Returns false if the unknown token is not in the
  // vocabulary.
  bool split(std::string_view word, std::vector<std::int32_t>& symbols) const {
    symbols.clear();
    bool complete = true;
    bool pending = false;  // an unknown token is waiting: it goes before the next known symbol, but after bytes
    for_each_symbol(word, [&](char32_t symbol) {
      const std::int32_t id = symbol < initial_.size() ? initial_[symbol] : -1;
      if (id >= 0) {
        if (pending) symbols.push_back(unknown_);
        pending = false;
        symbols.push_back(id);
      } else if (!add_bytes(bytes_ ? byte_characters()[symbol] : symbol, symbols) && unknown_text_) {
        complete = unknown_ >= 0;
        if (pending && !fuse_unknown_) symbols.push_back(unknown_);
        pending = true;
      }
    });
    if (pending) symbols.push_back(unknown_);
    return complete;
  }

  bool add_bytes(char32_t symbol, std::vector<std::int32_t>& symbols) const {
    if (!byte_fallback_) return false;
    const std::size_t before = symbols.size();
    for (const char c : to_utf8(symbol)) {
      symbols.push_back(byte_tokens_[static_cast<unsigned char>(c)]);
      if (symbols.back() >= 0) continue;
      symbols.resize(before);
      return false;
    }
    return true;
  }

  // Cuts the word between symbols that no merge joins, and merges each part.
  void merge_parts(Scratch& scratch, std::vector<std::int32_t>& out) const {
    const auto& symbols = scratch.symbols;
    scratch.merges.clear();
    std::size_t begin = 0;
    for (std::size_t i = 1; i <= symbols.size(); ++i) {
      if (i < symbols.size()) {
        const PairTable::Entry& pair = pairs_.at(symbols[i - 1], symbols[i]);
        if (pair.left >= 0 || !cuts_) {
          scratch.merges.push_back(pair);
          continue;
        }
      }
      merge(scratch, begin, i, out);
      scratch.merges.clear();
      begin = i;
    }
  }

  // Merges symbols [begin, end). `merges` has the entries of their pairs.
  void merge(Scratch& scratch, std::size_t begin, std::size_t end, std::vector<std::int32_t>& out) const {
    if (end - begin > 48) return merge_long(scratch, begin, end, out);
    auto& merges = scratch.merges;
    std::int32_t* symbols = scratch.symbols.data() + begin;
    std::size_t count = end - begin;
    while (count > 1) {
      std::size_t best = 0;
      for (std::size_t i = 1; i + 1 < count; ++i) {
        if (merges[i].rank < merges[best].rank) best = i;
      }
      if (merges[best].rank == PairTable::kNever) break;
      symbols[best] = merges[best].merged;
      --count;
      std::copy(symbols + best + 2, symbols + count + 1, symbols + best + 1);
      std::copy(merges.data() + best + 1, merges.data() + count, merges.data() + best);
      if (best > 0) merges[best - 1] = pairs_.at(symbols[best - 1], symbols[best]);
      if (best + 1 < count) merges[best] = pairs_.at(symbols[best], symbols[best + 1]);
    }
    out.insert(out.end(), symbols, symbols + count);
  }

  struct Candidate {
    std::uint32_t rank;
    std::int32_t left, merged;
    bool operator<(const Candidate& other) const {  // the heap returns the largest first
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };

  // The same with a heap. Merged symbols form a linked list.
  void merge_long(Scratch& scratch, std::size_t begin, std::size_t end, std::vector<std::int32_t>& out) const {
    require(end - begin < std::numeric_limits<std::int32_t>::max(), where_, ": a word of ", end - begin,
            " symbols is more than is supported; split the text");
    std::int32_t* symbols = scratch.symbols.data() + begin;
    const auto count = static_cast<std::int32_t>(end - begin);
    auto& previous = scratch.previous;
    auto& next = scratch.next;
    std::priority_queue<Candidate> queue({}, first_candidates(scratch, count));
    const auto consider = [&](std::int32_t left, std::int32_t right) {
      if (left < 0 || right >= count) return;
      const PairTable::Entry& pair = pairs_.at(symbols[left], symbols[right]);
      if (pair.rank != PairTable::kNever) queue.push({pair.rank, left, pair.merged});
    };
    while (!queue.empty()) {
      const Candidate top = queue.top();
      queue.pop();
      const std::int32_t left = top.left, right = next[left];
      if (symbols[left] < 0 || right >= count) continue;
      // Symbols only grow, so if the pair merges into a different token than the candidate's, the candidate is stale.
      if (pairs_.at(symbols[left], symbols[right]).merged != top.merged) continue;
      symbols[left] = top.merged;
      symbols[right] = -1;
      next[left] = next[right];
      if (next[left] < count) previous[next[left]] = left;
      consider(previous[left], left);
      consider(left, next[left]);
    }
    for (std::int32_t i = 0; i < count; i = next[i]) out.push_back(symbols[i]);
  }

  // Links `count` symbols and returns the pairs that can be merged.
  static std::vector<Candidate> first_candidates(Scratch& scratch, std::int32_t count) {
    scratch.previous.resize(count);
    scratch.next.resize(count);
    std::vector<Candidate> candidates;
    for (std::int32_t i = 0; i < count; ++i) {
      scratch.previous[i] = i - 1, scratch.next[i] = i + 1;
      if (i + 1 == count || scratch.merges[i].rank == PairTable::kNever) continue;
      candidates.push_back({scratch.merges[i].rank, i, scratch.merges[i].merged});
    }
    return candidates;
  }

  bool bytes_, fuse_unknown_, byte_fallback_, cuts_ = false;
  std::string where_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::vector<std::string> texts_;
  std::vector<bool> present_;
  std::optional<std::string> unknown_text_;
  std::int32_t unknown_ = -1;
  std::array<std::int32_t, 256> byte_tokens_{};
  std::vector<std::int32_t> initial_;
  PairTable pairs_;
  WordTable words_;
};

}  // namespace streambp
