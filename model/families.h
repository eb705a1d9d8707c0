// All model families, and what follows from their descriptions (family.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "model/families/experts.h"
#include "model/families/olmo_hybrid.h"

namespace streambp {

// All families. A program may add its own.
inline std::deque<ModelFamily>& model_families() {
  static std::deque<ModelFamily> all = {
      gpt2(),       llama(),    cwm(),         mistral(),        ministral(),   ministral3(), qwen2(),      qwen3(),
      gemma(),      gemma2(),   gemma3(),      gemma4(),         nanochat(),    phi3(),       olmo2(),      olmo3(),
      smollm3(),    granite(),  granite_swa(), granite_hybrid(), exaone4(),     cohere(),     cohere2(),    glm(),
      glm4(),       hunyuan(),  ernie4_5(),    helium(),         arcee(),       seed_oss(),   starcoder2(), lfm2(),
      lfm3(),       qwen3_5(),  olmo_hybrid(), qwen3_moe(),      qwen3_5_moe(), qwen3_next(), mixtral(),    olmoe(),
      granitemoe(), lfm2_moe(), gpt_oss()};
  return all;
}
inline const ModelFamily& family_named(const std::string& name) {
  const auto found = std::ranges::find(model_families(), name, &ModelFamily::name);
  require(found != model_families().end(), "unknown model family ", quote(name));
  return *found;
}
inline const ModelFamily& family_of(const Config& c) { return family_named(c.family); }

// The name of a module, as transformers and PEFT have it.
inline std::string module_name(const Config& c, std::string_view name) {
  constexpr std::string_view usual = "model.";
  if (c.root.empty() || !name.starts_with(usual)) return std::string(name);
  return c.root + std::string(name.substr(usual.size()));
}

// Whether models of a family differ in a field of config.json that stands for a number.
inline bool varies(const ModelFamily& family, std::string_view name) {
  return std::ranges::any_of(family.fields, [&](const Field& field) {
    return field.name == name && std::holds_alternative<Member<double>>(field.meaning);
  });
}

// Every n-th layer, beginning with the n-th one or with the first.
inline std::vector<bool> every_layer(Index n, Index layers, bool first = false) {
  std::vector<bool> result;
  for (Index l = 0; l < layers; ++l) result.push_back((first ? l : l + 1) % n == 0);
  return result;
}

inline std::vector<bool> without(std::vector<bool> layers) {
  layers.flip();
  return layers;
}
inline std::vector<bool> all_but_every_layer(Index n, Index layers, bool first = false) {
  return without(every_layer(n, layers, first));
}

// A new model of a family.
inline Config make_config(const std::string& family, const Sizes& s) {
  const ModelFamily& f = family_named(family);
  Config c = f.defaults;
  c.family = family;
  c.vocab = s.vocab, c.hidden = s.hidden, c.layers = s.layers;
  c.heads = s.heads, c.kv_heads = s.kv_heads, c.head_dim = s.head_dim;
  c.mlp = s.mlp, c.max_length = s.max_length, c.tied = s.tied;
  for (const Field& field : f.fields) {
    const auto* number = std::get_if<Member<double>>(&field.meaning);
    if (number && !*field.name) c.*(*number) = std::get<Formula>(field.value).of(c);
    const auto* scale = std::get_if<InverseSquare>(&field.meaning);
    if (scale) c.*scale->member = 1 / std::sqrt(static_cast<double>(s.head_dim));
  }
  for (Index l = 1; f.attention_every > 0 && l <= s.layers; ++l)
    c.mixers.push_back(l % f.attention_every == 0 ? MixerKind::attention : f.other_mixer);
  if (f.attention_last && f.attention_every > s.layers) c.mixers.back() = MixerKind::attention;
  if (c.has_delta_rule()) {  // the same heads as attention's, where the family does not say otherwise
    c.delta_key_heads = s.kv_heads, c.delta_value_heads = s.heads;
    c.delta_key_dim = c.delta_value_dim = s.head_dim;
    for (const Field& field : f.fields)
      if (const auto* formula = std::get_if<Formula>(&field.value); formula && formula->of_delta_rule)
        c.*std::get<Member<Index>>(field.meaning) = static_cast<Index>(formula->of(c));
  }
  if (c.experts > 0) {  // those of a token are as wide as a dense layer
    if (s.experts > 0) c.experts = s.experts;
    c.experts_per_token = s.experts_per_token > 0 ? s.experts_per_token : least(c.experts_per_token, c.experts);
    c.dense_layers = least(c.dense_layers, s.layers - 1);
    c.expert_mlp = most(s.mlp / (c.experts_per_token + (c.shared_mlp > 0 ? 1 : 0)), 1);
    if (c.shared_mlp > 0) c.shared_mlp = c.expert_mlp;
    if (c.dense_layers == 0) c.mlp = c.experts_per_token * c.expert_mlp;
  }
  if (f.local == LocalLayers::most) c.local = all_but_every_layer(f.global_every, s.layers, f.global_first);
  if (f.global_last && s.layers > 0) c.local.back() = false;
  if (c.global_head_dim > 0)
    c.global_head_dim = 2 * s.head_dim, c.global_kv_heads = most(s.kv_heads / 2, 1), c.wide = without(c.local);
  if (f.without_rope_every > 0) c.without_rope = every_layer(f.without_rope_every, s.layers);
  if (f.local_rope) c.without_rope = without(c.local);
  if (f.rope_by_theta) c.without_rope.assign(static_cast<std::size_t>(s.layers), true);
  return c;
}

// Published models, by name.
inline std::map<std::string, Config> known_models() {
  std::map<std::string, Config> models;
  for (const ModelFamily& family : model_families()) {
    for (const auto& [name, sizes, theta, scaling, also] : family.published) {
      require(!models.contains(name), "the published model ", quote(name), " is there twice");
      Config& c = models[name] = make_config(family.name, sizes);
      if (theta > 0) c.rope_theta = theta;
      c.rope_scaling = scaling;
      if (also) also(c);
    }
  }
  return models;
}

}  // namespace streambp
