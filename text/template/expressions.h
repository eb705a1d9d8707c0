// The expressions of a template, each with its value.
#pragma once

#include "text/template/tests.h"

namespace streambp::jinja {

struct Expression {
  int line = 0;

  virtual ~Expression() = default;
  Value value(Run& run) const {
    const Run::Level level(run);
    return evaluate(run);
  }

 protected:
  virtual Value evaluate(Run& run) const = 0;
};
using ExpressionPointer = std::unique_ptr<const Expression>;

struct Constant final : Expression {
  Value constant;
  Value evaluate(Run&) const override { return constant; }
};

struct Variable final : Expression {
  int name = 0;
  std::string text;
  Value evaluate(Run& run) const override {
    const Value* found = run.find(name);
    return found ? *found : Value(Undefined{text.c_str()});
  }
};

struct ListLiteral final : Expression {
  std::vector<ExpressionPointer> items;
  ListKind kind = ListKind::list;
  Value evaluate(Run& run) const override {
    std::vector<Value> values;
    for (const auto& item : items) values.push_back(item->value(run));
    return {std::move(values), kind};
  }
};

struct DictLiteral final : Expression {
  std::vector<std::pair<ExpressionPointer, ExpressionPointer>> members;
  Value evaluate(Run& run) const override {
    std::vector<std::pair<Value, Value>> values;
    for (const auto& [key, value] : members) {
      Value name = key->value(run);  // before its value
      values.emplace_back(std::move(name), value->value(run));
    }
    return dict_of(std::move(values));
  }
};

struct Condition final : Expression {
  ExpressionPointer condition, yes, no;
  Value evaluate(Run& run) const override {
    if (is_true(condition->value(run))) return yes->value(run);
    return no ? no->value(run) : Value(Undefined{"the value of an if without else"});
  }
};

struct Logic final : Expression {
  enum Kind { conjunction, disjunction, negation } kind = negation;
  ExpressionPointer left, right;
  Value evaluate(Run& run) const override {
    Value a = left->value(run);
    if (kind == negation) return !is_true(a);
    return is_true(a) == (kind == disjunction) ? a : right->value(run);
  }
};

// a < b <= c ...
struct Comparison final : Expression {
  ExpressionPointer first;
  std::vector<std::pair<Comparator, ExpressionPointer>> others;

  Value evaluate(Run& run) const override {
    Value a = first->value(run);
    for (const auto& [compare, other] : others) {
      Value b = other->value(run);
      if (!compare(a, b)) return false;
      a = std::move(b);
    }
    return true;
  }
};

inline Value repeated(const Value& value, std::int64_t times) {
  expect(times <= kMostRepeats, "a value is repeated more than ", kMostRepeats, " times");
  const auto n = static_cast<std::size_t>(std::max<std::int64_t>(times, 0));
  limit(n * value.size());
  Text text;
  List list{{}, value.list() ? value.list()->kind : ListKind::list};
  for (std::size_t i = 0; i < n; ++i) {
    if (value.text()) text += *value.text();
    if (value.list()) list.items.insert(list.items.end(), value.list()->items.begin(), value.list()->items.end());
  }
  return value.text() ? Value(std::move(text)) : Value(std::move(list));
}

struct Arithmetic final : Expression {
  Operator op = Operator::plus;
  ExpressionPointer left, right;

