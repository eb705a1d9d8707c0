// Limits of the machine: control groups, CPU quotas, standard descriptors, signals, and room for temporary files.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include "commands/interruption.h"
#include "commands/process.h"
#include "data/files/config.h"
#include "kernels/base/system.h"
#include "memory/offloaded_weights.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A root directory with /proc and /sys/fs/cgroup as the test writes them.
class MachineLimits : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    for (const int number : {SIGINT, SIGTERM, SIGHUP})
      ::signal(number, SIG_DFL);  // a job in the background ignores them
    write("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable:    8388608 kB\nBuffers: 3 kB\n");
  }
  void write_bytes(const std::string& name, std::size_t bytes) { write(name, std::to_string(bytes) + "\n"); }

  const std::filesystem::path& root = dir;
};

TEST_F(MachineLimits, MemoryWithoutGroupsIsThatOfTheMachine) {
  EXPECT_EQ(available_memory(root), 8192 * kMiB);
  EXPECT_GT(available_memory(), 0u);
  setenv("STREAMBP_MEMORY_GIB", "1.5", 1);
  EXPECT_EQ(available_memory(root), 1536 * kMiB) << "the user knows better";
  setenv("STREAMBP_MEMORY_GIB", "much", 1);
  EXPECT_ERROR(available_memory(root), "STREAMBP_MEMORY_GIB: much is not free GiB");
  unsetenv("STREAMBP_MEMORY_GIB");
  std::filesystem::remove_all(root / "proc");
  EXPECT_EQ(available_memory(root), std::size_t{1} << 62);
}

TEST_F(MachineLimits, OfPinnedMemoryAreNamed) {
  write("proc/version", "Linux version 6.6 (gcc 13)\n");
  rlimit limit{}, usual{};
  getrlimit(RLIMIT_MEMLOCK, &usual);
  limit = {std::min<rlim_t>(usual.rlim_max, 1 << 20), usual.rlim_max};
  setrlimit(RLIMIT_MEMLOCK, &limit);
  EXPECT_EQ(limit_of_pinned_memory(0, 1000, root), "");
  EXPECT_EQ(limit_of_pinned_memory(3 << 20, 5 << 20, root), "");
  EXPECT_TRUE(contains(limit_of_pinned_memory(0, 5 << 20, root), "ulimit -l allows "));
  setrlimit(RLIMIT_MEMLOCK, &usual);
  write("proc/version", "Linux version 5.15.0-microsoft-standard-WSL2 (gcc 11)\n");
  EXPECT_TRUE(contains(limit_of_pinned_memory(0, 1000, root), "raise memory= in .wslconfig"));
}

TEST_F(MachineLimits, MemoryOfVersion2) {
  write("proc/self/cgroup", "0::/jobs/mine\n");
  write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
  write("sys/fs/cgroup/jobs/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/mine/memory.max", "max\n");
  EXPECT_EQ(available_memory(root), 8192 * kMiB);

  write_bytes("sys/fs/cgroup/jobs/mine/memory.max", 300 * kMiB);
  EXPECT_EQ(available_memory(root), 300 * kMiB);
  write_bytes("sys/fs/cgroup/jobs/mine/memory.current", 200 * kMiB);
  EXPECT_EQ(available_memory(root), 100 * kMiB);
  // page cache and free slabs are reclaimable; shared memory is not
  write("sys/fs/cgroup/jobs/mine/memory.stat",
        "anon 1\nfile 104857600\nshmem 4194304\ninactive_file 62914560\n"
        "active_file 31457280\nslab_reclaimable 1048576\nslab 5242880\n");
  EXPECT_EQ(available_memory(root), 191 * kMiB);
  write_bytes("sys/fs/cgroup/jobs/mine/memory.high", 250 * kMiB);
  EXPECT_EQ(available_memory(root), 141 * kMiB);
  // a limit of an outer group applies too
  write_bytes("sys/fs/cgroup/jobs/memory.max", 1000 * kMiB);
  write_bytes("sys/fs/cgroup/jobs/memory.current", 950 * kMiB);
  EXPECT_EQ(available_memory(root), 50 * kMiB);
  write_bytes("sys/fs/cgroup/jobs/memory.current", 1001 * kMiB);
  EXPECT_EQ(available_memory(root), 0u);
}

