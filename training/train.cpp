// The loop of a training run: load, then { batch, gradient, step, evaluate, save } until the last step.
#include "training/train.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "data/files/mapped_file.h"
#include "training/rescue.h"

namespace streambp {

namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Training {
 public:
  Training(Engine& engine, Run& run, RunDirectory& directory, Observer& observer)
      : engine_(engine), run_(run), directory_(directory), observer_(observer), grpo_(run.grpo.get()) {}

  Ended run() {
    check();
    first_step_ = load();
    if (run_.needs_reference_logps()) attach_reference_logps(engine_, run_, directory_, observer_);
    directory_.open(first_step_, run_.options);
    if (grpo_) grpo_->record_in(directory_.keep_until(first_step_, "completions.jsonl"));
    observer_.begin(first_step_);
    if (first_step_ == 0) evaluate(0);
    observer_.steps_begin();
    return learn();
  }

 private:
  void check() const {
    require(run_.layout.has_value(), "the run has no layout for its checkpoints; set Run::layout");
    require(grpo_ || run_.source.batch, "the run has no batches; set Run::source");
    require(run_.documents || !run_.needs_reference_logps(),
            "this objective needs reference log-probs, which are those of Run::documents; set it");
  }

  // Loads or initialises the weights and the optimizer. Returns the number of steps already done.
  Index load() {
    if (!directory_.checkpoint().empty()) return resume(directory_.checkpoint());
    if (run_.start.empty()) {
      engine_.initialise(run_.seed);
    } else {
      engine_.load(run_.start, run_.adapters);
      if (run_.adapters.empty()) engine_.initialise_adapters(run_.seed);
    }
    return 0;
  }

  Index resume(const fs::path& checkpoint) {
    const fs::path path = state_of(checkpoint);
    const Json json = read_state(checkpoint);
    const Fields state(json, path.string());
    const std::string began = " since the run in " + directory_.path().string() + " began; restore it";
    require(state.get<std::string>("data") == run_.source.fingerprint, run_.source.description,
            ": the data has changed", began, ", or start a new run");
    const bool adapters = run_.trains_adapters();
    require(adapters || config_to_json(read_config(checkpoint)) == config_to_json(run_.settings.config),
            (checkpoint / "config.json").string(), ": is not the model that ", path.string(), " describes");
    require(!adapters || state.get<std::string>("base") == run_.base, run_.start.string(), ": has changed", began);
    const Index step = state.get<Index>("step");
    if (run_.settings.dtype == DType::bf16 && state.get<Index>("bf16_version", 1) != kBFloat16Version)
      observer_.note(
          "another version of streambp computed the steps so far, with other sums in bfloat16; from here on, the "
          "run's bits differ from what that version would give");
    if (run_.optimizer.blocks && step > 0) engine_.train_block(run_.optimizer.blocks, step);
    engine_.restore(checkpoint, *run_.layout);
    require(step <= run_.optimizer.steps, path.string(), ": step ", step, " is beyond the run's ", run_.optimizer.steps,
            "; the file is damaged, use an earlier checkpoint");
    return step;
  }

  // --- The loop ---

  Ended learn() {
    const Index last = run_.last_step();
    CheckpointTimer timer(run_.checkpoint_interval, seconds(), run_.checkpoint_bytes);
    if (first_step_ < last && stops(first_step_)) return {first_step_, interrupted()};
    for (Index step = first_step_ + 1; step <= last; ++step) {
      const double begun = seconds();
      rescue_.on_this_rank(step - 1, [&] { read_batches(step); });
      engine_.device().reset_work();
      const StepResult result = rescue_.together(step - 1, [&] { return take_step(step); });
      if (grpo_) rescue_.together(step, [&] { grpo_->check_rewards(); });
      engine_.synchronize();
      rescue_.on_this_rank(step, [&] {
        if (grpo_) grpo_->record(step);
        observer_.step({step, grpo_ ? grpo_->batches : batches_, result, engine_.device(), seconds() - begun});
        pass_on_warnings();
      });

      const bool at_end = step == last, interrupted = this->interrupted() && run_.can_resume_after(step),
                 due = run_.can_resume_after(step) && is_due(timer, step),
                 evaluated = !interrupted && (at_end || is_evaluated(step));
      // Evaluation comes after saving, so that a kill loses nothing; but rewards are checked to their end before saving.
      if (grpo_ && evaluated) evaluate(step);
      if (const double most = interrupted ? ShellProgram::kMoment : INFINITY; grpo_ && (at_end || interrupted))
        rescue_.together(step, [&] { grpo_->finish(most); });
      if (at_end || interrupted || due) {
        const bool asked_for = at_end || (due && !timer.by_time());
        const double saving = seconds();
        rescue_.together(first_step_,
                         [&] { save(step, asked_for ? RunDirectory::Keep::always : RunDirectory::Keep::newest_two); });
        timer.saved(saving, seconds());
      }
      if (!grpo_ && evaluated) evaluate(step);
      if (evaluated) keep_best(step, timer);
      if (interrupted) return {step, true};
      if (!at_end && is_evaluated(step) && run_.can_resume_after(step) && stops(step)) return end_early(step);
    }
    // A signal may have come during the last evaluation or checkpoint.
    return {std::max(first_step_, last), interrupted()};
  }

  // All ranks agree, also on rank 0's clock.
  bool interrupted() { return largest_of_ranks(observer_.interrupted()) > 0; }
  static bool is_due(const CheckpointTimer& timer, Index step) {
    return largest_of_ranks(this_process().rank == 0 && timer.due(step, seconds())) > 0;
  }
  bool is_evaluated(Index step) const { return run_.evaluation_interval > 0 && step % run_.evaluation_interval == 0; }

  // On-line GRPO makes its batches in the step.
  void read_batches(Index step) {
    if (grpo_) return;
    std::vector<Batch> read;
    for (Index i = 0; i < run_.micro_batches; ++i) read.push_back(run_.source.batch(step, i));
    if (run_.documents) run_.documents->file.require_unchanged(run_.source.fingerprint);
    MappedFile::require_intact();
    for (const Batch& batch : read) {
      try {
        validate(run_.settings.config, batch), validate(run_.settings.objective, batch);
      } catch (const Error& error) {  // the data was good when the run began
        fail(run_.documents ? run_.documents->file.path() : run_.source.description,
             ": was changed during the run: ", error.what(), "; restore it");
      }
    }
    batches_ = std::move(read);
  }

  StepResult take_step(Index step) {
    struct Announced {
      Observer& observer;
      ~Announced() { observer.step_ends(); }
    } announced{observer_};
    observer_.step_begins(step, batches_, engine_.device());
    if (!grpo_) return engine_.step(batches_, run_.schedule, run_.optimizer, step);
    return grpo_->step(engine_, run_.settings.objective, run_.schedule, run_.rows(), run_.optimizer, step);
  }

  void pass_on_warnings() {
    const std::vector<std::string> warnings = engine_.warnings();
    for (; warned_ < warnings.size(); ++warned_) observer_.note(warnings[warned_]);
  }

  void evaluate(Index step) {
    held_out_.reset();
    if (grpo_) {
      const double reward = rescue_.together(step, [&] { return grpo_->evaluate(engine_); });
      if (std::isnan(reward)) return;  // nothing is held out
      held_out_ = -reward;
      return rescue_.on_this_rank(step, [&] { observer_.reward(step, reward); });
    }
    const Evaluation evaluation = rescue_.together(step, [&] {
      return streambp::evaluate(engine_, run_.settings.objective, run_.source.evaluation, run_.schedule);
    });
    if (evaluation.empty) return;
    const double loss = evaluation.measures.loss;
    require(std::isfinite(loss), "after step ", step, " the held-out loss is ", loss,
            "; the weights have diverged. Try a lower --rate or a longer --warmup; ",
            directory_.has_saved(step)
                ? directory_.checkpoint().string() + " holds them: remove it to continue from an earlier checkpoint"
                : directory_.last_checkpoint());
    held_out_ = loss;
    rescue_.on_this_rank(step, [&] { observer_.evaluation(step, evaluation); });
  }

  // Only rank 0 has read what an earlier run said.
  static bool on_first(bool yes) { return largest_of_ranks(this_process().rank == 0 && yes) > 0; }

  // Saves weights with the lowest held-out loss, and names them.
  void keep_best(Index step, CheckpointTimer& timer) {
    if (!held_out_) return;
    directory_.evaluated(step, *held_out_);
    const bool better = on_first(directory_.is_better(*held_out_)) && run_.can_resume_after(step);
    const double begun = seconds();
    if (better && !directory_.has_saved(step) && on_first(timer.affordable(begun))) {
      rescue_.together(first_step_, [&] { save(step, RunDirectory::Keep::best); });
      timer.saved_best(begun, seconds());
    }
    if (better && directory_.has_saved(step)) directory_.name_best(*held_out_);
  }

  bool stops(Index step) {
    const Index most = run_.stop_when_worse, worse = directory_.worse(run_.evaluation_interval);
    const bool stop = on_first(most > 0 && worse >= most);
    if (stop)
      observer_.note("stopped after step " + std::to_string(step) + ": the last " + std::to_string(worse) +
                     " evaluations were worse than the one after step " + std::to_string(directory_.lowest().step) +
                     "; --resume with a larger --stop-when-worse goes on");
    return stop;
  }
  Ended end_early(Index step) {
    if (grpo_) rescue_.together(step, [&] { grpo_->finish(INFINITY); });
    if (!directory_.has_saved(step)) rescue_.together(first_step_, [&] { save(step, RunDirectory::Keep::always); });
    return {step, interrupted()};
  }

  // --- Saving ---

  void save(Index step, RunDirectory::Keep keep) {
    Json state = {{"step", step}, {"data", run_.source.fingerprint}, {"options", run_.options}};
    if (run_.settings.dtype == DType::bf16) state["bf16_version"] = kBFloat16Version;
    if (!run_.reference.empty()) state["reference"] = run_.reference;
    if (run_.trains_adapters()) state["base"] = run_.base, state["base_directory"] = run_.layout->base.string();
    const RunDirectory::Saved saved = directory_.save(engine_, *run_.layout, state, keep);
    if (!saved.aside.empty())
      observer_.note(saved.path.string() + " was not a complete checkpoint of this run; it is now " +
                     saved.aside.string());
    if (!saved.unlinked.empty() && !std::exchange(is_unlinked_, true)) observer_.note(saved.unlinked);
    observer_.saved(step, saved.path);
  }

  // Saves the weights after step `done` when an error ends the run. Returns why it cannot; empty: it did, or there is
  // nothing to save.
  std::string save_last(Index done) {
    if (done <= first_step_ || !run_.can_resume_after(done) || directory_.has_saved(done)) return "";
    try {
      if (grpo_) grpo_->finish(ShellProgram::kMoment);
      engine_.release_gradient();
      if (!grpo_) {  // do not save weights that give NaN
        const auto logps = engine_.evaluate({batches_.front()}, run_.schedule);
        const bool finite = std::ranges::all_of(logps.front(), [](double logp) { return std::isfinite(logp); });
        if (largest_of_ranks(!finite) > 0) return "its weights give no finite loss";
      }
      save(done, RunDirectory::Keep::always);
      return "";
    } catch (const std::exception& error) {  // disk full or device lost
      return Rescue::reason(error);
    }
  }

  Engine& engine_;
  Run& run_;
  RunDirectory& directory_;
  Observer& observer_;
  OnlineGrpo* const grpo_;
  Index first_step_ = 0;
  std::vector<Batch> batches_;  // of the step
  std::size_t warned_ = 0;
  std::optional<double> held_out_;  // loss, or negative reward, of the last evaluation
  bool is_unlinked_ = false;        // which the caller knows
  const Rescue rescue_{[this](Index done) { return save_last(done); }, [this] { return directory_.last_checkpoint(); }};
};

}  // namespace

Ended train(Engine& engine, Run& run, RunDirectory& directory, Observer& observer) {
  return Training(engine, run, directory, observer).run();
}

}  // namespace streambp
