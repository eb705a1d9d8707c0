// Reads and writes the config.json of a Hugging Face model directory.
//
// Unsupported values and unknown fields are errors, because they might change what the model computes.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "data/files/quantised.cuh"
#include "data/files/rope_fields.cuh"
#include "model/parameters.cuh"

namespace streambp {

// Fields that do not affect what the model computes: its origin, sampling, and training, including dropout, which
// streambp does not use.
inline bool is_harmless(const std::string& name) {
  static const std::set<std::string> harmless = {"cache_implementation",
                                                 "do_sample",
                                                 "dtype",
                                                 "gradient_checkpointing",
                                                 "id2label",
                                                 "initializer_factor",
                                                 "initializer_range",
                                                 "is_llama_config",
                                                 "keys_to_ignore_at_inference",
                                                 "label2id",
                                                 "max_length",
                                                 "max_window_layers",
                                                 "min_length",
                                                 "model_type",
                                                 "n_ctx",
                                                 "num_logits_to_keep",
                                                 "output_attentions",
                                                 "output_hidden_states",
                                                 "output_past",
                                                 "predict_special_tokens",
                                                 "pretraining_tp",
                                                 "repetition_penalty",
                                                 "return_dict",
                                                 "task_specific_params",
                                                 "temperature",
                                                 "tokenizer_class",
                                                 "top_k",
                                                 "top_p",
                                                 "torch_dtype",
                                                 "transformers.js_config",
                                                 "transformers_version",
                                                 "unsloth_fixed",
                                                 "unsloth_version",
                                                 "use_cache"};
  auto ends = [&](const char* end) { return name.ends_with(end); };
  return harmless.contains(name) || name.starts_with("_") || name.starts_with("summary_") || ends("_token_id") ||
         ends("_pdrop") || ends("_dropout");
}

// Which layers are local: given by "layer_types", or in older files by a rule of the family.
inline void read_windows(const Fields& f, Config& c) {
  const auto window = f.get<Index>("sliding_window", 0);
  const bool qwen = c.family == "qwen2" || c.family == "qwen3", gemma = c.family == "gemma3";
  if (c.family == "llama" || (qwen && !f.get<bool>("use_sliding_window", false))) {
    require(c.family != "llama" || window == 0, f.file, ": \"sliding_window\" is not supported for llama");
    f.has("layer_types");
    return;
  }
  c.window = window;
  if (c.family == "mistral" && !f.json.contains("sliding_window")) c.window = 4096;  // the default of transformers
  if (gemma) require(c.window > 0, f.file, ": \"sliding_window\" must be positive");
  const auto old_pattern = f.get<Index>("_sliding_window_pattern", 6);
  const auto pattern = f.get<Index>("sliding_window_pattern", old_pattern);
  const auto first_local = f.get<Index>("max_window_layers", 28);
  require(pattern > 0, f.file, ": \"sliding_window_pattern\" must be positive");
  if (f.has("layer_types")) {
    const Json& types = f.json.at("layer_types");
    require(types.is_array() && static_cast<Index>(types.size()) == c.layers, f.file,
            ": \"layer_types\" must name a type for each of the ", c.layers, " layers");
    for (const Json& type : types) {
      require(type == "full_attention" || type == "sliding_attention", f.file, ": \"layer_types\": ", shown(type),
              " is not supported; \"full_attention\" and \"sliding_attention\" are");
      c.local.push_back(type == "sliding_attention");
    }
  } else if (qwen || gemma) {
    require(c.layers <= kMostLayers, f.file, ": ", c.layers, " layers are more than are supported");
    for (Index l = 0; l < c.layers; ++l) c.local.push_back(gemma ? (l + 1) % pattern != 0 : l >= first_local);
  }
}

inline Config read_gpt2(const Fields& f) {
  Config c;
  c.family = "gpt2";
  c.vocab = f.get<Index>("vocab_size");
  c.hidden = f.get<Index>("n_embd");
  c.layers = f.get<Index>("n_layer");
  c.heads = c.kv_heads = f.get<Index>("n_head");
  c.max_length = f.get<Index>("n_positions", 1024);
  require(c.hidden > 0 && c.hidden <= 1 << 24, f.file, ": n_embd ", c.hidden, " is not supported");
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
  f.only("reorder_and_upcast_attn", false);
  f.only("add_cross_attention", false);
  return c;
}

inline void read_gemma(const Fields& f, Config& c) {
  const auto scalar = f.get<double>("query_pre_attn_scalar", 256);
  require(scalar > 0, f.file, ": \"query_pre_attn_scalar\" must be positive");
  c.score_scale = 1 / std::sqrt(scalar);
  c.embedding_scale = std::sqrt(static_cast<double>(c.hidden));
  c.norm_offset = 1;
  c.post_norms = true;
  c.mlp_kind = Mlp::geglu;
  f.only("use_bidirectional_attention", false);
}

inline Config read_llama_like(const Fields& f, const std::string& family) {
  Config c;
  c.family = family;
  const bool gemma = family == "gemma3";
  c.vocab = f.get<Index>("vocab_size");
  c.hidden = f.get<Index>("hidden_size");
  c.layers = f.get<Index>("num_hidden_layers");
  c.heads = f.get<Index>("num_attention_heads");
  c.kv_heads = f.get<Index>("num_key_value_heads", c.heads);
  c.mlp = f.get<Index>("intermediate_size");
  c.max_length = f.get<Index>("max_position_embeddings", 0);  // 0: unknown
  require(c.max_length >= 0, f.file, ": \"max_position_embeddings\" is ", c.max_length, ", but must not be negative");
  if (f.has("head_dim")) {
    c.head_dim = f.get<Index>("head_dim");
  } else {
    require(c.heads > 0 && c.hidden % c.heads == 0, f.file, ": hidden_size ", c.hidden,
            " is not divisible by num_attention_heads ", c.heads, ", and there is no head_dim");
    c.head_dim = family == "qwen3" ? 128 : gemma ? 256 : c.hidden / c.heads;
  }
  c.norm_eps = f.get<double>("rms_norm_eps", 1e-6);
  c.tied = f.get<bool>("tie_word_embeddings", gemma);
  c.qk_norm = family == "qwen3" || gemma;
  const bool bias = f.get<bool>("attention_bias", false);
  c.qkv_bias = family == "qwen2" || bias;
  c.output_bias = family != "qwen2" && bias;
  c.mlp_bias = f.get<bool>("mlp_bias", false);
  if (gemma) read_gemma(f, c);
  const std::string activation = gemma ? "gelu_pytorch_tanh" : "silu";
  for (const char* name : {"hidden_act", "hidden_activation"}) f.only(name, activation);
  f.only("partial_rotary_factor", 1.0);
  f.only("rope_interleaved", false);
  f.only("use_mrope", false);
  read_windows(f, c);
  read_rope(f, c);
  if (c.rope_scaling.type == RopeType::dynamic) {
    const double stretched = c.rope_scaling.factor * static_cast<double>(c.max_length);
    c.max_length = static_cast<Index>(std::min(stretched, 0x1p24));
  }
  return c;
}

// Each family's model_type and architecture.
inline const std::map<std::string, std::pair<const char*, const char*>>& family_names() {
  static const std::map<std::string, std::pair<const char*, const char*>> known = {
      {"gpt2", {"gpt2", "GPT2LMHeadModel"}},          {"llama", {"llama", "LlamaForCausalLM"}},
      {"mistral", {"mistral", "MistralForCausalLM"}}, {"qwen2", {"qwen2", "Qwen2ForCausalLM"}},
      {"qwen3", {"qwen3", "Qwen3ForCausalLM"}},       {"gemma3", {"gemma3_text", "Gemma3ForCausalLM"}}};
  return known;
}

inline Config config_from_json(const Json& json, const std::string& file) {
  const Fields f(json, file);
  const auto type = f.get<std::string>("model_type");
  const auto found = std::find_if(family_names().begin(), family_names().end(),
                                  [&](const auto& family) { return family.second.first == type; });
  require(found != family_names().end(), file, ": models of type ", quote(type),
          " are not supported; gpt2, llama, mistral, qwen2, qwen3 and gemma3_text are");
  const auto& [family, names] = *found;
  if (f.has("architectures")) {
    const Json& architectures = json.at("architectures");
    require(architectures.is_array() && architectures.size() == 1 && architectures[0] == names.second, file,
            ": the architecture ", shown(architectures), " is not supported; ", type, " models must have [\"",
            names.second, "\"]");
  }
  Config c = family == "gpt2" ? read_gpt2(f) : read_llama_like(f, family);
  c.base = read_base(f);
  f.refuse_others(is_harmless);
  try {
    validate(c);
  } catch (const Error& e) {
    fail(file, ": ", e.what());
  }
  return c;
}

// Reads a config.json, or the one in a directory.
inline Config read_config(std::filesystem::path path) {
  if (std::filesystem::is_directory(path)) path /= "config.json";
  return config_from_json(parse_json_file(path), path.string());
}

inline Json gpt2_to_json(const Config& c) {
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

inline Json config_to_json(const Config& c) {
  if (c.family == "gpt2") return gpt2_to_json(c);
  const bool gemma = c.family == "gemma3", qwen = c.family == "qwen2" || c.family == "qwen3";
  const auto& [type, architecture] = family_names().at(c.family);
  Json json = {
      {"model_type", type},
      {"architectures", Json::array({architecture})},
      {"vocab_size", c.vocab},
      {"hidden_size", c.hidden},
      {"num_hidden_layers", c.layers},
      {"num_attention_heads", c.heads},
      {"num_key_value_heads", c.kv_heads},
      {"head_dim", c.head_dim},
      {"intermediate_size", c.mlp},
      {"max_position_embeddings",
       c.rope_scaling.type == RopeType::dynamic ? static_cast<Index>(c.rope_scaling.original_length) : c.max_length},
      {"rms_norm_eps", c.norm_eps},
      {"rope_theta", c.rope_theta},
      {gemma ? "hidden_activation" : "hidden_act", gemma ? "gelu_pytorch_tanh" : "silu"},
      {"attention_bias", c.family == "qwen2" ? false : c.qkv_bias},
      {"tie_word_embeddings", c.tied}};
  if (c.mlp_bias) json["mlp_bias"] = true;
  if (c.family == "mistral" || c.window > 0) json["sliding_window"] = c.window > 0 ? Json(c.window) : Json(nullptr);
  if (qwen && c.window > 0) json["use_sliding_window"] = true;
  for (const bool local : c.local) json["layer_types"].push_back(local ? "sliding_attention" : "full_attention");
  if (gemma) {
    json["query_pre_attn_scalar"] = 1 / (c.score_scale * c.score_scale);
    json["rope_local_base_freq"] = c.local_rope_theta;
  }
  if (c.rope_scaling.type != RopeType::plain) json["rope_scaling"] = rope_scaling_to_json(c.rope_scaling);
  return json;
}

// What distinguishes the models of a family.
struct Sizes {
  Index vocab, hidden, layers, heads, kv_heads, head_dim, mlp, max_length;
  bool tied;
};

// A family's defaults around the given sizes.
inline Config make_config(const std::string& family, const Sizes& s) {
  Config c;
  c.family = family;
  c.vocab = s.vocab, c.hidden = s.hidden, c.layers = s.layers;
  c.heads = s.heads, c.kv_heads = s.kv_heads, c.head_dim = s.head_dim;
  c.mlp = s.mlp, c.max_length = s.max_length, c.tied = s.tied;
  if (family == "gpt2") {
    c.norm = Norm::layer, c.positions = Positions::learned, c.mlp_kind = Mlp::gelu;
    c.qkv_bias = c.output_bias = c.mlp_bias = true;
  }
  c.qkv_bias = c.qkv_bias || family == "qwen2";
  c.qk_norm = family == "qwen3";
  if (family == "qwen2" || family == "qwen3") c.norm_eps = 1e-6, c.rope_theta = 1e6;
  if (family == "gemma3") {
    c.norm_eps = 1e-6, c.norm_offset = 1, c.post_norms = c.qk_norm = true, c.mlp_kind = Mlp::geglu;
    c.embedding_scale = std::sqrt(static_cast<double>(s.hidden));
    c.score_scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    c.rope_theta = 1e6, c.local_rope_theta = 1e4, c.window = 512;
    for (Index l = 0; l < s.layers; ++l) c.local.push_back((l + 1) % 6 != 0);
  }
  return c;
}

}  // namespace streambp
