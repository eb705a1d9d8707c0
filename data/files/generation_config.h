// DIR/generation_config.json: the recommended sampling settings of a model, and the tokens that end a sequence.
// Supports temperature, top_k, top_p, repetition_penalty, do_sample (false: greedy decoding) and eos_token_id.
#pragma once

#include "data/files/config.h"
#include "data/files/tokenizer_config.h"
#include "kernels/base/sampling.h"

namespace streambp {

struct EosTokens {
  std::vector<std::int32_t> ids;  // empty: the model has none
  std::string file;               // the file that lists them
};

// eos_token_id, a number or a list, from generation_config.json or else from config.json.
inline EosTokens read_eos_tokens(const fs::path& model) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string file = (model / name).string();
    const Json json = read_model_json(file);
    if (json.is_null() || !json.contains("eos_token_id") || json["eos_token_id"].is_null()) continue;
    const Json& value = json["eos_token_id"];
    EosTokens eos{{}, file};
    for (const Json& id : value.is_array() ? value : Json::array({value})) {
      const bool is_token = id.is_number_unsigned() && id.get<std::uint64_t>() <= INT32_MAX;
      if (!is_token) fail(file, ": \"eos_token_id\" is ", shown(value), ", not a token or a list of tokens");
      eos.ids.push_back(id.get<std::int32_t>());
    }
    if (!eos.ids.empty()) return eos;
  }
  return {};
}

struct GenerationDefaults {
  Sampling sampling{.temperature = 0.8, .top_p = 0.95};  // the defaults without recommendations
  std::set<std::int32_t> stop;
};

inline GenerationDefaults read_generation_defaults(const fs::path& model) {
  GenerationDefaults defaults;
  const std::vector<std::int32_t> eos = read_eos_tokens(model).ids;
  defaults.stop = {eos.begin(), eos.end()};
  const std::string file = (model / "generation_config.json").string();
  const Json json = read_model_json(file);
  if (json.is_null()) return defaults;
  const Fields f(json, file);
  Sampling& s = defaults.sampling;
  s.repetition_penalty = f.get<double>("repetition_penalty", 1);
  if (f.has("temperature") || f.has("top_k") || f.has("top_p") || f.has("do_sample")) {
    s.temperature = f.get<bool>("do_sample", true) ? f.get<double>("temperature", 1) : 0;
    s.top_k = f.get<Index>("top_k", 0);
    s.top_p = f.get<double>("top_p", 1);
  }
  try {
    validate(s);
  } catch (const Error& error) {
    fail(file, ": ", error.what());
  }
  return defaults;
}

}  // namespace streambp
