// Compares the gradients of two modes, or of a mode and the oracle.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "memory/schedule.h"
#include "referee/oracle_objectives.h"

namespace streambp {

// Gradients that vanish in exact arithmetic, such as attention's over equal tokens, are rounding errors only. So a tensor
// is measured against at least this part of the largest entry of the whole gradient.
constexpr double kSmallTensor = 1e-4;

// The largest distance from the oracle that float64 explains.
constexpr double kExact = 1e-10;

// max |a - b| / max |b| per tensor, for the worst tensor. The parts of a fused tensor count as one tensor.
struct Difference {
  double relative = 0;
  std::string tensor;
};

// Computes it from one part of a tensor after the other.
class DifferenceOfTensors {
 public:
  void add(const std::string& tensor, const std::vector<double>& values, const std::vector<double>& truth) {
    double error = 0, largest = 0;
#pragma omp parallel for reduction(max : error, largest)
    for (std::size_t j = 0; j < values.size(); ++j) {
      const double distance = std::abs(values[j] - truth[j]);
      error = std::max(error, std::isfinite(distance) ? distance : INFINITY);  // a NaN is an infinite error
      largest = std::max(largest, std::abs(truth[j]));
    }
    if (!tensors_.contains(tensor)) order_.push_back(tensor);
    Sizes& sizes = tensors_[tensor];
    sizes.error = std::max(sizes.error, error), sizes.largest = std::max(sizes.largest, largest);
  }

  std::vector<Difference> all() const {
    double largest = 0;
    for (const auto& [name, sizes] : tensors_) largest = std::max(largest, sizes.largest);
    std::vector<Difference> result;
    for (const std::string& name : order_) {
      const Sizes& sizes = tensors_.at(name);
      const double scale = std::max(sizes.largest, kSmallTensor * largest);
      const double relative = !std::isfinite(sizes.error) ? INFINITY : scale > 0 ? sizes.error / scale : sizes.error;
      result.push_back({relative, name});
    }
    return result;
  }
  Difference worst() const {
    Difference worst;
    for (const Difference& difference : all())
      if (difference.relative > worst.relative) worst = difference;
    return worst;
  }

 private:
  struct Sizes {
    double error = 0, largest = 0;
  };
  std::map<std::string, Sizes> tensors_;
  std::vector<std::string> order_;  // in which they came
};

// A copy of a gradient on the host, in double, part by part of the table.
struct HostGradient {
  std::vector<Parameter> parameters;
  std::vector<std::vector<double>> values;

  // From the values of each part, in the table's order.
  HostGradient(const Config& c, std::vector<std::vector<double>> parts)
      : parameters(trained_parameters(c)), values(std::move(parts)) {}
  HostGradient(const HostGradient& shape, const std::map<std::string, std::vector<double>>& by_key)
      : parameters(shape.parameters) {
    for (const Parameter& p : parameters) values.push_back(by_key.at(oracle::key(p)));
  }

  // Bit for bit: a NaN equals itself, and -0 is not 0.
  bool operator==(const HostGradient& other) const {
    auto equal = [](const std::vector<double>& a, const std::vector<double>& b) {
      if (a.empty() || b.empty()) return a.size() == b.size();  // memcmp takes no null pointer
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
    };
    return std::equal(values.begin(), values.end(), other.values.begin(), other.values.end(), equal);
  }

  // A hash of every bit.
  std::uint64_t fingerprint() const {
    std::uint64_t hash = 0;
    for (const auto& part : values) {
      for (double x : part) hash = mix(hash ^ std::bit_cast<std::uint64_t>(x));
    }
    return hash;
  }

  DifferenceOfTensors differences(const HostGradient& truth) const {
    DifferenceOfTensors all;
    for (std::size_t i = 0; i < values.size(); ++i) all.add(parameters[i].name, values[i], truth.values[i]);
    return all;
  }
  Difference difference(const HostGradient& truth) const { return differences(truth).worst(); }
};

// Rows of a batch that are whole documents.
inline Batch part_of(const Batch& all, Rows rows) {
  Batch part;
  const auto copy = [&](const auto& from, auto& to) {
    if (!from.empty()) to.assign(from.begin() + rows.begin, from.begin() + rows.end);
  };
  copy(all.tokens, part.tokens), copy(all.targets, part.targets), copy(all.positions, part.positions);
  copy(all.key_begin, part.key_begin), copy(all.reference, part.reference), copy(all.old, part.old);
  copy(all.advantages, part.advantages);
  for (std::int32_t& first : part.key_begin) first -= static_cast<std::int32_t>(rows.begin);
  return part;
}

// A step up to its gradient.
struct StepRun {
  double loss, seconds;
  std::vector<double> logp;
  std::map<std::string, double> others;  // metrics of the objective other than the loss
};

// steps: an Engine or a Trainer, which then has the gradient
template <class Steps>
StepRun run_step(Steps& steps, const std::vector<Batch>& batches, const Schedule& schedule) {
  std::vector<double> logp;
  const auto start = std::chrono::steady_clock::now();
  const Measures measures = steps.accumulate(batches, schedule, [&](std::size_t, const auto& of_batch) {
    logp.insert(logp.end(), of_batch.begin(), of_batch.end());
  });
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  return {measures.loss, passed.count(), std::move(logp), measures.others};
}

struct GradientRun : StepRun {
  std::size_t peak, planned;
  HostGradient gradient;
  std::vector<std::string> warnings = {};  // reasons to doubt bit-for-bit equality
};

// Adds random data for DPO and GRPO. The log-probs are close to the model's own, so that policy ratios fall on both
// sides of the usual clipping limits, but not so close to a limit that rounding matters. Every fourth advantage is
// zero.
inline Batch with_objective_data(Batch batch, const std::vector<double>& logp) {
  constexpr double distances[] = {-0.5, -0.4, -0.1, 0.02, 0.1, 0.4};
  batch.reference = batch.old = batch.advantages = std::vector<double>(logp.size());
  std::uint64_t document = 0;
  for (Rows rows : batch.documents()) {
    const double advantage = document++ % 4 == 3 ? 0 : Random(8).normal(document);
    for (auto t = static_cast<std::size_t>(rows.begin); t < static_cast<std::size_t>(rows.end); ++t) {
      if (batch.targets[t] < 0) continue;
      batch.reference[t] = logp[t] + 0.3 * Random(6).normal(t);
      batch.old[t] = logp[t] + distances[Random(7).below(6, t)];
      batch.advantages[t] = advantage;
    }
  }
  return batch;
}

// The oracle's gradient, for the weights that fill(host, model) writes.
template <class Fill>
oracle::Result oracle_gradient(const Config& config, const Batch& batch, Fill&& fill, const oracle::LossOf& loss,
                               const Wrong& wrong = {}) {
  Model<double> m{config, Tensors<double>(config)};
  std::list<std::vector<double>> memory;
  allocate(memory, table(config, m.weights));
  Cpu host(0);
  fill(host, m);
  return oracle::gradient(config, m.weights, batch, loss, wrong);
}
template <class Fill>
oracle::Result oracle_gradient(const Config& config, const Batch& batch, Fill&& fill, const Objective& objective = {}) {
  return oracle_gradient(config, batch, fill, oracle::loss_of(objective, batch));
}

}  // namespace streambp
