// Shared by the tests: matrices that own memory, models of every family in awkward sizes, and packed batches.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "data/files/checkpoint.h"
#include "data/files/config.h"
#include "referee/gradient_check.h"
#include "tests/temporary.h"
#include "training/plan.h"
#include "training/trainer_instances.cuh"

namespace streambp {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// The size of a test. Under AddressSanitizer code runs ten times slower, and small sizes take the same paths.
template <class T>
T sized(T full, T sanitized) {
  return kSanitized ? sanitized : full;
}

// For longer runs by hand
inline Index from_environment(const char* name, Index otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}
using Lengths = std::vector<Index>;

// Memory starts as NaN, on the emulated GPU as well.
#ifndef __CUDACC__
inline void poison(void* data, std::size_t bytes) {
#ifdef CUDA_ON_CPU
  if (cuda_on_cpu::device_memory.holds(data, bytes)) return static_cast<void>(cudaMemsetAsync(data, 0xff, bytes));
#endif
  std::memset(data, 0xff, bytes);
}
inline const bool kPoisoned = (Arena::poison = poison) != nullptr;
#endif

// A matrix that owns its memory, filled with normal noise.
template <class T>
struct Owned {
  std::shared_ptr<std::vector<T>> storage;
  Matrix<T> m;

  Owned(Index rows, Index cols, std::uint64_t seed, double spread = 1, double mean = 0)
      : storage(std::make_shared<std::vector<T>>(static_cast<std::size_t>(rows * cols))),
        m(storage->data(), rows, cols) {
    for (std::size_t i = 0; i < storage->size(); ++i)
      (*storage)[i] = static_cast<T>(mean + spread * Random(seed).normal(i));
  }
  operator Matrix<T>() const { return m; }
};

// Moments in 8 bits before the first update.
template <class Device>
QuantisedMoments no_moments(Device& dev, Index rows, Index cols) {
  auto moment = [&] {
    const QuantisedMoment m = {allocate<std::uint8_t>(dev, rows, cols, Kind::optimizer),
                               allocate<float>(dev, rows, ceil_div(cols, kMomentBlock), Kind::optimizer)};
    zero(dev, m.codes), zero(dev, m.scales);
    return m;
  };
  return {moment(), moment()};
}

inline Schedule with_far_inputs(Schedule schedule) {
  schedule.kept = schedule.kept.with(Part::input, Place::far);
  return schedule;
}

struct Family {
  std::string name;
  Config config;
};
inline std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.name; }

