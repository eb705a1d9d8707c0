// RoPE's fields in a config.json, in the old and the new spelling.
#pragma once

#include <cmath>
#include <vector>

#include "model/families.h"
#include "text/fields.h"

namespace streambp {

using RopeMember = double RopeScaling::*;

// A kind of RoPE scaling: its name, and its numbers. Only those that are not `needed` have a default.
struct RopeNumber {
  const char* name;
  RopeMember member;
  bool needed = true;
};
struct RopeKind {
  const char* name;
  RopeType type;
  std::vector<RopeNumber> numbers;
};
inline const std::vector<RopeKind>& rope_kinds() {
  static const RopeNumber factor = {"factor", &RopeScaling::factor},
                          length = {"original_max_position_embeddings", &RopeScaling::original_length},
                          low = {"low_freq_factor", &RopeScaling::low_freq_factor},
                          high = {"high_freq_factor", &RopeScaling::high_freq_factor},
                          fast = {"beta_fast", &RopeScaling::beta_fast, false},
                          slow = {"beta_slow", &RopeScaling::beta_slow, false},
                          attention = {"attention_factor", &RopeScaling::attention_factor, false},
                          share = {"partial_rotary_factor", &RopeScaling::share, false};
  static const std::vector<RopeKind> kinds = {{"default", RopeType::plain, {}},
                                              {"linear", RopeType::linear, {factor}},
                                              {"dynamic", RopeType::dynamic, {factor}},
                                              {"llama3", RopeType::llama3, {factor, length, low, high}},
                                              {"yarn", RopeType::yarn, {factor, length, fast, slow, attention}},
                                              {"longrope", RopeType::longrope, {factor, length, attention}},
                                              {"proportional", RopeType::proportional, {share}}};
  return kinds;
}

// The factor by which YaRN multiplies cosines and sines, as its authors suggest.
inline double yarn_attention_factor(const Fields& s) {
  const auto factor = s.get<double>("factor");
  const auto suggested = [&](double scale) { return factor > 1 ? 0.1 * scale * std::log(factor) + 1 : 1; };
  const auto numerator = s.get<double>("mscale", 0), denominator = s.get<double>("mscale_all_dim", 0);
  return numerator != 0 && denominator != 0 ? suggested(numerator) / suggested(denominator) : suggested(1);
}

// Phi-3's form has the context length of pretraining beside the object `s`, in the configuration `f`, and not the factor.
inline void read_longrope(const Fields& s, const Fields& f, const Config& c, RopeScaling& scaling) {
  const double usual = c.family == "phi3" ? 4096 : static_cast<double>(c.max_length);  // of transformers
  const auto inside = s.get<double>("original_max_position_embeddings", usual);
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
  // Qwen's RoPE has three positions (time, height, width) for images. Those of text are equal, so it is plain RoPE.
  const bool interleaved = s.has("mrope_interleaved"), sections = s.has("mrope_section") || interleaved;
  const auto old_name = s.get<std::string>("type", "default");
  const auto given = s.get<std::string>("rope_type", old_name), name = sections && given == "mrope" ? "default" : given;
  const auto kind = std::ranges::find(rope_kinds(), name, &RopeKind::name);
  require(kind != rope_kinds().end(), s.file, ": RoPE scaling of type ", quote(name),
          " is not supported; default, linear, dynamic, llama3, yarn, longrope and proportional are");
  if (kind->type != RopeType::proportional) s.only("partial_rotary_factor", c.rotary_share);
  RopeScaling scaling;
  scaling.type = kind->type;
  if (scaling.type == RopeType::yarn) scaling.attention_factor = yarn_attention_factor(s);
  if (scaling.type == RopeType::longrope) read_longrope(s, f, c, scaling);
  for (const auto& [field, member, needed] : kind->numbers) {
    if (scaling.type == RopeType::longrope) continue;
    scaling.*member = needed ? s.get<double>(field) : s.get<double>(field, scaling.*member);
    require(scaling.*member > 0, s.file, ": the field \"", field, "\" must be positive");
  }
  if (scaling.type == RopeType::dynamic) {
    require(scaling.factor >= 1 && c.max_length > 0, s.file,
            ": dynamic scaling needs a factor of at least 1, and max_position_embeddings beside it");
    for (const Fields& fields : {s, f}) fields.has("original_max_position_embeddings");  // has no effect
    scaling.original_length = static_cast<double>(c.max_length);
  }
  if (scaling.type == RopeType::llama3) {
    require(scaling.low_freq_factor < scaling.high_freq_factor, s.file,
            ": low_freq_factor must be less than high_freq_factor");
  }
  if (scaling.type == RopeType::yarn) {
    require(scaling.beta_fast > scaling.beta_slow, s.file, ": beta_fast must be larger than beta_slow");
    require(scaling.original_length > 6.2832 * scaling.beta_slow, s.file,
            ": original_max_position_embeddings is too short for beta_slow rotations");
    if (family_of(c).query_beta) {
      scaling.query_beta = s.get<double>("llama_4_scaling_beta", 0.0);
      s.has("max_position_embeddings");  // has no effect
      require(scaling.query_beta >= 0, s.file, ": \"llama_4_scaling_beta\" must not be negative");
    }
    if (!s.get<bool>("truncate", true)) scaling.ends = RopeScaling::Ends::exact;
  }
  s.refuse_others([](const std::string& name) { return name == "rope_theta"; });
  return scaling;
}

// Hunyuan's scaling by "alpha" is a larger theta for documents of all lengths.
inline void read_rope_alpha(const Fields& s, Config& c) {
  s.only("type", "dynamic"), s.only("rope_type", "dynamic");
  require(s.has("type") || s.has("rope_type"), s.file, ": the field \"rope_type\" is missing");
  for (const char* name : {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}) s.has(name);  // no effect
  const auto alpha = s.get<double>("alpha");
  s.refuse_others([](const std::string& name) { return name == "rope_theta"; });
  const auto dim = static_cast<double>(c.rotary_dim());
  require(alpha > 0 && dim > 2, s.file, ": \"alpha\" must be positive, and heads wider than 2");
  c.rope_theta *= std::pow(alpha, dim / (dim - 2));
}

// transformers 5 keeps theta and the scaling in one object (in some families one for each layer type); earlier versions
// have separate fields. `c` has the family's theta, or that of a separate field.
inline void read_rope(const Fields& f, const ModelFamily& family, Config& c) {
  const auto read = [&](const Fields& rope) {
    c.rope_theta = rope.get<double>("rope_theta", c.rope_theta);
    if (varies(family, "partial_rotary_factor"))
      c.rotary_share = rope.get<double>("partial_rotary_factor", c.rotary_share);
    if (family.rope_alpha && rope.has("alpha")) return read_rope_alpha(rope, c);
    c.rope_scaling = read_rope_scaling(rope, f, c);
  };
  if (f.has("rope_scaling")) read(f.object("rope_scaling"));
  require(!family.query_beta || f.has("rope_scaling") || f.has("rope_parameters"), f.file,
          ": the field \"rope_parameters\" is missing");
  if (f.has("rope_parameters")) {
    require(!f.has("rope_scaling"), f.file,
            ": has both \"rope_scaling\" and \"rope_parameters\", of earlier and of newer files; remove one of them");
    const Fields rope = f.object("rope_parameters");
    if (!rope.has("full_attention")) {
      require(family.defaults.global_head_dim == 0, rope.file,
              ": \"full_attention\" and \"sliding_attention\" are missing");
      read(rope);
    } else {
      require(c.local_rope_theta > 0, rope.file, ": ", family.name,
              " models do not have RoPE parameters for each layer type");
      if (rope.has("sliding_attention")) {
        const Fields local = rope.object("sliding_attention");
        c.local_rope_theta = local.get<double>("rope_theta", c.local_rope_theta);
        require(read_rope_scaling(local, f, c).type == RopeType::plain, local.file,
                ": RoPE scaling of local layers is not supported");
      }
      rope.refuse_others([](const std::string&) { return false; });
      read(rope.object("full_attention"));
    }
  }
  if (c.rope_scaling.type == RopeType::dynamic) {
    const double stretched = c.rope_scaling.factor * static_cast<double>(c.max_length);
    c.max_length = static_cast<Index>(std::min(stretched, 0x1p24));
  }
}

inline void write_rope(Json& json, const Config& c) {
  const RopeScaling& s = c.rope_scaling;
  if (s.type == RopeType::plain) return;
  if (s.type == RopeType::proportional && c.local_rope_theta > 0) {
    const auto of_layers = [](const char* type, double theta) {
      return Json{{"rope_type", type}, {"rope_theta", theta}};
    };
    json["rope_parameters"] = {{"full_attention", of_layers("proportional", c.rope_theta)},
                               {"sliding_attention", of_layers("default", c.local_rope_theta)}};
    json["rope_parameters"]["full_attention"]["partial_rotary_factor"] = s.share;
    return;
  }
  const RopeKind& kind = *std::ranges::find(rope_kinds(), s.type, &RopeKind::type);
  Json& rope = json["rope_scaling"] = {{"rope_type", kind.name}};
  for (const RopeNumber& number : kind.numbers) rope[number.name] = s.*number.member;
  if (s.type == RopeType::dynamic) json["max_position_embeddings"] = static_cast<Index>(s.original_length);
  if (s.type == RopeType::longrope) rope["short_factor"] = s.short_factors, rope["long_factor"] = s.long_factors;
  if (s.query_beta > 0) rope["llama_4_scaling_beta"] = s.query_beta;
  if (s.type == RopeType::yarn) rope["truncate"] = s.ends == RopeScaling::Ends::whole;
}

}  // namespace streambp
