// Fixtures for tests of data files.
#pragma once

#include "data/documents/sources.h"
#include "data/documents/token_writer.h"
#include "tests/support.cuh"

namespace streambp {

using Strings = std::vector<std::string>;

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
