// Gradients of cases (defects.h), computed by the program itself in any type.
#pragma once

#include <memory>

#include "referee/defects.h"
#include "referee/gradient_check.h"
#include "training/engine.h"
#include "training/plan.h"

namespace streambp {

// A type of weights and activations, and of the gradient if the weights are bfloat16.
struct Types {
  DType dtype;
  bool wide_gradient = true;
  bool operator==(const Types&) const = default;

  const char* name() const {
    if (dtype != DType::bf16) return streambp::name(dtype);
    return wide_gradient ? "bfloat16, gradient in float32" : "bfloat16";
  }
};

// The part of the step that a token belongs to.
inline std::vector<std::size_t> parts_of(const TrainingCase& of, std::size_t batch) {
  const RecordedBatch& b = of.step.batches[batch];
  std::vector<std::size_t> parts(b.rows.size(), 0);
  for (std::size_t t = 0; t < parts.size(); ++t) {
    parts[t] = of.mean == MeanOver::ranks       ? b.file
               : of.mean == MeanOver::batches   ? batch
               : of.mean == MeanOver::rows      ? (batch << 32) + static_cast<std::size_t>(b.rows[t])
               : of.mean == MeanOver::documents ? (batch << 32) + static_cast<std::size_t>(b.batch.key_begin[t])
                                                : 0;
  }
  return parts;
}

// The micro-batches, with d loss / d log-prob of each target as their advantages.
inline std::vector<Batch> weighted(const TrainingCase& of) {
  std::map<std::size_t, double> factors;  // of the targets of a part, summed
  std::vector<Batch> batches;
  for (std::size_t b = 0; b < of.step.batches.size(); ++b) {
    const Batch& batch = batches.emplace_back(of.step.batches[b].batch);
    const std::vector<std::size_t> parts = parts_of(of, b);
    for_each_target(batch, {0, batch.size()}, [&](std::size_t t) { factors[parts[t]] += batch.advantages[t]; });
  }
  if (of.step.reduction == Reduction::given) return batches;
  std::erase_if(factors, [](const auto& part) { return part.second == 0; });
  for (std::size_t b = 0; b < batches.size(); ++b) {
    const std::vector<std::size_t> parts = parts_of(of, b);
    for (std::size_t t = 0; t < parts.size(); ++t) {
      const double of_part = of.step.reduction == Reduction::sum || !factors.contains(parts[t])
                                 ? 1
                                 : factors.at(parts[t]) * static_cast<double>(factors.size());
      batches[b].advantages[t] /= -of_part;
      if (static_cast<Index>(b) == of.scaled) batches[b].advantages[t] *= 1 + of.wrong.strength;
    }
  }
  return batches;
}

// -Σ n log-prob, for batches from weighted().
inline Objective weighted_log_probs() {
  Objective objective;
  objective.kind = ObjectiveKind::own;
  objective.loss = [](const Batch& batch, const std::vector<double>& logps, std::vector<double>& weights) {
    double loss = 0;
    for_each_target(batch, {0, batch.size()}, [&](std::size_t t) {
      weights[t] = batch.advantages[t];
      loss += weights[t] * logps[t];
    });
    return loss;
  };
  return objective;
}

// The rows of micro-batches, each as a batch: what leaks from a document to the next one stays in its row.
inline std::vector<Batch> rows_of(const RecordedStep& step, const std::vector<Batch>& batches) {
  std::vector<Batch> rows;
  for (std::size_t b = 0; b < batches.size(); ++b) {
    const Batch& from = batches[b];
    std::size_t begin = 0;
    for (std::size_t t = 0; t < from.tokens.size(); ++t) {
      if (t == 0 || !defects::same_row(step.batches[b], t, t - 1)) rows.emplace_back(), begin = t;
      Batch& row = rows.back();
      row.tokens.push_back(from.tokens[t]), row.targets.push_back(from.targets[t]);
      row.positions.push_back(from.positions[t]), row.advantages.push_back(from.advantages[t]);
      row.key_begin.push_back(from.key_begin[t] - static_cast<std::int32_t>(begin));
    }
  }
  return rows;
}

class CaseGradients {
 public:
  using Fill = std::function<void(Engine&)>;

  // fill: loads the weights
  explicit CaseGradients(Fill fill) : fill_(std::move(fill)) {}

  struct Result {
    double loss;
    std::vector<Parameter> parameters;
    HostTensors values;
  };

