// What a run must not lose or accept: consoles that close, full disks, data and checkpoints that change.
#include <fcntl.h>
#include <sys/stat.h>

#include <fstream>

#include "data/files/safetensors.h"
#include "parallel/processes.h"
#include "tests/fine_tuning.h"
#include "tests/processes.h"

namespace streambp {
namespace {

const std::string kTinyRun =
    " --hidden 8 --layers 1 --heads 2 --mlp 16 --length 32 --batch 1 --sample 0 --eval-every 0 ";

// Changes one byte in the middle of a file.
void damage(const fs::path& path) {
  std::string bytes = read_file(path);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file_atomically(path, bytes);
}

const fs::path kTokens = "data.safetensors";

class LostWork : public FineTuning {
 protected:
  enum class Reader { leaves_after_a_byte, leaves_at_once };
  // Starts the program; its output goes to a pipe.
  static pid_t start(const std::string& arguments, Reader reader = Reader::leaves_after_a_byte) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    if (reader == Reader::leaves_at_once) close(ends[0]);
    const pid_t child = in_background("exec " + binary() + " " + arguments, ends[1]);
    char byte;
    EXPECT_TRUE(reader == Reader::leaves_at_once || ::read(ends[0], &byte, 1) == 1);
    if (reader == Reader::leaves_after_a_byte) close(ends[0]);
    close(ends[1]);
    return child;
  }
  void tokenise() { expect_ok("tokenize --model model --data data.jsonl --out " + kTokens.string()); }

  // Something changes after a few steps of a run on a token file. The steps before the change are saved.
  void expect_rescued(const std::function<void()>& change, const std::string& said, const std::string& launcher = "") {
    fs::remove_all("run"), fs::remove(kTokens);
    tokenise();
    const std::string command = launcher + binary() + " train --model model --data " + kTokens.string() +
                                " --length 256 --steps 100000 --eval-every 0 --out " + path("run");
    FILE* pipe = start_shell(command);
    EXPECT_TRUE(reaches("run", 4));
    change();
    const Outcome outcome = finish_shell(pipe, command);
    EXPECT_GT(expect_saved(outcome, said), 3);
  }
  // The run has failed, and its last checkpoint is saved. Returns its step.
  static Index expect_saved(const Outcome& outcome, const std::string& said) {
    const fs::path saved = newest_checkpoint("run");
    expect_outcome(2, outcome, said, "the last checkpoint is ", saved.string());
    return saved.empty() ? 0 : *checkpoint_step(saved.filename().string());
  }
  // Overwrites tokens in the middle of the file.
  static void overwrite(const std::string& token) {
    std::fstream file(kTokens, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(fs::file_size(kTokens) / 8 * 4));
    for (int i = 0; i < 100; ++i) file.write(token.data(), 4);
  }
  // The same, and the file looks unchanged.
  static void spoil() {
    const auto time = fs::last_write_time(kTokens);
    overwrite({"\xff\xff\0\0", 4});
    fs::last_write_time(kTokens, time);
  }
  static void truncate() { fs::resize_file(kTokens, 4096); }
};

TEST_F(LostWork, ARunGoesOnWithoutAConsole) {
  EXPECT_EQ(exit_code(start("train" + kTinyRun + "--steps 300 --out run")), 0);
  EXPECT_EQ(newest_checkpoint("run"), fs::path("run/step-000300"));
}

TEST_F(LostWork, ASignalSavesTheRunWithoutAConsole) {
  const pid_t child = start("train" + kTinyRun + "--steps 1000000 --out run");
  ASSERT_TRUE(eventually([&] { return metrics("run").size() > 2; }));
  kill(child, SIGINT);
  EXPECT_EQ(exit_code(child), 128 + SIGINT);
  EXPECT_FALSE(newest_checkpoint("run").empty());
}

TEST_F(LostWork, CommandsThatOnlyPrintEndWithTheirReader) {
  EXPECT_EQ(exit_code(start("plan gpt2", Reader::leaves_at_once)), -SIGPIPE);
}

TEST_F(LostWork, ADiskThatIsFullOfMetricsLeavesACheckpoint) {
  const Outcome outcome = shell("ulimit -f 80; " + binary() + " train" + kTinyRun + "--steps 100000 --out run");
  const Index step = expect_saved(outcome, "metrics.jsonl: cannot write: File too large");
  expect_ok("train --resume --stop-after " + std::to_string(step + 1) + " --out run");
}

TEST_F(LostWork, TruncatedTokensLeaveACheckpoint) { expect_rescued(truncate, "data.safetensors: was truncated"); }

TEST_F(LostWork, OverwrittenTokensLeaveACheckpoint) {
  expect_rescued([] { overwrite({"\1\0\0\0", 4}); }, "data.safetensors: was changed");
}

// A batch cannot be read.
TEST_F(LostWork, TokensOutsideTheVocabularyLeaveACheckpoint) {
  expect_rescued(spoil, "outside the model's vocabulary");
}

TEST_F(LostWork, TheLastCheckpointIsSavedBeforeTheLastEvaluation) {
  const std::string shown = expect_ok("train" + kTinyRun + "--steps 2 --out run");
  EXPECT_LT(shown.find("saved    "), shown.find("after step 2: held-out loss")) << shown;
  expect_failed("train" + kTinyRun + "--steps 1 --rate 1e38 --warmup 0 --clip 0 --out diverged",
                "the weights have diverged", "diverged/step-000001 holds them: remove it");
}

TEST_F(LostWork, TokensThatWereOnlyTouchedAreTheSame) {
  const auto touch = [] {
    fs::last_write_time(kTokens, fs::file_time_type::clock::now());
    EXPECT_TRUE(reaches("run", steps("run") + 4));
    truncate();
  };
  expect_rescued(touch, "data.safetensors: was truncated");
}

// --- Wrong results ---

TEST_F(LostWork, ADamagedCheckpointIsNotResumed) {
  expect_ok("train" + kTinyRun + "--steps 4 --checkpoint-every 2 --out run");
  expect_ok("verify --run run");
  const fs::path last = "run/step-000004", before = "run/step-000002";
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json", "training/optimizer.safetensors"}) {
    const std::string good = read_file(file_of(last, name));
    for (const bool exchanged : {false, true}) {
      exchanged ? write_file_atomically(file_of(last, name), read_file(file_of(before, name)))
                : damage(file_of(last, name));
      if (read_file(file_of(last, name)) == good) continue;  // both steps have the same file
      expect_refused("train --resume --out run", fs::path(name).filename().string());
      expect_outcome(1, execute("verify --run run"), fs::path(name).filename().string());
      write_file_atomically(file_of(last, name), good);
    }
  }
  expect_ok("verify --run run");
  write_file_atomically(last / "other.safetensors", "");
  expect_outcome(1, execute("verify --run run"));
  fs::remove(last / "other.safetensors");
  Json state = parse_json_file(state_of(last));
  state["options"]["--rate"] = 0.125;
  write_file_atomically(state_of(last), state.dump(2));
  expect_refused("train --resume --out run", "state.json: was changed");
  fs::remove(state_of(last));
  expect_outcome(1, execute("verify --run run"), "step-000004: DAMAGED: a part of it is missing");
  expect_ok("train --resume --out run", "skipped " + last.string());
  expect_refused("verify --run nothing", "nothing: holds no checkpoint");
}

