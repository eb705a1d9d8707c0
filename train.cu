// A training run: { batch, gradient, update, report, save, evaluate } until the last step.
//
// `streambp train` (commands/train_command.cpp) parses options and prepares the run before, and shows a sample after it.
// The parts of the loop: training/batch_source.h (batches), training/engine.h (the model on its device, which computes the
// gradient as streambp.cuh says), training/train.h (the run and its Observer), training/begin_run.cpp (its beginning).
#include "training/train.h"

namespace streambp {

namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Training {
 public:
  Training(Engine& engine, Run& run, RunDirectory& directory, Observer& observer)
      : engine_(engine), run_(run), directory_(directory), observer_(observer) {}

  Ended run() {
    first_ = begin_run(engine_, run_, directory_, observer_);
    if (first_ == 0) evaluate(0);
    observer_.steps_begin();
    timer_.emplace(run_.checkpoint_interval, seconds(), run_.checkpoint_bytes);

    const Index last = run_.last_step();
    if (first_ < last && stops_after(first_)) return {first_, interrupted()};
    for (Index step = first_ + 1; step <= last; ++step) {
      const std::vector<Batch>& batches = batches_of(step);
      const StepResult result = gradient_and_update(step, batches);
      report(step, batches, result);

      const bool at_end = step == last, interrupted = run_.can_resume_after(step) && this->interrupted(),
                 due = is_due(step), evaluated = !interrupted && (at_end || is_evaluated(step));
      if (evaluated && source_.evaluates_first()) evaluate(step);
      if (at_end || interrupted) finish(step, interrupted ? ShellProgram::kMoment : INFINITY);
      if (at_end || interrupted || due)
        save(step, at_end || (due && !timer_->by_time()) ? Keep::always : Keep::newest_two);
      if (evaluated && !source_.evaluates_first()) evaluate(step);
      if (evaluated) keep_best(step);
      if (interrupted) return {step, true};
      if (is_evaluated(step) && !at_end && stops_after(step)) return end_early(step);
    }
    return {std::max(first_, last), interrupted()};  // a signal may have come during the last evaluation or checkpoint
  }

 private:
  using Keep = RunDirectory::Keep;

  // --- A step ---

  const std::vector<Batch>& batches_of(Index step) {
    begun_ = seconds();
    engine_.device().reset_work();
    return rescued(step - 1, [&]() -> const std::vector<Batch>& { return source_.batches(trainee_, step); });
  }

  StepResult gradient_and_update(Index step, const std::vector<Batch>& batches) {
    struct Announced {
      Observer& observer;
      ~Announced() { observer.step_ends(); }
    };
    StepResult result = rescued(step - 1, [&] {
      const Announced announced{observer_};
      observer_.step_begins(step, batches, engine_.device());
      return engine_.step(batches, run_.schedule, run_.optimizer, step, source_.on_logps());
    });
    rescued(step, [&] { source_.learned(step, result.measures); });
    engine_.synchronize();
    return result;
  }

  void report(Index step, const std::vector<Batch>& batches, const StepResult& result) {
    rescued(step, [&] {
      on_each_rank([&] {
        observer_.step({step, batches, result, engine_.device(), seconds() - begun_});
        const std::vector<std::string> warnings = engine_.warnings();
        for (; warned_ < warnings.size(); ++warned_) observer_.note(warnings[warned_]);
      });
    });
  }

  // --- What follows it: all ranks agree, also on rank 0's clock and on what it has read of an earlier run ---

  static bool on_first(bool yes) { return largest_of_ranks(this_process().rank == 0 && yes) > 0; }
  bool interrupted() const { return largest_of_ranks(observer_.interrupted()) > 0; }
  bool is_evaluated(Index step) const { return run_.evaluation_interval > 0 && step % run_.evaluation_interval == 0; }
  bool is_due(Index step) const { return run_.can_resume_after(step) && on_first(timer_->due(step, seconds())); }

  bool stops_after(Index step) const {
    const Index most = run_.stop_when_worse, worse = directory_.worse(run_.evaluation_interval);
    const bool stop = run_.can_resume_after(step) && on_first(most > 0 && worse >= most);
    if (stop)
      observer_.note("stopped after step " + std::to_string(step) + ": the last " + std::to_string(worse) +
                     " evaluations were worse than the one after step " + std::to_string(directory_.lowest().step) +
                     "; --resume with a larger --stop-when-worse goes on");
    return stop;
  }
  Ended end_early(Index step) {
    finish(step, INFINITY);
    if (!directory_.has_saved(step)) save(step, Keep::always);
    return {step, interrupted()};
  }

  // --- Evaluating ---

  void evaluate(Index step) {
    held_out_.reset();
    const Evaluation evaluation = rescued(step, [&] { return source_.evaluate(trainee_); });
    if (evaluation.empty) return;
    const double loss = evaluation.reward ? -*evaluation.reward : evaluation.measures.loss;
    require(std::isfinite(loss), "after step ", step, " the held-out loss is ", loss,
            "; the weights have diverged. Try a lower --rate or a longer --warmup; ",
            directory_.has_saved(step)
                ? directory_.checkpoint().string() + " holds them: remove it to continue from an earlier checkpoint"
                : directory_.last_checkpoint());
    held_out_ = loss;
    rescued(step, [&] { on_each_rank([&] { observer_.evaluation(step, evaluation); }); });
  }

  // Saves weights with the lowest held-out loss, and names them.
  void keep_best(Index step) {
    if (!held_out_) return;
    directory_.evaluated(step, *held_out_);
    const bool better = on_first(directory_.is_better(*held_out_)) && run_.can_resume_after(step);
    if (better && !directory_.has_saved(step) && on_first(timer_->affordable(seconds()))) save(step, Keep::best);
    if (better && directory_.has_saved(step)) directory_.name_best(*held_out_);
  }

  // --- Saving ---

  void finish(Index step, double seconds) {
    rescued(step, [&] { source_.finish(seconds); });
  }

  void save(Index step, Keep keep) {
    const double begun = seconds();
    rescued({}, [&] { write(step, keep); });
    keep == Keep::best ? timer_->saved_best(begun, seconds()) : timer_->saved(begun, seconds());
  }

  void write(Index step, Keep keep) {
    Json state = {{"step", step}, {"data", run_.source.fingerprint}, {"options", run_.options}};
    if (run_.settings.dtype == DType::bf16) state["bf16_version"] = kBFloat16Version;
    if (!run_.reference.empty()) state["reference"] = run_.reference;
    if (run_.trains_adapters()) {
      state["base"] = run_.base;
      state["base_directory"] = run_.layout->base.string();
    }
    const RunDirectory::Saved saved = directory_.save(engine_, *run_.layout, state, keep);
    if (!saved.aside.empty())
      observer_.note(saved.path.string() + " was not a complete checkpoint of this run; it is now " +
                     saved.aside.string());
    if (!saved.unlinked.empty() && !std::exchange(is_unlinked_, true)) observer_.note(saved.unlinked);
    observer_.saved(step, saved.path);
  }

  // Returns f(), in which all ranks take part. If it fails, the run ends; before that, the weights after step `good` are
  // saved, if there is one.
  template <class F>
  std::invoke_result_t<F> rescued(std::optional<Index> good, F&& f) {
    try {
      return f();
    } catch (const std::exception& error) {
      // Saving needs all ranks, and after most errors the others have not failed.
      const bool all_failed = this_process().count == 1 || dynamic_cast<const SharedError*>(&error) != nullptr;
      const std::string why = reason(error), not_saved = good && all_failed ? save_last(*good) : "";
      const bool known = not_saved.empty() || not_saved == why;
      fail(why, "; ", directory_.last_checkpoint(), known ? "" : "; the last step could not be saved: " + not_saved);
    }
  }

  // Returns why it cannot; empty: it did, or there is nothing new to save.
  std::string save_last(Index step) {
    if (step <= first_ || !run_.can_resume_after(step) || directory_.has_saved(step)) return "";
    try {
      engine_.release_gradient();
      source_.finish_after_error(trainee_);
      write(step, Keep::always);
      return "";
    } catch (const std::exception& error) {  // disk full or device lost
      return reason(error);
    }
  }

  Engine& engine_;
  Run& run_;
  RunDirectory& directory_;
  Observer& observer_;
  DataBatches data_{run_.source, run_.documents.get(), run_.micro_batches};
  BatchSource& source_ = run_.grpo ? static_cast<BatchSource&>(*run_.grpo) : data_;
  const BatchSource::Trainee trainee_{engine_, run_.settings, run_.schedule, run_.rows()};
  Index first_ = 0;   // steps that were done before
  double begun_ = 0;  // the step, in seconds
  std::size_t warned_ = 0;
  std::optional<CheckpointTimer> timer_;
  std::optional<double> held_out_;  // loss, or negative reward, of the last evaluation
  bool is_unlinked_ = false;        // which the caller knows
};

}  // namespace

Ended train(Engine& engine, Run& run, RunDirectory& directory, Observer& observer) {
  return Training(engine, run, directory, observer).run();
}

}  // namespace streambp
