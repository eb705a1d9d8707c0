// A training run from top to bottom: parse, prepare, loop { batch, gradient, step }, save. And main, at the end.
//
// Its parts: commands/train_options.h (options), commands/train_task.h (data, settings, memory),
// training/engine.h (the model on its device), training/run_directory.h (--out), commands/train_report.h (console
// and metrics).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "commands/command.h"
#include "commands/display.h"
#include "commands/process.h"
#include "commands/train_report.h"
#include "training/interruption.h"
#include "training/reference_logps.h"
#include "training/rescue.h"

namespace streambp {

namespace {

class TrainCommand : public Command {
 public:
  explicit TrainCommand(CLI::App& app) : options(app, [this] { run(); }) {}

 private:
  void run() {
    open_directory();
    options.room = {room_of_each_rank(options.device.kind()),
                    far_room_of_each_rank(options.device.kind(), options.budget.directory)};
    first_then_others([&] { task = prepare(options, *directory); });
    require_equal("the data", task.source.fingerprint);
    for (const auto& [what, directory] : {std::pair{"the model", task.start}, {"the adapters", task.adapters}})
      if (this_process().count > 1 && !directory.empty()) require_equal(what, contents_key(directory));
    task.settings.ranks = options.ranks.grid(task.settings.config, task.settings.device);

    const double machine_rate = matmul_rate(task.settings.device, task.settings.dtype);
    engine = make_engine(task.settings, options.rows(), task.memory);
    first_step = load();
    if (task.needs_reference_logps()) attach_reference_logps(*engine, task, options, *directory);

    directory->open(first_step, options.table.lasting());
    if (task.grpo) task.grpo->record_in(directory->keep_until(first_step, "completions.jsonl"));
    report.emplace(*directory, options, first_step, machine_rate);
    for (const fs::path& path : directory->incomplete())
      task.notes.push_back("skipped " + path.string() + ": a part of it is missing");
    report->begin(task);
    if (first_step == 0) evaluate(first_step);
    const bool ended = learn();
    results_are_saved = true;
    if (ended && options.sample_length > 0) sample();
  }

  // Rank 0 decides where the run is written and where it continues.
  void open_directory() {
    const auto begin = options.resume ? RunDirectory::Begin::resume : RunDirectory::Begin::fresh;
    const bool first = this_process().rank == 0;
    auto settle = [&] {
      options.settle(directory->resumes() ? directory->state_file() : fs::path());
      directory->create();
      options.out = directory->path();
    };
    if (first) directory.emplace(options.out, begin), settle();
    const std::string path = from_first(options.out), checkpoint = from_first(first ? directory->checkpoint() : "");
    if (!first) directory.emplace(path, checkpoint, begin), settle();
  }

  // Loads or initialises the weights and the optimizer. Returns the number of steps already done.
  Index load() {
    if (!directory->checkpoint().empty()) return resume(directory->checkpoint());
    if (task.start.empty()) {
      engine->initialise(options.seed);
    } else {
      engine->load(task.start, task.adapters);
      if (task.adapters.empty()) engine->initialise_adapters(options.seed);
    }
    return 0;
  }

  Index resume(const fs::path& checkpoint) {
    const fs::path path = state_of(checkpoint);
    const Json json = read_state(checkpoint);
    const Fields state(json, path.string());
    require(state.get<std::string>("data") == task.source.fingerprint, task.source.description,
            ": the data has changed since the run in ", options.out, " began; restore it, or start a new run");
    require(
        options.trains_adapters() || config_to_json(read_config(checkpoint)) == config_to_json(task.settings.config),
        (checkpoint / "config.json").string(), ": is not the model that ", path.string(), " describes");
    require(!options.trains_adapters() || state.get<std::string>("base") == task.base, task.start.string(),
            ": has changed since the run in ", options.out, " began; restore it");
    const Index step = state.get<Index>("step");
    if (options.optimizer.blocks && step > 0) engine->train_block(options.optimizer.blocks, step);
    engine->restore(checkpoint, *task.layout);
    require(step <= options.optimizer.steps, path.string(), ": step ", step, " is beyond the run's ",
            options.optimizer.steps, "; the file is damaged, use an earlier checkpoint");
    return step;
  }

