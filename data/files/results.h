// Files of results: JSON, tokens, gradients. They are marked, so that a typing error cannot replace another file.
#pragma once

#include "data/files/files.h"
#include "data/files/safetensors.h"

namespace streambp {

constexpr const char* kWrittenBy = "streambp";

inline void write_results(const fs::path& path, Json results, int indent = 2) {
  results["written_by"] = kWrittenBy;
  write_file_atomically(path, text_of(results, indent) + "\n");
}

// Refuses to replace a file that holds anything else than such results.
inline void require_replaceable(const fs::path& path) {
  require_writable(path);
  if (!fs::exists(path) || fs::file_size(path) == 0) return;
  bool is_ours = false;
  try {
    if (extension_of(path) == ".safetensors") {
      is_ours = SafetensorsFile(path).metadata("written_by") == kWrittenBy;
    } else {
      const Json json = parse_json_file(path);
      is_ours = json.is_object() && json.value("written_by", Json()) == kWrittenBy;
    }
  } catch (const Error&) {
  }
  require(is_ours, path.string(),
          ": exists and may be yours; results replace only earlier results of this program, so ",
          "name another file, or remove this one");
}

}  // namespace streambp
