// streambp train, from top to bottom: parse, prepare, train, sample.
//
// Its parts: commands/train_options.h (options), commands/train_task.h (data, settings, memory), train.cu (the loop),
// commands/train_report.h (console and metrics).

#include "commands/command.h"
#include "commands/display.h"
#include "commands/report.h"
#include "commands/train_report.h"

namespace streambp {

namespace {

class TrainCommand : public Command {
 public:
  explicit TrainCommand(CLI::App& app) : Command(app, "train", kTrainDescription), options(Command::options) {}

 private:
  void run() override {
    task = prepare(options, directory);
    const StepSettings& settings = task.run.settings;
    const double machine_rate = matmul_rate(settings.device, settings.dtype);
    engine = make_engine(settings, task.run.rows(), task.run.memory);
    report.emplace(*directory, options, task, machine_rate);
    const Ended ended = learn();
    results_are_saved = true;
    if (ended.interrupted) report_stop(ended.step);
    if (!ended.interrupted && options.sample_length > 0) show_sample(ended.step);
    report->end();
    report->write_page();
    print("report   %s\n", (directory->path() / kReportName).string());
  }

  Ended learn() {
    const Index length = std::min<Index>(options.sample_length, 160);  // of the samples that only the report shows
    if (!options.fine_tunes() && length > 0 && this_process().count == 1)
      report->sample = [this, length] { return sample(length, [](const std::string&) {}); };
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
    print("%sstopped  after step %ld by a signal; the checkpoint is %s\n", fresh_line(), step, directory->checkpoint());
    if (step < task.run.last_step())
      print("         continue with streambp train --out %s --resume%s\n", options.out, options.grpo.resume_hint());
  }

  void show_sample(Index step) {
    const std::string prompt = readable(task.prompt);
    print("\nA sample, continuing \"%s\":\n\n%s", prompt, Escape{prompt});
    const Json sample = this->sample(options.sample_length, [](const std::string& text) {
      print("%s", Escape{text});
      std::fflush(stdout);
    });
    print("\n");
    report->record({{"step", step}, {"sample", sample}});
  }

  // A byte-level model continues the prompt.
  Json sample(Index most, const std::function<void(const std::string&)>& show) {
    const std::string& prompt = task.prompt;
    const Index room = task.run.length, length = std::min(most, room - std::ssize(prompt));
    const Sampling sampling{.temperature = options.grpo.temperature, .seed = options.seed};
    Tokens tokens;
    for (const unsigned char byte : prompt) tokens.push_back(byte);
    std::string text;
    engine->generator({1, room})->generate({tokens}, {sampling, length}, [&](std::size_t, const Continuation& c) {
      const std::string shown = readable({static_cast<char>(c.tokens.back())});
      show(shown);
      text += shown;
    });
    return {{"prompt", readable(prompt)}, {"text", text}};
  }

  // Replaces all but printable ASCII, newlines and tabs by '?'.
  static std::string readable(std::string text) {
    for (char& c : text)
      if ((c < ' ' || c > '~') && c != '\n' && c != '\t') c = '?';
    return text;
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
