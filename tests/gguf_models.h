// A small model in a GGUF file, with random blocks.
#pragma once

#include "data/files/adapters.h"
#include "data/files/gguf_writer.h"
#include "text/tokenizer/byte_tokenizer.h"

namespace streambp {

// Blocks of a type with small scales, of numbers around zero.
inline std::vector<std::uint8_t> random_blocks(BlockType type, Index rows, Index cols, std::uint64_t seed) {
  const BlockSize size = size_of_block(type);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(rows * bytes_of_row(type, cols)));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(Random(seed).bits(i));
  for (std::size_t begin = 0; begin < bytes.size(); begin += static_cast<std::size_t>(size.bytes)) {
    const auto set = [&](std::size_t at, double value) {
      const auto half = std::bit_cast<std::array<std::uint8_t, 2>>(Float16(static_cast<float>(value)));
      std::ranges::copy(half, bytes.begin() + static_cast<std::ptrdiff_t>(begin + at));
    };
    const double scale = 1e-4 * (1 + Random(seed).uniform(begin));
    if (type != BlockType::mxfp4) set(type == BlockType::q6_k ? 208 : 0, scale);
    if (type == BlockType::mxfp4) bytes[begin] = 115;
    if (type == BlockType::q4_k || type == BlockType::q4_1) set(2, (type == BlockType::q4_k ? 7.5 : -7.5) * scale);
    if (type == BlockType::q5_k || type == BlockType::q5_1) set(2, (type == BlockType::q5_k ? 15.5 : -15.5) * scale);
  }
  return bytes;
}

// A key with a list of texts.
inline std::string text_list(const std::string& key, const std::vector<std::string>& texts) {
  const auto number = [](auto x) { return std::string(reinterpret_cast<const char*>(&x), sizeof x); };
  const auto text = [&](const std::string& x) { return number(std::uint64_t{x.size()}) + x; };
  std::string bytes =
      text(key) + number(std::uint32_t{9}) + number(std::uint32_t{8}) + number(std::uint64_t{texts.size()});
  for (const std::string& x : texts) bytes += text(x);
  return bytes;
}

