// The text of --help, in the width of the terminal; words are never broken.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>
#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace streambp {

// The columns of the terminal; 80 if standard output is none.
inline std::size_t line_width() {
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? std::max<std::size_t>(size.ws_col, 40) : 80;
}

// `line` goes on with these words; further lines begin at a column.
inline std::string wrapped(std::string line, const std::string& words, std::size_t column) {
  std::string text;
  std::istringstream stream(words);
  bool first = true;
  for (std::string word; stream >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > line_width()) {
      text += line + "\n";
      line = std::string(column, ' ') + word;
    } else {
      line += (first ? "" : " ") + word;
    }
  }
  return text + line + "\n";
}

// Letters that are replaced, missing, too many, or swapped with their neighbours.
inline std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (d[i][j] = i + j; i == 0 || j == 0) continue;
      d[i][j] = std::min({d[i - 1][j - 1] + (a[i - 1] != b[j - 1]), d[i - 1][j] + 1, d[i][j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

// Lines that begin with a space stay as they are; the others are filled, paragraph by paragraph.
inline std::string filled(const std::string& text) {
  std::string result, paragraph;
  const auto end_paragraph = [&] {
    if (!paragraph.empty()) result += wrapped("", paragraph, 0);
    paragraph.clear();
  };
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line[0] != ' ') {
      paragraph += line + " ";
      continue;
    }
    end_paragraph();
    result += line.size() <= line_width() ? line + "\n" : wrapped("  ", line, 6);
  }
  end_paragraph();
  return result;
}

// A name, and what it means beside it.
inline std::string help_entry(const std::string& name, const std::string& meaning) {
  const std::size_t column = std::min<std::size_t>(26, line_width() / 3);
  std::string line = "  " + name, text;
  if (line.size() + 2 > column) text = std::exchange(line, "") + "\n";
  line.resize(column, ' ');
  return text + wrapped(line, meaning, column);
}

// " did you mean A or B?", of the choices nearest to a misspelt word, or nothing.
inline std::string did_you_mean(const std::string& word, const std::vector<std::string>& choices) {
  const auto bare = [](const std::string& name) { return name.substr(name.find_last_of('-', 1) + 1); };
  std::ptrdiff_t least = 0;
  std::string nearest;
  for (const std::string& choice : choices) {
    const std::string a = bare(word), b = bare(choice);
    const std::ptrdiff_t alike = std::ranges::mismatch(a, b).in1 - a.begin();  // letters at the beginning
    const std::ptrdiff_t distance = static_cast<std::ptrdiff_t>(edit_distance(a, b)) - 2 * alike;
    if (distance > least || distance == 0) continue;
    nearest = (distance < least ? "did you mean " : nearest + " or ") + choice;
    least = distance;
  }
  return nearest.empty() ? "" : nearest + "?";
}

}  // namespace streambp