  // The gradient of these parameters, or without any of all that are trained, times `scale`.
  Result compute(const TrainingCase& c, const Types& types, const std::set<std::string>& only = {}, double scale = 1) {
    std::vector<Batch> batches = weighted(c);
    for (Batch& batch : batches)
      for (double& weight : batch.advantages) weight *= scale;
    prepare(c, types, only);
    if (c.needs_oracle()) return by_oracle(c, batches, !only.empty());
    const double loss = engine_->accumulate(batches, schedule_).loss;
    Result result{loss, trained_parameters(settings_.config), engine_->gradient()};
    engine_->release_gradient();
    return result;
  }

 private:
  // What only the oracle computes, in float64 from the engine's weights.
  Result by_oracle(const TrainingCase& c, const std::vector<Batch>& batches, bool head_only) {
    Wrong wrong = c.wrong;
    wrong.stops_at_head = head_only;
    const HostTensors weights = engine_->weights();
    const std::vector<Parameter> all = parameters_of(c.config);
    const auto fill = [&](Cpu& host, Model<double>& m) {
      std::size_t i = 0;
      for (auto& e : table(m.config, m.weights)) host.upload(*e.matrix, weights[i++].data());
    };
    Result result{0, trained_parameters(settings_.config), {}};
    for (const Parameter& p : result.parameters) result.values.emplace_back(p.rows * p.cols);
    for (const Batch& batch : rows_of(c.step, batches)) {
      const oracle::Result part = oracle_gradient(c.config, batch, fill, oracle::linear(batch.advantages), wrong);
      result.loss += part.loss;
      for (std::size_t i = 0; i < result.values.size(); ++i) {
        const std::vector<double>& values = part.gradient.at(oracle::key(result.parameters[i]));
        for (std::size_t j = 0; j < values.size(); ++j) result.values[i][j] += values[j];
      }
    }
    for (std::size_t i = 0, at = 0; i < result.values.size(); ++i, ++at) {
      const Parameter& p = result.parameters[i];
      while (oracle::key(all[at]) != oracle::key(p)) ++at;
      const double decay =
          c.wrong.strength_of("weight-decay") + (p.vector() ? 0 : c.wrong.strength_of("weight-decay-matrices"));
      for (std::size_t j = 0; j < weights[at].size(); ++j) result.values[i][j] += decay * weights[at][j];
    }
    return result;
  }

  // The engine keeps its weights over cases that differ in their batches only.
  void prepare(const TrainingCase& c, const Types& types, const std::set<std::string>& only) {
    StepSettings s{c.config};
    s.dtype = types.dtype, s.wide_gradient = types.dtype == DType::bf16 && types.wide_gradient;
    s.optimizer = OptimizerKind::none, s.objective = weighted_log_probs();
    s.micro_batches = std::ssize(c.step.batches);
    if (!only.empty()) s.config.trained = only;
    Index rows = 0;
    for (const RecordedBatch& b : c.step.batches) rows = std::max(rows, layout_of(s.config).rows(b.batch));
    const bool same = engine_ && s.config == settings_.config && types == types_ &&
                      s.micro_batches == settings_.micro_batches && rows == rows_;
    if (same) return;
    engine_.reset();  // its memory first
    settings_ = s, types_ = types, rows_ = rows;
    schedule_ = schedule_for(Mode::stream, s, rows, default_chunk(s));
    const Capacity capacity = plan(s, rows, schedule_).capacity();
    // The gradient is copied in float64. Others are then compared with the exact one, which is the first.
    const std::size_t copies = types.dtype == DType::f64 ? 1 : 2;
    require_free(capacity.near + copies * sizeof(double) * static_cast<std::size_t>(trained_count(s.config)));
    engine_ = make_engine(s, rows, capacity);
    fill_(*engine_);
  }

  void require_free(std::size_t bytes) const {
    const std::size_t free = free_memory(DeviceKind::cpu);
    require(bytes <= free, "the gradient in ", types_.name(), " needs ", bytes >> 20, " MiB, and ", free >> 20,
            " MiB are free", types_.dtype == DType::f64 ? "; use --dtype f32, or " : "; ",
            "judge a part of the parameters with --train");
  }

  Fill fill_;
  std::unique_ptr<Engine> engine_;
  StepSettings settings_;
  Types types_{DType::f64};
  Index rows_ = 0;
  Schedule schedule_ = Schedule::full(0);
};

}  // namespace streambp
