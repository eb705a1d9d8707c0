// Reward programs: correct, slow, and broken in every way we could think of.
#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "tests/temporary.h"
#include "training/grpo/rewards.h"

namespace streambp {
namespace {

using Numbers = std::vector<double>;
using Requests = std::vector<Json>;
constexpr double kAmple = 60;  // seconds; no test takes this long

int descriptors() {
  int n = 0;
  DIR* all = opendir("/proc/self/fd");
  while (readdir(all) != nullptr) ++n;
  closedir(all);
  return n;
}

template <class Condition>
bool soon(const Condition& condition) {
  for (int i = 0; i < 3000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return condition();
}

// Whether the process exists and is not a zombie.
bool runs(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const std::size_t end = stat.rfind(") ");
  return end != std::string::npos && stat[end + 2] != 'Z';
}

// Checks that no descriptor or child is left, whatever the program did.
class RewardPrograms : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    signal(SIGPIPE, SIG_DFL);  // as in a program that knows nothing of pipes
    before = descriptors();
  }
  void TearDown() override {
    EXPECT_EQ(descriptors(), before);
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
    EXPECT_EQ(errno, ECHILD);
    TemporaryDirectory::TearDown();
  }

  // The error of one call, or "".
  std::string error(const std::string& command, const Requests& requests = {0}, double seconds = kAmple) {
    RewardProgram program(command, seconds);
    const std::string said = error_of([&] { program.rewards(requests); });
    if (said.empty()) return "";
    EXPECT_PRED2(contains, said, "reward program \"" + command.substr(0, 20));
    EXPECT_LT(said.size(), 600u);
    EXPECT_EQ(error_of([&] { program.rewards({}); }), said) << "it can be used again";
    return said;
  }

  // The path of a file of the test, for shell commands.
  std::string path(const std::string& name) const { return "'" + (dir / name).string() + "'"; }
  bool exists(const std::string& name) const { return std::filesystem::exists(dir / name); }

