// What the operating system provides: files, memory, processors, and the limits of containers and batch systems.
//
// Code that only works on Linux is in this file only, with what other POSIX systems have instead.
#pragma once

#include <fcntl.h>
#include <omp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#endif

#include <bitset>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/error.h"

extern char** environ;  // not every system's headers declare it

namespace streambp {

namespace fs = std::filesystem;

// --- Files ---

// Owns a file descriptor.
struct Descriptor {
  int file = -1;

  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() { reset(); }
  void reset() {
    if (file >= 0) close(std::exchange(file, -1));
  }
};

// Whether a directory is in memory (tmpfs), so that its files save none.
inline bool is_in_memory([[maybe_unused]] const fs::path& directory) {
#ifdef __linux__
  constexpr auto kTmpfs = 0x01021994;
  struct statfs system {};
  return statfs(directory.c_str(), &system) == 0 && system.f_type == kTmpfs;
#else
  return false;
#endif
}

// TMPDIR, or /tmp. If /tmp is in memory, /var/tmp.
inline fs::path temporary_directory() {
  std::error_code error;
  const fs::path directory = fs::temp_directory_path(error);
  require(!error, "there is no directory for temporary files: ", error.message(),
          "; set TMPDIR to a directory with enough space");
  const bool chosen = std::getenv("TMPDIR") != nullptr;
  return !chosen && is_in_memory(directory) && access("/var/tmp", W_OK) == 0 ? "/var/tmp" : directory;
}

// A new file without a name, for reading and writing. It disappears with the process, even if that crashes.
inline void open_temporary_file(Descriptor& file, const fs::path& directory) {
  std::string path = (directory / "streambp-XXXXXX").string();  // mkostemp replaces the Xs
  file.file = mkostemp(path.data(), O_CLOEXEC);
  require(file.file >= 0, directory.string(), ": cannot create a temporary file here: ", std::strerror(errno),
          "; set TMPDIR, or for far memory --far, to another directory");
  unlink(path.c_str());
}

// The bytes that are free where a file is; 0 if that is unknown.
inline std::size_t free_space(int file) {
  struct statvfs system {};
  return fstatvfs(file, &system) == 0 ? static_cast<std::size_t>(system.f_bavail) * system.f_frsize : 0;
}

// Reserves space for the first `bytes` of a file. Where a file system cannot, they must at least be free now. Returns the
// error number, or 0.
inline int reserve_space(int file, std::size_t bytes) {
  int error = ENOSYS;
#ifdef __linux__
  do {
    error = fallocate(file, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
#endif
  if (error != EOPNOTSUPP && error != ENOSYS) return error;
  return bytes <= free_space(file) ? 0 : ENOSPC;
}

// Reads and writes the file without the page cache, if its file system allows that.
inline void bypass_page_cache(int file) {
#ifdef __linux__
  static_cast<void>(fcntl(file, F_SETFL, fcntl(file, F_GETFL) | O_DIRECT));
#elif defined(F_NOCACHE)
  static_cast<void>(fcntl(file, F_NOCACHE, 1));
#endif
}

// The time of the last write to a file.
inline timespec written_at(const struct stat& status) {
#ifdef __APPLE__
  return status.st_mtimespec;
#else
  return status.st_mtim;
#endif
}

// --- Memory ---

inline void use_huge_pages([[maybe_unused]] void* block, [[maybe_unused]] std::size_t bytes) {
#ifdef __linux__
  madvise(block, bytes, MADV_HUGEPAGE);
#endif
}

// Memory that is not used yet will be on the NUMA node of a device on the bus, where the system says which that is.
inline void place_near(const std::string& bus_address, void* data, std::size_t bytes) {
#ifdef __linux__
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + bus_address + "/numa_node") >> node;
  constexpr int most = 63;
  if (node < 0 || node >= most) return;
  const unsigned long nodes = 1ul << node;
  syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, &nodes, most, 0);
#else
  static_cast<void>(bus_address), static_cast<void>(data), static_cast<void>(bytes);
#endif
}

// What limits pinned memory here, and the remedy: "...; ". Empty if nothing is known.
inline std::string limit_of_pinned_memory(std::size_t pinned, std::size_t wanted, const fs::path& root = "/") {
  std::string kernel;
  std::getline(std::ifstream(root / "proc/version") >> std::ws, kernel);
  if (kernel.find("icrosoft") != std::string::npos)
    return "WSL allows only a part of its memory; raise memory= in .wslconfig, or ";
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool limits = pinned <= limit.rlim_cur && limit.rlim_cur < wanted;  // most drivers do not count against it
  if (limit.rlim_cur == RLIM_INFINITY || !limits) return "";
  return "ulimit -l allows " + std::to_string(limit.rlim_cur >> 20) + " MiB; raise it (in a container with --ulimit " +
         "memlock=-1), or ";
}

// Returns pages of a mapped file to the system. Later reads load them again.
inline void forget_pages(const void* data, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

// --- Linux control groups (cgroups), versions 1 and 2: limits set by containers, batch systems and systemd ---

// The cgroup directories of this process, innermost first. The limits of all of them apply.
struct ControlGroups {
  int version = 0;  // 0: none
  std::vector<fs::path> directories;
};

// Tests pass another `root` than /. Inside a container, /proc/self/cgroup may name a host path that is not mounted; the
// mount point itself is then the container's group.
inline ControlGroups control_groups(const std::string& controller, const fs::path& root = "/") {
  std::error_code ignored;
  const fs::path mount = root / "sys/fs/cgroup";
  ControlGroups groups;
  auto walk = [&](const fs::path& top, const std::string& path, int version) {
    if (!fs::is_directory(top, ignored)) return;
    groups.version = version;
    const bool outside = path.find("..") != std::string::npos;
    for (fs::path inside = outside ? "" : fs::path(path).relative_path(); !inside.empty();
         inside = inside.parent_path())
      if (fs::is_directory(top / inside, ignored)) groups.directories.push_back(top / inside);
    groups.directories.push_back(top);
  };
  // Lines are "number:controllers:path"; version 2 has the number 0 and no controllers.
  std::ifstream file(root / "proc/self/cgroup");
  std::string unified;
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) unified = path;
    if (("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    const bool joint = fs::is_directory(mount / controllers, ignored);
    walk(mount / (joint ? controllers : controller), path, 1);
    return groups;
  }
  if (!unified.empty() && fs::exists(mount / "cgroup.controllers", ignored)) walk(mount, unified, 2);
  return groups;
}

// The first number in a file; empty if the file says "max" or cannot be read.
inline std::optional<double> number_in(const fs::path& path) {
  std::ifstream file(path);
  double number;
  return file >> number ? std::optional(number) : std::nullopt;
}

// The sum of these fields in a file of "name value" lines.
inline double sum_of_fields(const fs::path& path, const std::vector<std::string>& names) {
  std::ifstream file(path);
  double sum = 0, value;
  for (std::string name; file >> name >> value;) sum += value * static_cast<double>(std::ranges::count(names, name));
  return sum;
}

// How much memory the process can still allocate before it swaps or is killed: MemAvailable, or less under a cgroup
// limit. Page cache counts as free, because the kernel drops it when memory runs short. Where there is no /proc, all of
// the machine's memory.
inline std::size_t available_memory(const fs::path& root = "/") {
  constexpr double unlimited = 0x1p62;
  double available = unlimited;
#ifndef __linux__
  available = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
#endif
  std::ifstream file(root / "proc/meminfo");
  for (std::string word; file >> word;) {
    if (double kib; word == "MemAvailable:" && file >> kib) available = kib * 1024;
  }
  if (const char* gib = std::getenv("STREAMBP_MEMORY_GIB")) {  // where the system reports less than there is
    char* end = nullptr;
    available = std::strtod(gib, &end) * 0x1p30;
    require(*end == 0 && available > 0 && available < unlimited, "STREAMBP_MEMORY_GIB: ", gib, " is not free GiB");
  }

  const ControlGroups groups = control_groups("memory", root);
  for (const fs::path& group : groups.directories) {
    auto within = [&](const char* limit_file, const char* used_file, const std::vector<std::string>& reclaimable) {
      const auto limit = number_in(group / limit_file);
      if (!limit || *limit >= unlimited) return;
      const double used = number_in(group / used_file).value_or(0);
      const double cache = sum_of_fields(group / "memory.stat", reclaimable);
      available = std::min(available, std::max(0.0, *limit - std::max(0.0, used - cache)));
    };
    if (groups.version == 2) {
      for (const char* limit : {"memory.max", "memory.high"})
        within(limit, "memory.current", {"inactive_file", "active_file", "slab_reclaimable"});
    } else {
      within("memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"});
    }
  }
  return static_cast<std::size_t>(available);
}

// What each of these processes can use of it for a step: not what holds code and libraries, which the kernel counts as
// cache, nor what data, metrics and the buffers of files will take.
inline std::size_t memory_for_steps(std::int64_t processes, const fs::path& root = "/") {
  std::size_t own = std::size_t{12} << 20;
  std::ifstream file(root / "proc/self/status");
  for (std::string word; file >> word;) {
    if (std::size_t kib; (word == "VmExe:" || word == "VmLib:") && file >> kib) own += kib * 1024;
  }
  const std::size_t all = available_memory(root) / static_cast<std::size_t>(processes);
  return all - std::min(all, own);
}

// The cgroup CPU quota, such as 1.5 CPUs; empty: no quota.
inline std::optional<double> cpu_quota(const fs::path& root = "/") {
  const ControlGroups groups = control_groups("cpu", root);
  std::optional<double> quota;
  for (const fs::path& group : groups.directories) {
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

// --- Processors and threads ---

// The processors that this process may use, by number. Only Linux binds processes to some of them.
using Processors = std::bitset<1024>;
inline Processors own_processors() {
  Processors own;
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = CPU_ISSET(i, &set);
#else
  for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN); ++i) own.set(static_cast<std::size_t>(i));
#endif
  return own;
}

// What the system says about a processor.
inline fs::path about_processor(std::size_t number, const fs::path& root) {
  return root / "sys/devices/system/cpu" / ("cpu" + std::to_string(number));
}

// The cores of these processors. Two processors of a core share its arithmetic units, and products use all of those.
inline int count_cores(const Processors& own, const fs::path& root = "/") {
  std::set<std::string> cores;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (!own[i]) continue;
    std::string processors = std::to_string(i);  // of this core: a list such as 3,67
    std::ifstream(about_processor(i, root) / "topology/thread_siblings_list") >> processors;
    cores.insert(processors);
  }
  return static_cast<int>(cores.size());
}

