// From the source of a template to tokens: text, and the words, numbers, strings and operators in {{ }} and {% %}.
//
// White space as transformers sets it: the first line break after a block or comment is dropped (trim_blocks), and so are
// spaces before a block or comment that stands first in its line (lstrip_blocks). A "-" inside the braces drops all white
// space on its side, a "+" keeps it.
#pragma once

#include <array>
#include <charconv>

#include "text/template/value.h"

namespace streambp::jinja {

enum class TokenKind { text, output, block, close, name, string, integer, real, symbol, end };

struct Token {
  TokenKind kind;
  int line;
  Text text;          // of text, names, strings and symbols
  Value number = {};  // of integers and reals
  bool is(const char* symbol) const { return kind == TokenKind::symbol && text == to_text(symbol); }
  bool named(const char* name) const { return kind == TokenKind::name && text == to_text(name); }
};

class Lexer {
 public:
  static std::vector<Token> tokens_of(std::string_view source) { return Lexer(source).all(); }

 private:
  explicit Lexer(std::string_view source) {
    char32_t before = 0;
    for (const char32_t c : to_text(source)) {
      if (c != '\n' || before != '\r') source_ += c == '\r' ? U'\n' : c;
      before = c;
    }
    if (source_.ends_with(U'\n')) source_.pop_back();
  }

  std::vector<Token> all() {
    while (at_ < source_.size()) {
      const std::size_t open = next_open();
      add_text(open);
      if (open == source_.size()) break;
      at_ = open + 2;
      const char32_t kind = source_[open + 1];
      if (peek() == '-' || (peek() == '+' && kind != '{')) ++at_;
      if (kind == '#') {
        skip_comment();
      } else if (kind == '%' && raw_block()) {
      } else {
        add(kind == '{' ? TokenKind::output : TokenKind::block);
        inside(kind == '{' ? '}' : '%');
      }
    }
    add(TokenKind::end);
    return std::move(tokens_);
  }

  char32_t peek(std::size_t ahead = 0) const { return at_ + ahead < source_.size() ? source_[at_ + ahead] : 0; }
  bool digit(std::size_t ahead = 0) const { return peek(ahead) >= '0' && peek(ahead) <= '9'; }
  bool starts(const char* text) const { return TextView(source_).substr(at_).starts_with(to_text(text)); }
  void add(TokenKind kind, Text text = {}, Value number = {}) {
    tokens_.push_back({kind, line_, std::move(text), std::move(number)});
  }
  void advance(std::size_t to) {
    for (; at_ < to; ++at_) line_ += source_[at_] == '\n';
  }
  [[noreturn]] void fail_here(const char* what) const { refuse("line ", line_, ": ", what); }

  std::size_t next_open() const {
    for (std::size_t i = at_; i + 1 < source_.size(); ++i) {
      const char32_t next = source_[i + 1];
      if (source_[i] == '{' && (next == '{' || next == '%' || next == '#')) return i;
    }
    return source_.size();
  }

  // Adds the text up to the opening braces, without what the white-space rules drop.
  void add_text(std::size_t open) {
    TextView text = TextView(source_).substr(at_, open - at_);
    const bool first_in_line = at_ == 0 || source_[at_ - 1] == '\n';
    if (open < source_.size()) {
      const char32_t kind = source_[open + 1], sign = open + 2 < source_.size() ? source_[open + 2] : 0;
      if (sign == '-') {
        text = without_ends(text, false, true, is_white);
      } else if (kind != '{' && sign != '+') {
        const std::size_t line = text.rfind('\n') + 1;  // npos + 1 is 0
        const auto end = text.substr(line);
        if ((line > 0 || first_in_line) && std::ranges::all_of(end, is_white)) text = text.substr(0, line);
      }
    }
    if (!text.empty()) add(TokenKind::text, Text(text));
    advance(open);
  }

  // Drops white space after closing braces.
  void after_close(char32_t sign, bool trims_line) {
    if (sign == '-') {
      while (at_ < source_.size() && is_white(source_[at_])) advance(at_ + 1);
    } else if (trims_line && sign != '+' && peek() == '\n') {
      advance(at_ + 1);
    }
  }

  void skip_comment() {
    const std::size_t end = source_.find(to_text("#}"), at_);
    if (end == source_.npos) fail_here("a comment has no end, #}");
    const char32_t sign = source_[end - 1];
    advance(end + 2);
    after_close(sign, true);
  }

  // {% raw %} ... {% endraw %}; false: it is another block.
  bool raw_block() {
    const auto tag = [&](std::size_t from, const char* name, char32_t& sign) -> std::size_t {  // the end of "name %}"
      const auto skip = [&] {
        while (from < source_.size() && is_white(source_[from])) ++from;
      };
      const Text word = to_text(name);
      skip();
      if (source_.compare(from, word.size(), word) != 0) return 0;
      from += word.size();
      skip();
      sign = from < source_.size() ? source_[from] : 0;
      if (sign == '-' || sign == '+') ++from;
      return source_.compare(from, 2, to_text("%}")) == 0 ? from + 2 : 0;
    };
    char32_t sign = 0;
    const std::size_t begin = tag(at_, "raw", sign);
    if (begin == 0) return false;
    advance(begin);
    after_close(sign, false);
    for (std::size_t open = at_; (open = source_.find(to_text("{%"), open)) != source_.npos; open += 2) {
      const char32_t before = open + 2 < source_.size() ? source_[open + 2] : 0;
      const std::size_t end = tag(open + 2 + (before == '-' || before == '+'), "endraw", sign);
      if (end == 0) continue;
      add_text(open);
      advance(end);
      after_close(sign, true);
      return true;
    }
    fail_here("{% raw %} has no {% endraw %}");
  }

