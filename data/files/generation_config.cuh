// DIR/generation_config.json: how a model's makers would have its tokens drawn, and which tokens end a text.
//
// Taken are temperature, top_k, top_p, do_sample (false: always the likeliest token) and eos_token_id, a number or a list; the
// latter from config.json where the former file does not have it.
#pragma once

#include <filesystem>
#include <set>

#include "data/files/config.cuh"
#include "model/sampling.cuh"

namespace streambp {

struct GenerationDefaults {
  Sampling sampling{.temperature = 0.8, .top_p = 0.95};  // where the model says nothing
  std::set<std::int32_t> stop;
};

inline std::set<std::int32_t> read_stop_tokens(const Fields& f) {
  std::set<std::int32_t> stop;
  if (!f.has("eos_token_id")) return stop;
  const Json& value = f.json.at("eos_token_id");
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    require(id.is_number_integer() && id >= 0 && id <= INT32_MAX, f.file, ": the field \"eos_token_id\" has the value ",
            value.dump(), ", which is neither a token's number nor a list of them");
    stop.insert(id.get<std::int32_t>());
  }
  return stop;
}

inline GenerationDefaults read_generation_defaults(const std::filesystem::path& model) {
  GenerationDefaults defaults;
  for (const char* name : {"config.json", "generation_config.json"}) {  // the latter counts
    const std::filesystem::path path = model / name;
    if (!std::filesystem::exists(path)) continue;
    const Json json = parse_json_file(path);
    const Fields f(json, path.string());
    const std::set<std::int32_t> stop = read_stop_tokens(f);
    if (!stop.empty()) defaults.stop = stop;
    if (name == std::string("config.json")) continue;
    const bool says = f.has("temperature") || f.has("top_k") || f.has("top_p") || f.has("do_sample");
    if (!says) continue;
    Sampling& s = defaults.sampling;
    s.temperature = f.get<bool>("do_sample", true) ? f.get<double>("temperature", 1) : 0;
    s.top_k = f.get<Index>("top_k", 0);
    s.top_p = f.get<double>("top_p", 1);
    try {
      validate(s);
    } catch (const Error& error) {
      fail(path.string(), ": ", error.what());
    }
  }
  return defaults;
}

}  // namespace streambp