TEST_F(MachineLimits, MemoryOfVersion1) {
  write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/jobs/mine\n3:cpu,cpuacct:/\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/jobs/mine/memory.limit_in_bytes", "314572800\n");
  write("sys/fs/cgroup/memory/jobs/mine/memory.usage_in_bytes", "209715200\n");
  write("sys/fs/cgroup/memory/jobs/mine/memory.stat",
        "inactive_file 1\ntotal_inactive_file 52428800\n"
        "total_active_file 10485760\nhierarchical_memory_limit 314572800\n");
  EXPECT_EQ(available_memory(root), 160 * kMiB);
}

// Without a cgroup namespace, a container sees the host's path and only its own group's files.
TEST_F(MachineLimits, MemoryInAContainer) {
  write("proc/self/cgroup", "4:memory:/docker/0123abcd\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "314572800\n");
  EXPECT_EQ(available_memory(root), 300 * kMiB);
  write("proc/self/cgroup", "0::/../../outside\n");
  write("sys/fs/cgroup/cgroup.controllers", "memory\n");
  write("sys/fs/cgroup/memory.max", "104857600\n");
  EXPECT_EQ(available_memory(root), 100 * kMiB);
}

TEST_F(MachineLimits, CodeAndDataTakeMemoryFromSteps) {
  EXPECT_EQ(memory_for_steps(1, root), (8192 - 12) * kMiB);
  write("proc/self/status", "Name:\tstreambp\nVmRSS:\t31776 kB\nVmExe:\t5120 kB\nVmLib:\t6144 kB\nVmPTE:\t124 kB\n");
  write("proc/self/cgroup", "4:memory:/docker/0123abcd\n");
  write_bytes("sys/fs/cgroup/memory/memory.limit_in_bytes", 64 * kMiB);
  EXPECT_EQ(memory_for_steps(1, root), (64 - 12 - 11) * kMiB);
  EXPECT_EQ(memory_for_steps(2, root), (32 - 12 - 11) * kMiB);
  EXPECT_EQ(memory_for_steps(4, root), 0u);
  EXPECT_LT(memory_for_steps(1), available_memory());
}

TEST_F(MachineLimits, DamagedGroupFilesLimitNothing) {
  write("sys/fs/cgroup/cgroup.controllers", "memory\n");
  write("sys/fs/cgroup/jobs/memory.max", "plenty\n");
  for (const char* groups : {"", "nonsense\n", "::\n", "0:\n", "0::/jobs\n", "4:memory:\n"}) {
    write("proc/self/cgroup", groups);
    EXPECT_EQ(available_memory(root), 8192 * kMiB) << groups;
    EXPECT_FALSE(cpu_quota(root)) << groups;
  }
}

TEST_F(MachineLimits, CpuQuotas) {
  EXPECT_FALSE(cpu_quota(root));
  write("proc/self/cgroup", "0::/jobs/mine\n");
  write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
  write("sys/fs/cgroup/jobs/mine/cpu.max", "max 100000\n");
  EXPECT_FALSE(cpu_quota(root));
  write("sys/fs/cgroup/jobs/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpu_quota(root), 4);
  write("sys/fs/cgroup/jobs/mine/cpu.max", "150000 100000\n");
  EXPECT_EQ(cpu_quota(root), 1.5);

  write("proc/self/cgroup", "2:cpu,cpuacct:/batch\n0::/jobs/mine\n");
  write("sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_period_us", "100000\n");
  EXPECT_FALSE(cpu_quota(root));
  write("sys/fs/cgroup/cpu,cpuacct/batch/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(cpu_quota(root), 0.5);
}

TEST_F(MachineLimits, CoresAndMemoryNodesOfProcessors) {
  Processors own;
  for (const std::size_t i : {0, 1, 2, 5, 9}) own.set(i);
  EXPECT_EQ(count_cores(own, root), 5);  // nothing is known
  for (const int i : {0, 1, 2, 3}) {
    for (const int processor : {i, i + 4}) {
      const std::string about = "sys/devices/system/cpu/cpu" + std::to_string(processor);
      write(about + "/topology/thread_siblings_list", std::to_string(i) + "," + std::to_string(i + 4) + "\n");
      write(about + "/node" + std::to_string(i / 2) + "/cpulist", "");
    }
  }
  EXPECT_EQ(count_cores(own, root), 4);  // 0, 1 with 5, 2, 9
  EXPECT_EQ(memory_nodes(own, root).to_ulong(), 3u);
  EXPECT_EQ(memory_nodes(Processors(0b100010), root).to_ulong(), 1u);
}

TEST_F(MachineLimits, ThreadsForAQuota) {
  EXPECT_EQ(threads_for(std::nullopt, 8), 8);
  EXPECT_EQ(threads_for(16, 8), 8);
  EXPECT_EQ(threads_for(4, 8), 4);
  EXPECT_EQ(threads_for(1.5, 8), 2);
  EXPECT_EQ(threads_for(1.2, 8), 1);
  EXPECT_EQ(threads_for(0.1, 8), 1);
}

TEST_F(MachineLimits, TheFirstSignalIsRecordedAndTheSecondKills) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    auto raised = [&](int times) {
      return exit_code_of([&] {
        close(2);
        Interruption interruption;
        if (Interruption::signal() != 0) return 1;
        for (int i = 0; i < times; ++i) raise(signal);
        return Interruption::signal() == signal ? 42 : 2;
      });
    };
    EXPECT_EQ(raised(1), 42);
    EXPECT_EQ(raised(2), -signal);
  }
  EXPECT_EQ(exit_code_of([] {  // another one ends it too
              close(2);
              Interruption interruption;
              raise(SIGINT), raise(SIGTERM);
              return 0;
            }),
            -SIGTERM);
}

TEST_F(MachineLimits, IgnoredSignalsStayIgnored) {
  EXPECT_EQ(exit_code_of([] {
              ::signal(SIGHUP, SIG_IGN);  // nohup
              Interruption interruption;
              raise(SIGHUP);
              return Interruption::signal();
            }),
            0);
  EXPECT_EQ(exit_code_of([] {  // and afterwards signals do what they did before
              { Interruption interruption; }
              raise(SIGTERM);
              return 0;
            }),
            -SIGTERM);
}

// The weights fit into the buffer of the file, so only flushing finds that they cannot be written.
TEST_F(MachineLimits, OffloadedWeightsNeedRoomInTheTemporaryDirectory) {
  const Config c = make_config("llama", {11, 8, 1, 2, 1, 4, 12, 0, false});
  Cpu dev(std::size_t{1} << 20);
  Model<float> model{c, Tensors<float>(c)};
  allocate(dev, table(c, model.weights), Kind::weights);
  initialise(dev, model, 1);
  float& weight = model.weights.embedding.tokens(0, 0);
  auto error = [&] {
    const float before = weight;
    try {
      OffloadedWeights<Cpu, float> present(dev, model);
      weight = 7;
      present.restore();
      return std::string(weight == before ? "" : "other weights came back");
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };

  EXPECT_EQ(exit_code_of([&] {
              setenv("TMPDIR", root.c_str(), 1);
              const auto written = std::filesystem::last_write_time(root);
              if (!error().empty() || std::filesystem::last_write_time(root) == written) return 1;
              std::filesystem::remove_all(root / "proc");
              return std::filesystem::is_empty(root) ? 0 : 2;
            }),
            0);
  EXPECT_EQ(exit_code_of([&] {
              setenv("TMPDIR", (root / "nowhere").c_str(), 1);
              return contains(error(), "set TMPDIR") ? 0 : 1;
            }),
            0);
  EXPECT_EQ(exit_code_of([&] {
              setenv("TMPDIR", root.c_str(), 1);
              const FileSizeLimit limit(100);
              const int next = dup(0);
              close(next);
              const std::string said = error();
              if (!contains(said, "File too large") || !contains(said, "set TMPDIR")) return 1;
              return dup(0) == next ? 0 : 2;  // the file is closed
            }),
            0);
}

}  // namespace
}  // namespace streambp
