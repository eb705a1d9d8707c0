// The weight of each token: w[t] = d loss / d logp[t]. The backward pass needs nothing else from an objective.
//
// A weight is either fixed before the forward pass, or a function of the token's own log-prob. The second kind is the
// derivative of the clipped objective of PPO and GRPO, with a KL penalty against the reference model:
//
//   l(logp) = -min(r a, clip(r, lowest, highest) a) + k (e^δ - δ - 1),     r = e^(logp - old),  δ = reference - logp
//   l'      = -r a, or 0 where clipped  +  k (1 - e^δ)
//
// So one pass over the logits gives both the log-probs and their gradient.
#pragma once

#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"

namespace streambp {

// -min(r a, clip(r, lowest, highest) a) for the policy ratio r and the advantage a.
template <class A>
struct ClippedRatio {
  A value;
  A slope;  // d value / d logp
  bool clipped;

  constexpr ClippedRatio(A ratio, A advantage, A lowest, A highest) : value(-ratio * advantage), slope(value) {
    clipped = advantage > 0 ? ratio > highest : advantage < 0 && ratio < lowest;
    if (!clipped) return;
    value = -(advantage > 0 ? highest : lowest) * advantage;
    slope = 0;
  }
};

// The weights of a chunk's tokens. Each matrix is 1 x rows, or empty: without `old`, the current policy sampled the
// tokens (r = 1); without `kl`, k = 0.
template <class A>
struct TokenWeights {
  Matrix<const A> fixed = {}, advantage = {}, old = {}, kl = {}, reference = {};
  A lowest = 1, highest = 1;  // bounds of the ratio

  constexpr explicit operator bool() const { return fixed || advantage; }
  constexpr A operator()(Index t, A logp) const {
    if (fixed) return fixed(0, t);
    const A ratio = old ? exponential(logp - old(0, t)) : A(1);
    const A slope = ClippedRatio<A>(ratio, advantage(0, t), lowest, highest).slope;
    return kl ? slope - kl(0, t) * exponential_minus_one(reference(0, t) - logp) : slope;
  }
  TokenWeights columns(Rows rows) const {
    auto part = [&](Matrix<const A> m) { return m ? m.columns(rows.begin, rows.size()) : m; };
    return {part(fixed), part(advantage), part(old), part(kl), part(reference), lowest, highest};
  }
};

template <class A>
void require_shape(const TokenWeights<A>& w, Index rows) {
  const Matrix<const A> vectors[] = {w.fixed, w.advantage, w.old, w.kl, w.reference};
  for (const auto& m : vectors) {
    if (m) require_shape("head", "token weights", m, 1, rows);
  }
}

}  // namespace streambp
