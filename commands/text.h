// Printing text that may come from files: control characters in it could command the terminal, so they are dropped, and
// a line break could begin a line that looks like one of ours, so it is shown as \n. Human-readable sizes and counts;
// tables.
#pragma once

#include <charconv>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels/base/error.h"

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

// --- Sizes, counts and tables ---

template <class... Values>
std::string format(const char* pattern, const Values&... values) {
  const int size = std::snprintf(nullptr, 0, pattern, printing::argument(values)...);
  std::string text(static_cast<std::size_t>(size), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, printing::argument(values)...);
  return text;
}

inline std::string human_bytes(std::size_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return unit == 0 ? format("%zu B", bytes) : format("%.2f %s", value, units[unit]);
}

inline std::string human_count(double value) {
  const char* units[] = {"", "k", "M", "G", "T", "P", "E"};
  int unit = 0;
  for (; std::abs(value) >= 1000 && unit < 6; ++unit) value /= 1000;
  return format(unit ? "%.2f%s" : "%.0f%s", value, units[unit]);
}

inline std::string human_seconds(double seconds) {
  if (seconds < 120) return format("%.3g s", seconds);
  return seconds < 7200 ? format("%.3g min", seconds / 60) : format("%.3g h", seconds / 3600);
}

// "1 document", "2 documents", "3 micro-batches".
inline std::string counted(std::ptrdiff_t n, const std::string& what) {
  const char* ending = n == 1 ? "" : what.ends_with("ch") || what.ends_with("ss") ? "es" : "s";
  return std::to_string(n) + " " + what + ending;
}

// "80GiB", "80G" and "80g" are 80 * 2^30 bytes, "80GB" is 80 * 10^9; a bare number is bytes, if there are many.
inline std::size_t parse_bytes(const std::string& text) {
  double value = -1;
  std::string unit = std::from_chars(text.data(), text.data() + text.size(), value).ptr;
  for (char& c : unit) c = static_cast<char>(std::tolower(c));
  const std::size_t power = unit.empty() ? 0 : std::string("bkmgt").find(unit[0]);
  const bool decimal = unit.size() == 2 && unit[1] == 'b';
  const bool known = power != std::string::npos && (unit.size() <= 1 || decimal || unit.substr(1) == "ib");
  require(!unit.empty() || value < 1 || value >= 0x1p16, "\"", text, "\" has no unit; write it like ", text, "MiB or ",
          text, "GiB");
  require(value > 0 && known, "\"", text, "\" is not an amount of memory; write it like 24GiB, 512MiB or 80GB");
  const double bytes = value * std::pow(decimal ? 1000.0 : 1024.0, static_cast<double>(power));
  require(bytes < 0x1p60, "\"", text, "\" is more memory than any machine has");
  return static_cast<std::size_t>(bytes);
}

// A table with a header. All columns but the first are aligned to the right.
class TextTable {
 public:
  // Columns of numbers, after a first one of text.
  enum class Last { number, text };
  explicit TextTable(std::vector<std::string> header, Last last = Last::number) : last(last), rows{std::move(header)} {}
  void add(std::vector<std::string> row) { rows.push_back(std::move(row)); }
  void print() const {
    std::vector<std::size_t> width(rows[0].size());
    for (const auto& row : rows) {
      for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    }
    for (const auto& row : rows) {
      std::string line;
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::string space(width[i] - row[i].size(), ' ');
        const bool is_text = i == 0 || (i + 1 == row.size() && last == Last::text);
        line += (i > 0 ? "  " : "") + (is_text ? row[i] + space : space + row[i]);
      }
      streambp::print("%s\n", line.substr(0, line.find_last_not_of(' ') + 1));
    }
  }

 private:
  const Last last;
  std::vector<std::vector<std::string>> rows;
};

}  // namespace streambp
