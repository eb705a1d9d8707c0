// What a run must not lose or accept: consoles that close, full disks, data and checkpoints that change.
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "data/files/safetensors.h"
#include "tests/fine_tuning.h"
#include "tests/processes.h"

namespace streambp {
namespace {

const std::string kTinyRun =
    " --hidden 8 --layers 1 --heads 2 --mlp 16 --length 32 --batch 1 --sample 0 --eval-every 0 ";

// Waits until f() holds; false after a minute.
template <class F>
bool eventually(F&& f) {
  for (int i = 0; i < 6000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10)))
    if (f()) return true;
  return false;
}

// Changes one byte in the middle of a file.
void damage(const fs::path& path) {
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file_atomically(path, bytes);
}

class LostWork : public FineTuning {
 protected:
  enum class Reader { leaves_after_a_byte, leaves_at_once };
  // Starts the program; its output goes to a pipe.
  pid_t start(const std::string& arguments, Reader reader = Reader::leaves_after_a_byte) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    if (reader == Reader::leaves_at_once) close(ends[0]);
    const pid_t child = fork();
    if (child == 0) {
      for (const int signal : {SIGINT, SIGPIPE}) ::signal(signal, SIG_DFL);
      dup2(ends[1], 1), dup2(ends[1], 2);
      close(ends[0]), close(ends[1]);
      execl("/bin/sh", "sh", "-c", ("exec " + binary() + " " + arguments).c_str(), nullptr);
      _exit(127);
    }
    char byte;
    EXPECT_TRUE(reader == Reader::leaves_at_once || ::read(ends[0], &byte, 1) == 1);
    if (reader == Reader::leaves_after_a_byte) close(ends[0]);
    close(ends[1]);
    return child;
  }
  static int exit_code(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  static Outcome shell(const std::string& command) { return execute("-c \"" + command + "\"", "/bin/sh"); }

  void tokenise(const std::string& out) {
    expect_ok("tokenize --model " + model + " --data " + path("data.jsonl") + " --out " + path(out));
  }
  // A run on this token file, with some changes to it after a few steps.
  template <class Change>
  Outcome run_on(const std::string& tokens, const std::string& launcher, Change&& change) {
    const std::string command = launcher + binary() + " train --model " + model + " --data " + path(tokens) +
                                " --length 256 --steps 100000 --eval-every 0 --out " + path("run") + " 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    EXPECT_TRUE(eventually([&] { return fs::exists(path("run/metrics.jsonl")) && metrics("run").size() > 4; }));
    change();
    Outcome outcome{-1, ""};
    char buffer[4096];
    for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.output.append(buffer, n);
    const int status = pclose(pipe);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
  }
  // Overwrites tokens in the middle of a file.
  void overwrite(const std::string& tokens, const std::string& token) {
    std::fstream file(path(tokens), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(fs::file_size(path(tokens)) / 8 * 4));
    for (int i = 0; i < 100; ++i) file.write(token.data(), 4);
  }
  void spoil(const std::string& tokens) {
    const auto time = fs::last_write_time(path(tokens));
    overwrite(tokens, {"\xff\xff\0\0", 4});
    fs::last_write_time(path(tokens), time);
  }
  // The steps before the change are saved.
  void expect_rescued(const Outcome& outcome, const std::string& said) {
    EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, said)) << outcome.output;
    const fs::path saved = newest_checkpoint(path("run"));
    ASSERT_FALSE(saved.empty()) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "the last checkpoint is " + saved.string())) << outcome.output;
    EXPECT_GT(*checkpoint_step(saved.filename().string()), 3);
  }
};

TEST_F(LostWork, ARunGoesOnWithoutAConsole) {
  EXPECT_EQ(exit_code(start("train" + kTinyRun + "--steps 300 --out " + path("run"))), 0);
  EXPECT_EQ(newest_checkpoint(path("run")), fs::path(path("run/step-000300")));
}

