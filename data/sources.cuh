// What a run learns from, as the training loop sees it: micro-batches, and some that are held out. Either bytes of a text,
// or documents of tokens, packed.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "packing.cuh"
#include "text.cuh"

namespace streambp {

struct Source {
  std::string description, fingerprint;
  std::function<Batch(Index step, Index micro_batch)> batch;
  std::vector<Batch> evaluation;
};

constexpr Index kEvaluationBatches = 8;

// Documents of `length` bytes, `documents` of them in a micro-batch.
inline Source text_source(std::shared_ptr<const Text> text, const std::string& name, std::uint64_t seed,
                          Index documents, Index length) {
  Source source{name, text->fingerprint(), {}, {}};
  source.batch = [=](Index step, Index i) { return text->batch(seed, step, i, documents, length); };
  for (Index i = 0; i < kEvaluationBatches && text->holds_out(); ++i) {
    source.evaluation.push_back(text->evaluation_batch(i, kEvaluationBatches, documents, length));
  }
  return source;
}

struct DocumentSettings {
  double evaluation_fraction;
  Index length;   // tokens in a pack
  Index longest;  // tokens in a piece of a document
  Index packs, micro_batches;
  std::uint64_t seed;
  TooLong too_long;
};

class Documents {
 public:
  Documents(TokenFile file, const DocumentSettings& s) : file(std::move(file)), s(s) {
    const auto pieces = pieces_with_targets();
    left_out = this->file.documents();
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      left_out -= i == 0 || pieces[i].document != pieces[i - 1].document;
    }
    auto held_out = [&](const PackedPiece& piece) {
      return Random(s.seed, 0xe7a1).uniform(static_cast<std::uint64_t>(piece.document)) < s.evaluation_fraction;
    };
    std::vector<PackedPiece> training, evaluation;
    for (const PackedPiece& piece : pieces) (held_out(piece) ? evaluation : training).push_back(piece);
    if (training.empty()) std::swap(training, evaluation);
    packing.emplace(training, s.length, s.seed);
    if (!evaluation.empty()) evaluate(Packing(evaluation, s.length, s.seed));
  }

  Index steps_per_epoch() const { return ceil_div(packing->size(), s.packs * s.micro_batches); }

  // Steps count from one. A step takes the packs after those of the step before it.
  Batch batch(Index step, Index micro_batch) {
    const Index first = ((step - 1) * s.micro_batches + micro_batch) * s.packs;
    Batch batch;
    for (Index n = first; n < first + s.packs; ++n) append(batch, file, packing->pack(n));
    return batch;
  }

  std::vector<Batch> evaluation;
  Index left_out;  // documents without anything to learn, after cutting

 private:
  std::vector<PackedPiece> pieces_with_targets() const {
    std::vector<PackedPiece> pieces = cut(file.lengths(), s.longest, s.too_long);
    std::erase_if(pieces, [&](const PackedPiece& piece) {
      const auto learn = file.learn(piece.document);
      const auto end = std::min<Index>(piece.begin + piece.length + 1, file.length(piece.document));
      return std::none_of(learn.begin() + piece.begin + 1, learn.begin() + std::max(end, piece.begin + 1),
                          [](std::uint8_t mark) { return mark; });
    });
    require(!pieces.empty(), "there is nothing to learn: no document has a token to be predicted within --length");
    return pieces;
  }

  void evaluate(Packing packs) {
    for (Index n = 0; n < std::min(packs.size(), kEvaluationBatches * s.packs); ++n) {
      if (n % s.packs == 0) evaluation.emplace_back();
      append(evaluation.back(), file, packs.pack(n));
    }
  }

  TokenFile file;
  DocumentSettings s;
  std::optional<Packing> packing;
};

inline Source document_source(std::shared_ptr<Documents> documents, const std::string& description,
                              const std::string& fingerprint) {
  return {description, fingerprint, [=](Index step, Index i) { return documents->batch(step, i); },
          documents->evaluation};
}

}  // namespace streambp
