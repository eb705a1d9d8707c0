// JSON from untrusted files, parsed within limits: time is linear in the text, memory is proportional to the number of
// values, and duplicate keys are errors.
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kernels/base/error.h"

namespace streambp {

using Json = nlohmann::json;                 // sorts the members of objects
using OrderedJson = nlohmann::ordered_json;  // keeps their order, and finds them in linear time

struct JsonLimits {
  std::size_t values = 4'000'000;  // a large tokenizer.json has two million; an object takes about 150 bytes
  std::size_t depth = 64;          // callers may recurse into the result
  std::string_view infinity = {};  // an integer that stands for it
};

// The text is not JSON, or exceeds the limits.
struct BadJson : Error {
  using Error::Error;
};

// Builds a value from the parser's SAX events. (The callback parser of nlohmann-json rescans an object or array for
// each member, and silently keeps the last of duplicate keys.)
template <class J>
class JsonBuilder final : public nlohmann::json_sax<J> {
 public:
  explicit JsonBuilder(const JsonLimits& limits) : limits_(limits) {}

  J take() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string& text) override {
    // An integer of more than 64 bits keeps its digits, as a binary value, which JSON cannot have.
    const bool negative = text.starts_with('-');
    if (text.substr(negative) == limits_.infinity) return add(negative ? -HUGE_VAL : HUGE_VAL);
    if (!std::is_same_v<J, OrderedJson> || text.find_first_of(".eE") != text.npos) return add(value);
    return add(J::binary({text.begin(), text.end()}));
  }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(typename J::binary_t&) override { return refuse("binary values are not JSON"); }
  bool start_object(std::size_t) override { return open(J::value_t::object); }
  bool start_array(std::size_t) override { return open(J::value_t::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    auto& object = open_.back()->template get_ref<typename J::object_t&>();
    if constexpr (std::is_same_v<J, OrderedJson>) {
      if (!keys_.back().insert(name).second) return refuse("duplicate key " + quote(name));
      member_ = &static_cast<typename OrderedJson::object_t::Container&>(object).emplace_back(name, J()).second;
      return true;
    } else {
      const auto [member, is_new] = object.try_emplace(name);
      member_ = &member->second;
      return is_new || refuse("duplicate key " + quote(name));
    }
  }

  // "[json.exception...] parse error at line 1, column 9: ...; last read: ..."
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string what = error.what();
    what = what.substr(0, what.find("; last read"));
    if (const std::size_t at = what.find("] "); at != what.npos) what = what.substr(at + 2);
    if (const std::size_t at = what.find("line "); at != what.npos) what = what.substr(at);
    if (what.starts_with("line 1, ")) what = what.substr(8);
    return refuse("not valid JSON: " + excerpt(what));
  }

 private:
  template <class V>
  bool add(V&& value) {
    return place(std::forward<V>(value)) != nullptr;
  }

  J* place(J value) {
    if (++values_ > limits_.values) return refuse("more than " + std::to_string(limits_.values) + " values"), nullptr;
    J& to = open_.empty() ? root_ : open_.back()->is_object() ? *member_ : open_.back()->emplace_back();
    to = std::move(value);
    return &to;
  }

  bool open(typename J::value_t type) {
    if (open_.size() == limits_.depth)
      return refuse("nested more deeply than " + std::to_string(limits_.depth) + " levels");
    open_.push_back(place(type));
    keys_.emplace_back();
    return open_.back() != nullptr;
  }
  bool close() { return keys_.pop_back(), open_.pop_back(), true; }
  bool refuse(const std::string& why) { return error_ = why, false; }

  const JsonLimits limits_;
  J root_;
  std::vector<J*> open_;                               // the objects and arrays that contain the next value
  std::vector<std::unordered_set<std::string>> keys_;  // of each of them, where an object does not find its keys itself
  J* member_ = nullptr;                                // the member of the innermost object whose key was just read
  std::size_t values_ = 0;
  std::string error_;
};