TEST_F(LostWork, APartOfACheckpointThatIsMissingIsNotLost) {
  expect_ok("train" + kTinyRun + "--steps 4 --checkpoint-every 2 --out run");
  const fs::path last = "run/step-000004";
  fs::rename(last / "model.safetensors", "weights");
  expect_refused("train --resume --out run", "model.safetensors: is missing from the checkpoint; restore it");
  fs::rename("weights", last / "model.safetensors");
  fs::rename(last, "elsewhere");
  expect_ok("train --resume --stop-after 3 --out run", "skipped " + last.string());
  EXPECT_TRUE(fs::exists(state_of(last)));
  fs::rename("elsewhere", last);
  expect_ok("verify --run run");
  expect_refused("verify --length 64 --run run", "--run takes no other options; leave out --length");
  fs::rename("run/training", "training");
  expect_refused("train --resume --out run", "a part of this checkpoint is missing, and there is no other");
}

TEST_F(LostWork, ARenamedCheckpointIsRefused) {
  expect_ok("train" + kTinyRun + "--steps 4 --out run");
  for (const char* name : {"step-000003", "step-4"}) {
    const fs::path renamed = "run" / fs::path(name);
    fs::rename("run/step-000004", renamed);
    fs::rename("run/training/step-000004", training_of(renamed));
    expect_outcome(1, execute("verify --run run"), "step 4 does not belong to this checkpoint");
    expect_refused("train --resume --out run", "step 4 does not belong to this checkpoint");
    fs::rename(renamed, "run/step-000004");
    fs::rename(training_of(renamed), "run/training/step-000004");
  }
}

TEST_F(LostWork, AdaptersAreOfTheirBaseAlone) {
  expect_ok(train("--lora 2 --steps 1 --out run"));
  damage("model/model.safetensors");
  for (const std::string command : {"eval --data data.jsonl", "merge --out merged"})
    expect_refused(command + " --adapter run", "has changed since the adapters of");
  expect_refused("merge --adapter run --model model --out merged", "is not the base that the adapters of");
  fs::create_directories("copied");
  for (const std::string name : {"adapter_config.json", "adapter_model.safetensors"})
    fs::copy("run/step-000001/" + name, "copied/" + name);
  fs::rename("model/tokenizer.json", "tokenizer.json");
  expect_refused("merge --adapter copied --model model --out merged", "has no tokenizer.json");
  fs::rename("tokenizer.json", "model/tokenizer.json");
  expect_ok("merge --adapter copied --model model --out merged");
  fs::copy("run/step-000001/adapter_config.json", "model/adapter_config.json");
  expect_refused("eval --data data.jsonl --model model", "a whole model and also adapters");
}

