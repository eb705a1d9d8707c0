// The command line of the program: its commands, --version, and how errors become messages and exit codes.
#include <poll.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "commands/command.h"
#include "commands/display.h"
#include "commands/help.h"
#include "commands/other_names.h"
#include "commands/process.h"
#include "commands/version.h"
#include "data/files/mapped_file.h"
#include "kernels/base/unfinished.h"
#include "parallel/processes.h"
#include "training/engine.h"

namespace streambp {

namespace {

constexpr const char* kProgramDescription =
    "streambp: exact backpropagation of long sequences in little memory.\n\n"
    "  streambp train        train a model (alone: a small one, in two minutes)\n"
    "  streambp verify       prove that the gradient is the full-memory gradient\n"
    "  streambp plan MODEL   show the memory and FLOPs of a training step\n"
    "  streambp bench        measure the speed of a training step\n"
    "  streambp tokenize     turn data into tokens\n"
    "  streambp eval         measure a model's loss, by file and by position\n"
    "  streambp report RUN   show the curves of runs as a page, and compare them\n"
    "  streambp generate     continue prompts, or chat\n"
    "  streambp merge        make adapters part of a whole model\n"
    "  streambp examples     write example data\n"
    "  streambp devices      list the CPU and GPUs, and why one cannot be used\n"
    "  streambp list         list model families, published models, or known defects\n\n"
    "Every command has its own --help, and --help-all with all of its options; --version names the devices. "
    "Exit codes: 0 done, 1 a verification failed or a plan does not fit, 2 an error, 3 a verification that cannot "
    "decide; 128 + N: ended by "
    "signal N.";

std::string version() {
  const std::string no_gpu = why_no_gpu();
  std::string text = std::string("streambp ") + kVersion + ", commit " + kCommit + "\n";
  text += "CPU      " + device_name(DeviceKind::cpu) + "\n";
  text += "GPU      " + (no_gpu.empty() ? device_name(DeviceKind::cuda) : "none: " + no_gpu);
  return text;
}

int parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) throw;
    app.exit(e);  // --help or --version
  }
  return 0;
}

// Reports output that could not be written. It is an error unless the command has saved its results.
void flush_output(const std::vector<std::unique_ptr<Command>>& commands) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && !std::ferror(stdout) && std::cout) return;
  const bool saved = std::ranges::any_of(commands, [](const auto& command) { return command->results_are_saved; });
  pollfd console = {STDOUT_FILENO, POLLOUT, 0};
  const bool reader_left = poll(&console, 1, 0) == 1 && (console.revents & POLLERR) != 0;
  if (reader_left && !saved) throw Cancelled{SIGPIPE};  // as head(1) expects
  const std::string lost = "cannot write to standard output; is the disk full?";
  if (!reader_left && !saved) fail(lost);
  if (!reader_left) std::cerr << "streambp: " << lost << " Everything else is saved.\n";
}

// The message for an argument that the command does not have.
std::string explain(std::string argument, const CLI::App& command) {
  const std::string where = "streambp " + command.get_name();
  if (argument[0] != '-') return quote(argument) + " is not expected after " + where + "; options begin with --";
  argument = argument.substr(0, argument.find('='));
  std::string name = argument;
  std::replace(name.begin(), name.end(), '_', '-');
  if (const std::string why = why_no_option(name); !why.empty()) return why;
  std::vector<std::string> choices;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& known : option->get_lnames())
      if (known.find('_') == std::string::npos) choices.push_back("--" + known);
  const std::string guess = did_you_mean(name, choices);
  return argument + " is not an option of " + where + "; " + (guess.empty() ? "see " + where + " --help-all" : guess);
}

