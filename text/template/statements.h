// The statements of a template.
#pragma once

#include <optional>

#include "text/template/expressions.h"

namespace streambp::jinja {

enum class Flow { next, next_iteration, end_of_loop };  // continue, break

struct Statement {
  int line = 0;

  virtual ~Statement() = default;
  Flow execute(Run& run) const {
    const Run::Level level(run);
    try {
      return perform(run);
    } catch (const LocatedError&) {
      throw;
    } catch (const TemplateError& error) {
      throw LocatedError("line " + std::to_string(line) + ": " + error.what());
    }
  }

 protected:
  virtual Flow perform(Run& run) const = 0;
};
using Body = std::vector<std::unique_ptr<const Statement>>;

inline Flow execute(const Body& body, Run& run) {
  for (const auto& statement : body)
    if (const Flow flow = statement->execute(run); flow != Flow::next) return flow;
  return Flow::next;
}

// What the body prints, in its own scope.
inline Text printed(const Body& body, Run& run) {
  return run.printed([&] {
    const Run::Inner scope(run);
    execute(body, run);
  });
}

struct Print final : Statement {
  Text text;
  Flow perform(Run& run) const override { return run.print(text), Flow::next; }
};

struct Output final : Statement {
  ExpressionPointer expression;
  Flow perform(Run& run) const override {
    const Value v = expression->value(run);
    run.print(str(v));
    return Flow::next;
  }
};

struct If final : Statement {
  std::vector<std::pair<ExpressionPointer, Body>> branches;
  Body otherwise;
  Flow perform(Run& run) const override {
    for (const auto& [condition, body] : branches)
      if (is_true(condition->value(run))) return jinja::execute(body, run);
    return jinja::execute(otherwise, run);
  }
};

// What {% for %} and {% set %} assign to: a name, several that share a sequence's items, or a namespace's attribute.
struct Target {
  std::vector<int> names;
  bool several = false;
  Text attribute = {};

  void assign(Run& run, const Value& v) const {
    if (!attribute.empty()) {
      const Value* space = run.find(names[0]);
      expect(space && space->is<Namespace*>(), "an attribute is set that is not a namespace's");
      return std::get<Namespace*>(space->held)->set(attribute, v);
    }
    if (!several) return run.set(names[0], v);
    const std::vector<Value> items = elements_of(v);
    expect(items.size() == names.size(), items.size(), " values for ", names.size(), " names");
    for (std::size_t i = 0; i < names.size(); ++i) run.set(names[i], items[i]);
  }
};

struct Set final : Statement {
  Target target;
  ExpressionPointer value;
  Flow perform(Run& run) const override { return target.assign(run, value->value(run)), Flow::next; }
};

// {% set x %}...{% endset %}, or {% filter f %}...{% endfilter %} without a target
struct TextBlock final : Statement {
  std::optional<Target> target;
  std::vector<std::unique_ptr<Filtered>> filters;  // without operands
  Body body;
  Flow perform(Run& run) const override {
    Value v = printed(body, run);
    for (const auto& f : filters) v = filtered(run, v, f->name, f->arguments.values(run));
    target ? target->assign(run, v) : run.print(str(v));
    return Flow::next;
  }
};

// Marks what it prints as learned.
struct Generation final : Statement {
  Body body;
  Flow perform(Run& run) const override {
    Text text = printed(body, run);
    for (char32_t& c : text) c |= kLearned;
    return run.print(text), Flow::next;
  }
};

struct Jump final : Statement {
  Flow flow = Flow::next;
  Flow perform(Run&) const override { return flow; }
};

// --- Loops ---

struct For final : Statement {
  Target target;
  ExpressionPointer elements, condition;
  Body body, otherwise;
  bool recursive = false;
  int loop = 0;  // the name "loop"

  Flow perform(Run& run) const override { return iterate(run, elements->value(run), 1), Flow::next; }
  void iterate(Run& run, const Value& all, std::int64_t depth) const;
};

// The variable `loop`
struct LoopState final : Object, std::enable_shared_from_this<LoopState> {
  const For* code = nullptr;
  Run* run = nullptr;
  std::vector<Value> items;
  std::int64_t depth = 1;
  std::size_t at = 0;

