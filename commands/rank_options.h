// Options for several processes: how they divide the work, and lanes, with which one process gives their bits.
#pragma once

#include <unistd.h>

#include "commands/option_table.h"
#include "commands/text.h"
#include "model/config.h"
#include "parallel/processes.h"
#include "training/engine.h"

namespace streambp {

inline std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

// The numbers of ranks that can share the heads of a model: "1, 2, 4 or 8".
inline std::string divisors(Index heads) {
  std::vector<std::string> found;
  for (Index n = 1; n <= heads; ++n)
    if (heads % n == 0) found.push_back(std::to_string(n));
  std::string text = found.front();
  for (std::size_t i = 1; i < found.size(); ++i) text += (i + 1 < found.size() ? ", " : " or ") + found[i];
  return text;
}

inline void check_streams(Index ranks, Index sequence_ranks) {
  require(ranks % sequence_ranks == 0, "--sequence-ranks ", sequence_ranks,
          " does not divide the number of processes, ", ranks, "; start a multiple of it (plan: --ranks)");
}

inline void check_grid(const Config& config, Index ranks, Index sequence_ranks, Index lanes) {
  check_streams(ranks, sequence_ranks);
  const Index heads = sequence_divisor(config);
  if (heads % sequence_ranks != 0)
    fail("--sequence-ranks ", sequence_ranks,
         ": every rank computes its share of the key and value heads of each layer; use ", divisors(heads));
  require(sequence_ranks == 1 || lanes == 0 || lanes == sequence_ranks, "--sequence-ranks ", sequence_ranks,
          ": weight gradients are summed in ", counted(lanes, "lane"), ", by --lanes or since the run began; use ",
          lanes == 1 ? "" : std::to_string(lanes) + " sequence ranks, or ", "one sequence rank");
}

// All ranks compute on CPUs, or each on a GPU of its own. Other GPUs would give other bits.
inline void check_devices(DeviceKind device) {
  if (this_process().count == 1) return;
  const bool on_gpu = device == DeviceKind::cuda;
  require_equal("the device", on_gpu ? device_name(device) : "CPU",
                "other GPUs give other bits; choose GPUs of one kind with CUDA_VISIBLE_DEVICES");
  if (on_gpu)
    require_different("the GPU", gpu_address() + " of " + host_name(),
                      "start one process per GPU (the MIG slices of a GPU count as one)");
}

struct RankOptions {
  Index ranks = 0, sequence_ranks = 1, lanes = 0;
  std::string sharded = "state";

  void add_to(OptionTable& options) {
    options.section("Several processes (mpirun -n N streambp ...)");
    const Check count = checks::between(1, 1 << 12);
    options.add("--ranks", &ranks, "Require this number of processes", count, "as started");
    add_division(options, count);
    options.add("--lanes", &lanes, "Sum weight gradients as this number of sequence ranks does, for the same bits",
                count, "--sequence-ranks");
  }
  // For commands that only plan: how the ranks of a run divide it.
  void add_planned_to(OptionTable& options) {
    const Check count = checks::between(1, 1 << 12);
    ranks = 1;
    options.add("--ranks", &ranks, "Processes of the run, one per device; plans the one that needs the most memory",
                count);
    add_division(options, count);
  }

  // The grid of this run's ranks. Refuses a grid that the launcher or the model does not allow. All ranks must call it.
  Ranks grid(const Config& config, DeviceKind device) const {
    const Ranks shape = planned(config);
    check_devices(device);
    Ranks grid = ranks_of_run(sequence_ranks);
    grid.lanes = shape.lanes, grid.shard_weights = shape.shard_weights;
    return grid;
  }
  // The same for planning, seen from rank 0, which needs the most memory.
  Ranks planned(const Config& config) const { return planned(config, started()); }
  Ranks planned(const Config& config, Index count) const {
    check_grid(config, count, sequence_ranks, lanes);
    require(count > 1 || sharded == "state", "--shard weights is for several processes");
    return {{0, count},
            {0, sequence_ranks},
            sequence_ranks == 1 && lanes > 0 ? lanes : 1,
            count > 1 && sharded == "weights"};
  }
  // How much memory each rank may use: ranks on a machine share it, and all take as much as the one with the least. All
  // ranks must call it.
  std::size_t room(DeviceKind device) const {
    check_streams(started(), sequence_ranks);
    check_devices(device);
    const std::size_t room = device == DeviceKind::cuda ? free_memory(device, ranks_of_run(sequence_ranks))
                                                        : memory_for_steps(this_process().local_count);
    return static_cast<std::size_t>(least_of_ranks(static_cast<Index>(room)));
  }

 private:
  void add_division(OptionTable& options, const Check& count) {
    options.add("--sequence-ranks", &sequence_ranks,
                "Processes that share a token stream; the others have their own micro-batches. Divides the key/value "
                "heads",
                count);
    options.add(
        "--shard", &sharded,
        "What is divided among the processes. state: gradients and the optimizer's state; weights: weights too, "
        "gathered layer by layer",
        checks::one_of({"state", "weights"}));
  }
  // The number of processes, which must be --ranks.
  Index started() const {
    const Index count = this_process().count;
    require(ranks == 0 || ranks == count, "--ranks ", ranks, ", but ", counted(count, "process"),
            count == 1 ? " was" : " were", " started; start them with mpirun -n ", ranks,
            " streambp ... (on Debian or Ubuntu: apt-get install openmpi-bin)");
    return count;
  }
};

}  // namespace streambp
