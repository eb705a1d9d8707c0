// The regular expressions of tokenizer.json files: Oniguruma's syntax, matched by PCRE2.
//
// The two agree on what published tokenizers use and differ elsewhere. An expression that PCRE2 would interpret
// differently is translated, or refused with the reason.
#pragma once

#include <utility>

#include "text/regular_expression.h"
#include "text/tokenizer/unicode_versions.h"
#include "text/utf8.h"

namespace streambp {

// From Oniguruma's syntax to PCRE2's.
class Translation {
 public:
  Translation(const std::string& where, std::string_view source) : where_(where), source_(source), rest_(source) {
    while (!rest_.empty()) piece();
  }

  std::string result;

 private:
  // \s of Oniguruma; PCRE2 adds U+180E.
  static constexpr std::string_view kSpaces =
      R"(\x09-\x0D\x20\x85\xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(where_, ": the regular expression ", excerpt(source_), " is not supported: ", parts...);
  }
  bool begins(std::string_view text) const { return rest_.substr(0, text.size()) == text; }
  std::string_view take(std::size_t count) {
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  void copy(std::size_t count) { result += take(count); }

  void piece() {
    if (begins("\\")) return escape(Place::outside);
    if (begins("[")) return char_class();
    if (begins("(?")) return group();
    if (begins("(*")) refuse("(*");
    if (begins("{")) return interval();
    copy(1);
  }

  void group() {
    if (begins("(?i:")) check_folding();
    for (const std::string_view opening : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (begins(opening)) return copy(opening.size());
    }
    refuse("the group ", rest_.substr(0, 4));
  }

  // With (?i:, Oniguruma matches some characters with two letters: U+00DF with "ss", U+FB01 with "fi".
  void check_folding() const {
    const std::string_view inside = rest_.substr(4, rest_.find(')') - 4);
    std::string lower;
    for (const char c : inside) lower += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 'a' - 'A' : c);
    if (bytes_below(inside, 0x80) < inside.size()) refuse("characters beyond ASCII inside (?i:");
    if (inside.find('(') != std::string_view::npos) refuse("a group inside (?i:");
    for (const char* pair : {"ss", "st", "ff", "fi", "fl"}) {
      if (lower.find(pair) != std::string::npos) refuse(pair, " inside (?i:");
    }
  }

  void interval() {
    const std::size_t end = rest_.find('}');
    const std::string_view inside = rest_.substr(1, end == std::string_view::npos ? end : end - 1);
    const bool plain = end != std::string_view::npos && !inside.empty() && inside[0] != ',' &&
                       inside.find_first_not_of("0123456789,") == std::string_view::npos;
    if (!plain) refuse("a { that starts no repetition");
    copy(end + 1);
    if (begins("+") || begins("?")) refuse("{", inside, "} followed by ", rest_[0]);
  }

  void char_class() {
    const bool negated = begins("[^");
    copy(negated ? 2 : 1);
    if (begins("]")) refuse("a character class that is empty or starts with ]");
    while (!begins("]")) {
      if (rest_.empty()) refuse("a character class without ]");
      if (begins("[")) refuse("a [ inside a character class; write \\[");
      if (begins("&&")) refuse("&& inside a character class");
      if (begins("\\")) {
        escape(Place::in_class);
      } else {
        copy(1);
      }
    }
    copy(1);
  }

  enum class Place { outside, in_class };  // of an escape: outside or inside a character class

  void escape(Place place) {
    take(1);
    if (rest_.empty()) refuse("a \\ at the end");
    const char c = take(1)[0];
    const auto add = [&](bool negated, const std::string& characters) {
      if (place == Place::in_class && negated) refuse("\\", c, " inside a character class");
      result += place == Place::in_class ? characters : (negated ? "[^" : "[") + characters + "]";
    };
    if (c == 's' || c == 'S') return add(c == 'S', std::string(kSpaces));
    if (c == 'd' || c == 'D') return add(c == 'D', property("Nd"));
    if (c == 'p' || c == 'P') {
      const std::size_t end = rest_.find('}');
      if (!begins("{") || end == std::string_view::npos || begins("{^")) refuse("a property other than \\p{Name}");
      const std::string name(rest_.substr(1, end - 1));
      take(end + 1);
      return add(c == 'P', property(name));
    }
    if (c == 'x') {
      if (!begins("{")) refuse("\\x other than \\x{code}");
      result += "\\x";
      return copy(rest_.find('}') + 1);
    }
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (letter && std::string_view("rntf").find(c) == std::string_view::npos) refuse("\\", c);
    (result += '\\') += c;
  }