  Value evaluate(Run& run) const override {
    const Value a = left->value(run), b = right->value(run);
    const auto is_list = [](const Value& v) { return v.list() && v.list()->kind <= ListKind::tuple; };
    const auto sequence = [&](const Value& v) { return v.text() || is_list(v); };
    if (op == Operator::join) return joined({a, b}, {});
    if (a.integer() && b.integer() && op != Operator::divide && (op != Operator::power || b.to_integer() >= 0))
      return of_integers(op, a.to_integer(), b.to_integer());
    if (a.number() && b.number()) return of_reals(op, a.to_double(), b.to_double());
    if (op == Operator::modulo && a.text()) return formatted(*a.text(), b);
    if (op == Operator::plus && a.text() && b.text()) return sum_of(*a.text(), *b.text());
    if (op == Operator::plus && is_list(a) && is_list(b) && a.list()->kind == b.list()->kind) {
      List list = *a.list();
      list.depth = 1;
      list.items.insert(list.items.end(), b.list()->items.begin(), b.list()->items.end());
      return list;
    }
    if (op == Operator::times && sequence(a) && b.integer()) return repeated(a, b.to_integer());
    if (op == Operator::times && sequence(b) && a.integer()) return repeated(b, a.to_integer());
    constexpr const char* symbols[] = {"+", "-", "*", "/", "//", "%", "**", "~"};
    refuse("the operator ", symbols[static_cast<int>(op)], " cannot be used with ", described(a), " and ",
           described(b));
  }
};

struct Sign final : Expression {
  bool negative = false;
  ExpressionPointer operand;
  Value evaluate(Run& run) const override {
    const Value v = operand->value(run);
    expect(v.number(), "a sign before ", described(v));
    if (v.is<double>()) return negative ? -v.to_double() : v.to_double();
    return negative ? of_integers(Operator::minus, 0, v.to_integer()) : Value(v.to_integer());
  }
};

// object.name
struct Attribute final : Expression {
  ExpressionPointer object;
  Text name;
  Value evaluate(Run& run) const override {
    const Value v = object->value(run);
    expect(!v.undefined(), described(v));
    spend(name.size());
    if (const Object* inner = v.object()) return inner->attribute(name);
    if (Value method = method_of(v, name); !method.undefined()) return method;
    return v.dict() ? item_of(v, Value(name)) : Undefined{"an attribute"};
  }
};

// object[index]
struct Item final : Expression {
  ExpressionPointer object, index;
  Value evaluate(Run& run) const override {
    const Value v = object->value(run), i = index->value(run);
    expect(!v.undefined(), described(v));
    spend(i.size());
    if (const Object* inner = v.object()) return i.text() ? inner->attribute(*i.text()) : Value();
    Value found = item_of(v, i);
    return found.undefined() && i.text() ? method_of(v, *i.text()) : found;
  }
};

// object[from:to:step]
struct Slice final : Expression {
  ExpressionPointer object, from, to, step;
  Value evaluate(Run& run) const override {
    const Value v = object->value(run);
    const auto part = [&](const ExpressionPointer& e) {
      const Value bound = e ? e->value(run) : Value(None{});
      expect(bound.none() || bound.integer(), "a slice needs integers");
      return bound;
    };
    const Value first = part(from), last = part(to), stride = part(step);
    return slice_of(v, first, last, stride);
  }
};

struct CallArguments {
  std::vector<ExpressionPointer> positional;
  std::vector<std::pair<Text, ExpressionPointer>> named;
  ExpressionPointer list, dict;  // *list, **dict

  Arguments values(Run& run) const {
    Arguments all;
    for (const auto& e : positional) all.positional.push_back(e->value(run));
    if (list)
      for (Value& v : elements_of(list->value(run))) all.positional.push_back(std::move(v));
    for (const auto& [name, e] : named) spend(name.size()), all.named.emplace_back(name, e->value(run));
    if (!dict) return all;
    const Value more = dict->value(run);
    expect(more.dict() && more.size() <= 1000, "** needs a dict of at most 1000 members");
    for (const auto& [key, value] : more.dict()->members) {
      expect(key.text(), "** needs names");
      spend(key.size());
      all.named.emplace_back(*key.text(), value);
    }
    return all;
  }
};

struct Call final : Expression {
  ExpressionPointer callee;
  CallArguments arguments;

  Value evaluate(Run& run) const override { return call(run, {}); }
  // caller: the body of a {% call %} block
  Value call(Run& run, const Value& caller) const {
    const Value v = callee->value(run);
    expect(v.object() && v.object()->callable(), v.undefined() ? described(v) : std::string(type_of(v)) + " is called");
    Arguments values = arguments.values(run);
    if (!caller.undefined()) values.named.emplace_back(to_text("caller"), caller);
    return v.object()->call(values);
  }
};

// value | name(arguments)
struct Filtered : Expression {
  ExpressionPointer operand;
  std::string name;
  CallArguments arguments;
  Value evaluate(Run& run) const override {
    const Value v = operand->value(run);
    return filtered(run, v, name, arguments.values(run));
  }
};

// value is name(arguments)
struct Test final : Filtered {
  Value evaluate(Run& run) const override {
    const Value v = operand->value(run);
    return passes(run, v, name, arguments.values(run));
  }
};

}  // namespace streambp::jinja
