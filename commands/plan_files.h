// What `plan` shows beside its table: a page that plays the step, what scripts/plot.py draws, and what would fit when a
// step does not.
#pragma once

#include "commands/memory_options.h"
#include "commands/model_options.h"
#include "commands/page.h"
#include "commands/text.h"
#include "data/files/adapters.h"
#include "data/files/results.h"
#include "memory/summaries.h"
#include "text/json.h"
#include "training/fit.h"
#include "training/timeline.h"

namespace streambp {

struct Way {
  const char *name, *what;
  Mode mode;
  StepSettings settings;
};

inline Json recorded(const Way& way, Index rows, Index chunk, const Rates& rates) {
  const StepSettings& s = way.settings;
  const Schedule schedule = schedule_for(way.mode, s, rows, chunk);
  const Usage usage = plan(s, rows, schedule);
  Json walk = {{"name", way.name},
               {"what", way.what},
               {"chunk", std::min(schedule.chunk * s.ranks.sequence.size, rows)},
               {"block", schedule.block * s.ranks.sequence.size},
               {"kept", describe(schedule.kept, s.config)},
               {"lowest", lowest_trained_layer(s.config)},
               {"far_inputs", schedule.kept.of(0).place(Part::input) == Place::far},
               {"seconds", predict(usage, rates).total()},
               {"flops", usage.flops},
               {"timeline", timeline(s, rows, schedule, rates)}};
  for (Index layer = 0; layer < s.config.layers; ++layer) {
    const KeptParts& parts = schedule.kept.of(layer);
    walk["stays"].push_back(stays_in_blocks(s.config, layer, schedule.block * s.ranks.sequence.size));
    walk["keeps_kv"].push_back(parts.have(Part::keys_values));
    walk["keeps"].push_back(!(parts == KeptParts::inputs(parts.place(Part::input))));
  }
  return walk;
}

// What was planned: of a step of this model, and the answers so far.
struct Planned {
  const StepSettings& settings;
  Index chunk;
  const Json& answers;
};

// Another step: with settings that the user has given, or else the fastest that fits.
struct ChosenStep {
  StepSettings settings;
  bool given;
};

// Peak memory against length, in the three modes.
inline void write_sweep(const std::string& file, const Planned& planned) {
  const auto& [settings, chunk, answers] = planned;
  Json sweep = answers;
  for (Mode mode : kPlannedModes) {
    Json points = Json::array();
    for (Index rows = 1024; rows <= (Index{1} << 18); rows = rows * 5 / 4 / kTile * kTile) {
      points.push_back(
          {{"length", rows}, {"peak", plan(settings, rows, schedule_for(mode, settings, rows, chunk)).peak}});
    }
    sweep["curve"][name(mode)] = points;
  }
  sweep["chunk"] = chunk;
  write_results(file, std::move(sweep));
  print("\nThe curve is in %s; scripts/plot.py draws it.\n", file);
}

// A step in the three modes, chunk by chunk, and as chosen if that differs, as a page that plays it.
inline void write_timeline(const std::string& file, Index rows, const Planned& planned, const ChosenStep& chosen,
                           const Rates& rates) {
  const auto& [settings, chunk, answers] = planned;
  const Config& c = settings.config;
  StepSettings plain = settings;
  plain.kept = {}, plain.block = 0;
  StepSettings in_blocks = plain;
  in_blocks.block = chunk;
  std::vector<Way> ways = {
      {"Full memory", "Keeps the activations of every layer.", Mode::full, plain},
      {"Gradient checkpointing", "Keeps layer inputs; computes a whole layer again.", Mode::checkpoint, plain},
      {"With a chunked loss", "Checkpointing, with some rows of logits at a time.", Mode::chunked_loss, plain},
      {"StreamBP", "Keeps layer inputs; computes one chunk of a layer again.", Mode::stream, plain}};
  if (chunk < rows)
    ways.push_back({"StreamBP, chunk by chunk",
                    "A chunk goes through all layers; K and V stay, of layers with windows what later chunks see.",
                    Mode::stream, in_blocks});
  std::size_t selected = 3;
  if (const StepSettings& s = chosen.settings; s.kept != plain.kept || (s.block != 0 && s.block != chunk)) {
    if (chosen.given) selected = ways.size();
    ways.push_back(
        {chosen.given ? "Your settings" : "The fastest step that fits",
         chosen.given ? "What --keep and --block-rows say." : "Keeps what saves the most time in the memory there is.",
         Mode::stream, s});
  }
  Json page = answers;
  page.update({{"length", rows},
               {"model", describe(c)},
               {"layers", c.layers},
               {"window", c.window},
               {"micro_batches", settings.micro_batches},
               {"kinds", kKindNames},
               {"command", command_line()},
               {"source", resource("streambp.cuh").text}});
  for (Index layer = 0; layer < c.layers; ++layer) page["local"].push_back(c.is_local(layer));
  for (const Way& way : ways) page["walks"].push_back(recorded(way, rows, chunk, rates));
  page["walks"][selected]["selected"] = true;
  const std::string named = answers.at("name"), model = named.empty() ? "a " + c.family + " model" : named;
  write_page(file, "One step of " + model + ": StreamBP, played", {"walk.js", "step.js"}, page);
  print("\nThe step is in %s; open it in a browser.\n", file);
}

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
  if (allowed.budget.far > 0 && s.config.keeps_mxfp4()) other("--base unpacked").settings.config.mxfp4 = false;
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
