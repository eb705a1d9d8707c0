// The engine on a device, with given types: Trainer and Generator behind the interface of engine.h. Every instance
// compiles all operations for its types, so each has its own translation unit.
#pragma once

#include "parallel/connection.cuh"
#include "training/engine.h"
#include "training/microbenchmarks.h"

namespace streambp {

template <class Device, class T>
class GeneratorOn : public TextGenerator {
 public:
  GeneratorOn(Device& dev, const Model<T>& model, const GenerationShape& shape) : generator_(dev, model, shape) {}

  std::vector<Continuation> generate(const std::vector<Tokens>& prompts, const GenerationSettings& settings,
                                     const OnToken& on_token) override {
    return streambp::generate(generator_, prompts, settings, on_token);
  }
  Index room() const override { return generator_.room; }
  Index steps() const override { return generator_.steps; }

 private:
  Generator<Device, T> generator_;
};

// Its weights in files: defined in engine_files.h.
template <class Device, class T, class G>
struct EngineFiles {
  Device& dev;
  Trainer<Device, T, G>& trainer;

  std::size_t load(const fs::path& directory, const fs::path& adapters);
  fs::path save(const fs::path& out, const ModelLayout& layout, const Json& state);
  void restore(const fs::path& checkpoint, const ModelLayout& layout);
  void with_weights_of(const fs::path& directory, const std::function<void()>& f);
};

// T: type of weights and activations; G: of the gradient.
template <class Device, class T, class G>
class EngineOn : public Engine {
 public:
  template <class... DeviceSettings>
  EngineOn(const StepSettings& s, Index rows, const Capacity& capacity, DeviceSettings... device_settings)
      : connection(s.ranks),
        dev(capacity, device_settings...),
        trainer(dev, s.config, rows, {s.optimizer, s.places}, s.objective, connection.ranks) {
    connection.attach(dev);
  }
  ~EngineOn() override { connection.close(); }

  void initialise(std::uint64_t seed, double spread) override { trainer.initialise(seed, spread); }
  std::size_t load(const fs::path& model, const fs::path& adapters) override { return files().load(model, adapters); }
  void initialise_adapters(std::uint64_t seed) override {
    streambp::initialise_adapters(dev, trainer.model, seed);
    trainer.optimizer->start(dev, trainer.model);
  }
  fs::path save(const fs::path& out, const ModelLayout& layout, const Json& state) override {
    return files().save(out, layout, state);
  }
  void restore(const fs::path& checkpoint, const ModelLayout& layout) override { files().restore(checkpoint, layout); }
  void with_weights_of(const fs::path& model, const std::function<void()>& f) override {
    files().with_weights_of(model, f);
  }
  void train_block(const BlockSettings& blocks, Index step) override { trainer.train_block(blocks, step); }
  void round_weights() override {
    for (auto& e : table(trainer.model.config, trainer.model.weights)) {
      if (e.quantised) e.quantised->type = OriginalType::bf16;
      e.with_matrix([&]<template <class> class M, class U>(M<U> m) {
        std::vector<U> values = to_host(dev, m);
        const auto rounded = [&](float x) { return e.parameter.wide ? x : static_cast<float>(BFloat16(x)); };
        for (U& x : values) x = static_cast<U>(rounded(static_cast<float>(x)));
        dev.upload(m, values.data());
      });
    }
  }
  void read_weights(const OnTensor& f) override {
    const auto& model = trainer.model;
    on_host(
        table(model.config, trainer.model.weights),
        [&](const Parameter& p) { return model.in_shards(p) ? model.shards : Group{}; }, f);
  }

  StepResult step(const std::vector<Batch>& batches, const Schedule& schedule, const OptimizerSettings& s, Index step,
                  const OnLogps& on_logps) override {
    return trainer.step(batches, schedule, s, step, in_double(on_logps));
  }
  Measures accumulate(const std::vector<Batch>& batches, const Schedule& schedule, const OnLogps& on_logps) override {
    return trainer.accumulate(batches, schedule, in_double(on_logps));
  }
  void read_gradient(const OnTensor& f) override {
    on_host(
        trained(table(trainer.model.config, trainer.grad)), [&](const Parameter&) { return trainer.ranks.all; }, f);
  }
  void release_gradient() override { trainer.release_gradient(); }
  std::vector<std::vector<double>> evaluate(const std::vector<Batch>& batches, const Schedule& schedule) override {
    std::vector<std::vector<double>> all;
    for (const auto& logps : trainer.evaluate(batches, schedule)) all.emplace_back(logps.begin(), logps.end());
    return all;
  }

  std::unique_ptr<TextGenerator> generator(const GenerationShape& shape) override {
    if constexpr (std::is_same_v<T, double>) {
      fail("float64 verifies gradients; it does not generate");
    } else {
      return std::make_unique<GeneratorOn<Device, T>>(dev, trainer.model, shape);
    }
  }

  DeviceBase& device() override { return dev; }
  void synchronize() override { dev.synchronize(); }
  std::vector<std::string> warnings() override {
    if constexpr (requires { dev.algorithm_changes; }) return dev.algorithm_changes;
    return {};
  }
  double link_rate() override { return streambp::link_rate(dev, connection.ranks.all); }
  void time_operations([[maybe_unused]] bool on) override {
    if constexpr (requires { dev.profile; }) dev.profile = on;
  }

 private:
  using LogpsOfTrainer = std::vector<Accumulator<T>>;
  static std::function<void(std::size_t, const LogpsOfTrainer&)> in_double(const OnLogps& on_logps) {
    if (!on_logps) return {};
    return [&](std::size_t i, const LogpsOfTrainer& logps) { on_logps(i, {logps.begin(), logps.end()}); };
  }
  template <class U, class F>
  void on_host(const Table<U>& tensors, F&& ranks_of, const OnTensor& f) {
    for (const Entry<U>& e : tensors) {
      const Parameter& p = e.parameter;
      const auto call = [&](const auto& numbers) { f({numbers.begin(), numbers.end()}); };
      if (e.quantised) {
        call(dequantised_on_host<U>(dev, *e.quantised, p.rows * p.cols));
      } else {
        e.with_matrix([&]<template <class> class M, class V>(M<V> m) { call(rows_on_all<V>(dev, ranks_of(p), m)); });
      }
    }
  }

  EngineFiles<Device, T, G> files() { return {dev, trainer}; }

  Connection<Device> connection;
  Device dev;
  Trainer<Device, T, G> trainer;
};

}  // namespace streambp
