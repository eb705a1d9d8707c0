// Model directories for tests of data: small tokenizers of three types, and conversations tokenised by transformers
// (scripts/make_chat_golden.py).
#pragma once

#include "tests/commands.h"
#include "tests/golden.h"

namespace streambp {

inline const Json& golden_chat_tokens() {
  static const Json json = Json::parse(read_file(golden_folder() / "chat_tokens.json"));
  return json;
}

inline std::string chat_template(const std::string& name) {
  return (golden_folder() / "chat_templates" / (name + ".jinja")).string();
}

// Creates a directory with the tokenizer "byte_level", "legacy" or "metaspace". All have <s> and </s>.
inline void make_tokenizer_directory(const fs::path& dir, const std::string& tokenizer) {
  fs::create_directories(dir);
  write_file_atomically(dir / "tokenizer.json", golden_chat_tokens().at(tokenizer).at("tokenizer").dump());
  write_file_atomically(dir / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>"})");
}

}  // namespace streambp
