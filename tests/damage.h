// Damages valid files at random to test parsers. The damage is a function of the case number.
//
// Most damage keeps the format, so that it passes the first check: JSON is parsed, changed and written again, and the
// header of a safetensors file keeps its correct length.
#pragma once

#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/base/random.h"

namespace streambp {

using Files = std::map<std::string, std::string>;  // contents by name; the extension gives the type

inline std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  std::size_t below(std::size_t n) { return random_.below(n, next_++); }
  std::size_t between(std::size_t least, std::size_t most) { return least + below(most - least + 1); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class List>
  auto& pick(List& list) {
    return list[below(std::size(list))];
  }

 private:
  Random random_;
  std::uint64_t next_ = 0;
};

class Damage {
 public:
  Damage(const std::vector<Files>& seeds, std::uint64_t number) : seeds_(seeds), dice_(number) {}

  // One of the seeds, damaged in a few places.
  Files make() {
    Files files = dice_.pick(seeds_);
    for (std::size_t left = dice_.one_in(3) ? dice_.between(2, 5) : 1; left > 0; --left) {
      auto& [name, contents] = *std::next(files.begin(), static_cast<std::ptrdiff_t>(dice_.below(files.size())));
      if (dice_.one_in(5) || !change_json(name, contents)) change_bytes(name, contents);
    }
    if (dice_.one_in(500)) nest(files);
    if (files.size() > 1 && dice_.one_in(200)) {
      files.erase(std::next(files.begin(), static_cast<std::ptrdiff_t>(dice_.below(files.size()))));
    }
    return files;
  }

 private:
  using Json = nlohmann::json;

  // The file of this name in a random seed, if it has one.
  const std::string& elsewhere(const std::string& name, const std::string& otherwise) {
    const Files& files = dice_.pick(seeds_);
    const auto found = files.find(name);
    return found == files.end() ? otherwise : found->second;
  }

  // --- Bytes ---

  void change_bytes(const std::string& name, std::string& bytes) {
    if (bytes.empty()) bytes = "\n";
    const std::size_t at = dice_.below(bytes.size()), most = bytes.size() - at;
    const std::size_t n = dice_.between(1, std::min<std::size_t>(most, dice_.one_in(4) ? most : 8));
    const std::size_t kind = dice_.below(9);
    if (kind == 0) bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice_.below(8));
    if (kind == 1) bytes[at] = static_cast<char>(dice_.below(256));
    if (kind == 2) bytes.insert(at, 1, dice_.pick(kMarks));
    if (kind == 3) bytes.erase(at, n);
    if (kind == 4) bytes.resize(at);
    if (kind == 5) bytes.insert(dice_.below(bytes.size()), std::string(bytes, at, n));
    if (kind == 6) {  // the start of this file, the end of another
      const std::string& other = elsewhere(name, bytes);
      bytes = bytes.substr(0, at) + other.substr(dice_.below(other.size() + 1));
    }
    if (kind == 7) change_integer(bytes, dice_.one_in(3) ? 0 : at);
    if (kind == 8) change_digits(bytes, at);
  }

