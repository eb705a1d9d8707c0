// --help, and how the command line answers names that it does not have.
#include <pty.h>

#include <set>

#include "tests/commands.h"

namespace streambp {
namespace {

const std::vector<std::string> kCommands = {"train",    "verify", "plan",   "bench",    "tokenize", "eval",
                                            "generate", "merge",  "report", "examples", "devices",  "list"};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string option_at(const std::string& text, std::size_t begin) {
  return text.substr(begin, text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-", begin) - begin);
}

// The options at the beginnings of lines.
std::set<std::string> listed(const std::string& help) {
  std::set<std::string> options;
  for (const std::string& line : lines_of(help))
    if (line.starts_with("  --") && !line.starts_with("  --help-all")) options.insert(option_at(line, 2));
  return options;
}

std::size_t widest(const std::string& text) {
  std::size_t width = 0;
  for (const std::string& line : lines_of(text)) width = std::max(width, line.size());
  return width;
}

class CommandLine : public Commands {};

// --- help ---

TEST_F(CommandLine, HelpIsReadInTenSeconds) {
  EXPECT_LE(widest(expect_ok("--help", "streambp train")), 80u);
  for (const std::string& command : kCommands) {
    const std::string help = expect_ok(command + " --help", "streambp " + command);
    EXPECT_LE(lines_of(help).size(), 60u) << help;
    EXPECT_LE(widest(help), 80u) << help;
    EXPECT_LE(listed(help).size(), 15u) << help;
    const std::string all = expect_ok(command + " --help-all", "streambp " + command);
    EXPECT_LE(widest(all), 80u) << all;
    for (const std::string& option : listed(help)) EXPECT_TRUE(listed(all).contains(option)) << command << option;
  }
}

TEST_F(CommandLine, HelpOfTrainBeginsWithWhatEverybodyNeeds) {
  const std::string help = expect_ok("train --help", "streambp train --help-all");
  for (const char* option : {"--model", "--data", "--out", "--epochs", "--rate", "--length", "--batch", "--accumulate",
                             "--lora", "--memory", "--resume"})
    EXPECT_TRUE(listed(help).contains(option)) << option;
  const auto is_example = [](const std::string& line) { return line.starts_with("  streambp train "); };
  EXPECT_EQ(std::ranges::count_if(lines_of(help), is_example), 3);
}

// The sources say which options there are.
TEST_F(CommandLine, HelpAllHasEveryOption) {
  std::set<std::string> all;
  for (const std::string& command : kCommands) all.merge(listed(execute(command + " --help-all").output));
  std::size_t found = 0;
  for (const auto& file : fs::directory_iterator(STREAMBP_SOURCE "/commands")) {
    std::string text = read_file(file.path());
    std::erase_if(text, [](char c) { return c == ' ' || c == '\n'; });
    for (const std::string call : {"add(\"--", "value(\"--"}) {
      for (std::size_t at = 0; (at = text.find(call, at)) != std::string::npos; at += call.size(), ++found)
        EXPECT_TRUE(all.contains(option_at(text, at + call.size() - 2))) << file << ": " << text.substr(at, 30);
    }
  }
  EXPECT_GT(found, 100u);
}

TEST_F(CommandLine, LongListsHaveACommand) {
  expect_ok("list families", "qwen3", "starcoder2");
  expect_ok("list models", "qwen3-8b", "8.19G", "qwen3");
  expect_ok("list defects", "labels-rolled", "positions-joined");
  expect_refused("list wings", "families, models, defects");
}

TEST_F(CommandLine, HelpIsAsWideAsTheTerminal) {
  for (const unsigned short columns : {50, 120}) {
    winsize size{.ws_row = 40, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
    int terminal = -1;
    const pid_t child = forkpty(&terminal, nullptr, nullptr, &size);
    ASSERT_GE(child, 0);
    if (child == 0) {
      execl(binary().c_str(), "streambp", "train", "--help", nullptr);
      _exit(127);
    }
    std::string help;
    char buffer[4096];
    for (ssize_t n; (n = ::read(terminal, buffer, sizeof buffer)) > 0;)
      help.append(buffer, static_cast<std::size_t>(n));
    EXPECT_EQ(exit_code(child), 0);
    close(terminal);
    std::erase(help, '\r');
    EXPECT_LE(widest(help), columns) << help;
    EXPECT_GT(widest(help), columns - 12u) << help;
  }
}

// --- names ---

TEST_F(CommandLine, UnknownOptionsAreNamedWithTheNearest) {
  const auto refused = [&](const std::string& arguments, const std::string& said) {
    expect_refused(arguments, "streambp: " + said);
  };
  refused("train --rat 1e-4", "--rat is not an option of streambp train; did you mean --rate?");
  refused("train --data x.txt --epoch 3 --length 0",
          "--epoch is not an option of streambp train; did you mean --epochs?");
  refused("train --eval-interval=5",
          "--eval-interval is not an option of streambp train; did you mean --eval-data or --eval-every?");
  refused("train --learning-rates 1e-4",
          "--learning-rates is not an option of streambp train; did you mean --learning-rate?");
  refused("merge --adaptor x", "--adaptor is not an option of streambp merge; did you mean --adapter?");
  refused("train -lr 1", "-lr is not an option of streambp train; did you mean --lr?");
  refused("train --modle x", "--modle is not an option of streambp train; did you mean --model or --mode?");
  refused("train --qqq 2", "--qqq is not an option of streambp train; see streambp train --help-all");
  refused("train chats.jsonl", "\"chats.jsonl\" is not expected after streambp train");
  refused("--fly train", "\"--fly\" is not a command; streambp --help lists the commands");
  refused("trian", "\"trian\" is not a command; did you mean train?");
}

// Names of other trainers, and underscores for dashes.
TEST_F(CommandLine, OtherTrainersNamesAreAccepted) {
  const std::string run =
      "train --hidden 16 --layers 1 --heads 2 --mlp 32 --sample 0 --eval-every 0 --max-length 32 "
      "--per_device_train_batch_size 3 "
      "--gradient_accumulation_steps 2 --learning_rate 2e-3 --weight-decay 0.3 --warmup_steps 1 --steps 2 --out run";
  expect_ok(run);
  const Json options = parse_json_file("run/training/step-000002/state.json")["options"];
  for (const auto& [flag, value] : std::map<std::string, double>{
           {"--length", 32}, {"--batch", 3}, {"--accumulate", 2}, {"--rate", 2e-3}, {"--decay", 0.3}, {"--warmup", 1}})
    EXPECT_EQ(options[flag], value) << flag;
  // Their values are checked, and messages use the option's name.
  for (const auto& [name, flag] : std::map<std::string, std::string>{{"--lr", "--rate"},
                                                                     {"--batch_size", "--batch"},
                                                                     {"--num-train-epochs", "--epochs"},
                                                                     {"--num_generations", "--group"},
                                                                     {"--max_completion_length", "--completion"}})
    expect_refused("train " + name + " no", flag + ": \"no\"");
  expect_refused("generate --max_new_tokens no", "--length: \"no\"");
  expect_refused("train --lr 1 --rate 1", "--rate");
  const std::string planned = expect_ok("plan gpt2 --lora 4 --load_in_4bit --length 1000");
  EXPECT_EQ(planned, expect_ok("plan gpt2 --lora 4 --base nf4 --length 1000"));
  EXPECT_PRED2(contains, expect_ok("plan qwen3.5-0.8b --length 1000"), "keys, values, states");
  expect_refused("plan gpt2 --lora 4 --load-in-4bit --base plain", "--base");
  const std::string help = expect_ok("train --help-all", "also --lr, --learning-rate", "also --load-in-4bit");
  EXPECT_FALSE(contains(execute("train --help").output, "--learning-rate"));
}

// A name that means something else is refused with the reason.
TEST_F(CommandLine, NamesThatMeanSomethingElseAreExplained) {
  expect_refused("train --warmup_ratio 0.1",
                 "--warmup-ratio is a share of the steps; --warmup takes a number of steps");
  expect_refused("train --load-in-8bit", "--base nf4");
  expect_refused("plan gpt2 --ranks 2 --gradient-accumulation-steps 2", "--accumulate counts those of all processes");
}

// --- a plan that does not fit ---

TEST_F(CommandLine, APlanThatDoesNotFitSaysWhatWould) {
  const std::string plan =
      "plan --family qwen3 --layers 2 --heads 8 --hidden 1024 --vocab 32000 --memory 900MiB --optimizer ";
  expect_outcome(1, execute(plan + "adamw --json none.json"), "no stream fits into 900.00 MiB", "would fit ");
  const Json others = parse_json_file("none.json")["alternatives"];
  ASSERT_EQ(others.size(), 5u);
  for (const Json& other : others) {  // as a plan with these options says
    const std::string options = other["options"], adamw = contains(options, "adamw") ? "" : "adamw ";
    expect_ok(plan + adamw + options.substr(adamw.empty() ? 12 : 0) + " --json other.json");
    EXPECT_EQ(parse_json_file("other.json")["longest"]["stream"], other["longest"]) << other;
  }
  const std::string said =
      expect_outcome(1, execute(plan + "adamw --length 30000"), "needs at least 1.34 GiB", "--lora 32");
  EXPECT_FALSE(contains(said, "adamw-bf16")) << "it has room for fewer tokens: " << others[0];
  expect_outcome(1, execute(plan + "adamw-bf16 --length 30000"), "a shorter --length ");
  // The least chunk is 2048 rows in bfloat16; a chunk of 256 would fit.
  expect_outcome(1, execute("plan qwen3-8b --length 100000 --memory 47.3GiB"), "needs at least 48.16 GiB");
  expect_outcome(1, execute("plan qwen3-8b --length 9000 --memory 1MiB"), "nothing of this fits");
  expect_refused("plan qwen3-8b --memory 80", "\"80\" has no unit; write it like 80MiB or 80GiB");
}

}  // namespace
}  // namespace streambp
