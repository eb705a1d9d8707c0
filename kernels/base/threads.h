// OpenMP threads on a shared machine: no more threads than the process has CPUs, and no long spinning.
#pragma once

#include <omp.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <optional>

#include "kernels/base/control_groups.h"

namespace streambp {

// How often a thread spins at a barrier before it sleeps. libgomp's default of 300,000 takes milliseconds: when another
// process occupies a core, all threads spin while the thread on that core cannot run.
inline constexpr const char* kSpinCount = "2000";

// The cgroup CPU quota, such as 1.5 CPUs; empty: no quota.
inline std::optional<double> cpu_quota(const std::filesystem::path& root = "/") {
  const ControlGroups groups = control_groups("cpu", root);
  std::optional<double> quota;
  for (const std::filesystem::path& group : groups.directories) {
    double time = -1, period = 0;
    if (groups.version == 2) {
      std::ifstream file(group / "cpu.max");  // "150000 100000", or "max 100000"
      if (!(file >> time >> period)) continue;
    } else {
      time = number_in(group / "cpu.cfs_quota_us").value_or(-1);
      period = number_in(group / "cpu.cfs_period_us").value_or(0);
    }
    if (time > 0 && period > 0) quota = std::min(quota.value_or(INFINITY), time / period);
  }
  return quota;
}

// The number of threads for a quota, rounded to nearest: with one thread too many, all wait for the throttled one.
inline int threads_for(std::optional<double> quota, int at_most) {
  if (!quota || *quota >= at_most) return at_most;
  return std::max(1, static_cast<int>(std::lround(*quota)));
}

// libgomp already respects the CPU affinity. OMP_NUM_THREADS overrides both, up to a number that libgomp can start.
inline void respect_cpu_quota() {
  constexpr int most = 4096;
  const bool chosen = std::getenv("OMP_NUM_THREADS");
  omp_set_num_threads(std::min(most, chosen ? omp_get_max_threads() : threads_for(cpu_quota(), omp_get_max_threads())));
}

// libgomp reads GOMP_SPINCOUNT when it is loaded, before main, so the program sets it and executes itself again. It does
// not if the user has set a wait policy, if there is no /proc, or if threads are bound to CPUs: libgomp has then bound
// this thread to one CPU, and the new program would see only that CPU.
inline void limit_spinning(char** argv) {
  for (const char* chosen : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
    if (std::getenv(chosen)) return;
  if (getauxval(AT_BASE) == 0) return;  // started as "ld.so streambp": /proc/self/exe is ld.so
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  if (length <= 0) return;
  program[length] = '\0';
  setenv("GOMP_SPINCOUNT", kSpinCount, 1);
  execv(program, argv);
}

}  // namespace streambp
