// Objectives. Each is a function of the log-probs of the target tokens, so the backward pass needs only one weight per
// token, w[t] = d loss / d logp[t].
//
//   SFT    loss = -Σ_t n[t] logp[t]                                  w[t] = -n[t]
//
//   DPO    documents come in pairs, chosen and rejected, with scores s and x = β (s_chosen - s_rejected)
//          loss = mean over pairs of f(x)                            w[t] = ± β f'(x) ds/dlogp[t] / pairs
//            sigmoid   s = Σ_t logp[t] - reference[t]                f = -(1-ε) log σ(x) - ε log σ(-x)
//            ipo       s = mean_t logp[t] - reference[t]             f = ((x - 1/2) / β)²
//            simpo     s = mean_t logp[t]                            f as sigmoid, of x - margin
//
//   GRPO   loss = Σ_t n[t] (-min(r A, clip(r, 1 - low, 1 + high) A) + kl (e^δ - δ - 1)),   as in kernels/token_weights.h
//          A: the advantage of the document over its group; r: the policy ratio e^(logp - old)
//
//   own    any differentiable function of the log-probs; the caller computes loss and w[t]
//
// n[t] turns the sum into a mean: over all targets of the optimizer step (1 / targets), over documents of their means
// (1 / documents / targets of the document), or over documents of a fixed length (1 / documents / length). It counts the
// whole step, so accumulating micro-batches is exact.
#pragma once

#include <functional>
#include <map>

#include "kernels/routing_counts.h"
#include "kernels/token_weights.h"
#include "model/batch.h"

namespace streambp {

enum class ObjectiveKind { sft, dpo, grpo, own };
enum class Mean { tokens, documents, length };
enum class Preference { sigmoid, ipo, simpo };

// A loss of your own: returns its value for a micro-batch, and writes d loss / d logp of every token to `weights`, which
// are zero before. `logps` has the log-prob of every token's target, and 0 where there is none.
using LossFunction =
    std::function<double(const Batch&, const std::vector<double>& logps, std::vector<double>& weights)>;

struct Objective {
  ObjectiveKind kind = ObjectiveKind::sft;
  Mean mean = Mean::tokens;
  Index length = 0;  // for Mean::length
  // DPO
  Preference preference = Preference::sigmoid;
  double beta = 0.1, label_smoothing = 0, margin = 0.5;
  // GRPO
  double clip_low = 0.2, clip_high = 0.2, kl = 0;
  bool scale_rewards = true;  // divide advantages by the standard deviation of their group
  double temperature = 1;     // logits are divided by it: of log-probs, and of tokens that are sampled

  // own
  LossFunction loss = {};

  // The weights of tokens depend on the log-probs of others, so they are computed between forward and backward.
  bool weighs_between() const { return kind == ObjectiveKind::dpo || kind == ObjectiveKind::own; }
  bool averages() const { return preference != Preference::sigmoid; }
  bool has_reference() const {
    return (kind == ObjectiveKind::dpo && preference != Preference::simpo) || (kind == ObjectiveKind::grpo && kl > 0);
  }
};

// The size of an optimizer step.
struct Counts {
  Index targets = 0, documents = 0;  // documents with at least one target
  Index batches = 0;

  Counts() = default;
  explicit Counts(const Batch& batch) : targets(batch.target_count()), batches(1) {
    require_shape(batch);
    for (Rows rows : batch.documents()) documents += batch.target_count(rows) > 0;
  }
  Counts& operator+=(const Counts& more) {
    targets += more.targets, documents += more.documents, batches += more.batches;
    return *this;
  }
};

// A batch's part of the step's loss, and its part of other means over the step.
struct Measures {
  double loss = 0;
  std::map<std::string, double> others = {};
  RoutingCounts routing = {};

