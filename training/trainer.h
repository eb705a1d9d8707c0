// A complete training step, and the state kept between steps. On the Plan device it counts the memory and FLOPs of a
// step; on the other devices it performs the step.
#pragma once

#include "model/batch.h"
#include "model/document_layout.h"
#include "streambp.cuh"
#include "training/gradient_norm.h"
#include "training/objectives.h"
#include "training/optimizers.h"

namespace streambp {

struct StepResult {
  Measures measures;
  GradientNorm gradient = {};
};

// T: the type of weights and activations; G: of the gradient.
template <class Device, class T, class G = T>
class Trainer {
 public:
  using A = Accumulator<T>;

  // Allocates weights, optimizer state, and a stream of `rows` tokens with the objective's data per token. Weights in far
  // memory are in shards, so that ranks on one machine do not hold them twice.
  Trainer(Device& dev, const Config& config, Index rows, const OptimizerChoice& choice, const Objective& objective = {},
          const Ranks& ranks = {})
      : dev(dev),
        objective(objective),
        ranks(ranks),
        layout(layout_of(config)),
        places(choice.places),
        model{with_temperature(config, objective.temperature), Tensors<T>(config),
              ranks.shard_weights || places.weights == Place::far ? ranks.all : Group{}, places.weights},
        grad(config),
        optimizer(make_optimizer<Device, T, G>(choice, ranks.all)) {
    allocate_weights(dev, model);
    optimizer->allocate(dev, config);
    stream = allocate_stream(dev, division_of(rows));
    auto numbers = [&] { return allocate<A>(dev, 1, stream.size(), Kind::stream); };
    logp = numbers();
    if (config.experts > 0 && layout.block > 1) counted = numbers();
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
    optimizer->start(dev, model);
  }

  // Adds the gradient of one micro-batch and returns its part of the loss. After the last one of the step
  // (of_step.batches), the gradient is complete.
  Measures accumulate(const Batch& batch, const Counts& of_step, const Schedule& schedule) {
    load(batch);
    const RoutingCounts routing = add_gradient(&batch, of_step, schedule);
    return measured(batch, of_step, log_probabilities(), routing);
  }

  // Adds the gradient of all micro-batches of a step, divided among the ranks. Calls after(i, logp) with the log-probs of
  // each micro-batch.
  Measures accumulate(const std::vector<Batch>& batches, const Schedule& schedule,
                      const std::function<void(std::size_t, const std::vector<A>&)>& after = {}) {
    Counts counts;
    for (const Batch& batch : batches) counts += Counts(batch);
    // With fewer, a tied head would not be summed apart, and the order of additions would depend on the ranks.
    require(counts.batches >= ranks.streams(), "a step of ", counts.batches, " micro-batches is too small for ",
            ranks.streams(), " token streams");
    Measures sum;
    const auto streams = static_cast<std::size_t>(ranks.streams()), mine = static_cast<std::size_t>(ranks.stream());
    for (std::size_t first = 0; first < batches.size(); first += streams) {
      const bool has_one = first + mine < batches.size();
      has_one ? load(batches[first + mine]) : load_nothing();
      const RoutingCounts routing = add_gradient(has_one ? &batches[first + mine] : nullptr, counts, schedule);
      const auto routings = gather_on_host(ranks.all, routing.sums);
      const auto logps = gather_on_host(ranks.all, has_one ? log_probabilities() : std::vector<A>());
      for (std::size_t i = first; i < std::min(batches.size(), first + streams); ++i) {
        const std::size_t rank = (i - first) * static_cast<std::size_t>(ranks.sequence.size);
        sum += measured(batches[i], counts, logps[rank], {routing.experts, batches[i].size(), routings[rank]});
        if (after) after(i, logps[rank]);
      }
    }
    return sum;
  }

  // One optimizer step. Throws before the weights change if the loss or the gradient is not finite.
  StepResult step(const std::vector<Batch>& batches, const Schedule& schedule, const OptimizerSettings& s, Index step,
                  const std::function<void(std::size_t, const std::vector<A>&)>& after = {}) {
    release_gradient();  // left over from a failed step
    const auto trained_before = model.config.trained;
    if (s.blocks) train_block(s.blocks, step);
    try {
      StepResult result{accumulate(batches, schedule, after)};
      check(result, step);
      if (s.blocks && step_of_turn(s.blocks, step) == 1) optimizer->start(dev, model);
      update(result, s, step);
      return result;
    } catch (...) {
      model.config.trained = trained_before;  // its state is still there, and can be saved
      throw;
    }
  }

  // From now on only the block of this step is trained. The state of the block before is its state now.
  void train_block(const BlockSettings& blocks, Index step) {
    Config& c = model.config;
    c.trained = names_of_block(c, blocks, block_of_step(blocks, c.layers, step));
  }