  bool callable() const override { return code->recursive; }
  Value call(const Arguments& a) const override {
    return run->printed([&] { code->iterate(*run, a.at(0, "elements"), depth + 1); });
  }
  Value attribute(TextView name) const override {
    const std::string n = to_utf8(name);
    const auto i = static_cast<std::int64_t>(at), size = static_cast<std::int64_t>(items.size());
    if (n == "index") return i + 1;
    if (n == "index0") return i;
    if (n == "revindex") return size - i;
    if (n == "revindex0") return size - i - 1;
    if (n == "first") return i == 0;
    if (n == "last") return i + 1 == size;
    if (n == "length") return size;
    if (n == "depth") return depth;
    if (n == "depth0") return depth - 1;
    if (n == "previtem") return at > 0 ? items[at - 1] : Value(Undefined{"the item before the first"});
    if (n == "nextitem") return i + 1 < size ? items[at + 1] : Value(Undefined{"the item after the last"});
    if (n == "cycle") {
      const std::shared_ptr<const LoopState> self = shared_from_this();
      const auto body = [self](const Arguments& a) {
        expect(!a.positional.empty(), "cycle needs values");
        return a.positional[self->at % a.positional.size()];
      };
      return function(body, std::shared_ptr<const Object>(self));
    }
    return Undefined{"an attribute of a loop"};
  }
};

inline void For::iterate(Run& run, const Value& all, std::int64_t depth) const {
  const auto state = std::make_shared<LoopState>();
  state->code = this, state->run = &run, state->depth = depth;
  deepen(state->Object::depth, all);
  for (Value& item : elements_of(all)) {
    spend(16);
    if (condition) {
      const Run::Inner scope(run);
      target.assign(run, item);
      if (!is_true(condition->value(run))) continue;
    }
    state->items.push_back(std::move(item));
  }
  if (state->items.empty()) {
    const Run::Inner scope(run);
    jinja::execute(otherwise, run);
  }
  for (state->at = 0; state->at < state->items.size(); ++state->at) {
    spend(16);
    const Run::Inner scope(run);
    run.set(loop, std::shared_ptr<const Object>(state));
    target.assign(run, state->items[state->at]);
    if (jinja::execute(body, run) == Flow::end_of_loop) break;
  }
}

// --- Macros ---

struct MacroCode {
  std::string name;
  std::vector<std::pair<int, ExpressionPointer>> parameters;  // with their defaults, or null
  std::vector<Text> names;                                    // of the parameters
  Body body;
  int caller = 0, varargs = 0, kwargs = 0;  // these names
};

struct Macro final : Object {
  const MacroCode* code = nullptr;
  Run* run = nullptr;
  std::shared_ptr<Scope> scope;

  Value attribute(TextView n) const override {
    return n == to_text("name") ? Value(code->name.c_str()) : Value(Undefined{"an attribute of a macro"});
  }
  Value call(const Arguments& a) const override {
    const Run::Inner inner(*run, scope);
    std::vector<Value> extra;
    std::vector<std::pair<Value, Value>> named;
    const std::size_t count = code->parameters.size();
    for (std::size_t i = count; i < a.positional.size(); ++i) extra.push_back(a.positional[i]);
    for (const auto& [name, value] : a.named) {
      if (name == to_text("caller"))
        run->set(code->caller, value);
      else if (std::ranges::none_of(code->names, [&](const Text& known) { return same(known, name); }))
        named.emplace_back(name, value);
    }
    run->set(code->varargs, Value(std::move(extra), ListKind::tuple));
    run->set(code->kwargs, dict_of(std::move(named)));
    for (std::size_t i = 0; i < count; ++i) {
      const auto& [name, otherwise] = code->parameters[i];
      const Value* given = i < a.positional.size() ? &a.positional[i] : a.find(to_utf8(code->names[i]));
      run->set(name, given ? *given : otherwise ? otherwise->value(*run) : Value(Undefined{"a parameter"}));
    }
    return run->printed([&] { jinja::execute(code->body, *run); });
  }
};

inline Value macro(Run& run, const MacroCode& code) {
  const auto made = std::make_shared<Macro>();
  made->code = &code, made->run = &run, made->scope = run.capture();
  return std::shared_ptr<const Object>(made);
}

struct MacroStatement final : Statement {
  MacroCode code;
  int name = 0;
  Flow perform(Run& run) const override { return run.set(name, macro(run, code)), Flow::next; }
};

struct CallBlock final : Statement {
  std::unique_ptr<const Call> call;
  MacroCode body;
  Flow perform(Run& run) const override {
    const Value v = call->call(run, macro(run, body));
    return run.print(str(v)), Flow::next;
  }
};

}  // namespace streambp::jinja
