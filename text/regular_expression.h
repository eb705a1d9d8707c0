// Regular expressions, by PCRE2.
#pragma once

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#include <ctime>
#include <memory>

#include "kernels/base/error.h"

namespace streambp {

// CPU time of the calling thread, to limit work on untrusted files.
inline double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline std::string pcre2_message(int error) {
  char text[200];
  pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
  return text;
}

struct CompiledExpression {
  std::shared_ptr<pcre2_code> code;  // null after an error
  std::string error = "";
  std::size_t error_at = 0;
};

inline CompiledExpression compile_expression(const std::string& text, std::uint32_t options) {
  int error = 0;
  std::size_t at = 0;
  const std::shared_ptr<pcre2_code> code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                                       options | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr),
                                         pcre2_code_free);
  if (!code) return {nullptr, pcre2_message(error), at};
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // without it, matching is only slower
  return {code};
}

// A regular expression on names, which must match a whole name. PCRE2's syntax is Python's in all common cases.
class NamePattern {
 public:
  // `where` is for messages: the file or the option that contains the expression. What stands before and after it is
  // ours.
  NamePattern(const std::string& where, const std::string& text, const std::string& before = "",
              const std::string& after = "")
      : where_(where + ": " + quote(text)) {
    const std::string ours = "(*LIMIT_MATCH=100000)(*LIMIT_HEAP=16384)" + before;  // names are short; 16 MiB
    const CompiledExpression compiled = compile_expression(ours + text + after, PCRE2_ANCHORED | PCRE2_ENDANCHORED);
    const std::size_t at = std::min(compiled.error_at - std::min(compiled.error_at, ours.size()), text.size());
    require(compiled.code != nullptr, where_, " is not a regular expression: ", compiled.error, " at character ", at);
    code_ = compiled.code;
  }

  bool matches(const std::string& name) const {
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(pcre2_match_data_create(1, nullptr),
                                                                                   pcre2_match_data_free);
    require(data != nullptr, "out of memory");
    const int found =
        pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0, 0, data.get(), nullptr);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
      fail(where_, " fails on ", quote(name), ": ", pcre2_message(found), "; write a simpler expression");
    }
    return found >= 0;
  }

 private:
  std::string where_;
  std::shared_ptr<pcre2_code> code_;
};

}  // namespace streambp
