// Printing text that may come from files. Control characters in it could command the terminal, so they are dropped, and a
// line break could begin a line that looks like one of ours, so it is shown as \n.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace streambp {

// Drops control characters except line breaks and tabs. Those of Unicode also break lines or reverse their direction.
inline std::string without_controls(std::string_view text) {
  std::string kept;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (0x80 <= byte && byte < 0xa0 && kept.ends_with('\xc2')) {  // U+0080 .. U+009F
      kept.pop_back();
    } else if ((0xa8 <= byte && byte <= 0xae && kept.ends_with("\xe2\x80")) ||  // U+2028 .. U+202E
               (0xa6 <= byte && byte <= 0xa9 && kept.ends_with("\xe2\x81"))) {  // U+2066 .. U+2069
      kept.resize(kept.size() - 2);
    } else if ((byte >= 32 && byte != 127) || byte == '\n' || byte == '\t') {
      kept += c;
    }
  }
  return kept;
}

inline std::string on_one_line(std::string_view text) {
  std::string line;
  for (const char c : without_controls(text)) c == '\n' ? line += "\\n" : line += c;
  return line;
}

// Our own commands to the terminal and line breaks, printed as they are.
struct Escape {
  std::string text;
};

namespace printing {
inline const char* argument(const std::string& text) { return text.c_str(); }
inline const char* argument(const char* text) { return text; }
inline const char* argument(const Escape& escape) { return escape.text.c_str(); }
template <class V>
requires std::is_arithmetic_v<V> V argument(V value) { return value; }

template <class V>
auto cleaned(const V& value) {
  if constexpr (std::is_arithmetic_v<V> || std::is_same_v<V, Escape>)
    return value;
  else
    return on_one_line(std::string(value));
}
}  // namespace printing

// printf for a pattern of our own and any arguments.
template <class... Values>
void print_to(std::FILE* file, const char* pattern, const Values&... values) {
  std::fprintf(file, pattern, printing::argument(printing::cleaned(values))...);
}
template <class... Values>
void print(const char* pattern, const Values&... values) {
  print_to(stdout, pattern, values...);
}
template <class... Values>
void print_error(const char* pattern, const Values&... values) {
  print_to(stderr, pattern, values...);
}

}  // namespace streambp
