// Text whose characters know where they come from. A character is a code point with marks: from the data, or in a
// {% generation %} block. Comparing and searching ignore the marks; copying, slicing and joining keep them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "text/utf8.h"

namespace streambp::jinja {

constexpr char32_t kCode = 0x1FFFFF;
constexpr char32_t kData = char32_t{1} << 30;     // from a conversation, not from the template
constexpr char32_t kLearned = char32_t{1} << 31;  // in a {% generation %} block
constexpr char32_t kAnswer = char32_t{1} << 28;   // from the last message of a conversation
constexpr char32_t kSpoken = char32_t{1} << 27;   // from the content of an assistant's message
constexpr char32_t kSafe = char32_t{1} << 29;     // Python's Markup: it escapes what is added to it

constexpr char32_t code_of(char32_t c) { return c & kCode; }

struct IgnoreMarks : std::char_traits<char32_t> {
  static constexpr bool eq(char32_t a, char32_t b) { return code_of(a) == code_of(b); }
  static constexpr bool lt(char32_t a, char32_t b) { return code_of(a) < code_of(b); }
  static constexpr int compare(const char32_t* a, const char32_t* b, std::size_t n) {
    for (; n > 0; ++a, ++b, --n)
      if (!eq(*a, *b)) return lt(*a, *b) ? -1 : 1;
    return 0;
  }
  static constexpr const char32_t* find(const char32_t* text, std::size_t n, const char32_t& c) {
    for (; n > 0; ++text, --n)
      if (eq(*text, c)) return text;
    return nullptr;
  }
};
using Text = std::basic_string<char32_t, IgnoreMarks>;
using TextView = std::basic_string_view<char32_t, IgnoreMarks>;

inline Text to_text(std::string_view utf8, char32_t marks = 0) {
  Text text;
  while (!utf8.empty()) {
    const std::size_t ascii = bytes_below(utf8, 0x80), before = text.size();
    text.resize(before + ascii);
    for (std::size_t i = 0; i < ascii; ++i) text[before + i] = static_cast<unsigned char>(utf8[i]) | marks;
    utf8.remove_prefix(ascii);
    if (utf8.empty()) break;
    const Character c = first_character(utf8);
    text += c.code | marks;
    utf8.remove_prefix(c.bytes);
  }
  return text;
}

inline void append_utf8(std::string& utf8, TextView text) {
  for (const char32_t c : text) {
    if (code_of(c) < 0x80) {
      utf8 += static_cast<char>(code_of(c));
    } else {
      streambp::append_utf8(utf8, code_of(c));
    }
  }
}
inline std::string to_utf8(TextView text) {
  std::string utf8;
  utf8.reserve(text.size());
  append_utf8(utf8, text);
  return utf8;
}

// What Python's str.isspace calls white space.
inline bool is_white(char32_t c) { return is_space(code_of(c)) || (0x1C <= code_of(c) && code_of(c) <= 0x1F); }

template <class Removed>
TextView without_ends(TextView text, bool left, bool right, Removed&& removed) {
  while (left && !text.empty() && removed(text.front())) text.remove_prefix(1);
  while (right && !text.empty() && removed(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace streambp::jinja
