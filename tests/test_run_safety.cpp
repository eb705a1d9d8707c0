// Runs on a machine that is shared and imperfect: signals, kills, full disks, closed descriptors, other runs.
#include <signal.h>

#include <chrono>
#include <thread>

#include "kernels/base/system.h"
#include "tests/commands.h"

namespace streambp {
namespace {

const std::string kSmall =
    " --hidden 16 --layers 2 --heads 2 --mlp 32 --length 64 --batch 2 --sample 0 --eval-every 0 ";

class RunSafety : public Commands {
 protected:
  static Outcome shell(const std::string& command) { return execute("-c '" + command + "'", "/bin/sh"); }

  // Starts `train` in the background; its output goes to a file.
  pid_t start(const std::string& arguments, const std::string& log = "log") {
    const std::string command = "exec " + binary() + " train " + arguments + " > " + path(log) + " 2>&1";
    const pid_t child = fork();
    if (child == 0) {
      for (const int ignored : {SIGINT, SIGTERM, SIGHUP}) signal(ignored, SIG_DFL);  // as in a background shell
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    return child;
  }
  static int exit_code(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  // Steps that the run has reported.
  Index steps(const std::string& run) const {
    Index last = 0;
    for (const Json& line : metrics(run))
      if (line.contains("loss")) last = line["step"];
    return last;
  }
  bool reaches(const std::string& run, Index step) const {
    for (int i = 0; i < 6000 && steps(run) < step; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return steps(run) >= step;
  }
  bool same_model(const std::string& a, const std::string& b) const {
    return read_file(newest_checkpoint(path(a)) / "model.safetensors") ==
           read_file(newest_checkpoint(path(b)) / "model.safetensors");
  }
};

TEST_F(RunSafety, ASignalSavesACheckpointAndTheRunContinuesWithTheSameBits) {
  const std::string run = kSmall + "--steps 400 --out ";
  ASSERT_EQ(execute("train" + run + path("whole")).exit_code, 0);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string name = "run" + std::to_string(signal), out = path(name);
    const pid_t child = start(run + out);
    ASSERT_TRUE(reaches(name, 2));
    kill(child, signal);
    EXPECT_EQ(exit_code(child), 128 + signal);
    const fs::path saved = newest_checkpoint(out);
    const std::string log = read_file(path("log"));
    ASSERT_FALSE(saved.empty()) << log;
    EXPECT_TRUE(contains(log, saved.string())) << log;
    EXPECT_TRUE(contains(log, "--out " + out + " --resume")) << log;
    EXPECT_EQ(steps(name), checkpoint_step(saved.filename().string()));
    ASSERT_EQ(execute("train --resume --sample 0 --eval-every 0 --out " + out).exit_code, 0);
    EXPECT_TRUE(same_model("whole", name));
  }
}

TEST_F(RunSafety, ARunUnderNohupIgnoresSighup) {
  const std::string command =
      "trap \"\" HUP; exec " + binary() + " train" + kSmall + "--steps 200 --out " + path("run") + " > /dev/null 2>&1";
  const pid_t child = fork();
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  ASSERT_TRUE(reaches("run", 2));
  kill(child, SIGHUP);
  EXPECT_EQ(exit_code(child), 0);
  EXPECT_EQ(steps("run"), 200);
}

// The error messages do not contradict each other.
TEST_F(RunSafety, ARunKilledBeforeItsFirstCheckpointStartsAgain) {
  const std::string run = kSmall + "--seed 5 --rate 0.002 --steps 300 --out ";
  ASSERT_EQ(execute("train" + run + path("whole")).exit_code, 0);
  const pid_t child = start(run + path("run"));
  ASSERT_TRUE(reaches("run", 2));
  kill(child, SIGKILL);
  EXPECT_EQ(exit_code(child), -SIGKILL);
  ASSERT_TRUE(newest_checkpoint(path("run")).empty());
  expect_refused("train" + run + path("run"), "--resume");
  expect_refused("train --resume --seed 6 --out " + path("run"), "--seed");
  const Outcome again = execute("train --resume --sample 0 --eval-every 0 --out " + path("run"));
  ASSERT_EQ(again.exit_code, 0) << again.output;
  EXPECT_TRUE(same_model("whole", "run"));
}

TEST_F(RunSafety, TheLastFiniteWeightsAreSavedWhenTheGradientIsNan) {
  // After a first step this large the loss is finite, but its gradient is not.
  const Outcome outcome =
      execute("train" + kSmall + "--steps 50 --rate 1e8 --warmup 0 --clip 0 --family gpt2 --out " + path("run"));
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(contains(outcome.output, "the last checkpoint is " + path("run/step-000001"))) << outcome.output;
  EXPECT_EQ(newest_checkpoint(path("run")), fs::path(path("run/step-000001")));
}

TEST_F(RunSafety, WeightsWithANanLossAreNotSaved) {
  const Outcome outcome = execute("train" + kSmall + "--steps 50 --rate 1e30 --warmup 0 --clip 0 --out " + path("run"));
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(contains(outcome.output, "there is no checkpoint yet")) << outcome.output;
  EXPECT_TRUE(newest_checkpoint(path("run")).empty());
}

// The weights are fine when a reward program fails: they are saved.
TEST_F(RunSafety, AFailingRewardProgramLeavesACheckpoint) {
  ASSERT_EQ(execute("train" + kSmall + "--steps 1 --out " + path("base")).exit_code, 0);
  write_file_atomically(path("prompts.jsonl"), "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n");
  const Outcome outcome = execute(
      "train --model " + path("base") + " --data " + path("prompts.jsonl") +
      " --objective grpo --prompts 1 --group 4 " + "--completion 4 --steps 5 --eval-fraction 0 --out " + path("run") +
      " --reward-cmd 'n=0; while read -r line; do n=$((n+1)); [ $n -gt 8 ] && exit 3; echo $n; done'");
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "exit status 3")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "the last checkpoint is " + path("run/step-000002"))) << outcome.output;
  EXPECT_TRUE(is_complete_checkpoint(path("run/step-000002")));
}

// A line too many means that rewards may belong to other completions. One program writes it at the end of its input, the
// other while the run goes on.
TEST_F(RunSafety, WeightsWithUncertainRewardsAreNotSaved) {
  ASSERT_EQ(execute("train" + kSmall + "--steps 1 --out " + path("base")).exit_code, 0);
  write_file_atomically(path("prompts.jsonl"), "{\"prompt\": \"a\"}\n");
  for (const auto& [steps, program] :
       {std::pair("1", "n=0; while read -r line; do n=$((n+1)); echo $n; done; echo 7"),
        {"1000",
         "n=0; while read -r line; do n=$((n+1)); echo $n; if [ $n -eq 8 ]; then (sleep 0.2; echo 7) & fi; done"}}) {
    const Outcome outcome =
        execute("train --model " + path("base") + " --data " + path("prompts.jsonl") +
                " --objective grpo --prompts 1 " + "--group 4 --completion 4 --eval-fraction 0 --steps " + steps +
                " --out " + path("run") + " --reward-cmd '" + program + "'");
    EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "its rewards may belong to other completions")) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "there is no checkpoint yet")) << outcome.output;
    EXPECT_TRUE(newest_checkpoint(path("run")).empty());
    fs::remove_all(path("run"));
  }
}

