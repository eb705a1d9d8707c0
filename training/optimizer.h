// Optimizers: the interface, the learning-rate schedule, and clipping by the global norm. Each optimizer is a file in
// training/optimizers/.
#pragma once

#include <cmath>
#include <limits>
#include <variant>
#include <vector>

#include "kernels/adamw.cuh"
#include "kernels/elementwise.cuh"
#include "memory/schedule.h"
#include "model/parameters.h"
#include "parallel/exchange.h"
#include "training/blocks.h"

namespace streambp {

// adamw_bf16: moments in the type of the weights, no master weights
enum class OptimizerKind { none, adamw, adamw_bf16, adamw_8bit, muon };

// The learning rate after the warm-up: down along a cosine or a line, or constant. wsd (warm-up, stable, decay) is constant
// and then goes down a line in the last `cooldown` steps.
enum class RateSchedule { cosine, linear, constant, wsd };

struct OptimizerSettings {
  double rate = 3e-4, final_rate_fraction = 0.1;
  Index warmup = 0, steps = 0;
  RateSchedule schedule = RateSchedule::cosine;
  Index cooldown = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  double clip = 1;         // largest global gradient norm; 0: no limit
  std::uint64_t seed = 1;  // of the run
  BlockSettings blocks = {};
};

// The last step with the full rate.
inline Index last_full_rate(const OptimizerSettings& s) {
  if (s.schedule == RateSchedule::constant) return std::numeric_limits<Index>::max();
  return s.schedule == RateSchedule::wsd ? std::max(s.warmup, s.steps - s.cooldown) : s.warmup;
}

// Linear warm-up from zero, then the schedule, down to the final fraction. Steps count from one.
inline double learning_rate(const OptimizerSettings& s, Index step) {
  const auto t = static_cast<double>(step), warmup = static_cast<double>(s.warmup),
             total = static_cast<double>(s.steps), begin = static_cast<double>(last_full_rate(s));
  if (t <= warmup) return s.rate * t / warmup;
  if (t <= begin) return s.rate;
  const double progress = total > begin ? std::min(1.0, (t - begin) / (total - begin)) : 1;
  const double cosine = 0.5 * (1 + sine_cosine(3.141592653589793 * progress).cosine);
  const double share = s.schedule == RateSchedule::cosine ? cosine : 1 - progress;
  return s.rate * (s.final_rate_fraction + (1 - s.final_rate_fraction) * share);
}

// What an optimizer keeps under one name, such as a moment: a matrix for every trained parameter, in the table's order. It
// has the parameter's rows, so that ranks can share it. Allocating, sharding, saving and loading follow from this
// description.
template <class U>
struct StateMatrices {
  std::vector<Matrix<U>> near;
  std::vector<FarMatrix<U>> far;  // if the state is kept there
};
struct State {
  std::string name;                    // in checkpoints: comes before a parameter's name
  Index (*columns)(const Parameter&);  // 0: this parameter has none
  std::variant<StateMatrices<float>, StateMatrices<double>, StateMatrices<BFloat16>, StateMatrices<std::uint8_t>>
      numbers;
};
inline Index all_columns(const Parameter& p) { return p.cols; }

// Rows of a trained parameter in an update. A rank updates its shard, which may be empty.
template <class T, class G>
struct Updated {
  std::size_t number;  // among the trained parameters
  Parameter parameter;
  Rows rows;  // of the shard
  Matrix<T> weight;
  Matrix<G> gradient;  // empty before the first update
  OptimizerStep settings;
  Matrix<Accumulator<T>> wide_weight = {};  // instead, of a wide parameter
  Matrix<Accumulator<G>> wide_gradient = {};
  FarMatrix<T> far_weight = {};  // if they are in far memory, where the weight and the gradient come from
  FarMatrix<G> far_gradient = {};
  std::vector<std::byte*> fetched = {};  // the rows of each state, if it is in far memory
};

// An optimizer, and where a step keeps its data.
struct OptimizerChoice {
  OptimizerKind kind;
  Places places = {};
  OptimizerChoice(OptimizerKind kind, const Places& places = {}) : kind(kind), places(places) {}
};

// Every rank has the state of its shard of each trained parameter, and updates this shard. What is in far memory is fetched
// for a round of parameters at a time and returned after the update, while the next round arrives.
template <class Device, class T, class G>
class Optimizer {
 public:
  Optimizer(const Group& ranks, Place place) : ranks(ranks), place(place) {}
  virtual ~Optimizer() = default;