// Every family, with odd widths, vocabularies and head dimensions, and every kind of head sharing.
inline std::vector<Family> families() {
  std::vector<Family> all;
  auto add = [&](std::string name, Config c) { return &all.emplace_back(Family{std::move(name), c}).config; };
  //                     vocabulary hidden layers heads kv dim mlp length tied
  add("gpt2", make_config("gpt2", {67, 36, 2, 3, 3, 12, 100, 800, true}));
  add("gpt2_odd_heads", make_config("gpt2", {41, 35, 3, 5, 5, 7, 33, 800, true}));
  add("llama2", make_config("llama", {53, 24, 2, 3, 3, 8, 40, 0, false}));
  Config* c = add("llama3", make_config("llama", {259, 40, 2, 6, 2, 10, 56, 0, true}));
  c->rope_theta = 500, c->rope_scaling = {RopeType::llama3, 8, 64};
  c = add("llama_biases", make_config("llama", {31, 20, 2, 4, 1, 6, 28, 0, false}));
  c->qkv_bias = c->output_bias = c->mlp_bias = true;
  c = add("llama_geglu", make_config("llama", {31, 20, 2, 2, 1, 10, 28, 0, false}));
  c->mlp_kind = Mlp::geglu;
  c->rope_scaling = {.type = RopeType::dynamic, .factor = 3, .original_length = 50, .longest = 1000};
  c = add("mistral", make_config("mistral", {61, 30, 2, 3, 1, 14, 50, 0, false}));
  c->window = 100;
  c = add("ministral3_tiny_window", make_config("ministral3", {61, 24, 2, 2, 2, 6, 50, 0, false}));
  c->window = 3;
  c->rope_scaling = {.type = RopeType::yarn, .factor = 4, .original_length = 64, .query_beta = 0.2};
  add("qwen2", make_config("qwen2", {71, 28, 2, 7, 1, 4, 36, 0, true}));
  c = add("cohere", make_config("cohere", {71, 28, 2, 4, 2, 8, 36, 0, true}));
  c->qk_norm = QkNorm::own_weights, c->logit_scale = 0.4;
  c = add("qwen3", make_config("qwen3", {83, 25, 2, 3, 1, 22, 45, 0, true}));
  c->rope_scaling = {.type = RopeType::longrope, .original_length = 30, .attention_factor = 1.1, .longest = 1000};
  for (int i = 0; i < 11; ++i) {
    c->rope_scaling.short_factors.push_back(1 + 0.01 * i);
    c->rope_scaling.long_factors.push_back(1 + 0.5 * i);
  }
  c = add("qwen3_untied", make_config("qwen3", {83, 32, 3, 4, 2, 18, 45, 0, false}));
  c->rope_theta = 500;
  c->rope_scaling = {
      .type = RopeType::yarn, .factor = 4, .original_length = 64, .beta_fast = 8, .attention_factor = 1.2};
  c = add("phi3", make_config("phi3", {37, 20, 2, 4, 2, 10, 28, 0, false}));
  c->rotary_share = 0.6, c->window = 100;
  c = add("smollm3", make_config("smollm3", {43, 22, 3, 4, 1, 8, 36, 0, true}));
  c->without_rope = {false, true, false};
  c = add("starcoder2", make_config("starcoder2", {53, 26, 2, 3, 1, 10, 44, 0, true}));
  c->window = 40;
  c = add("gemma3", make_config("gemma3", {89, 26, 3, 4, 2, 10, 44, 0, true}));
  c->window = 20, c->local = {true, false, true}, c->local_rope_theta = 100, c->rope_scaling = {RopeType::linear, 4};
  c = add("gemma4", make_config("gemma4", {47, 24, 3, 4, 2, 8, 34, 0, false}));
  c->window = 20, c->local_rope_theta = 100, c->score_cap = 3;
  c->norm_eps = 0.1;  // of few small numbers, a norm multiplies the errors of rounding
  add("olmo2", make_config("olmo2", {59, 22, 2, 4, 2, 10, 34, 0, false}));
  add("glm4", make_config("glm4", {47, 26, 2, 3, 1, 12, 30, 0, false}));
  c = add("granite_hybrid", make_config("granitemoehybrid", {61, 20, 2, 4, 2, 8, 26, 0, true}));
  c->embedding_scale = 3, c->residual_scale = 0.4, c->score_scale = 0.25, c->logit_scale = 0.5;
  c = add("granite_swa", make_config("granite_swa", {47, 24, 3, 4, 2, 6, 34, 0, true}));
  c->embedding_scale = 3, c->residual_scale = 0.4, c->score_scale = 0.25, c->logit_scale = 0.5;
  c->window = 30, c->without_rope = {true, false, false};
  c = add("cohere2", make_config("cohere2", {43, 24, 3, 4, 2, 10, 38, 0, true}));
  c->window = 30, c->local = {true, false, true}, c->without_rope = {false, true, false}, c->logit_scale = 0.4;
  c = add("gemma2", make_config("gemma2", {47, 24, 3, 4, 2, 10, 36, 0, true}));
  c->window = 40, c->score_cap = 0.3, c->logit_cap = 0.7;
  add("nanochat", make_config("nanochat", {53, 22, 2, 3, 1, 12, 38, 0, false}))->logit_cap = 0.5;
  add("lfm2", make_config("lfm2", {47, 26, 3, 4, 2, 10, 38, 0, true}));
  c = add("lfm3", make_config("lfm3", {47, 26, 3, 4, 2, 10, 38, 0, true}));
  c->mixers = {MixerKind::convolution, MixerKind::attention, MixerKind::attention};
  c->window = 20, c->local = {true, true, false}, c->norm_eps = 0.1;
  c = add("qwen3_5", make_config("qwen3_5", {47, 26, 4, 4, 2, 16, 38, 0, false}));
  c->delta_key_heads = 2, c->delta_value_heads = 4, c->delta_key_dim = 5, c->delta_value_dim = 7;
  c->norm_eps = 0.1;
  c = add("olmo_hybrid", make_config("olmo_hybrid", {43, 24, 4, 4, 2, 6, 34, 0, false}));
  c->delta_key_heads = 2, c->delta_key_dim = 5, c->delta_value_dim = 7;
  c->norm_eps = 0.1, c->output_norm_eps = 0.5;
  c = add("qwen3_moe", make_config("qwen3_moe", {53, 22, 2, 4, 2, 6, 30, 0, false}));
  c->experts = 7, c->experts_per_token = 3, c->expert_mlp = 11, c->balanced = true, c->balance_factor = 0.3;
  c = add("lfm2_moe", make_config("lfm2_moe", {47, 26, 4, 4, 2, 10, 38, 0, true}));
  c->experts = 5, c->router_scale = 1.5, c->norm_eps = 0.1;
  c = add("qwen3_next", make_config("qwen3_next", {43, 24, 4, 4, 2, 8, 34, 0, false}));
  c->delta_key_heads = 2, c->delta_value_heads = 4, c->delta_key_dim = 5, c->delta_value_dim = 7;
  c->experts = 4, c->shared_mlp = 9, c->norm_eps = 0.1, c->balanced = true, c->balance_factor = 0.2;
  c = add("gpt_oss", make_config("gpt_oss", {47, 22, 3, 4, 2, 6, 30, 0, false}));
  c->experts = 5, c->experts_per_token = 3, c->expert_mlp = 9, c->window = 30, c->rope_theta = 500;
  c->rope_scaling.factor = 4, c->rope_scaling.original_length = 64;
  add("olmoe", make_config("olmoe", {41, 20, 2, 2, 1, 8, 26, 0, false}))->experts = 3;
  return all;
}