TEST_F(LostWork, CheckpointsToComeNeedRoomOnTheDisk) {
  expect_ok("train" + kTinyRun + "--steps 1000000000 --checkpoint-every 1 --stop-after 1 --out many",
            "warning: a checkpoint takes at least ", "and this run keeps 1000000000; ", " are free in ");
  const std::string said = expect_ok("train" + kTinyRun + "--steps 2 --checkpoint-every 1 --out few");
  EXPECT_FALSE(contains(said, "are free in")) << said;
}

TEST_F(LostWork, AModelBesideTheCheckpointsOfARunIsAmbiguous) {
  expect_ok("train" + kTinyRun + "--steps 1 --out run");
  for (const std::string name : {"config.json", "model.safetensors", "tokenizer.json"})
    fs::copy("run/step-000001/" + name, "run/" + name);
  expect_refused("eval --data data.jsonl --model run", "name a checkpoint");
  const std::string before = read_file("model/config.json");
  expect_refused(train("--steps 1 --out model"), "holds \"");
  EXPECT_EQ(read_file("model/config.json"), before);
}

TEST_F(LostWork, AnEditedReferenceIsComputedAgain) {
  write("data/pairs.jsonl", "{\"prompt\": \"Which? \", \"chosen\": \"this\", \"rejected\": \"that\"}\n");
  const std::string run = "train --objective dpo --model model --data data/pairs.jsonl --steps 1 --out ";
  expect_ok(run + "first");
  ASSERT_EQ(references().size(), 1u);
  const fs::path reference = references()[0];
  std::string bytes = read_file(reference);
  for (std::size_t i = 1; i <= 8; ++i) {  // log-probs of the last targets
    const float large = 500;
    std::memcpy(bytes.data() + bytes.size() - 4 * i, &large, 4);
  }
  write_file_atomically(reference, bytes);
  expect_ok(run + "second");
  EXPECT_EQ(metric("first", "loss"), metric("second", "loss"));
}

// --- Files of others ---

TEST_F(LostWork, ResultsDoNotReplaceOtherFiles) {
  const std::string weights = "model/model.safetensors", before = read_file(weights);
  expect_refused("tokenize --model model --data data.jsonl --out " + weights, "may be yours");
  expect_refused("verify --length 200 --save-gradient " + weights, "may be yours");
  expect_refused("eval --model model --data data.jsonl --json data.jsonl", "may be yours");
  expect_refused("examples answers --out data.jsonl", "holds something else");
  EXPECT_EQ(read_file(weights), before);
  for (int i = 0; i < 2; ++i) {  // what they wrote themselves, they replace
    tokenise();
    expect_ok("plan gpt2 --json plan.json");
    expect_ok("examples answers --count " + std::to_string(3 + i) + " --out examples.jsonl");
  }
  std::ofstream("examples.jsonl", std::ios::app) << "{\"text\": \"mine\"}\n";
  expect_refused("examples answers --out examples.jsonl", "holds something else");
}

TEST_F(LostWork, APipeInThePlaceOfMetricsIsRefused) {
  expect_ok("train" + kTinyRun + "--steps 3 --stop-after 1 --out run");
  fs::remove("run/metrics.jsonl");
  ASSERT_EQ(mkfifo("run/metrics.jsonl", 0600), 0);
  expect_refused("train --resume --out run", "metrics.jsonl: is not a regular file");
}

TEST_F(LostWork, AReportReadsRegularFilesOnly) {
  const fs::path metrics = "run/metrics.jsonl", completions = "run/completions.jsonl";
  fs::create_directories("run");
  write_file_atomically(metrics, "{\"step\": 1, \"loss\": 2}\n");
  ASSERT_EQ(mkfifo(completions.c_str(), 0600), 0);
  expect_refused("report run", "completions.jsonl: is not a regular file");
  for (const auto& [target, said] :
       {std::pair{"/dev/zero", "is not a regular file"}, {".", "is a directory"}, {"missing", "no such file"}}) {
    fs::remove(completions), fs::create_symlink(target, completions);
    expect_refused("report run", completions.string() + ": " + said);
  }
  fs::remove(metrics), fs::create_symlink("/dev/zero", metrics);
  expect_refused("report run", "metrics.jsonl: is not a regular file");
}

