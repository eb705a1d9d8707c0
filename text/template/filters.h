// The filters of Jinja, and `tojson` as transformers defines it.
#pragma once

#include "text/template/methods.h"

namespace streambp::jinja {

Value filtered(Run& run, const Value& v, const std::string& name, const Arguments& a);
bool passes(Run& run, const Value& v, const std::string& name, const Arguments& a);

// An item's attribute "a.b.0", as in map(attribute="a.b.0")
inline Value attribute_of(Value v, const Value& path) {
  if (path.integer()) return item_of(v, path);
  expect(path.text(), "an attribute is ", described(path), ", not a name");
  const Value names = split(*path.text(), Text(1, '.'), -1, false);
  for (const Value& name : names.list()->items) {
    if (v.undefined()) return v;
    const auto is_ascii_digit = [](char32_t c) { return code_of(c) >= '0' && code_of(c) <= '9'; };
    const bool number = every(*name.text(), is_ascii_digit) && name.text()->size() < 10;
    const Value key = number ? Value(std::int64_t{std::stol(to_utf8(*name.text()))}) : name;
    v = v.object() && !number ? v.object()->attribute(*name.text()) : item_of(v, key);
  }
  return v;
}

// Upper and lower case compare as equal unless case_sensitive is set
inline Value comparable(const Value& v, bool case_sensitive) {
  return v.text() && !case_sensitive ? Value(in_case(*v.text(), Case::lower)) : v;
}

// The arguments after the first `n`
inline Arguments rest_of(const Arguments& a, std::size_t n) {
  spend(8 * a.positional.size());
  Arguments rest = a;
  rest.positional.erase(rest.positional.begin(),
                        rest.positional.begin() + static_cast<std::ptrdiff_t>(std::min(n, rest.positional.size())));
  return rest;
}

// select, reject, selectattr and rejectattr
inline Value chosen(Run& run, const Value& v, const Arguments& a, bool by_attribute, bool wanted) {
  const std::size_t first = by_attribute;
  std::vector<Value> items;
  for (Value& item : is_true(v) ? elements_of(v) : items) {
    const Value x = by_attribute ? attribute_of(item, a.at(0, "attribute")) : item;
    const bool tested = a.positional.size() > first;
    const bool holds = tested ? passes(run, x, to_utf8(text_at(a, first, "test")), rest_of(a, first + 1)) : is_true(x);
    if (holds == wanted) items.push_back(std::move(item));
  }
  return {std::move(items), ListKind::iterator};
}

inline Value mapped(Run& run, const Value& v, const Arguments& a) {
  std::vector<Value> items;
  const Value* attribute = a.find("attribute");
  const Value* otherwise = a.find("default");
  for (const Value& item : is_true(v) ? elements_of(v) : items) {
    if (!attribute) {
      items.push_back(filtered(run, item, to_utf8(text_at(a, 0, "filter")), rest_of(a, 1)));
      continue;
    }
    Value found = attribute_of(item, *attribute);
    items.push_back(found.undefined() && otherwise ? *otherwise : std::move(found));
  }
  return {std::move(items), ListKind::iterator};
}

inline std::vector<Value> sorted(std::vector<Value> items, const Value& attribute, bool case_sensitive, bool reverse) {
  const auto key = [&](const Value& v) {
    return comparable(attribute.none() ? v : attribute_of(v, attribute), case_sensitive);
  };
  std::ranges::stable_sort(
      items, [&](const Value& a, const Value& b) { return reverse ? less(key(b), key(a)) : less(key(a), key(b)); });
  return items;
}

inline Value extreme(const Value& v, const Arguments& a, bool largest) {
  const Value attribute = a.at(1, "attribute", None{});
  const auto items = sorted(elements_of(v), attribute, is_true(a.at(0, "case_sensitive")), largest);
  return items.empty() ? Value(Undefined{"the extreme of an empty list"}) : items.front();
}

inline Value unique(const Value& v, const Arguments& a) {
  std::vector<Value> items, seen;
  for (Value& item : elements_of(v)) {
    Value key = comparable(item, is_true(a.at(0, "case_sensitive")));
    if (std::ranges::any_of(seen, [&](const Value& other) { return equal(key, other); })) continue;
    seen.push_back(std::move(key)), items.push_back(std::move(item));
  }
  return {std::move(items), ListKind::iterator};
}

// Pieces of `n` items (batch), or n pieces (slice), the last ones filled up
inline Value pieces(const Value& v, const Arguments& a, bool batches) {
  const std::vector<Value> items = elements_of(v);
  const Value n = a.at(0, batches ? "linecount" : "slices"), fill = a.at(1, "fill_with", None{});
  expect(n.integer() && n.to_integer() > 0 && n.to_integer() <= kMostRepeats, "batch and slice need a positive number");
  const auto count = static_cast<std::size_t>(n.to_integer());
  std::vector<Value> all;
  std::size_t begin = 0;
  for (std::size_t i = 0; batches ? begin < items.size() : i < count; ++i) {
    const bool longer = i < items.size() % count;
    const std::size_t size = batches ? std::min(count, items.size() - begin) : items.size() / count + longer;
    std::vector<Value> piece(items.begin() + static_cast<std::ptrdiff_t>(begin),
                             items.begin() + static_cast<std::ptrdiff_t>(begin + size));
    begin += size;
    const std::size_t missing = batches ? count - size : !longer;
    spend(8 * kMade * (1 + size + missing));
    if (!fill.none()) piece.resize(size + missing, fill);
    all.emplace_back(std::move(piece));
  }
  return {std::move(all), ListKind::iterator};
}

inline Value indented(const Value& v, const Arguments& a) {
  const Value width = a.at(0, "width", std::int64_t{4});
  expect(width.text() || (width.integer() && width.to_integer() <= 1000), "indent: a width of ", described(width));
  const auto spaces = width.text() ? 0 : static_cast<std::size_t>(std::max<std::int64_t>(0, width.to_integer()));
  const Text indent = width.text() ? *width.text() : Text(spaces, ' ');
  const bool first = is_true(a.at(1, "first")), blank = is_true(a.at(2, "blank"));
  const Text text = str(v) + Text(1, '\n');
  const std::vector<Value> all = lines_of(text, false);
  Text out;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Text& line = *all[i].text();
    if (i > 0) out += '\n';
    if (i == 0 ? first : blank || !line.empty()) out += indent;
    out += line;
    limit(out);
  }
  return out;
}

