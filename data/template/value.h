// The values of a chat template, as in Python: what they are, how they compare and how they print.
//
// Values cannot be changed, as in transformers' sandbox. Only a namespace can, and the interpreter owns those.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "data/template/text.h"
#include "kernels/base/error.h"

namespace streambp::jinja {

// An error in a template, or one that the template raises.
struct TemplateError : Error {
  using Error::Error;
};
struct LocatedError : TemplateError {  // with its line
  using TemplateError::TemplateError;
};
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw TemplateError(message.str());
}
template <class... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) refuse(parts...);
}

struct Undefined {
  const char* what = "a value";
};
struct None {};
struct Value;
struct Arguments;

enum class ListKind { list, tuple, iterator };  // an iterator is what Python's generators give
// How deeply values are nested, and about how long it takes to read them all.
struct Extent {
  int depth = 1;
  std::size_t weight = 8;
};
struct List {
  std::vector<Value> items;
  ListKind kind = ListKind::list;
  Extent extent = {};
};
struct Dict {
  std::vector<std::pair<Value, Value>> members;  // in order
  Extent extent = {};

  const Value* find(const Value& key) const;
  const Value* member(std::string_view name) const;
};
// Something with attributes, or that can be called.
struct Object {
  Extent extent = {};  // of the values that it holds
  virtual ~Object() = default;
  virtual Value attribute(TextView name) const;
  virtual Value call(const Arguments& arguments) const;
  virtual bool callable() const { return true; }
};
struct Namespace final : Object {
  std::vector<std::pair<Text, Value>> members;

  Value attribute(TextView name) const override;
  void set(TextView name, Value value);
  bool callable() const override { return false; }
};

template <class T>
using Shared = std::shared_ptr<const T>;

struct Value {
  std::variant<Undefined, None, bool, std::int64_t, double, Shared<Text>, Shared<List>, Shared<Dict>, Shared<Object>,
               Namespace*>
      held;

  Value() = default;
  Value(None none) : held(none) {}
  Value(Undefined undefined) : held(undefined) {}
  Value(bool truth) : held(truth) {}
  Value(std::int64_t number) : held(number) {}
  Value(double number) : held(number) {}
  Value(Text text) : held(std::make_shared<const Text>(std::move(text))) {}
  Value(TextView text) : Value(Text(text)) {}
  Value(const char* text) : Value(to_text(text)) {}
  Value(List list);
  Value(std::vector<Value> items, ListKind kind = ListKind::list) : Value(List{std::move(items), kind}) {}
  Value(Dict dict);
  Value(std::shared_ptr<const Object> object) : held(std::move(object)) {}
  Value(Namespace* space) : held(space) {}

  template <class T>
  bool is() const {
    return std::holds_alternative<T>(held);
  }
  // null if it is something else
  template <class T>
  const T* get() const {
    const auto* shared = std::get_if<Shared<T>>(&held);
    return shared ? shared->get() : nullptr;
  }
  const Text* text() const { return get<Text>(); }
  const List* list() const { return get<List>(); }
  const Dict* dict() const { return get<Dict>(); }
  const Object* object() const { return is<Namespace*>() ? std::get<Namespace*>(held) : get<Object>(); }
  bool undefined() const { return is<Undefined>(); }
  bool none() const { return is<None>(); }
  bool integer() const { return is<std::int64_t>() || is<bool>(); }
  bool number() const { return integer() || is<double>(); }

  std::int64_t to_integer() const { return is<bool>() ? std::get<bool>(held) : std::get<std::int64_t>(held); }
  double to_double() const { return is<double>() ? std::get<double>(held) : static_cast<double>(to_integer()); }
  Extent extent() const {
    if (const auto* shared = get<Object>()) return shared->extent;
    return list() ? list()->extent : dict() ? dict()->extent : Extent{0, text() ? 8 + text()->size() : 8};
  }
  // Characters, items or members
  std::size_t size() const {
    return text() ? text()->size() : list() ? list()->items.size() : dict() ? dict()->members.size() : 0;
  }
};

inline const char* type_of(const Value& v) {
  constexpr const char* names[] = {"undefined", "none", "boolean", "integer",  "float",
                                   "string",    "list", "dict",    "function", "namespace"};
  return names[v.held.index()];
}

// For messages.
inline std::string described(const Value& v) {
  return v.undefined() ? std::string(std::get<Undefined>(v.held).what) + ", which is undefined" : type_of(v);
}

// Deeper values could overflow the stack when they are compared, printed or freed.
constexpr int kDeepest = 100;
constexpr std::size_t kHeaviest = std::size_t{1} << 40;
inline void extend(Extent& whole, const Value& part) {
  const Extent extent = part.extent();
  whole.depth = std::max(whole.depth, extent.depth + 1);
  whole.weight = std::min(kHeaviest, whole.weight + extent.weight);
  expect(whole.depth <= kDeepest, "values are nested more deeply than ", kDeepest, " levels");
}
inline Value::Value(List list) {
  for (const Value& item : list.items) extend(list.extent, item);
  held = std::make_shared<const List>(std::move(list));
}
inline Value::Value(Dict dict) {
  std::size_t keys = 0;
  for (const auto& [key, value] : dict.members) {
    extend(dict.extent, key), extend(dict.extent, value);
    keys += key.extent().weight;
  }
  // Members are found one by one.
  dict.extent.weight =
      std::min(kHeaviest, dict.extent.weight + dict.members.size() * std::min(keys, kHeaviest >> 20) / 8);
  held = std::make_shared<const Dict>(std::move(dict));
}
inline Value pair_of(Value a, Value b) { return Value({std::move(a), std::move(b)}, ListKind::tuple); }

