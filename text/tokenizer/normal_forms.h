// Unicode normal forms (Standard Annex 15), lowercase and removal of accents, by utf8proc. For every character the
// results match the `tokenizers` library.
//
//   NFD        decompose each character, then sort each run of combining marks by class
//   NFC        NFD, then compose: a mark joins the last character of class 0 unless a mark between them blocks it
//   NFKD/NFKC  the same with compatibility decompositions, such as U+FB01 to "fi"
#pragma once

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "kernels/base/error.h"
#include "text/tokenizer/unicode_versions.h"
#include "text/utf8.h"

namespace streambp {

enum class NormalForm { nfc, nfd, nfkc, nfkd };

// The most bytes that one byte can become: U+0390 in NFD, U+FDFA in NFKD.
constexpr double longest_expansion(NormalForm form) {
  return form == NormalForm::nfkc || form == NormalForm::nfkd ? 11 : 3;
}

// Quick check. True only if the normal form does not change the text: all characters below U+0300 (NFC), U+00C0 (NFD)
// or U+0080 (NFKC, NFKD).
inline bool surely_normal(NormalForm form, std::string_view text) {
  const unsigned limit = form == NormalForm::nfc ? 0xCC : form == NormalForm::nfd ? 0xC3 : 0x80;  // first byte
  while (!text.empty()) {
    text.remove_prefix(bytes_below(text, 0x80));
    const std::size_t before = text.size();
    text.remove_prefix(bytes_below(text, limit));
    if (text.size() == before) break;
  }
  return text.empty();
}

namespace unicode {

using Codes = std::vector<utf8proc_int32_t>;

// True for characters newer than the library's normal forms, which do not change them.
inline bool is_unknown(char32_t c) {
  if (c < std::begin(kUnknown)->first) return false;
  const Range* range = std::upper_bound(std::begin(kUnknown), std::end(kUnknown), c,
                                        [](char32_t code, const Range& r) { return code < r.first; });
  return range != std::begin(kUnknown) && c <= (range - 1)->last;
}

inline int combining_class(utf8proc_int32_t c) {
  const int own = utf8proc_get_property(c)->combining_class;
  return own > 0 && is_unknown(static_cast<char32_t>(c)) ? 0 : own;
}

inline void decompose(char32_t c, int options, Codes& out) {
  constexpr utf8proc_ssize_t kLongest = 18;  // U+FDFA
  if (c < 0xA0 || is_unknown(c)) return out.push_back(static_cast<utf8proc_int32_t>(c));
  const std::size_t size = out.size();
  out.resize(size + kLongest);
  int unused = 0;
  const utf8proc_ssize_t count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), out.data() + size, kLongest,
                                                         static_cast<utf8proc_option_t>(options), &unused);
  require(count >= 0 && count <= kLongest, "utf8proc: ", utf8proc_errmsg(count));
  out.resize(size + static_cast<std::size_t>(count));
}

// Sorts each run of marks by class. (utf8proc's own sort takes quadratic time.)
inline void sort_marks(Codes& text) {
  for (auto begin = text.begin(); begin != text.end();) {
    auto end = begin;
    while (end != text.end() && combining_class(*end) > 0) ++end;
    if (end - begin > 1) {
      std::stable_sort(begin, end, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    }
    begin = end == text.end() ? end : end + 1;
  }
}

// utf8proc loses U+11A7 after a Korean syllable, and it knows newer characters than the library. Neither may compose
// with anything, so the text is split there and the parts are composed separately.
inline void compose(Codes& text) {
  const auto is_barrier = [](utf8proc_int32_t c) { return c == 0x11A7 || is_unknown(static_cast<char32_t>(c)); };
  auto out = text.begin();
  for (auto begin = text.begin(); begin != text.end();) {
    const auto end = std::find_if(begin, text.end(), is_barrier);
    const utf8proc_ssize_t count = utf8proc_normalize_utf32(
        std::to_address(begin), end - begin, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    require(count >= 0, "utf8proc: ", utf8proc_errmsg(count));
    out = std::copy(begin, begin + count, out);
    begin = end;
    if (begin != text.end()) *out++ = *begin++;
  }
  text.erase(out, text.end());
}

inline void append_lowercase(std::string& out, char32_t c) {
  if (c == 0x130) return void(out += "i\u0307");  // the only character with two lowercase characters
  for (const Lowercase& range : kLaterLowercase) {
    if (c >= range.first && c <= range.last) {
      return append_utf8(out, static_cast<char32_t>(static_cast<int>(c) + range.distance));
    }
  }
  append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
}

inline bool is_mark(char32_t c) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  const bool mark =
      category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC || category == UTF8PROC_CATEGORY_ME;
  return (mark && !is_unknown(c)) || c == 0x1CF2 || c == 0x1CF3;  // letters since Unicode 12
}

}  // namespace unicode

inline std::string normalized(NormalForm form, std::string_view text) {
  const bool compatible = form == NormalForm::nfkc || form == NormalForm::nfkd;
  const int options = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0);
  unicode::Codes codes;
  codes.reserve(text.size());
  for_each_character(text, [&](char32_t c) { unicode::decompose(c, options, codes); });
  unicode::sort_marks(codes);
  if (form == NormalForm::nfc || form == NormalForm::nfkc) unicode::compose(codes);
  std::string out;
  out.reserve(text.size());
  for (const utf8proc_int32_t c : codes) append_utf8(out, static_cast<char32_t>(c));
  return out;
}

inline std::string lowercase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for_each_character(text, [&](char32_t c) {
    if (c < 0x80) {
      out += static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    } else {
      unicode::append_lowercase(out, c);
    }
  });
  return out;
}

// Removes combining marks. Precomposed accented letters keep theirs unless the text is decomposed first.
inline std::string without_marks(std::string_view text) {
  std::string out;
  for_each_character(text, [&](char32_t c) {
    if (c < 0x300 || !unicode::is_mark(c)) append_utf8(out, c);
  });
  return out;
}

}  // namespace streambp