  Measures& operator+=(const Measures& more) {
    loss += more.loss;
    for (const auto& [name, value] : more.others) others[name] += value;
    routing += more.routing;
    return *this;
  }
};

// Refuses a batch without the data that the objective needs.
inline void validate(const Objective& o, const Batch& batch) {
  require(o.kind != ObjectiveKind::own || o.loss, "the objective is your own loss, but it has none");
  if (o.kind == ObjectiveKind::sft || o.kind == ObjectiveKind::own) return;
  const std::vector<Rows> documents = batch.documents();
  for (std::size_t i = 0; i < documents.size(); ++i) {
    require(batch.target_count(documents[i]) > 0, "document ", i + 1, " of a batch has an empty completion");
  }
  require(o.kind != ObjectiveKind::dpo || documents.size() % 2 == 0,
          "documents come in pairs, chosen and rejected, but a batch has ", documents.size());
  require(o.kind != ObjectiveKind::grpo || !batch.advantages.empty(), "the advantages are missing");
  require(!o.has_reference() || !batch.reference.empty(), "the reference log-probs are missing");
}

template <class F>
void for_each_target(const Batch& batch, Rows rows, F&& f) {
  for (auto t = static_cast<std::size_t>(rows.begin); t < static_cast<std::size_t>(rows.end); ++t) {
    if (batch.targets[t] >= 0) f(t);
  }
}

// n[t] of every token.
inline std::vector<double> shares(const Objective& o, const Batch& batch, const Counts& step) {
  require(step.targets > 0, "no token of this step has a target");
  const auto documents = static_cast<double>(step.documents);
  std::vector<double> n(batch.targets.size());
  for (Rows rows : batch.documents()) {
    const double share = o.mean == Mean::tokens      ? 1 / static_cast<double>(step.targets)
                         : o.mean == Mean::documents ? 1 / documents / static_cast<double>(batch.target_count(rows))
                                                     : 1 / documents / static_cast<double>(o.length);
    for_each_target(batch, rows, [&](std::size_t t) { n[t] = share; });
  }
  return n;
}

// The pairs of a batch: returns their part of the step's loss, and writes the weights of their tokens to `w`. Rewards are
// defined as in TRL: β times the score (for ipo, the sum instead of the mean).
template <class A>
Measures measure_pairs(const Objective& o, const Batch& batch, const Counts& step, const std::vector<A>& logp,
                       std::vector<double>& w) {
  const std::vector<Rows> documents = batch.documents();
  const double pairs = static_cast<double>(step.documents) / 2;
  struct Side {
    Rows rows;
    double sum = 0, terms = 1;
    double score() const { return sum / terms; }
  };
  auto side = [&](Rows rows) {
    Side s{rows};
    if (o.averages()) s.terms = static_cast<double>(batch.target_count(rows));
    for_each_target(batch, rows, [&](std::size_t t) {
      s.sum += static_cast<double>(logp[t]) - (o.has_reference() ? batch.reference[t] : 0);
    });
    return s;
  };
  auto reward = [&](const Side& s) { return o.beta * (o.preference == Preference::ipo ? s.sum : s.score()); };
  Measures sum;
  w.assign(logp.size(), 0);
  for (std::size_t i = 0; i < documents.size(); i += 2) {
    const Side chosen = side(documents[i]), rejected = side(documents[i + 1]);
    double x = o.beta * (chosen.score() - rejected.score()), loss = 0, slope = 0;
    if (o.preference == Preference::ipo) {
      const double distance = (x - 0.5) / o.beta;
      loss = distance * distance;
      slope = 2 * distance / o.beta;
    } else {
      if (o.preference == Preference::simpo) x -= o.margin;
      loss = -(1 - o.label_smoothing) * log_sigmoid(x) - o.label_smoothing * log_sigmoid(-x);
      slope = o.label_smoothing * sigmoid(x) - (1 - o.label_smoothing) * sigmoid(-x);
    }
    const double dscore = o.beta * slope / pairs;
    for_each_target(batch, chosen.rows, [&](std::size_t t) { w[t] = dscore / chosen.terms; });
    for_each_target(batch, rejected.rows, [&](std::size_t t) { w[t] = -dscore / rejected.terms; });
    sum += {loss / pairs,
            {{"reward_chosen", reward(chosen) / pairs},
             {"reward_rejected", reward(rejected) / pairs},
             {"accuracy", ((reward(chosen) > reward(rejected)) + (reward(chosen) >= reward(rejected))) / 2.0 / pairs},
             {"margin", (reward(chosen) - reward(rejected)) / pairs}}};
  }
  return sum;
}

// The same for all objectives that weigh their tokens between forward and backward.
template <class A>
Measures measure_and_weigh(const Objective& o, const Batch& batch, const Counts& step, const std::vector<A>& logp,
                           std::vector<double>& w) {
  if (o.kind == ObjectiveKind::dpo) return measure_pairs(o, batch, step, logp, w);
  w.assign(logp.size(), 0);
  const double loss = o.loss(batch, {logp.begin(), logp.end()}, w);
  require(w.size() == logp.size(), "your loss has ", w.size(), " weights for ", logp.size(), " tokens");
  return {loss};
}

// A batch's part of the step's loss, from its log-probs, summed in order and in double.
template <class A>
Measures measure(const Objective& o, const Batch& batch, const Counts& step, const std::vector<A>& logp) {
  if (o.weighs_between()) {
    std::vector<double> w;
    return measure_and_weigh(o, batch, step, logp, w);
  }
  const std::vector<double> n = shares(o, batch, step);
  Measures sum;
  if (o.kind == ObjectiveKind::sft) {
    for (std::size_t t = 0; t < n.size(); ++t) sum.loss -= n[t] * static_cast<double>(logp[t]);
    return sum;
  }
  double kl = 0, clipped = 0;
  const auto targets = static_cast<double>(step.targets);
  for_each_target(batch, {0, batch.size()}, [&](std::size_t t) {
    const double now = static_cast<double>(logp[t]), ratio = batch.old.empty() ? 1 : exponential(now - batch.old[t]);
    const ClippedRatio<double> policy(ratio, batch.advantages[t], 1 - o.clip_low, 1 + o.clip_high);
    sum.loss += n[t] * policy.value;
    clipped += policy.clipped;
    if (o.kl > 0) {
      const double delta = batch.reference[t] - now, k3 = exponential_minus_one(delta) - delta;
      sum.loss += n[t] * o.kl * k3;
      kl += k3;
    }
  });
  sum.others = {{"clip_fraction", clipped / targets}};
  if (o.kl > 0) sum.others["kl"] = kl / targets;
  return sum;
}

}  // namespace streambp
