// Chat templates, executed: the Jinja that transformers runs them with.
//
//   lexer.h -> parser.h -> statements.h, expressions.h (the program) -> filters.h, tests.h, methods.h -> value.h, print.h
//
// The result knows of each character if it comes from the template or from the data (text.h).
#pragma once

#include "text/template/print.h"

namespace streambp::jinja {

using Variables = std::vector<std::pair<std::string, Value>>;

constexpr std::size_t kLongestTemplate = 1 << 20;

class Template {
 public:
  // date: of strftime_now, "YYYY-MM-DD"
  Template(std::string_view source, const std::string& date);

  // Are there {% generation %} blocks?
  bool marks_answers() const;
  bool reads(const std::string& name) const;  // does it name this variable?

  // work: about the characters and values that a run may touch, besides reading the variables 100 times
  Text render(const Variables& variables, std::size_t work = 400'000'000) const;

 private:
  struct Program;
  std::shared_ptr<const Program> program_;
};

}  // namespace streambp::jinja
