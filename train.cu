// A training run from top to bottom: parse, prepare, train, sample. And main, at the end.
//
// Its parts: commands/train_options.h (options), commands/train_task.h (data, settings, memory), training/engine.h (the
// model on its device), training/train.h (the loop), commands/train_report.h (console and metrics).
#include <algorithm>
#include <cstdio>

#include "commands/command.h"
#include "commands/display.h"
#include "commands/process.h"
#include "commands/report.h"
#include "commands/train_report.h"

namespace streambp {

namespace {

class TrainCommand : public Command {
 public:
  explicit TrainCommand(CLI::App& app) : options(app, [this] { run(); }) {}

 private:
  void run() {
    open_directory();
    options.room = {options.ranks.room(options.device.kind()),
                    far_room_of_each_rank(options.device.kind(), options.budget.directory)};
    first_then_others([&] { task = prepare(options, *directory); });
    Run& run = task.run;
    require_equal("the data", run.source.fingerprint);
    for (const auto& [what, files] : {std::pair{"the model", run.start}, {"the adapters", run.adapters}})
      if (this_process().count > 1 && !files.empty()) require_equal(what, contents_key(files));
    run.settings.ranks = options.ranks.grid(run.settings.config, run.settings.device);

    const double machine_rate = matmul_rate(run.settings.device, run.settings.dtype);
    engine = make_engine(run.settings, run.rows(), run.memory);
    const Ended ended = learn(machine_rate);
    results_are_saved = true;
    if (ended.interrupted) report_stop(ended.step);
    if (!ended.interrupted && options.sample_length > 0) show_sample(ended.step);
    report->end();
    report->write_page();
    print("report   %s\n", (directory->path() / kReportName).string());
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

  Ended learn(double machine_rate) {
    report.emplace(*directory, options, task, machine_rate);
    const Index length = std::min<Index>(options.sample_length, 160);  // of the samples that only the report shows
    if (!options.fine_tunes() && length > 0 && this_process().count == 1)
      report->sample = [this, length] { return sample(length, [](char) {}); };
    try {
      const Ended ended = train(*engine, task.run, *directory, *report);
      report->steps_ended();
      return ended;
    } catch (const std::exception& error) {
      report->failed(error.what());
      throw;
    }
  }

  void report_stop(Index step) {
    exit_code = 128 + static_cast<int>(largest_of_ranks(Interruption::signal()));
    print("%sstopped  after step %ld by a signal; the checkpoint is %s\n", fresh_line(), step,
          directory->checkpoint().c_str());
    if (step < task.run.last_step())
      print("         continue with streambp train --out %s --resume%s\n", options.out, options.grpo.resume_hint());
  }

  void show_sample(Index step) {
    const std::string prompt = readable(this->prompt());
    print("\nA sample, continuing \"%s\":\n\n%s", prompt, Escape{prompt.c_str()});
    const Json sample = this->sample(options.sample_length, [](char c) {
      print("%c", c);
      std::fflush(stdout);
    });
    print("\n");
    report->record({{"step", step}, {"sample", sample}});
  }

  // A byte-level model continues the prompt.
  Json sample(Index length, const std::function<void(char)>& show) {
    const std::string prompt = this->prompt();
    Tokens tokens;
    for (const unsigned char byte : prompt) tokens.push_back(byte);
    GenerationSettings settings{{.temperature = options.grpo.temperature, .seed = options.seed}};
    settings.length = std::min(length, task.run.length - std::ssize(prompt));
    std::string text;
    const auto add = [&](std::size_t, const Continuation& continued) {
      text += printable(continued.tokens.back());
      show(text.back());
    };
    engine->generator({1, task.run.length})->generate({tokens}, settings, add);
    return {{"prompt", readable(prompt)}, {"text", text}};
  }

  std::string prompt() const { return task.prompt.substr(0, static_cast<std::size_t>(task.run.length - 1)); }
  static std::string readable(std::string text) {
    for (char& c : text) c = printable(static_cast<unsigned char>(c));
    return text;
  }
  // The byte as a character; '?' if it is neither printable ASCII nor a newline or tab.
  static char printable(std::int32_t token) {
    return static_cast<char>((32 <= token && token < 127) || token == '\n' || token == '\t' ? token : '?');
  }

  TrainOptions options;
  std::optional<RunDirectory> directory;
  TrainTask task;
  std::unique_ptr<Engine> engine;
  std::optional<TrainReport> report;
};

}  // namespace

std::unique_ptr<Command> train_command(CLI::App& app) { return std::make_unique<TrainCommand>(app); }

}  // namespace streambp

int main(int argc, char** argv) {
  streambp::set_up_process(argv);
  const int exit_code = streambp::run_program(argc, argv);
  streambp::main_has_ended = true;
  return exit_code;
}
