// GRPO's groups: completions that the model sampled for a prompt, and the batches that they make.
#pragma once

#include "model/generate.cuh"
#include "training/grpo/advantages.cuh"

namespace streambp {

// A prompt and what followed it.
struct Rollout {
  Tokens tokens;
  Index begin;  // of the completion
  double advantage;
};

// A document whose completion is learned. Its last token is a target only.
inline void append(Batch& batch, const Rollout& rollout) {
  std::vector<std::uint8_t> learned(rollout.tokens.size(), 1);
  std::fill_n(learned.begin(), rollout.begin, 0);
  batch.append(rollout.tokens, {0, static_cast<Index>(rollout.tokens.size()) - 1}, learned);
  batch.advantages.resize(batch.targets.size(), rollout.advantage);
}

// All of them in streams of at most `rows` tokens, in their order.
inline std::vector<Batch> batches_of(const std::vector<Rollout>& rollouts, Index rows) {
  std::vector<Batch> batches;
  for (const Rollout& rollout : rollouts) {
    const auto length = static_cast<Index>(rollout.tokens.size()) - 1;
    require(length <= rows, "a completion with its prompt of ", length, " tokens does not fit a stream of ", rows);
    if (batches.empty() || batches.back().size() + length > rows) batches.emplace_back();
    append(batches.back(), rollout);
  }
  return batches;
}

// Keeps a model's weights in a file without a name while the device holds others in their place.
template <class Device, class T>
class PutAside {
 public:
  PutAside(Device& dev, Model<T>& model) : dev_(dev), model_(model), file_(std::tmpfile()) {
    require(file_ != nullptr, "cannot make a temporary file for the weights: ", std::strerror(errno),
            "; set TMPDIR to a directory with room");
    for (auto& e : table(model_.config, model_.weights)) {
      const std::vector<T> numbers = to_host(dev_, *e.matrix);
      require(std::fwrite(numbers.data(), sizeof(T), numbers.size(), file_) == numbers.size(),
              "cannot write the weights to a temporary file: ", std::strerror(errno));
    }
  }
  // Brings them back.
  void restore() {
    std::rewind(file_);
    for (auto& e : table(model_.config, model_.weights)) {
      std::vector<T> numbers(static_cast<std::size_t>(e.matrix->size()));
      require(std::fread(numbers.data(), sizeof(T), numbers.size(), file_) == numbers.size(),
              "cannot read the weights back from their temporary file: ", std::strerror(errno));
      dev_.upload(*e.matrix, numbers.data());
    }
  }
  ~PutAside() {
    if (file_) std::fclose(file_);
  }
  PutAside(const PutAside&) = delete;

 private:
  Device& dev_;
  Model<T>& model_;
  FILE* file_;
};

}  // namespace streambp
