// The files of a tokenizer for byte-level models: no merges, one token per byte, with bytes written as visible
// characters as in GPT-2. Id 0 is the end-of-text token instead of byte 0.
#pragma once

#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "data/tokenizer/byte_characters.h"

namespace streambp {

inline std::string visible_byte(int byte) { return to_utf8(byte_characters()[static_cast<std::size_t>(byte)]); }

inline std::map<std::string, std::string> byte_tokenizer_files() {
  using Json = nlohmann::ordered_json;
  const char* end_of_text = "<|endoftext|>";
  Json vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary[byte == 0 ? end_of_text : visible_byte(byte)] = byte;
  const Json end = {{"id", 0},         {"content", end_of_text}, {"single_word", false}, {"lstrip", false},
                    {"rstrip", false}, {"normalized", false},    {"special", true}};
  const Json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const Json tokenizer = {{"version", "1.0"},
                          {"truncation", nullptr},
                          {"padding", nullptr},
                          {"added_tokens", Json::array({end})},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", bytes},
                          {"post_processor", nullptr},
                          {"decoder", bytes},
                          {"model",
                           {{"type", "BPE"},
                            {"dropout", nullptr},
                            {"unk_token", nullptr},
                            {"continuing_subword_prefix", nullptr},
                            {"end_of_word_suffix", nullptr},
                            {"fuse_unk", false},
                            {"byte_fallback", false},
                            {"ignore_merges", false},
                            {"vocab", vocabulary},
                            {"merges", Json::array()}}}};
  const Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                       {"eos_token", end_of_text},
                       {"clean_up_tokenization_spaces", false}};
  const Json generation = {{"eos_token_id", 0}};
  return {{"tokenizer.json", tokenizer.dump(1) + "\n"},
          {"tokenizer_config.json", config.dump(2) + "\n"},
          {"generation_config.json", generation.dump(2) + "\n"}};
}

}  // namespace streambp
