// Sampled completions as training batches.
#pragma once

#include "data/documents/advantages.cuh"
#include "model/generate.cuh"

namespace streambp {

// A prompt and its completion.
struct Rollout {
  Tokens tokens;
  Index begin;  // where the completion begins
  double advantage;
};

// A rollout as a document. The loss covers the completion only; its last token is only a target.
inline void append(Batch& batch, const Rollout& rollout) {
  std::vector<std::uint8_t> learned(rollout.tokens.size(), 1);
  std::fill_n(learned.begin(), rollout.begin, 0);
  batch.append(rollout.tokens, {0, static_cast<Index>(rollout.tokens.size()) - 1}, learned);
  batch.advantages.resize(batch.targets.size(), rollout.advantage);
}

// Packs rollouts in order into streams of at most `rows` tokens.
inline std::vector<Batch> batches_of(const std::vector<Rollout>& rollouts, Index rows) {
  std::vector<Batch> batches;
  for (const Rollout& rollout : rollouts) {
    const auto length = static_cast<Index>(rollout.tokens.size()) - 1;
    require(length <= rows, "a completion with its prompt of ", length, " tokens does not fit into a stream of ", rows);
    if (batches.empty() || batches.back().size() + length > rows) batches.emplace_back();
    append(batches.back(), rollout);
  }
  return batches;
}

}  // namespace streambp
