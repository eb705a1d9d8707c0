// Shared by tests of the command line: running programs, and a temporary directory per test.
#pragma once

#include <sys/wait.h>

#include "data/files/checkpoint.cuh"
#include "tests/support.cuh"

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

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A temporary directory for each test.
class Commands : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    dir = fs::path(testing::TempDir()) / (std::string("streambp_") + info->name() + "_" + std::to_string(getpid()));
    fs::remove_all(dir);
    fs::create_directories(dir);
  }
  void TearDown() override { fs::remove_all(dir); }

  std::string path(const std::string& name) const { return (dir / name).string(); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(dir))
      names.push_back(fs::relative(entry.path(), dir).string());
    std::sort(names.begin(), names.end());
    return names;
  }

  // The command must fail with exit code 2, print `said`, and leave no new files.
  void expect_refused(const std::string& arguments, const std::string& said) {
    const auto before = files();
    const Outcome outcome = execute(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments << "\n" << outcome.output;
    EXPECT_TRUE(contains(outcome.output, said)) << arguments << "\nexpected: " << said << "\nsaid: " << outcome.output;
    EXPECT_EQ(files(), before) << arguments;
  }

  fs::path dir;
};

}  // namespace streambp
