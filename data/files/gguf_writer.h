// Writes GGUF files (data/files/gguf.h): adapters for llama.cpp, and a base with its adapters merged.
#pragma once

#include "data/files/gguf_model.h"

namespace streambp {

class GgufWriter {
 public:
  using Produce = std::function<void(std::ostream&)>;

  void add(const std::string& key, const std::string& value) { key_of(key, 8), text(keys_, value), ++count_; }
  void add(const std::string& key, float value) { key_of(key, 6), number(keys_, value), ++count_; }
  void add(const std::string& key, std::uint32_t value) { key_of(key, 4), number(keys_, value), ++count_; }
  // A key with its value, as it is in another file.
  void add(std::string_view key_and_value) { keys_ += key_and_value, ++count_; }
  // shape: rows first
  void add(const std::string& name, BlockType type, const std::vector<Index>& shape, Produce produce);
  void write(const fs::path& path) const;

 private:
  struct Part {
    std::string name;
    Index end;  // of the data so far
    Produce produce;
  };

  template <class V>
  static void number(std::string& to, V value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void text(std::string& to, std::string_view value) { number(to, std::uint64_t{value.size()}), to += value; }
  void key_of(const std::string& key, std::uint32_t type) { text(keys_, key), number(keys_, type); }

  std::string keys_, tensors_;
  std::uint64_t count_ = 0;
  std::vector<Part> parts_;
};

// Writes a row of numbers as blocks: in F32, F16, BF16, Q8_0 or Q4_0, with the bits of llama.cpp's own quantisation.
void write_row(std::ostream& out, BlockType type, const std::vector<float>& row);

// dir/adapter.gguf, beside PEFT's files there, for llama.cpp with --lora. Not if more than adapters was trained.
void write_gguf_adapter(const fs::path& dir, const Config& c, const fs::path& base);

// The numbers of Hugging Face's tensor with its adapter: of the part that is this tensor of the file, before llama.cpp's changes.
using MergedTensor = std::function<std::vector<float>(const std::string& name, const std::string& part)>;
// The base with these tensors in this type; all others as they are.
void write_merged_gguf(const fs::path& out, const fs::path& base, const Config& c, BlockType type,
                       const MergedTensor& merged);

}  // namespace streambp
