// The tests of Jinja: {{ value is name(argument) }}
#pragma once

#include "text/template/filters.h"

namespace streambp::jinja {

inline const std::map<std::string, Comparator>& tests() {
  static const auto remainder = [](V v, std::int64_t n) {
    expect(v.integer() && n != 0, "divisibility of ", described(v));
    return n == -1 ? 0 : v.to_integer() % n;
  };
  static const std::map<std::string, Comparator> all = {
      {"defined", [](V v, V) { return !v.undefined(); }},
      {"undefined", [](V v, V) { return v.undefined(); }},
      {"none", [](V v, V) { return v.none(); }},
      {"boolean", [](V v, V) { return v.is<bool>(); }},
      {"true", [](V v, V) { return v.is<bool>() && is_true(v); }},
      {"false", [](V v, V) { return v.is<bool>() && !is_true(v); }},
      {"integer", [](V v, V) { return v.is<std::int64_t>() || v.big(); }},
      {"float", [](V v, V) { return v.is<double>(); }},
      {"number", [](V v, V) { return v.number() || v.big(); }},
      {"string", [](V v, V) { return v.text() != nullptr; }},
      {"mapping", [](V v, V) { return v.dict() != nullptr; }},
      {"sequence",
       [](V v, V) {
         return v.text() || v.dict() || v.undefined() || (v.list() && v.list()->kind != ListKind::iterator);
       }},
      {"iterable", [](V v, V) { return v.text() || v.list() || v.dict() || v.undefined(); }},
      {"callable", [](V v, V) { return v.undefined() || (v.object() && v.object()->callable()); }},
      {"odd", [](V v, V) { return remainder(v, 2) != 0; }},
      {"even", [](V v, V) { return remainder(v, 2) == 0; }},
      {"divisibleby", [](V v, V x) { return x.integer() && remainder(v, x.to_integer()) == 0; }},
      {"lower",
       [](V v, V) { return str(v) == in_case(str(v), Case::lower) && str(v) != in_case(str(v), Case::upper); }},
      {"upper",
       [](V v, V) { return str(v) == in_case(str(v), Case::upper) && str(v) != in_case(str(v), Case::lower); }},
      {"in", is_in},
      {"sameas", [](V v, V x) { return v.held.index() == x.held.index() && equal(v, x); }},
      {"eq", equal},
      {"equalto", equal},
      {"==", equal},
      {"ne", not_equal},
      {"!=", not_equal},
      {"lt", less},
      {"lessthan", less},
      {"<", less},
      {"le", less_or_equal},
      {"<=", less_or_equal},
      {"gt", greater},
      {"greaterthan", greater},
      {">", greater},
      {"ge", greater_or_equal},
      {">=", greater_or_equal},
      {"filter", [](V v, V) { return v.text() && filters().contains(to_utf8(*v.text())); }}};
  return all;
}

inline bool passes(Run& run, const Value& v, const std::string& name, const Arguments& a) {
  const auto found = tests().find(name);
  expect(found != tests().end(), "no test is named ", quote(name));
  const Run::Level level(run);
  const Value argument = a.at(0, "other");
  spend(v.size() + argument.size());
  return found->second(v, argument);
}

}  // namespace streambp::jinja