  // The same step on the Plan device, without data: micro-batches of this many documents of equal length.
  void plan_step(Index micro_batches, const Schedule& schedule, OptimizerKind kind, Index documents = 1) {
    view = stream;
    const Index rows = stream.division.rows, length = ceil_div(rows, documents);
    for (Index t = 0, begin = 0, next = 0; t < rows && documents > 1; ++t) {
      if (t == next) begin = t, next = layout.start(t + length, length);
      view.key_begin_on_host.push_back(static_cast<std::int32_t>(begin));
    }
    Counts counts;
    counts.batches = micro_batches;
    for (Index first = 0; first < micro_batches; first += ranks.streams()) {
      if (first + ranks.stream() >= micro_batches) load_nothing();
      add_gradient(nullptr, counts, schedule);
    }
    StepResult result;
    if (kind != OptimizerKind::none) check(result, 1), update(result, OptimizerSettings{}, 1);
    release_gradient();
  }

  void plan_evaluation(const Schedule& schedule) {
    view = stream;
    walk(schedule).evaluate(logp);
  }

  // The log-probs of the targets of some batches, divided among the ranks.
  std::vector<std::vector<A>> evaluate(const std::vector<Batch>& batches, const Schedule& schedule) {
    std::vector<std::vector<A>> all;
    const auto streams = static_cast<std::size_t>(ranks.streams()), mine = static_cast<std::size_t>(ranks.stream());
    for (std::size_t first = 0; first < batches.size(); first += streams) {
      const bool has_one = first + mine < batches.size();
      has_one ? load(batches[first + mine]) : load_nothing();
      const auto logps = gather_on_host(ranks.all, evaluate_loaded(schedule));
      for (std::size_t i = first; i < std::min(batches.size(), first + streams); ++i)
        all.push_back(logps[(i - first) * static_cast<std::size_t>(ranks.sequence.size)]);
    }
    return all;
  }
  std::vector<A> evaluate(const Batch& batch, const Schedule& schedule) {
    load(batch);
    return evaluate_loaded(schedule);
  }

  // Uploads this rank's rows of a batch; it may be shorter than the allocated stream.
  void load(const Batch& batch) {
    validate(model.config, batch);
    map = {layout, batch};
    map.is_identity() ? load_rows(batch) : load_rows(map.rows(batch));
  }
  void load_rows(const TokenBatch& batch) {
    const Index room = stream.division.rows;
    require(0 < batch.size() && batch.size() <= room, "a batch of ", batch.size(), " rows does not fit the stream of ",
            room);
    const Division division = division_of(batch.size());
    auto part = [&](Matrix<std::int32_t> to, const std::vector<std::int32_t>& from) {
      const auto filled = to.columns(0, static_cast<Index>(from.size()));
      dev.upload(filled, from.data());
      return filled;
    };
    const auto tokens = division.own(batch.tokens), positions = division.own(batch.positions);
    view = {division,
            part(stream.tokens, tokens),
            part(stream.targets, division.own(batch.targets)),
            part(stream.positions, positions),
            part(stream.key_begin, batch.key_begin),
            part(stream.rows_by_token, rows_by_index(tokens, division)),
            part(stream.rows_by_position, rows_by_index(positions, division)),
            batch.key_begin,
            ranks.streams() > 1 ? room : batch.size()};
  }
  // An empty stream, for a rank without a micro-batch in the last round.
  void load_nothing() {
    const Matrix<std::int32_t> none = stream.tokens.columns(0, 0);
    map = {};
    view = {division_of(0), none, none, none, none, none, none, {}, stream.division.rows};
  }

  // Log-probs of the batch that was loaded last, of all its tokens.
  std::vector<A> log_probabilities() {
    Division d = view.division;
    d.rank = 0;
    std::vector<A> all(static_cast<std::size_t>(d.rows));
    for (const std::vector<A>& of_rank : gather_on_host(ranks.sequence, to_host(dev, logp.columns(0, view.size())))) {
      for (std::size_t i = 0; i < of_rank.size(); ++i)
        all[static_cast<std::size_t>(d.place(static_cast<Index>(i)))] = of_rank[i];
      ++d.rank;
    }
    return map.of_tokens(std::move(all));
  }

  void release_gradient() {
    dev.arena.release_top(), dev.far.release_top();
    grad = Tensors<G>(model.config);
    accumulated = 0;
  }

  Device& dev;
  const Objective objective;
  const Ranks ranks;
  DocumentLayout layout;
  const Places places;
  Model<T> model;
  Tensors<G> grad;  // allocated from the first backward pass of a step until its end
  std::unique_ptr<Optimizer<Device, T, G>> optimizer;
  RowMap map;             // of the batch that was loaded last
  Stream view;            // the part of the stream that the batch fills
  bool updating = false;  // also after an update that failed halfway: the weights are then of no step

