// What a training step needs, found by running the step itself on the Plan device: peak memory by kind, and work. And
// the answers that follow: the chunk for a budget, the longest stream for a budget. There is no second formula.
#pragma once

#include "trainer.cuh"

namespace streambp {

enum class Mode { full, checkpoint, stream };
inline constexpr std::array<Mode, 3> kModes = {Mode::full, Mode::checkpoint, Mode::stream};
inline const char* name(Mode mode) {
  return mode == Mode::full ? "full" : mode == Mode::checkpoint ? "checkpoint" : "stream";
}

enum class DType { f32, f64, bf16 };

// Far beyond any memory, and short enough to plan in seconds.
constexpr Index kLongestStream = Index{1} << 24;

struct StepSettings {
  Config config;
  DType dtype = DType::f32;
  OptimizerKind optimizer = OptimizerKind::adamw;
  Index micro_batches = 1;
};

struct Usage {
  std::size_t peak = 0;
  Bytes by_kind{};
  double flops = 0;
};

// Logits take about as much memory as the activations of a chunk, or one tile where the vocabulary is large.
inline Index head_chunk_for(const Config& c, Index chunk) {
  const Index width = 5 * c.hidden + 4 * c.q_width() + (c.gated() ? 4 : 3) * c.mlp;
  return std::clamp(chunk * width / c.vocab / kTile * kTile, kTile, chunk);
}

inline Schedule schedule_for(Mode mode, const Config& c, Index rows, Index chunk) {
  if (mode == Mode::full) return Schedule::full(rows);
  if (mode == Mode::checkpoint) return Schedule::checkpoint(rows);
  chunk = std::min(chunk, round_up(rows, kTile));
  return Schedule::stream(chunk, head_chunk_for(c, chunk));
}

template <class T, class M>
Usage plan_types(const StepSettings& s, Index rows, const Schedule& schedule) {
  Plan dev;
  Trainer<Plan, T, T, M> trainer(dev, s.config, rows, s.optimizer);
  trainer.plan_step(s.micro_batches, schedule, s.optimizer);
  return {dev.arena.peak(), dev.arena.peak_by_kind(), dev.flops()};
}

inline Usage plan(const StepSettings& s, Index rows, const Schedule& schedule) {
  switch (s.dtype) {
    case DType::f32:
      return plan_types<float, float>(s, rows, schedule);
    case DType::f64:
      return plan_types<double, double>(s, rows, schedule);
    case DType::bf16:
      return s.optimizer == OptimizerKind::adamw_pure ? plan_types<BFloat16, BFloat16>(s, rows, schedule)
                                                      : plan_types<BFloat16, float>(s, rows, schedule);
  }
  return {};
}

// The largest n in 1 .. limit for which fits(n), or 0. fits must be true up to some n and false beyond.
template <class F>
Index largest(Index limit, F&& fits) {
  Index good = 0, bad = 1;
  while (bad <= limit && fits(bad)) good = bad, bad *= 2;
  bad = std::min(bad, limit + 1);
  while (bad - good > 1) {
    const Index middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

// The largest chunk whose step fits the budget, or 0.
inline Index chunk_for_budget(const StepSettings& s, Index rows, std::size_t budget) {
  return kTile * largest(ceil_div(rows, kTile), [&](Index tiles) {
           return plan(s, rows, schedule_for(Mode::stream, s.config, rows, tiles * kTile)).peak <= budget;
         });
}

// The longest stream whose step fits the budget, or 0, in whole tiles.
inline Index longest_for_budget(const StepSettings& s, Mode mode, Index chunk, std::size_t budget) {
  auto fits = [&](Index rows) { return plan(s, rows, schedule_for(mode, s.config, rows, chunk)).peak <= budget; };
  constexpr Index limit = kLongestStream / kTile;
  return kTile * largest(limit, [&](Index tiles) { return fits(tiles * kTile); });
}

}  // namespace streambp