  void allocate(Device& dev, const Config& c) {
    for (State& state : states_)
      std::visit([&](auto& numbers) { allocate_state(dev, c, state, numbers); }, state.numbers);
  }

  // Before the first update: zero the state, copy the weights to the master weights.
  void start(Device& dev, Model<T>& model) {
    auto set = [&](const Round& round) {
      for (const Updated<T, G>& u : round) {
        for (std::size_t i = 0; i < states_.size(); ++i) with_state(i, u, [&](auto m) { zero(dev, m); });
        if (const auto master = this->master(u); master && u.weight) convert(dev, master, u.weight);
      }
    };
    Round all = shards(model, nullptr, {});
    for (auto& u : all)
      if (!has_master()) u.far_weight = {};  // not needed
    in_rounds(dev, rounds(all), Fetch::no, set);
  }

  // One update. Weight decay applies to matrices only, not to norms and biases.
  void update(Device& dev, Model<T>& model, Tensors<G>& gradient, const OptimizerStep& settings) {
    in_rounds(dev, rounds(shards(model, &gradient, settings)), Fetch::yes,
              [&](const Round& round) { update(dev, round); });
    Table<T> replicated = trained(table(model.config, model.weights));
    std::erase_if(replicated, [&](const Entry<T>& e) { return model.in_shards(e.parameter); });
    Transfers transfers;
    for (const Entry<T>& e : replicated)
      e.with_near([&](auto m) { transfers = shared_rows(ranks, m, std::move(transfers)); });
    if (ranks.size > 1 && !replicated.empty()) exchange(dev, "share weights", ranks, transfers);
  }

  // Calls f(name, table) for every state.
  template <class F>
  void for_each_state(const Config& c, F&& f) {
    for (State& state : states_)
      std::visit([&](auto& numbers) { f(state.name, table_of(c, state, numbers)); }, state.numbers);
  }
  bool has_master() const { return !states_.empty() && states_.back().name == kMaster; }
  // The float32 weights: master weights, and weights of which a model has no others.
  Table<float> masters(Model<T>& model) {
    if (!has_master()) return {};
    Table<float> all = table_of(model.config, states_.back(), std::get<StateMatrices<float>>(states_.back().numbers));
    if constexpr (std::is_same_v<Accumulator<T>, float>)
      for (const Entry<T>& e : trained(table(model.config, model.weights)))
        if (e.wide) all.push_back({e.parameter, e.wide});
    return all;
  }

  const Group ranks;
  const Place place;

 protected:
  // Parameters that are updated together.
  using Round = std::vector<Updated<T, G>>;
  virtual void update(Device& dev, const Round& round) = 0;
  // By default all parameters in near memory together, and of those in far memory a few thousand rows at a time.
  virtual std::vector<Round> rounds(const Round& all) const {
    Round near;
    std::vector<Round> rounds;
    for (const auto& u : all) {
      if (!is_far(u)) {
        near.push_back(u);
      } else {
        for (const auto& part : far_parts(u)) rounds.push_back({part});
      }
    }
    if (!near.empty()) rounds.push_back(near);
    return rounds;
  }
  Round far_parts(const Updated<T, G>& u) const {
    auto slice = [](auto& m, Rows rows) {
      if (!m.empty()) m = m.slice(rows);
    };
    Round parts;
    for (Index begin = 0; begin < u.rows.end; begin += kFarRows) {
      Updated<T, G>& part = parts.emplace_back(u);
      part.rows = {begin, least(begin + kFarRows, u.rows.end)};
      slice(part.weight, part.rows), slice(part.gradient, part.rows);
      slice(part.far_weight, part.rows), slice(part.far_gradient, part.rows);
      slice(part.wide_weight, part.rows), slice(part.wide_gradient, part.rows);
      part.settings.first_row += begin;
    }
    return parts;
  }

  bool is_far(const Updated<T, G>& u) const {
    return place == Place::far || !u.far_weight.empty() || !u.far_gradient.empty();
  }

  // For the constructor; float32 master weights come last.
  template <class U>
  void add_state(const char* name, Index (*columns)(const Parameter&) = all_columns) {
    states_.push_back({name, columns, StateMatrices<U>()});
  }
  void add_master() {
    add_state<float>(kMaster, [](const Parameter& p) { return p.wide ? 0 : p.cols; });
  }

