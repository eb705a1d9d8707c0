// Shared by tests of the command line: running the program, and reading what it wrote.
#pragma once

#include <signal.h>

#include "data/files/checkpoint.h"
#include "tests/support.cuh"

namespace streambp {

struct Outcome {
  std::string command;
  int exit_code;
  std::string output;  // standard output and error together
};
inline std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << outcome.command << "\nended with " << outcome.exit_code << " and printed:\n" << outcome.output;
}

// The program as built, unless the environment names another one.
inline std::string binary() {
  const char* elsewhere = std::getenv("STREAMBP_BINARY");
  return elsewhere ? elsewhere : STREAMBP_BINARY;
}

// Starts a shell command; its output goes to a pipe.
inline FILE* start_shell(const std::string& command) { return popen(("exec 2>&1; " + command).c_str(), "r"); }

inline Outcome finish_shell(FILE* pipe, const std::string& command) {
  Outcome outcome{command, -1, ""};
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.output.append(buffer, n);
  const int status = pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

inline Outcome shell(const std::string& command) { return finish_shell(start_shell(command), command); }
inline Outcome execute(const std::string& arguments, const std::string& program = binary()) {
  return shell(program + " " + arguments);
}

// Starts a shell command in the background, with its signals as in a shell; its output goes to a descriptor, if one is given.
inline pid_t in_background(const std::string& command, int output = -1) {
  const pid_t child = fork();
  if (child != 0) return child;
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(number, SIG_DFL);
  if (output >= 0) dup2(output, 1), dup2(output, 2);
  execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
  _exit(127);
}

// The command must have ended with this exit code and have printed all of `said`. Returns what it printed.
template <class... Said>
std::string expect_outcome(int exit_code, const Outcome& outcome, const Said&... said) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome;
  for (const std::string& part : std::initializer_list<std::string>{std::string(said)...})
    EXPECT_PRED2(contains, outcome.output, part) << outcome;
  return outcome.output;
}

// The complete lines of a file.
inline std::vector<Json> json_lines(const std::string& path) {
  std::vector<Json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line) && !file.eof();) lines.push_back(Json::parse(line));
  return lines;
}

// A temporary directory for each test, in which it runs, and a cache of tokens that is not the user's.
class Commands : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    fs::current_path(dir);
    cache_ = dir.string() + "_cache";
    setenv("XDG_CACHE_HOME", cache_.c_str(), 1);
  }
  void TearDown() override {
    fs::current_path("/");
    TemporaryDirectory::TearDown();
    fs::remove_all(cache_);
  }

  template <class... Said>
  static std::string expect_ok(const std::string& arguments, const Said&... said) {
    return expect_outcome(0, execute(arguments), said...);
  }
  template <class... Said>
  static std::string expect_failed(const std::string& arguments, const Said&... said) {
    return expect_outcome(2, execute(arguments), said...);
  }
  // The command fails and leaves no new files.
  template <class... Said>
  std::string expect_refused(const std::string& arguments, const Said&... said) const {
    const auto before = files();
    const std::string output = expect_failed(arguments, said...);
    EXPECT_EQ(files(), before) << arguments;
    return output;
  }

  static std::vector<Json> metrics(const std::string& run) { return json_lines(run + "/metrics.jsonl"); }
  // The last step that the run has reported.
  static Index steps(const std::string& run) {
    const std::vector<Index> all = steps_with(run, "loss");
    return all.empty() ? 0 : all.back();
  }
  static bool reaches(const std::string& run, Index step) {
    return eventually([&] { return steps(run) >= step; });
  }
  // The steps in which a metric was reported.
  static std::vector<Index> steps_with(const std::string& run, const char* name) {
    std::vector<Index> steps;
    for (const Json& line : metrics(run))
      if (line.contains(name)) steps.push_back(line["step"]);
    return steps;
  }
  // The values of one metric.
  static std::vector<double> metric(const std::string& run, const char* name) {
    std::vector<double> values;
    for (const Json& line : metrics(run))
      if (line.contains(name)) values.push_back(line[name]);
    return values;
  }
  // The last checkpoints of two runs, and the losses of their steps, are equal.
  static void expect_same_run(const std::string& a, const std::string& b) {
    expect_same_checkpoint(newest_checkpoint(a), newest_checkpoint(b));
    for (const char* name : {"loss", "gradient_norm"}) EXPECT_EQ(metric(a, name), metric(b, name)) << a << ", " << b;
  }

 private:
  fs::path cache_;
};

}  // namespace streambp
