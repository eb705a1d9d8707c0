// Reward programs: correct, slow, and broken in every way we could think of.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>

#include "tests/temporary.h"
#include "training/grpo/rewards.h"

namespace streambp {
namespace {

using Numbers = std::vector<double>;
using Requests = std::vector<Json>;
constexpr double kAmple = 60;              // seconds; no test takes this long
const std::string kLarge(1'000'000, 'x');  // more than a pipe holds

auto descriptors() { return std::ranges::distance(std::filesystem::directory_iterator("/proc/self/fd")); }

// Whether the process exists and is not a zombie.
bool runs(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const std::size_t end = stat.rfind(") ");
  return end != std::string::npos && stat[end + 2] != 'Z';
}

bool ends(pid_t process) {
  return eventually([&] { return !runs(process); });
}

// Checks that no descriptor or child is left, whatever the program did.
class RewardPrograms : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    signal(SIGPIPE, SIG_DFL);  // as in a program that knows nothing of pipes
    std::filesystem::current_path(dir);
  }
  void TearDown() override {
    EXPECT_EQ(descriptors(), before);
    EXPECT_TRUE(waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD) << "a child is left";
    std::filesystem::current_path("/");
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

  // The answers to one call.
  static Numbers answers(const std::string& command, const Requests& requests) {
    return RewardProgram(command, kAmple).rewards(requests);
  }
  // The process that the program's answer names.
  static pid_t running_process(RewardProgram& program) {
    const auto process = static_cast<pid_t>(program.rewards({0})[0]);
    EXPECT_TRUE(runs(process));
    return process;
  }
  // The same, after the program has ended.
  static pid_t ended_process(const std::string& command) {
    RewardProgram program(command, kAmple);
    return running_process(program);
  }

  const std::ptrdiff_t before = descriptors();
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
  const std::vector<Reasoned> completions(10, {"", "b"});
  Rewarder counting({.prompts = 2, .group = 2, .program = "n=0; while read -r line; do n=$((n + 1)); echo $n; done"});
  EXPECT_EQ(counting.rewards(prompts, completions), (Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  Rewarder ends({.prompts = 2, .group = 2, .program = "for n in 1 2 3 4 5; do read -r line; echo $n; done"});
  EXPECT_ERROR(ends.rewards(prompts, completions), "request 2 of 4");
}

// A field of the data that is also called reasoning stays.
TEST_F(RewardPrograms, ReadAnswersAndReasoningApart) {
  const Prompt prompt{"", {}, {{"prompt", "a"}, {"completion", "of the data"}, {"reasoning", "of the data"}}};
  Rewarder rewarder(
      {.prompts = 1, .group = 2, .program = "while read -r line; do echo \"$line\" >> seen; echo 1; done"});
  EXPECT_EQ(rewarder.rewards({&prompt, &prompt}, {{"Hm.", "4"}, {"", "5"}}), (Numbers{1, 1}));
  EXPECT_EQ(read_file("seen"),
            R"({"completion":"4","completion_reasoning":"Hm.","prompt":"a","reasoning":"of the data"})"
            "\n"
            R"({"completion":"5","completion_reasoning":"","prompt":"a","reasoning":"of the data"})"
            "\n");
}

TEST_F(RewardPrograms, NeedNotBeAsked) {
  for (const char* command : {"cat", "true", "no-such-program 2> /dev/null"}) RewardProgram(command, kAmple);
}

TEST_F(RewardPrograms, ReadJsonOfOneLineInUtf8) {
  const Json request = {
      {"prompt", "p"}, {"completion", "a\nb\xff\u00e9\u2028\u2029\u2028\u0085"}, {"answer", {1, nullptr}}};
  const std::string line = R"({"answer":[1,null],"completion":"a\nb)"
                           "\xef\xbf\xbd\u00e9"
                           R"(\u2028\u2029\u2028\u0085","prompt":"p"})";
  EXPECT_EQ(answers("read -r a; [ \"$a\" = '" + line + "' ]; echo $?; cat", {request}), Numbers{0});
}

