// The objectives, naively: each loss is its formula in long double and nothing else. Their slopes are differences of the
// loss itself, so they share no derivation with the program.
#pragma once

#include "../objectives.cuh"
#include "reference.cuh"

namespace streambp::reference {

using Real = long double;
using Plain = std::function<Real(const std::vector<Real>& logp)>;

// The mean over all targets, or over documents of the mean, or of the sum over a fixed length, of what a token costs.
inline Real mean_of(const Objective& o, const Batch& batch, const std::function<Real(std::size_t)>& cost) {
  Real total = 0, targets = 0, documents = 0;
  for (Rows rows : batch.documents()) {
    Real sum = 0, count = 0;
    for (Index t = rows.begin; t < rows.end; ++t) {
      if (batch.targets[static_cast<std::size_t>(t)] < 0) continue;
      sum += cost(static_cast<std::size_t>(t));
      count += 1;
    }
    if (count == 0) continue;
    total += o.mean == Mean::tokens ? sum : o.mean == Mean::documents ? sum / count : sum / static_cast<Real>(o.length);
    targets += count;
    documents += 1;
  }
  return total / (o.mean == Mean::tokens ? targets : documents);
}

inline Real pairs_loss(const Objective& o, const Batch& batch, const std::vector<Real>& logp) {
  const std::vector<Rows> documents = batch.documents();
  const auto score = [&](Rows rows) {
    Real sum = 0, count = 0;
    for (auto t = static_cast<std::size_t>(rows.begin); t < static_cast<std::size_t>(rows.end); ++t) {
      if (batch.targets[t] < 0) continue;
      sum += logp[t];
      if (o.preference != Preference::simpo) sum -= static_cast<Real>(batch.reference[t]);
      count += 1;
    }
    return o.preference == Preference::sigmoid ? sum : sum / count;
  };
  const Real beta = static_cast<Real>(o.beta), smoothing = static_cast<Real>(o.label_smoothing);
  Real total = 0;
  for (std::size_t i = 0; i < documents.size(); i += 2) {
    const Real h = score(documents[i]) - score(documents[i + 1]);
    if (o.preference == Preference::ipo) {
      total += (h - 1 / (2 * beta)) * (h - 1 / (2 * beta));
    } else {
      const Real x = beta * h - (o.preference == Preference::simpo ? static_cast<Real>(o.margin) : 0);
      total += (1 - smoothing) * std::log(1 + std::exp(-x)) + smoothing * std::log(1 + std::exp(x));
    }
  }
  return total / static_cast<Real>(documents.size() / 2);
}

inline Real plain_loss(const Objective& o, const Batch& batch, const std::vector<Real>& logp) {
  if (o.kind == ObjectiveKind::dpo) return pairs_loss(o, batch, logp);
  return mean_of(o, batch, [&](std::size_t t) -> Real {
    if (o.kind == ObjectiveKind::sft) return -logp[t];
    // Where there is no older policy the present one takes its place, as a constant.
    const Real advantage = static_cast<Real>(batch.advantages[t]), low = 1 - static_cast<Real>(o.clip_low),
               high = 1 + static_cast<Real>(o.clip_high), ratio = std::exp(logp[t] - static_cast<Real>(batch.old[t])),
               clipped = ratio < low    ? low
                         : ratio > high ? high
                                        : ratio;
    Real cost = -std::min(ratio * advantage, clipped * advantage);
    if (o.kl > 0) {
      const Real delta = static_cast<Real>(batch.reference[t]) - logp[t];
      cost += static_cast<Real>(o.kl) * (std::exp(delta) - delta - 1);
    }
    return cost;
  });
}

// Slopes by five points each: the error is of the fourth order in their distance.
inline LossOf loss_of(const Objective& o, const Batch& batch) {
  return [=](const std::vector<double>& logp) {
    Batch complete = batch;
    if (complete.old.empty()) complete.old = logp;
    std::vector<Real> x(logp.begin(), logp.end());
    Loss loss{static_cast<double>(plain_loss(o, complete, x)), std::vector<double>(logp.size())};
    for (std::size_t t = 0; t < x.size(); ++t) {
      if (batch.targets[t] < 0) continue;
      constexpr Real h = 1e-4L;
      const auto at = [&](Real shift) {
        x[t] = static_cast<Real>(logp[t]) + shift;
        return plain_loss(o, complete, x);
      };
      loss.w[t] = static_cast<double>((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h));
      x[t] = static_cast<Real>(logp[t]);
    }
    return loss;
  };
}

}  // namespace streambp::reference
