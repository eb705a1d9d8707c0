// The output directory of a run: locking, cleaning up after a killed run, and which checkpoints are kept.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <set>

#include "data/files/run_directory.h"
#include "tests/support.cuh"
#include "training/checkpoint_timer.h"
#include "training/trainer.h"

namespace {
std::set<std::string>* flushed_paths = nullptr;
bool directories_fail = false;  // when they are flushed
}  // namespace

// Replaces fsync in this program, to record which paths are flushed.
extern "C" int fsync(int file) {
  char path[4096];
  const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  if (flushed_paths && n > 0) flushed_paths->insert(std::filesystem::path(std::string(path, n)).filename());
  struct stat status {};
  if (directories_fail && fstat(file, &status) == 0 && S_ISDIR(status.st_mode)) return errno = EIO, -1;
  return static_cast<int>(syscall(SYS_fsync, file));
}

namespace streambp {
namespace {

using RunBegin = RunDirectory::Begin;
using RunKeep = RunDirectory::Keep;

class RunDirectories : public TemporaryDirectory {
 protected:
  std::string out() const { return (dir / "run").string(); }
  void add(const std::string& name, const std::string& contents = "") const { write("run/" + name, contents); }
  // An empty one.
  void add_checkpoint(Index step) const {
    fs::create_directories(dir / "run" / checkpoint_name(step));
    fs::create_directories(training_of(dir / "run" / checkpoint_name(step)));
    write_sealed_json(state_of(dir / "run" / checkpoint_name(step)), {{"step", step}});
  }
  std::set<std::string> names(const fs::path& of) const {
    std::set<std::string> all;
    for (const auto& entry : fs::directory_iterator(of)) all.insert(entry.path().filename());
    return all;
  }
  std::set<std::string> names() const { return names(dir / "run"); }

  void expect_refused(RunBegin begin, const std::string& said) const { EXPECT_ERROR(RunDirectory(out(), begin), said); }
};

// A model small enough to be saved often.
struct SmallRun {
  Config config;
  Cpu dev{std::size_t{1} << 20};
  Trainer<Cpu, float> trainer;
  ModelLayout layout{config};