  // --- The loop ---

  // Returns false if a signal ended it early.
  bool learn() {
    const Index last = options.last_step();
    if (first_step >= last)
      print("nothing to do: the run is at step %ld of %ld\n", first_step, options.optimizer.steps);
    const Interruption interruption;
    CheckpointTimer timer(options.checkpoint_interval, seconds());
    for (Index step = first_step + 1; step <= last; ++step) {
      const double begun = seconds();
      rescue.on_this_rank(step - 1, [&] { read_batches(step); });
      engine->device().reset_work();
      const StepResult result = rescue.together(step - 1, [&] {
        const auto progress = report->progress(step, task, batches, engine->device());
        return take_step(step);
      });
      if (task.grpo) rescue.together(step, [&] { task.grpo->check_rewards(); });
      engine->synchronize();
      rescue.on_this_rank(step, [&] {
        if (task.grpo) task.grpo->record(step);
        report->step(step, task.grpo ? task.grpo->batches : batches, result, engine->device(), seconds() - begun);
      });

      const bool at_end = step == last, interrupted = signal() != 0 && can_resume_after(step),
                 due = can_resume_after(step) && is_due(timer, step),
                 evaluated = !interrupted && (at_end || is_evaluated(step));
      // Evaluation comes after saving, so that a kill loses nothing; but rewards are checked to their end before saving.
      if (task.grpo && evaluated) evaluate(step);
      if (const double most = interrupted ? ShellProgram::kMoment : INFINITY; task.grpo && (at_end || interrupted))
        rescue.together(step, [&] { task.grpo->finish(most); });
      if (at_end || interrupted || due) {
        const bool asked_for = at_end || (due && !timer.by_time());
        const double saving = seconds();
        rescue.together(first_step,
                        [&] { save(step, asked_for ? RunDirectory::Keep::always : RunDirectory::Keep::newest_two); });
        timer.saved(saving, seconds());
      }
      if (!task.grpo && evaluated) evaluate(step);
      if (interrupted) return stop(step);
    }
    // A signal may have come during the last evaluation or checkpoint.
    return signal() == 0 || stop(std::max(first_step, last));
  }

  // What all ranks agree on: the signal that any of them has received, and rank 0's clock.
  static int signal() { return static_cast<int>(largest_of_ranks(Interruption::signal())); }
  static bool is_due(const CheckpointTimer& timer, Index step) {
    return largest_of_ranks(this_process().rank == 0 && timer.due(step, seconds())) > 0;
  }

  // On-line GRPO makes its batches in the step.
  void read_batches(Index step) {
    if (task.grpo) return;
    std::vector<Batch> read;
    for (Index i = 0; i < options.micro_batches; ++i) read.push_back(task.source.batch(step, i));
    if (task.token_file) task.token_file->require_unchanged(task.source.fingerprint);
    MappedFile::require_intact();
    for (const Batch& batch : read) {
      try {
        validate(task.settings.config, batch), validate(task.settings.objective, batch);
      } catch (const Error& error) {  // the data was good when the run began
        fail(task.token_file ? task.token_file->path() : task.source.description,
             ": was changed during the run: ", error.what(), "; restore it");
      }
    }
    batches = std::move(read);
  }

  StepResult take_step(Index step) {
    if (!task.grpo) return engine->step(batches, task.schedule, options.optimizer, step);
    return task.grpo->step(*engine, task.settings.objective, task.schedule, options.length, options.optimizer, step);
  }

  // Saves the weights after step `done` when an error ends the run. Returns why it cannot; empty: it did, or there is
  // nothing to save.
  std::string save_last(Index done) {
    if (done <= first_step || !can_resume_after(done) || directory->has_saved(done)) return "";
    try {
      if (task.grpo) task.grpo->finish(ShellProgram::kMoment);
      engine->release_gradient();
      if (!task.grpo) {  // do not save weights that give NaN
        const auto logps = engine->evaluate({batches.front()}, task.schedule);
        const bool finite = std::ranges::all_of(logps.front(), [](double logp) { return std::isfinite(logp); });
        if (largest_of_ranks(!finite) > 0) return "its weights give no finite loss";
      }
      save(done, RunDirectory::Keep::always);
      return "";
    } catch (const std::exception& error) {  // disk full or device lost
      return Rescue::reason(error);
    }
  }