// Its head has two tiles of rows, and rows of q and k are in llama.cpp's order.
inline void write_gguf_model(const fs::path& path, BlockType type, const std::string& architecture = "llama",
                             const std::function<void(GgufWriter&)>& add_keys = {}) {
  GgufWriter writer;
  if (add_keys) add_keys(writer);
  const auto add = [&](const char* name, auto x) { writer.add(architecture + "." + name, x); };
  writer.add("general.architecture", architecture);
  for (const auto& [name, n] :
       std::map<const char*, std::uint32_t>{{"context_length", 600},
                                            {"embedding_length", 256},
                                            {"block_count", 2},
                                            {"feed_forward_length", 512},
                                            {"attention.head_count", 4},
                                            {"attention.head_count_kv", architecture == "gpt2" ? 4 : 2}})
    add(name, n);
  const bool biased = architecture == "gpt-oss", experts = architecture == "qwen3moe" || biased;
  for (const auto& [name, n] : std::map<const char*, std::uint32_t>{
           {"expert_count", 4}, {"expert_used_count", 2}, {"expert_feed_forward_length", 256}})
    if (experts) add(name, n);
  if (biased) add("attention.sliding_window", std::uint32_t{128});
  const bool gpt2 = architecture == "gpt2";
  add(gpt2 ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", 1e-5f);
  writer.add("tokenizer.ggml.model", std::string("gpt2")), writer.add("tokenizer.ggml.pre", std::string("gpt-2"));
  writer.add("tokenizer.ggml.eos_token_id", std::uint32_t{4999});
  writer.add("tokenizer.chat_template", std::string("{% for m in messages %}{{ m.content }}{% endfor %}"));
  std::vector<std::string> tokens;
  for (int i = 0; i < 5000; ++i) tokens.push_back(i < 256 ? visible_byte(i) : "<token " + std::to_string(i) + ">");
  writer.add(text_list("tokenizer.ggml.tokens", tokens)), writer.add(text_list("tokenizer.ggml.merges", {}));
  std::uint64_t seed = 1;
  const auto tensor = [&](const std::string& name, std::vector<Index> shape, std::optional<BlockType> other = {}) {
    const BlockType stored = shape.size() == 1 ? BlockType::f32 : other.value_or(type);
    const Index count = element_count(name, shape), rows = count / shape.back();
    auto bytes = random_blocks(stored, rows, shape.back(), ++seed);
    if (stored == BlockType::f32) {  // all the same
      const std::vector<float> ones(static_cast<std::size_t>(count), 1 + 0.01f * static_cast<float>(seed));
      bytes.resize(4 * ones.size());
      std::memcpy(bytes.data(), ones.data(), bytes.size());
    }
    writer.add(name, stored, shape, [bytes](std::ostream& out) {
      out.write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    });
  };
  tensor("token_embd.weight", {5000, 256}), tensor("output.weight", {5000, 256}), tensor("output_norm.weight", {256});
  if (gpt2) tensor("output_norm.bias", {256}), tensor("position_embd.weight", {600, 256}, BlockType::q8_0);
  for (const std::string layer : {"blk.0.", "blk.1."}) {
    if (gpt2) {
      for (const auto& [name, rows] : std::map<const char*, Index>{{"attn_qkv", 768},
                                                                   {"attn_output", 256},
                                                                   {"ffn_up", 512},
                                                                   {"ffn_down", 256},
                                                                   {"attn_norm", 0},
                                                                   {"ffn_norm", 0}}) {
        if (rows > 0)
          tensor(layer + name + ".weight", {rows, name == std::string("ffn_down") ? 512 : 256});
        else
          tensor(layer + name + ".weight", {256});
        tensor(layer + name + ".bias", {rows > 0 ? rows : 256});
      }
      continue;
    }
    tensor(layer + "attn_norm.weight", {256});
    tensor(layer + (biased ? "post_attention_norm.weight" : "ffn_norm.weight"), {256});
    tensor(layer + "attn_q.weight", {256, 256}), tensor(layer + "attn_k.weight", {128, 256});
    tensor(layer + "attn_v.weight", {128, 256}), tensor(layer + "attn_output.weight", {256, 256});
    if (experts) {
      for (const char* norm : {"attn_q_norm.weight", "attn_k_norm.weight"})
        if (!biased) tensor(layer + norm, {64});
      for (const auto& [name, n] : std::map<const char*, Index>{{"attn_q.bias", 256},
                                                                {"attn_k.bias", 128},
                                                                {"attn_v.bias", 128},
                                                                {"attn_output.bias", 256},
                                                                {"attn_sinks.weight", 4},
                                                                {"ffn_gate_inp.bias", 4}})
        if (biased) tensor(layer + name, {n});
      for (const char* name : {"ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"})
        if (biased) tensor(layer + name, {4, 256}, BlockType::f32);
      tensor(layer + "ffn_gate_inp.weight", {4, 256}, BlockType::q8_0);
      tensor(layer + "ffn_gate_exps.weight", {4, 256, 256}), tensor(layer + "ffn_down_exps.weight", {4, 256, 256});
      tensor(layer + "ffn_up_exps.weight", {4, 256, 256}, BlockType::q5_0);
      continue;
    }
    tensor(layer + "ffn_gate.weight", {512, 256}), tensor(layer + "ffn_up.weight", {512, 256});
    tensor(layer + "ffn_down.weight", {256, 512});
  }
  writer.write(path);
}

// The same with adapters of all linear layers.
inline Config with_small_adapters(Config c) {
  const std::vector<std::string> experts = {"all", "experts"}, dense = {"all"};
  c.trained.emplace(), c.adapters = new_adapters(c, {4, 8, false, c.experts > 0 ? experts : dense});
  return c;
}

}  // namespace streambp
