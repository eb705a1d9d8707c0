// Tokens that a tokenizer.json adds to the vocabulary of its model, such as "<|im_start|>". They are split off a text
// first: leftmost match first, the longest of equals.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/pattern.cuh"

namespace streambp {

struct AddedToken {
  std::int32_t id;
  std::string text;                // matched in the input
  bool special, single_word;       // single_word: not next to a word character
  bool strips_left, strips_right;  // the match includes white space on this side
};

// Tokens that are ordinary text in a message, besides the special ones.
using PlainTokens = std::set<std::int32_t>;

class AddedTokens {
 public:
  void add(AddedToken token) { tokens_.push_back(std::move(token)); }

  // Call after the last add. Returns false if two tokens have the same text.
  bool finish() {
    std::sort(tokens_.begin(), tokens_.end(), [](const auto& a, const auto& b) { return a.text < b.text; });
    for (const AddedToken& token : tokens_) begins_[static_cast<unsigned char>(token.text[0])] = true;
    const auto same = [](const AddedToken& a, const AddedToken& b) { return a.text == b.text; };
    return std::adjacent_find(tokens_.begin(), tokens_.end(), same) == tokens_.end();
  }

  // Calls f(token, begin, end) for every token in the text, and with nullptr for the text between tokens. With `plain`,
  // the tokens in it and the special ones are ordinary text.
  template <class F>
  void for_each(std::string_view text, const PlainTokens* plain, F&& f) const {
    std::size_t done = 0;
    for (std::size_t at = 0; !tokens_.empty() && at < text.size();) {
      const AddedToken* token = begins_[static_cast<unsigned char>(text[at])] ? longest(text.substr(at)) : nullptr;
      if (!token) {
        ++at;
        continue;
      }
      std::size_t begin = at, end = at + token->text.size();
      at = end;
      if (plain && (token->special || plain->contains(token->id))) continue;
      if (token->single_word && (ends_with_word(text.substr(0, begin)) || begins_with_word(text.substr(end)))) continue;
      if (token->strips_left) begin = done < begin ? begin - trailing_space(text.substr(done, begin - done)) : done;
      if (token->strips_right) end += leading_space(text.substr(end));
      if (done < begin) f(nullptr, done, begin);
      f(token, begin, end);
      done = end;
    }
    if (done < text.size()) f(nullptr, done, text.size());
  }

 private:
  // The longest token at the start of the text. The tokens are sorted; each byte narrows the range.
  const AddedToken* longest(std::string_view text) const {
    const AddedToken* found = nullptr;
    auto first = tokens_.begin(), last = tokens_.end();
    for (std::size_t i = 0; first != last && i < text.size(); ++i) {
      const auto byte = [i](const AddedToken& t) {
        return i < t.text.size() ? static_cast<unsigned char>(t.text[i]) : -1;
      };
      const int wanted = static_cast<unsigned char>(text[i]);
      first = std::lower_bound(first, last, wanted, [&](const AddedToken& t, int value) { return byte(t) < value; });
      last = std::upper_bound(first, last, wanted, [&](int value, const AddedToken& t) { return value < byte(t); });
      if (first != last && first->text.size() == i + 1) found = &*first;
    }
    return found;
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
  std::array<bool, 256> begins_{};
};

}  // namespace streambp
