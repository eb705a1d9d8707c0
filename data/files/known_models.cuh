// Configurations of published models, by name.
#pragma once

#include <map>
#include <string>

#include "data/files/config.cuh"

namespace streambp {

inline const std::map<std::string, Config>& known_models() {
  static const std::map<std::string, Config> models = [] {
    std::map<std::string, Config> m;
    auto add = [&](const char* name, const char* family, const Sizes& sizes) -> Config& {
      return m[name] = make_config(family, sizes);
    };
    // clang-format off
    //                                vocab  hidden layers heads kv  dim    mlp  length   tied
    add("gpt2",            "gpt2",    { 50257,   768,    12,   12, 12,  64,  3072,   1024,  true});
    add("gpt2-medium",     "gpt2",    { 50257,  1024,    24,   16, 16,  64,  4096,   1024,  true});
    add("gpt2-large",      "gpt2",    { 50257,  1280,    36,   20, 20,  64,  5120,   1024,  true});
    add("gpt2-xl",         "gpt2",    { 50257,  1600,    48,   25, 25,  64,  6400,   1024,  true});
    add("smollm2-135m",    "llama",   { 49152,   576,    30,    9,  3,  64,  1536,   8192,  true}).rope_theta = 1e5;
    add("smollm2-360m",    "llama",   { 49152,   960,    32,   15,  5,  64,  2560,   8192,  true}).rope_theta = 1e5;
    add("smollm2-1.7b",    "llama",   { 49152,  2048,    24,   32, 32,  64,  8192,   8192,  true}).rope_theta = 1.3e5;
    add("tinyllama-1.1b",  "llama",   { 32000,  2048,    22,   32,  4,  64,  5632,   2048, false});
    add("llama-2-7b",      "llama",   { 32000,  4096,    32,   32, 32, 128, 11008,   4096, false});
    add("llama-3.1-8b",    "llama",   {128256,  4096,    32,   32,  8, 128, 14336, 131072, false});
    add("llama-3.2-1b",    "llama",   {128256,  2048,    16,   32,  8,  64,  8192, 131072,  true});
    add("llama-3.2-3b",    "llama",   {128256,  3072,    28,   24,  8, 128,  8192, 131072,  true});
    add("mistral-7b-v0.1", "mistral", { 32000,  4096,    32,   32,  8, 128, 14336,  32768, false}).window = 4096;
    add("qwen2.5-0.5b",    "qwen2",   {151936,   896,    24,   14,  2,  64,  4864,  32768,  true});
    add("qwen2.5-1.5b",    "qwen2",   {151936,  1536,    28,   12,  2, 128,  8960, 131072,  true});
    add("qwen2.5-3b",      "qwen2",   {151936,  2048,    36,   16,  2, 128, 11008,  32768,  true});
    add("qwen2.5-7b",      "qwen2",   {152064,  3584,    28,   28,  4, 128, 18944, 131072, false});
    add("qwen3-0.6b",      "qwen3",   {151936,  1024,    28,   16,  8, 128,  3072,  40960,  true});
    add("qwen3-1.7b",      "qwen3",   {151936,  2048,    28,   16,  8, 128,  6144,  40960,  true});
    add("qwen3-4b",        "qwen3",   {151936,  2560,    36,   32,  8, 128,  9728,  40960,  true});
    add("qwen3-8b",        "qwen3",   {151936,  4096,    36,   32,  8, 128, 12288,  40960, false});
    add("qwen3-14b",       "qwen3",   {151936,  5120,    40,   40,  8, 128, 17408,  40960, false});
    add("qwen3-32b",       "qwen3",   {151936,  5120,    64,   64,  8, 128, 25600,  40960, false});
    add("gemma-3-270m",    "gemma3",  {262144,   640,    18,    4,  1, 256,  2048,  32768,  true});
    add("gemma-3-1b",      "gemma3",  {262144,  1152,    26,    4,  1, 256,  6912,  32768,  true});
    // clang-format on
    for (const auto& [name, factor] : {std::pair{"llama-3.1-8b", 8}, {"llama-3.2-1b", 32}, {"llama-3.2-3b", 32}}) {
      m[name].rope_theta = 500000;
      m[name].rope_scaling = {RopeType::llama3, static_cast<double>(factor), 8192};
    }
    return m;
  }();
  return models;
}

}  // namespace streambp
