// One execution of a template: variables in nested scopes, the output, and limits on time, memory and recursion, so that
// a hostile template or conversation ends in an error.
#pragma once

#include "text/template/print.h"

namespace streambp::jinja {

struct Scope {
  explicit Scope(std::shared_ptr<Scope> outer = {})
      : outer(std::move(outer)), depth(this->outer ? this->outer->depth + 1 : 0) {
    expect(depth <= 2000, "more than 2000 scopes are nested");
  }
  std::shared_ptr<Scope> outer;
  int depth;
  std::vector<std::pair<int, Value>> variables = {};  // by the number of their name
};

class Run {
 public:
  explicit Run(std::size_t work) : work_(work), scope_(std::make_shared<Scope>()) { budget = &work_; }
  Run(const Run&) = delete;
  ~Run() {
    budget = nullptr;
    for (const auto& scope : captured_) scope->variables.clear();  // macros and their scopes hold each other
  }

  // The value of a variable, or null.
  const Value* find(int name) {
    for (const Scope* scope = scope_.get(); scope; scope = scope->outer.get()) {
      spend(1 + scope->variables.size() / 8);
      for (const auto& [key, value] : scope->variables)
        if (key == name) return &value;
    }
    return nullptr;
  }
  void set(int name, Value value) {
    spend(scope_->variables.size() / 8);
    for (auto& [key, old] : scope_->variables)
      if (key == name) return void(old = std::move(value));
    scope_->variables.emplace_back(name, std::move(value));
  }

  // A scope within another one until the end of a C++ block.
  class Inner {
   public:
    explicit Inner(Run& run) : Inner(run, run.scope_) {}
    Inner(Run& run, std::shared_ptr<Scope> outer)
        : run_(run), before_(std::exchange(run.scope_, std::make_shared<Scope>(std::move(outer)))) {}
    ~Inner() { run_.scope_ = std::move(before_); }
    Inner(const Inner&) = delete;

   private:
    Run& run_;
    std::shared_ptr<Scope> before_;
  };

  // The current scope, for a macro that outlives it.
  std::shared_ptr<Scope> capture() { return captured_.emplace_back(scope_); }

  // Recursion, until the end of a C++ block.
  class Level {
   public:
    explicit Level(Run& run) : run_(run) {
      expect(run.depth_ < 1000, "the template recurses more deeply than 1000 levels");
      ++run.depth_;
      spend(16);
    }
    ~Level() { --run_.depth_; }
    Level(const Level&) = delete;

   private:
    Run& run_;
  };

  Namespace* new_namespace() { return namespaces_.emplace_back(std::make_unique<Namespace>()).get(); }

  void print(TextView text) {
    spend(kMade * text.size());
    output_ += text;
  }
  // What f prints.
  template <class F>
  Text printed(F&& f) {
    Text before = std::exchange(output_, {});
    f();
    return std::exchange(output_, std::move(before));
  }

 private:
  std::size_t work_;
  int depth_ = 0;
  std::vector<std::unique_ptr<Namespace>> namespaces_;
  std::shared_ptr<Scope> scope_;
  std::vector<std::shared_ptr<Scope>> captured_;
  Text output_;
};

}  // namespace streambp::jinja
