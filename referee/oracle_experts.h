// The oracle's mixtures of experts: every expert computes all rows, and those that a row does not choose have weight 0.
#pragma once

#include <numeric>
#include <vector>

#include "model/config.h"
#include "referee/oracle_delta_rule.h"

namespace streambp::oracle {

// 1 where a row chooses an expert: those with the highest scores, of equal ones the first. Scores are logits, or of a sigmoid
// the probability and a bias.
inline Array choice(Tape& tape, const MixtureShape& m, Array logits, Array bias) {
  const Array chosen = tape.zeros(logits.rows, logits.cols);
  for (Index t = 0; t < logits.rows; ++t) {
    std::vector<Index> order(static_cast<std::size_t>(logits.cols));
    std::iota(order.begin(), order.end(), 0);
    const auto score = [&](Index e) {
      const double x = logits(t, e).value;
      return m.style.kind == RouterKind::softmax ? x : sigmoid(x) + (bias.rows ? bias(0, e).value : 0);
    };
    std::ranges::stable_sort(order, std::greater<>(), score);
    for (Index j = 0; j < m.chosen; ++j) chosen(t, order[static_cast<std::size_t>(j)]).value = 1;
  }
  return chosen;
}

// The weights of all experts: N x experts.
inline Array expert_weights(Tape& tape, const MixtureShape& m, Array logits, Array bias) {
  const bool softmax = m.style.kind == RouterKind::softmax;
  Array p = softmax ? exponential(tape, logits) : sigmoid(tape, logits);
  if (tape.wrong.bias_weighs) p = add(tape, p, repeat(bias, p.rows));
  const Array chosen = multiply(tape, p, choice(tape, m, logits, bias));
  Array weights = chosen;
  if (softmax || m.style.renormalised) {
    const double eps = m.style.renormalised ? m.style.eps : 0;
    const Array sum = product(tape, m.style.renormalised ? chosen : p, tape.constant(p.cols, 1, 1));
    const Array inverse = map(
        tape, sum, [=](double s) { return 1 / (s + eps); }, [=](double s) { return -1 / ((s + eps) * (s + eps)); });
    weights = multiply(tape, chosen, {inverse.data, p.rows, p.cols, 1, 0});
  }
  return multiply(tape, weights, tape.constant(p.rows, p.cols, m.style.scale));
}

// E Σ_e F_e P_e: F_e rows of all layers that choose expert e, P_e the sum of its probabilities, divided by all rows.
inline Array balance_loss(Tape& tape, Index experts) {
  double rows = 0;
  for (const auto& [logits, chosen] : tape.routers) rows += static_cast<double>(logits.rows);
  const Array factors = tape.zeros(experts, 1);
  for (const auto& [logits, chosen] : tape.routers)
    for (Index t = 0; t < chosen.rows; ++t)
      for (Index e = 0; e < experts; ++e)
        factors(e, 0).value += chosen(t, e).value * static_cast<double>(experts) / (rows * rows);
  Array loss = tape.zeros(1, 1);
  for (const auto& [logits, chosen] : tape.routers) {
    const Array p = expert_weights(tape, {experts, experts, 0, {}}, logits, {});
    loss = add(tape, loss, product(tape, tape.constant(1, p.rows, 1), product(tape, p, factors)));
  }
  return loss;
}

// Σ_e weight_e expert(e). A wrong rank also computes its last expert where a row chooses other ranks' experts. Its weight is
// then 0, but not the gradient of that weight.
template <class Expert>
Array mixture(Tape& tape, const MixtureShape& m, Array x, Array logits, Array bias, Expert&& expert) {
  const Array weights = expert_weights(tape, m, logits, bias);
  const Index of_rank = m.experts / tape.wrong.expert_ranks;
  Array sum = tape.zeros(x.rows, x.cols);
  const auto add_times = [&](Array y, Array weight) {
    sum = add(tape, sum, multiply(tape, y, {weight.data, x.rows, x.cols, weight.row_stride, 0}));
  };
  for (Index e = 0; e < m.experts; ++e) {
    const Array y = expert(e);
    add_times(y, columns(weights, e, 1));
    if (tape.wrong.expert_ranks == 1 || (e + 1) % of_rank != 0) continue;
    const Array others = tape.zeros(m.experts, 1);
    for (Index o = 0; o < m.experts; ++o) others(o, 0).value = o / of_rank != e / of_rank;
    const auto zero = [](double) { return 0.0; };
    add_times(y, map(tape, product(tape, weights, others), zero, [](double) { return 1.0; }));
  }
  return sum;
}

}  // namespace streambp::oracle