// The message for a command line that cannot be parsed. An unknown option comes first: it may be a required one.
std::string explain(const CLI::ParseError& error, const CLI::App& app, const std::string& command) {
  if (command.empty()) return "no command is given; streambp --help lists the commands";
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  if (parsed.empty() || parsed.front()->get_name() != command) {
    std::vector<std::string> commands;
    for (const CLI::App* entry : app.get_subcommands({})) commands.push_back(entry->get_name());
    const std::string guess = did_you_mean(command, commands);
    return quote(command) + " is not a command; " + (guess.empty() ? "streambp --help lists the commands" : guess);
  }
  const CLI::App& chosen = *parsed.front();
  const std::vector<std::string> unknown = chosen.remaining();
  const auto option = std::ranges::find_if(
      unknown, [](const std::string& text) { return text.size() > 1 && text[0] == '-' && text[1] > '9'; });
  if (!unknown.empty()) return explain(option != unknown.end() ? *option : unknown.front(), chosen);
  return std::string(error.what()) + "; see streambp " + command + " --help";
}

// Several processes run the same command. Only the first one prints.
void join_others(int argc, char** argv) {
  if (const std::string note = join_processes(); !note.empty()) print_error("streambp: note: %s\n", note);
  const Process& process = this_process();
  if (process.count == 1) return;
  const std::string command = argc > 1 ? argv[1] : "";
  choose_gpu(process);
  if (process.rank > 0 && std::freopen("/dev/null", "w", stdout) == nullptr) fail("cannot open /dev/null");
  std::string arguments;
  for (int i = 1; i < argc; ++i) arguments += (i > 1 ? " " : "") + std::string(argv[i]);
  require_equal("the version", std::string(kVersion) + " (" + kCommit + ")");
  require_equal("the options", arguments);
  for (const char* alone : {"plan", "tokenize", "eval", "report", "generate", "merge", "examples", "devices", "list"})
    require(command != alone, "streambp ", command, " runs in one process; start it without mpirun");
}

int run_command(int argc, char** argv) {
  CLI::App app{kProgramDescription};
  app.require_subcommand(1);
  app.formatter_fn(
      [](const CLI::App* all, const std::string&, CLI::AppFormatMode) { return filled(all->get_description()); });
  app.set_help_all_flag("--help-all", "");
  app.set_version_flag("--version", version);
  std::vector<std::unique_ptr<Command>> commands;
  for (const auto make :
       {train_command, verify_command, plan_command, bench_command, tokenize_command, eval_command, report_command,
        generate_command, merge_command, examples_command, devices_command, list_command}) {
    commands.push_back(make(app));
  }
  for (CLI::App* command : app.get_subcommands({})) command->group("");  // the description lists them
  try {
    int exit_code = parse(app, argc, argv);
    MappedFile::require_intact();
    flush_output(commands);
    for (const auto& command : commands) exit_code = std::max(exit_code, command->exit_code);
    return exit_code;
  } catch (const CLI::ParseError& e) {
    fail(explain(e, app, argc > 1 ? argv[1] : ""));
  }
}

// Reports an error and ends the run: all of its processes.
int fail_with(const std::string& message) {
  const Process& process = this_process();
  if (process.count == 1) {
    std::cerr << "streambp: " << message << "\n";
    return 2;
  }
  if (process.rank > 0) sleep(1);  // if all processes have the same problem, the first one says so
  std::cerr << "streambp: rank " + std::to_string(process.rank) + ": " + message + "\n" << std::flush;
  end_processes(2);
}

// Returns the exit code.
int run_program(int argc, char** argv) {
  try {
    join_others(argc, argv);
    const int exit_code = run_command(argc, argv);
    leave_processes();
    return exit_code;
  } catch (const Cancelled& cancelled) {  // what was unfinished is removed
    signal(cancelled.signal, SIG_DFL);
    return raise(cancelled.signal);
  } catch (const fs::filesystem_error& e) {  // a path that no file system takes: too long, or links that loop
    return fail_with(on_one_line(e.path1().string() + ": " + e.code().message() + "; check the path"));
  } catch (const std::exception& e) {
    return fail_with(on_one_line(reason(e)));
  }
}

}  // namespace

}  // namespace streambp

int main(int argc, char** argv) {
  streambp::set_up_process(argv);
  const int exit_code = streambp::run_program(argc, argv);
  streambp::main_has_ended = true;
  return exit_code;
}
