// Sampled completions as training batches.
#pragma once

#include "data/documents/advantages.h"
#include "generation/generate.h"
#include "model/document_layout.h"

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

// Packs rollouts in order into streams of at most so many rows: into at least this number of streams.
inline std::vector<Batch> batches_of(const std::vector<Rollout>& rollouts, Index rows, Index at_least = 1,
                                     const DocumentLayout& layout = {}) {
  require(static_cast<Index>(rollouts.size()) >= at_least, rollouts.size(), " completions are too few for ", at_least,
          " micro-batches");
  std::vector<std::span<const Rollout>> packs;
  Index size = rows;
  for (const Rollout& rollout : rollouts) {
    const auto length = static_cast<Index>(rollout.tokens.size()) - 1;
    require(length <= rows, "a completion with its prompt of ", length, " tokens does not fit into a stream of ", rows);
    size = layout.end(size, length);
    if (size > rows) {
      packs.emplace_back(&rollout, 0);
      size = length;
    }
    packs.back() = {packs.back().data(), packs.back().size() + 1};
  }
  const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  while (static_cast<Index>(packs.size()) < at_least) {  // split the one with the most rollouts
    const auto largest = std::max_element(packs.begin(), packs.end(), shorter);
    const std::size_t half = largest->size() / 2;
    const auto second = largest->subspan(half);
    *largest = largest->first(half);
    packs.insert(largest + 1, second);
  }
  std::vector<Batch> batches(packs.size());
  for (std::size_t i = 0; i < packs.size(); ++i)
    for (const Rollout& rollout : packs[i]) append(batches[i], rollout);
  return batches;
}

}  // namespace streambp