// Here it fails on the first held-out prompt, when it sees it again after the second step.
TEST_F(RunSafety, ARewardProgramThatFailsInAnEvaluationLeavesACheckpoint) {
  ASSERT_EQ(execute("train" + kSmall + "--steps 1 --out " + path("base")).exit_code, 0);
  std::string prompts;
  for (char c = 'a'; c <= 'z'; ++c) prompts += std::string("{\"prompt\": \"") + c + "\"}\n";
  write_file_atomically(path("prompts.jsonl"), prompts);
  const Outcome outcome = execute(
      "train --model " + path("base") + " --data " + path("prompts.jsonl") +
      " --objective grpo --prompts 1 --group 4 --completion 4 --steps 5 --eval-fraction 0.5 --eval-every 2 --out " +
      path("run") + " --reward-cmd 'read -r line; held=${line#*prompt}; echo 0; while read -r line; do " +
      "[ \"${line#*prompt}\" = \"$held\" ] && exit 3; echo 1; done'");
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "exit status 3")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "the last checkpoint is " + path("run/step-000002"))) << outcome.output;
  EXPECT_TRUE(is_complete_checkpoint(path("run/step-000002")));
}

// The samples of a step are recorded after the weights have changed, so the checkpoint must be that of the step.
TEST_F(RunSafety, SamplesThatCannotBeRecordedLeaveACheckpointOfTheirStep) {
  ASSERT_EQ(execute("train" + kSmall + "--steps 1 --out " + path("base")).exit_code, 0);
  write_file_atomically(path("prompts.jsonl"), "{\"prompt\": \"a\"}\n");
  write_file_atomically(path("reward.sh"), "n=0; while read -r line; do n=$((n+1)); echo $n; done\n");
  const std::string run = " train --model " + path("base") + " --data " + path("prompts.jsonl") +
                          " --objective grpo --prompts 1 --group 32 --completion 40 --steps 9 --rate 1e-2 --warmup 0 " +
                          "--eval-fraction 0 --reward-cmd \"sh " + path("reward.sh") + "\" --out ";
  // After a few steps completions.jsonl exceeds this limit. The files of a checkpoint are smaller.
  const Outcome outcome = shell("ulimit -f 300; " + binary() + run + path("run") + " 2>&1");
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "completions.jsonl: cannot write: File too large")) << outcome.output;
  const auto saved = checkpoint_step(newest_checkpoint(path("run")).filename().string());
  ASSERT_TRUE(saved && *saved > 1 && *saved < 9) << outcome.output;
  ASSERT_EQ(execute(run + path("whole") + " --stop-after " + std::to_string(*saved)).exit_code, 0);
  EXPECT_TRUE(same_model("whole", "run"));
}

