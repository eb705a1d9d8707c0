// Muon (Jordan 2024) for the matrices of the layers, with the step sizes of AdamW (Liu et al. 2025); AdamW for all others:
//
//   m = μ m + (1 - μ) g,   u = μ m + (1 - μ) g                            Nesterov's momentum
//   w = w - rate (0.2 sqrt(max(rows, cols)) orthogonalise(u) + decay w)
//
// A matrix must be whole to be orthogonalised. Ranks have row shards, so in each round a rank gathers one matrix, and sends
// the rows of the result back.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/orthogonalise.cuh"
#include "training/optimizer.cuh"

namespace streambp {

template <class Device, class T, class G>
class MuonOptimizer : public Optimizer<Device, T, G> {
 public:
  explicit MuonOptimizer(const Group& ranks) : Optimizer<Device, T, G>(ranks) {
    this->template add_state<A>("m.");
    this->template add_state<A>("v.", second_moment);
    if (sizeof(A) > sizeof(T)) this->add_master();
  }

 protected:
  void update(Device& dev, const std::vector<Updated<T, G>>& parameters) override {
    Matrices matrices;
    for (const auto& u : parameters) {
      if (is_matrix(u.parameter)) {
        matrices.push_back(&u);
      } else if (u.weight) {
        const AdamWState<A> state = {this->master(u.number), momentum(u), this->template state<A>(1, u.number)};
        adamw(dev, u.weight, u.gradient, state, u.settings);
      }
    }
    // The largest first: ranks share a round evenly, and none needs more memory than rank 0.
    const auto memory = [](const auto* u) { return orthogonalise_memory(u->parameter.rows, u->parameter.cols); };
    std::stable_sort(matrices.begin(), matrices.end(),
                     [&](const auto* a, const auto* b) { return memory(a) > memory(b); });
    const auto ranks = static_cast<std::size_t>(this->ranks.size);
    for (std::size_t i = 0; i < matrices.size(); i += ranks)
      update_round(dev, Matrices(matrices.begin() + static_cast<std::ptrdiff_t>(i),
                                 matrices.begin() + static_cast<std::ptrdiff_t>(std::min(i + ranks, matrices.size()))));
  }

 private:
  using A = Accumulator<T>;
  using Matrices = std::vector<const Updated<T, G>*>;
  static constexpr double kMomentum = 0.95;

  static bool is_matrix(const Parameter& p) { return p.in_layer && !p.vector(); }
  static Index second_moment(const Parameter& p) { return is_matrix(p) ? 0 : p.cols; }
  Matrix<A> momentum(const Updated<T, G>& u) const { return this->template state<A>(0, u.number); }

  // Updates a matrix for each rank, or fewer.
  void update_round(Device& dev, const Matrices& matrices) {
    auto scope = dev.scope();
    std::vector<Matrix<T>> directions;
    for (const auto* u : matrices) directions.push_back(direction(dev, *u));
    orthogonalise_shards(dev, matrices, directions);
    for (std::size_t i = 0; i < matrices.size(); ++i) apply(dev, *matrices[i], directions[i]);
  }

  // Nesterov's momentum, in the type of the weights.
  Matrix<T> direction(Device& dev, const Updated<T, G>& u) const {
    const double share = (1 - kMomentum) * u.settings.gradient_scale;
    const auto result = allocate<T>(dev, u.gradient.rows, u.gradient.cols, Kind::optimizer);
    combine(dev, kMomentum, momentum(u), share, u.gradient);
    convert(dev, result, u.gradient);
    combine(dev, share, result, kMomentum, momentum(u));
    return result;
  }

  // Matrix i is orthogonalised by rank i.
  void orthogonalise_shards(Device& dev, const Matrices& matrices, const std::vector<Matrix<T>>& shards) const {
    const Group& ranks = this->ranks;
    if (ranks.size == 1) return orthogonalise(dev, shards[0]);
    Transfers gather, scatter;
    Matrix<T> whole, own;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const Parameter& p = matrices[i]->parameter;
      const auto owner = static_cast<Index>(i);
      if (owner != ranks.rank) {
        gather.send(owner, shards[i]), scatter.receive(owner, shards[i]);
        continue;
      }
      whole = allocate<T>(dev, p.rows, p.cols, Kind::optimizer), own = shards[i];
      for (Index peer = 0; peer < ranks.size; ++peer) {
        const Matrix<T> part = whole.slice(shard(p.rows, ranks, peer));
        if (peer != ranks.rank) gather.receive(peer, part), scatter.send(peer, part);
      }
    }
    const Matrix<T> place = whole ? whole.slice(shard(whole.rows, ranks)) : whole;
    if (whole) convert(dev, place, own);
    exchange(dev, "gather momentum", ranks, gather);
    if (whole) orthogonalise(dev, whole);
    exchange(dev, "share direction", ranks, scatter);
    if (whole) convert(dev, own, place);
  }

  void apply(Device& dev, const Updated<T, G>& u, Matrix<T> direction) const {
    const double size = 0.2 * std::sqrt(static_cast<double>(most(u.parameter.rows, u.parameter.cols)));
    const double kept = 1 - u.settings.rate * u.settings.decay, step = -u.settings.rate * size;
    const Matrix<float> master = this->master(u.number);
    if (!master) return combine(dev, kept, u.weight, step, direction);
    combine(dev, kept, master, step, direction);
    convert(dev, u.weight, master);
  }
};

}  // namespace streambp