  template <class U>
  Matrix<U> state(std::size_t number, const Updated<T, G>& u) const {
    const State& state = states_[number];
    if (u.fetched.empty()) {
      const Matrix<U> all = std::get<StateMatrices<U>>(state.numbers).near[u.number];
      return all ? all.slice(u.rows) : all;
    }
    return {reinterpret_cast<U*>(u.fetched[number]), u.rows.size(), state.columns(u.parameter)};
  }
  Matrix<float> master(const Updated<T, G>& u) const {
    return has_master() ? state<float>(states_.size() - 1, u) : Matrix<float>();
  }
  // AdamW of some parameters. M: the type of the moments, which are states `first` and `second`.
  template <class M>
  void update_with_adamw(Device& dev, const Round& round, std::size_t first, std::size_t second) {
    std::vector<AdamWUpdate<T, G, AdamWState<M>>> updates;
    std::vector<AdamWUpdate<Accumulator<T>, Accumulator<G>, AdamWState<M>>> wide;
    for (const auto& u : round) {
      const AdamWState<M> state = {master(u), this->state<M>(first, u), this->state<M>(second, u)};
      if (u.weight) updates.push_back({u.weight, u.gradient, state, u.settings});
      if (u.wide_weight) wide.push_back({u.wide_weight, u.wide_gradient, state, u.settings});
    }
    adamw(dev, updates);
    if (!wide.empty()) adamw(dev, wide);
  }

 private:
  static constexpr const char* kMaster = "master.";

  template <class U>
  void allocate_state(Device& dev, const Config& c, const State& state, StateMatrices<U>& numbers) {
    const auto parameters = trained_parameters(c);
    numbers.near.resize(parameters.size());
    if (place == Place::near) return streambp::allocate(dev, table_of(c, state, numbers), Kind::optimizer, ranks);
    for (const Parameter& p : parameters)
      numbers.far.push_back(allocate_far<U>(dev, shard(p.rows, ranks).size(), state.columns(p), Kind::optimizer));
  }

  template <class U>
  Table<U> table_of(const Config& c, const State& state, StateMatrices<U>& numbers) {
    Table<U> rows;
    std::size_t i = 0;
    for (Parameter& p : trained_parameters(c)) {
      p.cols = state.columns(p);
      if (p.cols > 0) rows.push_back({p, &numbers.near[i], nullptr, place == Place::far ? &numbers.far[i] : nullptr});
      ++i;
    }
    return rows;
  }

  // This rank's shard of every trained parameter.
  Round shards(Model<T>& model, Tensors<G>* gradient, const OptimizerStep& settings) {
    Round all;
    const auto weights = table(model.config, model.weights);
    const auto gradients = gradient ? table(model.config, *gradient) : Table<G>();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Parameter& p = weights[i].parameter;
      if (!p.trained) continue;
      const Matrix<T> weight = shard_of(model, weights[i]);
      Updated<T, G>& u = all.emplace_back(Updated<T, G>{all.size(), p, {0, weight.rows}, weight, {}, settings});
      if (weights[i].wide) {
        u.wide_weight = weights[i].wide->slice(shard(p.rows, ranks)), u.rows = {0, u.wide_weight.rows};
        if (gradient) u.wide_gradient = gradients[i].wide_matrix();
      }
      if (weights[i].is_far()) {
        u.far_weight = *weights[i].far, u.far_weight.kind = Kind::optimizer;  // its copies are a part of the update
        u.rows = {0, u.far_weight.rows};
        u.weight = {nullptr, 0, p.cols};  // until it is fetched
      }
      if (gradient && !weights[i].wide) u.gradient = *gradients[i].matrix;
      if (gradient && gradients[i].is_far()) {
        u.far_gradient = *gradients[i].far, u.far_gradient.kind = Kind::optimizer;
        u.gradient = {nullptr, 0, p.cols};
      }
      if (p.vector()) u.settings.decay = 0;  // of norms and biases
      u.settings.parameter = i, u.settings.first_row = shard(p.rows, ranks).begin;
    }
    return all;
  }

  // The rows of a weight that this rank updates.
  Matrix<T> shard_of(const Model<T>& model, const Entry<T>& weight) const {
    if (weight.quantised || weight.is_far() || weight.wide) return {};
    return model.in_shards(weight.parameter) ? *weight.matrix
                                             : weight.matrix->slice(shard(weight.parameter.rows, ranks));
  }

