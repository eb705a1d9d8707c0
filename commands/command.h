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

using MakeCommand = std::unique_ptr<Command>(CLI::App& app);
MakeCommand train_command, verify_command, plan_command, bench_command, tokenize_command, eval_command, report_command,
    generate_command, merge_command, examples_command, devices_command, list_command;

}  // namespace streambp
