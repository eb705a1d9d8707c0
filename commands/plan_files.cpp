#include "commands/plan_files.h"

#include "commands/memory_options.h"
#include "commands/model_options.h"
#include "commands/print.h"
#include "data/files/results.h"
#include "memory/summaries.h"
#include "training/timeline.h"

namespace streambp {

void write_sweep(const std::string& file, const Planned& planned) {
  const auto& [settings, chunk, answers] = planned;
  Json sweep = answers;
  for (Mode mode : kModes) {
    Json points = Json::array();
    for (Index rows = 1024; rows <= (Index{1} << 18); rows = rows * 5 / 4 / kTile * kTile) {
      points.push_back(
          {{"length", rows}, {"peak", plan(settings, rows, schedule_for(mode, settings, rows, chunk)).peak}});
    }
    sweep["curve"][name(mode)] = points;
  }
  sweep["chunk"] = chunk;
  write_results(file, std::move(sweep));
  print("\nThe curve is in %s; scripts/plot.py draws it.\n", file.c_str());
}

namespace {

struct Way {
  const char *name, *what;
  Mode mode;
  StepSettings settings;
};

Json recorded(const Way& way, Index rows, Index chunk, const Rates& rates) {
  const StepSettings& s = way.settings;
  const Schedule schedule = schedule_for(way.mode, s, rows, chunk);
  Json walk = {{"name", way.name},
               {"what", way.what},
               {"chunk", std::min(schedule.chunk * s.ranks.sequence.size, rows)},
               {"block", schedule.block * s.ranks.sequence.size},
               {"kept", describe(schedule.kept, s.config)},
               {"lowest", lowest_trained_layer(s.config)},
               {"far_inputs", schedule.kept.of(0).place(Part::input) == Place::far},
               {"seconds", predict(plan(s, rows, schedule), rates).total()},
               {"timeline", timeline(s, rows, schedule, rates)}};
  for (Index layer = 0; layer < s.config.layers; ++layer) {
    const KeptParts& parts = schedule.kept.of(layer);
    walk["stays"].push_back(stays_in_blocks(s.config, layer, schedule.block * s.ranks.sequence.size));
    walk["keeps_kv"].push_back(parts.have(Part::keys_values));
    walk["keeps"].push_back(!(parts == KeptParts::inputs(parts.place(Part::input))));
  }
  return walk;
}

}  // namespace

void write_timeline(const std::string& file, Index rows, const Planned& planned, const StepSettings& chosen,
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
      {"StreamBP", "Keeps layer inputs; computes one chunk of a layer again.", Mode::stream, plain}};
  if (chunk < rows)
    ways.push_back({"StreamBP, chunk by chunk", "A chunk goes through all layers; keeps K and V of all layers.",
                    Mode::stream, in_blocks});
  if (chosen.kept != plain.kept || (chosen.block != 0 && chosen.block != chunk))
    ways.push_back({"The chosen point of the dial", "Keeps what saves the most time in the memory there is.",
                    Mode::stream, chosen});
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
  page["walks"][2]["selected"] = true;
  const std::string named = answers.at("name"), model = named.empty() ? "a " + c.family + " model" : named;
  write_page(file, "One step of " + model + ": StreamBP, played", {"step.js"}, page);
  print("\nThe step is in %s; open it in a browser.\n", file.c_str());
}

}  // namespace streambp