// In bfloat16, rounding can change which experts a row chooses, and that is a large error.
inline Config with_all_experts(Config c) {
  c.experts_per_token = c.experts;
  return c;
}

// One of each kind of layer.
inline std::vector<Family> distinct_families() {
  static const std::set<std::string> distinct = {
      "gpt2",   "gemma2",   "gemma3", "gemma4",  "lfm3",        "phi3",      "olmo2",    "glm4",       "granite_swa",
      "cohere", "nanochat", "lfm2",   "qwen3_5", "olmo_hybrid", "qwen3_moe", "lfm2_moe", "qwen3_next", "gpt_oss"};
  std::vector<Family> all = families();
  std::erase_if(all, [](const Family& family) { return !distinct.contains(family.name); });
  return all;
}
// The families for tests that walk through a model.
inline std::vector<Family> walked_families() { return kSanitized ? distinct_families() : families(); }

// Documents of these lengths, packed; some tokens without a target, as in a prompt.
inline Batch packed(const Config& c, const std::vector<Index>& lengths, std::uint64_t seed = 5) {
  Batch batch;
  std::uint64_t i = 0;
  auto token = [&] { return static_cast<std::int32_t>(Random(seed).below(static_cast<std::uint64_t>(c.vocab), i++)); };
  for (Index length : lengths) {
    std::vector<std::int32_t> document;
    for (Index t = 0; t < length; ++t) document.push_back(token());
    const std::size_t begin = batch.targets.size();
    batch.append(document, length % 2 ? token() : -1);
    for (std::size_t t = begin; t + 1 < begin + static_cast<std::size_t>(length) / 4; ++t) batch.targets[t] = -1;
  }
  return batch;
}

// The numbers of a stored tensor.
template <class V>
std::vector<V> numbers(const Tensor& tensor) {
  std::vector<V> values(static_cast<std::size_t>(tensor.count));
  read(tensor, values.data());
  return values;
}

// A copy on the host of the trained parameters: of their gradient or their weights.
template <class Device, class T>
HostGradient host_gradient(Device& dev, const Config& c, Tensors<T>& gradient) {
  std::vector<std::vector<double>> values;
  for (const Entry<T>& e : trained(table(c, gradient))) {
    e.with_matrix([&](auto m) {
      const auto numbers = to_host(dev, m);
      values.emplace_back(numbers.begin(), numbers.end());
    });
  }
  return {c, std::move(values)};
}