 private:
  Division division_of(Index rows) const {
    return {rows, dev.tile, ranks.sequence.rank, ranks.sequence.size, ranks.lanes};
  }
  Walk<Device, T> walk(const Schedule& schedule) { return {dev, model, view, schedule, ranks}; }

  std::vector<A> evaluate_loaded(const Schedule& schedule) {
    walk(schedule).evaluate(logp.columns(0, view.size()));
    return log_probabilities();
  }

  // The balance loss has the weight that the batch's targets have among those of the step.
  static double balance_weight(const Batch& batch, const Counts& of_step) {
    return of_step.targets == 0 ? 0 : static_cast<double>(batch.target_count()) / static_cast<double>(of_step.targets);
  }
  Measures measured(const Batch& batch, const Counts& of_step, const std::vector<A>& logp,
                    const RoutingCounts& routing) {
    Measures result = measure(objective, batch, of_step, logp);
    result.routing = routing;
    if (model.config.balance() == 0) return result;
    const double loss = balance_weight(batch, of_step) * routing.balance_loss();
    result.loss += model.config.balance() * loss, result.others["balance_loss"] = loss;
    return result;
  }

  // Adds the gradient of the loaded batch. It is null on Plan, where only shapes matter, and for an empty stream.
  RoutingCounts add_gradient(const Batch* batch, const Counts& of_step, const Schedule& schedule) {
    const TokenWeights<A> w = batch ? load_weights(*batch, of_step)
                                    : TokenWeights<A>{fixed, advantage, old, kl, reference}.columns({0, view.size()});
    std::function<void()> weigh;
    if (objective.weighs_between()) {
      weigh = [&] {
        std::vector<double> weights;
        if (batch) measure_and_weigh(objective, *batch, of_step, log_probabilities(), weights), put(fixed, weights);
      };
    }
    const MicroBatch micro_batch = {ranks.stream() + ranks.streams() * accumulated++, of_step.batches};
    require(micro_batch.exists() || view.size() == 0, "micro-batch ", micro_batch.number, " of a step that has ",
            micro_batch.count);
    RoutedRows<A> routed;
    if (batch) {
      routed = {{}, batch->size(), balance_weight(*batch, of_step)};
      if (!map.is_identity() && counted) routed.counted = put(counted, std::vector<double>(batch->tokens.size(), 1));
    }
    const RoutingCounts routing = walk(schedule).gradient(StepGradient<G>{grad, micro_batch, places.gradients}, w,
                                                          logp.columns(0, view.size()), routed, weigh);
    complete(micro_batch);
    return routing;
  }

  // After the last micro-batch: adds the gradients of a tied head and of the embedding.
  void complete(MicroBatch last) {
    if ((last.round(ranks) + 1) * ranks.streams() < last.count) return;
    if (!model.config.tied || !grad.head.weight) return;
    add(dev, grad.embedding.tokens, std::exchange(grad.head.weight, {}));
  }

  // Uploads numbers of tokens to this rank's rows.
  Matrix<A> put(Matrix<A> to, const std::vector<double>& numbers) {
    const Matrix<A> part = to.columns(0, view.size());
    std::vector<A> own;
    for (Index i = 0; i < view.size(); ++i) own.push_back(static_cast<A>(map.of_row(numbers, view.division.place(i))));
    dev.upload(part, own.data());
    return part;
  }

  // The weights of the batch's tokens, or the data that they are computed from.
  TokenWeights<A> load_weights(const Batch& batch, const Counts& of_step) {
    validate(objective, batch);
    if (objective.weighs_between()) return {.fixed = fixed.columns(0, view.size())};
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

  void check(StepResult& result, Index step) {
    result.gradient = global_norm(dev, model.config, grad, ranks.all);
    const double loss = result.measures.loss;
    require(std::isfinite(loss) && std::isfinite(result.gradient.norm), "step ", step, ": the loss is ", loss,
            " and the gradient norm ", result.gradient.norm,
            std::isfinite(loss) ? ", first in " + result.gradient.not_finite : "",
            "; the weights were not changed. Try a lower --rate or a longer --warmup");
  }

  void update(const StepResult& result, const OptimizerSettings& s, Index step) {
    OptimizerStep settings{learning_rate(s, step), s.beta1, s.beta2, s.eps, s.decay};
    settings.step = step, settings.begun = step - step_of_turn(s.blocks, step), settings.seed = s.seed;
    if (s.clip > 0 && result.gradient.norm > s.clip) settings.gradient_scale = s.clip / result.gradient.norm;
    updating = true;
    optimizer->update(dev, model, grad, settings);
    updating = false;
    release_gradient();
  }

  Stream stream;
  Matrix<A> logp, fixed, advantage, old, kl, reference;  // per token of this rank
  Matrix<A> counted;                                     // 1; 0 for rows that the layout leaves unused
  Index accumulated = 0;                                 // rounds of micro-batches since the last step
};

}  // namespace streambp
