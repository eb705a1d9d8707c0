// The methods of strings, dicts and lists, as in Python. Methods that would change a value are missing, as in
// transformers' sandbox.
#pragma once

#include <map>

#include "text/template/operations.h"

namespace streambp::jinja {

inline Text text_at(const Arguments& a, std::size_t i, const char* name) {
  const Value v = a.at(i, name);
  expect(v.text(), "the argument ", quote(name), " is ", described(v), ", not a string");
  spend(v.size());
  return *v.text();
}
inline std::int64_t integer_at(const Arguments& a, std::size_t i, const char* name, std::int64_t otherwise) {
  const Value v = a.at(i, name, otherwise);
  expect(v.integer(), "the argument ", quote(name), " is ", described(v), ", not an integer");
  return v.to_integer();
}

// Does f hold for the argument, a string or a tuple of them?
template <class F>
bool any_text(const Arguments& a, F&& f) {
  expect(a.positional.size() == 1, "startswith and endswith: one argument is supported");
  const Value v = a.at(0, "prefix");
  const auto holds = [&](const Value& item) { return spend(item.size()), item.text() && f(*item.text()); };
  return v.text() ? holds(v) : std::ranges::any_of(elements_of(v), holds);
}

inline bool every(TextView text, bool (*holds)(char32_t)) { return !text.empty() && std::ranges::all_of(text, holds); }

inline Value place(std::size_t at) { return at == Text::npos ? std::int64_t{-1} : static_cast<std::int64_t>(at); }

inline Value occurrences(TextView text, TextView part) {
  expect(!part.empty(), "count: the substring is empty");
  std::int64_t count = 0;
  for (std::size_t at = 0; (at = find(text, part, at)) != text.npos; at += part.size()) ++count;
  return count;
}

// The only argument; Python's bounds are not supported
inline Text only_text(const Arguments& a, const char* name) {
  expect(a.positional.size() + a.named.size() == 1, "one argument is supported: ", quote(name));
  return text_at(a, 0, name);
}

// str.format with {}, {0} and {name}, without format specifications
inline Text with_fields(TextView form, const Arguments& a) {
  Text out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < form.size(); ++i) {
    const char32_t c = code_of(form[i]);
    const bool brace = c == '{' || c == '}', doubled = brace && i + 1 < form.size() && code_of(form[i + 1]) == c;
    if (!brace || doubled) {
      out += form[i];
      i += doubled;
      continue;
    }
    const std::size_t end = form.find('}', i);
    expect(c == '{' && end != form.npos, "format: single braces");
    const std::string name = to_utf8(form.substr(i + 1, end - i - 1));
    const bool number = name.size() < 6 && std::ranges::all_of(name, [](char d) { return d >= '0' && d <= '9'; });
    const Value v = a.at(name.empty() ? next++ : number ? std::stoul(name) : SIZE_MAX, name);
    expect(!v.undefined(), "format: the field {", name, "} is not given, or not supported");
    out += str(v);
    limit(out);
    i = end;
  }
  return out;
}

template <class T>
using Methods = std::map<std::string, Value (*)(const T&, const Arguments&)>;
using A = const Arguments&;