  explicit SmallRun(OptimizerKind kind = OptimizerKind::adamw, Index vocab = 11)
      : config(make_config("llama", {vocab, 8, 1, 2, 1, 4, 12, 0, false})), trainer(dev, config, 8, kind) {
    trainer.initialise(1);
  }
  fs::path save(const fs::path& out, const ModelLayout& files, const Json& state) {
    return save_checkpoint(dev, out, trainer.model, files, *trainer.optimizer, state);
  }
  // A number of an optimizer's state.
  float& moment(const std::string& name) {
    float* found = nullptr;
    trainer.optimizer->for_each_state(config, [&](const std::string& state, const auto& rows) {
      if constexpr (std::is_same_v<decltype(rows), const Table<float>&>)
        if (state == name) found = &rows.back().matrix->data[3];
    });
    return *found;
  }
  Json state(Index step) const { return {{"step", step}, {"options", Json::object()}}; }
};

TEST_F(RunDirectories, AreClaimedByOneRunEach) {
  constexpr int runs = 8;
  fs::current_path(dir);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  for (int i = 0; i < runs; ++i) {
    if (fork() != 0) continue;
    close(ends[1]);
    char c;
    [[maybe_unused]] const ssize_t started = ::read(ends[0], &c, 1);
    try {
      RunDirectory run("", RunBegin::fresh);
      run.open(0, {});
      run.write_metrics({{"pid", getpid()}});
      _exit(0);
    } catch (...) {
      _exit(1);
    }
  }
  close(ends[0]), close(ends[1]);  // all start now
  int failed = 0;
  for (int i = 0, status; i < runs; ++i) wait(&status), failed += status != 0;
  fs::current_path("/");
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(names(dir / "out").size(), static_cast<std::size_t>(runs));
  for (int i = 1; i <= runs; ++i) {
    const std::string lines = read_file(dir / "out" / ("run-" + std::to_string(i)) / "metrics.jsonl");
    EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1);
  }
}

TEST_F(RunDirectories, AreLocked) {
  RunDirectory first(out(), RunBegin::fresh);
  first.open(0, {});
  expect_refused(RunBegin::resume, "another run is writing here");
  expect_refused(RunBegin::fresh, "another run is writing here");
}

TEST_F(RunDirectories, OfRefusedRunsDisappear) {
  { RunDirectory run(out(), RunBegin::fresh); }
  EXPECT_FALSE(fs::exists(out()));
  {
    RunDirectory run(out(), RunBegin::fresh);
    run.create();
    EXPECT_TRUE(fs::exists(out()));
  }
  EXPECT_FALSE(fs::exists(out()));
  fs::create_directories(out());
  {
    RunDirectory run(out(), RunBegin::fresh);
    run.create();
  }
  EXPECT_TRUE(fs::exists(out())) << "the user made it";
}

TEST_F(RunDirectories, ThatCannotBePreparedKeepNoTokens) {
  {
    RunDirectory run(out(), RunBegin::fresh);
    run.create();
    add("tokens-0123456789abcdef.safetensors"), add("tokens-mine.safetensors");
    fs::create_directories(dir / "run/run.json");  // in the way of the file
    EXPECT_ERROR(run.open(0, {}), "run.json: exists and is not a file");
  }
  EXPECT_EQ(names(), (std::set<std::string>{"run.json", "tokens-mine.safetensors"}));
}

TEST_F(RunDirectories, WithFilesOfOthersAreRefused) {
  for (const char* name :
       {"run.json", "notes.tmp-2024", "step-7.tmp/notes", "config.json", "tokens-mine.safetensors", "training/notes"}) {
    add(name, "mine");
    expect_refused(RunBegin::fresh, "which may be yours; a new run needs a new or empty directory");
    EXPECT_EQ(read_file(dir / "run" / name), "mine");
    fs::remove_all(out());
  }
  add("tokens-0123456789abcdef.safetensors"), add("run.json.tmp-17");  // of a run that was killed as it began
  EXPECT_NO_THROW(RunDirectory(out(), RunBegin::fresh));
}

TEST_F(RunDirectories, ThatCannotBeCreatedAreRefusedAtOnce) {
  write_file_atomically(dir / "run", "");
  expect_refused(RunBegin::fresh, "is not a directory");
  EXPECT_ERROR(RunDirectory("", RunBegin::resume), "--resume needs --out");
  EXPECT_ERROR(RunDirectory((dir / "run/below").string(), RunBegin::fresh).create(), "below");
}

// --- Where a run continues ---

TEST_F(RunDirectories, SuggestHowToContinue) {
  expect_refused(RunBegin::resume, "start the run without --resume");
  fs::create_directories(out());
  expect_refused(RunBegin::resume, "start the run without --resume");
  EXPECT_NO_THROW(RunDirectory(out(), RunBegin::fresh));
  add("metrics.jsonl");  // of an older version: its options are lost
  expect_refused(RunBegin::resume, "remove " + out());
  expect_refused(RunBegin::fresh, "holds \"metrics.jsonl\", which may be yours");
  add_checkpoint(10);
  expect_refused(RunBegin::fresh, "continue it with --resume");
  EXPECT_EQ(RunDirectory(out(), RunBegin::resume).checkpoint(), fs::path(out()) / "step-000010");
}

// A run that was killed before its first checkpoint restarts with its options. The error messages do not contradict
// each other.
TEST_F(RunDirectories, WithoutACheckpointResumeFromTheBeginning) {
  {
    RunDirectory run(out(), RunBegin::fresh);
    run.open(0, {{"--seed", 7}});
    run.write_metrics({{"step", 1}});
  }
  expect_refused(RunBegin::fresh, "--resume");
  fs::remove(dir / "run/metrics.jsonl");
  expect_refused(RunBegin::fresh, "by --resume");
  RunDirectory run(out(), RunBegin::resume);
  EXPECT_TRUE(run.checkpoint().empty());
  EXPECT_EQ(parse_json_file(run.state_file())["options"]["--seed"], 7);
  run.open(0, {{"--seed", 7}});
  EXPECT_EQ(read_file(dir / "run/metrics.jsonl"), "");
}

// Such as by a mistyped reward program.
TEST_F(RunDirectories, OfARunThatFailedBeforeItsFirstStepAreFree) {
  for (const char* line : {"{\"step\": 1, \"loss\": 2}", "{\"step\": \"1\"}", "[]", "not json", ""}) {
    RunDirectory(out(), RunBegin::fresh).open(0, {{"--seed", 7}});
    add("metrics.jsonl", std::string("{\"begin\": {}}\n{\"error\": \"no\", \"step\": 0}\n") + line);
    add("report.html", "");
    if (*line) expect_refused(RunBegin::fresh, "by --resume"), fs::remove_all(dir / "run");
  }
  add("mine.txt", "");
  expect_refused(RunBegin::fresh, "may be yours");
  fs::remove(dir / "run/mine.txt");
  RunDirectory run(out(), RunBegin::fresh);
  run.open(0, {});
  EXPECT_EQ(read_file(dir / "run/metrics.jsonl"), "");
}

TEST_F(RunDirectories, KeepMetricsUpToTheStep) {
  add_checkpoint(2);
  add("metrics.jsonl", "{\"step\":1}\n{\"step\":2}\nnot json\n{\"step\":3}\n[]\n{\"step\":\"1\"}\n{\"step\":4");
  RunDirectory run(out(), RunBegin::resume);
  run.open(2, {});
  run.write_metrics({{"step", 3}, {"loss", 1}});
  EXPECT_EQ(read_file(dir / "run/metrics.jsonl"), "{\"step\":1}\n{\"step\":2}\n{\"loss\":1,\"step\":3}\n");
  EXPECT_FALSE(fs::exists(dir / "run/run.json"));
}

TEST_F(RunDirectories, AreCleanedOfUnfinishedFiles) {
  for (const char* stale : {"step-000004.tmp/model.safetensors", "step-000003.old.tmp/config.json",
                            "metrics.jsonl.tmp-123", "run.json.tmp-9"})
    add(stale);
  const std::set<std::string> others = {"notes.tmp",         "step-x.tmp",      "a.tmp-",         "a.tmp-1b",
                                        "step-000005",       "step-1.tmp.txt",  "notes.tmp-2024", "step-7.tmp",
                                        "tokens-1.tmp-2024", "step-0000007.tmp"};
  for (const std::string& name : others) add(name);
  for (const char* stale : {"training/step-000004.tmp/state.json", "training/step-000009/state.json",
                            "step-000009.tmp/config.json", "training/step-000003/state.json"})
    add(stale);
  add("training/step-000008/state.json");  // somebody has moved its model
  add("mine.tmp/file"), add("last.tmp"), add_checkpoint(2);
  { RunDirectory looks(out(), RunBegin::resume); }
  EXPECT_TRUE(fs::exists(dir / "run/step-000004.tmp")) << "nothing is removed before the run starts";
  RunDirectory run(out(), RunBegin::resume);
  run.open(2, {});
  std::set<std::string> expected = others;
  expected.insert({"last", "last.tmp", "mine.tmp", "step-000002", "metrics.jsonl", "training"});
  EXPECT_EQ(names(), expected);
  EXPECT_EQ(names(dir / "run/training"), (std::set<std::string>{"step-000002", "step-000008"}));
}

// --- Checkpoints ---

TEST_F(RunDirectories, KeepTheNewestTwoAutomaticCheckpointsAndAllOthers) {
  SmallRun small;
  {
    RunDirectory run(out(), RunBegin::fresh);
    run.open(0, {});
    for (const Index step : {1, 2, 4}) run.save(small, small.layout, small.state(step), RunKeep::newest_two);
    run.save(small, small.layout, small.state(3), RunKeep::always);
  }
  RunDirectory run(out(), RunBegin::resume);
  EXPECT_EQ(run.checkpoint(), fs::path(out()) / "step-000004");
  run.open(4, {});
  run.save(small, small.layout, small.state(5), RunKeep::newest_two);
  const std::set<std::string> kept = {"step-000003", "step-000004", "step-000005"};
  EXPECT_EQ(names(dir / "run/training"), kept);
  EXPECT_EQ(names(), (std::set<std::string>{"best", "last", "metrics.jsonl", "run.json", "step-000003", "step-000004",
                                            "step-000005", "training"}));
  EXPECT_PRED2(contains, run.last_checkpoint(), "step-000005");
}

TEST_F(RunDirectories, NameTheNewestAndTheBestCheckpoint) {
  SmallRun small;
  const auto target = [&](const char* name) { return fs::read_symlink(dir / "run" / name).string(); };
  const auto evaluate = [&](RunDirectory& run, Index step, double loss) {
    run.write_metrics({{"step", step}, {"evaluation_loss", loss}});
    run.evaluated(step, loss);
    return run.is_better(loss);
  };
  {
    RunDirectory run(out(), RunBegin::fresh);
    run.open(0, {});
    run.save(small, small.layout, small.state(1), RunKeep::newest_two);
    EXPECT_EQ(target("best"), "step-000001");  // nothing is evaluated yet
    for (const Index step : {2, 3, 4, 5}) {
      run.save(small, small.layout, small.state(step), step == 4 ? RunKeep::best : RunKeep::newest_two);
      const double loss = step == 3 ? 1.0 : 2.0;
      const bool better = evaluate(run, step, loss);
      EXPECT_EQ(better, step < 4);
      if (better) run.name_best(loss);
      EXPECT_EQ(target("last"), checkpoint_name(step));
    }
    EXPECT_EQ(target("best"), "step-000003");
    EXPECT_EQ(run.worse(1), 2);
    run.save(small, small.layout, small.state(6), RunKeep::newest_two);
    const std::set<std::string> kept = {"step-000003", "step-000005", "step-000006"};  // 4 was never the best
    EXPECT_EQ(names(dir / "run/training"), kept);
    run.save(small, small.layout, small.state(7), RunKeep::best);
    EXPECT_TRUE(evaluate(run, 7, 0.5));  // and here the run is killed, before it has made the links
    fs::remove(dir / "run/last");
    fs::create_symlink("step-000007", dir / "run/best.tmp-12");
  }
  RunDirectory run(out(), RunBegin::resume);
  EXPECT_EQ(run.checkpoint().filename(), "step-000007");
  run.open(7, {});
  for (const char* name : {"best", "last"}) EXPECT_EQ(target(name), "step-000007");
  EXPECT_FALSE(names().contains("best.tmp-12"));
  EXPECT_EQ(run.worse(1), 0);
  EXPECT_EQ(without_link(dir / "run/last/"), dir / "run/step-000007");
}

TEST_F(RunDirectories, DoNotReplaceWhatIsNotTheirLink) {
  SmallRun small;
  RunDirectory run(out(), RunBegin::fresh);
  run.open(0, {});
  add("last/notes.txt", "somebody's work");
  fs::create_symlink("elsewhere", dir / "run/best");
  const auto saved = run.save(small, small.layout, small.state(1), RunKeep::always);
  EXPECT_PRED2(contains, saved.unlinked, "run/last is not a link of this run, so it does not name step-000001");
  run.name_best(1);
  EXPECT_EQ(fs::read_symlink(dir / "run/best"), "elsewhere");
  EXPECT_TRUE(is_complete_checkpoint(saved.path));
}

TEST(CheckpointTimers, SaveTheBestWhereItTakesAtMostAShareOfTheTime) {
  CheckpointTimer timer(CheckpointTimer::kByTime, 100, 3e9);  // about three seconds
  EXPECT_FALSE(timer.affordable(159));
  EXPECT_TRUE(timer.affordable(160));
  timer.saved(160, 170);
  EXPECT_FALSE(timer.affordable(369));
  EXPECT_TRUE(timer.affordable(370));
  timer.saved(370, 370.5);
  EXPECT_TRUE(timer.affordable(371));
  EXPECT_FALSE(CheckpointTimer(0, 0).affordable(1e9));
}

// Anything with the name of a new checkpoint is kept under another name.
TEST_F(RunDirectories, KeepExistingFilesUnderAnotherName) {
  SmallRun small;
  add_checkpoint(1);
  add("step-000002/model.safetensors", "somebody's work");
  add("step-000002.replaced", "taken");
  RunDirectory run(out(), RunBegin::resume);
  run.open(1, {});
  EXPECT_EQ(run.save(small, small.layout, small.state(2), RunKeep::always).aside.filename(), "step-000002.replaced-2");
  EXPECT_EQ(read_file(dir / "run/step-000002.replaced-2/model.safetensors"), "somebody's work");
  EXPECT_TRUE(is_complete_checkpoint(dir / "run/step-000002"));
}

TEST_F(RunDirectories, AreOnTheDiskBeforeASaveReturns) {
  SmallRun small;
  RunDirectory run(out(), RunBegin::fresh);
  std::set<std::string> flushed;
  flushed_paths = &flushed;
  run.open(0, {});
  run.save(small, small.layout, small.state(1), RunKeep::always);
  flushed_paths = nullptr;
  EXPECT_TRUE(flushed.contains("run")) << "the directory that contains the renamed entry";
  EXPECT_TRUE(flushed.contains("step-000001.tmp"));
  EXPECT_TRUE(flushed.contains("training"));
}

TEST_F(RunDirectories, ReportADirectoryThatCannotBeFlushed) {
  SmallRun small;
  RunDirectory run(out(), RunBegin::fresh);
  run.open(0, {});
  directories_fail = true;
  EXPECT_ERROR(run.save(small, small.layout, small.state(1), RunKeep::always), "Input/output error");
  EXPECT_ERROR(write_file_atomically(dir / "file", "contents"), "Input/output error");
  directories_fail = false;
  EXPECT_TRUE(newest_checkpoint(out()).empty());
}

// ulimit -f ends a program by SIGXFSZ, unless it ignores the signal; then the write fails and is cleaned up.
TEST_F(RunDirectories, HoldNoPartialCheckpointWhenFilesAreTooLarge) {
  SmallRun small;
  RunDirectory run(out(), RunBegin::fresh);
  run.open(0, {});
  {
    const FileSizeLimit limit(1024);
    EXPECT_ERROR(run.save(small, small.layout, small.state(1), RunKeep::always), "File too large");
  }
  EXPECT_EQ(names(), (std::set<std::string>{"metrics.jsonl", "run.json", "training"}));
  EXPECT_TRUE(fs::is_empty(dir / "run/training"));
  EXPECT_FALSE(run.has_saved(1));
  EXPECT_PRED2(contains, run.last_checkpoint(), "there is no checkpoint yet");
}

TEST_F(RunDirectories, RefuseNegativeStates) {
  const auto adamw = OptimizerKind::adamw, adamw_8bit = OptimizerKind::adamw_8bit;
  RunDirectory run(out(), RunBegin::fresh);
  run.open(0, {});
  Index step = 0;
  for (const auto& [kind, state, value] : {std::tuple(adamw, "m.", -1e-3f),
                                           {adamw, "v.", -1e-30f},
                                           {adamw_8bit, "m8.scale.", 1.0f},
                                           {adamw_8bit, "m8.scale.", -1.0f},
                                           {adamw_8bit, "v8.scale.", -1.0f}}) {
    SmallRun small(kind, 700);
    small.moment(state) = value;
    const fs::path saved = run.save(small, small.layout, small.state(++step), RunKeep::always).path;
    const std::string said = error_of(
        [&] { load_checkpoint(small.dev, saved, small.trainer.model, small.layout, *small.trainer.optimizer); });
    if (value > 0 || state == std::string("m.")) {  // a first moment may be negative
      EXPECT_EQ(said, "") << state;
    } else {
      EXPECT_PRED2(contains, said, "negative number") << state;
    }
  }
}

TEST(CheckpointTimers, CountStepsOrMinutes) {
  const CheckpointTimer never(0, 0), often(5, 0);
  EXPECT_FALSE(never.due(100, 1e9));
  EXPECT_TRUE(often.due(10, 0) && !often.due(11, 1e9));
  CheckpointTimer timer(CheckpointTimer::kByTime, 1000);
  EXPECT_FALSE(timer.due(1, 1599));
  EXPECT_TRUE(timer.due(2, 1600));
  timer.saved(1600, 1610);
  EXPECT_FALSE(timer.due(3, 2209));
  EXPECT_TRUE(timer.due(4, 2210));
  timer.saved(3000, 3100);  // a slow disk: saving takes a twentieth of the time at most
  EXPECT_FALSE(timer.due(5, 5099));
  EXPECT_TRUE(timer.due(6, 5100));
}

}  // namespace
}  // namespace streambp
