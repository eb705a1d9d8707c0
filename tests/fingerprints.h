// Fingerprints of gradients and weights. They need no library and little of the program, so they also compile for other
// processors: scripts/fingerprints.sh compares them.
#pragma once

#include "data/files/config.h"
#include "referee/gradient_check.h"
#include "referee/random_documents.h"
#include "training/trainer.h"

namespace streambp {

// The model of `streambp verify --family FAMILY --layers 2`.
inline Config fingerprint_model(const std::string& family, Index length) {
  const bool gpt2 = family == "gpt2";
  Config c = make_config(family, {.vocab = 256,
                                  .hidden = 128,
                                  .layers = 2,
                                  .heads = 4,
                                  .kv_heads = gpt2 ? 4 : 2,
                                  .head_dim = 32,
                                  .mlp = gpt2 ? 512 : 352,
                                  .max_length = length,
                                  .tied = true});
  if (family == "gemma3") c.window = 256;
  if (family == "qwen3_5") c.mixers = {MixerKind::delta_rule, MixerKind::attention};  // one of each
  return c;
}

// Adapters on all linear layers; the base is frozen.
inline Config adapted(Config c) {
  for (const Parameter& p : parameters_of(c)) {
    if (*p.group) c.adapters[p.name.substr(0, p.name.rfind('.'))] = {4, 2};
  }
  c.trained.emplace();
  return c;
}

template <class T>
class Fingerprints {
 public:
  static constexpr Index kLength = 400, kRows = kLength + 4 * kDeltaBlock;  // of hybrids, between documents
  explicit Fingerprints(const std::string& family) : Fingerprints(fingerprint_model(family, kLength)) {}
  explicit Fingerprints(const Config& config) : config_(config) {}

  // The gradient of the objective, as `verify --length 400` computes it; for GRPO with --kl 0.1.
  std::uint64_t gradient(ObjectiveKind kind) const {
    const Objective objective{.kind = kind,
                              .mean = kind == ObjectiveKind::grpo ? Mean::documents : Mean::tokens,
                              .kl = kind == ObjectiveKind::grpo ? 0.1 : 0};
    Batch batch = random_documents(config_, kind == ObjectiveKind::dpo ? 4 : 3, kLength, 1);
    if (kind != ObjectiveKind::sft) batch = with_objective_data(batch, logps(batch));
    Cpu dev(kMemory);
    Trainer<Cpu, T> trainer(dev, config_, kRows, OptimizerKind::none, objective);
    trainer.initialise(1, 0.05);
    trainer.accumulate(batch, Counts(batch), Schedule::stream(kTile, kTile));
    return host(dev, trainer.grad).fingerprint();
  }

  // The weights after two steps of AdamW.
  std::uint64_t weights(OptimizerKind kind = OptimizerKind::adamw) const {
    Cpu dev(kMemory);
    Trainer<Cpu, T, T> trainer(dev, config_, kRows, kind);
    trainer.initialise(1);
    const OptimizerSettings settings{.warmup = 1, .steps = 4};
    for (Index step = 1; step <= 2; ++step) {
      const std::vector<Batch> batches = {random_documents(config_, 3, kLength, static_cast<std::uint64_t>(step))};
      trainer.step(batches, Schedule::stream(kTile, kTile), settings, step);
    }
    return host(dev, trainer.model.weights).fingerprint();
  }

 private:
  static constexpr std::size_t kMemory = std::size_t{1} << 26;

  std::vector<double> logps(const Batch& batch) const {
    Cpu dev(kMemory);
    Trainer<Cpu, double> trainer(dev, config_, kRows, OptimizerKind::none);
    trainer.initialise(1, 0.05);
    return trainer.evaluate(batch, Schedule::stream(kTile, kTile));
  }

  HostGradient host(Cpu& dev, Tensors<T>& tensors) const {
    std::vector<std::vector<double>> parts;
    for (const Entry<T>& e : trained(table(config_, tensors))) {
      e.with_near([&](auto m) {
        const auto values = to_host(dev, m);
        parts.emplace_back(values.begin(), values.end());
      });
    }
    return {config_, std::move(parts)};
  }

  Config config_;
};

// Products of bfloat16 next to the smallest normal number, where processors round in different ways: the odd number of a
// pair is about that large, and the even one far below its last bit.
inline std::uint64_t fingerprint_of_small_products() {
  constexpr Index rows = 20, cols = 70, inner = 61;
  const Random random(1);
  const auto numbers = [&](Index count, Index step, float tiny) {
    std::vector<BFloat16> result(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < result.size(); ++i) {
      const auto sign = random.uniform(i) < 0.5 ? -1.0f : 1.0f;
      const bool odd = static_cast<Index>(i) / step % inner % 2 == 1;
      result[i] = odd ? sign * 0x1p-63f : static_cast<float>(random.normal(i)) * tiny;
    }
    return result;
  };
  const std::vector<BFloat16> a = numbers(rows * inner, 1, 0x1p-76f), b = numbers(cols * inner, 1, 0x1p-75f);
  const Matrix<const BFloat16> w(b.data(), cols, inner);
  std::vector<float> sums(rows * cols);
  std::uint64_t hash = 0;
  for (const Index count : {Index{3}, Index{11}, rows}) {
    const Matrix<const BFloat16> x(a.data(), count, inner);
    const Matrix<float> y(sums.data(), count, cols);
    count < rows ? cpu::multiply_few_rows<BFloat16>(y, x, w, cpu::Op::transposed)
                 : cpu::gemm<BFloat16>(y, x, cpu::Op::as_is, w, cpu::Op::transposed);
    for (const float sum : sums) hash = mix(hash ^ std::bit_cast<std::uint32_t>(sum));
  }
  return hash;
}

// Calls found("FAMILY DTYPE WHAT", fingerprint) for every fingerprint of a family.
template <class F>
void for_each_fingerprint(const std::string& family, F&& found) {
  const std::pair<const char*, ObjectiveKind> objectives[] = {
      {"sft", ObjectiveKind::sft}, {"dpo", ObjectiveKind::dpo}, {"grpo", ObjectiveKind::grpo}};
  auto in_type = [&](const std::string& dtype, const auto& of) {
    const std::string name = family + " " + dtype + " ";
    for (const auto& [objective, kind] : objectives) found(name + objective, of.gradient(kind));
    found(name + "weights", of.weights());
  };
  in_type("f32", Fingerprints<float>(family));
  in_type("f64", Fingerprints<double>(family));
  const Fingerprints<BFloat16> rounded(family);
  in_type("bf16", rounded);
  found(family + " bf16 weights-without-master", rounded.weights(OptimizerKind::adamw_bf16));
  found(family + " bf16 weights-8-bit-moments", rounded.weights(OptimizerKind::adamw_8bit));
  const Fingerprints<float> adapters(adapted(fingerprint_model(family, Fingerprints<float>::kLength)));
  found(family + " f32 adapters", adapters.gradient(ObjectiveKind::sft));
  found(family + " f32 weights-muon", Fingerprints<float>(family).weights(OptimizerKind::muon));
}

}  // namespace streambp
