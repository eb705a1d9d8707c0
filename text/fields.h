// Reads the fields of a JSON object from an untrusted file by name and type. Unknown fields are errors.
#pragma once

#include <initializer_list>
#include <memory>
#include <set>

#include "text/json.h"

namespace streambp {

// Reads fields of a JSON object and remembers which ones were read. Every error names the file and the field.
class Fields {
 public:
  Fields(const Json& json, std::string file) : json(json), file(std::move(file)) {
    require(json.is_object(), this->file, ": expected a JSON object");
  }

  bool has(const char* name) const {
    asked->insert(name);
    return json.contains(name) && !json.at(name).is_null();
  }

  const Json& at(const char* name) const {
    require(has(name), file, ": the field \"", name, "\" is missing");
    return json.at(name);
  }
  template <class V>
  V get(const char* name) const {
    const Json& value = at(name);
    const bool fits =
        std::is_same_v<V, bool>          ? value.is_boolean()
        : std::is_same_v<V, std::string> ? value.is_string()
        : std::is_floating_point_v<V>
            ? value.is_number()
            : value.is_number_integer() && !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX);
    if (!fits) fail(file, ": the field \"", name, "\" has the value ", shown(value), ", which is of the wrong type");
    return value.get<V>();
  }
  template <class V>
  V get(const char* name, V otherwise) const {
    return has(name) ? get<V>(name) : otherwise;
  }
  std::vector<double> numbers(const char* name) const {
    const Json& list = at(name);
    require(list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& n) { return n.is_number(); }), file,
            ": the field \"", name, "\" must be a list of numbers");
    return list;
  }
  Fields object(const char* name) const { return {at(name), file + ", \"" + name + "\""}; }
  const Json& list(const char* name) const {
    require(has(name) && json.at(name).is_array(), file, ": the field \"", name, "\" is not a list");
    return json.at(name);
  }

  // Refuses any value other than this one.
  void only(const char* name, const Json& supported) const {
    if (!has(name) || json.at(name) == supported) return;
    fail(file, ": \"", name, "\": ", shown(json.at(name)), " is not supported; only ", supported.dump(), " is");
  }

  // Refuses fields that were never read, unless they are null or `harmless`.
  template <class F>
  void refuse_others(F&& harmless) const {
    for (const auto& [name, value] : json.items()) {
      if (value.is_null() || asked->contains(name) || harmless(name)) continue;
      fail(file, ": the field ", quote(name),
           " is unknown and may change what the model computes; if you know that it does not, remove it. Known are ",
           join(*asked));
    }
  }

  // Refuses all other fields, because they may have an effect.
  void known(std::initializer_list<std::string_view> names) const {
    for (const auto& [name, value] : json.items()) {
      if (std::ranges::find(names, name) != names.end()) continue;
      fail(file, ": the field ", quote(name), ": ", shown(value), " is not supported");
    }
  }

  const Json& json;
  const std::string file;

 private:
  std::shared_ptr<std::set<std::string>> asked = std::make_shared<std::set<std::string>>();
};

}  // namespace streambp
