// Byte-level tokenizers write every byte as a visible character: visible Latin-1 characters represent themselves, the
// other bytes for U+0100 and up, in order.
#pragma once

#include <array>
#include <optional>

#include "text/utf8.h"

namespace streambp {

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

// The bytes that such characters represent; empty if the text contains other characters.
inline std::optional<std::string> bytes_of(std::string_view text) {
  static const std::array<int, 0x144> byte_of = [] {
    std::array<int, 0x144> all;
    all.fill(-1);
    for (int b = 0; b < 256; ++b) all[byte_characters()[b]] = b;
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

}  // namespace streambp
