// Fixtures for tests of data: files in a temporary directory, and errors as text.
#pragma once

#include "data/documents/sources.cuh"
#include "data/documents/token_writer.cuh"
#include "tests/commands.cuh"

namespace streambp {

using Strings = std::vector<std::string>;

// The message of the Error that `action` throws.
template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}
#define EXPECT_ERROR(action, said) EXPECT_TRUE(contains(error_of([&] { action; }), said)) << error_of([&] { action; })

class DataFiles : public Commands {
 protected:
  fs::path write(const std::string& name, const std::string& text) {
    write_file_atomically(dir / name, text);
    return dir / name;
  }
};

// Two completions with advantages and old log-probs.
class GroupFiles : public DataFiles {
 protected:
  TokenFile file(const std::vector<Document>& documents) {
    TokenWriter writer(dir / "t.safetensors");
    for (const Document& document : documents) writer.add(document);
    writer.finish({{"kind", "groups"}});
    return TokenFile(dir / "t.safetensors");
  }
  const Document a{{1, 2, 3}, {0, 1, 1}, Advantage{0.5, 2}, {-1, -2, 0}},
      b{{1, 4}, {0, 1}, Advantage{-0.5, -2}, {-3, 0}};
};

}  // namespace streambp
