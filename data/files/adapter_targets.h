// What an adapter_config.json says about the layers, by PEFT's rules: which have adapters, and their ranks and alphas.
//
//   target_modules                list: whole names, or their ends after a dot; string: a regular expression of whole
//                                 names, or "all-linear"; missing: PEFT's choice for the family
//   layers_to_transform           the numbers of the layers, for names of which the list has only the end
//   layers_pattern                what comes before the number in the names of these layers
//   exclude_modules               list or regular expression, as above: these have no adapter
//   modules_to_save               regular expressions of modules that are trained themselves, without an adapter
//   rank_pattern, alpha_pattern   {regular expression of a name's end: value}; the first one that matches counts
#pragma once

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "kernels/base/matrix.cuh"
#include "text/fields.h"
#include "text/regular_expression.h"

namespace streambp {

// The regular expressions of a field. Their number and the time that they take are limited.
class NamePatterns {
 public:
  NamePatterns(const std::string& file, const char* field) : where_(file + ": \"" + field + "\"") {}

  void add(const std::string& text, const std::string& before = "", const std::string& after = "") {
    require(patterns_.size() < 4096, where_, ": has more than 4096 entries; write fewer, more general ones");
    patterns_.emplace_back(where_, text, before, after);
    check_time();
  }
  bool empty() const { return patterns_.empty(); }
  // The number of the first expression that matches.
  std::optional<std::size_t> first(const std::string& name) const {
    check_time();
    for (std::size_t i = 0; i < patterns_.size(); ++i) {
      if (patterns_[i].matches(name)) return i;
    }
    return {};
  }

 private:
  void check_time() const {
    require(thread_seconds() < latest_, where_, ": matching takes too long; write fewer or simpler expressions");
  }

  std::string where_;
  std::vector<NamePattern> patterns_;
  const double latest_ = thread_seconds() + 10;
};

// The strings of a list, or one string; null has none.
inline std::vector<std::string> strings_of(const Fields& f, const char* field, const Json& value) {
  std::vector<std::string> strings;
  for (const Json& entry : value.is_string() ? Json::array({value}) : value) {
    if (!entry.is_string()) fail(f.file, ": ", quote(field), ": ", shown(entry), " is not a name");
    if (entry != "") strings.push_back(entry);
  }
  return strings;
}

// A list of names, or a regular expression of whole names.
class ModuleNames {
 public:
  ModuleNames(const Fields& f, const char* field, const Json& value)
      : is_expression(value.is_string()), expression_(f.file, field) {
    for (const std::string& text : strings_of(f, field, value))
      is_expression ? expression_.add(text) : void(names_.insert(text));
  }

  bool has(const std::string& name) const { return expression_.first(name) || names_.contains(name); }
  // Whether the list has the end of the name after one of its dots.
  bool has_end(const std::string& name) const {
    for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
      if (names_.contains(name.substr(dot + 1))) return true;
    }
    return false;
  }

  const bool is_expression;

 private:
  NamePatterns expression_;
  std::set<std::string> names_;
};

// The linear layers that have adapters.
class AdapterTargets {
 public:
  AdapterTargets(const Fields& f, const std::vector<std::string>& usual)
      : targets_(f, "target_modules", f.has("target_modules") ? f.json.at("target_modules") : Json(usual)),
        excluded_(f, "exclude_modules", f.json.value("exclude_modules", Json())),
        saved_(f.file, "modules_to_save"),
        numbered_(f.file, "layers_pattern"),
        all_(targets_.is_expression &&
             NamePattern(f.file, "(?i)all-linear").matches(f.get<std::string>("target_modules"))) {
    for (const std::string& name : strings_of(f, "modules_to_save", f.json.value("modules_to_save", Json())))
      saved_.add(name, "(^|.*\\.)", "($|\\..*)");
    read_layers(f);
  }

  // `name`: as in the base, such as "model.layers.0.self_attn.q_proj".
  bool contain(const std::string& name) const {
    if (excluded_.has(name) || excluded_.has_end(name) || saved_.first(name)) return false;
    return all_ || targets_.has(name) || (targets_.has_end(name) && is_transformed(name));
  }
  // A linear layer outside the layers, or an embedding; not with "all-linear".
  bool contain_other(const std::string& name) const { return !all_ && contain(name); }

 private:
  void read_layers(const Fields& f) {
    const Json layers = f.json.value("layers_to_transform", Json());
    for (const Json& number : layers.is_array() ? layers : Json::array({layers})) {
      if (number.is_null()) continue;
      if (!number.is_number_integer()) fail(f.file, ": \"layers_to_transform\": ", shown(number), " is not a layer");
      layers_.insert(number.get<Index>());
    }
    for (const std::string& name : strings_of(f, "layers_pattern", f.json.value("layers_pattern", Json())))
      numbered_.add(name, "(?:^|.*?\\.)", "\\.\\d+\\..*");
    require(!targets_.is_expression || (layers_.empty() && numbered_.empty()), f.file,
            ": \"layers_to_transform\" and \"layers_pattern\" need a list in \"target_modules\"");
    require(numbered_.empty() || !layers_.empty(), f.file, ": \"layers_pattern\" needs \"layers_to_transform\"");
  }

  // The only number in a name is that of its layer.
  bool is_transformed(const std::string& name) const {
    if (layers_.empty()) return true;
    const std::size_t number = name.find_first_of("0123456789");
    if (number == name.npos) return false;
    return layers_.contains(std::stol(name.substr(number))) && (numbered_.empty() || numbered_.first(name));
  }

  ModuleNames targets_, excluded_;
  NamePatterns saved_, numbered_;  // names inside a saved module; names with a number after the layers_pattern
  bool all_;                       // all linear layers of the layers
  std::set<Index> layers_;         // empty: all
};

// "rank_pattern" or "alpha_pattern". `config` is the text of the file.
class PatternValues {
 public:
  PatternValues(const Fields& f, const char* field, const std::string& config) : patterns_(f.file, field) {
    if (!f.has(field)) return;
    require(f.json.at(field).is_object(), f.file, ": ", quote(field), " is not an object");
    const std::vector<JsonMember> fields = members_of(config);
    for (const JsonMember& entry : members_of(std::ranges::find(fields, field, &JsonMember::key)->value)) {
      const Json& value = f.json.at(field).at(entry.key);
      if (!value.is_number()) fail(f.file, ": ", quote(field), ": ", quote(entry.key), " has no number");
      patterns_.add(entry.key, "(.*\\.)?(", ")");
      values_.push_back(value);
    }
  }

  double at(const std::string& name, double otherwise) const {
    const auto found = patterns_.first(name);
    return found ? values_[*found] : otherwise;
  }

 private:
  NamePatterns patterns_;
  std::vector<double> values_;
};

}  // namespace streambp
