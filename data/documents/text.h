// Plain text as training data: every byte is a token. The end of the text is held out for evaluation.
#pragma once

#include "data/files/hash.h"
#include "model/batch.h"

namespace streambp {

class Text {
 public:
  static constexpr Index kVocabulary = 256;

  Text(std::string text, double evaluation_fraction, Index length, const std::string& name) : text(std::move(text)) {
    const auto held_out = static_cast<std::size_t>(evaluation_fraction * static_cast<double>(this->text.size()));
    const std::string_view all = this->text;
    training = all.substr(0, all.size() - held_out);
    evaluation = all.substr(all.size() - held_out);
    const auto needed = static_cast<std::size_t>(length) + 1;
    require(training.size() >= needed, name, ": ", training.size(), " bytes to train on, but a document of --length ",
            length, " needs ", needed, "; use more text or a smaller --length");
    require(held_out == 0 || evaluation.size() >= needed, name, ": ", held_out,
            " bytes held out for evaluation, but a document of --length ", length, " needs ", needed,
            "; use more text, a smaller --length, or --eval-fraction 0");
  }
  Text(const Text&) = delete;

  bool holds_out() const { return !evaluation.empty(); }

  // Identifies the text, so that a run cannot be resumed on a different text.
  std::string fingerprint() const { return std::to_string(text_hash(text)); }

  // One micro-batch. It depends only on the seed, the step and the number of the micro-batch.
  Batch batch(std::uint64_t seed, Index step, Index micro_batch, Index documents, Index length) const {
    const Random random(seed, mix(static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(micro_batch));
    Batch batch;
    const std::size_t starts = training.size() - length;
    for (Index i = 0; i < documents; ++i)
      append(batch, training, random.below(starts, static_cast<std::uint64_t>(i)), length);
    return batch;
  }

  // Batch `index` of `count`. Their documents are spread evenly over the held-out text.
  Batch evaluation_batch(Index index, Index count, Index documents, Index length) const {
    Batch batch;
    const Index starts = std::ssize(evaluation) - length;
    for (Index i = 0; i < documents; ++i) {
      const Index offset = starts * (index * documents + i) / (count * documents);
      append(batch, evaluation, offset, length);
    }
    return batch;
  }

  // The first words of a paragraph of the held-out text, or of the training text if nothing is held out.
  std::string prompt() const {
    const std::string_view from = evaluation.empty() ? training : evaluation;
    return std::string(from.substr(paragraph_start(from, 0, from.size() - 1, from.size()), 40));
  }

 private:
  // The start of a paragraph, or else of a line, within `reach` bytes and not after `last`; or else `offset`.
  static std::size_t paragraph_start(std::string_view text, std::size_t offset, std::size_t last, std::size_t reach) {
    for (const std::string_view separator : {"\n\n", "\n"}) {
      const std::size_t found = text.substr(0, offset + reach).find(separator, offset);
      if (found != std::string_view::npos && found + separator.size() <= last) return found + separator.size();
    }
    return offset;
  }

  // Appends a document of `length` tokens that starts at or soon after `offset`.
  static void append(Batch& batch, std::string_view text, std::size_t offset, Index length) {
    const auto size = static_cast<std::size_t>(length);
    const std::size_t begin = paragraph_start(text, offset, text.size() - size - 1, size);
    const std::string_view bytes = text.substr(begin, size + 1);
    std::vector<std::int32_t> tokens;
    for (const char byte : bytes) tokens.push_back(static_cast<unsigned char>(byte));
    batch.append(tokens, {0, length});
  }

  std::string text;
  std::string_view training, evaluation;
};

}  // namespace streambp
