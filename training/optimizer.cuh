// The optimizer: AdamW, the learning-rate schedule, and clipping by the global norm.
#pragma once

#include <cmath>
#include <utility>

#include "kernels/adamw.cuh"
#include "kernels/elementwise.cuh"
#include "model/parameters.cuh"
#include "parallel/exchange.cuh"
#include "training/blocks.cuh"

namespace streambp {

// adamw_pure: moments in the type of the weights, no master weights
enum class OptimizerKind { none, adamw, adamw_pure };

struct OptimizerSettings {
  double rate = 3e-4, final_rate_fraction = 0.1;
  Index warmup = 0, steps = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  double clip = 1;  // largest global gradient norm; 0: no limit
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

// M: the type of the moments. With `master`, updates go to a float32 copy of the weights. Every rank has the state of its
// shard of each trained tensor, and updates this shard.
template <class T, class M>
struct Optimizer {
  Tensors<M> m, v;
  Tensors<float> master;
  bool has_master = false;
  Group ranks;

  explicit Optimizer(const Config& c, const Group& ranks = {}) : m(c), v(c), master(c), ranks(ranks) {}

  template <class Device>
  void allocate(Device& dev, const Config& c, bool with_master) {
    streambp::allocate(dev, trained(table(c, m)), Kind::optimizer, ranks);
    streambp::allocate(dev, trained(table(c, v)), Kind::optimizer, ranks);
    has_master = with_master;
    if (with_master) streambp::allocate(dev, trained(table(c, master)), Kind::optimizer, ranks);
  }

  // Gives the memory of the state to the parameters that are trained now. They have the shapes of those before, in order.
  void move_to(const Config& before, const Config& now) {
    const auto move = [&](auto& state) {
      auto old = std::exchange(state, std::decay_t<decltype(state)>(now));
      const auto from = trained(table(before, old)), to = trained(table(now, state));
      require(from.size() == to.size(), "blocks of ", from.size(), " and ", to.size(), " parameters");
      for (std::size_t i = 0; i < to.size(); ++i) *to[i].matrix = *from[i].matrix;
    };
    move(m), move(v);
    if (has_master) move(master);
  }

  // Before the first update: zero the moments, copy the weights to the master weights.
  template <class Device>
  void start(Device& dev, Model<T>& model) {
    const auto weights = trained(table(model.config, model.weights));
    const auto ms = trained(table(model.config, m)), vs = trained(table(model.config, v));
    const auto masters = trained(table(model.config, master));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (*ms[i].matrix) zero(dev, *ms[i].matrix);
      if (*vs[i].matrix) zero(dev, *vs[i].matrix);
      if (*masters[i].matrix) convert(dev, *masters[i].matrix, shard_of(model, weights[i]));
    }
  }

  // One update. Weight decay applies to matrices only, not to norms and biases.
  template <class Device, class G>
  void update(Device& dev, Model<T>& model, Tensors<G>& gradient, AdamW settings) {
    const Config& c = model.config;
    const auto w = trained(table(c, model.weights));
    const auto g = trained(table(c, gradient));
    const auto ms = trained(table(c, m)), vs = trained(table(c, v));
    const auto masters = trained(table(c, master));
    const double decay = settings.decay;
    std::vector<Matrix<T>> updated;  // of which every rank has all rows
    for (std::size_t i = 0; i < w.size(); ++i) {
      settings.decay = w[i].parameter.vector() ? 0 : decay;
      settings.parameter = i;
      settings.first_row = shard(w[i].parameter.rows, ranks).begin;
      const AdamWState<M> state = {*masters[i].matrix, *ms[i].matrix, *vs[i].matrix};
      if (const auto mine = shard_of(model, w[i])) adamw(dev, mine, *g[i].matrix, state, settings);
      if (!model.in_shards(w[i].parameter)) updated.push_back(*w[i].matrix);
    }
    if (ranks.size > 1 && !updated.empty()) exchange(dev, "share weights", ranks, shared_rows(ranks, updated));
  }

 private:
  // The rows of a weight that this rank updates.
  Matrix<T> shard_of(const Model<T>& model, const Entry<T>& weight) const {
    return model.in_shards(weight.parameter) ? *weight.matrix
                                             : weight.matrix->slice(shard(weight.parameter.rows, ranks));
  }
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
