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

#include "kernels/base/error.h"
#include "text/template/text.h"

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

// --- Work ---
//
// What a template may still do on this thread: one for about each character or value that it reads, kMade for each character
// that it makes. It is counted here, where values are made, compared and printed, so a filter or method cannot forget it.
inline constinit thread_local std::size_t* budget = nullptr;  // null: without limit
constexpr std::size_t kMade = 4;

inline void spend(std::size_t work) {
  if (!budget) return;
  expect(work <= *budget, "the template does too much work; does it repeat itself without end?");
  *budget -= work;
}
// Refuses a text of more characters than can be paid for, before it is made.
inline void limit(std::size_t characters) {
  expect(!budget || characters <= *budget / kMade,
         "the template does too much work; does it repeat itself without end?");
}
inline void limit(TextView text) { limit(text.size()); }

inline bool same(TextView a, TextView b) { return spend(1 + (a.size() == b.size() ? a.size() : 0)), a == b; }

struct Undefined {
  const char* what = "a value";
};
struct None {};
struct Value;
struct Arguments;

enum class ListKind { list, tuple, iterator, range };  // an iterator is what Python's generators give
struct List {
  std::vector<Value> items;
  ListKind kind = ListKind::list;
  int depth = 1;    // how deeply values are nested
  Text shown = {};  // a range, printed
};
struct Dict {
  std::vector<std::pair<Value, Value>> members;  // in order
  int depth = 1;

  const Value* find(const Value& key) const;
  const Value* member(std::string_view name) const;
};
// Something with attributes, or that can be called.
struct Object {
  int depth = 1;
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

// An integer of more than 64 bits, which can be printed and tested for equality.
struct BigInteger final : Object {
  explicit BigInteger(std::string digits) : digits(std::move(digits)) {}
  bool callable() const override { return false; }
  const std::string digits;
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
  Value(Text text) : held((spend(kMade * (2 + text.size())), std::make_shared<const Text>(std::move(text)))) {}
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
  const BigInteger* big() const { return dynamic_cast<const BigInteger*>(object()); }
  bool undefined() const { return is<Undefined>(); }
  bool none() const { return is<None>(); }
  bool integer() const { return is<std::int64_t>() || is<bool>(); }
  bool number() const { return integer() || is<double>(); }

  std::int64_t to_integer() const { return is<bool>() ? std::get<bool>(held) : std::get<std::int64_t>(held); }
  double to_double() const { return is<double>() ? std::get<double>(held) : static_cast<double>(to_integer()); }
  int depth() const {
    if (const auto* shared = get<Object>()) return shared->depth;
    return list() ? list()->depth : dict() ? dict()->depth : 0;
  }
  // Characters, items or members
  std::size_t size() const {
    return text() ? text()->size() : list() ? list()->items.size() : dict() ? dict()->members.size() : 0;
  }
};

inline const char* type_of(const Value& v) {
  constexpr const char* names[] = {"undefined", "none", "boolean", "integer",  "float",
                                   "string",    "list", "dict",    "function", "namespace"};
  return v.big() ? "integer of more than 64 bits" : names[v.held.index()];
}

// For messages.
inline std::string described(const Value& v) {
  return v.undefined() ? std::string(std::get<Undefined>(v.held).what) + ", which is undefined" : type_of(v);
}

// Deeper values could overflow the stack when they are compared, printed or freed.
constexpr int kDeepest = 100;
inline void deepen(int& depth, const Value& part) {
  depth = std::max(depth, part.depth() + 1);
  expect(depth <= kDeepest, "values are nested more deeply than ", kDeepest, " levels");
}
inline Value::Value(List list) {
  spend(8 * kMade * (1 + list.items.size()));
  for (const Value& item : list.items) deepen(list.depth, item);
  held = std::make_shared<const List>(std::move(list));
}
inline Value::Value(Dict dict) {
  spend(16 * kMade * (1 + dict.members.size()));
  for (const auto& [key, value] : dict.members) deepen(dict.depth, key), deepen(dict.depth, value);
  held = std::make_shared<const Dict>(std::move(dict));
}

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
    const Text wanted = to_text(name);
    spend(wanted.size());
    for (const auto& [key, value] : named)
      if (same(key, wanted)) return &value;
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
  deepen(made->depth, bound);
  return std::shared_ptr<const Object>(made);
}

inline Value Object::attribute(TextView) const { return Undefined{"an attribute"}; }
inline Value Object::call(const Arguments&) const { refuse("this value cannot be called"); }

inline Value Namespace::attribute(TextView name) const {
  for (const auto& [key, value] : members)
    if (same(key, name)) return value;
  return Undefined{"an attribute of a namespace"};
}
inline void Namespace::set(TextView name, Value value) {
  for (auto& [key, old] : members)
    if (same(key, name)) return void(old = std::move(value));
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
  spend(8);
  if (a.is<double>() || b.is<double>()) return a.number() && b.number() && a.to_double() == b.to_double();
  if (a.integer()) return b.integer() && a.to_integer() == b.to_integer();
  if (a.held.index() != b.held.index()) return false;
  if (a.text()) return same(*a.text(), *b.text());
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
  if (a.big() && b.big()) return a.big()->digits == b.big()->digits;
  return a.object() == b.object();  // undefined and none too
}

inline bool less(const Value& a, const Value& b) {
  spend(8 + std::min(a.size(), b.size()));
  if (a.integer() && b.integer()) return a.to_integer() < b.to_integer();
  if (a.number() && b.number()) return a.to_double() < b.to_double();
  if (a.text() && b.text()) return *a.text() < *b.text();
  expect(a.list() && b.list() && a.list()->kind == b.list()->kind, "cannot order ", type_of(a), " and ", type_of(b));
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
    spend(16 * (1 + key.size()));
    const auto is_key = [&](const auto& member) { return equal(member.first, key); };
    const auto found =
        key.text() ? dict.members.begin() +
                         static_cast<std::ptrdiff_t>(texts.try_emplace(*key.text(), dict.members.size()).first->second)
                   : std::ranges::find_if(dict.members, is_key);
    if (found == dict.members.end()) {
      dict.members.emplace_back(std::move(key), std::move(value));
    } else {
      found->second = std::move(value);
    }
  }
  return dict;
}

constexpr std::size_t kMostElements = 1'000'000;

// The elements that a loop visits: of lists, characters of text, keys of dicts; none of an undefined value.
inline std::vector<Value> elements_of(const Value& v) {
  spend(v.size());
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
