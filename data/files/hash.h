// Hashes that recognise texts and files, and keys for caches that identify files and models by their contents. They
// find accidents, not forgeries.
#pragma once

#include <sys/stat.h>
#include <xxhash.h>

#include <map>

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

// Identifies a file by its type and contents. Files are hashed once.
inline Json file_key(const fs::path& path) {
  regular_file_size(path);
  struct stat status {};
  const bool found = stat(path.c_str(), &status) == 0;
  require(found, path.string(), ": cannot read: ", std::strerror(errno));
  static std::map<std::string, std::string> known;  // hashes
  std::ostringstream file;
  file << status.st_dev << ' ' << status.st_ino << ' ' << status.st_size << ' ' << written_at(status).tv_sec << ' '
       << written_at(status).tv_nsec;
  std::string& hash = known[file.str()];
  if (hash.empty()) hash = file_hash(path);
  return {path.extension().string(), status.st_size, hash};
}

// The name of a cached file with this key, such as tokens-0123456789abcdef.safetensors.
inline std::string named_by_hash(const std::string& what, const std::string& key) {
  return what + "-" + hash_of(key) + ".safetensors";
}

// A key that identifies the weights of a model.
inline Json model_key(const fs::path& model) {
  if (fs::is_regular_file(model)) return Json::array({file_key(model)});  // a GGUF file
  std::vector<fs::path> parts;
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    const auto& path = entry.path();
    if (path.extension() == ".safetensors" || path.filename() == "config.json" ||
        path.filename() == "adapter_config.json")
      parts.push_back(path);
  }
  std::sort(parts.begin(), parts.end());
  Json key = Json::array();
  for (const auto& path : parts) key.push_back(file_key(path));
  return key;
}

// The same as a short name.
inline std::string contents_key(const fs::path& model) { return named_by_hash("model", model_key(model).dump()); }

}  // namespace streambp
