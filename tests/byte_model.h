// Small model directories for tests of commands: random weights and a byte tokenizer.
#pragma once

#include <functional>

#include "data/files/checkpoint.h"
#include "text/tokenizer/byte_tokenizer.h"

namespace streambp {

// Tokens 0 .. 255 are bytes, followed by the special tokens.
inline Json byte_tokenizer(const std::vector<std::string>& special) {
  Json vocabulary = Json::object(), added = Json::array();
  for (int byte = 0; byte < 256; ++byte) vocabulary[visible_byte(byte)] = byte;
  for (const std::string& token : special) {
    added.push_back({{"id", 256 + added.size()},
                     {"content", token},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", Json::array()}}}};
}

// Changes the weights before they are saved.
using Change = std::function<void(Model<float>&)>;

inline void save_random_model(const fs::path& dir, const Config& c, const Change& change = {}) {
  Cpu dev(std::size_t{1} << 24);
  Model<float> m{c, Tensors<float>(c)};
  allocate(dev, table(c, m.weights), Kind::weights);
  initialise(dev, m, 1, 0.3);
  if (change) change(m);
  fs::create_directories(dir);
  save_model(dev, dir, m, ModelLayout(c));
}

// The same, with a tokenizer that has ChatML's tokens.
inline void save_chat_model(const fs::path& dir, const Config& c, const Change& change = {}) {
  save_random_model(dir, c, change);
  write_file_atomically(dir / "tokenizer.json", byte_tokenizer({"<|im_start|>", "<|im_end|>"}).dump());
  write_file_atomically(dir / "tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
}

}  // namespace streambp