// Deep JSON is damage, in a run's own files, too; and of a huge file only both ends are read.
TEST_F(LostWork, AReportReadsWholeGroupsAtBothEnds) {
  const auto group = [](int step, std::size_t size) {
    return Json{{"step", step}, {"prompt", std::string(size, 'p')}, {"texts", {"t"}}, {"rewards", {1}}}.dump() + "\n";
  };
  const auto steps = [&](const std::string& text) {
    write_file_atomically("run/completions.jsonl", text);
    expect_ok("report run");
    const std::string page = read_file("run/report.html");
    std::string found;
    for (const char* step : {"11", "22", "33"})
      if (contains(page, "\"rewards\":[1],\"step\":" + std::string(step))) found += step;
    return found;
  };
  fs::create_directories("run");
  write_file_atomically("run/metrics.jsonl", "{\"step\": 1, \"loss\": 2}\n");
  EXPECT_EQ(steps(group(11, 1) + std::string(300'000, '[') + "\n" + group(33, 1) + "{\"step\": 22"), "1133");
  EXPECT_EQ(steps(group(11, 1) + group(22, 5 << 20) + group(33, 1)), "112233");  // read as a whole
  EXPECT_EQ(steps(group(11, 1) + group(22, 10 << 20) + group(33, 1)), "1133");
}

// A checkpoint can be published as it is, even if the command names whole paths.
TEST_F(LostWork, PublishedFilesNameNoDirectoryOfThisMachine) {
  expect_ok("train --model " + path("model") + " --data " + path("data.jsonl") + " --lora 2 --steps 1 --out " +
            path("run"));
  for (const auto& entry : fs::recursive_directory_iterator("run/step-000001")) {
    EXPECT_FALSE(contains(read_file(entry.path()), dir.string())) << entry.path();
    EXPECT_FALSE(contains(entry.path().string(), "training"));
  }
  expect_ok("generate --adapter run --prompt a --length 1");  // finds its base all the same
}

TEST_F(LostWork, EscapeSequencesOfFilesDoNotReachTheTerminal) {
  const std::string name = "da\033[31mta\nstreambp: not ours \u202e.jsonl";
  write_file_atomically(name, "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"x\033]0;\": 1}\n");
  for (const std::string command : {"tokenize --out t.safetensors", "eval", "train --steps 1 --out run"}) {
    const std::string outcome = expect_ok(command + " --skip-bad --model model --data '" + name + "'");
    for (const char* part : {"\033", "\nstreambp: not ours", "\u202e"})
      EXPECT_FALSE(contains(outcome, part)) << outcome;
  }
  fs::remove(name);
  EXPECT_FALSE(contains(execute("eval --model model --data '" + name + "'").output, "\nstreambp: not ours"));
}

// --- Several ranks ---

TEST(EachRank, ThrowsAnErrorThatAllShare) {
  const auto error = [](auto&& f) -> std::string {
    try {
      on_each_rank(f);
      return "";
    } catch (const SharedError& shared) {
      return shared.what();
    }
  };
  EXPECT_EQ(error([] {}), "");
  EXPECT_EQ(error([] { fail("the disk is full"); }), "the disk is full");
  EXPECT_EQ(error([] { throw std::bad_alloc(); }), "out of host memory");
}

class LostWorkOfRanks : public WithMpi<LostWork> {
 protected:
  const std::string two_ = "timeout -s KILL 150 mpirun -n 2 ";
};

TEST_F(LostWorkOfRanks, FullDisksAndBadTokensLeaveACheckpoint) {
  expect_rescued(spoil, "outside the model's vocabulary", two_);
  expect_rescued(truncate, "data.safetensors: was truncated", two_);
  const auto fill = [&] {  // metrics.jsonl exceeds the limit, checkpoints do not
    std::ofstream("run/metrics.jsonl", std::ios::app) << std::string(1 << 20, ' ') << "\n";
    const std::string processes = "$(pgrep -f -- '--out " + path("run") + "')";
    EXPECT_EQ(std::system(("for p in " + processes + "; do prlimit --pid $p --fsize=524288; done").c_str()), 0);
  };
  expect_rescued(fill, "metrics.jsonl: cannot write: File too large", two_);
}

TEST_F(LostWorkOfRanks, SaveWhenTheConsoleClosesAndRefuseADamagedCheckpoint) {
  // mpirun ends the ranks when its console closes; they save a checkpoint first.
  const Outcome outcome = shell(two_ + binary() + " train" + kTinyRun + "--steps 600 --out run | head -n 1");
  EXPECT_TRUE(eventually([&] { return !newest_checkpoint("run").empty(); })) << outcome;
  damage(newest_checkpoint("run") / "model.safetensors");
  const Outcome refused = shell(two_ + binary() + " train --resume --out run");
  EXPECT_NE(refused.exit_code, 0);
  EXPECT_PRED2(contains, refused.output, "model.safetensors: differs from what the run saved");
}

}  // namespace
}  // namespace streambp
