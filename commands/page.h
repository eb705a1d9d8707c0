// Self-contained HTML pages: the pieces in pages/, and values embedded as data, never as markup. A page opens from disk and
// may load nothing.
#pragma once

#include <set>
#include <vector>

#include "data/files/files.h"

namespace streambp {

// A file of pages/, or streambp.cuh, compiled into the program.
struct Resource {
  const char* name;
  const char* sha256;  // in hexadecimal
  const char* text;
};
extern const std::vector<Resource> kResources;

constexpr std::string_view kMark = "<meta name=generator content=streambp>";

// As a content security policy writes a hash.
inline std::string base64(const std::string& hexadecimal) {
  constexpr const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < hexadecimal.size(); i += 6) {
    const std::string digits = hexadecimal.substr(i, 6);
    const unsigned long bits = std::stoul((digits + "000000").substr(0, 6), nullptr, 16);
    for (std::size_t letter = 0; letter < 4; ++letter)
      text += letter <= digits.size() / 2 ? letters[bits >> (18 - 6 * letter) & 63] : '=';
  }
  return text;
}

inline std::string allowed(const Resource& resource) { return "'sha256-" + base64(resource.sha256) + "' "; }

// Nothing in it ends the element that holds it, or begins another.
inline std::string escaped(std::string text) {
  for (std::size_t at = 0; (at = text.find_first_of("<>&", at)) != std::string::npos; ++at)
    text.replace(at, 1, text[at] == '<' ? "\\u003c" : text[at] == '>' ? "\\u003e" : "\\u0026");
  return text;
}

// A word of a shell's command line.
inline std::string quoted_for_shell(const std::string& word) {
  const bool plain =
      word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=,:+@%") ==
      std::string::npos;
  if (plain && !word.empty()) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

// The command that runs now, for a shell, without some options and the values that may follow them, and without the values
// of others, which are secret.
inline std::string command_line(const std::set<std::string>& without = {}, const std::set<std::string>& secret = {}) {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string result, before;
  for (std::string word; std::getline(file, word, '\0'); before = word) {
    const std::string option = word.substr(0, word.find('='));
    if (without.contains(option) || (without.contains(before) && !word.starts_with("--"))) continue;
    const std::string shown = secret.contains(before) ? "..."
                              : secret.contains(option)
                                  ? word.substr(0, option.size() + 1) + (word == option ? "" : "...")
                                  : quoted_for_shell(word);
    result += (result.empty() ? "" : " ") + shown;
  }
  return result;
}

// A new file, or an old page of this program.
inline void require_replaceable_page(const fs::path& path) {
  require_writable(path);
  const std::string extension = path.extension().string();
  require(extension == ".html" || extension == ".htm", path.string(),
          ": is not the name of a page; let it end in .html");
  if (!fs::exists(path) || fs::file_size(path) == 0) return;
  std::string start(200, '\0');
  std::ifstream(path).read(start.data(), std::ssize(start));
  require(
      start.find(kMark) != std::string::npos, path.string(),
      ": exists and may be yours; pages replace only earlier pages of this program, so name another file, or remove "
      "this one");
}

inline const Resource& resource(std::string_view name) {
  const auto found = std::ranges::find(kResources, name, &Resource::name);
  require(found != kResources.end(), "no resource ", name);
  return *found;
}

// Writes a page, atomically, that runs these scripts of pages/ after page.js and chart.js.
inline void write_page(const fs::path& path, const std::string& title, const std::vector<const char*>& scripts,
                       const Json& data) {
  const Resource& style = resource("page.css");
  std::vector<const char*> names = {"page.js", "chart.js"};
  names.insert(names.end(), scripts.begin(), scripts.end());
  std::string policy, code;
  for (const char* name : names) {
    policy += allowed(resource(name));
    code += std::string("<script>") + resource(name).text + "</script>\n";
  }
  Json all = data;
  all["title"] = title;
  write_file_atomically(path, [&](std::ostream& page) {
    page << "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n"
         << kMark
         << "\n<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; base-uri 'none'; form-action "
            "'none'; style-src "
         << allowed(style) << "; script-src " << policy << "\">\n"
         << "<meta name=viewport content=\"width=device-width, initial-scale=1\">\n<title>streambp</title>\n<style>"
         << style.text << "</style>\n<main><noscript>This page draws itself with JavaScript.</noscript></main>\n"
         << "<script type=application/json id=data>" << escaped(text_of(all)) << "</script>\n"
         << code << "</html>\n";
  });
}

}  // namespace streambp
