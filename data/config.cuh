// A model's configuration: from and to the config.json of a Hugging Face model directory, and known models by name.
//
// A known field with a value that this program cannot follow is refused by name, never ignored.
#pragma once

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "../model.cuh"
#include "files.cuh"

namespace streambp {

using Json = nlohmann::json;

// Reads fields of a JSON object; every error names the file and the field.
class Fields {
 public:
  Fields(const Json& json, std::string file) : json(json), file(std::move(file)) {
    require(json.is_object(), this->file, ": expected a JSON object");
  }

  bool has(const char* name) const { return json.contains(name) && !json.at(name).is_null(); }

  template <class V>
  V get(const char* name) const {
    require(has(name), file, ": the field \"", name, "\" is missing");
    const Json& value = json.at(name);
    const bool fits =
        std::is_same_v<V, bool>          ? value.is_boolean()
        : std::is_same_v<V, std::string> ? value.is_string()
        : std::is_floating_point_v<V>
            ? value.is_number()
            : value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX);
    require(fits, file, ": the field \"", name, "\" has the value ", value.dump(), ", which is of the wrong type");
    return value.get<V>();
  }
  template <class V>
  V get(const char* name, V otherwise) const {
    return has(name) ? get<V>(name) : otherwise;
  }
  Fields object(const char* name) const {
    require(has(name), file, ": the field \"", name, "\" is missing");
    return {json.at(name), file + ", \"" + name + "\""};
  }

  // Refuses any value but this one.
  template <class V>
  void only(const char* name, V supported) const {
    if (!has(name)) return;
    require(get<V>(name) == supported, file, ": \"", name, "\": ", json.at(name).dump(), " is not supported; only ",
            Json(supported).dump(), " is");
  }

  // Refuses fields other than these: they may have an effect.
  void known(std::initializer_list<std::string_view> names) const {
    for (const auto& [name, value] : json.items()) {
      require(std::find(names.begin(), names.end(), name) != names.end(), file, ": the field \"", name,
              "\": ", value.dump(), " is not supported");
    }
  }

  const Json& json;
  const std::string file;
};

inline void read_rope(const Fields& f, Config& c) {
  // transformers 5 keeps theta and the scaling in one object, earlier versions in two fields
  const bool new_style = f.has("rope_parameters");
  const Fields theta = new_style ? f.object("rope_parameters") : f;
  c.rope_theta = theta.get<double>("rope_theta", 10000);
  const char* scaling_name = new_style ? "rope_parameters" : "rope_scaling";
  if (!f.has(scaling_name)) return;
  const Fields s = f.object(scaling_name);
  s.only("partial_rotary_factor", 1.0);
  const auto type = s.has("rope_type") ? s.get<std::string>("rope_type") : s.get<std::string>("type", "default");
  if (type == "default") return;
  require(type == "llama3", s.file, ": rotary scaling of type \"", type,
          "\" is not supported; \"llama3\" and \"default\" are");
  for (const char* positive : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    require(s.get<double>(positive) > 0, s.file, ": the field \"", positive, "\" must be positive");
  }
  c.rope_scaling = {s.get<double>("factor"), s.get<double>("low_freq_factor"), s.get<double>("high_freq_factor"),
                    s.get<double>("original_max_position_embeddings")};
}

inline Config read_gpt2(const Fields& f) {
  Config c;
  c.family = "gpt2";
  c.vocab = f.get<Index>("vocab_size");
  c.hidden = f.get<Index>("n_embd");
  c.layers = f.get<Index>("n_layer");
  c.heads = c.kv_heads = f.get<Index>("n_head");
  c.max_length = f.get<Index>("n_positions", 1024);
  require(c.hidden <= 1 << 24, f.file, ": n_embd ", c.hidden, " is more than is supported");
  c.mlp = f.get<Index>("n_inner", 4 * c.hidden);
  require(c.heads > 0 && c.hidden % c.heads == 0, f.file, ": n_embd ", c.hidden, " is not divisible by n_head ",
          c.heads);
  c.head_dim = c.hidden / c.heads;
  c.norm = Norm::layer;
  c.norm_eps = f.get<double>("layer_norm_epsilon", 1e-5);
  c.positions = Positions::learned;
  c.mlp_kind = Mlp::gelu;
  c.qkv_bias = c.output_bias = c.mlp_bias = true;
  c.tied = f.get<bool>("tie_word_embeddings", true);
  f.only<std::string>("activation_function", "gelu_new");
  f.only("scale_attn_weights", true);
  f.only("scale_attn_by_inverse_layer_idx", false);
  f.only("add_cross_attention", false);
  return c;
}

inline Config read_llama_like(const Fields& f, const std::string& family) {
  Config c;
  c.family = family;
  c.vocab = f.get<Index>("vocab_size");
  c.hidden = f.get<Index>("hidden_size");
  c.layers = f.get<Index>("num_hidden_layers");
  c.heads = f.get<Index>("num_attention_heads");
  c.kv_heads = f.get<Index>("num_key_value_heads", c.heads);
  c.mlp = f.get<Index>("intermediate_size");
  c.max_length = f.get<Index>("max_position_embeddings", 0);
  if (f.has("head_dim")) {
    c.head_dim = f.get<Index>("head_dim");
  } else {
    require(c.heads > 0 && c.hidden % c.heads == 0, f.file, ": hidden_size ", c.hidden,
            " is not divisible by num_attention_heads ", c.heads, ", and there is no head_dim");
    c.head_dim = family == "qwen3" ? 128 : c.hidden / c.heads;
  }
  c.norm_eps = f.get<double>("rms_norm_eps", 1e-6);
  c.tied = f.get<bool>("tie_word_embeddings", false);
  c.qk_norm = family == "qwen3";
  c.qkv_bias = family == "qwen2" || f.get<bool>("attention_bias", false);
  c.output_bias = family != "qwen2" && f.get<bool>("attention_bias", false);
  c.mlp_bias = f.get<bool>("mlp_bias", false);
  if (family == "mistral") c.window = f.json.contains("sliding_window") ? f.get<Index>("sliding_window", 0) : 4096;
  if (family == "qwen2" || family == "qwen3") f.only("use_sliding_window", false);
  f.only<std::string>("hidden_act", "silu");
  f.only("partial_rotary_factor", 1.0);
  read_rope(f, c);
  return c;
}

