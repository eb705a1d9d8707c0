// RoPE's fields in a config.json, in the old and the new spelling.
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "data/files/fields.cuh"
#include "model/config.cuh"

namespace streambp {

inline const std::vector<std::pair<std::string, RopeType>>& rope_types() {
  static const std::vector<std::pair<std::string, RopeType>> names = {
      {"default", RopeType::plain}, {"linear", RopeType::linear}, {"dynamic", RopeType::dynamic},
      {"llama3", RopeType::llama3}, {"yarn", RopeType::yarn},     {"longrope", RopeType::longrope}};
  return names;
}

// The factor by which YaRN multiplies cosines and sines, from its fields or as its authors suggest.
inline double yarn_attention_factor(const Fields& s, double factor) {
  const auto suggested = [&](double scale) { return factor > 1 ? 0.1 * scale * std::log(factor) + 1 : 1; };
  const auto numerator = s.get<double>("mscale", 0), denominator = s.get<double>("mscale_all_dim", 0);
  const bool both = numerator != 0 && denominator != 0;
  return s.get<double>("attention_factor", both ? suggested(numerator) / suggested(denominator) : suggested(1));
}

// Phi-3's form has the context length of pretraining beside the object `s`, in the configuration `f`, and not the factor.
inline void read_longrope(const Fields& s, const Fields& f, const Config& c, RopeScaling& scaling) {
  const auto inside = s.get<double>("original_max_position_embeddings", static_cast<double>(c.max_length));
  scaling.original_length = f.get<double>("original_max_position_embeddings", inside);
  require(scaling.original_length > 1, s.file, ": original_max_position_embeddings is missing or too short");
  require(c.max_length > 0 || s.has("factor"), f.file, ": longrope needs max_position_embeddings, or a factor");
  scaling.factor = s.get<double>("factor", static_cast<double>(c.max_length) / scaling.original_length);
  require(scaling.factor > 0, s.file, ": the field \"factor\" must be positive");
  const double suggested =
      scaling.factor > 1 ? std::sqrt(1 + std::log(scaling.factor) / std::log(scaling.original_length)) : 1;
  scaling.attention_factor = s.get<double>("attention_factor", suggested);
  require(scaling.attention_factor > 0, s.file, ": attention_factor must be positive");
  scaling.short_factors = s.numbers("short_factor"), scaling.long_factors = s.numbers("long_factor");
  for (const auto* factors : {&scaling.short_factors, &scaling.long_factors})
    for (double factor : *factors) require(factor > 0, s.file, ": factors must be positive, not ", factor);
}

// RoPE scaling: an object of the configuration `f`, which may also hold theta.
inline RopeScaling read_rope_scaling(const Fields& s, const Fields& f, const Config& c) {
  const auto positive = [&](const char* name, auto... otherwise) {
    const auto value = s.get<double>(name, otherwise...);
    require(value > 0, s.file, ": the field \"", name, "\" must be positive");
    return value;
  };
  s.only("partial_rotary_factor", 1.0);
  const auto old_name = s.get<std::string>("type", "default");
  const auto type = s.get<std::string>("rope_type", old_name);
  const auto found =
      std::find_if(rope_types().begin(), rope_types().end(), [&](const auto& known) { return known.first == type; });
  require(found != rope_types().end(), s.file, ": RoPE scaling of type ", quote(type),
          " is not supported; default, linear, dynamic, llama3, yarn and longrope are");
  RopeScaling scaling;
  scaling.type = found->second;
  if (type == "longrope") {
    read_longrope(s, f, c, scaling);
  } else if (type != "default") {
    scaling.factor = positive("factor");
  }
  if (type == "dynamic") {
    require(scaling.factor >= 1 && c.max_length > 0, s.file,
            ": dynamic scaling needs a factor of at least 1, and max_position_embeddings beside it");
    for (const Fields& fields : {s, f}) fields.has("original_max_position_embeddings");  // has no effect
    scaling.original_length = static_cast<double>(c.max_length);
  }
  if (type == "llama3" || type == "yarn") scaling.original_length = positive("original_max_position_embeddings");
  if (type == "llama3") {
    scaling.low_freq_factor = positive("low_freq_factor"), scaling.high_freq_factor = positive("high_freq_factor");
    require(scaling.low_freq_factor < scaling.high_freq_factor, s.file,
            ": low_freq_factor must be less than high_freq_factor");
  }
  if (type == "yarn") {
    scaling.beta_fast = positive("beta_fast", scaling.beta_fast),
    scaling.beta_slow = positive("beta_slow", scaling.beta_slow);
    require(scaling.beta_fast > scaling.beta_slow, s.file, ": beta_fast must be larger than beta_slow");
    require(scaling.original_length > 6.2832 * scaling.beta_slow, s.file,
            ": original_max_position_embeddings is too short for beta_slow rotations");
    scaling.attention_factor = yarn_attention_factor(s, scaling.factor);
    require(scaling.attention_factor > 0, s.file, ": attention_factor must be positive");
    if (!s.get<bool>("truncate", true)) scaling.ends = RopeScaling::Ends::exact;
  }
  s.refuse_others([](const std::string& name) { return name == "rope_theta"; });
  return scaling;
}

// transformers 5 keeps theta and the scaling in one object (Gemma: one for each layer type); earlier versions have
// separate fields.
inline void read_rope(const Fields& f, Config& c) {
  const double usual_theta = c.family == "gemma3" ? 1e6 : 1e4;
  c.rope_theta = f.get<double>("rope_theta", usual_theta);
  if (f.has("rope_scaling")) c.rope_scaling = read_rope_scaling(f.object("rope_scaling"), f, c);
  if (c.family == "gemma3") c.local_rope_theta = f.get<double>("rope_local_base_freq", 1e4);
  if (!f.has("rope_parameters")) return;
  require(!f.has("rope_scaling"), f.file,
          ": has both \"rope_scaling\" and \"rope_parameters\", of earlier and of newer files; remove one of them");
  Fields rope = f.object("rope_parameters");
  if (rope.has("full_attention")) {
    require(c.family == "gemma3", rope.file, ": only Gemma has RoPE parameters for each layer type");
    if (rope.has("sliding_attention")) {
      const Fields local = rope.object("sliding_attention");
      c.local_rope_theta = local.get<double>("rope_theta", 1e4);
      require(read_rope_scaling(local, f, c).type == RopeType::plain, local.file,
              ": RoPE scaling of local layers is not supported");
    }
    rope.refuse_others([](const std::string&) { return false; });
    const Fields global = rope.object("full_attention");
    c.rope_theta = global.get<double>("rope_theta", usual_theta);
    c.rope_scaling = read_rope_scaling(global, f, c);
    return;
  }
  c.rope_theta = rope.get<double>("rope_theta", usual_theta);
  c.rope_scaling = read_rope_scaling(rope, f, c);
}

inline Json rope_scaling_to_json(const RopeScaling& s) {
  if (s.type == RopeType::linear) return {{"rope_type", "linear"}, {"factor", s.factor}};
  if (s.type == RopeType::dynamic) return {{"rope_type", "dynamic"}, {"factor", s.factor}};
  if (s.type == RopeType::longrope) {
    return {{"rope_type", "longrope"},
            {"factor", s.factor},
            {"short_factor", s.short_factors},
            {"long_factor", s.long_factors},
            {"original_max_position_embeddings", s.original_length},
            {"attention_factor", s.attention_factor}};
  }
  if (s.type == RopeType::yarn) {
    return {{"rope_type", "yarn"},
            {"factor", s.factor},
            {"original_max_position_embeddings", s.original_length},
            {"beta_fast", s.beta_fast},
            {"beta_slow", s.beta_slow},
            {"attention_factor", s.attention_factor},
            {"truncate", s.ends == RopeScaling::Ends::whole}};
  }
  return {{"rope_type", "llama3"},
          {"factor", s.factor},
          {"low_freq_factor", s.low_freq_factor},
          {"high_freq_factor", s.high_freq_factor},
          {"original_max_position_embeddings", s.original_length}};
}

}  // namespace streambp
