// Values as text: as Python's str and repr print them, and as JSON; and JSON as values.
#pragma once

#include <charconv>

#include <nlohmann/json.hpp>

#include "text/template/value.h"

namespace streambp::jinja {

// Python's repr of a float: the shortest digits that give it back, with an exponent outside of 1e-4 to 1e16.
inline std::string python_float(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto put = [&](std::chars_format format) {
    return std::string(buffer, std::to_chars(buffer, std::end(buffer), x, format).ptr);
  };
  const double size = std::abs(x);
  if (size != 0 && (size < 1e-4 || size >= 1e16)) return put(std::chars_format::scientific);
  const std::string digits = put(std::chars_format::fixed);
  return digits.find('.') == digits.npos ? digits + ".0" : digits;
}

inline bool is_printable(char32_t c) {
  using enum_t = utf8proc_category_t;
  const enum_t category = utf8proc_category(static_cast<utf8proc_int32_t>(code_of(c)));
  return code_of(c) == ' ' || (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_SO);
}

inline std::string hex(char32_t code, int digits) {
  char buffer[9];
  std::snprintf(buffer, sizeof buffer, "%0*x", digits, static_cast<unsigned>(code));
  return buffer;
}

inline void append_quoted(Text& out, TextView text) {
  const bool doubled = text.find('\'') != text.npos && text.find('"') == text.npos;
  const char32_t quote = doubled ? '"' : '\'';
  out += quote;
  for (const char32_t c : text) {
    const char32_t code = code_of(c);
    if (code == quote || code == '\\') {
      out += '\\', out += c;
    } else if (code == '\n' || code == '\r' || code == '\t') {
      out += '\\', out += code == '\n' ? 'n' : code == '\r' ? 'r' : 't';
    } else if (is_printable(c)) {
      out += c;
    } else {
      out += to_text(code < 0x100     ? "\\x" + hex(code, 2)
                     : code < 0x10000 ? "\\u" + hex(code, 4)
                                      : "\\U" + hex(code, 8));
    }
  }
  out += quote;
}

inline void append_repr(Text& out, const Value& v);

// What str(v) gives.
inline Text str(const Value& v) {
  if (v.text()) return spend(v.text()->size()), *v.text();
  Text out;
  if (!v.undefined()) append_repr(out, v);
  return out;
}

inline void append_repr(Text& out, const Value& v) {
  spend(kMade + v.size()), limit(out);
  const auto sequence = [&](const auto& items, const char* open, const char* close, auto&& append) {
    out += to_text(open);
    bool first = true;
    for (const auto& item : items) {
      if (!std::exchange(first, false)) out += to_text(", ");
      append(item);
    }
    out += to_text(close);
  };
  if (v.text()) {
    append_quoted(out, *v.text());
  } else if (const List* list = v.list()) {
    const bool tuple = list->kind == ListKind::tuple;
    expect(list->kind != ListKind::iterator, "an iterator is printed; make a list of it with |list");
    if (list->kind == ListKind::range) return void(out += list->shown);
    sequence(list->items, tuple ? "(" : "[", tuple ? list->items.size() == 1 ? ",)" : ")" : "]",
             [&](const Value& item) { append_repr(out, item); });
  } else if (v.dict()) {
    sequence(v.dict()->members, "{", "}", [&](const auto& member) {
      append_repr(out, member.first), out += to_text(": "), append_repr(out, member.second);
    });
  } else if (v.is<double>()) {
    out += to_text(python_float(v.to_double()));
  } else if (v.is<bool>()) {
    out += to_text(v.to_integer() ? "True" : "False");
  } else if (v.integer()) {
    out += to_text(std::to_string(v.to_integer()));
  } else {
    if (v.big()) return void(out += to_text(v.big()->digits));
    expect(!v.object(), "a function or namespace is printed");
    out += to_text(v.none() ? "None" : "Undefined");
  }
}

// --- JSON ---

struct JsonStyle {
  bool ascii = false;
  Text indent = {};  // of a level; empty: all in one line
  bool indented = false, sorted = false;
  Text comma = to_text(", "), colon = to_text(": ");
};

inline void append_json_string(Text& out, TextView text, bool ascii) {
  out += '"';
  for (const char32_t c : text) {
    const char32_t code = code_of(c);
    constexpr std::string_view escaped = "\"\\\n\r\t\f\b", letters = "\"\\nrtfb";
    const std::size_t at = code < 0x80 ? escaped.find(static_cast<char>(code)) : escaped.npos;
    if (at != escaped.npos) {
      out += '\\', out += static_cast<char32_t>(letters[at]) | (c & ~kCode);
    } else if (code >= 0x20 && !(ascii && code >= 0x7F)) {
      out += c;
    } else if (code < 0x10000) {
      out += to_text("\\u" + hex(code, 4));
    } else {
      const char32_t high = 0xD800 + ((code - 0x10000) >> 10), low = 0xDC00 + ((code - 0x10000) & 0x3FF);
      out += to_text("\\u" + hex(high, 4) + "\\u" + hex(low, 4));
    }
  }
  out += '"';
}

// What json.dumps(v) gives.
inline void append_json(Text& out, const Value& v, const JsonStyle& style, int level = 0) {
  spend(kMade + v.size()), limit(out);
  const auto new_line = [&](int levels) {
    if (!style.indented) return;
    out += '\n';
    for (int i = 0; i < levels; ++i) out += style.indent;
  };
  const auto sequence = [&](const auto& items, char32_t open, char32_t close, auto&& append) {
    out += open;
    bool first = true;
    for (const auto& item : items) {
      limit(out);
      if (!std::exchange(first, false)) out += style.comma;
      new_line(level + 1);
      append(item);
    }
    if (!items.empty()) new_line(level);
    out += close;
  };
  if (v.text()) {
    append_json_string(out, *v.text(), style.ascii);
  } else if (v.list() && v.list()->kind <= ListKind::tuple) {
    sequence(v.list()->items, '[', ']', [&](const Value& item) { append_json(out, item, style, level + 1); });
  } else if (v.dict()) {
    auto members = v.dict()->members;
    if (style.sorted) std::ranges::stable_sort(members, less, &std::pair<Value, Value>::first);
    sequence(members, '{', '}', [&](const auto& member) {
      const Value& key = member.first;
      expect(key.text() || key.number() || key.none(), "tojson: a key is neither a string nor a number");
      Text name;
      if (!key.text()) append_json(name, key, style);
      append_json_string(out, key.text() ? *key.text() : name, style.ascii);
      out += style.colon;
      append_json(out, member.second, style, level + 1);
    });
  } else if (v.is<bool>() || v.none()) {
    out += to_text(v.none() ? "null" : v.to_integer() ? "true" : "false");
  } else if (v.big()) {
    out += str(v);
  } else {
    expect(v.number(), "tojson: ", type_of(v), " is not JSON");
    const double x = v.to_double();
    out += std::isfinite(x) ? str(v) : to_text(std::isnan(x) ? "NaN" : x > 0 ? "Infinity" : "-Infinity");
  }
}

// A value of JSON, its text marked as data. The callers limit its depth.
inline Value from_json(const nlohmann::ordered_json& json, char32_t marks = kData) {
  if (json.is_string()) return to_text(json.get_ref<const std::string&>(), marks);
  if (json.is_array()) {
    List list;
    for (const auto& item : json) list.items.push_back(from_json(item, marks));
    return list;
  }
  if (json.is_object()) {
    expect(json.size() <= kMostMembers, "an object has more than ", kMostMembers, " members");
    Dict dict;
    for (const auto& [key, value] : json.items())
      dict.members.emplace_back(to_text(key, marks), from_json(value, marks));
    return dict;
  }
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_float()) return json.get<double>();
  const auto big = [](std::string digits) -> std::shared_ptr<const Object> {
    return std::make_shared<BigInteger>(std::move(digits));
  };
  if (json.is_binary()) return big({json.get_binary().begin(), json.get_binary().end()});
  if (json.is_number_unsigned() && json.get<std::uint64_t>() > INT64_MAX) return big(json.dump());
  if (json.is_number()) return json.get<std::int64_t>();
  return None{};
}

// Text without marks
inline Value unmarked(const Value& v) {
  Text text = *v.text();
  for (char32_t& c : text) c = code_of(c);
  return text;
}

// The value with more marks on its text.
inline Value marked(const Value& v, char32_t marks) {
  if (v.text()) {
    Text text = *v.text();
    for (char32_t& c : text) c |= marks;
    return text;
  }
  if (v.list()) {
    List list{{}, v.list()->kind};
    for (const Value& item : v.list()->items) list.items.push_back(marked(item, marks));
    return list;
  }
  if (!v.dict()) return v;
  Dict dict;
  for (const auto& [key, value] : v.dict()->members) dict.members.emplace_back(key, marked(value, marks));
  return dict;
}

}  // namespace streambp::jinja
