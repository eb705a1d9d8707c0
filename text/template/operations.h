// What expressions, filters and methods share: items, slices, membership, formatting and Python's functions of strings.
#pragma once

#include "text/template/run.h"

namespace streambp::jinja {

constexpr std::int64_t kMostRepeats = 1'000'000;

inline void limit(const std::vector<Value>& parts) {
  expect(parts.size() <= kMostElements, "a list of more than ", kMostElements, " items");
}

enum class Operator { plus, minus, times, divide, floor_divide, modulo, power, join };

// a op b for integers, as in Python, but errors beyond 64 bits.
inline Value of_integers(Operator op, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  bool overflow = false;
  if (op == Operator::plus) {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (op == Operator::minus) {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (op == Operator::times) {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if (op == Operator::power) {
    result = 1;
    overflow = b > 64 && (a < -1 || a > 1);
    for (b = b > 64 ? 64 + b % 2 : b; b > 0 && !overflow; --b) overflow = __builtin_mul_overflow(result, a, &result);
  } else {
    expect(b != 0, "division by zero");
    if (b == -1) return op == Operator::modulo ? Value(std::int64_t{0}) : of_integers(Operator::minus, 0, a);
    const std::int64_t round_down = a % b != 0 && (a < 0) != (b < 0);
    result = op == Operator::modulo ? a % b + round_down * b : a / b - round_down;
  }
  expect(!overflow, "a number is too large");
  return result;
}

inline Value of_reals(Operator op, double a, double b) {
  if (op == Operator::plus) return a + b;
  if (op == Operator::minus) return a - b;
  if (op == Operator::times) return a * b;
  if (op == Operator::power) return std::pow(a, b);
  expect(b != 0, "division by zero");
  if (op == Operator::divide) return a / b;
  if (op == Operator::floor_divide) return std::floor(a / b);
  const double rest = std::fmod(a, b);
  return rest == 0 ? std::copysign(0.0, b) : (rest < 0) != (b < 0) ? rest + b : rest;
}

// v[i], or an undefined value
inline Value item_of(const Value& v, const Value& i) {
  if (v.dict()) {
    const Value* found = v.dict()->find(i);
    return found ? *found : Value(Undefined{"a member of a dict"});
  }
  if (!i.integer()) return Undefined{"an item"};
  std::int64_t at = i.to_integer();
  if (at < 0) at += static_cast<std::int64_t>(v.size());
  if (at < 0 || std::cmp_greater_equal(at, v.size())) return Undefined{"an item"};
  const auto position = static_cast<std::size_t>(at);
  return v.text() ? Value(Text(1, (*v.text())[position])) : v.list()->items[position];
}

// v[from:to:step] as in Python; each bound may be none
inline Value slice_of(const Value& v, const Value& from, const Value& to, const Value& step) {
  expect(v.text() || v.list(), "a slice of ", described(v));
  const auto size = static_cast<std::int64_t>(v.size());
  const std::int64_t stride = step.none() ? 1 : step.to_integer();
  expect(stride != 0 && stride != INT64_MIN, "a slice cannot have this step");
  const auto bound = [&](const Value& given, std::int64_t otherwise) {
    if (given.none()) return otherwise;
    const std::int64_t at =
        given.to_integer() < 0 ? std::max(given.to_integer(), -size - 1) + size : given.to_integer();
    return stride > 0 ? std::clamp<std::int64_t>(at, 0, size) : std::clamp<std::int64_t>(at, -1, size - 1);
  };
  const std::int64_t begin = bound(from, stride > 0 ? 0 : size - 1), end = bound(to, stride > 0 ? size : -1);
  Text text;
  List list{{}, !v.list() ? ListKind::list : v.list()->kind == ListKind::range ? ListKind::iterator : v.list()->kind};
  for (std::int64_t i = begin; stride > 0 ? i < end : i > end;) {
    if (v.text()) text += (*v.text())[static_cast<std::size_t>(i)];
    if (v.list()) list.items.push_back(v.list()->items[static_cast<std::size_t>(i)]);
    if (stride > 0 ? stride >= end - i : stride <= end - i) break;
    i += stride;
  }
  return v.text() ? Value(std::move(text)) : Value(std::move(list));
}

// Is `part` at this place? Every compared character is paid for.
inline bool is_at(TextView text, std::size_t at, TextView part) {
  std::size_t same = 0;
  while (same < part.size() && code_of(text[at + same]) == code_of(part[same])) ++same;
  spend(1 + same);
  return same == part.size();
}
// The first place of `part` at or after `from`, or the last place.
inline std::size_t find(TextView text, TextView part, std::size_t from = 0) {
  for (std::size_t at = from; at + part.size() <= text.size(); ++at)
    if (is_at(text, at, part)) return at;
  return text.npos;
}
inline std::size_t find_last(TextView text, TextView part) {
  for (std::size_t places = text.size() + 1; places > part.size(); --places)
    if (const std::size_t at = places - 1 - part.size(); is_at(text, at, part)) return at;
  return text.npos;
}

// x in whole
inline bool is_in(const Value& x, const Value& whole) {
  if (whole.dict()) return !item_of(whole, x).undefined();
  if (whole.text()) {
    expect(x.text(), "a string cannot contain ", described(x));
    return find(*whole.text(), *x.text()) != Text::npos;
  }
  const std::vector<Value> elements = elements_of(whole);
  return std::ranges::any_of(elements, [&](const Value& element) { return equal(element, x); });
}

// Comparisons, of which equal, less and is_in are three.
using Comparator = bool (*)(const Value&, const Value&);
inline bool not_equal(const Value& a, const Value& b) { return !equal(a, b); }
inline bool less_or_equal(const Value& a, const Value& b) { return less(a, b) || equal(a, b); }
inline bool greater(const Value& a, const Value& b) { return less(b, a); }
inline bool greater_or_equal(const Value& a, const Value& b) { return less(b, a) || equal(a, b); }
inline bool is_not_in(const Value& a, const Value& b) { return !is_in(a, b); }

// --- Strings ---

enum class Case { lower, upper, title };

// A letter in Python's upper, lower or title case. Some small letters become several, "ß" and ligatures such as "ﬁ".
inline Text with_case(char32_t c, Case wanted) {
  const auto code = static_cast<utf8proc_int32_t>(code_of(c));
  const bool lower = wanted == Case::lower, sharp = code == 0xDF;
  const auto one = lower                   ? utf8proc_tolower(code)
                   : wanted == Case::upper ? utf8proc_toupper(code)
                                           : utf8proc_totitle(code);
  utf8proc_int32_t parts[32] = {'s', 's'};
  constexpr auto kParts = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  int boundary = 0;
  const bool several = !lower && utf8proc_category(code) == UTF8PROC_CATEGORY_LL && code >= 0x80 && one == code;
  const auto count = sharp && !lower ? 2 : several ? utf8proc_decompose_char(code, parts, 32, kParts, &boundary) : 1;
  if (lower && code == 0x130) return Text{'i' | (c & ~kCode), 0x307 | (c & ~kCode)};
  if (count < 2) return Text(1, static_cast<char32_t>(one) | (c & ~kCode));
  Text all;
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    const auto part = i == 0 || wanted == Case::upper ? utf8proc_toupper(parts[i]) : parts[i];
    all += static_cast<char32_t>(part) | (c & ~kCode);
  }
  return all;
}
inline Text in_case(TextView text, Case wanted) {
  Text out;
  for (const char32_t c : text) out += with_case(c, wanted);
  return out;
}
inline Text capitalised(TextView text) {
  return in_case(text.substr(0, 1), Case::title) +
         in_case(text.substr(std::min<std::size_t>(1, text.size())), Case::lower);
}
inline bool is_letter(char32_t c) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(code_of(c)));
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}
inline Text titled(TextView text) {
  Text out;
  bool inside = false;
  for (const char32_t c : text) out += with_case(c, inside ? Case::lower : Case::title), inside = is_letter(c);
  return out;
}
inline bool is_digit(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(code_of(c))) == UTF8PROC_CATEGORY_ND;
}

