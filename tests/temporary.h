// For most tests: a temporary directory for each test, and errors as text.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "data/files/files.h"

namespace streambp {

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The message of the Error that `action` throws, or of one kind of errors; empty if it throws none.
template <class Kind = Error, class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Kind& error) {
    return error.what();
  }
  return "";
}
#define EXPECT_ERROR(action, said) EXPECT_PRED2(contains, error_of([&] { action; }), said)

// Waits for a child process. Returns its exit code, or -n if signal n killed it.
inline int exit_code(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
// Runs f in a child process.
template <class F>
int exit_code_of(F&& f) {
  const pid_t child = fork();
  if (child == 0) _exit(f());
  return exit_code(child);
}

// Waits until the condition holds; false after a minute.
template <class Condition>
bool eventually(const Condition& condition) {
  for (int i = 0; i < 6000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

// Simulates a full disk: during its lifetime, no file can grow beyond a limit.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_;
};

class TemporaryDirectory : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '_');  // in the names of parametrised tests
    dir = std::filesystem::path(testing::TempDir()) / ("streambp_" + name + "_" + std::to_string(getpid()));
    std::filesystem::remove_all(dir);
    std::filesystem::create_directories(dir);
  }
  void TearDown() override { std::filesystem::remove_all(dir); }

  std::string path(const std::string& name) const { return (dir / name).string(); }
  std::filesystem::path write(const std::string& name, const std::string& contents) const {
    std::filesystem::create_directories((dir / name).parent_path());
    write_file_atomically(dir / name, contents);
    return dir / name;
  }
  // Everything in the directory, by name.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir))
      names.push_back(std::filesystem::relative(entry.path(), dir).string());
    std::sort(names.begin(), names.end());
    return names;
  }

  std::filesystem::path dir;
};

}  // namespace streambp
