// Shared by the tests of both devices: the error of bfloat16 beside PyTorch's, and the losses of a training run.
#pragma once

#include "data/documents/stories.h"
#include "data/documents/text.h"
#include "tests/golden.h"

namespace streambp {

// With the same weights, our bfloat16 gradient is as close to float64 as PyTorch's. On average: rounding varies a lot
// in models this small.
template <class Device>
void expect_no_worse_than_pytorch(auto... device_settings) {
  const Json theirs = Json::parse(read_file(golden_folder() / "bfloat16_errors.json"));
  double log_ratio = 0;
  for (const auto& [name, error] : theirs.items()) {
    const Golden golden(name);
    auto weights = [&](auto& dev, auto& model) {
      golden.weights()(dev, model);
      for (auto& e : table(model.config, model.weights)) {
        e.with_near([&]<class T>(Matrix<T> m) {
          std::vector<T> values = to_host(dev, m);
          for (T& x : values) x = static_cast<T>(static_cast<float>(BFloat16(static_cast<float>(x))));
          dev.upload(m, values.data());
        });
      }
    };
    const Schedule schedule = Schedule::stream(kTile, kTile);
    const auto truth = run_gradient<Cpu, double>(golden.config, golden.batch, schedule, weights);
    const auto ours =
        run_gradient<Device, BFloat16, float>(golden.config, golden.batch, schedule, weights, {}, device_settings...);
    double difference = 0, squares = 0;
    for (std::size_t i = 0; i < truth.gradient.values.size(); ++i) {
      for (std::size_t j = 0; j < truth.gradient.values[i].size(); ++j) {
        const double b = truth.gradient.values[i][j], a = ours.gradient.values[i][j];
        difference += (a - b) * (a - b), squares += b * b;
      }
    }
    const double ratio = std::sqrt(difference / squares) / error.template get<double>();
    EXPECT_LE(ratio, Device::kind == DeviceKind::cuda ? 1.5 : 2) << name;  // on a CPU the worst model has 1.52
    log_ratio += std::log(ratio) / static_cast<double>(theirs.size());
  }
  EXPECT_LE(std::exp(log_ratio), 1);
  std::printf("error in bfloat16 over PyTorch's, geometric mean of %zu models: %.2f\n", theirs.size(),
              std::exp(log_ratio));
}

// Losses of a few steps of training.
template <class Device, class T, class G>
std::vector<double> losses(OptimizerKind kind, Index steps, auto... device_settings) {
  const Config c = make_config("llama", {256, 64, 2, 4, 2, 16, 96, 0, false});
  const Text text(stories(1, 1 << 16), 0.1, 128, "stories");
  const OptimizerSettings settings{.rate = 5e-3, .warmup = 3, .steps = steps};
  const Schedule schedule = Schedule::stream(kTile, kTile);
  StepSettings s{c, DType::f32, kind, 1};
  s.dtype = std::is_same_v<T, BFloat16> ? DType::bf16 : DType::f32;
  s.wide_gradient = sizeof(G) > sizeof(T);
  s.device = Device::kind;
  Device dev(plan(s, 256, schedule).peak, device_settings...);
  Trainer<Device, T, G> trainer(dev, c, 256, kind);
  trainer.initialise(1);
  std::vector<double> result;
  for (Index step = 1; step <= steps; ++step) {
    result.push_back(trainer.step({text.batch(1, step, 0, 2, 128)}, schedule, settings, step).measures.loss);
  }
  EXPECT_EQ(dev.arena.peak(), dev.arena.capacity());
  return result;
}

}  // namespace streambp
