// scripts/gpu_day.sh, with shell scripts for the programs: a step that hangs, crashes or is wrong costs only itself.
#include "tests/commands.h"

namespace streambp {
namespace {

class GpuDay : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    for (const std::string script : {"gpu_day.sh", "gpu_steps.sh"})
      write("kit/scripts/" + script, read_file(STREAMBP_SOURCE "/scripts/" + script));
    add_program(
        "streambp",
        R"sh([ -z "$(printf '%s\n' "$@" | grep '^--' | sort | uniq -d)" ] || { echo "an option twice: $*"; exit 2; }
case "$1" in
  verify) [ -z "$WRONG" ] || { echo "the bits differ"; exit 1; } ;;
  bench) echo "stream 4096  0.123" ;;
esac
)sh");
    // It has one test of each outcome. After one CUDA error, all later tests of a process fail.
    add_program("test_gpu", R"sh(for argument; do
  case $argument in
    --gtest_filter=*) filter=${argument#*=} ;;
    --gtest_list_tests) list=1 ;;
  esac
done
all=$(printf 'Good.\n  One\n  Two\nBad/0.  # TypeParam = float\n  Hang\n  Crash\n  Wrong\nGood.\n  Last\n  Absent')
[ "$filter" = '*' ] || all=$(printf 'Good.\n  One\n  Two')
[ -z "$list" ] || { echo "$all"; exit; }
for test in $(echo $filter | tr : ' '); do
  echo "[ RUN      ] $test"
  [ -z "$broken" ] || { echo "[  FAILED  ] $test (0 ms)"; continue; }
  case $test in
    *Hang) sleep 100 ;;
    *Crash) kill -SEGV $$ ;;
    *Wrong) printf 'x.cpp:1: Failure\n1 is not 2\n'; broken=1; echo "[  FAILED  ] $test, where GetParam() = 1 (0 ms)" ;;
    *Absent) echo "[  SKIPPED ] $test (0 ms)" ;;
    *) echo "[       OK ] $test (0 ms)" ;;
  esac
done
exit ${broken:-0}
)sh");
  }
  void add_program(const std::string& name, const std::string& script) {
    write("kit/bin/" + name, "#!/bin/sh\n" + script);
    fs::permissions(path("kit/bin/" + name), fs::perms::owner_all);
  }
  Outcome day(const std::string& arguments, const std::string& settings = "") {
    return execute(settings + " STREAMBP_STEP_LIMIT=1 bash " + path("kit/scripts/gpu_day.sh ") + arguments, "env");
  }
};

TEST_F(GpuDay, AStepThatFailsCostsOnlyItself) {
  expect_outcome(1, day("correct " + path("out")), "verify-bf16                                ok",
                 "layer-128: stream 4096  0.123", "-- tests: 3 passed, 1 skipped, 3 failed",
                 "failed: Bad/0.Hang\n     failed: Bad/0.Crash\n     failed: Bad/0.Wrong",
                 "Bad-0.Hang-blocking                        STOPPED after 1 s",
                 "Bad-0.Crash-blocking                       CRASHED, signal 11", "x.cpp:1: Failure\n1 is not 2",
                 "gpu_day.sh speed OUT 'Bad/0.Hang:Bad/0.Crash:Bad/0.Wrong'");
  EXPECT_PRED2(contains, read_file(path("out/summary.txt")), "3 passed, 1 skipped, 3 failed");
  const std::string logs = execute("-tzf " + path("out/logs.tar.gz"), "tar").output;
  for (const char* log : {"logs/verify-f32.log", "logs/tests-alone-Bad-0.Crash.log", "logs/Bad-0.Wrong-blocking.log"})
    EXPECT_PRED2(contains, logs, log);
}

TEST_F(GpuDay, MeasuresEveryLayerAndModel) {
  const std::string said =
      day("speed " + path("out") + " Good.One:Good.Two", "PATH=" + path("kit/bin") + ":$PATH").output;
  for (const char* step :
       {"layer-128", "layer-64", "layer-256", "experts", "delta-rule", "0.6B-2-layers", "4B-6-layers", "8B-long"})
    EXPECT_PRED2(contains, said, std::string(step) + ": stream 4096  0.123");
  EXPECT_PRED2(contains, said, "-- again: 2 passed, 0 skipped, 0 failed");
}

// A GPU that fell off the bus.
TEST_F(GpuDay, SurvivesAnNvidiaSmiThatHangs) {
  add_program("nvidia-smi", "sleep 100\n");
  const std::string script = path("kit/scripts/gpu_steps.sh"), text = read_file(script);
  write("kit/scripts/gpu_steps.sh", std::string(text).replace(text.find("timeout -k 1 10"), 15, "timeout -k 1 1"));
  expect_outcome(1, day("correct " + path("out"), "WRONG=1 PATH=" + path("kit/bin") + ":$PATH"), "STOPPED after 1 s",
                 "the bits differ");
}

TEST_F(GpuDay, StopsWhereTheGradientIsWrong) {
  const std::string said =
      expect_outcome(1, day("correct " + path("out"), "WRONG=1"), "the bits differ", "verify-f32-blocking");
  EXPECT_FALSE(contains(said, "layer-128")) << said;
}

TEST_F(GpuDay, RefusesOtherWords) {
  for (const char* arguments : {"", "fast", "correct --help", "correct a b c"})
    expect_outcome(2, day(arguments), "scripts/gpu_day.sh correct [OUT]");
  fs::remove(path("kit/bin/test_gpu"));
  expect_outcome(2, day("correct " + path("out")), "test_gpu is missing");
}

}  // namespace
}  // namespace streambp