TEST_F(LostWork, ASignalSavesTheRunWithoutAConsole) {
  const pid_t child = start("train" + kTinyRun + "--steps 1000000 --out " + path("run"));
  ASSERT_TRUE(eventually([&] { return metrics("run").size() > 2; }));
  kill(child, SIGINT);
  EXPECT_EQ(exit_code(child), 128 + SIGINT);
  EXPECT_FALSE(newest_checkpoint(path("run")).empty());
}

TEST_F(LostWork, CommandsThatOnlyPrintEndWithTheirReader) {
  EXPECT_EQ(exit_code(start("plan gpt2", Reader::leaves_at_once)), -SIGPIPE);
}

TEST_F(LostWork, ADiskThatIsFullOfMetricsLeavesACheckpoint) {
  const Outcome outcome =
      shell("ulimit -f 80; " + binary() + " train" + kTinyRun + "--steps 100000 --out " + path("run") + " 2>&1");
  EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "metrics.jsonl: cannot write: File too large")) << outcome.output;
  const fs::path saved = newest_checkpoint(path("run"));
  ASSERT_FALSE(saved.empty()) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "the last checkpoint is " + saved.string())) << outcome.output;
  const Index step = *checkpoint_step(saved.filename().string());
  expect_ok("train --resume --stop-after " + std::to_string(step + 1) + " --out " + path("run"));
}

TEST_F(LostWork, TruncatedTokensLeaveACheckpoint) {
  tokenise("data.safetensors");
  expect_rescued(run_on("data.safetensors", "", [&] { fs::resize_file(path("data.safetensors"), 4096); }),
                 "data.safetensors: was truncated");
}

TEST_F(LostWork, OverwrittenTokensLeaveACheckpoint) {
  tokenise("data.safetensors");
  expect_rescued(run_on("data.safetensors", "",
                        [&] {
                          overwrite("data.safetensors", {"\1\0\0\0", 4});
                        }),
                 "data.safetensors: was changed");
}

// The file looks unchanged, and a batch cannot be read.
TEST_F(LostWork, TokensOutsideTheVocabularyLeaveACheckpoint) {
  tokenise("data.safetensors");
  expect_rescued(run_on("data.safetensors", "", [&] { spoil("data.safetensors"); }), "outside the model's vocabulary");
}

TEST_F(LostWork, TheLastCheckpointIsSavedBeforeTheLastEvaluation) {
  const Outcome outcome = execute("train" + kTinyRun + "--steps 2 --out " + path("run"));
  const std::size_t saved = outcome.output.find("saved    "), evaluated = outcome.output.rfind("held-out loss");
  EXPECT_LT(saved, evaluated) << outcome.output;
  const Outcome diverged =
      execute("train" + kTinyRun + "--steps 1 --rate 1e38 --warmup 0 --clip 0 --out " + path("diverged"));
  EXPECT_EQ(diverged.exit_code, 2) << diverged.output;
  EXPECT_TRUE(contains(diverged.output, "the weights have diverged")) << diverged.output;
  EXPECT_TRUE(contains(diverged.output, path("diverged/step-000001") + " holds them: remove it")) << diverged.output;
}

TEST_F(LostWork, TokensThatWereOnlyTouchedAreTheSame) {
  tokenise("data.safetensors");
  const auto touch = [&] {
    fs::last_write_time(path("data.safetensors"), fs::file_time_type::clock::now());
    const std::size_t before = metrics("run").size();
    EXPECT_TRUE(eventually([&] { return metrics("run").size() > before + 3; }));
    fs::resize_file(path("data.safetensors"), 0);
  };
  expect_rescued(run_on("data.safetensors", "", touch), "data.safetensors: was truncated");
}

// --- Wrong results ---

TEST_F(LostWork, AChangedBaseIsNotResumed) {
  expect_ok(train("--lora 2 --steps 4 --stop-after 2 --out " + path("run")));
  damage(model + "/model.safetensors");  // in its middle, of the same size
  expect_refused("train --resume --out " + path("run"), "has changed since the run");
}

