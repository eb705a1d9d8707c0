#include "commands/plan_files.h"

#include "commands/print.h"
#include "data/files/results.h"
#include "training/plan.h"
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

void write_timeline(const std::string& file, Index rows, const Planned& planned) {
  const auto& [settings, chunk, answers] = planned;
  constexpr std::size_t parts = 1000;  // more than a plot can show
  Json all = answers;
  all.update({{"length", rows}, {"chunk", chunk}, {"kinds", kKindNames}});
  for (Mode mode : kModes) {
    const Timeline line = timeline(settings, rows, schedule_for(mode, settings, rows, chunk), parts);
    all["timeline"][name(mode)] = {{"flops", line.flops}, {"bytes", line.parts}};
  }
  write_results(file, std::move(all), -1);
  print("\nThe timeline is in %s; scripts/plot.py draws it.\n", file.c_str());
}

}  // namespace streambp
