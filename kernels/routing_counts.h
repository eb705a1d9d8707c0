// How the rows of one or several micro-batches used the experts of each layer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/base/matrix.cuh"

namespace streambp {

// Probabilities of a router are summed as integers, in these units: no sum depends on its order.
constexpr double kProbabilityUnits = 4294967296.0;

struct RoutingCounts {
  Index experts = 0, rows = 0;
  std::vector<std::int64_t> sums = {};  // of each layer: the rows of each expert, then the sums of its probabilities

  Index layers() const { return experts == 0 ? 0 : static_cast<Index>(sums.size()) / (2 * experts); }
  double chosen(Index layer, Index e) const { return number(layer, e); }
  double probability(Index layer, Index e) const { return number(layer, experts + e) / kProbabilityUnits; }
  // Means over all rows of all layers.
  double mean_chosen(Index e) const { return mean(e) * kProbabilityUnits; }
  double mean_probability(Index e) const { return mean(experts + e); }
  // E Σ_e F_e P_e (kernels/expert_use.cuh): 1 per expert of a row if all experts have equal use.
  double balance_loss() const {
    double sum = 0;
    for (Index e = 0; e < experts; ++e) sum += mean_chosen(e) * mean_probability(e);
    return sum * static_cast<double>(experts);
  }
  // How many rows an expert of a layer has, beside equal use by all.
  double load(Index layer, Index e) const {
    double all = 0;
    for (Index other = 0; other < experts; ++other) all += chosen(layer, other);
    return all > 0 ? chosen(layer, e) * static_cast<double>(experts) / all : 0;
  }
  double busiest() const {
    double most = 0;
    for (Index l = 0; l < layers(); ++l)
      for (Index e = 0; e < experts; ++e) most = std::max(most, load(l, e));
    return most;
  }
  // The share of the layers' experts that no row chose.
  double idle() const {
    double idle = 0;
    for (Index l = 0; l < layers(); ++l)
      for (Index e = 0; e < experts; ++e) idle += chosen(l, e) == 0;
    return idle / static_cast<double>(most(layers() * experts, 1));
  }
  // Of the use of a layer's experts, as a share of that of equal use; the mean over layers.
  double entropy() const {
    double sum = 0;
    for (Index l = 0; l < layers(); ++l)
      for (Index e = 0; e < experts; ++e)
        if (const double p = load(l, e) / static_cast<double>(experts); p > 0) sum -= p * std::log(p);
    return experts > 1 && layers() > 0 ? sum / std::log(experts) / static_cast<double>(layers()) : 1;
  }
  RoutingCounts& operator+=(const RoutingCounts& more) {
    experts = std::max(experts, more.experts), rows += more.rows;
    sums.resize(std::max(sums.size(), more.sums.size()));
    for (std::size_t i = 0; i < more.sums.size(); ++i) sums[i] += more.sums[i];
    return *this;
  }

 private:
  double number(Index layer, Index i) const {
    return static_cast<double>(sums[static_cast<std::size_t>(layer * 2 * experts + i)]);
  }
  double mean(Index i) const {
    double sum = 0;
    for (Index l = 0; l < layers(); ++l) sum += number(l, i);
    return rows > 0 ? sum / kProbabilityUnits / static_cast<double>(rows * layers()) : 0;
  }
};

}  // namespace streambp