TEST_F(RewardPrograms, WriteNumbersInManyWays) {
  std::string command = "read -r line; printf -- '";
  Numbers expected;
  for (const char* written : {"0", "-1.5", " 2 \r", "\t+3", "1e3", "1E-3", ".5", "5.", "5e-324", "-0.0", "007",
                              "1.7976931348623157e308", "0.1000000000000000055511151231257827021181583404541015625"}) {
    command += written + std::string("\\n");
    expected.push_back(std::strtod(written, nullptr));
  }
  EXPECT_EQ(answers(command + "'; cat > /dev/null", Requests(expected.size())), expected);
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
  EXPECT_EQ(answers("head -n 1000 > /dev/null; seq 0 999; cat", requests), expected);
  // One answers all but the last before it reads.
  const std::string early = "read -r line; seq -f %0900g 0 998; head -n 999 > /dev/null; echo 999; cat";
  EXPECT_EQ(answers(early, requests), expected);
}

TEST_F(RewardPrograms, MayOpenTheirInputByName) {
  EXPECT_EQ(answers("cat /dev/stdin > /dev/stdout", {1, 2}), (Numbers{1, 2}));
}

TEST_F(RewardPrograms, ShareOurStandardError) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(answers("echo I am new >&2; cat", {1}), Numbers{1});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "I am new\n");
}

TEST_F(RewardPrograms, HaveTimeToEnd) {
  answers("cat; : > done", {0});
  EXPECT_TRUE(std::filesystem::exists("done"));
}

TEST_F(RewardPrograms, MayEndAfterTheLastAnswer) {
  EXPECT_EQ(error("read -r line; echo $line"), "");
  RewardProgram program("read -r line; echo $line", kAmple);
  EXPECT_EQ(program.rewards({1}), Numbers{1});
  EXPECT_ERROR(program.rewards(Requests(2)), "ended with exit status 0 before it answered request 1 of 2");
}

// --- Programs that end early ---

TEST_F(RewardPrograms, ThatCannotBeStartedAreNamed) {
  const std::string said = " before it answered request 1 of 1; the shell cannot ";
  EXPECT_WRONG("ended with exit status 127" + said + "find the program: check", "no-such-program 2> /dev/null");
  EXPECT_WRONG("ended with exit status 127" + said + "find the program: check", "-c 2> /dev/null");
  EXPECT_WRONG("ended with exit status 126" + said + "execute the file: check", "/ 2> /dev/null");
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
  // Their children live.
  EXPECT_WRONG("ended with exit status 5 before it answered request 1 of 1", "sleep 1000 & exit 5");
  // They do not read everything. Writing to them must not end this process.
  const std::string said = "ended with exit status 3 before it answered request 1 of 2";
  EXPECT_WRONG(said, "exit 3", {kLarge, 2});
  EXPECT_WRONG(said, "head -c 100000 > /dev/null; exit 3", {kLarge, 2});
}

TEST_F(RewardPrograms, ThatCloseTheirPipesAreRefused) {
  EXPECT_WRONG("closed its standard input before it answered request 1 of 1", "exec sleep 1000 < /dev/null", {kLarge});
  EXPECT_WRONG("closed its standard output before it answered request 1 of 1", "exec sleep 1000 > /dev/null");
}

// --- Programs with wrong answers ---

TEST_F(RewardPrograms, ThatAnswerNonsenseAreRefused) {
  // What the program writes, and how the error shows it.
  std::map<std::string, std::string> answers = {{" \\t", " \\x09"},
                                                {"\\033[2J", "\\x1b[2J"},
                                                {"\\001\\377\\200", "\\x01\\xff\\x80"},
                                                {"1\\000", "1\\x00"},
                                                {"1\\r2", "1\\x0d2"}};
  for (const char* plain :
       {"abc", "1 2", "", "nan", "nan(1)", "inf", "-inf", "1e999", "0x10", "1,5", "+-1", "++1", "-", "+", "True", "1;"})
    answers[plain] = plain;
  for (const auto& [written, shown] : answers) {
    const std::string said = " is answered with \"" + shown + "\", which is not a finite number";
    EXPECT_WRONG("request 1 of 1" + said, "read -r a; printf -- '" + written + "\\n'; cat");
    EXPECT_WRONG("request 2 of 3" + said, "read -r a; printf '1\\n" + written + "\\n3\\n'; cat", {1, 2, 3});
  }
}

TEST_F(RewardPrograms, ThatWriteLinesWithoutEndAreRefused) {
  const std::string said = "request 1 of 1 is answered with a line of more than 1000 bytes, \"1111";
  EXPECT_WRONG(said, "read -r a; tr '\\0' 1 < /dev/zero");
  EXPECT_WRONG(said, "read -r a; printf '%01001d\\n' 0 | tr 0 1; cat");
  EXPECT_WRONG("with a line of more than 1000 bytes, \"\\x00\\x00", "read -r a; cat /dev/zero");
  EXPECT_EQ(error("read -r a; printf '%01000d\\n' 1; cat"), "");
}