  // The tokens up to the closing braces.
  void inside(char32_t close) {
    for (std::size_t depth = 0;;) {
      while (at_ < source_.size() && is_white(source_[at_])) advance(at_ + 1);
      const char32_t c = peek();
      if (c == 0 && at_ >= source_.size()) fail_here(close == '}' ? "{{ has no }}" : "{% has no %}");
      if (depth == 0) {
        const bool sign = (c == '-' || (c == '+' && close == '%')) && peek(1) == close && peek(2) == '}';
        if (sign || (c == close && peek(1) == '}')) {
          add(TokenKind::close);
          at_ += sign ? 3 : 2;
          return after_close(sign ? c : 0, close == '%');
        }
      }
      if (c == '\'' || c == '"') {
        add_string(c);
      } else if (digit()) {
        add_number();
      } else if (is_name(c)) {
        Text name;
        while (is_name(peek()) || digit()) name += source_[at_++];
        add(TokenKind::name, std::move(name));
      } else {
        add_symbol(depth);
      }
    }
  }

  static bool is_name(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c >= 0x80; }

  void add_symbol(std::size_t& depth) {
    for (const char* symbol : {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                               "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ","}) {
      if (!starts(symbol)) continue;
      const char c = symbol[0];
      if (c == '(' || c == '[' || c == '{') ++depth;
      if (c == ')' || c == ']' || c == '}') {
        if (depth == 0) fail_here("a bracket is closed that was not opened");
        --depth;
      }
      add(TokenKind::symbol, to_text(symbol));
      at_ += std::string_view(symbol).size();
      return;
    }
    fail_here("a character that cannot stand here");
  }

  void add_number() {
    std::string digits;
    const auto take_digits = [&] {
      while (digit() || peek() == '_') {
        if (peek() != '_') digits += static_cast<char>(peek());
        ++at_;
      }
    };
    take_digits();
    bool real = false;
    if (peek() == '.' && digit(1)) real = true, digits += '.', ++at_, take_digits();
    if (const bool sign = peek(1) == '-' || peek(1) == '+'; (peek() == 'e' || peek() == 'E') && digit(sign ? 2 : 1)) {
      real = true, digits += 'e', ++at_;
      if (sign) digits += static_cast<char>(source_[at_++]);
      take_digits();
    }
    const char* end = digits.data() + digits.size();
    double number = 0;
    std::int64_t whole = 0;
    const auto read = real ? std::from_chars(digits.data(), end, number) : std::from_chars(digits.data(), end, whole);
    if (read.ec != std::errc()) fail_here("a number is too large");
    add(real ? TokenKind::real : TokenKind::integer, {}, real ? Value(number) : Value(whole));
  }

  // Escapes as in Python.
  void add_string(char32_t quote) {
    const int line = line_;
    Text text;
    advance(at_ + 1);
    while (at_ < source_.size() && source_[at_] != quote) {
      const char32_t c = source_[at_];
      advance(at_ + 1);
      if (c != '\\') {
        text += c;
        continue;
      }
      const char32_t escape = peek();
      advance(at_ + 1);
      constexpr std::string_view letters = "ntrabfv\\'\"", meanings = "\n\t\r\a\b\f\v\\'\"";
      const std::size_t known = escape < 0x80 ? letters.find(static_cast<char>(escape)) : letters.npos;
      if (escape == '\n') {
        // a line that goes on
      } else if (known != letters.npos) {
        text += static_cast<char32_t>(meanings[known]);
      } else if (escape >= '0' && escape <= '7') {
        --at_;
        text += code(8, 1, 3);
      } else if (escape == 'x' || escape == 'u' || escape == 'U') {
        const std::size_t digits = escape == 'x' ? 2 : escape == 'u' ? 4 : 8;
        text += code(16, digits, digits);
      } else {
        text += '\\', text += escape;
      }
    }
    if (at_ >= source_.size()) refuse("line ", line, ": a string has no end");
    ++at_;
    add(TokenKind::string, std::move(text));
  }

  // A character by its number.
  char32_t code(int base, std::size_t least, std::size_t most) {
    std::string digits;
    while (digits.size() < most && peek(digits.size()) < 0x80) digits += static_cast<char>(peek(digits.size()));
    std::uint32_t number = 0;
    const char* end = std::from_chars(digits.data(), digits.data() + digits.size(), number, base).ptr;
    const auto count = static_cast<std::size_t>(end - digits.data());
    const bool valid = count >= least && number <= 0x10FFFF && !(number >= 0xD800 && number < 0xE000);
    if (!valid) fail_here("an escape in a string names no character");
    at_ += count;
    return number;
  }

  Text source_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace streambp::jinja