// a + b; the |safe one escapes the other for HTML
inline Text sum_of(const Text& a, const Text& b) {
  const auto safe = [](const Text& text) { return !text.empty() && (text[0] & kSafe) != 0; };
  if (!safe(a) && !safe(b)) return a + b;
  Text out;
  for (const Text* text : {&a, &b}) {
    for (const char32_t c : *text) {
      constexpr std::pair<char32_t, const char*> escapes[] = {
          {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'\'', "&#39;"}, {'"', "&#34;"}};
      const auto escape = std::ranges::find(escapes, code_of(c), &std::pair<char32_t, const char*>::first);
      if (safe(*text) || escape == std::end(escapes)) {
        out += c | kSafe;
      } else {
        out += to_text(escape->second, (c & ~kCode) | kSafe);
      }
    }
  }
  return out;
}

// strip(characters): without them, or without white space
inline Text stripped(TextView text, const Value& characters, bool left, bool right) {
  if (characters.none() || characters.undefined()) return Text(without_ends(text, left, right, is_white));
  expect(characters.text(), "strip: the characters are ", described(characters));
  return Text(without_ends(text, left, right, [&](char32_t c) {
    spend(characters.text()->size());
    return characters.text()->find(c) != Text::npos;
  }));
}

inline Text replaced(TextView text, TextView from, TextView to, std::int64_t most) {
  Text out;
  std::size_t done = 0;
  for (; most != 0; --most) {
    limit(out);
    if (from.empty()) {  // between all characters
      out += to;
      if (done == text.size()) return out;
      out += text[done++];
      continue;
    }
    const std::size_t at = find(text, from, done);
    if (at == text.npos) break;
    out += text.substr(done, at - done);
    out += to;
    done = at + from.size();
  }
  return out += text.substr(done);
}