TEST_F(RewardPrograms, ThatWriteTooManyLinesAreRefused) {
  const std::string said =
      "after the answer to its last request, number 2, so its rewards may belong to other completions; it must write";
  const auto answer = [](const std::string& written) { return "read -r a; read -r b; " + written + "; cat"; };
  EXPECT_WRONG("wrote \"3\\n\" " + said, answer("printf '1\\n2\\n3\\n'"), {1, 2});
  EXPECT_WRONG("wrote \"\\n\" " + said, answer("printf '1\\n2\\n\\n'"), {1, 2});
  EXPECT_WRONG("wrote \"abc\" " + said, answer("printf '1\\n2\\nabc'"), {1, 2});
  EXPECT_WRONG("wrote \"3\\n\" " + said, answer("echo 1; echo 2; echo 3"), {1, 2});
  EXPECT_WRONG("wrote \"1\\n1\\n", "read -r a; yes 1", {1, 2});
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
  // The second leaves a child that has its output.
  for (const auto& [command, seconds] :
       {std::pair("exec cat", kAmple), std::pair("sleep 1000 & exec cat", kAmple), std::pair("exec sleep 1000", 0.1)}) {
    RewardProgram program(command, seconds);
    const double begun = ShellProgram::now();
    if (seconds == kAmple) program.rewards({1});
    program.finish();
    EXPECT_LT(ShellProgram::now() - begun, kAmple / 2) << command;
  }
}

TEST_F(RewardPrograms, ThatAnswerWhatTheyHaveNotReadAreRefused) {
  const std::string said = "answered its last request, number 2, before it read it";
  for (const std::string after : {"exec sleep 1000", ""})
    EXPECT_WRONG(said, "read -r a; printf '1\\n2\\n'; " + after, {1, kLarge});
}

TEST_F(RewardPrograms, ThatWriteWithoutBeingAskedAreRefused) {
  RewardProgram banner("echo Hello; : > early; cat", kAmple);
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists("early"); }));
  RewardProgram program("read -r a; echo 1; while ! [ -e go ]; do sleep 0.01; done; echo 2; : > late; cat", kAmple);
  EXPECT_EQ(program.rewards({0}), Numbers{1});
  write_file_atomically("go", "");
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists("late"); }));
  EXPECT_ERROR(program.check_quiet(), "wrote \"2\\n\" after the answer to its last request, number 1, so its rewards");
  for (const Requests& requests : {Requests{}, Requests{0}}) {
    EXPECT_ERROR(banner.rewards(requests), "wrote \"Hello\\n\" without being asked, so");
    EXPECT_ERROR(program.rewards(requests), "wrote \"2\\n\" after the answer");
  }
}

// --- Programs that hang, and their children ---

TEST_F(RewardPrograms, ThatHangAreKilled) {
  const std::string said = "did not answer request 1 of 1 in the 0.2 s that one call may take";
  EXPECT_WRONG(said + "; flush its output", "exec sleep 1000", {0}, 0.2);
  EXPECT_WRONG(said, "kill -STOP $$", {0}, 0.2);
  EXPECT_WRONG(said, "read -r a; while printf 1; do sleep 0.01; done", {0}, 0.2);
  EXPECT_WRONG(said, "trap '' TERM HUP INT; while :; do sleep 0.01; done", {kLarge}, 0.2);
}

TEST_F(RewardPrograms, ThatDoNotAnswerAllAreKilled) {
  for (const std::string third : {"", "3"}) {
    const std::string begun = third.empty() ? "; flush" : ", after an incomplete line \"3\"; flush";
    const std::string command = "read -r a; read -r b; printf '1\\n2\\n" + third + "'; cat > /dev/null";
    std::string what;
    for (double seconds = 0.1; seconds < kAmple && !contains(what, "request 3 of 3"); seconds *= 2)  // for two answers
      what = error(command, {1, 2, 3}, seconds);
    EXPECT_PRED2(contains, what, "did not answer request 3 of 3 in the ");
    EXPECT_PRED2(contains, what, begun);
  }
}

TEST_F(RewardPrograms, NeedTime) {
  for (const double seconds : {0.0, -1.0, std::nan("")}) EXPECT_THROW(RewardProgram("cat", seconds), Error);
  EXPECT_EQ(RewardProgram("cat", INFINITY).rewards({1}), Numbers{1});
}