inline Value rounded(const Value& v, const Arguments& a) {
  expect(v.number(), "round: ", described(v), " is not a number");
  const Text method = a.positional.size() > 1 || a.find("method") ? text_at(a, 1, "method") : to_text("common");
  const std::int64_t precision = std::clamp<std::int64_t>(integer_at(a, 0, "precision", 0), -300, 300);
  const double scale = std::pow(10.0, static_cast<double>(precision)), x = v.to_double();
  if (method == to_text("ceil")) return (std::ceil(x * scale) + 0.0) / scale;
  if (method == to_text("floor")) return (std::floor(x * scale) + 0.0) / scale;
  if (v.integer() && precision >= 0) return v.to_integer();
  if (precision <= 0) {  // to a multiple of the unit, halves to even ones; a long double has all bits of both types
    const long double unit = std::pow(10.0L, static_cast<long double>(-precision)),
                      exact = v.integer() ? static_cast<long double>(v.to_integer()) : x, rest = std::fmod(exact, unit),
                      down = exact - rest, half = 2 * std::abs(rest);
    const bool away = half > unit || (half == unit && std::fmod(down / unit, 2.0L) != 0);
    const long double result = down + (away ? std::copysign(unit, exact) : 0);
    if (!v.integer()) return std::copysign(static_cast<double>(result), x);
    expect(std::abs(result) < 0x1p63L, "a number is too large");
    return static_cast<std::int64_t>(result);
  }
  char digits[400];
  std::snprintf(digits, sizeof digits, "%.*f", static_cast<int>(std::min<std::int64_t>(precision, 60)), x);
  return std::strtod(digits, nullptr);
}

