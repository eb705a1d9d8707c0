// UTF-8: reads and writes characters, replaces invalid bytes, finds white space.
#pragma once

#include <utf8proc.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace streambp {

enum class Utf8 { valid, invalid, incomplete };  // incomplete: the text ends inside a character

struct Character {
  char32_t code;
  std::size_t bytes;  // invalid text: the length of the longest valid prefix of a character, at least 1
  Utf8 state;
};

// The first character of a non-empty text.
inline Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1, Utf8::valid};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {0xFFFD, 1, Utf8::invalid};
  char32_t code = lead & (0x7Fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {0xFFFD, i, Utf8::incomplete};
    // The range of the second byte excludes overlong forms, surrogates and codes above U+10FFFF.
    const unsigned low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return {0xFFFD, i, Utf8::invalid};
    code = code << 6 | (byte(i) & 0x3F);
  }
  return {code, length, Utf8::valid};
}

inline void append_utf8(std::string& text, char32_t code) {
  utf8proc_uint8_t bytes[4];
  const auto count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes);
  text.append(bytes, bytes + count);
}

inline std::string to_utf8(char32_t code) {
  std::string text;
  append_utf8(text, code);
  return text;
}

template <class F>
void for_each_character(std::string_view text, F&& f) {
  while (!text.empty()) {
    const Character c = first_character(text);
    f(c.code);
    text.remove_prefix(c.bytes);
  }
}

// The length of the longest prefix with bytes below `limit`, which is at least 0x80.
inline std::size_t bytes_below(std::string_view text, unsigned limit) {
  std::size_t i = 0;
  for (std::uint64_t eight; i + 8 <= text.size(); i += 8) {
    std::memcpy(&eight, text.data() + i, 8);
    if (eight & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < limit) ++i;
  return i;
}

enum class TextEnd { open, closed };  // open: more bytes may follow

// Appends `text` with U+FFFD for every invalid part. At an open end, an incomplete character is left out; returns its
// number of bytes.
inline std::size_t append_repaired(std::string& out, std::string_view text, TextEnd end = TextEnd::closed) {
  while (!text.empty()) {
    const std::size_t plain = bytes_below(text, 0x80);
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const Character c = first_character(text);
    if (c.state == Utf8::incomplete && end == TextEnd::open) break;
    if (c.state == Utf8::valid) {
      out += text.substr(0, c.bytes);
    } else {
      out += "\uFFFD";
    }
    text.remove_prefix(c.bytes);
  }
  return text.size();
}

inline bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    text.remove_prefix(bytes_below(text, 0x80));
    if (text.empty()) break;
    const Character c = first_character(text);
    if (c.state != Utf8::valid) return false;
    text.remove_prefix(c.bytes);
  }
  return true;
}

// Unicode's property White_Space.
inline bool is_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// The number of bytes of white space at the beginning.
inline std::size_t leading_space(std::string_view text) {
  std::string_view rest = text;
  while (!rest.empty()) {
    const Character c = first_character(rest);
    if (!is_space(c.code)) break;
    rest.remove_prefix(c.bytes);
  }
  return text.size() - rest.size();
}

// The index of the first byte of the last character. The text is valid and not empty.
inline std::size_t last_character(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

// The number of bytes of white space at the end.
inline std::size_t trailing_space(std::string_view text) {
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t begin = last_character(rest);
    if (!is_space(first_character(rest.substr(begin)).code)) break;
    rest = rest.substr(0, begin);
  }
  return text.size() - rest.size();
}

}  // namespace streambp
