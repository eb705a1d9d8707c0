// Damages valid files at random to test parsers. The damage is a function of the case number.
//
// Most damage keeps the format, so that it passes the first check: JSON is parsed, changed and written again, and the
// header of a safetensors file keeps its correct length.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "kernels/base/random.h"

namespace streambp {

using Files = std::map<std::string, std::string>;  // contents by name; the extension gives the type

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
    switch (dice_.below(9)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice_.below(8));
        break;
      case 1:
        bytes[at] = static_cast<char>(dice_.below(256));
        break;
      case 2:
        bytes.insert(at, 1, dice_.pick(kMarks));
        break;
      case 3:
        bytes.erase(at, n);
        break;
      case 4:
        bytes.resize(at);
        break;
      case 5:
        bytes.insert(dice_.below(bytes.size()), std::string(bytes, at, n));
        break;
      case 6: {  // the start of this file, the end of another
        const std::string& other = elsewhere(name, bytes);
        bytes = bytes.substr(0, at) + other.substr(dice_.below(other.size() + 1));
        break;
      }
      case 7:
        change_integer(bytes, dice_.one_in(3) ? 0 : at);
        break;
      default:
        change_digits(bytes, at);
        break;
    }
  }

  // Overwrites a binary integer of one to eight bytes.
  void change_integer(std::string& bytes, std::size_t at) {
    const std::size_t width = std::min(std::size_t{1} << dice_.below(4), bytes.size() - at);
    std::uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, width);
    value = dice_.one_in(2) ? value + dice_.between(1, 16) - 8 : dice_.pick(kIntegers);
    std::memcpy(bytes.data() + at, &value, width);
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
    switch (dice_.below(8)) {
      case 0:
        value = dice_.one_in(3) ? part_of(root) : part_of(other);
        break;
      case 1:
        value = value.is_structured() && dice_.one_in(2) ? Json(value.type()) : dice_.pick(values());
        break;
      default:
        if (value.is_array()) return change_list(value, other);
        if (value.is_object()) return change_object(value, other);
        if (value.is_string()) return change_text(value.get_ref<std::string&>(), other);
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
    switch (dice_.below(5)) {
      case 0:
        object.erase(name);
        break;
      case 1:
        object["@again@" + name] = part_of(other);
        break;
      case 2:
        object[name] = dice_.pick(values());
        break;
      case 3:
        object[name] = part_of(object);
        break;
      default: {
        std::string changed = name;
        change_text(changed, other);
        object.erase(name);
        object[changed] = value;
      }
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
  static constexpr std::uint64_t kIntegers[] = {0,
                                                1,
                                                0x7f,
                                                0x80,
                                                0xff,
                                                0x7fff,
                                                0xffff,
                                                0x10000,
                                                0x00ffffff,
                                                0x01000000,
                                                0x7fffffff,
                                                0x80000000,
                                                0xffffffff,
                                                0x100000000,
                                                0x0fffffffffffffff,
                                                0x7fffffffffffffff,
                                                0x8000000000000000,
                                                0xfffffffffffffff8,
                                                0xffffffffffffffff};
  static constexpr const char* kNumbers[] = {"0",
                                             "1",
                                             "2",
                                             "8",
                                             "255",
                                             "65536",
                                             "16777215",
                                             "16777216",
                                             "2147483647",
                                             "2147483648",
                                             "4294967295",
                                             "9007199254740993",
                                             "2305843009213693953",
                                             "9223372036854775807",
                                             "9223372036854775808",
                                             "18446744073709551615",
                                             "18446744073709551616",
                                             "-1",
                                             "-9223372036854775808",
                                             "0.5",
                                             "1e-320",
                                             "1e308",
                                             "1e309",
                                             "-0.0",
                                             "00",
                                             "null",
                                             "true",
                                             "[]",
                                             "{}",
                                             "\"\""};
  static inline const std::string kTexts[] = {
      "",      "a",      " ", std::string(1, '\0'), "\u2581", "\U0010ffff", ".", "/", "(a|aa)+", "[^a]*a", "<0xFF>",
      "{bos}", "\u0301", ".."};

  // kTexts, and the kNumbers that are JSON.
  static const std::vector<Json>& values() {
    static const std::vector<Json> all = [] {
      std::vector<Json> list(std::begin(kTexts), std::end(kTexts));
      for (const char* number : kNumbers) {
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
