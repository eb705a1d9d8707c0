// Optimizers: the interface, the learning-rate schedule, and clipping by the global norm. Each optimizer is a file in
// training/optimizers/.
#pragma once

#include <cmath>
#include <string>
#include <variant>
#include <vector>

#include "kernels/adamw.cuh"
#include "kernels/elementwise.cuh"
#include "model/parameters.cuh"
#include "parallel/exchange.cuh"
#include "training/blocks.cuh"

namespace streambp {

// adamw_bf16: moments in the type of the weights, no master weights
enum class OptimizerKind { none, adamw, adamw_bf16, adamw_8bit, muon };

struct OptimizerSettings {
  double rate = 3e-4, final_rate_fraction = 0.1;
  Index warmup = 0, steps = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  double clip = 1;         // largest global gradient norm; 0: no limit
  std::uint64_t seed = 1;  // of the run
  BlockSettings blocks = {};
};

// Linear warm-up from zero, then a cosine down to the final fraction. Steps count from one.
inline double learning_rate(const OptimizerSettings& s, Index step) {
  const auto t = static_cast<double>(step), warmup = static_cast<double>(s.warmup),
             total = static_cast<double>(s.steps);
  if (t <= warmup) return s.rate * t / warmup;
  const double progress = total > warmup ? std::min(1.0, (t - warmup) / (total - warmup)) : 1;
  const double cosine = 0.5 * (1 + sine_cosine(3.141592653589793 * progress).cosine);
  return s.rate * (s.final_rate_fraction + (1 - s.final_rate_fraction) * cosine);
}

// What an optimizer keeps under one name, such as a moment: a matrix for every trained parameter, in the table's order. It
// has the parameter's rows, so that ranks can share it. Allocating, sharding, saving and loading follow from this
// description.
struct State {
  template <class U>
  using Matrices = std::vector<Matrix<U>>;

  std::string name;                    // in checkpoints: comes before a parameter's name
  Index (*columns)(const Parameter&);  // 0: this parameter has none
  std::variant<Matrices<float>, Matrices<double>, Matrices<BFloat16>, Matrices<std::uint8_t>> matrices;
};
inline Index all_columns(const Parameter& p) { return p.cols; }

// The trained parameters of a model.
inline std::vector<Parameter> trained_parameters(const Config& c) {
  Tensors<float> none(c);
  std::vector<Parameter> parameters;
  for (const auto& e : trained(table(c, none))) parameters.push_back(e.parameter);
  return parameters;
}

// A trained parameter in an update: this rank's rows of its weight and gradient. They may be empty.
template <class T, class G>
struct Updated {
  std::size_t number;  // among the trained parameters
  const Parameter& parameter;
  Matrix<T> weight;
  Matrix<G> gradient;
  OptimizerStep settings;
};

// Every rank has the state of its shard of each trained parameter, and updates this shard.
template <class Device, class T, class G>
class Optimizer {
 public:
  explicit Optimizer(const Group& ranks) : ranks(ranks) {}
  virtual ~Optimizer() = default;

  void allocate(Device& dev, const Config& c) {
    const auto parameters = trained_parameters(c);
    for (State& state : states_) {
      std::visit(
          [&](auto& matrices) {
            matrices.resize(parameters.size());
            streambp::allocate(dev, table_of(c, state, matrices), Kind::optimizer, ranks);
          },
          state.matrices);
    }
  }

  // Before the first update: zero the state, copy the weights to the master weights.
  void start(Device& dev, Model<T>& model) {
    for_each_state(model.config, [&](const std::string&, const auto& rows) {
      for (const auto& e : rows)
        if (*e.matrix) zero(dev, *e.matrix);
    });
    const auto weights = trained(table(model.config, model.weights));
    for (std::size_t i = 0; has_master() && i < weights.size(); ++i)
      if (master(i)) convert(dev, master(i), shard_of(model, weights[i]));
  }

