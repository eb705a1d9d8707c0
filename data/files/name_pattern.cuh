// A regular expression on names, which must match a whole name. PCRE2's syntax, which is Python's in all common cases.
#pragma once

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#include <memory>
#include <string>

#include "kernels/base/error.cuh"

namespace streambp {

class NamePattern {
 public:
  // `where` is for messages: the file or the option that contains the expression.
  NamePattern(const std::string& where, const std::string& expression) : where_(where + ": " + quote(expression)) {
    int error = 0;
    std::size_t offset = 0;
    code_ = {pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                           PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr),
             pcre2_code_free};
    require(code_ != nullptr, where_, " is not a regular expression: ", message(error), " at character ", offset);
  }

  bool matches(const std::string& name) const {
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create(1, nullptr),
                                                                              pcre2_match_data_free);
    require(data != nullptr, "out of memory");
    // PCRE2's own limit on backtracking applies.
    const int found =
        pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0, 0, data.get(), nullptr);
    require(found >= 0 || found == PCRE2_ERROR_NOMATCH, where_, " fails on ", quote(name), ": ", message(found));
    return found >= 0;
  }

 private:
  static std::string message(int error) {
    char text[200];
    pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
    return text;
  }

  std::string where_;
  std::shared_ptr<pcre2_code> code_;
};

}  // namespace streambp
