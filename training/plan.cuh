// What a training step needs, found by running the step itself on the Plan device: peak memory by kind, and work. And
// the answers that follow: the chunk for a budget, the longest stream for a budget. There is no second formula.
#pragma once

#include "training/trainer.cuh"

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
  DType dtype = DType::f32;  // of weights and activations
  OptimizerKind optimizer = OptimizerKind::adamw;
  Index micro_batches = 1;
  bool wide_gradient = false;  // float32 where weights are bfloat16
  Objective objective = {};
  Index documents = 1;  // in a micro-batch, of equal length
  Index tile = kTile;   // of the device: what chunks are multiples of
};

// Calls f.operator()<T, G, M>() with the types of weights, gradient and moments.
template <class F>
auto with_types(const StepSettings& s, F&& f) {
  const bool pure = s.optimizer == OptimizerKind::adamw_pure;
  if (s.dtype == DType::f32) return f.template operator()<float, float, float>();
  if (s.dtype == DType::f64) return f.template operator()<double, double, double>();
  if (s.wide_gradient) {
    return pure ? f.template operator()<BFloat16, float, BFloat16>() : f.template operator()<BFloat16, float, float>();
  }
  return pure ? f.template operator()<BFloat16, BFloat16, BFloat16>()
              : f.template operator()<BFloat16, BFloat16, float>();
}

struct Usage {
  std::size_t peak = 0;
  Bytes by_kind{};
  double flops = 0;
};

// Logits take about as much memory as the activations of a chunk, or one tile where the vocabulary is large.
inline Index head_chunk_for(const Config& c, Index chunk, Index tile) {
  const Index width = 5 * c.hidden + 4 * c.q_width() + (c.gated() ? 4 : 3) * c.mlp;
  return std::min(chunk, std::max(chunk * width / c.vocab / tile * tile, tile));
}

inline Schedule schedule_for(Mode mode, const Config& c, Index rows, Index chunk, Index tile = kTile) {
  if (mode == Mode::full) return Schedule::full(rows);
  if (mode == Mode::checkpoint) return Schedule::checkpoint(rows);
  chunk = std::min(chunk, round_up(rows, kTile));
  return Schedule::stream(chunk, head_chunk_for(c, chunk, tile));
}

inline Usage plan(const StepSettings& s, Index rows, const Schedule& schedule) {
  return with_types(s, [&]<class T, class G, class M>() -> Usage {
    Plan dev;
    Trainer<Plan, T, G, M> trainer(dev, s.config, rows, s.optimizer, s.objective);
    trainer.plan_step(s.micro_batches, schedule, s.optimizer, s.documents);
    return {dev.arena.peak(), dev.arena.peak_by_kind(), dev.flops()};
  });
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
  return s.tile * largest(ceil_div(rows, s.tile), [&](Index tiles) {
           return plan(s, rows, schedule_for(Mode::stream, s.config, rows, tiles * s.tile, s.tile)).peak <= budget;
         });
}

// The longest stream whose step fits the budget, or 0, in whole tiles.
inline Index longest_for_budget(const StepSettings& s, Mode mode, Index chunk, std::size_t budget) {
  auto fits = [&](Index rows) {
    return plan(s, rows, schedule_for(mode, s.config, rows, chunk, s.tile)).peak <= budget;
  };
  constexpr Index limit = kLongestStream / kTile;
  return kTile * largest(limit, [&](Index tiles) { return fits(tiles * kTile); });
}

}  // namespace streambp
