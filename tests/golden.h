// Golden data from PyTorch, made by scripts/make_golden.py: models, batches and their gradients in float64.
#pragma once

#include <list>

#include "data/files/checkpoint.h"
#include "tests/support.cuh"

namespace streambp {

// In the source tree, or in $STREAMBP_SOURCE.
inline fs::path golden_folder() {
  const char* elsewhere = std::getenv("STREAMBP_SOURCE");
  return fs::path(elsewhere ? elsewhere : STREAMBP_SOURCE) / "tests" / "golden";
}

inline std::vector<std::string> golden_cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(golden_folder())) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct Golden {
  explicit Golden(const std::string& name)
      : file(golden_folder() / (name + ".safetensors")),
        config(config_from_json(Json::parse(file.metadata().at("config")), name)),
        batch{numbers<std::int32_t>("tokens"), numbers<std::int32_t>("targets"), numbers<std::int32_t>("positions"),
              numbers<std::int32_t>("key_begin")} {
    config.rope_scaling.longest = batch.longest();
  }

  template <class V>
  std::vector<V> numbers(const std::string& name) const {
    return streambp::numbers<V>(file.at(name));
  }
  auto weights() const {
    return [this](auto& dev, auto& model) { read_tensors(dev, file, "weights/", table(model.config, model.weights)); };
  }

  SafetensorsFile file;
  Config config;
  Batch batch;
};

// A golden gradient, in the table's layout. file.at(prefix + NAME) is a tensor.
template <class File>
HostGradient golden_gradient(const File& file, const std::string& prefix, const Config& c) {
  std::list<std::vector<double>> values;
  Tensors<double> gradient(c);
  const Table<double> rows = trained(table(c, gradient));
  allocate(values, rows);
  Cpu host(0);
  read_tensors(host, file, prefix, rows);
  return {c, {values.begin(), values.end()}};
}

// The gradient and the loss are the golden ones in every mode.
template <class T, class Fill>
std::vector<GradientRun> expect_golden(const HostGradient& truth, double loss, double tolerance, const Config& c,
                                       const Batch& batch, Fill&& weights, const Objective& objective = {}) {
  std::vector<GradientRun> runs;
  for (Mode mode : kModes) {
    const Schedule schedule = schedule_for(mode, c, batch.size(), kTile);
    const GradientRun& run = runs.emplace_back(run_gradient<Cpu, T>(c, batch, schedule, weights, objective));
    const Difference error = run.gradient.difference(truth);
    EXPECT_LE(error.relative, tolerance) << name(mode) << ": " << error.tensor;
    EXPECT_NEAR(run.loss, loss, tolerance * std::max(1.0, std::abs(loss))) << name(mode);
  }
  return runs;
}

}  // namespace streambp
