// Runs on a machine that is shared and imperfect: signals, kills, full disks, closed descriptors, other runs.
#include <signal.h>

#include "kernels/base/system.h"
#include "tests/commands.h"

namespace streambp {
namespace {

const std::string kSmall =
    " --hidden 16 --layers 2 --heads 2 --mlp 32 --length 64 --batch 2 --sample 0 --eval-every 0 ";

class RunSafety : public Commands {
 protected:
  // Starts the program; its output goes to the file "log".
  static pid_t start(const std::string& arguments) {
    return in_background("exec " + binary() + " " + arguments + " > log 2>&1");
  }
  static bool same_model(const std::string& a, const std::string& b) {
    return read_file(newest_checkpoint(a) / "model.safetensors") ==
           read_file(newest_checkpoint(b) / "model.safetensors");
  }
};

TEST_F(RunSafety, ASignalSavesACheckpointAndTheRunContinuesWithTheSameBits) {
  const std::string run = kSmall + "--steps 100000 --out ";
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string name = "run" + std::to_string(signal), whole = "whole" + std::to_string(signal);
    const pid_t child = start("train" + run + name);
    ASSERT_TRUE(reaches(name, 2));
    kill(child, signal);
    EXPECT_EQ(exit_code(child), 128 + signal);
    const fs::path saved = newest_checkpoint(name);
    const std::string log = read_file("log");
    ASSERT_FALSE(saved.empty()) << log;
    EXPECT_PRED2(contains, log, saved.string());
    EXPECT_PRED2(contains, log, "--out " + name + " --resume");
    EXPECT_EQ(steps(name), checkpoint_step(saved.filename().string()));
    const std::string stop = " --stop-after " + std::to_string(steps(name) + 20);
    expect_ok("train --resume --out " + name + stop);
    expect_ok("train" + run + whole + stop);
    EXPECT_TRUE(same_model(whole, name));
  }
}

TEST_F(RunSafety, ASignalWhileThePageIsWrittenEndsTheRun) {
  expect_ok("train --steps 1 --out run" + kSmall);
  Json line = {{"step", 1}};
  for (int metric = 0; metric < 60; ++metric) line["m" + std::to_string(metric)] = 0.123456;
  std::ofstream metrics("run/metrics.jsonl", std::ios::app);
  for (int i = 0; i < 3000; ++i) metrics << line.dump() << "\n";  // the page takes a while, also on a busy machine
  metrics.close();
  const pid_t child = in_background("exec " + binary() + " train --resume --out run");
  const auto unfinished = [] {
    for (const auto& entry : fs::directory_iterator("run"))
      if (entry.path().filename().string().starts_with("report.html.tmp")) return true;
    return false;
  };
  while (!unfinished() && waitpid(child, nullptr, WNOHANG) == 0) {
  }
  kill(child, SIGTERM);
  EXPECT_EQ(exit_code(child), -SIGTERM);
  EXPECT_FALSE(unfinished());
}

TEST_F(RunSafety, MetricsThatAreRemovedDuringARunBeginAgain) {
  const pid_t child = start("train" + kSmall + "--steps 100000 --out run");
  ASSERT_TRUE(reaches("run", 2));
  fs::remove("run/metrics.jsonl");
  ASSERT_TRUE(reaches("run", 4));
  kill(child, SIGINT);
  EXPECT_EQ(exit_code(child), 128 + SIGINT);
  EXPECT_PRED2(contains, read_file("log"), "warning: metrics.jsonl was removed during the run");
  EXPECT_EQ(steps("run"), checkpoint_step(newest_checkpoint("run").filename().string()));
}

// The error messages do not contradict each other.
TEST_F(RunSafety, ARunKilledBeforeItsFirstCheckpointStartsAgain) {
  const std::string run = kSmall + "--seed 5 --rate 0.002 --steps 100000 --out ";
  const pid_t child = start("train" + run + "run");
  ASSERT_TRUE(reaches("run", 2));
  kill(child, SIGKILL);
  EXPECT_EQ(exit_code(child), -SIGKILL);
  ASSERT_TRUE(newest_checkpoint("run").empty());
  expect_refused("train" + run + "run", "--resume");
  expect_refused("train --resume --seed 6 --out run", "--seed");
  expect_ok("train --resume --stop-after 30 --out run");
  expect_ok("train" + run + "whole --stop-after 30");
  EXPECT_TRUE(same_model("whole", "run"));
}

TEST_F(RunSafety, TheLastFiniteWeightsAreSavedWhenTheGradientIsNan) {
  // After a first step this large the loss is finite, but its gradient is not.
  expect_failed("train" + kSmall + "--steps 50 --rate 1e8 --warmup 0 --clip 0 --family gpt2 --out run",
                "the last checkpoint is run/step-000001");
  EXPECT_EQ(newest_checkpoint("run"), fs::path("run/step-000001"));
}

TEST_F(RunSafety, ClosedDescriptorsDoNotBecomeFilesOfTheRun) {
  for (const char* closed : {"<&- >&-", "<&- >&- 2>&-", ">&-"}) {
    expect_ok("train" + kSmall + "--steps 3 --out run " + closed);
    std::istringstream lines(read_file("run/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) EXPECT_TRUE(Json::accept(line)) << closed << ": " << line;
    EXPECT_EQ(steps("run"), 3);
    fs::remove_all("run");
  }
}

// The OpenMP library shows what it has read from the environment: GCC's libgomp, or Clang's libomp.
TEST_F(RunSafety, ThreadsSpinBrieflyUnlessConfiguredOtherwise) {
#ifdef __clang__
  const Outcome outcome =
      shell("env -u OMP_WAIT_POLICY -u KMP_BLOCKTIME OMP_DISPLAY_ENV=verbose " + binary() + " --help");
  EXPECT_TRUE(contains(outcome.output, "KMP_BLOCKTIME='1'")) << outcome.output;
#else
  auto spins = [](const std::string& environment, const std::string& expected) {
    const std::string shown = shell("env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose " + environment +
                                    " " + binary() + " --help")
                                  .output;
    const std::size_t last = shown.rfind("GOMP_SPINCOUNT");
    ASSERT_NE(last, std::string::npos);
    EXPECT_TRUE(shown.substr(last).starts_with("GOMP_SPINCOUNT = '" + expected)) << shown.substr(last, 80);
  };
  spins("", kSpinCount);
  spins("GOMP_SPINCOUNT=77", "77'");
  spins("OMP_WAIT_POLICY=passive", "0'");
#endif
}

// A bound thread may run on one CPU only. If the program executed itself again, libgomp would see only that CPU.
TEST_F(RunSafety, BoundThreadsUseAllCpus) {
  const std::string show = "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u OMP_NUM_THREADS ";
  const std::string free = expect_outcome(0, shell(show + binary() + " --version"));
  for (const char* bound : {"OMP_PROC_BIND=true ", "OMP_PLACES=threads "})
    EXPECT_EQ(shell(show + bound + binary() + " --version").output, free) << bound;
}

// --- Reward programs ---

class Rewards : public RunSafety {
 protected:
  void SetUp() override {
    RunSafety::SetUp();
    expect_ok("train" + kSmall + "--steps 1 --out base");
    std::string prompts;
    for (char c = 'a'; c <= 'z'; ++c) prompts += std::string("{\"prompt\": \"") + c + "\"}\n";
    write_file_atomically("prompts.jsonl", prompts);
  }
  // A run with this shell script as its reward program.
  static std::string run(const std::string& options, const std::string& script) {
    write_file_atomically("reward.sh", script + "\n");
    return "train --model base --data prompts.jsonl --objective grpo --prompts 1 --reward-cmd 'sh reward.sh' " +
           options;
  }
  static inline const std::string kShort = "--group 4 --completion 4 --eval-fraction 0 --out run ";
};

// The weights are fine when a reward program fails: they are saved.
TEST_F(Rewards, AFailingProgramLeavesACheckpoint) {
  expect_failed(
      run(kShort + "--steps 5", "n=0; while read -r line; do n=$((n+1)); [ $n -gt 8 ] && exit 3; echo $n; done"),
      "exit status 3", "the last checkpoint is run/step-000002");
  EXPECT_TRUE(is_complete_checkpoint("run/step-000002"));
}

// A line too many means that rewards may belong to other completions. One program writes it at the end of its input, the
// other while the run goes on.
TEST_F(Rewards, WeightsWithUncertainRewardsAreNotSaved) {
  for (const auto& [steps, script] :
       {std::pair("1", "n=0; while read -r line; do n=$((n+1)); echo $n; done; echo 7"),
        {"1000",
         "n=0; while read -r line; do n=$((n+1)); echo $n; if [ $n -eq 8 ]; then (sleep 0.2; echo 7) & fi; done"}}) {
    expect_failed(run(kShort + "--steps " + steps, script), "its rewards may belong to other completions",
                  "there is no checkpoint yet");
    EXPECT_TRUE(newest_checkpoint("run").empty());
    fs::remove_all("run");
  }
}

// Here it fails on the first held-out prompt, when it sees it again after the second step.
TEST_F(Rewards, AProgramThatFailsInAnEvaluationLeavesACheckpoint) {
  expect_failed(run("--group 4 --completion 4 --steps 5 --eval-fraction 0.5 --eval-every 2 --out run",
                    "read -r line; held=${line#*prompt}; echo 0; "
                    "while read -r line; do [ \"${line#*prompt}\" = \"$held\" ] && exit 3; echo 1; done"),
                "exit status 3", "the last checkpoint is run/step-000002");
  EXPECT_TRUE(is_complete_checkpoint("run/step-000002"));
}

// The samples of a step are recorded after the weights have changed, so the checkpoint must be that of the step.
TEST_F(Rewards, SamplesThatCannotBeRecordedLeaveACheckpointOfTheirStep) {
  const std::string train = run("--group 32 --completion 40 --steps 9 --rate 1e-2 --warmup 0 --eval-fraction 0 --out ",
                                "n=0; while read -r line; do n=$((n+1)); echo $n; done");
  // After a few steps completions.jsonl exceeds this limit. The files of a checkpoint are smaller.
  const Outcome outcome = shell("ulimit -f 300; " + binary() + " " + train + "run");
  expect_outcome(2, outcome, "completions.jsonl: cannot write: File too large");
  const auto saved = checkpoint_step(newest_checkpoint("run").filename().string());
  ASSERT_TRUE(saved && *saved > 1 && *saved < 9) << outcome;
  expect_ok(train + "whole --stop-after " + std::to_string(*saved));
  EXPECT_TRUE(same_model("whole", "run"));
}

// The line at the end of the program's input shows that its rewards may be wrong, however the run ends.
TEST_F(Rewards, OutputAtTheEndIsNoticedAfterASignal) {
  const auto interrupted = [](const std::string& last) {
    const pid_t child = start(run(kShort + "--steps 1000000", "while read -r line; do echo 1; done; " + last));
    EXPECT_TRUE(reaches("run", 2));
    kill(child, SIGINT);
    return exit_code(child);
  };
  EXPECT_EQ(interrupted("echo 9"), 2) << read_file("log");
  EXPECT_PRED2(contains, read_file("log"), "so its rewards may belong to other completions");
  EXPECT_TRUE(newest_checkpoint("run").empty());
  fs::remove_all("run");
  EXPECT_EQ(interrupted("sleep 300"), 128 + SIGINT) << read_file("log");
  EXPECT_FALSE(newest_checkpoint("run").empty()) << read_file("log");
}

// The error comes while the reference model's weights are on the device; the trained ones are saved.
TEST_F(Rewards, AMissingReferenceModelLeavesTheTrainedWeights) {
  const std::string options = "--kl 0.1 --group 4 --completion 4 --steps 5 --rate 1e-2 --warmup 0 --eval-fraction 0 ";
  const std::string count = "n=0; while read -r line; do n=$((n+1)); ", next = "echo $n; done";
  expect_ok(run(options + "--stop-after 1 --out whole", count + next));
  const std::string said = expect_failed(
      run(options + "--out run", count + "[ $n -eq 5 ] && rm base/step-000001/model.safetensors; " + next));
  ASSERT_EQ(newest_checkpoint("run"), fs::path("run/step-000001")) << said;
  EXPECT_TRUE(same_model("whole", "run"));
}

}  // namespace
}  // namespace streambp