template <class J = Json>
J parse_json(std::string_view text, const JsonLimits& limits = {}) {
  // The parser takes a NUL byte for the end of the text.
  const std::size_t nul = text.find('\0');
  if (nul != text.npos) throw BadJson("not valid JSON: byte " + std::to_string(nul + 1) + " is NUL");
  JsonBuilder<J> builder(limits);
  if (!J::sax_parse(text, &builder)) throw BadJson(builder.error());
  return builder.take();
}

// The same, with errors that name the file.
inline Json parse_json(std::string_view text, const std::string& file, const JsonLimits& limits = {}) {
  try {
    return parse_json(text, limits);
  } catch (const BadJson& error) {
    fail(file, ": ", error.what(), "; is the file complete?");
  }
}

// Null for what is not valid JSON, as the last line of a log may be that a killed run leaves.
inline Json json_or_null(std::string_view text) {
  try {
    return parse_json(text);
  } catch (const BadJson&) {
    return nullptr;
  }
}

// --- Objects as text ---
//
// For what nlohmann-json loses or cannot do in linear time: the order of members, and changing one and no other.

// A member of an object. `text` is all of it, `value` its value.
struct JsonMember {
  std::string key;
  std::string_view text, value;
};

inline std::string_view without_spaces(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  return text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
}

// The members of an object in the order of its text, which is valid JSON and outlives them.
inline std::vector<JsonMember> members_of(std::string_view object) {
  std::vector<JsonMember> members;
  std::size_t depth = 0, begin = 0, colon = 0;
  for (std::size_t at = 0; at < object.size(); ++at) {
    const char c = object[at];
    if (c == '"') {
      for (++at; object[at] != '"'; ++at) at += object[at] == '\\';
    } else if (c == '{' || c == '[') {
      if (++depth == 1) begin = at + 1;
    } else if (depth == 1 && c == ':') {
      colon = at;
    } else if (depth == 1 && (c == ',' || c == '}')) {
      const std::string_view text = object.substr(begin, at - begin);
      if (colon > begin) {  // else the object is empty
        const std::size_t key = colon - begin;
        members.push_back(
            {parse_json(text.substr(0, key)), without_spaces(text), without_spaces(text.substr(key + 1))});
      }
      begin = at + 1;
    }
    if (c == '}' || c == ']') --depth;
  }
  return members;
}

// The object with this value of a member, which is added at the end if there is none. All other text stays as it is.
inline std::string with_member(std::string object, const std::string& key, const Json& value) {
  const std::vector<JsonMember> members = members_of(object);
  const auto position = [&](const char* at) { return static_cast<std::size_t>(at - object.data()); };
  const auto found = std::ranges::find(members, key, &JsonMember::key);
  if (found != members.end()) return object.replace(position(found->value.data()), found->value.size(), value.dump());
  const std::string added = "\n  " + Json(key).dump() + ": " + value.dump();
  if (members.empty()) return object.insert(object.find('{') + 1, added + "\n");
  const std::string_view last = members.back().text;
  return object.insert(position(last.data()) + last.size(), "," + added);
}

// The object without a member. All other text stays as it is.
inline std::string without_member(std::string object, const std::string& key) {
  const std::vector<JsonMember> members = members_of(object);
  const auto found = std::ranges::find(members, key, &JsonMember::key);
  if (found == members.end()) return object;
  const auto end_of = [](const JsonMember& m) { return m.text.data() + m.text.size(); };
  const char* begin = found->text.data();
  const char* end = end_of(*found);
  if (found + 1 != members.end()) {
    end = (found + 1)->text.data();  // with the comma after it
  } else if (found != members.begin()) {
    begin = end_of(*(found - 1));  // with the comma before it
  }
  return object.erase(static_cast<std::size_t>(begin - object.data()), static_cast<std::size_t>(end - begin));
}

// Formats a value for a message.
inline std::string shown(const Json& value) {
  return excerpt(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace streambp