// The memory nodes (NUMA) of these processors.
inline std::bitset<64> memory_nodes(const Processors& own, const fs::path& root = "/") {
  std::bitset<64> nodes;
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (!own[i]) continue;
    std::error_code ignored;
    for (std::size_t n = 0; n < nodes.size(); ++n)
      if (fs::exists(about_processor(i, root) / ("node" + std::to_string(n)), ignored)) nodes.set(n);
  }
  return nodes;
}

// Spreads the pages of new memory over the memory nodes of this process, unless it was started with another policy
// (numactl). Any thread may write a page first and others read it, so a page has no best node, but all nodes together
// have more bandwidth than one. If it fails, nothing changes.
inline void spread_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef __linux__
  const std::bitset<64> nodes = memory_nodes(own_processors());
  const unsigned long mask = nodes.to_ulong();
  int policy = -1;
  syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0);
  if (nodes.count() > 1 && policy == MPOL_DEFAULT)
    syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, &mask, 8 * sizeof mask + 1, 0);
#endif
}

// The number of threads for a quota, rounded to nearest: with one thread too many, all wait for the throttled one.
inline int threads_for(std::optional<double> quota, int at_most) {
  if (!quota || *quota >= at_most) return at_most;
  return std::max(1, static_cast<int>(std::lround(*quota)));
}

