// Options for several processes: how they divide the work, and lanes, with which one process gives their bits.
#pragma once

#include "commands/option_table.h"
#include "model/config.h"
#include "parallel/processes.h"
#include "training/engine.h"

namespace streambp {

struct RankOptions {
  Index ranks = 0, sequence_ranks = 1, lanes = 0;
  std::string sharded = "state";

  void add_to(OptionTable& options);
  // For commands that only plan: how the ranks of a run divide it.
  void add_planned_to(OptionTable& options);

  // The grid of this run's ranks. Refuses a grid that the launcher or the model does not allow. All ranks must call it.
  Ranks grid(const Config& config, DeviceKind device) const;
  // The same for planning, seen from rank 0, which needs the most memory.
  Ranks planned(const Config& config) const;
  Ranks planned(const Config& config, Index count) const;
  // How much memory each rank may use: ranks on a machine share it, and all take as much as the one with the least. All
  // ranks must call it.
  std::size_t room(DeviceKind device) const;

 private:
  Index started() const;  // the number of processes, which must be --ranks
};

}  // namespace streambp
