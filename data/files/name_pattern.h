// A regular expression on names, which must match a whole name. PCRE2's syntax, which is Python's in all common cases.
#pragma once

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#include <algorithm>
#include <memory>
#include <string>

#include "kernels/base/error.h"

namespace streambp {

class NamePattern {
 public:
  // `where` is for messages: the file or the option that contains the expression. What stands before and after it is
  // ours.
  NamePattern(const std::string& where, const std::string& text, const std::string& before = "",
              const std::string& after = "")
      : where_(where + ": " + quote(text)),
        data_(pcre2_match_data_create(1, nullptr), pcre2_match_data_free),
        context_(pcre2_match_context_create(nullptr), pcre2_match_context_free) {
    require(data_ != nullptr && context_ != nullptr, "out of memory");
    const std::string expression = before + text + after;
    int error = 0;
    std::size_t offset = 0;
    code_ = {pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                           PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr),
             pcre2_code_free};
    if (code_ == nullptr)
      fail(where_, " is not a regular expression: ", message(error), " at character ",
           std::min(offset - std::min(offset, before.size()), text.size()));
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // without it, matching is only slower
    pcre2_set_match_limit(context_.get(), 100'000);      // names are short
    pcre2_set_heap_limit(context_.get(), 1 << 14);       // 16 MiB
  }

  bool matches(const std::string& name) const {
    const int found = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(), 0, 0,
                                  data_.get(), context_.get());
    if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
      fail(where_, " fails on ", quote(name), ": ", message(found), "; write a simpler expression");
    }
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
  std::shared_ptr<pcre2_match_data> data_;
  std::shared_ptr<pcre2_match_context> context_;
};

}  // namespace streambp
