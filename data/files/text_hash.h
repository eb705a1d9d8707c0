// The FNV-1a hash, used to recognise texts and files.
#pragma once

#include <cstdint>
#include <string_view>

namespace streambp {

inline std::uint64_t text_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

}  // namespace streambp
