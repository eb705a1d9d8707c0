// A complete training step, and the state kept between steps. On the Plan device it counts the memory and FLOPs of a
// step; on the other devices it performs the step.
#pragma once

#include <cmath>

#include "data/batch.cuh"
#include "streambp.cuh"
#include "training/objectives.cuh"
#include "training/optimizer.cuh"

namespace streambp {

struct StepResult {
  Measures measures;
  double gradient_norm = 0;
};

// T: the type of weights and activations; G: of the gradient; M: of the moments.
template <class Device, class T, class G = T, class M = Accumulator<T>>
class Trainer {
 public:
  using A = Accumulator<T>;

  // Allocates weights, optimizer state, and a stream of `rows` tokens with the objective's data per token.
  Trainer(Device& dev, const Config& config, Index rows, OptimizerKind kind, const Objective& objective = {})
      : dev(dev), objective(objective), model{config, Tensors<T>(config)}, grad(config), optimizer(config) {
    allocate(dev, table(config, model.weights), Kind::weights);
    if (kind != OptimizerKind::none) {
      optimizer.allocate(dev, config, kind == OptimizerKind::adamw && sizeof(T) < sizeof(float));
    }
    stream = allocate_stream(dev, rows);
    auto numbers = [&] { return allocate<A>(dev, 1, rows, Kind::stream); };
    logp = numbers();
    if (objective.kind == ObjectiveKind::grpo) {
      advantage = numbers(), old = numbers();
      if (objective.kl > 0) kl = numbers(), reference = numbers();
    } else {
      fixed = numbers();
    }
  }

  // Random weights and a fresh optimizer.
  void initialise(std::uint64_t seed, double spread = 0) {
    streambp::initialise(dev, model, seed, spread);
    optimizer.start(dev, model);
  }

  // Adds the gradient of one micro-batch and returns its part of the loss. On Plan, where only shapes matter, the batch
  // is null.
  Measures accumulate(const Batch* batch, const Counts& of_step, const Schedule& schedule) {
    TokenWeights<A> w;
    if (batch) {
      load(*batch);
      w = load_weights(*batch, of_step);
    } else {
      w = TokenWeights<A>{fixed, advantage, old, kl, reference}.columns({0, view.size()});
    }
    std::function<void()> weigh;
    if (objective.kind == ObjectiveKind::dpo) {
      weigh = [&] {
        std::vector<double> pairs;
        if (batch) measure_pairs(objective, *batch, of_step, log_probabilities(), pairs), put(fixed, pairs);
      };
    }
    Walk<Device, T>(dev, model, view, schedule).gradient(grad, w, logp.columns(0, view.size()), weigh);
    return batch ? measure(objective, *batch, of_step, log_probabilities()) : Measures{};
  }

  // One optimizer step. Throws before the weights change if the loss or the gradient is not finite. Calls after(i, logp)
  // with the log-probs of each micro-batch.
  StepResult step(const std::vector<Batch>& batches, const Schedule& schedule, const OptimizerSettings& s, Index step,
                  const std::function<void(std::size_t, const std::vector<A>&)>& after = {}) {
    release_gradient();  // left over from a failed step
    Counts counts;
    for (const Batch& batch : batches) counts += Counts(batch);
    StepResult result;
    for (std::size_t i = 0; i < batches.size(); ++i) {
      result.measures += accumulate(&batches[i], counts, schedule);
      if (after) after(i, log_probabilities());
    }
    finish(result, s, step);
    return result;
  }

  // The same step on the Plan device, without data: micro-batches of this many documents of equal length.
  void plan_step(Index micro_batches, const Schedule& schedule, OptimizerKind kind, Index documents = 1) {
    view = stream;
    const Index length = ceil_div(stream.size(), documents);
    for (Index t = 0; t < stream.size() && documents > 1; ++t) {
      view.key_begin_on_host.push_back(static_cast<std::int32_t>(t / length * length));
    }
    for (Index i = 0; i < micro_batches; ++i) accumulate(nullptr, {}, schedule);
    StepResult result;
    if (kind != OptimizerKind::none) finish(result, OptimizerSettings{}, 1);
    release_gradient();
  }