class Rewards : public RunSafety {
 protected:
  void SetUp() override {
    RunSafety::SetUp();
    ASSERT_EQ(execute("train" + kSmall + "--steps 1 --out " + path("base")).exit_code, 0);
    write_file_atomically(path("prompts.jsonl"), "{\"prompt\": \"a\"}\n");
  }
  // A run of short rounds with this shell script as its reward program.
  std::string run(const std::string& script, const std::string& options = "") const {
    write_file_atomically(path("reward.sh"), script + "\n");
    return binary() + " train --model " + path("base") + " --data " + path("prompts.jsonl") +
           " --objective grpo --prompts 1 --group 2 --completion 4 --eval-fraction 0 --reward-cmd \"sh " +
           path("reward.sh") + "\" --out " + path("run ") + options + " 2>&1";
  }
};

// The line at the end of the program's input shows that its rewards may be wrong, however the run ends.
TEST_F(Rewards, OutputAtTheEndIsNoticedAfterASignal) {
  // In the foreground, timeout sends the signal once, and not also to its group.
  const std::string signalled = "timeout --foreground -s INT --preserve-status 2 ";
  const Outcome surplus = shell(signalled + run("while read -r line; do echo 1; done; echo 9", "--steps 1000000"));
  EXPECT_EQ(surplus.exit_code, 2) << surplus.output;
  EXPECT_TRUE(contains(surplus.output, "so its rewards may belong to other completions")) << surplus.output;
  EXPECT_TRUE(newest_checkpoint(path("run")).empty());
  fs::remove_all(path("run"));
  const Outcome silent = shell(signalled + run("while read -r line; do echo 1; done; sleep 300", "--steps 1000000"));
  EXPECT_EQ(silent.exit_code, 128 + SIGINT) << silent.output;
  EXPECT_FALSE(newest_checkpoint(path("run")).empty()) << silent.output;
}

TEST_F(Rewards, SamplesThatCannotBeRecordedNameTheReason) {
  const Outcome outcome =
      shell("ulimit -f 300; " + run("n=0; while read -r line; do n=$((n+1)); [ $n -eq 6 ] && head -c 1000000 "
                                    "/dev/zero >> " +
                                        path("run/completions.jsonl") + " 2> /dev/null; echo $n; done",
                                    "--steps 9"));
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "completions.jsonl: cannot write: File too large")) << outcome.output;
}