// The gradient of a step in one mode, on a device with exactly the planned memory. fill(dev, model) sets the weights.
template <class Device, class T, class G = T, class Fill>
GradientRun run_gradient(const Config& config, const std::vector<Batch>& batches, const Schedule& schedule, Fill&& fill,
                         const Objective& objective = {}, auto... device_settings) {
  StepSettings settings{config, DType::f32, OptimizerKind::none, std::ssize(batches)};
  settings.dtype = std::is_same_v<T, BFloat16> ? DType::bf16 : sizeof(T) == 4 ? DType::f32 : DType::f64;
  settings.wide_gradient = sizeof(G) > sizeof(T);
  settings.device = Device::kind;
  settings.objective = objective;
  Index rows = 0;
  for (const Batch& b : batches) rows = std::max(rows, layout_of(config).rows(b));
  const Usage planned = plan(settings, rows, schedule);
  Device dev(planned.capacity(), device_settings...);
  Trainer<Device, T, G> trainer(dev, config, rows, OptimizerKind::none, objective);
  fill(dev, trainer.model);
  dev.synchronize();
  StepRun run = run_step(trainer, batches, schedule);
  EXPECT_EQ(dev.far.peak(), planned.far);
  EXPECT_EQ(dev.far_traffic(), planned.far_traffic);
  return {std::move(run), dev.arena.peak(), planned.peak, host_gradient(dev, config, trainer.grad),
          dev.algorithm_changes};
}
template <class Device, class T, class G = T, class Fill>
GradientRun run_gradient(const Config& config, const Batch& batch, const Schedule& schedule, Fill&& fill,
                         const Objective& objective = {}, auto... device_settings) {
  return run_gradient<Device, T, G>(config, std::vector{batch}, schedule, fill, objective, device_settings...);
}

// The gradient and the loss of a run are those of the oracle.
inline void expect_oracle(const GradientRun& run, const oracle::Result& truth, const std::string& what = "") {
  const Difference error = run.gradient.difference(HostGradient(run.gradient, truth.gradient));
  EXPECT_LE(error.relative, 1e-10) << what << ": " << error.tensor;
  EXPECT_NEAR(run.loss, truth.loss, 1e-10 * std::abs(truth.loss)) << what;
  for (std::size_t t = 0; t < truth.logp.size(); ++t)
    ASSERT_NEAR(run.logp[t], truth.logp[t], 1e-9) << what << ", token " << t;
}

// Two runs give the same bits; each takes exactly the planned memory.
inline void expect_same_bits(const GradientRun& run, const GradientRun& first, const std::string& what = "") {
  EXPECT_TRUE(run.gradient == first.gradient) << what << ": " << run.gradient.difference(first.gradient).tensor;
  EXPECT_EQ(run.loss, first.loss) << what;
  EXPECT_EQ(run.logp, first.logp) << what;
  EXPECT_EQ(run.others, first.others) << what;
  EXPECT_EQ(run.peak, run.planned) << what << ": the plan and the arena disagree";
}

// Weights without special values such as 0 or 1.
inline auto random_weights(std::uint64_t seed = 3, double spread = 0.15) {
  return [=](auto& dev, auto& model) { initialise(dev, model, seed, spread); };
}

struct PrintFamily {
  template <class Info>
  std::string operator()(const Info& info) const {
    return info.param.name;
  }
};

// Two checkpoints have the same bytes.
inline void expect_same_checkpoint(const fs::path& a, const fs::path& b) {
  for (const char* name : {"model.safetensors", "adapter_model.safetensors", "config.json", "adapter_config.json",
                           "tokenizer.json", "training/optimizer.safetensors"}) {
    if (!fs::exists(file_of(a, name)) && !fs::exists(file_of(b, name))) continue;
    EXPECT_TRUE(read_file(file_of(a, name)) == read_file(file_of(b, name))) << a << ", " << b << ": " << name;
  }
}

}  // namespace streambp
