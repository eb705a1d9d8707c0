// Keys that identify files and models by their contents, for caches.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "data/files/hash.h"
#include "text/json.h"

namespace streambp {

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

// A key that identifies the weights of a model directory.
inline Json model_key(const fs::path& model) {
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
