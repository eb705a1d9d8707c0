// JSON files.
#pragma once

#include "data/files/files.h"
#include "text/json.h"

namespace streambp {

inline Json parse_json_file(const fs::path& path) { return parse_json(read_file(path), path.string()); }

}  // namespace streambp
