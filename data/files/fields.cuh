// The fields of a JSON object that comes from elsewhere: asked for by name and type, and none passed over in silence.
#pragma once

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "data/files/files.cuh"

namespace streambp {

using Json = nlohmann::json;

// The JSON in a file of that name. Its values may be recursed into: none lies in more than 100 others.
inline Json parse_json(const std::string& text, const std::string& file) {
  int depth = 0, deepest = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted && c == '\\') ++i;
    if (c == '"') quoted = !quoted;
    if (!quoted && (c == '[' || c == '{')) deepest = std::max(deepest, ++depth);
    if (!quoted && (c == ']' || c == '}')) --depth;
  }
  require(deepest <= 100, file, ": its values are nested more deeply than is supported");
  Json json = Json::parse(text, nullptr, false);
  require(!json.is_discarded(), file, ": not valid JSON; is the file complete?");
  return json;
}
inline Json parse_json_file(const std::filesystem::path& path) { return parse_json(read_file(path), path.string()); }

// Reads fields of a JSON object, and remembers which it was asked for; every error names the file and the field.
class Fields {
 public:
  Fields(const Json& json, std::string file) : json(json), file(std::move(file)) {
    require(json.is_object(), this->file, ": expected a JSON object");
  }

  bool has(const char* name) const {
    asked->insert(name);
    return json.contains(name) && !json.at(name).is_null();
  }

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

  // Refuses fields that nobody asked for, unless they are null or `harmless` says so.
  template <class F>
  void refuse_others(F&& harmless) const {
    for (const auto& [name, value] : json.items()) {
      require(value.is_null() || asked->contains(name) || harmless(name), file, ": the field \"", name,
              "\" is not known here and may change the mathematics, so this model is refused; if you know that it "
              "changes nothing, remove it from the file");
    }
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

 private:
  std::shared_ptr<std::set<std::string>> asked = std::make_shared<std::set<std::string>>();
};

}  // namespace streambp