TEST_F(RewardPrograms, LeaveNoProcesses) {
  RewardProgram other("read -r a; setsid sh -c 'echo $$; exec sleep 1000' & cat", kAmple);
  const pid_t of_other = running_process(other);
  const std::string start = "read -r a; sleep 1000 & echo $!; ";
  EXPECT_TRUE(ends(ended_process(start + "cat"))) << "a grandchild";
  EXPECT_FALSE(runs(ended_process("read -r a; setsid sh -c 'echo $$; (exec sleep 1000)' & cat"))) << "a daemon";
  EXPECT_FALSE(runs(ended_process("read -r a; echo $$; exec sleep 1000"))) << "it does not end with its input";
  EXPECT_TRUE(runs(of_other)) << "it belongs to a program that has not ended";

  RewardProgram wrong(start + "read -r a; echo abc; cat", kAmple);
  const pid_t grandchild = running_process(wrong);
  EXPECT_THROW(wrong.rewards({0}), Error);
  EXPECT_TRUE(ends(grandchild)) << "after an error";

  for (double seconds = 0.1; !std::filesystem::exists("number") && seconds < kAmple; seconds *= 2) {  // time to start
    RewardProgram silent("sleep 1000 & echo $! > made; mv made number; cat > /dev/null", seconds);
    EXPECT_THROW(silent.rewards({0}), Error);
  }
  EXPECT_TRUE(ends(static_cast<pid_t>(std::stol(read_file("number"))))) << "after its time";
}

// A trainer that is killed cannot kill its reward program: the guard does.
TEST_F(RewardPrograms, EndWithAKilledTrainer) {
  const pid_t trainer = fork();
  if (trainer == 0) {
    RewardProgram program(
        "trap '' TERM HUP INT; setsid sh -c 'echo $$ > made; exec sleep 1000' & until [ -s made ]; do sleep 0.01; "
        "done; sleep 1000 & echo $! $$ >> made; mv made numbers; sleep 1000",
        kAmple);
    for (;;) pause();
  }
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists("numbers"); }));
  std::ifstream numbers("numbers");
  pid_t daemon = 0, child = 0, shell = 0;
  numbers >> daemon >> child >> shell;
  EXPECT_TRUE(runs(daemon) && runs(child) && runs(shell));
  kill(trainer, SIGKILL);
  waitpid(trainer, nullptr, 0);
  EXPECT_TRUE(ends(daemon) && ends(child) && ends(shell));
}

TEST_F(RewardPrograms, DoNotInheritIgnoredSignals) {
  const auto before = signal(SIGXFSZ, SIG_IGN);
  const std::string ignored = "read -r a; sed -n 's/SigIgn:[[:space:]]*//p' /proc/self/status";
  EXPECT_EQ(answers(ignored + " | grep -c -e '[1-9a-f]......$' -e '[1-9a-f]...$'; cat", {0}), Numbers{0});
  signal(SIGXFSZ, before);
}

// --- Several programs ---

TEST_F(RewardPrograms, DoNotInheritDescriptors) {
  const std::string count = "read -r a; set -- /proc/$$/fd/*; echo $#; cat";
  const Numbers alone = answers(count, {0});
  auto other = std::make_unique<RewardProgram>("cat; : > ended", kAmple);
  other->rewards({0});
  RewardProgram program(count, kAmple);
  EXPECT_EQ(program.rewards({0}), alone);
  other.reset();  // sees the end of its input, although a program that was started later is running
  EXPECT_TRUE(std::filesystem::exists("ended"));
}

TEST_F(RewardPrograms, RunBesideThreads) {
  std::vector<Numbers> answers(16);
  std::vector<std::string> errors(16);
#pragma omp parallel for num_threads(4) schedule(dynamic)
  for (std::size_t i = 0; i < 16; ++i) {
    errors[i] = error_of([&] {
      RewardProgram program(i % 2 ? "cat" : "read -r a; echo 1; exit 4", kAmple);
      for (int call = 0; call < 3; ++call) {
        for (const double answer : program.rewards({i, call})) answers[i].push_back(answer);
      }
    });
  }
  for (std::size_t i = 0; i < 16; i += 2) {
    EXPECT_PRED2(contains, errors[i], "exit status 4 before it answered request 2 of 2");
    const auto n = static_cast<double>(i + 1);
    EXPECT_EQ(answers[i + 1], (Numbers{n, 0, n, 1, n, 2})) << errors[i + 1];
  }
}

}  // namespace
}  // namespace streambp
