// Optimizers: the interface, the learning-rate schedule, and clipping by the global norm. Each optimizer is a file in
// training/optimizers/.
#pragma once

#include <algorithm>
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

// The trained parameters of a model.
inline std::vector<Parameter> trained_parameters(const Config& c) {
  Tensors<float> none(c);
  std::vector<Parameter> parameters;
  for (const auto& e : trained(table(c, none))) parameters.push_back(e.parameter);
  return parameters;
}

// Rows of a trained parameter in an update. A rank updates its shard, which may be empty.
template <class T, class G>
struct Updated {
  std::size_t number;  // among the trained parameters
  Parameter parameter;
  Rows rows;  // of the shard
  Matrix<T> weight;
  Matrix<G> gradient;  // empty before the first update
  OptimizerStep settings;
  std::vector<std::byte*> fetched = {};  // the rows of each state, if it is in far memory
};

// An optimizer, and where it keeps its state.
struct OptimizerChoice {
  OptimizerKind kind;
  Place place = Place::near;
  OptimizerChoice(OptimizerKind kind, Place place = Place::near) : kind(kind), place(place) {}
};

// Every rank has the state of its shard of each trained parameter, and updates this shard. State in far memory is fetched
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
    in_rounds(dev, rounds(shards(model, nullptr, {})), Fetch::no, set);
  }

  // One update. Weight decay applies to matrices only, not to norms and biases.
  void update(Device& dev, Model<T>& model, Tensors<G>& gradient, const OptimizerStep& settings) {
    in_rounds(dev, rounds(shards(model, &gradient, settings)), Fetch::yes,
              [&](const Round& round) { update(dev, round); });
    std::vector<Matrix<T>> shared;  // replicated on all ranks
    for (const auto& e : trained(table(model.config, model.weights)))
      if (!model.in_shards(e.parameter)) shared.push_back(*e.matrix);
    if (ranks.size > 1 && !shared.empty()) exchange(dev, "share weights", ranks, shared_rows(ranks, shared));
  }

  // Calls f(name, table) for every state.
  template <class F>
  void for_each_state(const Config& c, F&& f) {
    for (State& state : states_)
      std::visit([&](auto& numbers) { f(state.name, table_of(c, state, numbers)); }, state.numbers);
  }
  bool has_master() const { return !states_.empty() && states_.back().name == kMaster; }
  // The float32 weights.
  Table<float> masters(const Config& c) {
    if (!has_master()) return {};
    return table_of(c, states_.back(), std::get<StateMatrices<float>>(states_.back().numbers));
  }

  const Group ranks;
  const Place place;

 protected:
  // Parameters that are updated together.
  using Round = std::vector<Updated<T, G>>;
  virtual void update(Device& dev, const Round& round) = 0;
  // By default each parameter alone, and in far memory a few thousand rows.
  virtual std::vector<Round> rounds(const Round& all) const {
    std::vector<Round> rounds;
    for (const auto& u : all)
      for (const auto& part : parts(u)) rounds.push_back({part});
    return rounds;
  }
  Round parts(const Updated<T, G>& u) const {
    if (place == Place::near) return {u};
    Round parts;
    for (Index begin = 0; begin < u.rows.end; begin += kFarRows) {
      Updated<T, G>& part = parts.emplace_back(u);
      part.rows = {begin, least(begin + kFarRows, u.rows.end)};
      part.weight = u.weight.slice(part.rows);
      if (u.gradient) part.gradient = u.gradient.slice(part.rows);
      part.settings.first_row += begin;
    }
    return parts;
  }

  // For the constructor; float32 master weights come last.
  template <class U>
  void add_state(const char* name, Index (*columns)(const Parameter&) = all_columns) {
    states_.push_back({name, columns, StateMatrices<U>()});
  }
  void add_master() { add_state<float>(kMaster); }

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
      if (gradient) u.gradient = *gradients[i].matrix;
      if (p.vector()) u.settings.decay = 0;  // of norms and biases
      u.settings.parameter = i, u.settings.first_row = shard(p.rows, ranks).begin;
    }
    return all;
  }

  // The rows of a weight that this rank updates.
  Matrix<T> shard_of(const Model<T>& model, const Entry<T>& weight) const {
    if (weight.quantised) return {};
    return model.in_shards(weight.parameter) ? *weight.matrix
                                             : weight.matrix->slice(shard(weight.parameter.rows, ranks));
  }

  // --- Rounds ---

  enum class Fetch { no, yes };

  // Calls f for each round, with the state in near memory. In far memory, a third round leaves meanwhile.
  template <class F>
  void in_rounds(Device& dev, std::vector<Round> rounds, Fetch fetch, F&& f) {
    if (place == Place::near) return static_cast<void>(std::for_each(rounds.begin(), rounds.end(), f));
    auto scope = dev.scope();
    Index largest = 0;
    for (const Round& round : rounds) largest = most(largest, bytes_of(round));
    Matrix<std::byte> memory[3];
    for (auto& m : memory) m = streambp::allocate<std::byte>(dev, 1, largest, Kind::optimizer);
    std::vector<PendingCopy> arriving, leaving[3];
    auto begin = [&](std::size_t i) {
      wait_for(leaving[i % 3]);
      lay_out(rounds[i], memory[i % 3]);
      arriving = fetch == Fetch::no ? std::vector<PendingCopy>()
                                    : copies(rounds[i], [&](auto far, auto near) { return dev.get(near, far); });
    };
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      if (i == 0) begin(0);
      wait_for(arriving);
      if (i + 1 < rounds.size()) begin(i + 1);
      f(rounds[i]);
      leaving[i % 3] = copies(rounds[i], [&](auto far, auto near) { return dev.put(far, near); });
    }
    for (auto& copies : leaving) wait_for(copies);
  }

  // Calls f with the matrix of state `number`.
  template <class F>
  void with_state(std::size_t number, const Updated<T, G>& u, F&& f) const {
    std::visit([&]<class U>(const StateMatrices<U>&) { f(state<U>(number, u)); }, states_[number].numbers);
  }
  Index bytes_of(const Updated<T, G>& u, std::size_t number) const {
    const State& state = states_[number];
    const Index size = std::visit([]<class U>(const StateMatrices<U>&) -> Index { return sizeof(U); }, state.numbers);
    return round_up(u.rows.size() * state.columns(u.parameter) * size, Arena::kAlignment);
  }
  Index bytes_of(const Round& round) const {
    Index bytes = 0;
    for (const Updated<T, G>& u : round)
      for (std::size_t i = 0; i < states_.size(); ++i) bytes += bytes_of(u, i);
    return bytes;
  }

  // Gives the states of a round their place in `memory`.
  void lay_out(Round& round, Matrix<std::byte> memory) const {
    Index used = 0;
    for (Updated<T, G>& u : round) {
      for (std::size_t i = 0; i < states_.size(); ++i) {
        const Index bytes = bytes_of(u, i);
        u.fetched.push_back(memory.columns(used, bytes).data);
        used += bytes;
      }
    }
  }

  // Calls copy(far, near) for each state of a round.
  template <class Copy>
  std::vector<PendingCopy> copies(const Round& round, Copy&& copy) const {
    std::vector<PendingCopy> result;
    for (const Updated<T, G>& u : round) {
      for (std::size_t i = 0; i < states_.size(); ++i) {
        std::visit(
            [&]<class U>(const StateMatrices<U>& numbers) {
              result.push_back(copy(numbers.far[u.number].slice(u.rows), state<U>(i, u)));
            },
            states_[i].numbers);
      }
    }
    return result;
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
