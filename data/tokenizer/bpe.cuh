// Byte pair encoding: a word is taken apart into symbols, its bytes or its characters, and of all neighbours that may
// be merged the pair of the lowest rank is (the leftmost of equals), until none may.
//
// Three tables make it fast, and a heap, none of which changes a result:
//   initial  the token of each symbol
//   pairs    (left token, right token) -> rank and merged token. A pair of symbols that no merge ever brings together
//            is not in it, so a word can be cut between them, and its parts merged apart.
//   words    all texts that merge into one token, so that most words are looked up and not merged at all
//   the heap holds the candidates of long words: n log n steps for n symbols, whatever the word
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/files/fields.cuh"
#include "data/tokenizer/bpe_tables.cuh"
#include "data/tokenizer/unicode.cuh"
#include "kernels/base/matrix.cuh"

namespace streambp {

// Byte-level tokenizers write each byte as a character that can be seen: those that can be stand for themselves, the
// others for U+0100 and up, in order.
inline const std::array<char32_t, 256>& byte_characters() {
  static const std::array<char32_t, 256> characters = [] {
    std::array<char32_t, 256> all;
    char32_t next = 0x100;
    for (char32_t b = 0; b < 256; ++b) {
      const bool visible = (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD);
      all[b] = visible ? b : next++;
    }
    return all;
  }();
  return characters;
}

// The bytes that a text of such characters stands for; none if it has others.
inline std::optional<std::string> bytes_of(std::string_view text) {
  static const std::array<int, 0x144> byte_of = [] {
    std::array<int, 0x144> all;
    all.fill(-1);
    for (int b = 0; b < 256; ++b) all[byte_characters()[static_cast<std::size_t>(b)]] = b;
    return all;
  }();
  std::string bytes;
  bool all_bytes = true;
  for_each_character(text, [&](char32_t c) {
    const int byte = c < byte_of.size() ? byte_of[c] : -1;
    all_bytes = all_bytes && byte >= 0;
    bytes += static_cast<char>(byte);
  });
  if (!all_bytes) return {};
  return bytes;
}

class Bpe {
 public:
  static constexpr Index kLargestId = (1 << 24) - 1;

