// From tokens to expressions, by recursive descent with the precedence of Jinja.
#pragma once

#include <map>
#include <optional>

#include "text/template/expressions.h"
#include "text/template/lexer.h"

namespace streambp::jinja {

// The numbers of variables' names.
class Names {
 public:
  int of(TextView name) { return numbers_.try_emplace(Text(name), static_cast<int>(numbers_.size())).first->second; }
  std::optional<int> find(TextView name) const {
    const auto found = numbers_.find(Text(name));
    return found == numbers_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::map<Text, int> numbers_;
};

class ExpressionParser {
 protected:
  using E = ExpressionPointer;

  ExpressionParser(std::string_view source, Names& names) : names_(names), tokens_(Lexer::tokens_of(source)) {}

  // --- Tokens ---

  const Token& now() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip(const char* symbol) { return now().is(symbol) && ++at_; }
  bool skip_name(const char* name) { return now().named(name) && ++at_; }
  void require_symbol(const char* symbol) {
    if (!skip(symbol)) fail_here("expected ", quote(symbol));
  }
  Text name() {
    if (now().kind != TokenKind::name) fail_here("expected a name");
    return take().text;
  }
  void close() {
    if (now().kind != TokenKind::close) fail_here("expected the end of the block");
    ++at_;
  }
  template <class... Parts>
  [[noreturn]] void fail_here(const Parts&... parts) const {
    const bool shows = !now().text.empty() && now().kind != TokenKind::text;
    refuse("line ", now().line, ": ", parts..., shows ? ", found " + quote(to_utf8(now().text)) : "");
  }

  // Nodes are freed recursively, so their depth is limited.
  struct Level {
    explicit Level(ExpressionParser& parser) : parser(parser) {
      if (++parser.depth_ > 150) parser.fail_here("more than 150 levels");
    }
    ~Level() { --parser.depth_; }
    ExpressionParser& parser;
  };
  template <class Node>
  std::unique_ptr<Node> make() {
    auto node = std::make_unique<Node>();
    node->line = now().line;
    if constexpr (std::is_base_of_v<Expression, Node>)
      if (++nodes_ > 5000) fail_here("an expression with more than 5000 parts");
    return node;
  }

  // --- From the weakest operator to the strongest ---

  enum class Ternary { yes, no };

  // a, b, c
  E tuple_or_expression(Ternary ternary = Ternary::yes) {
    E first = ternary == Ternary::yes ? expression() : disjunction();
    if (!now().is(",")) return first;
    auto node = make<ListLiteral>();
    node->kind = ListKind::tuple;
    node->items.push_back(std::move(first));
    while (skip(",") && !ends_tuple()) node->items.push_back(ternary == Ternary::yes ? expression() : disjunction());
    return node;
  }
  bool ends_tuple() const { return now().kind == TokenKind::close || now().is(")"); }

  E expression() {
    const Level level(*this);
    E value = disjunction();
    while (skip_name("if")) {
      auto node = make<Condition>();
      node->yes = std::move(value);
      node->condition = disjunction();
      if (skip_name("else")) node->no = expression();
      value = std::move(node);
    }
    return value;
  }

  E logic(Logic::Kind kind, E left, E right) {
    auto node = make<Logic>();
    node->kind = kind, node->left = std::move(left), node->right = std::move(right);
    return node;
  }
  E disjunction() {
    E left = conjunction();
    while (skip_name("or")) left = logic(Logic::disjunction, std::move(left), conjunction());
    return left;
  }
  E conjunction() {
    E left = negation();
    while (skip_name("and")) left = logic(Logic::conjunction, std::move(left), negation());
    return left;
  }
  E negation() {
    const Level level(*this);
    return skip_name("not") ? logic(Logic::negation, negation(), nullptr) : comparison();
  }

  E comparison() {
    E first = sum();
    auto node = make<Comparison>();
    while (const auto op = comparator()) node->others.emplace_back(*op, sum());
    if (node->others.empty()) return first;
    node->first = std::move(first);
    return node;
  }
  std::optional<Comparator> comparator() {
    constexpr std::pair<const char*, Comparator> symbols[] = {
        {"==", equal}, {"!=", not_equal}, {"<", less}, {"<=", less_or_equal}, {">", greater}, {">=", greater_or_equal}};
    for (const auto& [symbol, op] : symbols)
      if (skip(symbol)) return op;
    if (skip_name("in")) return is_in;
    if (now().named("not") && ahead().named("in")) return at_ += 2, is_not_in;
    return {};
  }

  // Left-associative operators between operands of `next`.
  E arithmetic(std::initializer_list<std::pair<const char*, Operator>> symbols, E (ExpressionParser::*next)()) {
    E left = (this->*next)();
    for (auto symbol = symbols.begin(); symbol != symbols.end();) {
      if (!skip(symbol->first)) {
        ++symbol;
        continue;
      }
      auto node = make<Arithmetic>();
      node->op = symbol->second, node->left = std::move(left), node->right = (this->*next)();
      left = std::move(node);
      symbol = symbols.begin();
    }
    return left;
  }
  E sum() { return arithmetic({{"+", Operator::plus}, {"-", Operator::minus}}, &ExpressionParser::joined); }
  E joined() { return arithmetic({{"~", Operator::join}}, &ExpressionParser::product); }
  E product() {
    return arithmetic(
        {{"*", Operator::times}, {"/", Operator::divide}, {"//", Operator::floor_divide}, {"%", Operator::modulo}},
        &ExpressionParser::power);
  }
  E power() { return arithmetic({{"**", Operator::power}}, &ExpressionParser::filtered_unary); }

