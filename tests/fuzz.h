// Fuzzing: a parser reads millions of damaged files. It may throw an Error; any other exception, a crash, a hang, or
// too much memory is a failure.
//
// A case is a number that determines the seed and the damage. To run a failing case alone:
//   STREAMBP_FUZZ_FIRST=number STREAMBP_FUZZ_CASES=1 build-sanitize/test_fuzz --gtest_filter=...
//
// Cases run one after another in a child process. It reports the current case to its parent through shared memory, so
// that the parent knows which case failed even after a crash.
#pragma once

#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "kernels/base/error.h"
#include "kernels/base/matrix.cuh"
#include "tests/damage.h"

namespace streambp {

// Memory from operator new. The fuzzing program defines the operators with these functions.
struct Heap {
  static inline std::size_t live = 0, peak = 0, most = SIZE_MAX;

  // Returns null beyond the limit.
  static void* allocate(std::size_t bytes) {
    void* block = live + bytes > most ? nullptr : std::malloc(bytes);
    if (!block) return nullptr;
    live += malloc_usable_size(block);
    peak = std::max(peak, live);
    return block;
  }
  static void release(void* block) {
    live -= malloc_usable_size(block);
// The compiler sees operator new paired with free, and does not see that allocate() uses malloc.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
    std::free(block);
#pragma GCC diagnostic pop
  }
};

struct FuzzTarget {
  std::string name;
  std::vector<Files> seeds;
  std::function<void(const Files&)> run;
};

struct FuzzLimits {
  std::size_t bytes = std::size_t{64} << 20;  // of memory in a case
  double seconds = 60;                        // of processor time without progress
};

struct FuzzReport {
  Index cases = 0, accepted = 0;  // accepted: without an error
  double seconds = 0, slowest = 0;
  Index slowest_case = 0, largest_case = 0;
  std::size_t largest = 0, resident = 0;  // memory of a case, and of the process
  std::string failure;                    // empty: no failure
};

// Checks a promise of the parser about accepted input.
inline void ensure(bool condition, const char* promise) {
  if (!condition) throw std::logic_error(std::string("accepted, but false: ") + promise);
}

class Fuzzer {
 public:
  explicit Fuzzer(const FuzzTarget& target, const FuzzLimits& limits = {}) : target_(target), limits_(limits) {
    void* block =
        mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    require(block != MAP_FAILED, "out of memory");
    progress_ = new (block) Progress;
  }
  ~Fuzzer() { munmap(progress_, sizeof(Progress)); }
  Fuzzer(const Fuzzer&) = delete;

  FuzzReport run(Index first, Index count) {
    new (progress_) Progress;
    const auto start = std::chrono::steady_clock::now();
    std::fflush(nullptr);
    const pid_t child = fork();
    require(child >= 0, "cannot start a process");
    if (child == 0) {
      work(first, first + count);
      _exit(0);  // without the parent's exit handlers
    }
    FuzzReport report;
    report.failure = watch(child, report);
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const Progress& p = *progress_;
    if (p.failure[0]) report.failure = p.failure;
    if (!report.failure.empty()) {
      report.failure = target_.name + ", case " + std::to_string(p.at) + ": " + report.failure;
    }
    report.cases = p.done, report.accepted = p.accepted, report.slowest = p.slowest, report.largest = p.largest;
    report.slowest_case = p.slowest_case, report.largest_case = p.largest_case;
    return report;
  }

  Files files(Index number) const { return Damage(target_.seeds, mix(static_cast<std::uint64_t>(number))).make(); }

 private:
  struct Progress {
    std::atomic<Index> at = -1;
    Index done = 0, accepted = 0, slowest_case = -1, largest_case = -1;
    double slowest = 0;
    std::size_t largest = 0;
    char failure[1000] = "";
  };

  // Processor time, so that other programs do not matter.
  static double now(clockid_t clock = CLOCK_PROCESS_CPUTIME_ID) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  void work(Index first, Index end) {
    Progress& p = *progress_;
    for (Index i = first; i < end; ++i) {
      p.at = i;
      const Files files = this->files(i);
      const double start = now();
      const std::size_t before = Heap::live;
      Heap::peak = before, Heap::most = before + limits_.bytes;
      try {
        target_.run(files);
        ++p.accepted;
      } catch (const Error&) {
      } catch (const std::exception& error) {
        std::snprintf(p.failure, sizeof p.failure, "%s", error.what());
      } catch (...) {
        std::snprintf(p.failure, sizeof p.failure, "throws something other than a std::exception");
      }
      Heap::most = SIZE_MAX;
      if (p.failure[0]) _exit(1);
      const double seconds = now() - start;
      if (seconds > p.slowest) p.slowest = seconds, p.slowest_case = i;
      if (Heap::peak - before > p.largest) p.largest = Heap::peak - before, p.largest_case = i;
      ++p.done;
    }
  }

  // Waits for the child. Returns how it failed; empty if it did not.
  std::string watch(pid_t child, FuzzReport& report) const {
    clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
    clock_getcpuclockid(child, &clock);
    Index at = -1;
    double since = 0, begun = now(CLOCK_MONOTONIC);
    bool hangs = false;
    int status = 0;
    rusage usage{};
    while (wait4(child, &status, WNOHANG, &usage) == 0) {
      if (progress_->at != at) at = progress_->at, since = now(clock), begun = now(CLOCK_MONOTONIC);
      const bool sleeps = now(CLOCK_MONOTONIC) - begun > 20 * limits_.seconds;
      if (sleeps || now(clock) - since > limits_.seconds) {
        kill(child, SIGKILL);
        hangs = true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    report.resident = static_cast<std::size_t>(usage.ru_maxrss) << 10;
    if (hangs) return "makes no progress";
    if (WIFSIGNALED(status)) return "dies of signal " + std::to_string(WTERMSIG(status));
    if (WEXITSTATUS(status) != 0) return "ends with exit code " + std::to_string(WEXITSTATUS(status));
    return "";
  }

  const FuzzTarget& target_;
  const FuzzLimits limits_;
  Progress* progress_;
};

// A directory for the files of a case.
class CaseFolder {
 public:
  explicit CaseFolder(std::filesystem::path path) : path_(std::move(path)) {
    std::filesystem::create_directories(path_);
  }
  ~CaseFolder() { std::filesystem::remove_all(path_); }
  CaseFolder(const CaseFolder&) = delete;

  // Replaces the directory's contents.
  const std::filesystem::path& operator()(const Files& files) const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (!files.contains(entry.path().filename())) std::filesystem::remove(entry.path());
    }
    for (const auto& [name, contents] : files) {
      std::ofstream(path_ / name, std::ios::binary | std::ios::trunc) << contents;
    }
    return path_;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace streambp
