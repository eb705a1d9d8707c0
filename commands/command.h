// The commands of the program. Each one has its own file, adds its options to the parser, and runs when it is parsed.
#pragma once

#include <memory>

#include "commands/option_table.h"

namespace streambp {

struct Command {
  Command(CLI::App& app, const char* name, const char* description)
      : options(app, name, description, [this] { run(); }) {}
  virtual ~Command() = default;
  virtual void run() = 0;

  OptionTable options;
  int exit_code = 0;               // of the program, once the command has run
  bool results_are_saved = false;  // in files, so that a console that fails loses nothing
};

std::unique_ptr<Command> train_command(CLI::App& app);
std::unique_ptr<Command> verify_command(CLI::App& app);
std::unique_ptr<Command> plan_command(CLI::App& app);
std::unique_ptr<Command> bench_command(CLI::App& app);
std::unique_ptr<Command> tokenize_command(CLI::App& app);
std::unique_ptr<Command> eval_command(CLI::App& app);
std::unique_ptr<Command> report_command(CLI::App& app);
std::unique_ptr<Command> generate_command(CLI::App& app);
std::unique_ptr<Command> merge_command(CLI::App& app);
std::unique_ptr<Command> examples_command(CLI::App& app);
std::unique_ptr<Command> devices_command(CLI::App& app);
std::unique_ptr<Command> list_command(CLI::App& app);

}  // namespace streambp
