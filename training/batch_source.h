// Where the batches of a run come from: its data, or completions that the model samples (training/grpo/online_grpo.h).
#pragma once

#include "data/documents/sources.h"
#include "data/files/mapped_file.h"
#include "training/engine.h"

namespace streambp {

// What held-out data says.
struct Evaluation {
  // The mean loss in each half of the documents: a model that uses its context predicts better late in them than early.
  struct Halves {
    double first, second;
  };
  Measures measures = {};
  std::optional<Halves> halves = {};  // if both have targets
  std::optional<double> reward = {};  // of on-line GRPO, the mean, and nothing else
  bool empty = true;                  // nothing is held out
};

// All ranks call each function together.
class BatchSource {
 public:
  // The model in training, and its steps.
  struct Trainee {
    Engine& engine;
    const StepSettings& settings;
    const Schedule& schedule;
    Index rows;  // of a micro-batch's stream
  };

  virtual ~BatchSource() = default;

  // The micro-batches of a step.
  virtual const std::vector<Batch>& batches(const Trainee&, Index step) = 0;
  // Gets their log-probs during the step.
  virtual Engine::OnLogps on_logps() { return {}; }
  // After the step, before the new weights may be saved.
  virtual void learned(Index /*step*/, Measures&) {}

  virtual Evaluation evaluate(const Trainee&) = 0;
  // Whether evaluations must come before checkpoints. Otherwise they come after them, so that a kill loses nothing.
  virtual bool evaluates_first() const { return false; }

  // Before the last checkpoint. May wait for so many seconds.
  virtual void finish(double /*seconds*/) {}
  // Before a checkpoint that an error makes the last one: throws if the weights are not worth saving.
  virtual void finish_after_error(const Trainee&) = 0;
};

// The batches of texts and documents.
class DataBatches : public BatchSource {
 public:
  DataBatches(const Source& source, const Documents* documents, Index micro_batches)
      : source_(source), documents_(documents), micro_batches_(micro_batches) {}

  const std::vector<Batch>& batches(const Trainee& t, Index step) override {
    std::vector<Batch> batches;
    on_each_rank([&] { batches = read(t.settings, step); });
    return batches_ = std::move(batches);
  }

  Evaluation evaluate(const Trainee& t) override {
    Counts all;
    for (const Batch& batch : source_.evaluation) all += Counts(batch);
    if (all.targets == 0) return {};
    Evaluation result{.empty = false};
    double losses[2] = {0, 0}, counts[2] = {0, 0};
    const std::vector<std::vector<double>> logps = t.engine.evaluate(source_.evaluation, t.schedule);
    for (std::size_t i = 0; i < logps.size(); ++i) {
      const Batch& batch = source_.evaluation[i];
      result.measures += measure(t.settings.objective, batch, all, logps[i]);
      const std::vector<std::int32_t> lengths = batch.document_lengths();
      for_each_target(batch, {0, batch.size()}, [&](std::size_t row) {
        const int half = 2 * batch.positions[row] >= lengths[row];
        losses[half] -= logps[i][row];
        ++counts[half];
      });
    }
    if (counts[0] > 0 && counts[1] > 0) result.halves = {losses[0] / counts[0], losses[1] / counts[1]};
    return result;
  }

  void finish_after_error(const Trainee& t) override {
    const auto logps = t.engine.evaluate({batches_.front()}, t.schedule);
    const bool finite = std::ranges::all_of(logps.front(), [](double logp) { return std::isfinite(logp); });
    require(largest_of_ranks(!finite) == 0, "its weights give no finite loss");
  }

 private:
  std::vector<Batch> read(const StepSettings& settings, Index step) const {
    std::vector<Batch> batches;
    for (Index i = 0; i < micro_batches_; ++i) batches.push_back(source_.batch(step, i));
    if (documents_) documents_->file.require_unchanged(source_.fingerprint);
    MappedFile::require_intact();
    try {
      for (const Batch& batch : batches) {
        validate(settings.config, batch);
        validate(settings.objective, batch);
      }
    } catch (const Error& error) {  // the data was good when the run began
      fail(documents_ ? documents_->file.path() : source_.description, ": was changed during the run: ", error.what(),
           "; restore it");
    }
    return batches;
  }

  const Source& source_;
  const Documents* const documents_;
  const Index micro_batches_;
  std::vector<Batch> batches_;  // of the last step
};

}  // namespace streambp
