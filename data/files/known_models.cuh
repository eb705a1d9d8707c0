// Configurations of published models, by name.
#pragma once

#include <map>
#include <string>

#include "data/files/config.cuh"

namespace streambp {

inline const std::map<std::string, Config>& known_models() {
  static const std::map<std::string, Config> models = [] {
    std::map<std::string, Config> m;
    auto llama3 = [](Config c, double factor) {
      c.rope_theta = 500000;
      c.rope_scaling = {factor, 1, 4, 8192};
      return c;
    };
    auto windowed = [](Config c, Index window) { return c.window = window, c; };
    auto theta = [](Config c, double theta) { return c.rope_theta = theta, c; };
    //                                       vocabulary hidden layers heads kv  dim  mlp   length  tied
    m["gpt2"] = make_config("gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024, true);
    m["gpt2-medium"] = make_config("gpt2", 50257, 1024, 24, 16, 16, 64, 4096, 1024, true);
    m["gpt2-large"] = make_config("gpt2", 50257, 1280, 36, 20, 20, 64, 5120, 1024, true);
    m["gpt2-xl"] = make_config("gpt2", 50257, 1600, 48, 25, 25, 64, 6400, 1024, true);
    m["smollm2-135m"] = theta(make_config("llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, true), 1e5);
    m["smollm2-360m"] = theta(make_config("llama", 49152, 960, 32, 15, 5, 64, 2560, 8192, true), 1e5);
    m["smollm2-1.7b"] = theta(make_config("llama", 49152, 2048, 24, 32, 32, 64, 8192, 8192, true), 1.3e5);
    m["tinyllama-1.1b"] = make_config("llama", 32000, 2048, 22, 32, 4, 64, 5632, 2048, false);
    m["llama-2-7b"] = make_config("llama", 32000, 4096, 32, 32, 32, 128, 11008, 4096, false);
    m["llama-3.1-8b"] = llama3(make_config("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072, false), 8);
    m["llama-3.2-1b"] = llama3(make_config("llama", 128256, 2048, 16, 32, 8, 64, 8192, 131072, true), 32);
    m["llama-3.2-3b"] = llama3(make_config("llama", 128256, 3072, 28, 24, 8, 128, 8192, 131072, true), 32);
    m["mistral-7b-v0.1"] = windowed(make_config("mistral", 32000, 4096, 32, 32, 8, 128, 14336, 32768, false), 4096);
    m["qwen2.5-0.5b"] = make_config("qwen2", 151936, 896, 24, 14, 2, 64, 4864, 32768, true);
    m["qwen2.5-1.5b"] = make_config("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 131072, true);
    m["qwen2.5-3b"] = make_config("qwen2", 151936, 2048, 36, 16, 2, 128, 11008, 32768, true);
    m["qwen2.5-7b"] = make_config("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, 131072, false);
    m["qwen3-0.6b"] = make_config("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 40960, true);
    m["qwen3-1.7b"] = make_config("qwen3", 151936, 2048, 28, 16, 8, 128, 6144, 40960, true);
    m["qwen3-4b"] = make_config("qwen3", 151936, 2560, 36, 32, 8, 128, 9728, 40960, true);
    m["qwen3-8b"] = make_config("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 40960, false);
    m["qwen3-14b"] = make_config("qwen3", 151936, 5120, 40, 40, 8, 128, 17408, 40960, false);
    m["qwen3-32b"] = make_config("qwen3", 151936, 5120, 64, 64, 8, 128, 25600, 40960, false);
    m["gemma-3-270m"] = make_config("gemma3", 262144, 640, 18, 4, 1, 256, 2048, 32768, true);
    m["gemma-3-1b"] = make_config("gemma3", 262144, 1152, 26, 4, 1, 256, 6912, 32768, true);
    return m;
  }();
  return models;
}

}  // namespace streambp