  void plan_evaluation(const Schedule& schedule) {
    view = stream;
    Walk<Device, T>(dev, model, view, schedule).evaluate(logp);
  }

  // The log-probs of a batch's targets.
  std::vector<A> evaluate(const Batch& batch, const Schedule& schedule) {
    load(batch);
    Walk<Device, T>(dev, model, view, schedule).evaluate(logp.columns(0, view.size()));
    return log_probabilities();
  }

  // Uploads a batch; it may be shorter than the allocated stream.
  void load(const Batch& batch) {
    validate(model.config, batch);
    require(0 < batch.size() && batch.size() <= stream.size(), "a batch of ", batch.size(),
            " tokens does not fit the stream of ", stream.size());
    auto part = [&](Matrix<std::int32_t> to, const std::vector<std::int32_t>& from) {
      dev.upload(to.columns(0, batch.size()), from.data());
      return to.columns(0, batch.size());
    };
    view = {part(stream.tokens, batch.tokens),
            part(stream.targets, batch.targets),
            part(stream.positions, batch.positions),
            part(stream.key_begin, batch.key_begin),
            part(stream.rows_by_token, rows_by_index(batch.tokens)),
            part(stream.rows_by_position, rows_by_index(batch.positions)),
            batch.key_begin};
  }

  // Log-probs of the batch that was loaded last.
  std::vector<A> log_probabilities() { return to_host(dev, logp.columns(0, view.size())); }

  void release_gradient() {
    dev.arena.release_top();
    grad = Tensors<G>(model.config);
  }

  Device& dev;
  const Objective objective;
  Model<T> model;
  Tensors<G> grad;  // allocated from the first backward pass of a step until its end
  Optimizer<T, M> optimizer;
  Stream view;  // the part of the stream that the batch fills

 private:
  // Uploads a number per token of the batch.
  Matrix<A> put(Matrix<A> to, const std::vector<double>& numbers) {
    const Matrix<A> part = to.columns(0, view.size());
    dev.upload(part, std::vector<A>(numbers.begin(), numbers.end()).data());
    return part;
  }

  // The weights of the batch's tokens, or the data that they are computed from.
  TokenWeights<A> load_weights(const Batch& batch, const Counts& of_step) {
    validate(objective, batch);
    if (objective.kind == ObjectiveKind::dpo) return {.fixed = fixed.columns(0, view.size())};
    std::vector<double> n = shares(objective, batch, of_step);
    auto times = [&](auto&& factor) {
      std::vector<double> product = n;
      for (std::size_t t = 0; t < n.size(); ++t) product[t] *= factor(t);
      return product;
    };
    if (objective.kind == ObjectiveKind::sft) return {.fixed = put(fixed, times([](std::size_t) { return -1; }))};
    TokenWeights<A> w{.advantage = put(advantage, times([&](std::size_t t) { return batch.advantages[t]; })),
                      .lowest = static_cast<A>(1 - objective.clip_low),
                      .highest = static_cast<A>(1 + objective.clip_high)};
    if (!batch.old.empty()) w.old = put(old, batch.old);
    if (objective.kl > 0) {
      w.kl = put(kl, times([&](std::size_t) { return objective.kl; }));
      w.reference = put(reference, batch.reference);
    }
    return w;
  }

  void finish(StepResult& result, const OptimizerSettings& s, Index step) {
    result.gradient_norm = global_norm(dev, model.config, grad);
    const double loss = result.measures.loss;
    require(std::isfinite(loss) && std::isfinite(result.gradient_norm), "step ", step, ": the loss is ", loss,
            " and the gradient norm ", result.gradient_norm,
            "; the weights were not changed. Try a lower --rate or a longer --warmup");
    AdamW settings{learning_rate(s, step), s.beta1, s.beta2, s.eps, s.decay, 1, step};
    if (s.clip > 0 && result.gradient_norm > s.clip) settings.gradient_scale = s.clip / result.gradient_norm;
    optimizer.update(dev, model, grad, settings);
    release_gradient();
  }

  Stream stream;
  Matrix<A> logp, fixed, advantage, old, kl, reference;  // per token
};

}  // namespace streambp
