// What would fit when a planned step does not.
#pragma once

#include "commands/memory_options.h"
#include "commands/text.h"
#include "data/files/adapters.h"
#include "text/json.h"

namespace streambp {

struct Alternative {
  std::string options;
  StepSettings settings;
  Allowed allowed;
};

// The most ranks, up to eight, that can share the heads of a model.
inline Index sequence_ranks(const Config& c) {
  const Index heads = sequence_divisor(c);
  Index ranks = 8;
  while (heads % ranks != 0) --ranks;
  return ranks;
}

inline std::vector<Alternative> alternatives(const StepSettings& s, const Allowed& allowed,
                                             const MemoryOptions& budget) {
  std::vector<Alternative> all;
  const auto other = [&](const std::string& options) -> Alternative& {
    return all.emplace_back(Alternative{options, s, allowed});
  };
  const bool wide = s.optimizer == OptimizerKind::adamw || s.optimizer == OptimizerKind::muon;
  if (s.dtype == DType::bf16 && wide) other("--optimizer adamw-bf16").settings.optimizer = OptimizerKind::adamw_bf16;
  for (const Base base : {Base::plain, Base::nf4}) {
    if (s.config.trained || s.config.base != Base::plain) continue;
    StepSettings& with = other(base == Base::nf4 ? "--lora 32 --base nf4" : "--lora 32").settings;
    with.config.trained.emplace();
    with.config.adapters = new_adapters(s.config, {.rank = 32, .alpha = 64});
    with.config.base = base, with.wide_gradient = s.dtype == DType::bf16;
  }
  if (allowed.budget.far == 0) {
    Allowed& with = other("--far-memory 256GiB").allowed;
    with.budget.far = parse_bytes("256GiB");
    with.places = budget.places(Mode::stream, s);
  }
  if (const Index ranks = sequence_ranks(s.config); s.ranks.all.size == 1 && ranks > 1) {
    const std::string n = std::to_string(ranks);
    other("--ranks " + n + " --sequence-ranks " + n).settings.ranks = {{0, ranks}, {0, ranks}};
  }
  return all;
}

// Prints other options with which a stream of `rows` fits (0: any stream), each with its longest stream. Returns them.
inline Json print_alternatives(const StepSettings& settings, const Allowed& allowed, Index rows,
                               const MemoryOptions& budget) {
  Json fitting = Json::array();
  TextTable table({"would fit", "longest stream"});
  const auto try_with = [&](const std::string& options, const StepSettings& s, const Allowed& a) {
    const Index longest = longest_that_fits(s, Mode::stream, a).rows;
    if (longest == 0 || longest < rows) return;
    fitting.push_back({{"options", options}, {"longest", longest}});
    table.add({options, std::to_string(longest)});
  };
  for (const Alternative& other : alternatives(settings, allowed, budget))
    try_with(other.options, other.settings, other.allowed);
  const Index longest = rows > 0 ? longest_that_fits(settings, Mode::stream, allowed).rows : 0;
  if (longest > 0) table.add({"a shorter --length", std::to_string(longest)});
  if (fitting.empty()) print("Adapters, a 4-bit base, far memory, more ranks: nothing of this fits.\n");
  if (!fitting.empty() || longest > 0) table.print();
  return fitting;
}

}  // namespace streambp
