// Shared by the tests of runs under mpirun.
#pragma once

#include "tests/commands.h"

namespace streambp {

inline const std::string kModelForRanks =
    " --family qwen3 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --mlp 48 --length 300 --batch 2 --sample 5 "
    "--eval-every 2 ";

// Tests that start mpirun are skipped without it.
template <class Fixture>
class WithMpi : public Fixture {
 protected:
  void SetUp() override {
    Fixture::SetUp();
    if (!STREAMBP_MPI) GTEST_SKIP() << "built without MPI";
    if (execute("--version > /dev/null", "mpirun").exit_code != 0) GTEST_SKIP() << "mpirun is not installed";
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                             "OMPI_MCA_rmaps_base_oversubscribe", "OMPI_MCA_mpi_yield_when_idle", "OMP_NUM_THREADS"})
      setenv(name, "1", 1);
    if (kSanitized) setenv("ASAN_OPTIONS", "detect_leaks=0", 1);  // MPI itself leaks
  }
  void TearDown() override {
    unsetenv("OMP_NUM_THREADS");
    unsetenv("ASAN_OPTIONS");
    Fixture::TearDown();
  }
};

class Processes : public WithMpi<Commands> {
 protected:
  static std::string ranks(int count, const std::string& program = binary()) {
    return "-n " + std::to_string(count) + " " + program + " ";
  }
  static Outcome run(const std::string& arguments) { return execute(arguments, "timeout -s KILL 150 mpirun"); }

  void expect_runs(int count, const std::string& arguments, const std::string& program = binary()) {
    expect_outcome(0, run(ranks(count, program) + arguments));
  }
  void expect_refused_by_ranks(const std::string& arguments, const std::string& said) {
    const auto before = files();
    expect_all_fail(run(arguments), said);
    EXPECT_EQ(files(), before) << arguments;
  }
  // No rank waits for another one that has failed.
  template <class... Said>
  static void expect_all_fail(const Outcome& outcome, const Said&... said) {
    EXPECT_NE(outcome.exit_code, 0) << outcome;
    EXPECT_NE(outcome.exit_code, 137) << "hangs: " << outcome;
    expect_outcome(outcome.exit_code, outcome, said...);
  }
};

}  // namespace streambp
