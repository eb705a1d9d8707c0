// A GGUF file as a model directory of Hugging Face: its configuration, its tensors by their names, and the texts of its small
// files. llama.cpp's converter renames tensors and changes some; here its changes are undone, where they are read:
//
//   RoPE       rows of q and k in Llama and its heirs: of each head the halves take turns
//   norms      of 1 + weight hold that sum (Gemma to 3, Qwen3.5)
//   delta      Qwen3.5's value heads: those of all key heads take turns; A_log is -exp(A_log)
//   factors    by which Llama 3's RoPE scaling divides frequencies are a tensor
#pragma once

#include "data/files/gguf.h"
#include "data/files/tensors.h"

namespace streambp {

// What an architecture of llama.cpp is here.
struct GgufFamily {
  const char *architecture, *family;
  bool permuted = false;                 // rows of q and k
  bool added_one = false;                // to weights of norms
  const char* second_norm = "ffn_norm";  // of post_attention_layernorm
};
std::span<const GgufFamily> gguf_families();
// Null: none.
const GgufFamily* gguf_family(const std::string& family);

// How a parameter's tensor is in the file.
struct GgufName {
  std::string name;
  SwappedAxes rows = {}, columns = {};
  ValueChange change = ValueChange::none;
};
GgufName gguf_name(const Config& c, const Parameter& p);

// The parameters by the names of their tensors in the file, where linear layers are (outputs x inputs), and gate and up of
// experts are two tensors.
template <class T>
Table<T> as_in_gguf(const Config& c, Table<T> table) {
  std::map<std::string, std::set<std::string>> names;
  const auto name_of = [&](const Entry<T>& e) { return gguf_name(c, e.parameter).name; };
  for (const Entry<T>& e : table) names[e.parameter.name].insert(name_of(e));
  for (Entry<T>& e : table) {
    const std::string name = name_of(e);
    e.parameter.transposed = false;
    if (names[e.parameter.name].size() > 1) e.parameter.turn = 0;
    e.parameter.name = name;
  }
  return table;
}

Config gguf_config(const GgufFile& file);

struct GgufModel {
  explicit GgufModel(const fs::path& path);

  GgufFile file;
  Config config;
  std::map<std::string, Tensor> tensors;     // by llama.cpp's names
  std::map<std::string, std::string> texts;  // config.json, tokenizer.json and so on
};

// Reads a file once.
const GgufModel& gguf_model(const fs::path& path);

// The texts of a tokenizer: tokenizer.json, tokenizer_config.json and generation_config.json.
std::map<std::string, std::string> gguf_tokenizer(const Json& metadata, const std::string& file);

// A model is a directory, or a GGUF file, which stands for one.
inline bool is_model(const fs::path& path) { return fs::is_directory(path) || is_gguf(path); }
// Small files of a model.
inline bool has_file(const fs::path& path) {
  if (!is_gguf(path.parent_path())) return fs::exists(path);
  return gguf_model(path.parent_path()).texts.contains(path.filename());
}
inline std::string read_small_file(const fs::path& path) {
  if (!is_gguf(path.parent_path())) return read_file(path);
  const auto& texts = gguf_model(path.parent_path()).texts;
  const auto found = texts.find(path.filename());
  require(found != texts.end(), path.parent_path().string(), ": has no ", path.filename().string(), " in its metadata");
  return found->second;
}

}  // namespace streambp
