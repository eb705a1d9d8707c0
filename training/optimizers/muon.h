// Muon (Jordan 2024) for the matrices of the layers, with the step sizes of AdamW (Liu et al. 2025); AdamW for all others:
//
//   m = μ m + (1 - μ) g,   u = μ m + (1 - μ) g                            Nesterov's momentum
//   w = w - rate (0.2 sqrt(max(rows, cols)) orthogonalise(u) + decay w)
//
// A matrix must be whole to be orthogonalised. Ranks have row shards, so in each round a rank gathers one matrix, and sends
// the rows of the result back.
#pragma once

#include "kernels/orthogonalise.h"
#include "training/optimizer.h"

namespace streambp {

template <class Device, class T, class G>
class MuonOptimizer : public Optimizer<Device, T, G> {
  using Round = std::vector<Updated<T, G>>;

 public:
  MuonOptimizer(const Group& ranks, Place place) : Optimizer<Device, T, G>(ranks, place) {
    this->template add_state<A>("m.");
    this->template add_state<A>("v.", second_moment);
    if (sizeof(A) > sizeof(T)) this->add_master();
  }

 protected:
  // A matrix for each rank in each round, the largest first: ranks share a round evenly, and none needs more memory than
  // rank 0.
  std::vector<Round> rounds(const Round& all) const override {
    Round matrices, others;
    for (const auto& u : all) (is_matrix(u.parameter) ? matrices : others).push_back(u);
    const auto memory = [](const auto& u) { return orthogonalise_memory(u.parameter.rows, u.parameter.cols); };
    std::stable_sort(matrices.begin(), matrices.end(),
                     [&](const auto& a, const auto& b) { return memory(a) > memory(b); });
    std::vector<Round> rounds = Optimizer<Device, T, G>::rounds(others);
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      if (i % static_cast<std::size_t>(this->ranks.size) == 0) rounds.emplace_back();
      rounds.back().push_back(matrices[i]);
    }
    return rounds;
  }

  void update(Device& dev, const Round& round) override {
    if (is_matrix(round[0].parameter)) return update_matrices(dev, round);
    this->template update_with_adamw<A>(dev, round, 0, 1);
  }

 private:
  using A = Accumulator<T>;
  static constexpr double kMomentum = 0.95;

  static bool is_matrix(const Parameter& p) { return p.in_layer && !p.vector() && !p.per_channel; }
  static Index second_moment(const Parameter& p) { return is_matrix(p) ? 0 : p.cols; }
  Matrix<A> momentum(const Updated<T, G>& u) const { return this->template state<A>(0, u); }

  // A matrix for each rank, or fewer.
  void update_matrices(Device& dev, const Round& matrices) {
    auto scope = dev.scope();
    std::vector<Matrix<T>> directions;
    for (const auto& u : matrices) directions.push_back(direction(dev, u));
    orthogonalise_shards(dev, matrices, directions);
    for (std::size_t i = 0; i < matrices.size(); ++i) apply(dev, matrices[i], directions[i]);
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
  void orthogonalise_shards(Device& dev, const Round& matrices, const std::vector<Matrix<T>>& shards) const {
    const Group& ranks = this->ranks;
    if (ranks.size == 1) return orthogonalise(dev, shards[0]);
    Transfers gather, scatter;
    Matrix<T> whole, own;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const Parameter& p = matrices[i].parameter;
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
    const Matrix<float> master = this->master(u);
    if (!master) return combine(dev, kept, u.weight, step, direction);
    combine(dev, kept, master, step, direction);
    convert(dev, u.weight, master);
  }
};

}  // namespace streambp
