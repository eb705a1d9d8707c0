// The held-out loss, and for SFT the loss in each half of the documents: a model that uses its context predicts better
// late in a document than early.
#pragma once

#include <cmath>
#include <optional>

#include "training/engine.h"

namespace streambp {

struct Evaluation {
  struct Halves {
    double first, second;
  };
  Measures measures;
  std::optional<Halves> halves;  // the mean loss in each half of the documents, if both have targets
  bool empty = true;             // nothing is held out
};

inline Evaluation evaluate(Engine& engine, const Objective& objective, const std::vector<Batch>& batches,
                           const Schedule& schedule) {
  Counts all;
  for (const Batch& batch : batches) all += Counts(batch);
  Evaluation result;
  if (all.targets == 0) return result;
  result.empty = false;
  double losses[2] = {0, 0};
  Index counts[2] = {0, 0};
  const std::vector<std::vector<double>> logps = engine.evaluate(batches, schedule);
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const Batch& batch = batches[i];
    const std::vector<double>& logp = logps[i];
    result.measures += measure(objective, batch, all, logp);
    const std::vector<std::int32_t> lengths = batch.document_lengths();
    for (std::size_t t = 0; t < logp.size(); ++t) {
      if (batch.targets[t] < 0) continue;
      const int half = 2 * batch.positions[t] >= lengths[t];
      losses[half] -= logp[t];
      ++counts[half];
    }
  }
  if (counts[0] > 0 && counts[1] > 0) {
    result.halves =
        Evaluation::Halves{losses[0] / static_cast<double>(counts[0]), losses[1] / static_cast<double>(counts[1])};
  }
  return result;
}

}  // namespace streambp
