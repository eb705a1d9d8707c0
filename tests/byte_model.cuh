// Small model directories for tests of commands: random weights, and a tokenizer whose tokens are bytes.
#pragma once

#include "../data/checkpoint.cuh"

namespace streambp {

// The characters that stand for bytes in byte-level vocabularies: printable ones for themselves, others from U+0100 on.
inline std::string byte_character(int byte) {
  auto printable = [](int b) { return (33 <= b && b <= 126) || (161 <= b && b <= 172) || (174 <= b && b <= 255); };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += !printable(b);
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

// Bytes as tokens 0 .. 255, and special tokens after them.
inline Json byte_tokenizer(const std::vector<std::string>& special) {
  Json vocabulary = Json::object(), added = Json::array();
  for (int byte = 0; byte < 256; ++byte) vocabulary[byte_character(byte)] = byte;
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

// `change` may change the weights before they are written.
template <class F>
void save_random_model(const fs::path& dir, const Config& c, std::uint64_t seed, F&& change) {
  Cpu dev(std::size_t{1} << 24);
  Model<float> m{c, Tensors<float>(c)};
  allocate(dev, table(c, m.weights), Kind::weights);
  initialise(dev, m, seed, 0.3);
  change(m);
  fs::create_directories(dir);
  save_model(dev, dir, m);
}

}  // namespace streambp