  // --- Rounds ---

  enum class Fetch { no, yes };  // whether the state is fetched, or only set

  // Calls f for each round, with all of it in near memory. What comes from far memory returns there: while one round is
  // updated, the next arrives and the one before leaves.
  template <class F>
  void in_rounds(Device& dev, std::vector<Round> rounds, Fetch fetch, F&& f) {
    auto scope = dev.scope();
    Index largest = 0;
    for (const Round& round : rounds) largest = most(largest, bytes_of(round));
    Matrix<std::byte> memory[3];
    if (largest > 0)
      for (auto& m : memory) m = streambp::allocate<std::byte>(dev, 1, largest, Kind::optimizer);
    std::vector<PendingCopy> arriving, leaving[3];
    auto begin = [&](std::size_t i) {
      wait_for(leaving[i % 3]);
      arriving = fetched(dev, rounds[i], memory[i % 3], fetch);
    };
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      if (i == 0) begin(0);
      wait_for(arriving);
      if (i + 1 < rounds.size()) begin(i + 1);
      f(rounds[i]);
      leaving[i % 3] = returned(dev, rounds[i]);
    }
    for (auto& copies : leaving) wait_for(copies);
  }

  template <class U>
  static Index aligned_bytes(Index size) {
    return round_up(size * static_cast<Index>(sizeof(U)), Arena::kAlignment);
  }
  // Near memory for what comes from far memory.
  Index bytes_of(const Round& round) const {
    Index bytes = 0;
    for (const Updated<T, G>& u : round) {
      bytes += aligned_bytes<T>(u.far_weight.size()) + aligned_bytes<G>(u.far_gradient.size());
      for (std::size_t i = 0; i < states_.size() && place == Place::far; ++i)
        with_far_state(i, u, [&]<class U>(FarMatrix<U> m) { bytes += aligned_bytes<U>(m.size()); });
    }
    return bytes;
  }

  // Gives a round its place in near memory, and begins to fetch it.
  std::vector<PendingCopy> fetched(Device& dev, Round& round, Matrix<std::byte> memory, Fetch fetch) const {
    std::vector<PendingCopy> copies;
    Index used = 0;
    auto arrive = [&]<class U>(FarMatrix<U> far, Fetch fetch) {
      const Index bytes = aligned_bytes<U>(far.size());
      const Matrix<U> near = {reinterpret_cast<U*>(memory.columns(used, bytes).data), far.rows, far.cols};
      used += bytes;
      if (fetch == Fetch::yes) copies.push_back(dev.get(near, far));
      return near;
    };
    for (Updated<T, G>& u : round) {
      if (!u.far_weight.empty()) u.weight = arrive(u.far_weight, Fetch::yes);
      if (!u.far_gradient.empty()) u.gradient = arrive(u.far_gradient, Fetch::yes);
      for (std::size_t i = 0; i < states_.size() && place == Place::far; ++i) {
        with_far_state(i, u,
                       [&](auto far) { u.fetched.push_back(reinterpret_cast<std::byte*>(arrive(far, fetch).data)); });
      }
    }
    return copies;
  }

  // Begins to return weights and state.
  std::vector<PendingCopy> returned(Device& dev, const Round& round) const {
    std::vector<PendingCopy> copies;
    for (const Updated<T, G>& u : round) {
      if (!u.far_weight.empty()) copies.push_back(dev.put(u.far_weight, u.weight));
      for (std::size_t i = 0; i < states_.size() && place == Place::far; ++i)
        with_far_state(i, u, [&]<class U>(FarMatrix<U> far) { copies.push_back(dev.put(far, state<U>(i, u))); });
    }
    return copies;
  }

  // Calls f with the rows of state `number`: where they are now, or in far memory.
  template <class F>
  void with_state(std::size_t number, const Updated<T, G>& u, F&& f) const {
    std::visit([&]<class U>(const StateMatrices<U>&) { f(state<U>(number, u)); }, states_[number].numbers);
  }
  template <class F>
  void with_far_state(std::size_t number, const Updated<T, G>& u, F&& f) const {
    std::visit([&](const auto& numbers) { f(numbers.far[u.number].slice(u.rows)); }, states_[number].numbers);
  }

  std::vector<State> states_;
};

}  // namespace streambp