TEST_F(LostWork, ADamagedCheckpointIsNotResumed) {
  expect_ok("train" + kTinyRun + "--steps 4 --checkpoint-every 2 --out " + path("run"));
  expect_ok("verify --run " + path("run"));
  const fs::path last = path("run/step-000004"), before = path("run/step-000002");
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json", "training/optimizer.safetensors"}) {
    const std::string good = read_file(file_of(last, name));
    for (const bool exchanged : {false, true}) {
      exchanged ? write_file_atomically(file_of(last, name), read_file(file_of(before, name)))
                : damage(file_of(last, name));
      if (read_file(file_of(last, name)) == good) continue;  // both steps have the same file
      expect_refused("train --resume --out " + path("run"), fs::path(name).filename().string());
      const Outcome outcome = execute("verify --run " + path("run"));
      EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
      EXPECT_TRUE(contains(outcome.output, fs::path(name).filename().string())) << outcome.output;
      write_file_atomically(file_of(last, name), good);
    }
  }
  expect_ok("verify --run " + path("run"));
  write_file_atomically(last / "other.safetensors", "");
  EXPECT_EQ(execute("verify --run " + path("run")).exit_code, 1);
  fs::remove(last / "other.safetensors");
  Json state = parse_json_file(state_of(last));
  state["options"]["--rate"] = 0.125;
  write_file_atomically(state_of(last), state.dump(2));
  expect_refused("train --resume --out " + path("run"), "state.json: was changed");
  fs::remove(state_of(last));
  EXPECT_TRUE(contains(execute("verify --run " + path("run")).output, "step-000004: DAMAGED: a part of it is missing"));
  EXPECT_TRUE(contains(execute("train --resume --out " + path("run")).output, "skipped " + last.string()));
  expect_refused("verify --run " + path("nothing"), "nothing: holds no checkpoint");
}

TEST_F(LostWork, APartOfACheckpointThatIsMissingIsNotLost) {
  expect_ok("train" + kTinyRun + "--steps 4 --checkpoint-every 2 --out " + path("run"));
  const fs::path last = path("run/step-000004");
  fs::rename(last / "model.safetensors", path("model"));
  expect_refused("train --resume --out " + path("run"),
                 "model.safetensors: is missing from the checkpoint; restore it");
  fs::rename(path("model"), last / "model.safetensors");
  fs::rename(last, path("elsewhere"));
  const Outcome outcome = execute("train --resume --stop-after 3 --out " + path("run"));
  EXPECT_TRUE(contains(outcome.output, "skipped " + last.string())) << outcome.output;
  EXPECT_TRUE(fs::exists(state_of(last)));
  fs::rename(path("elsewhere"), last);
  expect_ok("verify --run " + path("run"));
  expect_refused("verify --length 64 --run " + path("run"), "--run takes no other options; leave out --length");
  fs::rename(path("run/training"), path("training"));
  expect_refused("train --resume --out " + path("run"), "a part of this checkpoint is missing, and there is no other");
}

TEST_F(LostWork, ARenamedCheckpointIsRefused) {
  expect_ok("train" + kTinyRun + "--steps 4 --out " + path("run"));
  for (const char* name : {"step-000003", "step-4"}) {
    const fs::path renamed = path("run") / fs::path(name);
    fs::rename(path("run/step-000004"), renamed);
    fs::rename(path("run/training/step-000004"), training_of(renamed));
    const Outcome outcome = execute("verify --run " + path("run"));
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "step 4 does not belong to this checkpoint")) << outcome.output;
    expect_refused("train --resume --out " + path("run"), "step 4 does not belong to this checkpoint");
    fs::rename(renamed, path("run/step-000004"));
    fs::rename(training_of(renamed), path("run/training/step-000004"));
  }
}

