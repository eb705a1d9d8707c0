// Tokens that a tokenizer.json adds to the vocabulary of its model, such as "<|im_start|>". They are split off a text
// first: leftmost match first, the longest of equals.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <vector>

#include "text/tokenizer/pattern.h"

namespace streambp {

struct AddedToken {
  std::int32_t id;
  std::string text;                // matched in the input
  bool special, single_word;       // single_word: not next to a word character
  bool strips_left, strips_right;  // the match includes white space on this side
};

// Where the bytes of a text come from. In what comes from the data, special tokens and those in `plain` are ordinary text.
struct Origin {
  std::string_view data;  // 1 for each byte that comes from the data, else 0; empty: all do
  const std::set<std::int32_t>& plain;

  bool allows(const AddedToken& token, std::size_t begin, std::size_t end) const {
    if (!token.special && !plain.contains(token.id)) return true;
    return !data.empty() && data.substr(begin, end - begin).find('\1') == data.npos;
  }
};

class AddedTokens {
 public:
  static constexpr std::size_t kLongest = 512;  // bytes of a token

  void add(AddedToken token) { tokens_.push_back(std::move(token)); }

  // Call after the last add. Returns false if two tokens have the same text.
  bool finish() {
    std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
    for (const AddedToken& token : tokens_) ++first_[static_cast<unsigned char>(token.text[0]) + 1u];
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    for (int i = 0; i < static_cast<int>(tokens_.size()); ++i) {
      int shorter = i - 1;
      while (shorter >= 0 && !text(i).starts_with(text(shorter))) shorter = shorter_[shorter];
      shorter_.push_back(shorter);
    }
    const auto same = [](const AddedToken& a, const AddedToken& b) { return a.text == b.text; };
    return std::adjacent_find(tokens_.begin(), tokens_.end(), same) == tokens_.end();
  }

  // Calls f(token, begin, end) for every token in the text, and with nullptr for the text between tokens.
  template <class F>
  void for_each(std::string_view text, const Origin* origin, F&& f) const {
    std::size_t done = 0;
    for (std::size_t at = 0; !tokens_.empty() && at < text.size();) {
      const AddedToken* token = longest(text.substr(at));
      if (!token) {
        ++at;
        continue;
      }
      std::size_t begin = at, end = at + token->text.size();
      at = end;
      if (origin && !origin->allows(*token, begin, end)) continue;
      if (token->single_word && (ends_with_word(text.substr(0, begin)) || begins_with_word(text.substr(end)))) continue;
      if (token->strips_left) begin = done < begin ? begin - trailing_space(text.substr(done, begin - done)) : done;
      // Before `done` is white space that belongs to an earlier token; this one shares it.
      if (token->strips_right) end = end < done ? done : end + leading_space(text.substr(end));
      if (done < begin) f(nullptr, done, begin);
      f(token, begin, end);
      done = end;
    }
    if (done < text.size()) f(nullptr, done, text.size());
  }

 private:
  std::string_view text(int i) const { return tokens_[i].text; }

  // The longest token at the start of the text. The tokens are sorted, so it is the last one that is not after the text,
  // or one that this one begins with.
  const AddedToken* longest(std::string_view rest) const {
    const auto byte = static_cast<unsigned char>(rest[0]);
    if (first_[byte] == first_[byte + 1u]) return nullptr;
    rest = rest.substr(0, kLongest);
    const auto before = [](std::string_view a, const AddedToken& b) { return a < b.text; };
    const auto after =
        std::upper_bound(tokens_.begin() + first_[byte], tokens_.begin() + first_[byte + 1u], rest, before);
    int i = static_cast<int>(after - tokens_.begin()) - 1;
    if (i < first_[byte]) return nullptr;
    const std::string_view last = text(i);
    const auto common = static_cast<std::size_t>(std::ranges::mismatch(last, rest).in1 - last.begin());
    while (i >= 0 && text(i).size() > common) i = shorter_[i];
    return i < 0 ? nullptr : &tokens_[i];
  }

  // Letters, marks, digits, connecting punctuation, joiners, and letters in circles and squares.
  static bool is_word(std::string_view character) {
    static const Pattern word =
        Pattern::expression("added_tokens", R"([\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{200C}\x{200D}\x{24B6}-\x{24E9})"
                                            R"(\x{1F130}-\x{1F149}\x{1F150}-\x{1F169}\x{1F170}-\x{1F189}])");
    bool found = false;
    word.for_each(character, [&](std::size_t, std::size_t, Span span) { found = span == Span::match; });
    return found;
  }
  static bool begins_with_word(std::string_view text) {
    return !text.empty() && is_word(text.substr(0, first_character(text).bytes));
  }
  static bool ends_with_word(std::string_view text) {
    return !text.empty() && is_word(text.substr(last_character(text)));
  }

  std::vector<AddedToken> tokens_;
  std::vector<int> shorter_;      // the longest other token that a token begins with; -1: none
  std::array<int, 257> first_{};  // the first token that begins with this byte; one more for the end
};

}  // namespace streambp