  // Adds the characters that are newer than PCRE2's version of Unicode.
  std::string property(const std::string& name) const {
    std::string later;
    bool known = false;
    for (const auto& [kind, ranges] : unicode::kLater) {
      if (kind != name && !(name.size() == 1 && name != "C" && kind.size() == 2 && kind[0] == name[0])) continue;
      known = true;
      later += ranges;
    }
    if (!known) refuse("\\p{", name, "}");
    return (name.size() > 2 ? "\\p{sc:" : "\\p{") + name + "}" + later;
  }

  const std::string& where_;
  std::string_view source_, rest_;
};

enum class Span { match, gap };

// Finds all matches of a regular expression or a plain string. Matches are never empty.
class Pattern {
 public:
  // A plain string.
  static Pattern literal(std::string text) {
    Pattern pattern;
    pattern.text_ = std::move(text);
    return pattern;
  }

  // An expression in Oniguruma's syntax. `where` is for messages.
  static Pattern expression(const std::string& where, std::string_view source) {
    Pattern pattern;
    pattern.text_ = where + ": the regular expression " + excerpt(source);
    const CompiledExpression compiled =
        compile_expression("(*LF)" + Translation(where, source).result,  // lines end with LF
                           PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_USE_OFFSET_LIMIT);
    require(compiled.code != nullptr, pattern.text_, " cannot be used: ", compiled.error);
    pattern.code_ = compiled.code;
    pcre2_pattern_info(pattern.code_.get(), PCRE2_INFO_MINLENGTH, &pattern.shortest_);
    require(pattern.shortest_ > 0, pattern.text_, " is not supported: it can match the empty string");
    return pattern;
  }

  // The fewest bytes of a match.
  std::size_t shortest() const { return code_ ? shortest_ : text_.size(); }
  bool one_character() const { return !code_ && first_character(text_).bytes == text_.size(); }

  // Calls f(begin, end, span) for every match and every gap between matches, in order. The text is valid UTF-8.
  template <class F>
  void for_each(std::string_view text, F&& f) const {
    Effort effort(text.size());
    std::size_t done = 0;
    for (std::size_t begin, end = 0; find(text, begin, end, effort); done = end) {
      if (begin > done) f(done, begin, Span::gap);
      f(begin, end, Span::match);
    }
    if (done < text.size()) f(done, text.size(), Span::gap);
  }

 private:
  // The matching state of one thread. Long texts can need a larger stack than the thread has.
  struct Matcher {
    Matcher() {
      require(data != nullptr && context != nullptr, "out of memory");
      pcre2_set_heap_limit(context, kMostMemory >> 10);
    }
    ~Matcher() {
      pcre2_match_data_free(data);
      pcre2_match_context_free(context);
      if (stack) pcre2_jit_stack_free(stack);
    }
    Matcher(const Matcher&) = delete;

    pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
    pcre2_match_context* context = pcre2_match_context_create(nullptr);
    pcre2_jit_stack* stack = nullptr;
  };

  // Where a match may start: at one of the bytes first .. last.
  struct Starts {
    std::size_t first, last;
  };