// |int and |float
inline Value number_from(const Value& v, const Value& otherwise, bool whole) {
  expect(!v.undefined(), described(v));
  if (v.number()) {
    if (!whole) return v.to_double();
    if (v.integer()) return v.to_integer();
    if (!std::isfinite(v.to_double())) return otherwise;
    expect(std::abs(v.to_double()) < 9e18, "a number is too large");
    return static_cast<std::int64_t>(v.to_double());
  }
  expect(!v.big(), "a number is too large");
  if (!v.text()) return otherwise;
  std::string digits = to_utf8(without_ends(*v.text(), true, true, is_white));
  const auto digit = [&](std::size_t i) { return digits[i] >= '0' && digits[i] <= '9'; };
  for (std::size_t i = 1; i + 1 < digits.size(); ++i)  // "1_000"
    if (digits[i] == '_' && digit(i - 1) && digit(i + 1)) digits.erase(i, 1);
  const char* begin = digits.data() + digits.starts_with('+');
  const char* end = digits.data() + digits.size();
  std::int64_t integer = 0;
  if (const auto read = std::from_chars(begin, end, integer);
      whole && begin < end && read.ptr == end && read.ec == std::errc())
    return integer;
  double real = 0;
  const auto read = std::from_chars(begin, end, real);
  if (begin == end || read.ptr != end || read.ec != std::errc()) return otherwise;
  return whole ? number_from(real, otherwise, true) : Value(real);
}

// Jinja's title: words begin after spaces, hyphens and opening brackets
inline Text words_titled(TextView text) {
  Text out;
  bool inside = false;
  for (const char32_t c : text) {
    out += with_case(c, inside ? Case::lower : Case::upper);
    inside = !(is_white(c) || to_text("-({[<").find(c) != Text::npos);
  }
  return out;
}

inline Value to_json(const Value& v, const Arguments& a) {
  JsonStyle style{.ascii = is_true(a.at(0, "ensure_ascii"))};
  const Value indent = a.at(1, "indent", None{}), separators = a.at(2, "separators", None{});
  style.sorted = is_true(a.at(3, "sort_keys"));
  style.indented = !indent.none();
  if (indent.integer())
    style.indent = Text(static_cast<std::size_t>(std::clamp<std::int64_t>(indent.to_integer(), 0, 100)), ' ');
  if (indent.text()) style.indent = *indent.text();
  expect(style.indent.size() <= 1000, "tojson: an indent of more than 1000 characters");
  if (style.indented) style.comma = to_text(",");
  if (!separators.none()) {
    expect(separators.list() && separators.list()->items.size() == 2, "tojson: separators are two strings");
    style.comma = str(separators.list()->items[0]), style.colon = str(separators.list()->items[1]);
  }
  expect(style.comma.size() + style.colon.size() <= 1000, "tojson: separators of more than 1000 characters");
  Text out;
  append_json(out, v, style);
  return out;
}

inline Value length_of(const Value& v) {
  const bool sized = v.list() ? v.list()->kind != ListKind::iterator : v.text() || v.dict() || v.undefined();
  expect(sized, "length: ", described(v), " has none");
  return static_cast<std::int64_t>(v.size());
}

inline Value sum_of(const Value& v, const Arguments& a) {
  Value sum = a.at(1, "start", std::int64_t{0});
  const Value attribute = a.at(0, "attribute", None{});
  for (const Value& item : elements_of(v)) {
    const Value x = attribute.none() ? item : attribute_of(item, attribute);
    expect(x.number() && sum.number(), "sum: ", described(x), " is not a number");
    sum = x.integer() && sum.integer() ? of_integers(Operator::plus, sum.to_integer(), x.to_integer())
                                       : Value(sum.to_double() + x.to_double());
  }
  return sum;
}

using R = Run&;
using Filter = Value (*)(Run&, const Value&, const Arguments&);
using V = const Value&;

