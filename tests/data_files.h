// Fixtures for tests of data files.
#pragma once

#include <cmath>

#include "data/documents/sources.h"
#include "data/documents/token_writer.h"
#include "tests/support.cuh"

namespace streambp {

using Strings = std::vector<std::string>;

// Realistic lengths: log-normal.
inline std::vector<Index> natural_lengths(std::size_t n) {
  std::vector<Index> lengths(n);
  for (std::size_t i = 0; i < n; ++i) {
    lengths[i] = 2 + static_cast<Index>(std::exp(5.5 + 1.1 * Random(8).normal(i)));
  }
  return lengths;
}

class DataFiles : public TemporaryDirectory {
 protected:
  TokenFile token_file(const std::vector<Document>& documents,
                       const std::map<std::string, std::string>& metadata = {}) {
    TokenWriter writer(dir / "t.safetensors");
    for (const Document& document : documents) writer.add(document);
    writer.finish(metadata);
    return TokenFile(dir / "t.safetensors");
  }
};

// Two completions with advantages and old log-probs.
class GroupFiles : public DataFiles {
 protected:
  TokenFile file(const std::vector<Document>& documents) { return token_file(documents, {{"kind", "groups"}}); }
  const Document a{{1, 2, 3}, {0, 1, 1}, Advantage{0.5, 2}, {-1, -2, 0}},
      b{{1, 4}, {0, 1}, Advantage{-0.5, -2}, {-3, 0}};
};

}  // namespace streambp
