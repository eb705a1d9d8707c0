// Files of `plan`: a page that plays the step, and what scripts/plot.py draws.
#pragma once

#include "commands/memory_options.h"
#include "commands/model_options.h"
#include "commands/page.h"
#include "commands/print.h"
#include "data/files/results.h"
#include "memory/summaries.h"
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

}  // namespace streambp
