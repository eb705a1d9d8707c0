// The tokenizer of a model directory.
#pragma once

#include "data/files/gguf_model.h"
#include "text/tokenizer/tokenizer.h"

namespace streambp {

// Reads a tokenizer.json, or the one in a directory.
inline Tokenizer read_tokenizer(const fs::path& path) {
  const fs::path file = is_model(path) ? path / "tokenizer.json" : path;
  return Tokenizer(read_small_file(file), file.string());
}

}  // namespace streambp
