// A training step from end to end: what stays in memory between steps, and in which order things happen within one. Run
// on the Plan device it tells what a step needs; on a device that computes it does the step.
#pragma once

#include <cmath>

#include "objectives.cuh"
#include "optimizer.cuh"
#include "streambp.cuh"

namespace streambp {

struct StepResult {
  double loss = 0, gradient_norm = 0;
};

enum class OptimizerKind { none, adamw, adamw_pure };  // adamw_pure: moments in the type of the weights, no master copy

// T: type of weights and activations; G: of the gradient; M: of the moments.
template <class Device, class T, class G = T, class M = Accumulator<T>>
class Trainer {
 public:
  using A = Accumulator<T>;

  // Allocates what stays: weights, optimizer, and a stream of `rows` tokens with its weights and log-probabilities.
  Trainer(Device& dev, const Config& config, Index rows, OptimizerKind kind)
      : dev(dev), model{config, Tensors<T>(config)}, grad(config), optimizer(config) {
    allocate(dev, table(config, model.weights), Kind::weights);
    if (kind != OptimizerKind::none) {
      optimizer.allocate(dev, config, kind == OptimizerKind::adamw && sizeof(T) < sizeof(float));
    }
    stream = allocate_stream(dev, rows);
    token_weights = dev.template allocate<A>(1, rows, Kind::stream);
    logp = dev.template allocate<A>(1, rows, Kind::stream);
  }

  // Random weights, and an optimizer that has seen nothing.
  void initialise(std::uint64_t seed, double spread = 0) {
    streambp::initialise(dev, model, seed, spread);
    optimizer.start(dev, model);
  }

  // Adds the gradient of one micro-batch and returns its part of the loss. Null: only the shapes matter, as on Plan.
  double accumulate(const Batch* batch, Index targets_of_step, const Schedule& schedule) {
    std::vector<double> w;
    if (batch) {
      w = sft_weights(*batch, targets_of_step);
      load(*batch);
      dev.upload(token_weights.columns(0, batch->size()), std::vector<A>(w.begin(), w.end()).data());
    }
    Walk<Device, T>(dev, model, view, schedule)
        .gradient(grad, token_weights.columns(0, view.size()), logp.columns(0, view.size()));
    return batch ? weighted_sum(w, log_probabilities()) : 0;
  }

  // One optimizer step. An infinite or NaN loss or gradient stops the run before the weights move.
  StepResult step(const std::vector<Batch>& batches, const Schedule& schedule, const OptimizerSettings& s, Index step) {
    release_gradient();  // of a step that was broken off
    Index targets = 0;
    for (const Batch& batch : batches) targets += batch.target_count();
    StepResult result;
    for (const Batch& batch : batches) result.loss += accumulate(&batch, targets, schedule);
    finish(result, s, step);
    return result;
  }

  // The same step for the Plan device, which needs no batches to count.
  void plan_step(Index micro_batches, const Schedule& schedule, OptimizerKind kind) {
    view = stream;
    for (Index i = 0; i < micro_batches; ++i) accumulate(nullptr, 0, schedule);
    StepResult result;
    if (kind != OptimizerKind::none) finish(result, OptimizerSettings{}, 1);
    release_gradient();
  }

  void plan_evaluation(const Schedule& schedule) {
    view = stream;
    Walk<Device, T>(dev, model, view, without_gradient(schedule)).evaluate(logp);
  }

  // Mean of -logp over the targets of a batch.
  double evaluate(const Batch& batch, const Schedule& schedule) {
    load(batch);
    Walk<Device, T>(dev, model, view, without_gradient(schedule)).evaluate(logp.columns(0, view.size()));
    return weighted_sum(sft_weights(batch, batch.target_count()), log_probabilities());
  }

  // Puts a batch on the device; it may be shorter than the stream that was allocated.
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

  // Of the batch that was loaded last.
  std::vector<A> log_probabilities() { return to_host(dev, logp.columns(0, view.size())); }

  void release_gradient() {
    dev.arena.release_top();
    grad = Tensors<G>(model.config);
  }

  Device& dev;
  Model<T> model;
  Tensors<G> grad;  // its tensors exist from the first backward pass of a step to its end
  Optimizer<T, M> optimizer;
  Stream view;  // the part of the stream that the batch fills

 private:
  static Schedule without_gradient(const Schedule& s) { return {Keep::nothing, s.chunk, s.head_chunk}; }

  void finish(StepResult& result, const OptimizerSettings& s, Index step) {
    result.gradient_norm = global_norm(dev, model.config, grad);
    require(std::isfinite(result.loss) && std::isfinite(result.gradient_norm), "step ", step, ": the loss is ",
            result.loss, " and the gradient norm ", result.gradient_norm,
            "; the weights were not changed. Try a lower --rate or a longer --warmup");
    AdamW settings{learning_rate(s, step), s.beta1, s.beta2, s.eps, s.decay, 1, step};
    if (s.clip > 0 && result.gradient_norm > s.clip) settings.gradient_scale = s.clip / result.gradient_norm;
    optimizer.update(dev, model, grad, settings);
    release_gradient();
  }

  Stream stream;
  Matrix<A> token_weights, logp;
};

}  // namespace streambp
