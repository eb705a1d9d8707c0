// The files of a tokenizer for byte-level models: no merges, one token per byte, with bytes written as visible
// characters as in GPT-2. Id 0 is the end-of-text token instead of byte 0.
#pragma once

#include <map>

#include "text/json.h"
#include "text/tokenizer/byte_characters.h"

namespace streambp {

inline std::string visible_byte(int byte) { return to_utf8(byte_characters()[byte]); }

inline std::map<std::string, std::string> byte_tokenizer_files() {
  using Json = OrderedJson;
  const char* end_of_text = "<|endoftext|>";
  Json vocabulary;
  for (int byte = 0; byte < 256; ++byte) vocabulary[byte == 0 ? end_of_text : visible_byte(byte)] = byte;
  Json tokenizer = parse_json<Json>(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
                      "normalized": false, "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
              "vocab": {}, "merges": []}})");
  tokenizer["model"]["vocab"] = vocabulary;
  const Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                       {"eos_token", end_of_text},
                       {"clean_up_tokenization_spaces", false}};
  const Json generation = {{"eos_token_id", 0}};
  return {{"tokenizer.json", tokenizer.dump(1) + "\n"},
          {"tokenizer_config.json", config.dump(2) + "\n"},
          {"generation_config.json", generation.dump(2) + "\n"}};
}

}  // namespace streambp