// The error comes while the reference model's weights are on the device; the trained ones are saved.
TEST_F(RunSafety, AMissingReferenceModelLeavesTheTrainedWeights) {
  ASSERT_EQ(execute("train" + kSmall + "--steps 1 --out " + path("base")).exit_code, 0);
  write_file_atomically(path("prompts.jsonl"), "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n");
  const std::string common = "train --model " + path("base") + " --data " + path("prompts.jsonl") +
                             " --objective grpo --kl 0.1 --prompts 1 --group 4 --completion 4 --steps 5 --rate 1e-2 "
                             "--warmup 0 --eval-fraction 0 --reward-cmd 'n=0; while read -r line; do n=$((n+1)); ";
  const Outcome whole = execute(common + "echo $n; done' --stop-after 1 --out " + path("whole"));
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  const Outcome outcome = execute(common + "[ $n -eq 5 ] && rm " + path("base/step-000001/model.safetensors") +
                                  "; echo $n; done' --out " + path("run"));
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  ASSERT_EQ(newest_checkpoint(path("run")), fs::path(path("run/step-000001"))) << outcome.output;
  EXPECT_TRUE(same_model("whole", "run"));
}

TEST_F(RunSafety, ClosedDescriptorsDoNotBecomeFilesOfTheRun) {
  for (const char* closed : {"<&- >&-", "<&- >&- 2>&-", ">&-"}) {
    const Outcome outcome = shell(binary() + " train" + kSmall + "--steps 3 --out " + path("run") + " " + closed);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    std::istringstream lines(read_file(path("run/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) EXPECT_TRUE(Json::accept(line)) << closed << ": " << line;
    EXPECT_EQ(steps("run"), 3);
    fs::remove_all(path("run"));
  }
}

TEST_F(RunSafety, UnnamedRunsGetSeparateDirectories) {
  const std::string train = binary() + " train" + kSmall + "--steps 1 > /dev/null";
  const Outcome outcome = shell("cd " + dir.string() + " && for i in 1 2 3; do " + train + " & done; wait");
  EXPECT_EQ(outcome.output, "");
  for (const char* name : {"out/run-1", "out/run-2", "out/run-3"})
    EXPECT_FALSE(newest_checkpoint(path(name)).empty()) << name;
}

TEST_F(RunSafety, AFileSizeLimitIsAnErrorAndLeavesNoTemporaryFile) {
  const Outcome outcome =
      shell("ulimit -f 16; " + binary() + " train" + kSmall + "--steps 1 --out " + path("run") + " 2>&1");
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "File too large")) << outcome.output;
  for (const std::string& name : files()) EXPECT_FALSE(contains(name, ".tmp")) << name;
}

// The OpenMP library shows what it has read from the environment: GCC's libgomp, or Clang's libomp.
TEST_F(RunSafety, ThreadsSpinBrieflyUnlessConfiguredOtherwise) {
#ifdef __clang__
  const Outcome outcome =
      shell("env -u OMP_WAIT_POLICY -u KMP_BLOCKTIME OMP_DISPLAY_ENV=verbose " + binary() + " --help 2>&1");
  EXPECT_TRUE(contains(outcome.output, "KMP_BLOCKTIME='1'")) << outcome.output;
#else
  auto spins = [](const std::string& environment, const std::string& expected) {
    const Outcome outcome = shell("env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT OMP_DISPLAY_ENV=verbose " + environment +
                                  " " + binary() + " --help 2>&1");
    const std::size_t last = outcome.output.rfind("GOMP_SPINCOUNT");
    ASSERT_NE(last, std::string::npos);
    EXPECT_TRUE(outcome.output.substr(last).starts_with(expected)) << outcome.output.substr(last, 80);
  };
  spins("", std::string("GOMP_SPINCOUNT = ") + "\x27" + kSpinCount);
  spins("GOMP_SPINCOUNT=77",
        "GOMP_SPINCOUNT = \x27"
        "77\x27");
  spins("OMP_WAIT_POLICY=passive",
        "GOMP_SPINCOUNT = \x27"
        "0\x27");
#endif
}

// A bound thread may run on one CPU only. If the program executed itself again, libgomp would see only that CPU.
TEST_F(RunSafety, BoundThreadsUseAllCpus) {
  const std::string show = "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u OMP_NUM_THREADS ";
  const Outcome free = shell(show + binary() + " --version");
  ASSERT_EQ(free.exit_code, 0) << free.output;
  for (const char* bound : {"OMP_PROC_BIND=true ", "OMP_PLACES=threads "})
    EXPECT_EQ(shell(show + bound + binary() + " --version").output, free.output) << bound;
}

}  // namespace
}  // namespace streambp
