// The oracle for objectives: each loss is its formula and nothing else, computed with dual numbers. They carry the
// derivative along, so no hand-derived gradient is shared with the program.
#pragma once

#include "referee/oracle.h"
#include "training/objectives.h"

namespace streambp::oracle {

// A number and its derivative with respect to one log-probability.
struct Real {
  double value = 0, slope = 0;
  Real(double value = 0, double slope = 0) : value(value), slope(slope) {}
};
inline Real operator+(Real a, Real b) { return {a.value + b.value, a.slope + b.slope}; }
inline Real operator-(Real a, Real b) { return {a.value - b.value, a.slope - b.slope}; }
inline Real operator-(Real a) { return {-a.value, -a.slope}; }
inline Real operator*(Real a, Real b) { return {a.value * b.value, a.slope * b.value + a.value * b.slope}; }
inline Real operator/(Real a, Real b) {
  return {a.value / b.value, (a.slope * b.value - a.value * b.slope) / (b.value * b.value)};
}
inline Real exp(Real a) { return {std::exp(a.value), std::exp(a.value) * a.slope}; }
inline Real log(Real a) { return {std::log(a.value), a.slope / a.value}; }
inline bool operator<(Real a, Real b) { return a.value < b.value; }

// The mean of a per-token cost: over all targets; over documents, of each document's mean; or over documents, of each
// document's sum divided by a fixed length.
inline Real mean_of(const Objective& o, const Batch& batch, const std::function<Real(std::size_t)>& cost) {
  Real total;
  double targets = 0, documents = 0;
  for (Rows rows : batch.documents()) {
    Real sum;
    double count = 0;
    for (Index t = rows.begin; t < rows.end; ++t) {
      if (batch.targets[static_cast<std::size_t>(t)] < 0) continue;
      sum = sum + cost(static_cast<std::size_t>(t));
      count += 1;
    }
    if (count == 0) continue;
    if (o.mean == Mean::documents) sum = sum / count;
    if (o.mean == Mean::length) sum = sum / static_cast<double>(o.length);
    total = total + sum;
    targets += count;
    documents += 1;
  }
  return total / (o.mean == Mean::tokens ? targets : documents);
}

inline Real pairs_loss(const Objective& o, const Batch& batch, const std::vector<Real>& logp) {
  const std::vector<Rows> documents = batch.documents();
  const auto score = [&](Rows rows) {
    Real sum;
    double count = 0;
    for (auto t = static_cast<std::size_t>(rows.begin); t < static_cast<std::size_t>(rows.end); ++t) {
      if (batch.targets[t] < 0) continue;
      sum = sum + logp[t];
      if (o.preference != Preference::simpo) sum = sum - batch.reference[t];
      count += 1;
    }
    return o.preference == Preference::sigmoid ? sum : sum / count;
  };
  const Real beta = o.beta, smoothing = o.label_smoothing, one = 1;
  Real total;
  for (std::size_t i = 0; i < documents.size(); i += 2) {
    const Real h = score(documents[i]) - score(documents[i + 1]);
    if (o.preference == Preference::ipo) {
      const Real distance = h - one / (2 * beta);
      total = total + distance * distance;
    } else {
      const Real x = beta * h - (o.preference == Preference::simpo ? o.margin : 0.0);
      total = total + (one - smoothing) * log(one + exp(-x)) + smoothing * log(one + exp(x));
    }
  }
  return total / static_cast<double>(documents.size() / 2);
}

inline Real plain_loss(const Objective& o, const Batch& batch, const std::vector<Real>& logp) {
  if (o.kind == ObjectiveKind::dpo) return pairs_loss(o, batch, logp);
  return mean_of(o, batch, [&](std::size_t t) -> Real {
    if (o.kind == ObjectiveKind::sft) return -logp[t];
    const Real low = 1 - o.clip_low, high = 1 + o.clip_high, ratio = exp(logp[t] - batch.old[t]);
    const Real clipped = ratio < low ? low : high < ratio ? high : ratio;
    Real cost = -std::min(ratio * batch.advantages[t], clipped * batch.advantages[t]);
    if (o.kl > 0) {
      const Real delta = Real(batch.reference[t]) - logp[t];
      cost = cost + o.kl * (exp(delta) - delta - 1);
    }
    return cost;
  });
}

// Without an old policy, the current one is used, as a constant.
inline LossOf loss_of(const Objective& o, const Batch& batch) {
  return [=](const std::vector<double>& logp) {
    Batch complete = batch;
    if (complete.old.empty()) complete.old = logp;
    std::vector<Real> x(logp.begin(), logp.end());
    Loss loss{plain_loss(o, complete, x).value, std::vector<double>(logp.size())};
    for (std::size_t t = 0; t < x.size(); ++t) {
      x[t].slope = 1;
      if (batch.targets[t] >= 0) loss.w[t] = plain_loss(o, complete, x).slope;
      x[t].slope = 0;
    }
    return loss;
  };
}

}  // namespace streambp::oracle
