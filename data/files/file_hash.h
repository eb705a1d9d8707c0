// Hashes of whole files (XXH3, 64 bits), at the speed of memory. They find accidents, not forgeries.
#pragma once

#include <xxhash.h>

#include <memory>
#include <string>
#include <string_view>

#include "data/files/files.h"

namespace streambp {

// 16 hexadecimal digits.
inline std::string hash_digits(std::uint64_t hash) {
  char digits[20];
  std::snprintf(digits, sizeof digits, "%016lx", static_cast<unsigned long>(hash));
  return digits;
}

inline std::string hash_of(std::string_view bytes) { return hash_digits(XXH3_64bits(bytes.data(), bytes.size())); }

inline std::string file_hash(const fs::path& path) {
  regular_file_size(path);
  Descriptor file;
  file.file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  require(file.file >= 0, path.string(), ": cannot read: ", std::strerror(errno), "; check its permissions");
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(state.get());
  std::string block(std::size_t{1} << 18, '\0');
  for (ssize_t n; (n = ::read(file.file, block.data(), block.size())) != 0;) {
    require(n > 0 || errno == EINTR, path.string(), ": cannot read: ", std::strerror(errno));
    if (n > 0) XXH3_64bits_update(state.get(), block.data(), static_cast<std::size_t>(n));
  }
  return hash_digits(XXH3_64bits_digest(state.get()));
}

}  // namespace streambp