  // One update. Weight decay applies to matrices only, not to norms and biases.
  void update(Device& dev, Model<T>& model, Tensors<G>& gradient, const OptimizerStep& settings) {
    const auto weights = table(model.config, model.weights);
    const auto gradients = table(model.config, gradient);
    std::vector<Updated<T, G>> all;
    std::vector<Matrix<T>> shared;  // replicated on all ranks
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Parameter& p = weights[i].parameter;
      if (!p.trained) continue;
      Updated<T, G> u = {all.size(), p, shard_of(model, weights[i]), *gradients[i].matrix, settings};
      if (p.vector()) u.settings.decay = 0;
      u.settings.parameter = i, u.settings.first_row = shard(p.rows, ranks).begin;
      all.push_back(u);
      if (!model.in_shards(p)) shared.push_back(*weights[i].matrix);
    }
    update(dev, all);
    if (ranks.size > 1 && !shared.empty()) exchange(dev, "share weights", ranks, shared_rows(ranks, shared));
  }

  // Calls f(name, table) for every state.
  template <class F>
  void for_each_state(const Config& c, F&& f) {
    for (State& state : states_)
      std::visit([&](auto& matrices) { f(state.name, table_of(c, state, matrices)); }, state.matrices);
  }
  bool has_master() const { return !states_.empty() && states_.back().name == kMaster; }
  // The float32 weights.
  Table<float> masters(const Config& c) {
    if (!has_master()) return {};
    return table_of(c, states_.back(), std::get<State::Matrices<float>>(states_.back().matrices));
  }

  const Group ranks;

 protected:
  virtual void update(Device& dev, const std::vector<Updated<T, G>>& parameters) = 0;

  // For the constructor; float32 master weights come last.
  template <class U>
  void add_state(const char* name, Index (*columns)(const Parameter&) = all_columns) {
    states_.push_back({name, columns, State::Matrices<U>()});
  }
  void add_master() { add_state<float>(kMaster); }

  template <class U>
  Matrix<U> state(std::size_t number, std::size_t parameter) const {
    return std::get<State::Matrices<U>>(states_[number].matrices)[parameter];
  }
  Matrix<float> master(std::size_t parameter) const {
    return has_master() ? state<float>(states_.size() - 1, parameter) : Matrix<float>();
  }

 private:
  static constexpr const char* kMaster = "master.";

  template <class U>
  static Table<U> table_of(const Config& c, const State& state, State::Matrices<U>& matrices) {
    Table<U> rows;
    std::size_t i = 0;
    for (Parameter& p : trained_parameters(c)) {
      p.cols = state.columns(p);
      if (p.cols > 0) rows.push_back({p, &matrices[i]});
      ++i;
    }
    return rows;
  }

  // The rows of a weight that this rank updates.
  Matrix<T> shard_of(const Model<T>& model, const Entry<T>& weight) const {
    return model.in_shards(weight.parameter) ? *weight.matrix
                                             : weight.matrix->slice(shard(weight.parameter.rows, ranks));
  }

  std::vector<State> states_;
};

// sqrt(Σ g²) over all trained parameters, row by row: the order does not depend on the shards. All ranks get it.
template <class Device, class G>
double global_norm(Device& dev, const Config& c, Tensors<G>& gradient, const Group& ranks) {
  const auto entries = trained(table(c, gradient));
  Index rows = 0;
  for (const Entry<G>& e : entries) rows += e.matrix->rows;
  auto scope = dev.scope();
  const auto sums = allocate<double>(dev, 1, rows, Kind::sums);
  Index first = 0;
  for (const Entry<G>& e : entries) {
    if (*e.matrix) row_squares(dev, sums.columns(first, e.matrix->rows), *e.matrix);
    first += e.matrix->rows;
  }
  if constexpr (!Device::computes) return 0;
  const auto of_ranks = gather_on_host(ranks, to_host(dev, sums));
  std::vector<std::size_t> next(of_ranks.size());
  double sum = 0;
  for (const Entry<G>& e : entries) {
    for (Index rank = 0; rank < ranks.size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      for (Index i = 0; i < shard(e.parameter.rows, ranks, rank).size(); ++i) sum += of_ranks[r][next[r]++];
    }
  }
  return std::sqrt(sum);
}

}  // namespace streambp