  // On-line GRPO samples at the beginning of a round, so a run can only resume between rounds.
  bool can_resume_after(Index step) const { return !task.grpo || step % options.grpo.inner == 0; }
  bool is_evaluated(Index step) const {
    return options.evaluation_interval > 0 && step % options.evaluation_interval == 0;
  }

  void evaluate(Index step) {
    if (task.grpo) {
      const double reward = rescue.together(step, [&] { return task.grpo->evaluate(*engine); });
      return rescue.on_this_rank(step, [&] { report->reward(step, reward); });
    }
    const Objective& objective = task.settings.objective;
    const Evaluation evaluation = rescue.together(
        step, [&] { return streambp::evaluate(*engine, objective, task.source.evaluation, task.schedule); });
    const double loss = evaluation.measures.loss;
    require(evaluation.empty || std::isfinite(loss), "after step ", step, " the held-out loss is ", loss,
            "; the weights have diverged. Try a lower --rate or a longer --warmup; ",
            directory->has_saved(step)
                ? directory->checkpoint().string() + " holds them: remove it to continue from an earlier checkpoint"
                : directory->last_checkpoint());
    rescue.on_this_rank(step, [&] { report->evaluation(step, evaluation, objective.kind); });
  }

  void save(Index step, RunDirectory::Keep keep) {
    Json state = {{"step", step}, {"data", task.source.fingerprint}, {"options", options.table.lasting()}};
    if (!task.reference.empty()) state["reference"] = task.reference;
    if (options.trains_adapters()) state["base"] = task.base, state["base_directory"] = task.layout->base.string();
    const fs::path saved = directory->save(*engine, *task.layout, state, keep);
    if (step == options.last_step()) print("saved    %s\n", saved.c_str());
  }

  bool stop(Index step) {
    exit_code = 128 + signal();
    print("stopped  after step %ld by a signal; the checkpoint is %s\n", step, directory->checkpoint().c_str());
    if (step < options.last_step())
      print("         continue with streambp train --out %s --resume%s\n", options.out, options.grpo.resume_hint());
    return false;
  }

  // --- After the loop ---

  // Samples from a byte-level model.
  void sample() {
    const std::string whole = options.prompt.empty() ? task.text->prompt() : options.prompt;
    const std::string prompt = whole.substr(0, static_cast<std::size_t>(options.length - 1));
    Tokens tokens;
    std::string shown;
    for (const unsigned char byte : prompt) tokens.push_back(byte), shown += printable(byte);
    print("\nA sample, continuing \"%s\":\n\n%s", shown.c_str(), Escape{shown.c_str()});
    GenerationSettings settings{{.temperature = options.temperature, .seed = options.seed}};
    settings.length = std::min(options.sample_length, options.length - static_cast<Index>(prompt.size()));
    const auto show = [](std::size_t, const Continuation& text) {
      print("%c", printable(text.tokens.back()));
      std::fflush(stdout);
    };
    engine->generator(1, options.length, kTile)->generate({tokens}, settings, show);
    print("\n");
  }

  // The byte as a character; '?' if it is neither printable ASCII nor a newline or tab.
  static char printable(std::int32_t token) {
    return static_cast<char>((32 <= token && token < 127) || token == '\n' || token == '\t' ? token : '?');
  }

  static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  TrainOptions options;
  std::optional<RunDirectory> directory;
  TrainTask task;
  std::vector<Batch> batches;  // of the step
  std::unique_ptr<Engine> engine;
  std::optional<TrainReport> report;
  Index first_step = 0;
  const Rescue rescue{[this](Index done) { return save_last(done); }, [this] { return directory->last_checkpoint(); }};
};

}  // namespace

std::unique_ptr<Command> train_command(CLI::App& app) { return std::make_unique<TrainCommand>(app); }

}  // namespace streambp

int main(int argc, char** argv) {
  streambp::set_up_process(argv);
  return streambp::run_program(argc, argv);
}