inline const std::map<std::string, Filter>& filters() {
  static const Filter length = [](R, V v, A) { return length_of(v); };
  static const Filter otherwise = [](R, V v, A a) {
    return v.undefined() || (is_true(a.at(1, "boolean")) && !is_true(v)) ? a.at(0, "default_value", Text()) : v;
  };
  static const std::map<std::string, Filter> all = {
      {"length", length},
      {"count", length},
      {"default", otherwise},
      {"d", otherwise},
      {"trim", [](R, V v, A a) -> Value { return stripped(str(v), a.at(0, "chars", None{}), true, true); }},
      {"upper", [](R, V v, A) -> Value { return in_case(str(v), Case::upper); }},
      {"lower", [](R, V v, A) -> Value { return in_case(str(v), Case::lower); }},
      {"capitalize", [](R, V v, A) -> Value { return capitalised(str(v)); }},
      {"title", [](R, V v, A) -> Value { return words_titled(str(v)); }},
      {"string", [](R, V v, A) -> Value { return str(v); }},
      {"safe",
       [](R, V v, A) -> Value {
         Text text = str(v);
         for (char32_t& c : text) c |= kSafe;
         return text;
       }},
      {"replace",
       [](R, V v, A a) -> Value {
         return replaced(str(v), str(a.at(0, "old")), str(a.at(1, "new")), integer_at(a, 2, "count", -1));
       }},
      {"indent", [](R, V v, A a) { return indented(v, a); }},
      {"format",
       [](R, V v, A a) -> Value { return formatted(str(v), Value(a.positional, ListKind::tuple)); }},
      {"tojson", [](R, V v, A a) { return to_json(v, a); }},
      {"join",
       [](R, V v, A a) -> Value {
         std::vector<Value> items = elements_of(v);
         const Value attribute = a.at(1, "attribute", None{});
         for (Value& item : items)
           if (!attribute.none()) item = attribute_of(item, attribute);
         return joined(items, str(a.at(0, "d", Text())));
       }},
      {"first",
       [](R, V v, A) {
         const auto items = elements_of(v);
         return items.empty() ? Value(Undefined{"the first item of an empty list"}) : items.front();
       }},
      {"last",
       [](R, V v, A) {
         const auto items = elements_of(v);
         return items.empty() ? Value(Undefined{"the last item of an empty list"}) : items.back();
       }},
      {"list", [](R, V v, A) -> Value { return elements_of(v); }},
      {"items",
       [](R, V v, A) -> Value {
         expect(v.dict() || v.undefined(), "items: ", described(v), " is not a dict");
         return {v.dict() ? pairs_of(*v.dict()) : std::vector<Value>(), ListKind::iterator};
       }},
      {"dictsort",
       [](R, V v, A a) -> Value {
         expect(v.dict(), "dictsort: ", described(v), " is not a dict");
         const bool by_value = a.at(1, "by", Text()).text() && *a.at(1, "by", Text()).text() == to_text("value");
         return sorted(pairs_of(*v.dict()), std::int64_t{by_value}, is_true(a.at(0, "case_sensitive")),
                       is_true(a.at(2, "reverse")));
       }},
      {"sort",
       [](R, V v, A a) -> Value {
         return sorted(elements_of(v), a.at(2, "attribute", None{}), is_true(a.at(1, "case_sensitive")),
                       is_true(a.at(0, "reverse")));
       }},
      {"min", [](R, V v, A a) { return extreme(v, a, false); }},
      {"max", [](R, V v, A a) { return extreme(v, a, true); }},
      {"unique", [](R, V v, A a) { return unique(v, a); }},
      {"reverse",
       [](R, V v, A) -> Value {
         if (v.text()) return Text(v.text()->rbegin(), v.text()->rend());
         std::vector<Value> items = elements_of(v);
         std::ranges::reverse(items);
         return {std::move(items), ListKind::iterator};
       }},
      {"map", [](R run, V v, A a) { return mapped(run, v, a); }},
      {"select", [](R run, V v, A a) { return chosen(run, v, a, false, true); }},
      {"reject", [](R run, V v, A a) { return chosen(run, v, a, false, false); }},
      {"selectattr", [](R run, V v, A a) { return chosen(run, v, a, true, true); }},
      {"rejectattr", [](R run, V v, A a) { return chosen(run, v, a, true, false); }},
      {"batch", [](R, V v, A a) { return pieces(v, a, true); }},
      {"slice", [](R, V v, A a) { return pieces(v, a, false); }},
      {"int", [](R, V v, A a) { return number_from(v, a.at(0, "default", std::int64_t{0}), true); }},
      {"float", [](R, V v, A a) { return number_from(v, a.at(0, "default", 0.0), false); }},
      {"round", [](R, V v, A a) { return rounded(v, a); }},
      {"abs",
       [](R, V v, A) -> Value {
         expect(v.number() && !(v.integer() && v.to_integer() == INT64_MIN), "abs: ", described(v));
         return v.integer() ? Value(std::abs(v.to_integer())) : Value(std::abs(v.to_double()));
       }},
      {"sum", [](R, V v, A a) { return sum_of(v, a); }}};
  return all;
}

inline Value filtered(Run& run, const Value& v, const std::string& name, const Arguments& a) {
  const auto found = filters().find(name);
  expect(found != filters().end(), "no filter is named ", quote(name));
  const Run::Level level(run);
  spend(v.size());
  return found->second(run, v, a);
}

}  // namespace streambp::jinja
