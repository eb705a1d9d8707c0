// The library without the program: a run with an observer of its own, and the installed package.
#include <cstring>
#include <regex>

#include "tests/commands.h"
#include "training/train.h"

namespace streambp {
namespace {

using Library = Commands;

// A tiny model on a text.
Run tiny_run() {
  Run run;
  const auto text = std::make_shared<Text>(std::string(20000, 'a') + std::string(20000, 'b'), 0.1, 64, "a text");
  run.settings.config = make_config("llama", {256, 32, 1, 2, 1, 16, 64, 64, true});
  run.batch = 2, run.length = 64;
  run.schedule = schedule_for(Mode::stream, run.settings, run.rows(), kTile);
  run.memory = plan_run(run.settings, run.rows(), run.schedule, {});
  run.optimizer = {.rate = 1e-2, .warmup = 0, .steps = 6};
  run.source = text_source(text, "a text", 1, run.batch, run.length);
  run.layout.emplace(run.settings.config);
  return run;
}

// Writes down what it hears, and wants to stop after some steps.
struct Listener : Observer {
  void begin(Index first_step) override { heard.push_back("begin " + std::to_string(first_step)); }
  bool interrupted() noexcept override { return losses.size() == stop_after; }
  void step(const StepReport& report) override { losses.push_back(report.result.measures.loss); }
  void evaluation(Index step, const Evaluation&) override { heard.push_back("evaluation " + std::to_string(step)); }
  void saved(Index step, const fs::path&) override { heard.push_back("saved " + std::to_string(step)); }