// A thread for each core that the CPU affinity and the quota allow. If OpenMP binds threads, this one is bound already,
// and the affinity says nothing of the others. OMP_NUM_THREADS overrides all, up to a number that libgomp can start.
inline void choose_threads() {
  constexpr int most = 4096;
  int threads = omp_get_max_threads();
  if (!std::getenv("OMP_NUM_THREADS")) {
    const Processors own = own_processors();  // none: unknown
    if (omp_get_proc_bind() == omp_proc_bind_false && own.any()) threads = std::min(threads, count_cores(own));
    threads = threads_for(cpu_quota(), threads);
  }
  omp_set_num_threads(std::min(most, threads));
}

// How often a thread spins at a barrier before it sleeps. libgomp's default of 300,000 takes milliseconds: when another
// process occupies a core, all threads spin while the thread on that core cannot run.
inline constexpr const char* kSpinCount = "2000";

// libgomp reads GOMP_SPINCOUNT when it is loaded, before main, so the program sets it and executes itself again. It does
// not if the user has set a wait policy, if there is no /proc, or if threads are bound to CPUs: libgomp has then bound
// this thread to one CPU, and the new program would see only that CPU. Clang's libomp reads its own setting later.
inline void limit_spinning([[maybe_unused]] char** argv) {
  for (const char* chosen : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
    if (std::getenv(chosen)) return;
#ifdef __clang__
  setenv("KMP_BLOCKTIME", "1", 0);  // milliseconds
#elif defined(__linux__)
  if (getauxval(AT_BASE) == 0) return;  // started as "ld.so streambp": /proc/self/exe is ld.so
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  if (length <= 0) return;
  program[length] = '\0';
  setenv("GOMP_SPINCOUNT", kSpinCount, 1);
  execv(program, argv);
#endif
}

}  // namespace streambp
