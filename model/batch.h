// A token batch with the extra data of the objectives.
#pragma once

#include <cmath>
#include <vector>

#include "model/stream.h"

namespace streambp {

// Per-token data of the objectives. Empty: not needed or not known yet.
struct Batch : TokenBatch {
  std::vector<double> reference = {};   // log-prob of the target under the reference model
  std::vector<double> old = {};         // log-prob of the target under the policy that sampled it
  std::vector<double> advantages = {};  // of the token's document
};

// Refuses a batch with fields of different lengths, or with values that are not finite.
inline void require_shape(const Batch& batch) {
  require_shape(static_cast<const TokenBatch&>(batch));
  const std::size_t n = batch.tokens.size();
  for (const auto& [what, numbers] : {std::pair{"reference log-probs", &batch.reference},
                                      {"old log-probs", &batch.old},
                                      {"advantages", &batch.advantages}}) {
    require(numbers->empty() || numbers->size() == n, "a batch has ", n, " tokens, but ", numbers->size(), " ", what);
    for (double x : *numbers) require(std::isfinite(x), "one of the ", what, " of a batch is ", x);
  }
}

// Refuses a batch that the model cannot read.
inline void validate(const Config& c, const Batch& batch) {
  require_shape(batch);
  validate(c, static_cast<const TokenBatch&>(batch));
}

// The documents of all batches in one.
inline Batch end_to_end(const std::vector<Batch>& batches) {
  Batch all;
  auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (const Batch& b : batches) {
    const auto begin = static_cast<std::int32_t>(all.size());
    append(all.tokens, b.tokens), append(all.targets, b.targets), append(all.positions, b.positions);
    append(all.reference, b.reference), append(all.old, b.old), append(all.advantages, b.advantages);
    for (const std::int32_t first : b.key_begin) all.key_begin.push_back(begin + first);
  }
  return all;
}

}  // namespace streambp
