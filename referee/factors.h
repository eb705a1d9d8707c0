// Factors of a whole gradient that have a meaning.
#pragma once

#include "referee/recorded_step.h"

namespace streambp {

// A factor of the whole gradient, and what it means.
struct Factor {
  double value;
  std::string meaning;
};

inline std::vector<Factor> factors_of(const RecordedStep& step) {
  const auto batches = static_cast<double>(step.batches.size()), ranks = static_cast<double>(step.files);
  double learned = 0, tokens = 0, padded = 0;
  for (const RecordedBatch& b : step.batches) {
    tokens += static_cast<double>(b.batch.size()), padded += static_cast<double>(b.padded_size);
    for (const double factor : b.batch.advantages) learned += factor;
  }
  std::vector<Factor> factors = {{-1, "it has the wrong sign"}};
  const auto add = [&](double value, const std::string& meaning) {
    if (value != 1) factors.push_back({value, meaning});
  };
  if (step.reduction == Reduction::mean) {
    const double outside = static_cast<double>(step.outside), labels = static_cast<double>(step.targets());
    add(learned, "it is the sum over the learned tokens, not their mean");
    add(learned / labels, "the loss is divided by the learned tokens, not by the sum of their weights");
    add(learned / tokens, "the loss is divided by all tokens instead of the learned ones");
    add(learned / padded, "the loss is divided by all positions, with padding, instead of the learned tokens");
    add(learned / (learned + outside), "labels of documents' first tokens are counted, but nothing predicts them");
    if (learned > 1) add(learned / (learned - 1), "the loss is divided by one learned token too few");
    add(learned / (learned + 1), "the loss is divided by one learned token too many");
  } else if (step.reduction == Reduction::sum) {
    add(1 / learned, "it is the mean over the learned tokens, not their sum");
  }
  const std::string of_batches = std::to_string(step.batches.size()) + " micro-batches",
                    of_ranks = std::to_string(step.files) + " ranks";
  if (batches != 2 && ranks != 2) add(2, "it is counted twice, or that of the step before was not cleared");
  add(batches, "it is not divided by the " + of_batches);
  add(1 / batches, "it is divided by the " + of_batches + " once too often");
  add(ranks, "it is summed over the " + of_ranks + ", not averaged");
  add(1 / ranks, "it is divided by the " + of_ranks + " once too often");
  for (int power = 8; power <= 24; ++power)
    add(std::ldexp(1, power), "a loss scale of " + std::to_string(1 << power) + " is left in it");
  return factors;
}

}  // namespace streambp