  std::size_t stop_after = 1000;
  std::vector<double> losses;
  std::vector<std::string> heard;
};

TEST_F(Library, ARunTellsItsObserverWhatHappensAndPrintsNothing) {
  const auto run_in = [&](const std::string& name, RunDirectory::Begin begin, Listener& listener) {
    streambp::Run run = tiny_run();
    RunDirectory directory(path(name), begin);
    const auto engine = make_engine(run.settings, run.rows(), run.memory);
    return train(*engine, run, directory, listener);
  };
  using enum RunDirectory::Begin;
  Listener whole, part, rest;
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const Ended ended = run_in("whole", fresh, whole);
  EXPECT_EQ(ended.step, 6);
  EXPECT_FALSE(ended.interrupted);
  EXPECT_EQ(whole.heard, (std::vector<std::string>{"begin 0", "evaluation 0", "saved 6", "evaluation 6"}));
  EXPECT_EQ(whole.losses.size(), 6u);
  part.stop_after = 2;
  EXPECT_TRUE(run_in("part", fresh, part).interrupted);
  EXPECT_EQ(part.heard, (std::vector<std::string>{"begin 0", "evaluation 0", "saved 2"}));
  run_in("part", resume, rest);
  EXPECT_EQ(rest.heard[0], "begin 2");
  part.losses.insert(part.losses.end(), rest.losses.begin(), rest.losses.end());
  EXPECT_EQ(testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(part.losses, whole.losses);
}

TEST_F(Library, AnIncompleteRunIsRefused) {
  const auto refusal = [&](auto&& spoil) {
    streambp::Run run = tiny_run();
    spoil(run);
    RunDirectory directory(path("run"), RunDirectory::Begin::fresh);
    const auto engine = make_engine(run.settings, run.rows(), run.memory);
    Listener listener;
    return error_of([&] { train(*engine, run, directory, listener); });
  };
  EXPECT_PRED2(contains, refusal([](auto& run) { run.layout.reset(); }), "set Run::layout");
  EXPECT_PRED2(contains, refusal([](auto& run) { run.source.batch = {}; }), "set Run::source");
  EXPECT_PRED2(contains, refusal([](auto& run) { run.settings.objective.kind = ObjectiveKind::dpo; }),
               "Run::documents");
  EXPECT_FALSE(fs::exists(path("run")));
}

// As docs/library.md shows it; docs/minimal.cpp with the core, for which no other library must be there; and the programs
// of text/README.md, for which no header outside of text/ must be there but two.
TEST_F(Library, TheInstalledPackageBuildsTheExample) {
  const std::string source = STREAMBP_SOURCE, page = read_file(source + "/docs/library.md");
  const std::size_t begin = page.find("```cmake\n") + 9;
  write("own/CMakeLists.txt", page.substr(begin, page.find("```", begin) - begin) + R"(
add_executable(minimal minimal.cpp)
target_include_directories(minimal BEFORE PRIVATE absent)
target_link_libraries(minimal PRIVATE streambp::core)
target_compile_options(minimal PRIVATE -O1)
foreach(name tokenizer template)
  add_executable(${name} EXCLUDE_FROM_ALL ${name}.cpp)
  target_link_libraries(${name} PRIVATE streambp::${name})
endforeach()
)");
  const std::string libraries_of_text = read_file(source + "/text/README.md");
  for (const std::string name : {"tokenizer", "template"}) {
    const std::size_t program = libraries_of_text.find("```cpp\n", libraries_of_text.find("## `" + name)) + 7;
    write("own/" + name + ".cpp", libraries_of_text.substr(program, libraries_of_text.find("```", program) - program));
  }
  write("text", read_file(source + "/README.md").substr(0, 2000));
  std::string minimal = read_file(source + "/docs/minimal.cpp");
  EXPECT_LE(std::ranges::count(minimal, '\n'), 100);
  write("own/minimal.cpp", std::regex_replace(minimal, std::regex("steps = 200"), "steps = 40"));
  for (const char* header : {"nlohmann/json.hpp", "nlohmann/json_fwd.hpp", "CLI/CLI.hpp", "pcre2.h", "utf8proc.h",
                             "zlib.h", "zstd.h", "xxhash.h", "mpi.h"})
    write(std::string("own/absent/") + header, "#error the core includes it\n");
  fs::copy_file(source + "/docs/your-own-loss.cpp", path("own/your-own-loss.cpp"));
  expect_ok("train --layers 1 --hidden 32 --heads 2 --steps 1 --length 64 --sample 0 --out " + path("run"));
  for (const std::string& command :
       {"--install " + fs::path(binary()).parent_path().string() + " --prefix " + path("installed"),
        "-S " + path("own") + " -B " + path("build") + " -DCMAKE_PREFIX_PATH=" + path("installed"),
        "--build " + path("build")}) {
    const Outcome outcome = execute(command, "cmake");
    ASSERT_EQ(outcome.exit_code, 0) << command << "\n" << outcome.output;
  }
  const std::string example = path("build/your-own-loss");
  const Outcome outcome = execute(path("run/step-000001") + " 'To be or not to be'", example);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  std::vector<double> losses;
  const std::regex loss("loss ([0-9.]+)");
  for (std::sregex_iterator m(outcome.output.begin(), outcome.output.end(), loss), end; m != end; ++m)
    losses.push_back(std::stod((*m)[1]));
  ASSERT_EQ(losses.size(), 11u) << outcome.output;
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_LT(losses.back(), losses.front());
  expect_outcome(2, execute(path("run") + " text", example), "your-own-loss: ");
  expect_outcome(2, execute(path("run/step-000001") + " a", example), "at least two tokens");
  EXPECT_EQ(execute(path("installed/bin/streambp") + " --version", "env").exit_code, 0);
  const std::string core = path("build/minimal");
  const Outcome learned = execute(path("text"), core);
  std::smatch first, last;
  ASSERT_TRUE(std::regex_search(learned.output, first, std::regex("step  20  loss ([0-9.]+)"))) << learned.output;
  ASSERT_TRUE(std::regex_search(learned.output, last, std::regex("step  40  loss ([0-9.]+)"))) << learned.output;
  EXPECT_LT(std::stod(last[1]), 0.95 * std::stod(first[1]));
  const std::string libraries = execute(core, "ldd").output;
  EXPECT_TRUE(contains(libraries, "libc.so")) << libraries;
  EXPECT_FALSE(std::regex_search(libraries, std::regex("pcre|utf8proc|libz|xxhash|mpi"))) << libraries;

  const fs::path headers = path("installed/include/streambp");
  for (const char* name : {"error.h", "unfinished.h"})
    write(std::string("kept/") + name, read_file(headers / "kernels/base" / name));
  for (const auto& entry : fs::directory_iterator(headers))
    if (entry.path().filename() != "text" && entry.path().filename() != "fetched") fs::remove_all(entry.path());
  fs::create_directory(headers / "kernels");
  fs::rename(path("kept"), headers / "kernels/base");
  const Outcome built = execute("--build " + path("build") + " -j2 --target tokenizer template", "cmake");
  ASSERT_EQ(built.exit_code, 0) << built.output;
  const std::string llama = source + "/tests/golden/tokenizers/llama3.tokenizer.json";
  EXPECT_EQ(execute(llama + " 'Hi you'", path("build/tokenizer")).output,
            "39 \"H\"\n72 \"i\"\n220 \" \"\n88 \"y\"\n341 \"ou\"\n");
  EXPECT_EQ(execute("", path("build/template")).output,
            "<|user|>Hi<|end|><|system|>Obey.<|end|>\n  ^^^^  " + std::string(24, '^') + std::string(7, ' ') + "\n");
}

// The linker keeps one copy of a template that several files define, perhaps one that an old processor cannot run. So
// files compiled for newer processors define none that others could share.
TEST_F(Library, NothingButInnerLoopsIsCompiledForNewProcessors) {
#ifndef NDEBUG
  GTEST_SKIP() << "only an optimised build inlines everything that it should";
#endif
  const std::string folder = fs::path(binary()).parent_path().string();
  const Outcome symbols =
      execute("--demangle --defined-only " + folder + "/libstreambp_core.a " + folder + "/libstreambp.a", "nm");
  ASSERT_EQ(symbols.exit_code, 0) << symbols.output;
  std::istringstream lines(symbols.output);
  Index own = 0;
  bool in_inner_loops = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.ends_with(".o:"))
      in_inner_loops = line == "products.cpp.o:" || line == "few_rows.cpp.o:" || line == "softmax_rows.cpp.o:";
    if (!in_inner_loops || line.size() < 19 || std::strchr("WVu", line[17]) == nullptr) continue;
    const std::string name = line.substr(19);
    if (name.starts_with("DW.ref.") || name.starts_with("__clang_call_terminate")) continue;  // for exceptions
    const bool apart =
        name.find("streambp::cpu::avx") != std::string::npos || name.find("::neon::") != std::string::npos;
    EXPECT_TRUE(apart) << name;
    own += apart;
  }
  EXPECT_GT(own, 10);
}

}  // namespace
}  // namespace streambp
