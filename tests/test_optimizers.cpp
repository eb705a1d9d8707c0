// Optimizers against PyTorch and bitsandbytes: golden data made by scripts/make_optimizer_golden.py.
#include "kernels/adamw_8bit.cuh"
#include "tests/golden.h"

namespace streambp {
namespace {

struct GoldenOptimizer {
  explicit GoldenOptimizer(const std::string& name) : file(golden_folder() / "optimizers" / (name + ".safetensors")) {}
  OptimizerStep step(Index number) const {
    OptimizerStep s{settings["rate"], settings["beta1"], settings["beta2"], settings["eps"], settings["decay"]};
    s.step = number;
    return s;
  }

  SafetensorsFile file;
  Json settings = Json::parse(file.metadata().at("settings"));
};

TEST(Optimizers, MuonIsPyTorchs) {
  const Golden golden("qwen3");
  const GoldenOptimizer truth("muon");
  Cpu dev(std::size_t{1} << 26);
  Model<double> model{golden.config, Tensors<double>(golden.config)};
  Tensors<double> gradient(golden.config), after(golden.config);
  allocate_weights(dev, model);
  golden.weights()(dev, model);
  for (Tensors<double>* tensors : {&gradient, &after}) allocate(dev, table(golden.config, *tensors), Kind::gradients);
  read_tensors(dev, truth.file, "", table(golden.config, after));
  const auto optimizer = make_optimizer<Cpu, double, double>(OptimizerKind::muon, {});
  optimizer->allocate(dev, golden.config);
  optimizer->start(dev, model);
  Index step = 0;
  for (const double factor : truth.settings["factors"]) {
    read_tensors(dev, golden.file, "grad/", table(golden.config, gradient));
    for (const auto& e : table(golden.config, gradient)) scale(dev, *e.matrix, 4 * factor);
    OptimizerStep settings = truth.step(++step);
    settings.gradient_scale = 0.25;  // clipping
    optimizer->update(dev, model, gradient, settings);
  }
  const auto difference =
      host_gradient(dev, golden.config, model.weights).difference(host_gradient(dev, golden.config, after));
  EXPECT_LE(difference.relative, 1e-10) << difference.tensor;
}

// bitsandbytes' code for CPUs looks the nearest value up in a coarser table, so a few codes differ by one.
TEST(Optimizers, AdamWInEightBitsIsBitsandbytes) {
  const GoldenOptimizer truth("adamw_8bit");
  const Tensor& all = truth.file.at("gradients");
  const Index rows = all.shape[1], cols = all.shape[2];
  Cpu dev(std::size_t{1} << 22);
  const Owned<float> w(rows, cols, 0, 0), g(rows, cols, 0, 0), after(rows, cols, 0, 0);
  read(truth.file.at("before"), w.m.data), read(truth.file.at("after"), after.m.data);
  const QuantisedMoments state = no_moments(dev, rows, cols);
  for (Index step = 0; step < all.shape[0]; ++step) {
    read(all, step * rows * cols, rows * cols, g.m.data);
    adamw_8bit(dev, std::vector{AdamW8bit<float, float>{w, g, state, truth.step(step + 1)}});
  }
  Index different = 0;
  const double rate = truth.settings["rate"];
  for (std::size_t i = 0; i < w.storage->size(); ++i) {
    const double distance = std::abs(static_cast<double>((*w.storage)[i] - (*after.storage)[i]));
    EXPECT_LE(distance, 0.5 * rate) << i;
    different += distance > 1e-4 * rate;
  }
  EXPECT_LE(different, rows * cols / 25);
}

}  // namespace
}  // namespace streambp
