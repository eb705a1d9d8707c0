// Errors that a user can act on: every message says what is wrong, where, and what to do about it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace streambp {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// fail("file.json: expected ", 3, " layers") throws an Error with the pieces put together.
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

}  // namespace streambp
