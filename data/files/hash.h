// Hashes that recognise texts and files. They find accidents, not forgeries.
#pragma once

#include <xxhash.h>

#include "data/files/files.h"

namespace streambp {

// FNV-1a
inline std::uint64_t text_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

// 16 hexadecimal digits.
inline std::string hash_digits(std::uint64_t hash) {
  char digits[20];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

// XXH3, 64 bits, at the speed of memory.
inline std::string hash_of(std::string_view bytes) { return hash_digits(XXH3_64bits(bytes.data(), bytes.size())); }

inline std::string file_hash(const fs::path& path) {
  regular_file_size(path);
  const FilePointer file = open_to_read(path);
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::string block(std::size_t{1} << 18, '\0');
  while (const std::size_t n = read_block(file, block, path)) XXH3_64bits_update(state.get(), block.data(), n);
  return hash_digits(XXH3_64bits_digest(state.get()));
}

}  // namespace streambp