TEST_F(LostWork, AdaptersAreOfTheirBaseAlone) {
  expect_ok(train("--lora 2 --steps 1 --out " + path("run")));
  damage(model + "/model.safetensors");
  for (const std::string& command : {"eval --data " + path("data.jsonl"), "merge --out " + path("merged")})
    expect_refused(command + " --adapter " + path("run"), "has changed since the adapters of");
  expect_ok("merge --adapter " + path("run") + " --model " + model + " --out " + path("merged"));
  fs::copy(path("run/step-000001/adapter_config.json"), model + "/adapter_config.json");
  expect_refused("eval --data " + path("data.jsonl") + " --model " + model, "a whole model and also adapters");
}

TEST_F(LostWork, AModelBesideTheCheckpointsOfARunIsAmbiguous) {
  expect_ok("train" + kTinyRun + "--steps 1 --out " + path("run"));
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json"})
    fs::copy(path("run/step-000001") + "/" + name, path("run") + "/" + name);
  expect_refused("eval --data " + path("data.jsonl") + " --model " + path("run"), "name a checkpoint");
  const std::string before = read_file(model + "/config.json");
  expect_refused(train("--steps 1 --out " + model), "holds \"");
  EXPECT_EQ(read_file(model + "/config.json"), before);
}

TEST_F(LostWork, AnEditedReferenceIsComputedAgain) {
  fs::create_directories(path("data"));
  write_file_atomically(path("data/pairs.jsonl"),
                        "{\"prompt\": \"Which? \", \"chosen\": \"this\", \"rejected\": \"that\"}\n");
  const std::string run =
      "train --objective dpo --model " + model + " --data " + path("data/pairs.jsonl") + " --steps 1 --out ";
  expect_ok(run + path("first"));
  std::vector<fs::path> edited;
  for (const auto& entry : fs::directory_iterator(path("data"))) {
    if (!entry.path().filename().string().starts_with("reference-")) continue;
    const fs::path file = edited.emplace_back(entry.path());
    std::string bytes = read_file(file);
    for (std::size_t i = 1; i <= 8; ++i) {  // log-probs of the last targets
      const float large = 500;
      std::memcpy(bytes.data() + bytes.size() - 4 * i, &large, 4);
    }
    write_file_atomically(file, bytes);
  }
  EXPECT_EQ(edited.size(), 1u);
  expect_ok(run + path("second"));
  EXPECT_EQ(metric("first", "loss"), metric("second", "loss"));
}

// --- Files of others ---

TEST_F(LostWork, ResultsDoNotReplaceOtherFiles) {
  const std::string weights = model + "/model.safetensors", before = read_file(weights);
  expect_refused("tokenize --model " + model + " --data " + path("data.jsonl") + " --out " + weights, "may be yours");
  expect_refused("verify --length 200 --save-gradient " + weights, "may be yours");
  expect_refused("eval --model " + model + " --data " + path("data.jsonl") + " --json " + path("data.jsonl"),
                 "may be yours");
  expect_refused("examples answers --out " + path("data.jsonl"), "holds something else");
  EXPECT_EQ(read_file(weights), before);
  for (int i = 0; i < 2; ++i) {  // what they wrote themselves, they replace
    tokenise("data.safetensors");
    expect_ok("plan gpt2 --json " + path("plan.json"));
    expect_ok("examples answers --count " + std::to_string(3 + i) + " --out " + path("examples.jsonl"));
  }
  std::ofstream(path("examples.jsonl"), std::ios::app) << "{\"text\": \"mine\"}\n";
  expect_refused("examples answers --out " + path("examples.jsonl"), "holds something else");
}

TEST_F(LostWork, APipeInThePlaceOfMetricsIsRefused) {
  expect_ok("train" + kTinyRun + "--steps 3 --stop-after 1 --out " + path("run"));
  fs::remove(path("run/metrics.jsonl"));
  ASSERT_EQ(mkfifo(path("run/metrics.jsonl").c_str(), 0600), 0);
  expect_refused("train --resume --out " + path("run"), "metrics.jsonl: is not a regular file");
}

