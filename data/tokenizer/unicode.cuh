// Unicode text as UTF-8: characters in and out, repair of what is not UTF-8, and the normal forms NFC and NFD.
//
// The normal forms of Unicode (its Standard Annex 15), on a run of characters:
//   NFD  replace each character by what it is composed of, then sort each run of combining marks by their class
//   NFC  NFD, then compose again: a mark joins the last character of class 0 if nothing between them is in its way
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer/unicode_tables.cuh"

namespace streambp {

enum class Utf8 { valid, invalid, incomplete };  // incomplete: the text ends within what may become a character

struct Character {
  char32_t code;
  std::size_t bytes;  // for invalid text: of the longest beginning of a character, or else 1
  Utf8 state;
};

// The character at the beginning of a text that is not empty.
inline Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1, Utf8::valid};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {0xFFFD, 1, Utf8::invalid};
  char32_t code = lead & (0x7Fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {0xFFFD, i, Utf8::incomplete};
    // the second byte excludes longer forms than needed, surrogates, and what is beyond the last code point
    const unsigned low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return {0xFFFD, i, Utf8::invalid};
    code = code << 6 | (byte(i) & 0x3F);
  }
  return {code, length, Utf8::valid};
}

inline void append_utf8(std::string& text, char32_t code) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xC0 | code >> 6), add(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12), add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
  } else {
    add(0xF0 | code >> 18), add(0x80 | (code >> 12 & 0x3F)), add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
  }
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

// How many bytes at the beginning are below `limit`, which is 0x80 or above.
inline std::size_t bytes_below(std::string_view text, unsigned limit) {
  std::size_t i = 0;
  for (std::uint64_t eight; i + 8 <= text.size(); i += 8) {
    std::memcpy(&eight, text.data() + i, 8);
    if (eight & 0x8080808080808080u) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < limit) ++i;
  return i;
}

// Appends `text`, every part of it that is not UTF-8 replaced by U+FFFD. Returns how many bytes at its end it left out
// because more could complete them; with `last` there are none.
inline std::size_t append_repaired(std::string& out, std::string_view text, bool last) {
  while (!text.empty()) {
    const std::size_t plain = bytes_below(text, 0x80);
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const Character c = first_character(text);
    if (c.state == Utf8::incomplete && !last) break;
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

// What Unicode calls White_Space.
inline bool is_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// How many bytes of white space the text begins with.
inline std::size_t leading_space(std::string_view text) {
  std::string_view rest = text;
  while (!rest.empty()) {
    const Character c = first_character(rest);
    if (!is_space(c.code)) break;
    rest.remove_prefix(c.bytes);
  }
  return text.size() - rest.size();
}

// Where the last character of valid UTF-8 begins.
inline std::size_t last_character(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return begin;
}

// How many bytes of white space the text ends with.
inline std::size_t trailing_space(std::string_view text) {
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::size_t begin = last_character(rest);
    if (!is_space(first_character(rest.substr(begin)).code)) break;
    rest = rest.substr(0, begin);
  }
  return text.size() - rest.size();
}

// --- Normal forms ---

namespace unicode {

// Korean syllables are composed by arithmetic: 19 leading, 21 middle and 27 (or no) trailing letters.
constexpr char32_t kSyllables = 0xAC00, kLeading = 0x1100, kMiddle = 0x1161, kTrailing = 0x11A7;
constexpr char32_t kMiddles = 21, kTrailings = 28, kSyllableCount = 19 * kMiddles * kTrailings;

inline int combining_class(char32_t c) {
  if (c < 0x300) return 0;
  const auto* range = std::upper_bound(std::begin(kCombining), std::end(kCombining), c,
                                       [](char32_t code, const CombiningRange& r) { return code < r.first; });
  if (range == std::begin(kCombining)) return 0;
  --range;
  return c <= range->last ? range->combining_class : 0;
}

inline void decompose(char32_t c, std::u32string& out) {
  if (c < 0xC0) {
    out += c;
  } else if (c - kSyllables < kSyllableCount) {
    const char32_t s = c - kSyllables;
    out += kLeading + s / (kMiddles * kTrailings);
    out += kMiddle + s / kTrailings % kMiddles;
    if (s % kTrailings > 0) out += kTrailing + s % kTrailings;
  } else {
    const auto* found = std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), c,
                                         [](const Decomposition& d, char32_t code) { return d.code < code; });
    if (found == std::end(kDecompositions) || found->code != c) {
      out += c;
      return;
    }
    decompose(found->first, out);
    if (found->second) out += found->second;
  }
}

// What two characters compose to, or 0.
inline char32_t composed(char32_t a, char32_t b) {
  if (a - kLeading < 19 && b - kMiddle < kMiddles)
    return kSyllables + ((a - kLeading) * kMiddles + b - kMiddle) * kTrailings;
  if (a - kSyllables < kSyllableCount && (a - kSyllables) % kTrailings == 0 && b - kTrailing - 1 < kTrailings - 1) {
    return a + b - kTrailing;
  }
  static const std::vector<std::pair<std::uint64_t, char32_t>> pairs = [] {
    std::vector<std::pair<std::uint64_t, char32_t>> all;
    for (const Decomposition& d : kDecompositions) {
      if (d.composes) all.emplace_back(std::uint64_t{d.first} << 32 | d.second, d.code);
    }
    std::sort(all.begin(), all.end());
    return all;
  }();
  const std::pair<std::uint64_t, char32_t> key{std::uint64_t{a} << 32 | b, 0};
  const auto found = std::lower_bound(pairs.begin(), pairs.end(), key);
  return found != pairs.end() && found->first == key.first ? found->second : 0;
}

// Characters of class 0 stay; each run of others between them is sorted by class, equals in their order.
inline void sort_marks(std::u32string& text) {
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    while (end < text.size() && combining_class(text[end]) > 0) ++end;
    std::stable_sort(text.begin() + static_cast<std::ptrdiff_t>(i), text.begin() + static_cast<std::ptrdiff_t>(end),
                     [](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
    i = end + 1;
  }
}

inline void compose(std::u32string& text) {
  constexpr std::size_t kNone = ~std::size_t{0};
  std::size_t starter = kNone, size = 0;
  int before = -1;  // class of the last mark that was kept after the starter; -1: none
  for (const char32_t c : text) {
    const int own = combining_class(c);
    const char32_t joined = starter != kNone && before < own ? composed(text[starter], c) : 0;
    if (joined) {
      text[starter] = joined;
      continue;
    }
    if (own == 0) starter = size;
    before = own == 0 ? -1 : own;
    text[size++] = c;
  }
  text.resize(size);
}

}  // namespace unicode

enum class NormalForm { nfc, nfd };

// True if the text is in the normal form for sure: nothing below U+0300 changes in NFC, nothing below U+00C0 in NFD.
inline bool surely_normal(NormalForm form, std::string_view text) {
  const unsigned limit = form == NormalForm::nfc ? 0xCC : 0xC3;  // first byte of U+0300 and of U+00C0
  while (!text.empty()) {
    text.remove_prefix(bytes_below(text, 0x80));
    const std::size_t before = text.size();
    text.remove_prefix(bytes_below(text, limit));
    if (text.size() == before) break;
  }
  return text.empty();
}

inline std::string normalised(NormalForm form, std::string_view text) {
  std::u32string characters;
  for_each_character(text, [&](char32_t c) { unicode::decompose(c, characters); });
  unicode::sort_marks(characters);
  if (form == NormalForm::nfc) unicode::compose(characters);
  std::string out;
  for (const char32_t c : characters) append_utf8(out, c);
  return out;
}

}  // namespace streambp
