// Errors that a user can act on: every message says what is wrong, where, and what to do about it.
#pragma once

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace streambp {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// fail("file.json: expected ", 3, " layers") throws an Error; its message is the concatenation of the arguments.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// Quotes text from a file or the command line for a message: at most about 200 bytes, control characters escaped.
inline std::string excerpt(std::string_view text) {
  std::size_t end = std::min<std::size_t>(text.size(), 200);
  while (end > 0 && end < text.size() && (text[end] & 0xc0) == 0x80) --end;  // do not split a UTF-8 character
  std::string result;
  for (const char c : text.substr(0, end)) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    char escaped[8] = {c};
    if (control) std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(c));
    result += escaped;
  }
  return end < text.size() ? result + "..." : result;
}
inline std::string quote(std::string_view text) { return '"' + excerpt(text) + '"'; }

// "a, b, c"
template <class List>
std::string join(const List& parts) {
  std::string all;
  for (const auto& part : parts) all += (all.empty() ? "" : ", ") + std::string(part);
  return all;
}

}  // namespace streambp