// A checkpoint can be published as it is.
TEST_F(LostWork, PublishedFilesNameNoDirectoryOfThisMachine) {
  expect_ok(train("--lora 2 --steps 1 --out " + path("run")));
  for (const auto& entry : fs::recursive_directory_iterator(path("run/step-000001"))) {
    EXPECT_FALSE(contains(read_file(entry.path()), dir.string())) << entry.path();
    EXPECT_FALSE(contains(entry.path().string(), "training"));
  }
  expect_ok("generate --adapter " + path("run") + " --prompt a --length 1");  // finds its base all the same
}

TEST_F(LostWork, EscapeSequencesOfFilesDoNotReachTheTerminal) {
  const std::string name = path("da\033[31mta\nstreambp: not ours \u202e.jsonl");
  write_file_atomically(name, "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"x\033]0;\": 1}\n");
  for (const std::string& command :
       {"tokenize --out " + path("t.safetensors"), std::string("eval"), "train --steps 1 --out " + path("run")}) {
    const Outcome outcome = execute(command + " --skip-bad --model " + model + " --data '" + name + "'");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    for (const char* part : {"\033", "\nstreambp: not ours", "\u202e"})
      EXPECT_FALSE(contains(outcome.output, part)) << outcome.output;
  }
  fs::remove(name);
  EXPECT_FALSE(contains(execute("eval --model " + model + " --data '" + name + "'").output, "\nstreambp: not ours"));
}

// --- Several ranks ---

class LostWorkOfRanks : public LostWork {
 protected:
  void SetUp() override {
    LostWork::SetUp();
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    if (!STREAMBP_MPI || execute("--version > /dev/null", "mpirun").exit_code != 0) GTEST_SKIP() << "needs MPI";
  }
  void TearDown() override {
    unsetenv("OMP_NUM_THREADS");
    LostWork::TearDown();
  }
  const std::string two_ = "timeout -s KILL 150 mpirun -n 2 ";
};

TEST_F(LostWorkOfRanks, FullDisksAndBadTokensLeaveACheckpoint) {
  tokenise("data.safetensors");
  expect_rescued(run_on("data.safetensors", two_, [&] { spoil("data.safetensors"); }),
                 "outside the model's vocabulary");
  fs::remove_all(path("run")), fs::remove(path("data.safetensors"));
  tokenise("data.safetensors");
  expect_rescued(run_on("data.safetensors", two_, [&] { fs::resize_file(path("data.safetensors"), 4096); }),
                 "data.safetensors: was truncated");
  fs::remove_all(path("run")), fs::remove(path("data.safetensors"));
  tokenise("data.safetensors");
  const auto fill = [&] {  // metrics.jsonl exceeds the limit, checkpoints do not
    std::ofstream(path("run/metrics.jsonl"), std::ios::app) << std::string(1 << 20, ' ') << "\n";
    const std::string processes = "$(pgrep -f -- '--out " + path("run") + "')";
    EXPECT_EQ(std::system(("for p in " + processes + "; do prlimit --pid $p --fsize=524288; done").c_str()), 0);
  };
  expect_rescued(run_on("data.safetensors", two_, fill), "metrics.jsonl: cannot write: File too large");
}

TEST_F(LostWorkOfRanks, SaveWhenTheConsoleClosesAndRefuseADamagedCheckpoint) {
  // mpirun ends the ranks when its console closes; they save a checkpoint first.
  const Outcome outcome =
      shell(two_ + binary() + " train" + kTinyRun + "--steps 600 --out " + path("run") + " | head -n 1");
  EXPECT_TRUE(eventually([&] { return !newest_checkpoint(path("run")).empty(); })) << outcome.output;
  damage(newest_checkpoint(path("run")) / "model.safetensors");
  const Outcome refused = shell(two_ + binary() + " train --resume --out " + path("run") + " 2>&1");
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_TRUE(contains(refused.output, "model.safetensors: differs from what the run saved")) << refused.output;
}

}  // namespace
}  // namespace streambp
