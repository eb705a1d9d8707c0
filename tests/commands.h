// Shared by tests of the command line: running the program, and reading what it wrote.
#pragma once

#include <sys/wait.h>

#include "data/files/checkpoint.h"
#include "tests/support.cuh"
#include "tests/temporary.h"

namespace streambp {
struct Outcome {
  int exit_code;
  std::string output;  // standard output and error together
};

// The program as built, unless the environment names another one.
inline std::string binary() {
  const char* elsewhere = std::getenv("STREAMBP_BINARY");
  return elsewhere ? elsewhere : STREAMBP_BINARY;
}

inline Outcome execute(const std::string& arguments, const std::string& program = binary()) {
  const std::string command = program + " " + arguments + " 2>&1";
  Outcome outcome{-1, ""};
  FILE* pipe = popen(command.c_str(), "r");
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.output.append(buffer, n);
  const int status = pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

// A temporary directory for each test, and a cache of tokens that is not the user's.
class Commands : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    cache_ = dir.string() + "_cache";
    setenv("XDG_CACHE_HOME", cache_.c_str(), 1);
  }
  void TearDown() override {
    TemporaryDirectory::TearDown();
    fs::remove_all(cache_);
  }

  void expect_ok(const std::string& arguments) {
    const Outcome outcome = execute(arguments);
    ASSERT_EQ(outcome.exit_code, 0) << arguments << "\n" << outcome.output;
  }

  // The command must fail with exit code 2, print `said`, and leave no new files.
  void expect_refused(const std::string& arguments, const std::string& said) {
    const auto before = files();
    const Outcome outcome = execute(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << "\n" << outcome.output;
    EXPECT_TRUE(contains(outcome.output, said)) << arguments << "\nexpected: " << said << "\nsaid: " << outcome.output;
    EXPECT_EQ(files(), before) << arguments;
  }

  // The complete lines of a run's metrics.jsonl.
  std::vector<Json> metrics(const std::string& run) const {
    std::vector<Json> lines;
    std::ifstream file(path(run + "/metrics.jsonl"));
    for (std::string line; std::getline(file, line) && !file.eof();) lines.push_back(Json::parse(line));
    return lines;
  }
  // The values of one metric.
  std::vector<double> metric(const std::string& run, const char* name) const {
    std::vector<double> values;
    for (const Json& line : metrics(run))
      if (line.contains(name)) values.push_back(line[name]);
    return values;
  }

 private:
  fs::path cache_;
};

}  // namespace streambp