  // From the field "model"; `bytes`: words come as bytes, and the vocabulary's texts are of byte characters.
  Bpe(const Fields& f, bool bytes) : bytes_(bytes), where_(f.file) {
    f.only<std::string>("type", "BPE");
    f.only("dropout", 0.0);
    f.only<std::string>("continuing_subword_prefix", "");
    f.only<std::string>("end_of_word_suffix", "");
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

  // By id: their texts, and whether they are there at all.
  const std::vector<std::string>& texts() const { return texts_; }
  const std::vector<bool>& present() const { return present_; }
  std::size_t count() const { return ids_.size(); }
  std::optional<std::int32_t> find(const std::string& text) const {
    const auto found = ids_.find(text);
    if (found == ids_.end()) return {};
    return found->second;
  }

  // Buffers that are used again for every word.
  struct Scratch {
    std::vector<std::int32_t> symbols;
    std::vector<std::size_t> ends;
    std::vector<PairTable::Entry> merges;
    std::vector<std::int32_t> previous, next;
  };

  // Appends the word's tokens.
  void encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const {
    const std::int32_t whole = words_.find(word);
    if (whole >= 0) {
      out.push_back(whole);
    } else {
      take_apart(word, scratch.symbols);
      merge_parts(scratch, out);
    }
  }

 private:
  void read_vocabulary(const Fields& vocabulary) {
    // Every id takes memory, so few tokens must not leave many ids unused.
    const Index largest = std::min(kLargestId, 65'536 + 16 * static_cast<Index>(vocabulary.json.size()));
    for (const auto& [text, id] : vocabulary.json.items()) {
      require(id.is_number_integer(), vocabulary.file, ": the id of \"", text, "\" is not a whole number");
      require(id.get<Index>() >= 0 && id.get<Index>() <= largest, vocabulary.file, ": the id of \"", text, "\" is ",
              id.dump(), ", which is not from 0 to ", largest, ", as ids of ", vocabulary.json.size(),
              " tokens must be");
      const auto i = id.get<std::size_t>();
      if (i >= texts_.size()) texts_.resize(i + 1), present_.resize(i + 1);
      require(!present_[i], vocabulary.file, ": \"", texts_[i], "\" and \"", text, "\" have the same id ", i);
      texts_[i] = text;
      present_[i] = true;
      ids_[text] = static_cast<std::int32_t>(i);
    }
  }

  // What a symbol is when it stands in a text: a byte, or a character's code point.
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
    bool only_characters = true;  // no merge has a part that stands for bytes, or for what is unknown
    for (const Json& merge : f.json.at("merges")) {
      const auto [left, right] = parts(where + ", number " + std::to_string(merges.size()), merge);
      const auto token = [&](const std::string& text) {
        const auto id = find(text);
        require(id.has_value(), where, ": number ", merges.size(), " needs the token \"", text,
                "\", which the vocabulary does not have");
        return *id;
      };
      const std::int32_t a = token(left), b = token(right);
      merges.push_back({a, b, static_cast<std::uint32_t>(merges.size()), token(left + right)});
      for (const std::int32_t id : {a, b}) {
        const bool is_byte =
            byte_fallback_ && std::find(byte_tokens_.begin(), byte_tokens_.end(), id) != byte_tokens_.end();
        only_characters = only_characters && id != unknown_ && !is_byte;
      }
      if (!left.empty() && !right.empty()) {
        neighbours.emplace_back(token_of(left.substr(last_character(left))), token_of(right));
      }
    }
    cuts_ = only_characters;
    std::sort(neighbours.begin(), neighbours.end());
    neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
    pairs_ = PairTable(merges.size() + neighbours.size());
    for (const auto& merge : merges) pairs_.at(merge.left, merge.right) = merge;  // of two equal ones the last counts
    for (const auto& [left, right] : neighbours) {
      if (left < 0 || right < 0) continue;
      PairTable::Entry& entry = pairs_.at(left, right);
      if (entry.left < 0) entry = {left, right, PairTable::kNever, -1};
    }
  }

  // The token of the first character as a symbol, or -1.
  std::int32_t token_of(std::string_view text) const {
    return find(std::string(text.substr(0, first_character(text).bytes))).value_or(-1);
  }

  // Old files write "a b", later ones ["a", "b"].
  static std::pair<std::string, std::string> parts(const std::string& where, const Json& merge) {
    if (merge.is_array()) {
      require(merge.size() == 2 && merge[0].is_string() && merge[1].is_string(), where, ": ", merge.dump(),
              " is not a pair of texts");
      return {merge[0], merge[1]};
    }
    require(merge.is_string(), where, ": ", merge.dump(), " is not a pair of texts");
    const auto& text = merge.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    require(space != std::string::npos && text.find(' ', space + 1) == std::string::npos, where, ": \"", text,
            "\" is not two texts with a space between");
    return {text.substr(0, space), text.substr(space + 1)};
  }

  // A text is its own token if merging gives that, or if merging is not asked for where there is such a token.
  void find_words(bool ignore_merges) {
    WordTable words(ids_.size());
    Scratch scratch;
    std::vector<std::int32_t> tokens;
    for (const auto& [text, id] : ids_) {
      const std::optional<std::string> word = bytes_ ? bytes_of(text) : text;
      if (!word || word->empty()) continue;
      if (!ignore_merges) {
        tokens.clear();
        take_apart(*word, scratch.symbols, false);
        merge_parts(scratch, tokens);
        if (tokens.size() != 1 || tokens[0] != id) continue;
      }
      words.add(*word, id);
    }
    words_ = std::move(words);
  }

  // Symbols that the vocabulary lacks become tokens of their bytes if all of those exist, else the unknown token (one
  // for several, if so wished), or else nothing.
  void take_apart(std::string_view word, std::vector<std::int32_t>& symbols, bool complain = true) const {
    symbols.clear();
    bool unknown = false;  // one is due; it comes before the next known symbol, but after bytes
    for_each_symbol(word, [&](char32_t symbol) {
      const std::int32_t id = symbol < initial_.size() ? initial_[symbol] : -1;
      if (id >= 0) {
        if (unknown) symbols.push_back(unknown_);
        unknown = false;
        symbols.push_back(id);
      } else if (!add_bytes(bytes_ ? byte_characters()[symbol] : symbol, symbols) && unknown_text_) {
        require(unknown_ >= 0 || !complain, where_, ": the text needs the token for what is unknown, \"",
                *unknown_text_, "\", which the vocabulary does not have");
        if (unknown && !fuse_unknown_) symbols.push_back(unknown_);
        unknown = true;
      }
    });
    if (unknown) symbols.push_back(unknown_);
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

  // Merges each part between two cuts for itself.
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

  // Merges symbols [begin, end), whose neighbours' entries are in `merges`.
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

  void merge_long(Scratch& scratch, std::size_t begin, std::size_t end, std::vector<std::int32_t>& out) const {
    struct Candidate {
      std::uint32_t rank, left;
      std::int32_t merged;
      bool operator<(const Candidate& other) const {  // the heap gives the largest first
        return rank != other.rank ? rank > other.rank : left > other.left;
      }
    };
    require(end - begin < std::numeric_limits<std::int32_t>::max(), where_, ": a word of ", end - begin,
            " symbols is more than is supported; split the text");
    std::int32_t* symbols = scratch.symbols.data() + begin;
    const auto count = static_cast<std::int32_t>(end - begin);
    auto& previous = scratch.previous;
    auto& next = scratch.next;
    previous.resize(end - begin), next.resize(end - begin);
    std::vector<Candidate> candidates;
    for (std::int32_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      previous[at] = i - 1, next[at] = i + 1;
      if (i + 1 == count || scratch.merges[at].rank == PairTable::kNever) continue;
      candidates.push_back({scratch.merges[at].rank, static_cast<std::uint32_t>(i), scratch.merges[at].merged});
    }
    std::priority_queue<Candidate> queue({}, std::move(candidates));
    const auto consider = [&](std::int32_t left, std::int32_t right) {
      if (left < 0 || right >= count) return;
      const PairTable::Entry& pair = pairs_.at(symbols[left], symbols[right]);
      if (pair.rank != PairTable::kNever) queue.push({pair.rank, static_cast<std::uint32_t>(left), pair.merged});
    };
    while (!queue.empty()) {
      const Candidate top = queue.top();
      queue.pop();
      const std::size_t left = top.left;
      const std::int32_t right = next[left];
      if (symbols[left] < 0 || right >= count) continue;
      // A merged text only ever grows, so a pair that gives another token than the candidate's is another pair.
      if (pairs_.at(symbols[left], symbols[right]).merged != top.merged) continue;
      symbols[left] = top.merged;
      symbols[right] = -1;
      next[left] = next[static_cast<std::size_t>(right)];
      if (next[left] < count) previous[static_cast<std::size_t>(next[left])] = static_cast<std::int32_t>(left);
      consider(previous[left], static_cast<std::int32_t>(left));
      consider(static_cast<std::int32_t>(left), next[left]);
    }
    for (std::int32_t i = 0; i < count; i = next[static_cast<std::size_t>(i)]) out.push_back(symbols[i]);
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