inline Value split(TextView text, const Value& separator, std::int64_t most, bool from_right) {
  std::vector<Value> parts;
  const bool spaces = separator.none();
  expect(spaces || (separator.text() && !separator.text()->empty()), "split: the separator is empty or no string");
  const auto limited = [&] { return most >= 0 && std::cmp_greater_equal(parts.size(), most); };
  if (spaces) {
    for (text = without_ends(text, !from_right, from_right, is_white); !text.empty() && !limited();
         text = without_ends(text, !from_right, from_right, is_white)) {
      std::size_t n = 0;
      while (n < text.size() && !is_white(from_right ? text[text.size() - 1 - n] : text[n])) ++n;
      limit(parts);
      parts.emplace_back(from_right ? text.substr(text.size() - n) : text.substr(0, n));
      from_right ? text.remove_suffix(n) : text.remove_prefix(n);
    }
    if (!text.empty()) parts.emplace_back(text);
  } else {
    const TextView mark = *separator.text();
    while (!limited()) {
      const std::size_t at = from_right ? find_last(text, mark) : find(text, mark);
      if (at == text.npos) break;
      limit(parts);
      const TextView after = text.substr(at + mark.size());
      parts.emplace_back(from_right ? after : text.substr(0, at));
      text = from_right ? text.substr(0, at) : after;
    }
    parts.emplace_back(text);
  }
  if (from_right) std::ranges::reverse(parts);
  return parts;
}

inline Text joined(const std::vector<Value>& parts, TextView between) {
  Text out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += between;
    out += str(parts[i]);
    limit(out);
  }
  for (char32_t& c : out) c &= ~kSafe;
  return out;
}

// The lines, with their ends or without
inline std::vector<Value> lines_of(TextView text, bool with_ends) {
  std::vector<Value> lines;
  while (!text.empty()) {
    const auto is_end = [](char32_t c) {
      const char32_t code = code_of(c);
      return (code >= 0xA && code <= 0xD) || (code >= 0x1C && code <= 0x1E) || code == 0x85 || code == 0x2028 ||
             code == 0x2029;
    };
    const auto end = static_cast<std::size_t>(std::ranges::find_if(text, is_end) - text.begin());
    std::size_t next = std::min(end + 1, text.size());
    if (next < text.size() && code_of(text[end]) == '\r' && code_of(text[next]) == '\n') ++next;
    limit(lines);
    lines.emplace_back(text.substr(0, with_ends ? next : end));
    text.remove_prefix(next);
  }
  return lines;
}

// form % values, with %s, %d and %%
inline Text formatted(TextView form, const Value& values) {
  const bool several = values.list() && values.list()->kind == ListKind::tuple;
  const std::vector<Value> all = several ? values.list()->items : std::vector<Value>{values};
  Text out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < form.size(); ++i) {
    if (form[i] != U'%') {
      out += form[i];
      continue;
    }
    const char32_t kind = ++i < form.size() ? code_of(form[i]) : 0;
    expect(kind == '%' || kind == 's' || kind == 'd', "a format other than %s, %d and %% is not supported");
    if (kind == '%') {
      out += form[i];
      continue;
    }
    limit(out);
    expect(next < all.size() && (kind == 's' || all[next].integer()), "a format has no value that fits");
    out += str(kind == 's' || !all[next].is<bool>() ? all[next] : Value(all[next].to_integer()));
    ++next;
  }
  expect(next == all.size() || values.dict() || values.undefined() || (values.list() && !several),
         "a format has more values than it prints");
  return out;
}

}  // namespace streambp::jinja