  int match(Matcher& matcher, std::string_view text, const Starts& starts, std::size_t steps) const {
    const auto match = [&] {
      return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), starts.first,
                         PCRE2_NO_UTF_CHECK, matcher.data, matcher.context);
    };
    pcre2_set_match_limit(matcher.context, static_cast<std::uint32_t>(steps));
    pcre2_set_offset_limit(matcher.context, starts.last);
    const int found = match();
    if (found != PCRE2_ERROR_JIT_STACKLIMIT || matcher.stack) return found;
    matcher.stack = pcre2_jit_stack_create(1 << 16, kMostMemory, nullptr);
    if (matcher.stack) pcre2_jit_stack_assign(matcher.context, nullptr, matcher.stack);
    return match();
  }

  // What the matches of one text may cost. Backtracking can take exponential time, so the number of steps is limited: a
  // few are free for each match, the rest are enough to backtrack over a long text once. But each step can look at the
  // rest of the text, so the time is limited, too, to more than a hundred times that of published expressions. Reading
  // the clock takes longer than a match, so it is read only after many of them, or when they can have looked at many
  // bytes.
  struct Effort {
    explicit Effort(std::size_t bytes)
        : few(std::clamp<std::size_t>((std::size_t{1} << 30) / (bytes + 1), 256, 10'000)),
          steps(10'000'000 + 64 * bytes),
          seconds(1 + 5e-6 * static_cast<double>(bytes)) {}

    // After the tries of a match at so many places, with so many bytes after them.
    void tried(std::size_t places, std::size_t bytes) {
      if ((looked_at += places * (bytes + (1 << 20))) >> 30) looked_at = 0, read_clock();
    }
    double read_clock() {
      const double now = thread_seconds();
      if (latest == 0) latest = now + seconds;
      late = now > latest;
      return now;
    }
    // After a block without a match. The next one takes about 10 ms, if this one's time is known.
    void end_block(double begun, double now) {
      const bool slow = begun > 0 && now - begun > 0.01;
      block =
          slow ? std::max<std::size_t>(1, static_cast<std::size_t>(0.01 / (now - begun) * double(block))) : 2 * block;
    }

    const std::size_t few;
    std::size_t steps, block = 256;  // start positions that one call tries
    bool late = false;

   private:
    const double seconds;
    std::size_t looked_at = 0;
    double latest = 0;  // set when the clock is read first
  };

  // Finds the first match at `end` or later. One call cannot be interrupted, so it tries a block of start positions.
  bool find(std::string_view text, std::size_t& begin, std::size_t& end, Effort& effort) const {
    if (!code_) {
      begin = text.find(text_, end);
      end = begin + text_.size();
      return begin != std::string_view::npos;
    }
    thread_local Matcher matcher;
    const std::size_t* found_at = pcre2_get_ovector_pointer(matcher.data);
    double begun = 0;
    for (std::size_t start = end;;) {
      const Starts starts = {start, std::min(start + effort.block, text.size())};
      const int found = find_in(matcher, text, starts, effort);
      effort.tried((found < 0 ? starts.last : found_at[0]) - start + 1, text.size() - start);
      if ((found < 0 && found != PCRE2_ERROR_NOMATCH) || effort.late) {
        fail(text_, " fails on a text of ", text.size(),
             " bytes: ", effort.late ? "it takes too long" : pcre2_message(found),
             "; split the text into shorter ones, or simplify the expression");
      }
      if (found >= 0) break;
      if (starts.last == text.size()) return false;
      for (start = starts.last + 1; start < text.size() && (text[start] & 0xc0) == 0x80;) ++start;
      const double now = effort.read_clock();
      effort.end_block(std::exchange(begun, now), now);
    }
    begin = found_at[0], end = found_at[1];
    require(end > begin, text_, " is not supported: it can match the empty string");
    return true;
  }

  int find_in(Matcher& matcher, std::string_view text, const Starts& starts, Effort& effort) const {
    int found = match(matcher, text, starts, effort.few);
    for (std::size_t steps = effort.few; found == PCRE2_ERROR_MATCHLIMIT && effort.steps > 0; effort.steps -= steps) {
      effort.read_clock();
      if (effort.late) break;
      steps = std::min({2 * steps, effort.steps, std::size_t{UINT32_MAX}});
      found = match(matcher, text, starts, steps);
    }
    return found;
  }

  static constexpr std::size_t kMostMemory = std::size_t{1} << 26;  // of a thread

  std::string text_;  // the plain string, or the name of the expression in messages
  std::uint32_t shortest_ = 0;
  std::shared_ptr<pcre2_code> code_;
};

}  // namespace streambp
