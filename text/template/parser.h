// From tokens to the statements of a template.
#pragma once

#include "text/template/expression_parser.h"
#include "text/template/statements.h"

namespace streambp::jinja {

// Stands among the names if there is a {% generation %} block. No variable has this name.
constexpr const char* kGenerationMark = "% generation";

class Parser : ExpressionParser {
 public:
  static Body parse(std::string_view source, Names& names) { return Parser(source, names).body({}); }

 private:
  using ExpressionParser::ExpressionParser;

  // Up to one of these blocks, after "{%".
  Body body(const std::vector<const char*>& ends) {
    const Level level(*this);
    Body all;
    for (;;) {
      nodes_ = 0;
      if (now().kind == TokenKind::end) {
        if (!ends.empty()) fail_here("the template ends without {% ", ends.back(), " %}");
        return all;
      }
      if (now().kind == TokenKind::text) {
        auto print = make<Print>();
        print->text = take().text;
        all.push_back(std::move(print));
      } else if (now().kind == TokenKind::output) {
        ++at_;
        auto output = make<Output>();
        output->expression = tuple_or_expression();
        close();
        all.push_back(std::move(output));
      } else {
        ++at_;
        if (std::ranges::any_of(ends, [&](const char* end) { return now().named(end); })) return all;
        all.push_back(statement());
      }
    }
  }
  // The body up to {% end %}
  Body closed_body(const char* end) {
    close();
    Body inner = body({end});
    ++at_, close();
    return inner;
  }

  std::unique_ptr<const Statement> statement() {
    if (skip_name("if")) return if_statement();
    if (skip_name("for")) return for_statement();
    if (skip_name("set")) return set_statement();
    if (skip_name("macro")) return macro_statement();
    if (skip_name("call")) return call_block();
    if (skip_name("filter")) return filter_block();
    if (skip_name("generation")) {
      auto node = make<Generation>();
      names_.of(to_text(kGenerationMark));
      node->body = closed_body("endgeneration");
      return node;
    }
    if (now().named("break") || now().named("continue")) {
      if (loops_ == 0) fail_here("outside of a loop");
      auto node = make<Jump>();
      node->flow = now().named("break") ? Flow::end_of_loop : Flow::next_iteration;
      ++at_, close();
      return node;
    }
    fail_here("unknown or unsupported block");
  }

  std::unique_ptr<const Statement> if_statement() {
    auto node = make<If>();
    for (bool more = true; more;) {
      E condition = tuple_or_expression();
      close();
      Body inner = body({"elif", "else", "endif"});
      node->branches.emplace_back(std::move(condition), std::move(inner));
      more = skip_name("elif");
    }
    if (skip_name("else")) close(), node->otherwise = body({"endif"});
    ++at_, close();
    return node;
  }

  std::unique_ptr<const Statement> for_statement() {
    auto node = make<For>();
    node->loop = names_.of(to_text("loop"));
    node->target = target();
    if (!skip_name("in")) fail_here("expected in");
    node->elements = tuple_or_expression(Ternary::no);
    if (skip_name("if")) node->condition = expression();
    node->recursive = skip_name("recursive");
    close();
    ++loops_;
    node->body = body({"else", "endfor"});
    --loops_;
    if (skip_name("else")) close(), node->otherwise = body({"endfor"});
    ++at_, close();
    return node;
  }

  Target target() {
    Target t;
    const bool brackets = skip("(");
    do {
      if (now().is(")") || now().is("=")) break;
      t.names.push_back(names_.of(name()));
      t.several = t.several || now().is(",");
    } while (skip(","));
    if (brackets) require_symbol(")");
    if (!t.several && skip(".")) t.attribute = name();
    if (t.names.empty()) fail_here("expected a name");
    return t;
  }

  std::unique_ptr<const Statement> set_statement() {
    Target t = target();
    if (skip("=")) {
      auto node = make<Set>();
      node->target = std::move(t);
      node->value = tuple_or_expression();
      close();
      return node;
    }
    auto node = make<TextBlock>();
    node->target = std::move(t);
    while (skip("|")) node->filters.push_back(filter({}));
    node->body = without_loops("endset");
    return node;
  }

  // The body of a block that break and continue do not leave.
  Body without_loops(const char* end) {
    const int before = std::exchange(loops_, 0);
    Body inner = closed_body(end);
    loops_ = before;
    return inner;
  }

  void parameters(MacroCode& code) {
    while (!skip(")")) {
      if (!code.parameters.empty()) require_symbol(",");
      const Text parameter = name();
      code.names.push_back(parameter);
      E otherwise = skip("=") ? expression() : nullptr;
      code.parameters.emplace_back(names_.of(parameter), std::move(otherwise));
    }
  }
  void finish(MacroCode& code, const char* end) {
    code.caller = names_.of(to_text("caller"));
    code.varargs = names_.of(to_text("varargs")), code.kwargs = names_.of(to_text("kwargs"));
    code.body = without_loops(end);
  }

  std::unique_ptr<const Statement> macro_statement() {
    auto node = make<MacroStatement>();
    const Text called = name();
    node->name = names_.of(called), node->code.name = to_utf8(called);
    require_symbol("(");
    parameters(node->code);
    finish(node->code, "endmacro");
    return node;
  }

  std::unique_ptr<const Statement> call_block() {
    auto node = make<CallBlock>();
    if (skip("(")) parameters(node->body);
    E call = expression();
    if (!dynamic_cast<const Call*>(call.get())) fail_here("{% call %} needs a call");
    node->call.reset(static_cast<const Call*>(call.release()));
    finish(node->body, "endcall");
    return node;
  }

  std::unique_ptr<const Statement> filter_block() {
    auto node = make<TextBlock>();
    do node->filters.push_back(filter({}));
    while (skip("|"));
    node->body = without_loops("endfilter");
    return node;
  }

  int loops_ = 0;  // around the current statement
};

}  // namespace streambp::jinja
