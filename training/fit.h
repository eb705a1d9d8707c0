// Chooses the chunk, what is kept for backward, and what goes to far memory: of what fits, the step with the least
// predicted time.
#pragma once

#include <optional>

#include "training/plan.h"

namespace streambp {

// The share of the rate of large matrix products that the products of a step reach, and the share of the rate of a copy
// that norms, activations and the like reach: measured on a CPU (docs/devices.md).
constexpr double kEfficiency = 0.92, kCopyEfficiency = 0.75;

// How fast a machine is.
struct Rates {
  double matmul;       // FLOP/s of large matrix products
  double attention;    // FLOP/s of attention
  double memory;       // bytes per second that a copy within memory reads and writes
  double far;          // bytes per second to or from far memory
  double far_streams;  // 2 if both directions can have this rate at once
  double link = 50e9;  // bytes per second that a rank sends
};
// Orders of magnitude, for choices that must not depend on a measurement. For a GPU, those of an H100 on PCIe 5; attention
// uses mma.sync there, whose best kernels reach about these rates. `bench --profile` measures the true ones.
inline Rates usual_rates(DeviceKind device, Index head_dim) {
  if (device == DeviceKind::cpu) return {400e9, 0.82 * 400e9, 35e9, 1e9, 1};
  return {600e12, head_dim <= 64 ? 200e12 : head_dim <= 128 ? 300e12 : 150e12, 2.8e12, 25e9, 2};
}

// The predicted time of a step. What is saved for backward, and weights for a layer, are copied beside the computation.
// Gradients are waited for, and so is all that the update copies.
struct Seconds {
  double compute = 0, beside = 0, waiting = 0, sent = 0;
  double total() const { return std::max(compute, beside) + waiting + sent; }
};
Seconds predict(const Usage& usage, const Rates& rates);

// Which chunks to try, in stream mode: of more rows than the default, only one that is given.
struct ChunkRange {
  Index least, most;
};
inline ChunkRange exactly(Index chunk) { return {chunk, chunk}; }
inline ChunkRange up_to(Index chunk) { return {0, chunk}; }

// Which parts of a layer, beside its input, to keep: always the same, or what saves the most time in the memory there is.
struct KeptChoice {
  std::optional<KeptSets> only = {};
  bool far = false;  // or may be in far memory
};

// What a step may use.
struct Allowed {
  ChunkRange chunks;
  Capacity budget;
  std::vector<Places> places;  // from all near to all far
  KeptChoice kept = {};
  std::optional<Index> block = {};  // the only one to try
};

// Sizes of blocks that differ enough to matter, after 0, the whole stream.
std::vector<Index> blocks_to_try(Mode mode, Index rows, Index chunk, const std::optional<Index>& only);

// The chosen step, and what it uses. Chunk 0: nothing fits.
struct Fit {
  Index chunk = 0;
  Places places = {};
  KeptSets kept = {};
  Index block = 0;
  Usage usage = {};

  StepSettings settings(StepSettings s) const {
    s.places = places, s.kept = kept, s.block = block;
    return s;
  }
};
Fit fit(const StepSettings& s, Mode mode, Index rows, const Allowed& allowed, const Rates& rates);

// Of all allowed steps, the one that comes closest to fitting: in the first places, near ones first, that leave few enough
// bytes near, or in the last.
Fit closest(const StepSettings& s, Mode mode, Index rows, const Allowed& allowed);

// The longest stream, in whole tiles, for which a step with the largest of the chunks fits, and the settings of this step.
// 0 rows: none fits.
struct Longest {
  Index rows;
  StepSettings settings;
};
Longest longest_that_fits(const StepSettings& s, Mode mode, const Allowed& allowed);

// The fastest steps in near memory, at so many budgets between the least that a step needs and that of a step that computes
// nothing twice.
std::vector<Fit> fastest_by_memory(const StepSettings& s, Index rows, Allowed allowed, const Rates& rates, int steps);

}  // namespace streambp