  E filtered_unary() { return with_filters(unary()); }
  E unary() {
    const Level level(*this);
    if (!now().is("-") && !now().is("+")) return with_postfixes(primary());
    auto node = make<Sign>();
    node->negative = take().is("-");
    node->operand = unary();
    return node;
  }

  E primary() {
    const Token token = take();
    auto constant = make<Constant>();
    if (token.kind == TokenKind::name) {
      const std::string word = to_utf8(token.text);
      if (word == "true" || word == "True") return constant->constant = true, std::move(constant);
      if (word == "false" || word == "False") return constant->constant = false, std::move(constant);
      if (word == "none" || word == "None") return constant->constant = None{}, std::move(constant);
      auto variable = make<Variable>();
      variable->name = names_.of(token.text), variable->text = word;
      return variable;
    }
    if (token.kind == TokenKind::string) {
      Text text = token.text;
      while (now().kind == TokenKind::string) text += take().text;
      return constant->constant = std::move(text), std::move(constant);
    }
    if (token.kind == TokenKind::integer || token.kind == TokenKind::real)
      return constant->constant = token.number, std::move(constant);
    if (token.is("(")) return in_brackets();
    if (token.is("[")) return list();
    if (token.is("{")) return dict();
    --at_;
    fail_here("expected a value");
  }

  E in_brackets() {
    if (skip(")")) {
      auto empty = make<ListLiteral>();
      empty->kind = ListKind::tuple;
      return empty;
    }
    E inner = tuple_or_expression();
    require_symbol(")");
    return inner;
  }
  // Calls next() for every element up to `end`. There may be a comma after the last.
  template <class Next>
  void with_commas(const char* end, Next&& next) {
    for (bool first = true; !skip(end); first = false) {
      if (!first) require_symbol(",");
      if (!first && skip(end)) return;
      next();
    }
  }
  E list() {
    auto node = make<ListLiteral>();
    with_commas("]", [&] { node->items.push_back(expression()); });
    return node;
  }
  E dict() {
    auto node = make<DictLiteral>();
    with_commas("}", [&] {
      E key = expression();
      require_symbol(":");
      node->members.emplace_back(std::move(key), expression());
    });
    return node;
  }

  E with_postfixes(E value) {
    for (;;) {
      if (skip(".")) {
        if (now().kind == TokenKind::integer) {
          auto node = make<Item>();
          auto index = make<Constant>();
          index->constant = take().number;
          node->object = std::move(value), node->index = std::move(index);
          value = std::move(node);
        } else {
          auto node = make<Attribute>();
          node->object = std::move(value), node->name = name();
          value = std::move(node);
        }
      } else if (skip("[")) {
        value = subscript(std::move(value));
      } else if (skip("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  E call(E callee) {
    auto node = make<Call>();
    node->callee = std::move(callee), node->arguments = arguments();
    return node;
  }

  E subscript(E value) {
    const auto part = [&]() -> E { return now().is(":") || now().is("]") ? nullptr : expression(); };
    E first = part();
    if (first && skip("]")) {
      auto node = make<Item>();
      node->object = std::move(value), node->index = std::move(first);
      return node;
    }
    auto node = make<Slice>();
    node->object = std::move(value), node->from = std::move(first);
    require_symbol(":");
    node->to = part();
    if (skip(":")) node->step = part();
    require_symbol("]");
    return node;
  }

  // After "("
  CallArguments arguments() {
    CallArguments all;
    with_commas(")", [&] {
      if (skip("**")) {
        all.dict = expression();
      } else if (skip("*")) {
        all.list = expression();
      } else if (now().kind == TokenKind::name && ahead().is("=")) {
        Text parameter = name();
        ++at_;
        all.named.emplace_back(std::move(parameter), expression());
      } else {
        all.positional.push_back(expression());
      }
    });
    return all;
  }

  std::unique_ptr<Filtered> filter(E operand) {
    auto node = make<Filtered>();
    node->operand = std::move(operand), node->name = to_utf8(name());
    if (skip("(")) node->arguments = arguments();
    return node;
  }

  E with_filters(E value) {
    for (;;) {
      if (skip("|")) {
        value = filter(std::move(value));
      } else if (skip_name("is")) {
        value = test(std::move(value));
      } else if (skip("(")) {  // calls what a filter or test gives
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  E test(E value) {
    const bool negated = skip_name("not");
    auto node = make<Test>();
    node->operand = std::move(value);
    node->name = to_utf8(name());
    const Token& next = now();
    const bool word = next.kind == TokenKind::name && !next.named("else") && !next.named("or") && !next.named("and") &&
                      !next.named("is") && !next.named("if") && !next.named("not") && !next.named("in");
    if (skip("(")) {
      node->arguments = arguments();
    } else if (word || next.kind == TokenKind::string || next.kind == TokenKind::integer ||
               next.kind == TokenKind::real || next.is("[") || next.is("{")) {
      node->arguments.positional.push_back(with_postfixes(primary()));
    }
    if (!negated) return node;
    return logic(Logic::negation, std::move(node), nullptr);
  }

  Names& names_;
  const std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0, nodes_ = 0;  // of the current statement and expression
};

}  // namespace streambp::jinja
