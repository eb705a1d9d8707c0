// Shared by the tests of runs under mpirun.
#pragma once

#include "tests/commands.h"

namespace streambp {

inline const std::string kModelForRanks =
    " --family qwen3 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --mlp 48 --length 300 --batch 2 --sample 5 "
    "--eval-every 2 ";

class Processes : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    if (!STREAMBP_MPI) GTEST_SKIP() << "built without MPI";
    if (execute("--version > /dev/null", "mpirun").exit_code != 0) GTEST_SKIP() << "mpirun is not installed";
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    if (kSanitized) setenv("ASAN_OPTIONS", "detect_leaks=0", 1);  // MPI itself leaks
  }
  void TearDown() override {
    unsetenv("OMP_NUM_THREADS");
    unsetenv("ASAN_OPTIONS");
    Commands::TearDown();
  }

  static std::string ranks(int count, const std::string& program = binary()) {
    return "-n " + std::to_string(count) + " " + program + " ";
  }
  static Outcome run(const std::string& arguments) { return execute(arguments, "timeout -s KILL 150 mpirun"); }

  void expect_runs(int count, const std::string& arguments, const std::string& program = binary()) {
    const Outcome outcome = run(ranks(count, program) + arguments);
    ASSERT_EQ(outcome.exit_code, 0) << count << " ranks: " << arguments << "\n" << outcome.output;
  }
  void expect_refused_by_ranks(const std::string& arguments, const std::string& said) {
    const auto before = files();
    const Outcome outcome = run(arguments);
    EXPECT_NE(outcome.exit_code, 0) << outcome.output;
    EXPECT_NE(outcome.exit_code, 137) << "hangs: " << arguments;
    EXPECT_TRUE(contains(outcome.output, said)) << "expected: " << said << "\nsaid: " << outcome.output;
    EXPECT_EQ(files(), before) << arguments;
  }

  // The last checkpoints of two runs, and the losses of their steps, are equal.
  void expect_same_run(const std::string& a, const std::string& b) const {
    expect_same_checkpoint(newest_checkpoint(path(a)), newest_checkpoint(path(b)));
    for (const char* name : {"loss", "gradient_norm"}) EXPECT_EQ(metric(a, name), metric(b, name)) << a << ", " << b;
  }
};

}  // namespace streambp
