// The settings of a training step, and their names on the command line.
#pragma once

#include <array>
#include <utility>

#include "memory/schedule.h"
#include "parallel/group.h"
#include "training/objectives.h"
#include "training/optimizer.h"

namespace streambp {

// chunked_loss: checkpointing of whole layers, with the logits of some rows at a time. No run needs it, because stream
// mode takes less memory for the same work; it is planned for comparison with other trainers.
enum class Mode { full, checkpoint, chunked_loss, stream };
inline constexpr std::array<Mode, 3> kModes = {Mode::full, Mode::checkpoint, Mode::stream};
inline constexpr std::array<Mode, 4> kPlannedModes = {Mode::full, Mode::checkpoint, Mode::chunked_loss, Mode::stream};
inline const char* name(Mode mode) {
  constexpr const char* names[] = {"full", "checkpoint", "chunked-loss", "stream"};
  return names[static_cast<int>(mode)];
}
inline Mode mode_named(const std::string& mode) {
  return mode == "full" ? Mode::full : mode == "checkpoint" ? Mode::checkpoint : Mode::stream;
}

enum class DType { f32, f64, bf16 };
inline const char* name(DType type) {
  return type == DType::f32 ? "float32" : type == DType::f64 ? "float64" : "bfloat16";
}

inline constexpr std::array<std::pair<const char*, OptimizerKind>, 5> kOptimizers = {
    {{"none", OptimizerKind::none},
     {"adamw", OptimizerKind::adamw},
     {"adamw-bf16", OptimizerKind::adamw_bf16},
     {"adamw-8bit", OptimizerKind::adamw_8bit},
     {"muon", OptimizerKind::muon}}};
inline OptimizerKind optimizer_named(const std::string& optimizer) {
  for (const auto& [name, kind] : kOptimizers)
    if (optimizer == name) return kind;
  fail("no optimizer is named ", optimizer);
}

// Longer than any memory allows, and short enough to plan in seconds.
constexpr Index kLongestStream = Index{1} << 24;

struct StepSettings {
  Config config;
  DType dtype = DType::f32;  // of weights and activations
  OptimizerKind optimizer = OptimizerKind::adamw;
  Index micro_batches = 1;
  bool wide_gradient = false;  // float32 where weights are bfloat16
  Objective objective = {};
  Index documents = 1;  // in a micro-batch, of equal length
  Index tile = kTile;   // of the device; chunks are multiples of it
  DeviceKind device = DeviceKind::cpu;
  Ranks ranks = {};
  Places places = {};
  KeptSets kept = {};  // for backward, in stream mode
  Index block = 0;     // of stream mode
};

// Calls f.operator()<T, G>() with the types of weights and gradient.
template <class F>
auto with_types(const StepSettings& s, F&& f) {
  if (s.dtype == DType::f32) return f.template operator()<float, float>();
  if (s.dtype == DType::f64) return f.template operator()<double, double>();
  return s.wide_gradient ? f.template operator()<BFloat16, float>() : f.template operator()<BFloat16, BFloat16>();
}

inline Index tile_of(DeviceKind device) { return device == DeviceKind::cuda ? kGpuTile : kTile; }

// The default chunk of stream mode. That of a run also fills a GPU: the products of a narrow model with 2048 rows have
// fewer blocks than a GPU runs at once.
inline Index default_chunk(Index tile) { return std::max<Index>(tile, 512); }
inline Index default_chunk(const StepSettings& s) {
  const Index least = default_chunk(s.tile), filling = (Index{1} << 23) / s.config.hidden;
  return s.device == DeviceKind::cuda ? least * std::clamp<Index>(filling / least, 1, 4) : least;
}

// Chosen so that logits, which are never bfloat16, take about as much memory as the activations of a chunk; at least one
// tile.
inline Index head_chunk_for(const Config& c, Index chunk, Index tile, DType dtype) {
  const Index width =
      5 * c.hidden + 4 * c.heads * std::max(c.head_dim, c.global_head_dim) + (c.gated() ? 4 : 3) * c.mlp;
  const Index logits = dtype == DType::bf16 ? 2 * c.vocab : c.vocab;
  return std::min(chunk, std::max(chunk * width / logits / tile * tile, tile));
}

inline Schedule schedule_for(Mode mode, const Config& c, Index rows, Index chunk, Index tile = kTile,
                             DType dtype = DType::f32) {
  if (mode == Mode::full) return Schedule::full(rows);
  if (mode == Mode::checkpoint) return Schedule::checkpoint(rows);
  chunk = std::min(chunk, round_up(rows, kTile));
  const Schedule stream = Schedule::stream(chunk, head_chunk_for(c, chunk, tile, dtype));
  if (mode == Mode::stream) return stream;
  return {KeptParts::inputs(), round_up(rows, kTile), stream.head_chunk};
}
inline Schedule schedule_for(Mode mode, const StepSettings& s, Index rows, Index chunk) {
  Schedule schedule = schedule_for(mode, s.config, rows, chunk, s.tile, s.dtype);
  if (mode == Mode::checkpoint || mode == Mode::chunked_loss) schedule.kept = KeptParts::inputs(s.places.inputs);
  if (mode == Mode::stream) schedule.kept = s.kept.with(Part::input, s.places.inputs);
  if (mode == Mode::stream && s.block > 0 && s.block < rows) schedule.block = round_up(s.block, schedule.chunk);
  return schedule;
}

}  // namespace streambp
