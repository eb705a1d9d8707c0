// Plain text as training data: every byte is a token. The last part of the text is held out for evaluation.
#pragma once

#include <string>
#include <string_view>

#include "../model.cuh"

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
            length, " needs ", needed, "; give more text or a smaller --length");
    require(held_out == 0 || evaluation.size() >= needed, name, ": ", held_out,
            " bytes held out for evaluation, but a document of --length ", length, " needs ", needed,
            "; give more text, a smaller --length, or --eval-fraction 0");
  }
  Text(const Text&) = delete;

  // Documents for one micro-batch: which ones depends on the seed, the step and the micro-batch alone.
  Batch batch(std::uint64_t seed, Index step, Index micro_batch, Index documents, Index length) const {
    const Random random(seed, mix(static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(micro_batch));
    Batch batch;
    for (Index i = 0; i < documents; ++i) {
      const std::size_t last = training.size() - static_cast<std::size_t>(length) - 1;
      append(batch, training, line_start(random.below(last + 1, static_cast<std::uint64_t>(i)), last), length);
    }
    return batch;
  }

  // Documents spread evenly over the held-out text; empty if nothing is held out.
  Batch evaluation_batch(Index documents, Index length) const {
    Batch batch;
    if (evaluation.empty()) return batch;
    const std::size_t last = evaluation.size() - static_cast<std::size_t>(length) - 1;
    for (Index i = 0; i < documents; ++i) {
      append(batch, evaluation, last * static_cast<std::size_t>(i) / static_cast<std::size_t>(documents), length);
    }
    return batch;
  }

  // The beginning of a line of the held-out text (or of the training text, if nothing is held out).
  std::string prompt() const {
    const std::string_view from = evaluation.empty() ? training : evaluation;
    const std::size_t newline = from.find('\n');
    const std::size_t begin = newline == std::string_view::npos ? 0 : from.find_first_not_of('\n', newline);
    return std::string(begin == std::string_view::npos ? from.substr(0, 40) : from.substr(begin, 40));
  }

 private:
  // Documents start where lines do, if one starts soon enough.
  std::size_t line_start(std::size_t offset, std::size_t last) const {
    const std::size_t newline = training.find('\n', offset);
    return newline != std::string_view::npos && newline + 1 <= last ? newline + 1 : offset;
  }

  static void append(Batch& batch, std::string_view text, std::size_t begin, Index length) {
    std::vector<std::int32_t> tokens;
    for (Index i = 0; i <= length; ++i)
      tokens.push_back(static_cast<unsigned char>(text[begin + static_cast<std::size_t>(i)]));
    const std::int32_t last_target = tokens.back();
    tokens.pop_back();
    batch.append(tokens, last_target);
  }

  std::string text;
  std::string_view training, evaluation;
};

}  // namespace streambp
