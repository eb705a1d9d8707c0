// What is minimised. Every objective is a function of the log-probabilities of the target tokens, so all that the walk
// needs to know of it is a weight per token, w[t] = d loss / d logp[t].
//
//   SFT          loss = -(1/n) Σ_t logp[t]          w[t] = -1/n where token t has a target
//
// n counts the targets of the whole optimizer step, so that accumulating over micro-batches is exact.
#pragma once

#include "stream.cuh"

namespace streambp {

inline std::vector<double> sft_weights(const Batch& batch, Index targets_of_step) {
  require(targets_of_step > 0, "there is nothing to learn: no token of this step has a target");
  std::vector<double> w;
  for (std::int32_t target : batch.targets) w.push_back(target < 0 ? 0.0 : -1.0 / static_cast<double>(targets_of_step));
  return w;
}

// Σ_t w[t] logp[t], in order and in double: the loss where it is linear in the log-probabilities, as in SFT.
template <class A>
double weighted_sum(const std::vector<double>& w, const std::vector<A>& logp) {
  double sum = 0;
  for (std::size_t t = 0; t < w.size(); ++t) sum += w[t] * static_cast<double>(logp[t]);
  return sum;
}

}  // namespace streambp