// What a call passes.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<Text, Value>> named;

  // The argument of this place or name.
  Value at(std::size_t i, std::string_view name, Value otherwise = Undefined{"an argument"}) const {
    if (i < positional.size()) return positional[i];
    return find(name) ? *find(name) : std::move(otherwise);
  }
  const Value* find(std::string_view name) const {
    for (const auto& [key, value] : named)
      if (key == to_text(name)) return &value;
    return nullptr;
  }
};

// Wraps a C++ function.
struct Function final : Object {
  using Body = std::function<Value(const Arguments&)>;
  explicit Function(Body body) : body(std::move(body)) {}
  Value call(const Arguments& arguments) const override { return body(arguments); }
  const Body body;
};
// `bound`: the value that the function holds
inline Value function(Function::Body body, const Value& bound = {}) {
  const auto made = std::make_shared<Function>(std::move(body));
  extend(made->extent, bound);
  return std::shared_ptr<const Object>(made);
}

inline Value Object::attribute(TextView) const { return Undefined{"an attribute"}; }
inline Value Object::call(const Arguments&) const { refuse("this value cannot be called"); }

inline Value Namespace::attribute(TextView name) const {
  for (const auto& [key, value] : members)
    if (key == name) return value;
  return Undefined{"an attribute of a namespace"};
}
inline void Namespace::set(TextView name, Value value) {
  for (auto& [key, old] : members)
    if (key == name) return void(old = std::move(value));
  members.emplace_back(name, std::move(value));
}

// --- Truth, equality, order ---

inline bool is_true(const Value& v) {
  if (v.number()) return v.to_double() != 0;
  if (v.text()) return !v.text()->empty();
  if (v.list()) return !v.list()->items.empty() || v.list()->kind == ListKind::iterator;
  if (v.dict()) return !v.dict()->members.empty();
  return v.object() != nullptr;
}

inline bool equal(const Value& a, const Value& b) {
  if (a.is<double>() || b.is<double>()) return a.number() && b.number() && a.to_double() == b.to_double();
  if (a.integer()) return b.integer() && a.to_integer() == b.to_integer();
  if (a.held.index() != b.held.index()) return false;
  if (a.text()) return *a.text() == *b.text();
  if (a.list()) {
    return a.list()->kind == b.list()->kind &&
           std::ranges::equal(a.list()->items, b.list()->items, [](auto& x, auto& y) { return equal(x, y); });
  }
  if (a.dict()) {
    const auto& members = a.dict()->members;
    return members.size() == b.dict()->members.size() && std::ranges::all_of(members, [&](const auto& member) {
             const Value* other = b.dict()->find(member.first);
             return other && equal(member.second, *other);
           });
  }
  return a.object() == b.object();  // undefined and none too
}

inline bool less(const Value& a, const Value& b) {
  if (a.integer() && b.integer()) return a.to_integer() < b.to_integer();
  if (a.number() && b.number()) return a.to_double() < b.to_double();
  if (a.text() && b.text()) return *a.text() < *b.text();
  expect(a.list() && b.list(), "cannot order ", type_of(a), " and ", type_of(b));
  return std::ranges::lexicographical_compare(a.list()->items, b.list()->items, less);
}

constexpr std::size_t kMostMembers = 10'000;  // they are found one by one

inline const Value* Dict::find(const Value& key) const {
  for (const auto& [name, value] : members)
    if (equal(name, key)) return &value;
  return nullptr;
}
inline const Value* Dict::member(std::string_view name) const { return find(Value(to_text(name))); }

// A dict; of equal keys the last value counts.
inline Value dict_of(std::vector<std::pair<Value, Value>> members) {
  expect(members.size() <= kMostMembers, "a dict of more than ", kMostMembers, " members");
  Dict dict;
  std::map<TextView, std::size_t> texts;  // the places of such keys
  for (auto& [key, value] : members) {
    const auto same = [&](const auto& member) { return equal(member.first, key); };
    const auto found =
        key.text() ? dict.members.begin() +
                         static_cast<std::ptrdiff_t>(texts.try_emplace(*key.text(), dict.members.size()).first->second)
                   : std::ranges::find_if(dict.members, same);
    if (found == dict.members.end()) {
      dict.members.emplace_back(std::move(key), std::move(value));
    } else {
      found->second = std::move(value);
    }
  }
  return dict;
}

constexpr std::size_t kMostElements = 1'000'000;
constexpr std::size_t kLongestText = 1 << 26;

// The elements that a loop visits: of lists, characters of text, keys of dicts; none of an undefined value.
inline std::vector<Value> elements_of(const Value& v) {
  if (v.list()) return v.list()->items;
  std::vector<Value> elements;
  expect(!v.text() || v.text()->size() <= kMostElements, "a text of more than ", kMostElements,
         " characters is used as a list");
  if (v.text())
    for (const char32_t c : *v.text()) elements.emplace_back(Text(1, c));
  else if (v.dict())
    for (const auto& [key, value] : v.dict()->members) elements.push_back(key);
  else
    expect(v.undefined(), "cannot loop over ", type_of(v));
  return elements;
}

}  // namespace streambp::jinja