inline Config config_from_json(const Json& json, const std::string& file) {
  const Fields f(json, file);
  const auto family = f.get<std::string>("model_type");
  Config c;
  if (family == "gpt2") {
    c = read_gpt2(f);
  } else if (family == "llama" || family == "mistral" || family == "qwen2" || family == "qwen3") {
    c = read_llama_like(f, family);
  } else {
    fail(file, ": models of type \"", family, "\" are not supported; gpt2, llama, mistral, qwen2 and qwen3 are");
  }
  try {
    validate(c);
  } catch (const Error& e) {
    fail(file, ": ", e.what());
  }
  return c;
}

// From a config.json or the directory that holds it.
inline Config read_config(std::filesystem::path path) {
  if (std::filesystem::is_directory(path)) path /= "config.json";
  const std::string text = read_file(path);
  const Json json = Json::parse(text, nullptr, false);
  require(!json.is_discarded(), path.string(), ": not valid JSON; is the file complete?");
  return config_from_json(json, path.string());
}

inline Json config_to_json(const Config& c) {
  if (c.family == "gpt2") {
    return {{"model_type", "gpt2"},
            {"architectures", Json::array({"GPT2LMHeadModel"})},
            {"vocab_size", c.vocab},
            {"n_embd", c.hidden},
            {"n_layer", c.layers},
            {"n_head", c.heads},
            {"n_positions", c.max_length},
            {"n_inner", c.mlp},
            {"layer_norm_epsilon", c.norm_eps},
            {"activation_function", "gelu_new"},
            {"tie_word_embeddings", c.tied}};
  }
  const std::map<std::string, const char*> architectures = {{"llama", "LlamaForCausalLM"},
                                                            {"mistral", "MistralForCausalLM"},
                                                            {"qwen2", "Qwen2ForCausalLM"},
                                                            {"qwen3", "Qwen3ForCausalLM"}};
  Json json = {{"model_type", c.family},
               {"architectures", Json::array({architectures.at(c.family)})},
               {"vocab_size", c.vocab},
               {"hidden_size", c.hidden},
               {"num_hidden_layers", c.layers},
               {"num_attention_heads", c.heads},
               {"num_key_value_heads", c.kv_heads},
               {"head_dim", c.head_dim},
               {"intermediate_size", c.mlp},
               {"max_position_embeddings", c.max_length},
               {"rms_norm_eps", c.norm_eps},
               {"rope_theta", c.rope_theta},
               {"hidden_act", "silu"},
               {"attention_bias", c.family == "qwen2" ? false : c.qkv_bias},
               {"mlp_bias", c.mlp_bias},
               {"tie_word_embeddings", c.tied}};
  if (c.family == "mistral") json["sliding_window"] = c.window > 0 ? Json(c.window) : Json(nullptr);
  if (c.rope_scaling.factor != 1) {
    const RopeScaling& s = c.rope_scaling;
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", s.factor},
                            {"low_freq_factor", s.low_freq_factor},
                            {"high_freq_factor", s.high_freq_factor},
                            {"original_max_position_embeddings", s.original_length}};
  }
  return json;
}

// A family's defaults around the given sizes.
inline Config make_config(const std::string& family, Index vocab, Index hidden, Index layers, Index heads,
                          Index kv_heads, Index head_dim, Index mlp, Index max_length, bool tied) {
  Config c;
  c.family = family;
  c.vocab = vocab, c.hidden = hidden, c.layers = layers, c.heads = heads, c.kv_heads = kv_heads, c.head_dim = head_dim;
  c.mlp = mlp, c.max_length = max_length, c.tied = tied;
  if (family == "gpt2") {
    c.norm = Norm::layer, c.positions = Positions::learned, c.mlp_kind = Mlp::gelu;
    c.qkv_bias = c.output_bias = c.mlp_bias = true;
  }
  c.qkv_bias = c.qkv_bias || family == "qwen2";
  c.qk_norm = family == "qwen3";
  if (family == "qwen2" || family == "qwen3") c.norm_eps = 1e-6, c.rope_theta = 1e6;
  return c;
}

inline const std::map<std::string, Config>& known_models() {
  static const std::map<std::string, Config> models = [] {
    std::map<std::string, Config> m;
    auto llama3 = [](Config c, double factor) {
      c.rope_theta = 500000;
      c.rope_scaling = {factor, 1, 4, 8192};
      return c;
    };
    auto windowed = [](Config c, Index window) { return c.window = window, c; };
    //                                       vocabulary hidden layers heads kv  dim  mlp   length  tied
    m["gpt2"] = make_config("gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024, true);
    m["gpt2-medium"] = make_config("gpt2", 50257, 1024, 24, 16, 16, 64, 4096, 1024, true);
    m["gpt2-large"] = make_config("gpt2", 50257, 1280, 36, 20, 20, 64, 5120, 1024, true);
    m["gpt2-xl"] = make_config("gpt2", 50257, 1600, 48, 25, 25, 64, 6400, 1024, true);
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
    return m;
  }();
  return models;
}

}  // namespace streambp
