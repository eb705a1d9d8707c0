// The golden tokenizers of scripts/make_tokenizer_golden.py.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "data/files/files.h"
#include "data/files/tokenizer_file.h"
#include "kernels/base/matrix.cuh"

namespace streambp {

inline std::filesystem::path golden_tokenizer(const std::string& file) {
  return std::filesystem::path(STREAMBP_SOURCE) / "tests/golden/tokenizers" / file;
}
// The tokenizer.json of a layout.
inline Json tokenizer_definition(const std::string& layout) {
  return parse_json_file(golden_tokenizer(layout + ".tokenizer.json"));
}

}  // namespace streambp
