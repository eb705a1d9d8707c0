// Gradients side by side: of a mode, of another mode, of the independent reference.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan.cuh"
#include "tests/reference.cuh"

namespace streambp {

// The largest |a - b| of a tensor over its largest |b|, for the worst tensor. The parts of a fused tensor count as one.
struct Difference {
  double relative = 0;
  std::string tensor;
};

// A copy of a gradient on the host, in double, part by part of the table.
struct HostGradient {
  std::vector<Parameter> parameters;
  std::vector<std::vector<double>> values;

  template <class T>
  HostGradient(const Config& c, Tensors<T>& gradient) {
    for (const Entry<T>& e : table(c, gradient)) {
      parameters.push_back(e.parameter);
      values.emplace_back(e.matrix->data, e.matrix->data + e.matrix->size());
    }
  }
  HostGradient(const HostGradient& shape, const std::map<std::string, std::vector<double>>& by_key)
      : parameters(shape.parameters) {
    for (const Parameter& p : parameters) values.push_back(by_key.at(reference::key(p)));
  }

  // Bit for bit: a NaN equals itself, and -0 is not 0.
  bool operator==(const HostGradient& other) const {
    auto equal = [](const std::vector<double>& a, const std::vector<double>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
    };
    return std::equal(values.begin(), values.end(), other.values.begin(), other.values.end(), equal);
  }

  Difference difference(const HostGradient& truth) const {
    struct Sizes {
      double error = 0, largest = 0;
    };
    std::map<std::string, Sizes> tensors;
    for (std::size_t i = 0; i < values.size(); ++i) {
      Sizes& sizes = tensors[parameters[i].name];
      for (std::size_t j = 0; j < values[i].size(); ++j) {
        const double error = std::abs(values[i][j] - truth.values[i][j]);
        sizes.error = std::max(sizes.error, std::isfinite(error) ? error : INFINITY);  // a NaN is as wrong as can be
        sizes.largest = std::max(sizes.largest, std::abs(truth.values[i][j]));
      }
    }
    Difference result;
    for (const auto& [name, sizes] : tensors) {
      const double relative = sizes.largest > 0 ? sizes.error / sizes.largest : sizes.error;
      if (relative > result.relative) result = {relative, name};
    }
    return result;
  }
};

struct GradientRun {
  double loss, seconds;
  std::size_t peak, planned;
  HostGradient gradient;
  std::vector<double> logp;
};

// The gradient of one batch in one mode, in memory of its own of the planned size.
template <class T, class Fill>
GradientRun run_gradient(const Config& config, const Batch& batch, const Schedule& schedule, Fill&& fill) {
  const StepSettings settings{config, sizeof(T) == 4 ? DType::f32 : DType::f64, OptimizerKind::none, 1};
  const std::size_t planned = plan(settings, batch.size(), schedule).peak;
  Cpu dev(planned);
  Trainer<Cpu, T> trainer(dev, config, batch.size(), OptimizerKind::none);
  fill(trainer.model);
  const auto start = std::chrono::steady_clock::now();
  const double loss = trainer.accumulate(&batch, batch.target_count(), schedule);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {loss,
          seconds,
          dev.arena.peak(),
          planned,
          HostGradient(config, trainer.grad),
          {trainer.logp.data, trainer.logp.data + batch.size()}};
}

// The independent reference's answer for weights that `fill` makes.
template <class Fill>
reference::Result reference_gradient(const Config& config, const Batch& batch, Fill&& fill) {
  Model<double> m{config, Tensors<double>(config)};
  std::vector<std::vector<double>> storage;
  for (auto& e : table(config, m.weights)) {
    storage.emplace_back(static_cast<std::size_t>(e.parameter.rows * e.parameter.cols));
    *e.matrix = {storage.back().data(), e.parameter.rows, e.parameter.cols};
  }
  fill(m);
  return reference::gradient(config, m.weights, batch, reference::mean_weights(batch));
}

}  // namespace streambp