  int before;
};
#define EXPECT_WRONG(said, ...) EXPECT_PRED2(contains, error(__VA_ARGS__), said)

// --- Correct programs ---

TEST_F(RewardPrograms, AreAskedAgainAndAgain) {
  RewardProgram program("n=0; while read -r line; do n=$((n + 1)); echo $n.${#line}; done", kAmple);
  EXPECT_EQ(program.rewards({{}, Json::object(), {{"prompt", "a"}}}), (Numbers{1.4, 2.2, 3.14}));
  EXPECT_EQ(program.rewards({}), Numbers{});
  for (int i = 4; i < 10; ++i) EXPECT_EQ(program.rewards({0}), Numbers{i + 0.1});
}

// An evaluation may have more completions than a round, and the time limit is that of a round.
TEST_F(RewardPrograms, AreAskedForARoundAtMost) {
  const Prompt prompt{"", {}, {{"prompt", "a"}}};
  const std::vector<const Prompt*> prompts(10, &prompt);
  const std::vector<std::string> completions(10, "b");
  Rewarder counting({.prompts = 2, .group = 2, .program = "n=0; while read -r line; do n=$((n + 1)); echo $n; done"});
  EXPECT_EQ(counting.rewards(prompts, completions), (Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  Rewarder ends({.prompts = 2, .group = 2, .program = "for n in 1 2 3 4 5; do read -r line; echo $n; done"});
  EXPECT_ERROR(ends.rewards(prompts, completions), "request 2 of 4");
}

TEST_F(RewardPrograms, NeedNotBeAsked) {
  RewardProgram("cat", kAmple);
  RewardProgram("true", kAmple);
  RewardProgram("no-such-program 2> /dev/null", kAmple);
}

TEST_F(RewardPrograms, ReadJsonOfOneLineInUtf8) {
  const Json request = {
      {"prompt", "p"}, {"completion", "a\nb\xff\u00e9\u2028\u2029\u2028\u0085"}, {"answer", {1, nullptr}}};
  RewardProgram program(R"(read -r line
      if [ "$line" = '{"answer":[1,null],"completion":"a\nb)"
                        "\xef\xbf\xbd\u00e9"
                        R"(\u2028\u2029\u2028\u0085","prompt":"p"}' ]; then echo 1; else echo 0; fi; cat)",
                        kAmple);
  EXPECT_EQ(program.rewards({request}), Numbers{1});
}

TEST_F(RewardPrograms, WriteNumbersInManyWays) {
  const std::pair<std::string, double> cases[] = {
      {"0", 0},
      {"-1.5", -1.5},
      {" 2 \\r", 2},
      {"\\t+3", 3},
      {"1e3", 1000},
      {"1E-3", 0.001},
      {".5", 0.5},
      {"5.", 5},
      {"5e-324", 5e-324},
      {"-0.0", -0.0},
      {"007", 7},
      {"1.7976931348623157e308", 1.7976931348623157e308},
      {"0.1000000000000000055511151231257827021181583404541015625", 0.1},
  };
  std::string command = "read -r line; printf '";
  Requests requests;
  Numbers expected;
  for (const auto& [written, number] : cases) {
    command += written + "\\n";
    requests.push_back(requests.size());
    expected.push_back(number);
  }
  EXPECT_EQ(RewardProgram(command + "'; cat > /dev/null", kAmple).rewards(requests), expected);
}

TEST_F(RewardPrograms, MayAnswerInBlocks) {
  RewardProgram program("while read -r a && read -r b && read -r c; do printf \"$c\\n$b\\n\"; echo $a; done", kAmple);
  EXPECT_EQ(program.rewards({1, 2, 3, 4, 5, 6}), (Numbers{3, 2, 1, 6, 5, 4}));
  EXPECT_EQ(program.rewards({7, 8, 9}), (Numbers{9, 8, 7}));
}

TEST_F(RewardPrograms, AnswerManyLongRequests) {
  Requests requests;
  Numbers expected;
  for (int i = 0; i < 10'000; ++i) {
    requests.push_back({{"completion", std::string(static_cast<std::size_t>(2000 + i % 999), 'x')}, {"z", i}});
    expected.push_back(i);
  }
  const std::string by_line = "grep --line-buffered -o '[0-9]*}$' | grep --line-buffered -o '[0-9]*'";
  RewardProgram eager(by_line, kAmple);
  EXPECT_EQ(eager.rewards(requests), expected);
  EXPECT_EQ(eager.rewards({requests[7]}), Numbers{7});
  // What follows is still far more than pipes hold. One reads all before it answers.
  requests.resize(1000);
  expected.resize(1000);
  RewardProgram late("head -n 1000 > /dev/null; seq 0 999; cat", kAmple);
  EXPECT_EQ(late.rewards(requests), expected);
  // One answers all but the last before it reads.
  RewardProgram early("read -r line; seq -f %0900g 0 998; head -n 999 > /dev/null; echo 999; cat", kAmple);
  EXPECT_EQ(early.rewards(requests), expected);
}

TEST_F(RewardPrograms, MayOpenTheirInputByName) {
  EXPECT_EQ(RewardProgram("cat /dev/stdin > /dev/stdout", kAmple).rewards({1, 2}), (Numbers{1, 2}));
}

TEST_F(RewardPrograms, ShareOurStandardError) {
  testing::internal::CaptureStderr();
  const Numbers answers = RewardProgram("echo I am new >&2; cat", kAmple).rewards({1});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "I am new\n");
  EXPECT_EQ(answers, Numbers{1});
}

TEST_F(RewardPrograms, MayBeginWithADash) { EXPECT_WRONG("status 127", "-c 2> /dev/null"); }

TEST_F(RewardPrograms, HaveTimeToEnd) {
  {
    RewardProgram program("cat; : > " + path("done"), kAmple);
    program.rewards({0});
  }
  EXPECT_TRUE(exists("done"));
}

TEST_F(RewardPrograms, MayEndAfterTheLastAnswer) {
  EXPECT_EQ(error("read -r line; echo $line"), "");
  RewardProgram program("read -r line; echo $line", kAmple);
  EXPECT_EQ(program.rewards({1}), Numbers{1});
  const Requests two = {1, 2};
  EXPECT_ERROR(program.rewards(two), "ended with exit status 0 before it answered request 1 of 2");
}

// --- Programs that end early ---

TEST_F(RewardPrograms, ThatCannotBeStartedAreNamed) {
  EXPECT_WRONG("ended with exit status 127 before it answered request 1 of 1; the shell cannot find the program: check",
               "no-such-program 2> /dev/null");
  EXPECT_WRONG("ended with exit status 126 before it answered request 1 of 1; the shell cannot execute the file: check",
               "/ 2> /dev/null");
}

TEST_F(RewardPrograms, ThatEndEarlyAreRefused) {
  const std::string two = "read -r a; read -r b; printf '1\\n2\\n'; ";
  const Requests three = {1, 2, 3};
  EXPECT_WRONG("ended with exit status 0 before it answered request 3 of 3; see", two, three);
  EXPECT_WRONG("ended with exit status 7 before it answered request 3 of 3; see", two + "exit 7", three);
  EXPECT_WRONG("ended by signal 9, Killed before it answered request 3 of 3", two + "kill -KILL $$", three);
  EXPECT_WRONG("ended by signal 11, Seg", "ulimit -c 0; kill -SEGV $$");
  EXPECT_WRONG("exit status 143 (128 + signal 15, Terminated) before", "sh -c 'kill -TERM $$' 2> /dev/null; exit $?");
  EXPECT_WRONG("request 1 of 1, after an incomplete line \"0.5\"", "read -r a; printf 0.5");
}

TEST_F(RewardPrograms, ThatEndWithoutReadingDoNotEndUs) {
  const Requests large = {std::string(1'000'000, 'x'), 2};
  EXPECT_WRONG("ended with exit status 3 before it answered request 1 of 2", "exit 3", large);
  EXPECT_WRONG("ended with exit status 3 before it answered request 1 of 2", "head -c 100000 > /dev/null; exit 3",
               large);
}

TEST_F(RewardPrograms, ThatCloseTheirInputAreRefused) {
  EXPECT_WRONG("closed its standard input before it answered request 1 of 1", "exec sleep 1000 < /dev/null",
               {std::string(1'000'000, 'x')});
}

TEST_F(RewardPrograms, ThatCloseTheirOutputAreRefused) {
  EXPECT_WRONG("closed its standard output before it answered request 1 of 1", "exec sleep 1000 > /dev/null");
}

TEST_F(RewardPrograms, ThatEndAreNotWaitedForThoughTheirChildrenLive) {
  EXPECT_WRONG("ended with exit status 5 before it answered request 1 of 1", "sleep 1000 & exit 5");
}

// --- Programs with wrong answers ---

TEST_F(RewardPrograms, ThatAnswerNonsenseAreRefused) {
  const std::pair<std::string, std::string> cases[] = {
      {"abc", "\"abc\""},
      {"1 2", "\"1 2\""},
      {"", "\"\""},
      {" \\t", "\" \\x09\""},
      {"nan", "\"nan\""},
      {"inf", "\"inf\""},
      {"-inf", "\"-inf\""},
      {"1e999", "\"1e999\""},
      {"0x10", "\"0x10\""},
      {"1,5", "\"1,5\""},
      {"+-1", "\"+-1\""},
      {"++1", "\"++1\""},
      {"-", "\"-\""},
      {"+", "\"+\""},
      {"True", "\"True\""},
      {"1;", "\"1;\""},
      {"\\033[2J", "\"\\x1b[2J\""},
      {"\\001\\377\\200", "\"\\x01\\xff\\x80\""},
      {"1\\000", "\"1\\x00\""},
      {"nan(1)", "\"nan(1)\""},
      {"1\\r2", "\"1\\x0d2\""},
  };
  for (const auto& [written, named] : cases) {
    EXPECT_WRONG("request 1 of 1 is answered with " + named + ", which is not a finite number",
                 "read -r a; printf -- '" + written + "\\n'; cat");
    EXPECT_WRONG("request 2 of 3 is answered with " + named + ", which is not a finite number",
                 "read -r a; printf '1\\n" + written + "\\n3\\n'; cat", {1, 2, 3});
  }
}

TEST_F(RewardPrograms, ThatWriteLinesWithoutEndAreRefused) {
  const std::string said = "request 1 of 1 is answered with a line of more than 1000 bytes, \"1111";
  EXPECT_WRONG(said, "read -r a; tr '\\0' 1 < /dev/zero");
  EXPECT_WRONG(said, "read -r a; printf '%01001d\\n' 0 | tr 0 1; cat");
  EXPECT_WRONG("request 1 of 1 is answered with a line of more than 1000 bytes, \"\\x00\\x00",
               "read -r a; cat /dev/zero");
  EXPECT_EQ(error("read -r a; printf '%01000d\\n' 1; cat"), "");
}

TEST_F(RewardPrograms, ThatWriteTooManyLinesAreRefused) {
  const std::string said =
      "after the answer to its last request, number 2, so its rewards may belong to other completions; it must write";
  EXPECT_WRONG("wrote \"3\\n\" " + said, "read -r a; read -r b; printf '1\\n2\\n3\\n'; cat", {1, 2});
  EXPECT_WRONG("wrote \"\\n\" " + said, "read -r a; read -r b; printf '1\\n2\\n\\n'; cat", {1, 2});
  EXPECT_WRONG("wrote \"abc\" " + said, "read -r a; read -r b; printf '1\\n2\\nabc'; cat", {1, 2});
  EXPECT_WRONG("wrote \"1\\n1\\n", "read -r a; yes 1", {1, 2});
  EXPECT_WRONG("wrote \"3\\n\" " + said, "read -r a; read -r b; echo 1; echo 2; echo 3; cat", {1, 2});
}

TEST_F(RewardPrograms, ThatWriteTooManyLinesAtTheEndAreRefused) {
  RewardProgram program("while read -r line; do echo 1; done; sleep 0.1; echo 2", kAmple);
  program.rewards({0});
  program.check_quiet();
  EXPECT_ERROR(program.finish(), "wrote \"2\\n\" after the answer to its last request, number 1, so its rewards may");
  EXPECT_ERROR(program.check_quiet(), "may belong to other completions");
}

// The rewards before were right.
TEST_F(RewardPrograms, ThatFailOtherwiseMayBeFinished) {
  RewardProgram program("read -r line; echo 1; exit 3", kAmple);
  program.rewards({0});
  EXPECT_ERROR(program.rewards({0}), "exit status 3");
  program.check_quiet();
  program.finish();
}

TEST_F(RewardPrograms, AreFinishedWithinTheirTime) {
  const std::pair<std::string, double> cases[] = {{"exec cat", kAmple},
                                                  {"sleep 1000 & exec cat", kAmple},  // has its output, but not its end
                                                  {"exec sleep 1000", 0.1}};
  for (const auto& [command, seconds] : cases) {
    RewardProgram program(command, seconds);
    const double begun = ShellProgram::now();
    if (seconds == kAmple) program.rewards({1});
    program.finish();
    EXPECT_LT(ShellProgram::now() - begun, kAmple / 2) << command;
  }
}

TEST_F(RewardPrograms, ThatAnswerWhatTheyHaveNotReadAreRefused) {
  const Requests large = {1, std::string(1'000'000, 'x')};
  const std::string answer = "read -r a; printf '1\\n2\\n'; ";
  EXPECT_WRONG("answered its last request, number 2, before it read it", answer + "exec sleep 1000", large);
  EXPECT_WRONG("answered its last request, number 2, before it read it", answer, large);
}

TEST_F(RewardPrograms, ThatWriteWithoutBeingAskedAreRefused) {
  RewardProgram banner("echo Hello; : > " + path("early") + "; cat", kAmple);
  ASSERT_TRUE(soon([&] { return exists("early"); }));
  RewardProgram program("read -r a; echo 1; while ! [ -e " + path("go") + " ]; do sleep 0.01; done; echo 2; : > " +
                            path("late") + "; cat",
                        kAmple);
  EXPECT_EQ(program.rewards({0}), Numbers{1});
  write_file_atomically(dir / "go", "");
  ASSERT_TRUE(soon([&] { return exists("late"); }));
  EXPECT_ERROR(program.check_quiet(), "wrote \"2\\n\" after the answer to its last request, number 1, so its rewards");
  const std::pair<RewardProgram*, std::string> cases[] = {{&banner, "wrote \"Hello\\n\" without being asked, so"},
                                                          {&program, "wrote \"2\\n\" after the answer"}};
  for (const auto& wrong : cases) {
    for (const Requests& requests : {Requests{}, Requests{0}})
      EXPECT_ERROR(wrong.first->rewards(requests), wrong.second);
  }
}

// --- Programs that hang, and their children ---

TEST_F(RewardPrograms, ThatHangAreKilled) {
  EXPECT_WRONG("did not answer request 1 of 1 in the 0.2 s that one call may take; flush its output", "exec sleep 1000",
               {0}, 0.2);
  EXPECT_WRONG("did not answer request 1 of 1 in the 0.2 s", "kill -STOP $$", {0}, 0.2);
  EXPECT_WRONG("did not answer request 1 of 1 in the 0.1 s", "trap '' TERM HUP INT; while :; do sleep 0.01; done",
               {std::string(1'000'000, 'x')}, 0.1);
}

TEST_F(RewardPrograms, ThatDoNotAnswerAllAreKilled) {
  for (const auto& [third, begun] :
       {std::pair("", "; flush"), std::pair("3", ", after an incomplete line \"3\"; flush")}) {
    const std::string command = std::string("read -r a; read -r b; printf '1\\n2\\n") + third + "'; cat > /dev/null";
    std::string what;
    for (double seconds = 0.1; seconds < kAmple; seconds *= 2) {  // until it is enough for two answers
      what = error(command, {1, 2, 3}, seconds);
      if (contains(what, std::string("s that one call may take") + begun)) break;
    }
    EXPECT_TRUE(contains(what, "did not answer request 3 of 3 in the ")) << what;
    EXPECT_TRUE(contains(what, begun)) << what;
  }
}

TEST_F(RewardPrograms, AreTimedAsAWhole) {
  EXPECT_WRONG("did not answer request 1 of 1 in the 0.2 s that one call may take",
               "read -r a; while printf 1; do sleep 0.01; done", {0}, 0.2);
}

TEST_F(RewardPrograms, NeedTime) {
  for (const double seconds : {0.0, -1.0, std::nan("")}) EXPECT_THROW(RewardProgram("cat", seconds), Error);
  EXPECT_EQ(RewardProgram("cat", INFINITY).rewards({1}), Numbers{1});
}

TEST_F(RewardPrograms, LeaveNoGrandchildren) {
  const std::string start = "read -r a; sleep 1000 & echo $!; ";  // the answer is the grandchild's number
  pid_t grandchild;
  {
    RewardProgram program(start + "cat", kAmple);
    grandchild = static_cast<pid_t>(program.rewards({0})[0]);
    EXPECT_TRUE(runs(grandchild));
  }
  EXPECT_TRUE(soon([&] { return !runs(grandchild); })) << "after the end";

  RewardProgram wrong(start + "read -r a; echo abc; cat", kAmple);
  grandchild = static_cast<pid_t>(wrong.rewards({0})[0]);
  EXPECT_TRUE(runs(grandchild));
  EXPECT_THROW(wrong.rewards({0}), Error);
  EXPECT_TRUE(soon([&] { return !runs(grandchild); })) << "after an error";

  grandchild = 0;
  for (double seconds = 0.1; grandchild == 0 && seconds < kAmple; seconds *= 2) {  // until it is enough to start
    RewardProgram silent(
        "sleep 1000 & echo $! > " + path("made") + "; mv " + path("made") + " " + path("number") + "; cat > /dev/null",
        seconds);
    EXPECT_THROW(silent.rewards({0}), Error);
    if (exists("number")) grandchild = static_cast<pid_t>(std::stol(read_file(dir / "number")));
  }
  ASSERT_GT(grandchild, 0);
  EXPECT_TRUE(soon([&] { return !runs(grandchild); })) << "after its time";
}

// They leave the process group.
TEST_F(RewardPrograms, LeaveNoDaemons) {
  pid_t daemons[2];
  RewardProgram other("read -r a; setsid sh -c 'echo $$; exec sleep 1000' & cat", kAmple);
  daemons[1] = static_cast<pid_t>(other.rewards({0})[0]);
  {
    RewardProgram program("read -r a; setsid sh -c 'echo $$; (exec sleep 1000)' & cat", kAmple);
    daemons[0] = static_cast<pid_t>(program.rewards({0})[0]);
    EXPECT_TRUE(runs(daemons[0]));
  }
  EXPECT_FALSE(runs(daemons[0]));
  EXPECT_TRUE(runs(daemons[1])) << "it belongs to a program that has not ended";
}

TEST_F(RewardPrograms, ThatDoNotEndWithTheirInputAreKilled) {
  pid_t process;
  {
    RewardProgram program("read -r a; echo $$; exec sleep 1000", kAmple);
    process = static_cast<pid_t>(program.rewards({0})[0]);
    EXPECT_TRUE(runs(process));
  }
  EXPECT_FALSE(runs(process));
}

// A trainer that is killed cannot kill its reward program: the guard does.
TEST_F(RewardPrograms, EndWithAKilledTrainer) {
  const pid_t trainer = fork();
  if (trainer == 0) {
    RewardProgram program("trap '' TERM HUP INT; setsid sh -c 'echo $$ > " + (dir / "made").string() +
                              "; exec sleep 1000' & until [ -s " + path("made") + " ]; do sleep 0.01; done; " +
                              "sleep 1000 & echo $! $$ >> " + path("made") + "; mv " + path("made") + " " +
                              path("numbers") + "; sleep 1000",
                          kAmple);
    for (;;) pause();
  }
  ASSERT_TRUE(soon([&] { return exists("numbers"); }));
  std::ifstream numbers(dir / "numbers");
  pid_t daemon = 0, child = 0, shell = 0;
  numbers >> daemon >> child >> shell;
  EXPECT_TRUE(runs(daemon) && runs(child) && runs(shell));
  kill(trainer, SIGKILL);
  waitpid(trainer, nullptr, 0);
  EXPECT_TRUE(soon([&] { return !runs(daemon) && !runs(child) && !runs(shell); }));
}

TEST_F(RewardPrograms, DoNotInheritIgnoredSignals) {
  const auto before = signal(SIGXFSZ, SIG_IGN);
  EXPECT_EQ(RewardProgram("read -r a; sed -n 's/SigIgn:[[:space:]]*//p' /proc/self/status | tr -d '\\n' | "
                          "grep -c -e '[1-9a-f]......$' -e '[1-9a-f]...$'; cat",
                          kAmple)
                .rewards({0}),
            Numbers{0});
  signal(SIGXFSZ, before);
}

// --- Several programs ---

TEST_F(RewardPrograms, DoNotInheritDescriptors) {
  const std::string count = "read -r a; set -- /proc/$$/fd/*; echo $#; cat";
  const Numbers alone = RewardProgram(count, kAmple).rewards({0});
  auto other = std::make_unique<RewardProgram>("cat; : > " + path("ended"), kAmple);
  other->rewards({0});
  RewardProgram program(count, kAmple);
  EXPECT_EQ(program.rewards({0}), alone);
  other.reset();  // sees the end of its input, although a program that was started later is running
  EXPECT_TRUE(exists("ended"));
}

TEST_F(RewardPrograms, RunBesideThreads) {
  std::vector<Numbers> answers(16);
  std::vector<std::string> errors(16);
#pragma omp parallel for num_threads(4) schedule(dynamic)
  for (int i = 0; i < 16; ++i) {
    const auto at = static_cast<std::size_t>(i);
    errors[at] = error_of([&] {
      RewardProgram program(i % 2 ? "cat" : "read -r a; echo 1; exit 4", kAmple);
      for (int call = 0; call < 3; ++call) {
        for (const double answer : program.rewards({i, call})) answers[at].push_back(answer);
      }
    });
  }
  for (std::size_t i = 0; i < 16; ++i) {
    const double n = static_cast<double>(i);
    if (i % 2 == 1) {
      EXPECT_EQ(answers[i], (Numbers{n, 0, n, 1, n, 2})) << errors[i];
    } else {
      EXPECT_TRUE(contains(errors[i], "exit status 4 before it answered request 2 of 2")) << errors[i];
    }
  }
}

}  // namespace
}  // namespace streambp
