// A batch of random tokens for verification.
#pragma once

#include "kernels/base/random.h"
#include "model/config.h"
#include "referee/recorded_step.h"

namespace streambp {

// Where document i of `documents` ends. Later documents are longer (ends are a quadratic function), unless positions
// limit them. Each has two tokens or more.
inline Index end_of_document(const Config& c, Index i, Index documents, Index length, Index begin) {
  const double fraction = static_cast<double>(i + 1) / static_cast<double>(documents);
  const double quadratic = 0.5 * fraction + 0.5 * fraction * fraction;
  Index end = i + 1 == documents ? length : static_cast<Index>(static_cast<double>(length) * quadratic);
  if (c.positions == Positions::learned) end = length * (i + 1) / documents;
  return std::clamp(end, begin + 2, length - 2 * (documents - 1 - i));
}

// Documents of unequal length, `length` tokens in all. The first eighth of each has no targets, like a prompt.
inline Batch random_documents(const Config& c, Index documents, Index length, std::uint64_t seed) {
  const Random random(seed, 77);
  Batch result;
  std::uint64_t drawn = 0;
  auto token = [&] { return static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(c.vocab), drawn++)); };
  Index begin = 0;
  for (Index i = 0; i < documents; ++i) {
    const Index end = end_of_document(c, i, documents, length, begin);
    std::vector<std::int32_t> document;
    for (Index t = begin; t < end; ++t) document.push_back(token());
    result.append(document, token());
    for (Index t = begin; t < begin + (end - begin) / 8; ++t) result.targets[static_cast<std::size_t>(t)] = -1;
    begin = end;
  }
  return result;
}

// A step of two ranks with two micro-batches each, as another trainer could record it: rows of one or two documents.
inline RecordedStep random_step(const Config& c, std::uint64_t seed) {
  RecordedStep step;
  for (const Index length : {300, 500, 400, 700}) {
    RecordedBatch b;
    b.batch = random_documents(c, 3, length, seed++);
    b.file = step.batches.size() / 2, b.padded_size = 2 * length;
    const std::vector<Rows> documents = b.batch.documents();
    for (Index t = 0; t < length; ++t) {
      const bool second = t >= documents[2].begin;
      b.rows.push_back(second), b.columns.push_back(static_cast<std::int32_t>(t - (second ? documents[2].begin : 0)));
    }
    for (const Rows& rows : documents) b.batch.targets[static_cast<std::size_t>(rows.end) - 1] = -1;
    for (const std::int32_t target : b.batch.targets) b.batch.advantages.push_back(target >= 0);
    step.batches.push_back(std::move(b));
  }
  step.files = 2, step.bounds = "rows of one or two documents";
  return step;
}

}  // namespace streambp