  // Overwrites a binary integer of one to eight bytes.
  void change_integer(std::string& bytes, std::size_t at) {
    const std::size_t width = std::min(std::size_t{1} << dice_.below(4), bytes.size() - at);
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, width);
    value = dice_.one_in(2) ? value + dice_.between(1, 16) - 8 : near_a_limit();
    std::memcpy(bytes.data() + at, &value, width);
  }

  // 2^n, or one or eight less, for the n at which some type or format ends.
  std::uint64_t near_a_limit() {
    constexpr std::uint64_t below[] = {0, 1, 8};
    const unsigned bits = dice_.pick(kLimits);
    return (bits < 64 ? std::uint64_t{1} << bits : 0) - dice_.pick(below);
  }

  // Replaces a decimal number.
  void change_digits(std::string& bytes, std::size_t at) {
    constexpr const char* digits = "0123456789";
    const std::size_t begin = bytes.find_first_of(digits, at);
    if (begin == std::string::npos) return;
    const std::size_t end = std::min(bytes.find_first_not_of(digits, begin), bytes.size());
    bytes.replace(begin, end - begin, dice_.pick(kNumbers));
  }

  // --- JSON ---

  // Where the file holds JSON: in one of its lines, after eight bytes of length, or everywhere.
  std::pair<std::size_t, std::size_t> json_in(const std::string& name, const std::string& contents) {
    std::size_t begin = 0, size = contents.size();
    if (name.ends_with(".safetensors")) {
      std::uint64_t length = 0;
      if (size < 8) return {0, 0};
      std::memcpy(&length, contents.data(), 8);
      begin = 8, size = std::min<std::uint64_t>(length, size - 8);
    } else if (name.ends_with(".jsonl")) {
      begin = contents.rfind('\n', dice_.below(size + 1)) + 1;
      size = std::min(contents.find('\n', begin), size) - begin;
    } else if (!name.ends_with(".json")) {
      size = 0;
    }
    return {begin, size};
  }

  std::optional<Json> parse(const std::string& name, const std::string& contents) {
    const auto [begin, size] = json_in(name, contents);
    Json json = Json::parse(contents.substr(begin, size), nullptr, false);
    if (size == 0 || json.is_discarded()) return {};
    return json;
  }

  // Replaces the JSON of a file.
  void replace_json(const std::string& name, std::string& contents, std::string json) {
    const auto [begin, size] = json_in(name, contents);
    if (name.ends_with(".safetensors")) {
      while (json.size() % 8 != 0 && !dice_.one_in(64)) json += ' ';
      const std::uint64_t length = json.size();
      std::memcpy(contents.data(), &length, 8);
    }
    contents.replace(begin, size, json);
  }

  bool change_json(const std::string& name, std::string& contents) {
    std::optional<Json> json = parse(name, contents);
    if (!json) return false;
    const std::optional<Json> other = parse(name, elsewhere(name, contents));
    change(*json, other ? *other : *json);
    // Removing the mark makes a duplicate key.
    std::string text = json->dump(-1, ' ', false, Json::error_handler_t::replace);
    for (std::size_t at; (at = text.find("@again@")) != std::string::npos;) text.erase(at, 7);
    replace_json(name, contents, text);
    return true;
  }

  // A random value, at a random depth.
  Json& any(Json& root) {
    Json* value = &root;
    while (value->is_structured() && !value->empty() && !dice_.one_in(5)) {
      value = &*std::next(value->begin(), static_cast<std::ptrdiff_t>(dice_.below(value->size())));
    }
    return *value;
  }
  Json part_of(const Json& root) {
    Json copy = root;
    return any(copy);
  }

  void change(Json& root, const Json& other) {
    Json& value = any(root);
    const std::size_t kind = dice_.below(8);
    if (kind == 0) {
      value = dice_.one_in(3) ? part_of(root) : part_of(other);
    } else if (kind == 1) {
      value = value.is_structured() && dice_.one_in(2) ? Json(value.type()) : dice_.pick(values());
    } else if (value.is_array()) {
      change_list(value, other);
    } else if (value.is_object()) {
      change_object(value, other);
    } else if (value.is_string()) {
      change_text(value.get_ref<std::string&>(), other);
    } else {
      value = value.is_number() && dice_.one_in(2) ? Json(value.get<double>() * 2 - 1) : dice_.pick(values());
    }
  }

  void change_list(Json& list, const Json& other) {
    const std::size_t at = list.empty() ? 0 : dice_.below(list.size());
    if (list.empty() || dice_.one_in(4)) {
      list.push_back(part_of(other));
    } else if (dice_.one_in(3)) {
      list.erase(at);
    } else if (dice_.one_in(2)) {
      std::swap(list[at], dice_.pick(list));
    } else {
      const Json again = list[at];
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), dice_.between(1, dice_.one_in(4) ? 40 : 2), again);
    }
  }

  void change_object(Json& object, const Json& other) {
    if (object.empty()) {
      object[dice_.pick(kTexts)] = part_of(other);
      return;
    }
    const auto member = std::next(object.begin(), static_cast<std::ptrdiff_t>(dice_.below(object.size())));
    const std::string name = member.key();
    const Json value = member.value();
    const std::size_t kind = dice_.below(5);
    if (kind == 0) object.erase(name);
    if (kind == 1) object["@again@" + name] = part_of(other);
    if (kind == 2) object[name] = dice_.pick(values());
    if (kind == 3) object[name] = part_of(object);
    if (kind == 4) {
      std::string changed = name;
      change_text(changed, other);
      object.erase(name);
      object[changed] = value;
    }
  }

  void change_text(std::string& text, const Json& other) {
    if (dice_.one_in(4)) {
      text = dice_.pick(kTexts);
    } else if (dice_.one_in(8)) {
      const Json part = part_of(other);
      if (part.is_string()) text = part.get<std::string>();
    } else if (dice_.one_in(16)) {
      std::string all;
      for (std::size_t n = dice_.between(2, 2000); n > 0 && all.size() < 8000; --n) all += text;
      text = all;
    } else {
      change_bytes("", text);
    }
  }

  // Nests a value very deeply.
  void nest(Files& files) {
    auto& [name, contents] = *std::next(files.begin(), static_cast<std::ptrdiff_t>(dice_.below(files.size())));
    std::optional<Json> json = parse(name, contents);
    if (!json) return;
    any(*json) = "@here@";
    std::string text = json->dump(-1, ' ', false, Json::error_handler_t::replace), open, close;
    const bool list = dice_.one_in(2);
    for (std::size_t depth = dice_.one_in(2) ? 100 : 60'000; depth > 0; --depth) {
      open += list ? "[" : R"({"type":)", close += list ? "]" : "}";
    }
    text.replace(text.find("\"@here@\""), 8, open + "0" + close);
    replace_json(name, contents, text);
  }

  static constexpr std::string_view kMarks = R"({}[]",:\0-9e.+*?()|^$ )";
  static constexpr unsigned kLimits[] = {0, 7, 8, 15, 16, 24, 31, 32, 60, 63, 64};
  static inline const std::vector<std::string> kNumbers = words(
      "0 1 2 8 255 65536 16777215 16777216 2147483647 2147483648 4294967295 9007199254740993 2305843009213693953 "
      "9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 -1 -9223372036854775808 0.5 "
      "1e-320 1e308 1e309 -0.0 00 null true [] {} \"\"");
  static inline const std::string kTexts[] = {
      "",      "a",      " ", std::string(1, '\0'), "\u2581", "\U0010ffff", ".", "/", "(a|aa)+", "[^a]*a", "<0xFF>",
      "{bos}", "\u0301", ".."};

  // kTexts, and the kNumbers that are JSON.
  static const std::vector<Json>& values() {
    static const std::vector<Json> all = [] {
      std::vector<Json> list(std::begin(kTexts), std::end(kTexts));
      for (const std::string& number : kNumbers) {
        if (Json json = Json::parse(number, nullptr, false); !json.is_discarded()) list.push_back(std::move(json));
      }
      return list;
    }();
    return all;
  }

  const std::vector<Files>& seeds_;
  Dice dice_;
};

}  // namespace streambp