inline const Methods<Text>& string_methods() {
  using S = const Text&;
  const auto chars = [](A a) { return a.at(0, "chars", None{}); };
  const auto most = [](A a) { return integer_at(a, 1, "maxsplit", -1); };
  const auto separator = [](A a) { return a.at(0, "sep", None{}); };
  static const Methods<Text> methods = {
      {"strip", [](S s, A a) -> Value { return stripped(s, decltype(chars){}(a), true, true); }},
      {"lstrip", [](S s, A a) -> Value { return stripped(s, decltype(chars){}(a), true, false); }},
      {"rstrip", [](S s, A a) -> Value { return stripped(s, decltype(chars){}(a), false, true); }},
      {"split", [](S s, A a) { return split(s, decltype(separator){}(a), decltype(most){}(a), false); }},
      {"rsplit", [](S s, A a) { return split(s, decltype(separator){}(a), decltype(most){}(a), true); }},
      {"splitlines", [](S s, A a) -> Value { return lines_of(s, is_true(a.at(0, "keepends"))); }},
      {"startswith", [](S s, A a) -> Value { return any_text(a, [&](S part) { return s.starts_with(part); }); }},
      {"endswith", [](S s, A a) -> Value { return any_text(a, [&](S part) { return s.ends_with(part); }); }},
      {"removeprefix",
       [](S s, A a) -> Value {
         const Text part = text_at(a, 0, "prefix");
         return s.substr(s.starts_with(part) ? part.size() : 0);
       }},
      {"removesuffix",
       [](S s, A a) -> Value {
         const Text part = text_at(a, 0, "suffix");
         return s.substr(0, s.size() - (s.ends_with(part) ? part.size() : 0));
       }},
      {"replace",
       [](S s, A a) -> Value {
         return replaced(s, text_at(a, 0, "old"), text_at(a, 1, "new"), integer_at(a, 2, "count", -1));
       }},
      {"upper", [](S s, A) -> Value { return in_case(s, Case::upper); }},
      {"lower", [](S s, A) -> Value { return in_case(s, Case::lower); }},
      {"capitalize", [](S s, A) -> Value { return capitalised(s); }},
      {"title", [](S s, A) -> Value { return titled(s); }},
      {"find", [](S s, A a) { return place(find(s, only_text(a, "sub"))); }},
      {"rfind", [](S s, A a) { return place(find_last(s, only_text(a, "sub"))); }},
      {"index",
       [](S s, A a) {
         const std::size_t at = find(s, only_text(a, "sub"));
         expect(at != Text::npos, "index: the substring is not found");
         return place(at);
       }},
      {"count", [](S s, A a) { return occurrences(s, only_text(a, "sub")); }},
      {"join",
       [](S s, A a) -> Value {
         const std::vector<Value> parts = elements_of(a.at(0, "iterable"));
         for (const Value& part : parts) expect(part.text(), "join: ", described(part), " is not a string");
         return joined(parts, s);
       }},
      {"format", [](S s, A a) -> Value { return with_fields(s, a); }},
      {"isdigit", [](S s, A) -> Value { return every(s, is_digit); }}};
  return methods;
}

inline std::vector<Value> pairs_of(const Dict& dict) {
  std::vector<Value> pairs;
  for (const auto& [key, value] : dict.members) pairs.push_back({{key, value}, ListKind::tuple});
  return pairs;
}
inline std::vector<Value> values_of(const Dict& dict) {
  std::vector<Value> values;
  for (const auto& member : dict.members) values.push_back(member.second);
  return values;
}

inline const Methods<Dict>& dict_methods() {
  using D = const Dict&;
  static const Methods<Dict> methods = {{"items", [](D d, A) -> Value { return pairs_of(d); }},
                                        {"keys", [](D d, A) -> Value { return elements_of(d); }},
                                        {"values", [](D d, A) -> Value { return values_of(d); }},
                                        {"copy", [](D d, A) -> Value { return d; }},
                                        {"get", [](D d, A a) -> Value {
                                           const Value* found = d.find(a.at(0, "key"));
                                           return found ? *found : a.at(1, "default", None{});
                                         }}};
  return methods;
}

inline const Methods<List>& list_methods() {
  using L = const List&;
  static const Methods<List> methods = {
      {"count",
       [](L l, A a) -> Value {
         const Value x = a.at(0, "value");
         return std::int64_t{std::ranges::count_if(l.items, [&](const Value& item) { return equal(item, x); })};
       }},
      {"index", [](L l, A a) -> Value {
         const Value x = a.at(0, "value");
         const auto at = std::ranges::find_if(l.items, [&](const Value& item) { return equal(item, x); });
         expect(at != l.items.end(), "index: the list has no such item");
         return std::int64_t{at - l.items.begin()};
       }}};
  return methods;
}

// The method of a value, as a function, or an undefined value
inline Value method_of(const Value& v, TextView name) {
  const auto bound = [&]<class T>(const Methods<T>& methods) -> Value {
    const auto found = methods.find(to_utf8(name));
    if (found == methods.end()) return Undefined{"an attribute"};
    return function(
        [v, method = found->second](const Arguments& a) {
          spend(v.size());
          return method(*v.get<T>(), a);
        },
        v);
  };
  if (v.text()) return bound(string_methods());
  if (v.dict()) return bound(dict_methods());
  return v.list() ? bound(list_methods()) : Value(Undefined{"an attribute"});
}

}  // namespace streambp::jinja
