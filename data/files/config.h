// Reads and writes the config.json of a Hugging Face model directory.
//
// Unsupported values and unknown fields are errors, because they might change what the model computes.
#pragma once

#include <set>
#include <variant>

#include "data/files/quantised.h"
#include "data/files/rope_fields.h"
#include "data/files/towers.h"
#include "model/families.h"

namespace streambp {

// Fields that do not affect what the model computes: its origin, sampling, and training, including dropout, which
// streambp does not use.
inline bool is_harmless(const std::string& name) {
  // clang-format off
  static const std::set<std::string> harmless = {
      "auto_map", "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty", "do_sample",
      "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
      "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range", "is_decoder", "is_llama_config",
      "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_sequence_length", "max_window_layers", "min_length",
      "model_type", "n_ctx", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_logits_to_keep",
      "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores",
      "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
      "repetition_penalty", "return_dict", "return_dict_in_generate", "suppress_tokens", "task_specific_params",
      "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
      "transformers.js_config", "transformers_version", "typical_p", "use_bfloat16", "use_cache"};
  // clang-format on
  auto ends = [&](const char* end) { return name.ends_with(end); };
  return harmless.contains(name) || name.starts_with("_") || name.starts_with("summary_") ||
         name.starts_with("unsloth_") || ends("_token_id") || ends("_pdrop") || ends("_dropout");
}

// Of so many layers, one is global. Files may give a number or, in Exaone, a pattern such as LLLG.
inline Index read_window_pattern(const Fields& f, Index usual) {
  for (const char* name : {"sliding_window_pattern", "_sliding_window_pattern"}) {
    if (!f.has(name)) continue;
    const auto text = f.json.at(name).is_string() ? f.get<std::string>(name) : std::string();
    const Index pattern = text.empty() ? f.get<Index>(name) : static_cast<Index>(text.size());
    require(pattern > 0 && (text.empty() || text == std::string(text.size() - 1, 'L') + 'G'), f.file, ": ", quote(name),
            " must be positive, or a pattern such as LLLG");
    return pattern;
  }
  return usual;
}

// For each layer, whether "layer_types" says that it has this type.
inline std::vector<bool> layers_of_type(const Fields& f, const ModelFamily& family, const Config& c,
                                        const char* wanted) {
  std::vector<std::string> known = {"full_attention"};
  if (family.local != LocalLayers::none) known.push_back("sliding_attention");
  if (*family.other_type) known.push_back(family.other_type);
  const Json& types = f.at("layer_types");
  require(types.is_array() && std::ssize(types) == c.layers, f.file,
          ": \"layer_types\" must name a type for each of the ", c.layers, " layers");
  std::vector<bool> result;
  for (const Json& type : types) {
    const bool is_known = std::ranges::any_of(known, [&](const std::string& name) { return type == name; });
    require(is_known, f.file, ": \"layer_types\": ", shown(type), " is not supported; ", join(known), " are");
    result.push_back(type == wanted);
  }
  return result;
}

// Which layers are local: given by "layer_types", or in older files by the family's rule.
inline void read_windows(const Fields& f, const ModelFamily& family, Config& c) {
  const bool upper = family.local == LocalLayers::upper, most = family.local == LocalLayers::most;
  const bool all = family.local == LocalLayers::all || family.local == LocalLayers::all_or_listed;
  const Index usual = most || upper ? family.usual_window : all ? family.defaults.window : 0;  // of transformers
  const Index window = f.json.contains("sliding_window") ? f.get<Index>("sliding_window", 0) : usual;
  if (upper && !f.get<bool>("use_sliding_window", false)) return void(f.has("layer_types"));
  c.window = window;
  const Index pattern = most ? read_window_pattern(f, family.global_every) : 0;
  const auto first_local = f.get<Index>("max_window_layers", 28);
  if (f.has("layer_types")) {
    c.local = layers_of_type(f, family, c, "sliding_attention");
  } else if (most) {
    c.local = all_but_every_layer(pattern, c.layers, family.global_first);
  } else if (upper) {
    for (Index l = 0; l < c.layers; ++l) c.local.push_back(l >= first_local);
  }
  if (family.global_last && !c.local.empty()) c.local.back() = false;  // also if a file says otherwise
  const auto has = [&](bool local) { return std::ranges::find(c.local, local) != c.local.end(); };
  const bool some_local = has(true);
  const bool every = family.local == LocalLayers::all || family.local == LocalLayers::all_if_named;
  require(!every || window == 0 || !has(false), f.file, ": \"layer_types\": all layers of ", family.name,
          " models have the window");
  require(!most || window > 0 || !some_local, f.file, ": \"sliding_window\" must be positive");
  if (family.local_rope && (window > 0 || !family.rope_without_window)) c.without_rope = without(c.local);
}

// Which layers have no RoPE: those with a 0 in "no_rope_layers", or every n-th.
inline void read_layers_without_rope(const Fields& f, const ModelFamily& family, Config& c) {
  const auto interval = f.get<Index>("no_rope_layer_interval", family.without_rope_every);
  require(interval > 0, f.file, ": \"no_rope_layer_interval\" must be positive");
  c.without_rope = every_layer(interval, c.layers);
  if (!f.has("no_rope_layers")) return;
  const std::vector<double> with_rope = f.numbers("no_rope_layers");
  require(std::ssize(with_rope) >= c.layers, f.file, ": \"no_rope_layers\" must have a number for each of the ",
          c.layers, " layers");
  for (Index l = 0; l < c.layers; ++l) c.without_rope[l] = with_rope[l] == 0;
}

// RoPE's theta of each layer, or 0 for one without RoPE: one theta for global layers and one for local layers.
inline void read_thetas(const Fields& f, Config& c) {
  if (!f.has("layer_rope_theta")) return;
  const std::vector<double> thetas = f.numbers("layer_rope_theta");
  require(std::ssize(thetas) >= c.layers, f.file, ": \"layer_rope_theta\" must have a number for each of the ",
          c.layers, " layers");
  double of_kind[2] = {0, 0};  // global, local
  for (Index l = 0; l < c.layers; ++l) {
    const double theta = thetas[static_cast<std::size_t>(l)];
    double& usual = of_kind[c.is_local(l)];
    require(theta == 0 || theta >= 1, f.file, ": \"layer_rope_theta\": layer ", l, " has ", theta,
            "; it must be 1 or more, or 0 for a layer without RoPE");
    require(theta == 0 || usual == 0 || theta == usual, f.file, ": \"layer_rope_theta\": layer ", l, " has ", theta,
            " and an earlier one ", usual, "; global layers can have one theta, and layers with a window another one");
    if (theta != 0) usual = theta;
    c.without_rope.push_back(theta == 0);
  }
  if (std::ranges::find(c.without_rope, true) == c.without_rope.end()) c.without_rope.clear();
  if (of_kind[0] > 0 || of_kind[1] > 0) c.rope_theta = of_kind[0] > 0 ? of_kind[0] : of_kind[1];
  if (of_kind[1] > 0 && of_kind[1] != c.rope_theta) c.local_rope_theta = of_kind[1];
  require(c.local_rope_theta == 0 || c.rope_scaling == RopeScaling(), f.file,
          ": \"layer_rope_theta\": RoPE that is scaled is supported with one theta only");
}

inline void refuse_other_gemmas(const Fields& f) {
  require(f.get<Index>("hidden_size_per_layer_input", 256) == 0, f.file, ": models with per-layer embeddings, such as ",
          "Gemma 4 E2B and E4B, are not supported; Gemma 4 12B and 31B, and Gemma 3, are");
  require(
      f.get<Index>("num_kv_shared_layers", 0) == 0 && !f.get<bool>("use_double_wide_mlp", false), f.file,
      ": layers that share keys and values, and MLPs of double width, as in Gemma 4 E2B and E4B, are not supported; ",
      "Gemma 4 12B and 31B are");
  require(!f.get<bool>("enable_moe_block", false), f.file,
          ": models with experts beside a dense feed-forward, such as ",
          "Gemma 4 26B-A4B, are not supported; Gemma 4 12B and 31B are, and Qwen3-30B-A3B");
}

// The heads of global layers. transformers 5 lists what differs from local layers, by a layer's number, such as 05.
inline void read_global_heads(const Fields& f, Config& c) {
  c.wide = without(c.local);
  if (!c.keys_are_values) c.global_kv_heads = c.kv_heads;
  if (!f.has("per_layer_config")) return;
  const Fields layers = f.object("per_layer_config");
  std::map<std::size_t, std::pair<Index, Index>> listed;
  for (const auto& entry : layers.json.items()) {
    const std::string& number = entry.key();
    const auto layer = number.size() < 5 && number.find_first_not_of("0123456789") == number.npos
                           ? static_cast<std::size_t>(std::stoi("0" + number))
                           : c.wide.size();
    require(layer < c.wide.size() && c.wide[layer] && !listed.contains(layer), layers.file, ": ", quote(number),
            " is not the number of a global layer, or is there twice");
    const Fields own = layers.object(number.c_str());
    listed[layer] = {own.get<Index>("head_dim", c.head_dim), own.get<Index>("num_key_value_heads", c.kv_heads)};
    own.refuse_others([](const std::string&) { return false; });
  }
  std::set<std::pair<Index, Index>> heads;
  for (std::size_t l = 0; l < c.wide.size(); ++l)
    if (c.wide[l]) heads.insert(listed.contains(l) ? listed[l] : std::pair(c.head_dim, c.kv_heads));
  require(heads.size() <= 1, layers.file, ": global layers must have the same heads");
  if (!heads.empty()) std::tie(c.global_head_dim, c.global_kv_heads) = *heads.begin();
}

// Whether a file says, by a null, that no layer has RoPE.
inline bool says_no_theta(const Json& json) {
  const Json rope = json.value("rope_parameters", Json::object()), theta = json.value("rope_theta", Json(0));
  return (rope.is_object() ? rope.value("rope_theta", theta) : theta).is_null();
}

// Which layers have attention: given by "layer_types", by LFM2's "full_attn_idxs", which lists them, or every n-th.
inline void read_mixers(const Fields& f, const ModelFamily& family, Config& c) {
  const bool lfm2 = family.other_mixer == MixerKind::convolution, listed = lfm2 && f.has("full_attn_idxs");
  const Index every = lfm2 ? 1 : f.get<Index>("full_attention_interval", family.attention_every);
  require(every > 0, f.file, ": \"full_attention_interval\" must be positive");
  require(family.local == LocalLayers::none || f.has("layer_types"), f.file, ": the field \"layer_types\" is missing");
  std::vector<bool> others = all_but_every_layer(every, c.layers);
  if (f.has("layer_types")) {
    others = layers_of_type(f, family, c, family.other_type);
  } else if (listed) {
    others.assign(others.size(), true);
    for (const double l : f.numbers("full_attn_idxs")) {
      require(l >= 0 && l < static_cast<double>(c.layers) && l == std::floor(l), f.file,
              ": \"full_attn_idxs\": there is no layer ", l);
      others[static_cast<std::size_t>(l)] = false;
    }
  }
  c.mixers.clear();
  if (family.attention_last && !f.has("layer_types") && every > c.layers) others.back() = false;
  for (const bool other : others) c.mixers.push_back(other ? family.other_mixer : MixerKind::attention);
}

// In LFM2's files the width of the MLP is that of one without a gate. It becomes two thirds, rounded up.
inline void adjust_mlp(const Fields& f, Config& c) {
  c.mlp = f.get<Index>("block_ff_dim", c.mlp);
  const auto multiple = f.get<Index>("block_multiple_of", 256);
  const auto factor = f.get<double>("block_ffn_dim_multiplier", 1.0);
  if (!f.get<bool>("block_auto_adjust_ff_dim", true)) return;
  require(c.mlp <= kLargestSize && multiple > 0 && multiple <= kLargestSize && factor > 0 && factor < 1e3, f.file,
          ": \"block_multiple_of\" and \"block_ffn_dim_multiplier\" must be positive, and not huge");
  c.mlp = round_up(static_cast<Index>(factor * static_cast<double>(2 * c.mlp / 3)), multiple);
}

// The value of a field in the file, or else the one that the family gives it.
template <class V>
V read_value(const Fields& f, const Field& field, const Config& c) {
  V value;
  if (*field.name && f.has(field.name)) {
    value = f.get<V>(field.name);
  } else if (const auto* formula = std::get_if<Formula>(&field.value)) {
    const double result = formula->of(c);
    require(std::is_same_v<V, double> || (std::abs(result) < 1e9 && result == std::floor(result)), f.file, ": ",
            formula->text, " is ", result, ", not a whole number; is ", quote(field.name), " missing?");
    value = static_cast<V>(result);
  } else {
    const V* otherwise = std::get_if<V>(&field.value);
    value = otherwise ? *otherwise : f.get<V>(field.name);
  }
  if constexpr (std::is_same_v<V, Index>) {
    const auto* formula = std::get_if<Formula>(&field.value);
    const std::string name = *field.name || !formula ? field.name : formula->text;
    require(value >= 0, f.file, ": ", quote(name), " is ", value, ", but must not be negative");
    require(value <= kLargestSize, f.file, ": ", quote(name), " is ", value, ", more than the ", kLargestSize,
            " that are supported");
  }
  return value;
}

// The value that a file must have, or the usual one; null: neither.
inline Json value_of(const Field& field) {
  const auto json = []<class V>(const V& value) -> Json {
    if constexpr (std::is_constructible_v<Json, V>) return value;
    return {};
  };
  return std::visit(json, field.value);
}

inline void read_field(const Fields& f, const Field& field, Config& c) {
  const auto read = [&]<class Meaning>(Meaning meaning) {
    if constexpr (std::is_same_v<Meaning, InverseSquare> || std::is_same_v<Meaning, Inverse>) {
      const auto value = read_value<double>(f, field, c);
      require(value > 0, f.file, ": ", quote(field.name), " must be positive");
      c.*meaning.member = 1 / (std::is_same_v<Meaning, Inverse> ? value : std::sqrt(value));
    } else if constexpr (std::is_same_v<Meaning, OrNull>) {
      const bool has = f.has(field.name), null = f.json.contains(field.name) && !has;
      c.*meaning.member = null ? 0 : read_value<double>(f, field, c);
      require(!has || c.*meaning.member > 0, f.file, ": ", quote(field.name), " must be positive or null");
    } else if constexpr (std::is_same_v<Meaning, HasNorms>) {
      c.qk_norm = read_value<bool>(f, field, c) ? meaning.kind : QkNorm::none;
    } else if constexpr (std::is_same_v<Meaning, Either>) {
      if (!f.has(field.name) || f.json.at(field.name) == value_of(field)) return;
      const Json& value = f.json.at(field.name);
      require(value == meaning.other, f.file, ": ", quote(field.name), ": ", shown(value), " is not supported; ",
              value_of(field).dump(), " and ", quote(meaning.other), " are");
    } else if constexpr (std::is_same_v<Meaning, AllOf>) {
      for (const Json& value : f.list(field.name)) {
        if (value != meaning.other && value != value_of(field))
          fail(f.file, ": ", quote(field.name), ": ", shown(value), " is not supported; only ", value_of(field).dump(),
               " is");
      }
    } else if constexpr (std::is_same_v<Meaning, Empty>) {
      f.only(field.name, Json::array());
    } else if constexpr (std::is_same_v<Meaning, Fixed> || std::is_same_v<Meaning, Only> ||
                         std::is_same_v<Meaning, Needed>) {
      if (std::is_same_v<Meaning, Needed>) f.at(field.name);
      f.only(field.name, value_of(field));
    } else if constexpr (std::is_same_v<Meaning, Ignored>) {
      f.has(field.name);
    } else {
      c.*meaning = read_value<std::decay_t<decltype(c.*meaning)>>(f, field, c);
    }
  };
  std::visit(read, field.meaning);
}

// Null: none.
inline Json written_value(const Field& field, const Config& c) {
  const auto value = [&]<class Meaning>(Meaning meaning) -> Json {
    if constexpr (std::is_same_v<Meaning, Inverse>) return 1 / c.*meaning.member;
    if constexpr (std::is_same_v<Meaning, InverseSquare>) {  // transformers wants an integer
      const double value = 1 / (c.*meaning.member * c.*meaning.member), whole = std::round(value);
      return whole < 1e9 && std::abs(value - whole) < 1e-9 * whole ? Json(static_cast<Index>(whole)) : Json(value);
    }
    if constexpr (std::is_same_v<Meaning, OrNull>) return c.*meaning.member > 0 ? Json(c.*meaning.member) : Json();
    if constexpr (std::is_same_v<Meaning, HasNorms>) return c.qk_norm == meaning.kind;
    if constexpr (std::is_same_v<Meaning, AllOf>)
      return std::vector(static_cast<std::size_t>(c.layers), value_of(field));
    if constexpr (std::is_member_pointer_v<Meaning>) return c.*meaning;
    return std::is_same_v<Meaning, Only> || std::is_same_v<Meaning, Empty> ? Json() : value_of(field);
  };
  return std::visit(value, field.meaning);
}

// Why well-known models of other types are refused, and what is nearest.
inline std::string reason_against(const std::string& type) {
  static const struct {
    const char* reason;
    std::set<std::string> types;
  } all[] = {
      {"they have per-layer embeddings and shared keys and values; gemma3 and gemma4 are supported",
       {"gemma3n", "gemma3n_text"}},
      {"their attention reads latent vectors (MLA); qwen3_moe, gpt_oss and ministral3 are supported",
       {"deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe_lite", "kimi_k2", "mistral4"}},
      {"they are mixtures of experts of another kind; mixtral, qwen3_moe, olmoe and gpt_oss are supported",
       {"dbrx", "dots1", "glm4_moe", "jetmoe", "llama4", "llama4_text", "minimax", "minimax_m2"}},
      {"they have state spaces, or another kind of linear attention; qwen3_5, olmo_hybrid and lfm2 are supported",
       {"bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "nemotron_h",
        "recurrent_gemma", "rwkv", "zamba2"}},
      {"their activation, xIELU, has numbers that are trained; llama and qwen3 are supported", {"apertus"}},
      {"their adapters for images and speech are parts of the text model; phi3 is supported, which Phi-4-mini is",
       {"phi4_multimodal"}},
      {"their text model rotates queries and keys by three positions, in pairs; glm4 and qwen3_vl are supported",
       {"glm4v", "glm4v_text"}},
      {"their text model is gemma4_text's; write this as model_type, and Gemma4ForCausalLM in architectures",
       {"gemma4_unified_text"}},
      {"they draft tokens for another model; gemma4 and gemma4_unified are supported",
       {"gemma4_assistant", "gemma4_unified_assistant"}},
      {"the text model alone is supported; save it in transformers (model.language_model)",
       {"lfm2_vl", "lfm3_vl", "llava_next"}}};
  for (const auto& [reason, types] : all)
    if (types.contains(type)) return reason;
  return type.find("moe") != type.npos
             ? "they are mixtures of experts of another kind; qwen3_moe and gpt_oss are supported"
             : "";
}

inline void validate(const Config& c, const std::string& file) {
  try {
    validate(c);
  } catch (const Error& e) {
    fail(file, ": ", e.what());
  }
}

inline Config config_from_json(const Json& json, const std::string& file, const std::string& root = "") {
  const Fields f(json, file);
  const auto type = f.get<std::string>("model_type");
  if (const Tower* tower = tower_of(type)) {
    Config c = config_from_json(text_config(json, *tower, file), file, tower->root);
    c.root = tower->root;
    return c;
  }
  std::vector<std::string> types;
  for (const ModelFamily& family : model_families()) types.push_back(family.type);
  for (const Tower& tower : kTowers) types.push_back(tower.type);
  const auto found = std::ranges::find(model_families(), type, &ModelFamily::type);
  const bool known = found != model_families().end();
  const std::string reason = reason_against(type);
  require(known || reason.empty(), file, ": models of type ", quote(type), " are not supported: ", reason);
  std::ranges::sort(types);
  require(known, file, ": models of type ", quote(type), " are not supported; ", join(types), " are");
  const auto is = [&](const char* name) { return json.at("architectures") == Json::array({name}); };
  if (f.has("architectures") && !is(found->architecture) && !is(found->older_architecture)) {
    fail(file, ": the architecture ", shown(json.at("architectures")), " is not supported; ", type,
         " models must have [", quote(found->architecture), "]");
  }
  if (found->defaults.global_head_dim > 0) refuse_other_gemmas(f);
  Config c = found->defaults;
  c.family = found->name, c.window = 0;
  for (const Field& field : found->fields) read_field(f, field, c);
  require(c.score_scale > 0 || !varies(*found, "attention_multiplier"), file,
          ": \"attention_multiplier\" must be positive");
  require(found->defaults.experts == 0 || (c.experts > 0 && c.experts_per_token > 0 && c.expert_mlp > 0), file,
          ": the numbers of experts and of those of a token, and their width, must be positive");
  require(c.router_scale > 0 && c.router_scale <= 1000, file,
          ": \"routed_scaling_factor\" must be positive, and at most 1000");
  if (found->local != LocalLayers::none) read_windows(f, *found, c);
  if (found->attention_every > 0) read_mixers(f, *found, c);
  if (found->adjusts_mlp) adjust_mlp(f, c);
  if (found->without_rope_every > 0) read_layers_without_rope(f, *found, c);
  if (c.positions == Positions::rope) read_rope(f, *found, c);
  if (found->theta_by_layer) read_thetas(f, c);
  if (found->defaults.global_head_dim > 0) read_global_heads(f, c);
  if (found->rope_by_theta && says_no_theta(json)) c.without_rope.assign(static_cast<std::size_t>(c.layers), true);
  read_base(f, c, root);
  for (const char* name : {"is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"}) f.only(name, false);
  f.only("chunk_size_feed_forward", 0), f.only("pruned_heads", Json::object());
  f.refuse_others(is_harmless);
  validate(c, file);
  return c;
}

inline Json config_to_json(const Config& c) {
  const ModelFamily& family = family_of(c);
  Json json = {{"model_type", family.type}, {"architectures", Json::array({family.architecture})}};
  for (const Field& field : family.fields) {
    const Json value = written_value(field, c);
    const bool usual = field.written == Written::if_unusual && value == value_of(field);
    const bool null = std::holds_alternative<OrNull>(field.meaning);  // else it would be the usual value
    if (*field.name && !usual && (null || !value.is_null())) json[field.name] = value;
  }
  const bool all = family.local == LocalLayers::all || family.local == LocalLayers::all_or_listed;
  if (all || family.local == LocalLayers::most || c.window > 0)
    json["sliding_window"] = c.window > 0 ? Json(c.window) : Json();
  if (family.local == LocalLayers::upper && c.window > 0) json["use_sliding_window"] = true;
  if (family.adjusts_mlp) json["block_auto_adjust_ff_dim"] = false;
  for (Index l = 0; l < c.layers && !(c.mixers.empty() && c.local.empty()); ++l) {
    const bool local = !c.local.empty() && c.local[static_cast<std::size_t>(l)];
    json["layer_types"].push_back(c.mixer(l) != MixerKind::attention ? family.other_type
                                  : local                            ? "sliding_attention"
                                                                     : "full_attention");
  }
  if (family.rope_by_theta && !c.without_rope.empty()) json["rope_theta"] = json["rope_parameters"] = nullptr;
  for (Index l = 0; family.theta_by_layer && l < c.layers; ++l) {
    const double theta = c.is_local(l) && c.local_rope_theta > 0 ? c.local_rope_theta : c.rope_theta;
    json["layer_rope_theta"].push_back(c.has_rope(l) ? theta : 0);
  }
  for (const bool without :
       family.local_rope || family.rope_by_theta || family.theta_by_layer ? std::vector<bool>() : c.without_rope)
    json["no_rope_layers"].push_back(without ? 0 : 1);
  write_rope(json, c);
  return json;
}

}  // namespace streambp
