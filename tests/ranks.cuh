// Shared by the tests of ranks on both devices: any grid of ranks gives the bits of one process with as many lanes.
#pragma once

#include "parallel/connection.cuh"
#include "tests/support.cuh"
#include "tests/thread_ranks.h"

namespace streambp {

// Heads that two and four ranks can share.
inline std::vector<Family> models_for_ranks() {
  std::vector<Family> all;
  auto add = [&](std::string name, Config c) { return &all.emplace_back(Family{std::move(name), c}).config; };
  add("gpt2", make_config("gpt2", {67, 24, 2, 4, 4, 6, 100, 1200, true}));
  add("qwen3", make_config("qwen3", {83, 30, 2, 8, 4, 6, 45, 0, true}));
  Config* c = add("cohere", make_config("cohere", {71, 28, 1, 8, 4, 6, 36, 0, true}));
  c->qk_norm = QkNorm::own_weights, c->logit_scale = 0.4;
  c = add("gemma3", make_config("gemma3", {89, 26, 2, 4, 4, 10, 44, 0, true}));
  c->window = 20, c->local = {true, false}, c->local_rope_theta = 100, c->sinks = true;
  add("lfm2", make_config("lfm2", {61, 26, 3, 4, 4, 6, 38, 0, true}))->mixers = {
      MixerKind::convolution, MixerKind::attention, MixerKind::convolution};
  c = add("qwen3_5", make_config("qwen3_5", {59, 26, 2, 4, 4, 8, 38, 0, false}));
  c->rotary_share = 0.5, c->mixers = {MixerKind::delta_rule, MixerKind::attention};
  c->delta_key_heads = 4, c->delta_value_heads = 8, c->delta_key_dim = 5, c->delta_value_dim = 3;
  c = add("olmo_hybrid", make_config("olmo_hybrid", {53, 28, 2, 4, 4, 7, 36, 0, false}));
  c->delta_key_dim = 4, c->delta_value_dim = 6;
  c = add("qwen3_5_moe", make_config("qwen3_5_moe", {59, 26, 2, 4, 4, 8, 38, 0, false}));
  c->mixers = {MixerKind::delta_rule, MixerKind::attention}, c->experts = 6, c->rotary_share = 0.5;
  c->delta_key_heads = 4, c->delta_value_heads = 4, c->delta_key_dim = 5, c->delta_value_dim = 3;
  c = add("gemma4", make_config("gemma4", {47, 22, 2, 4, 4, 6, 30, 0, false}));
  c->window = 20, c->global_kv_heads = 4;
  add("lfm3", make_config("lfm3", {53, 28, 4, 4, 4, 6, 36, 0, true}))->window = 20;
  add("gpt_oss", make_config("gpt_oss", {47, 22, 2, 4, 4, 6, 30, 0, false}))->window = 20;
  if (kSanitized) all.erase(all.begin() + 2, all.end());
  return all;
}

// Several tiles, the last incomplete; two documents begin inside a tile.
inline const Lengths kRows = sized<Lengths>({520, 40, 300}, {270, 40, 20});

struct Trained {
  double loss = 0, norm = 0;
  std::vector<double> logp;
  std::optional<HostGradient> weights;
  bool operator==(const Trained& other) const {
    return loss == other.loss && norm == other.norm && logp == other.logp && *weights == *other.weights;
  }
};

struct Task {
  Config config;
  std::vector<Batch> batches;  // of a step
  Mode mode;
  Index chunk = kTile;
  OptimizerKind optimizer = OptimizerKind::adamw;
  Objective objective = {};
  Places places = {};
  KeptSets kept = {};
  Index block = 0;
  std::optional<DocumentLayout> layout = {};  // other than the model's
};

// Two steps on a device with exactly the planned memory.
template <class Device, class T, class G = T>
Trained train(const Task& task, const Ranks& ranks, auto... device_settings) {
  const DocumentLayout layout = task.layout.value_or(layout_of(task.config));
  Index rows = 0;
  for (const Batch& batch : task.batches) rows = std::max(rows, layout.rows(batch));
  const bool fills = std::ranges::all_of(task.batches, [&](const Batch& batch) { return layout.rows(batch) == rows; });
  const Index own = Division{rows, kTile, 0, ranks.sequence.size}.own();
  StepSettings s{task.config};
  s.dtype = std::is_same_v<T, BFloat16> ? DType::bf16 : sizeof(T) == 4 ? DType::f32 : DType::f64;
  s.device = Device::kind, s.tile = kTile, s.wide_gradient = sizeof(G) > sizeof(T);
  s.optimizer = task.optimizer, s.objective = task.objective, s.ranks = ranks;
  s.micro_batches = static_cast<Index>(task.batches.size()), s.places = task.places, s.kept = task.kept,
  s.block = task.block;
  const Schedule schedule = schedule_for(task.mode, s, own, task.chunk);
  const Usage planned = plan(s, rows, schedule);
  Device dev(planned.capacity(), device_settings...);
  Connection<Device> connection(ranks);
  connection.attach(dev);
  Trainer<Device, T, G> trainer(dev, task.config, rows, {task.optimizer, task.places}, task.objective,
                                connection.ranks);
  trainer.layout = layout;
  trainer.initialise(1, 0.1);
  dev.reset_work();
  Trained trained;
  for (Index step = 1; step <= 2; ++step) {
    const auto add_logps = [&](std::size_t, const auto& logp) {
      trained.logp.insert(trained.logp.end(), logp.begin(), logp.end());
    };
    const StepResult result = trainer.step(task.batches, schedule, {.warmup = 1, .steps = 4}, step, add_logps);
    trained.loss = result.measures.loss, trained.norm = result.gradient.norm;
  }
  std::vector<std::vector<double>> weights;
  for (const auto& e : streambp::trained(table(task.config, trainer.model.weights))) {
    const Group group = trainer.model.in_shards(e.parameter) ? trainer.model.shards : Group{};
    e.with_matrix([&]<template <class> class M, class U>(M<U> m) {
      const std::vector<U> rows = rows_on_all<U>(dev, group, m);
      weights.emplace_back(rows.begin(), rows.end());
    });
  }
  trained.weights.emplace(task.config, std::move(weights));
  const std::string what = std::string(name(task.mode)) + ", rank " + std::to_string(ranks.all.rank);
  const auto expect_planned = [&](auto used, auto planned) {
    EXPECT_TRUE(fills ? used == planned : used <= planned) << what << ": " << used << ", planned " << planned;
  };
  expect_planned(dev.arena.peak(), planned.peak);
  expect_planned(dev.sent(), 2 * planned.sent);
  expect_planned(dev.far.peak(), planned.far);
  for (std::size_t kind = 0; kind < planned.far_traffic.size(); ++kind)
    expect_planned(dev.far_traffic()[kind], 2 * planned.far_traffic[kind]);
  double sent = 0;
  for (const Group* group : {&ranks.all, &ranks.sequence})
    if (group->transport) sent += std::exchange(static_cast<ThreadTransport*>(group->transport)->sent, 0);
  if (Device::kind == DeviceKind::cpu) {
    expect_planned(sent, 2 * planned.sent);
  }
  return trained;
}

inline std::vector<Batch> batches_of(const Config& c, std::size_t count, const Lengths& rows = kRows) {
  std::vector<Batch> batches;
  for (std::size_t i = 0; i < count; ++i) {
    Lengths lengths = rows;
    lengths[0] -= static_cast<Index>(7 * i), lengths[1] += static_cast<Index>(7 * i);
    batches.push_back(packed(c, lengths, 5 + i));
  }
  return batches;
}

template <class Device, class T, class G = T>
void expect_bits_of_one_process(Index streams, Index sequence, const Task& task, auto... device_settings) {
  Task near = task;
  near.places = {};
  const Trained alone = train<Device, T, G>(near, Ranks{{}, {}, sequence}, device_settings...);
  as_ranks(streams, sequence, [&](const Ranks& ranks) {
    omp_set_num_threads(1);
#ifdef STREAMBP_CUDA
    if (Device::kind == DeviceKind::cuda) cuda::local_rank = static_cast<int>(ranks.all.rank);
#endif
    Ranks with_shards = ranks;
    with_shards.shard_weights = true;
    for (const Ranks& r : {ranks, with_shards}) {
      EXPECT_TRUE((train<Device, T, G>(task, r, device_settings...) == alone))
          << streams << "x" << sequence << " ranks, " << name(task.mode) << ", rank " << r.all.rank;
    }
  });
}

}  // namespace streambp
