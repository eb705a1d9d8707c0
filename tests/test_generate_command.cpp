// streambp generate as a user runs it, on a tiny model that the test makes.
#include <pty.h>

#include "commands/display.h"
#include "data/files/tokenizer_file.h"
#include "tests/byte_model.h"
#include "tests/commands.h"

namespace streambp {
namespace {

class Generation : public Commands {
 protected:
  static constexpr Index kVocabulary = 259;  // bytes, <|im_start|>, <|im_end|>, and one that no text contains

  void SetUp() override {
    Commands::SetUp();
    save_chat_model("model", config());
  }

  static Config config(Index vocabulary = kVocabulary) {
    return make_config("llama", {vocabulary, 32, 2, 4, 2, 8, 64, 300, false});
  }
  void write(const std::string& name, const Json& json) { write_file_atomically("model/" + name, json.dump()); }

  // The texts that a run writes to its --json file.
  Json texts(const std::string& arguments) {
    expect_ok("generate --model model --json out.json " + arguments);
    return parse_json_file("out.json")["texts"];
  }
  template <class... Said>
  void expect_generate_refused(const std::string& arguments, const Said&... said) {
    expect_refused("generate --model model " + arguments, said...);
  }
};

// RoPE is scaled for the longest text of the run.
TEST_F(Generation, ScalesRopeByLength) {
  Json config = parse_json_file("model/config.json");
  config["max_position_embeddings"] = 16;
  std::vector<std::string> scaled;
  for (int factor : {4, 5}) {
    config["rope_scaling"] = {{"type", "dynamic"}, {"factor", factor}};
    write("config.json", config);
    EXPECT_EQ(texts("--prompt ab --length 14 --temperature 0")[0]["tokens"].size(), 14u);
    scaled.push_back(texts("--prompt ab --prompt abcdefghijklmnopqrs --length 40 --temperature 0").dump());
  }
  EXPECT_NE(scaled[0], scaled[1]);
}

TEST_F(Generation, ContinuesAPromptAndReportsItsTokens) {
  const Json all = texts("--prompt 'Once upon' --length 20 --seed 4");
  ASSERT_EQ(all.size(), 1u);
  const Json& text = all[0];
  EXPECT_EQ(text["prompt"], "Once upon");
  EXPECT_EQ(text["prompt_tokens"].size(), 9u);
  EXPECT_EQ(text["tokens"].size(), 20u);
  EXPECT_EQ(text["logps"].size(), 20u);
  double sum = 0;
  for (const Json& logp : text["logps"]) sum += logp.get<double>();
  EXPECT_LT(text["logp"], 0);
  EXPECT_EQ(text["logp"], sum);
  EXPECT_EQ(text["end"], "length");
  EXPECT_EQ(texts("--prompt 'Once upon' --length 20 --seed 4"), all) << "the same seed";
  EXPECT_NE(texts("--prompt 'Once upon' --length 20 --seed 5"), all) << "another seed";
  EXPECT_EQ(texts("--prompt 'Once upon' --length 20 --temperature 0 --seed 4"),
            texts("--prompt 'Once upon' --length 20 --temperature 0 --seed 5"));
  EXPECT_EQ(texts("--prompt 'Once upon' --length 20 --top-k 1"),
            texts("--prompt 'Once upon' --length 20 --temperature 0"));
}

TEST_F(Generation, ReadsPromptsFromEverySource) {
  write_file_atomically("prompts.txt", "first\n\nsecond, longer\n");
  const Json lines = texts("--prompts prompts.txt --samples 2 --length 5");
  ASSERT_EQ(lines.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(lines[i]["prompt"], i < 2 ? "first" : "second, longer");
  EXPECT_NE(lines[0]["tokens"], lines[1]["tokens"]);

  write_file_atomically("prompts.jsonl", "{\"prompt\": \"first\"}\n{\"prompt\": \"second, longer\"}\n");
  EXPECT_EQ(texts("--prompts prompts.jsonl --samples 2 --length 5"), lines);
  fs::rename("prompts.jsonl", "prompts.JSONL");
  EXPECT_EQ(texts("--prompts prompts.JSONL --samples 2 --length 5"), lines);
  EXPECT_EQ(texts("--prompt first 'second, longer' --samples 2 --length 5"), lines);
  EXPECT_EQ(texts("--length 5 --prompt first < /dev/null")[0], lines[0]);

  // of a piped prompt, the end of its last line is no part
  const std::pair<const char*, const char*> piped[] = {
      {"first", "first"}, {"first\\n", "first"}, {"first\\r\\n", "first"}, {"first\\n\\n", "first\n"}};
  for (const auto& [input, prompt] : piped) {
    const std::string command = " generate --model model --json out.json --length 5";
    expect_outcome(0, shell("printf '" + std::string(input) + "' | " + binary() + command));
    EXPECT_EQ(parse_json_file("out.json")["texts"][0]["prompt"], prompt) << input;
  }

  // each completion appears under its prompt, in the order of the prompts
  const std::string shown =
      expect_ok("generate --model model --prompts prompts.txt --length 5 2> /dev/null", "\n--- second, longer\n");
  EXPECT_TRUE(shown.starts_with("--- first\n")) << shown;
}

TEST_F(Generation, RendersConversations) {
  const Json chat = texts("--chat chatml --system Brief. --prompt Hello --length 3");
  std::string written;
  for (const Json& token : chat[0]["prompt_tokens"]) {
    const int id = token.get<int>();
    written += id < 256 ? std::string(1, static_cast<char>(id)) : id == 256 ? "<S>" : "<E>";
  }
  EXPECT_EQ(written, "<S>system\nBrief.<E>\n<S>user\nHello<E>\n<S>assistant\n");
  write_file_atomically(
      "chats.jsonl",
      R"({"messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hello"}]})");
  EXPECT_EQ(texts("--chat chatml --prompts chats.jsonl --length 3"), chat);
  // Tools, and reasoning that the prompt opens
  write_file_atomically("tools.json", R"([{"type": "function", "function": {"name": "search"}}])");
  write_file_atomically("thinking.jinja",
                        "{{ tools[0].function.name }} {{ messages[0].content }}{% if x %}</think>{% endif %}<think>");
  const Json thought = texts("--chat thinking.jinja --tools tools.json --prompt Hello --length 4")[0];
  EXPECT_EQ(thought["prompt_tokens"].size(), std::string("search Hello<think>").size());
  EXPECT_EQ(thought["text"], "");
  EXPECT_EQ(thought["tokens"].size(), 4u);
  const std::string count = "--chat thinking.jinja --tools tools.json --prompt Hello --length 1 --template-arg x=";
  EXPECT_EQ(texts(count + "true")[0]["prompt_tokens"].size(), std::string("search Hello</think><think>").size());
  EXPECT_EQ(texts(count + "false")[0]["prompt_tokens"], thought["prompt_tokens"]);
  expect_generate_refused("--chat thinking.jinja --prompt Hello --template-arg y=1", "has no variable of this name");
  expect_generate_refused("--prompt Hello --template-arg x=1", "add --chat");
  expect_generate_refused("--tools missing.json --prompt Hello", "missing.json: no such file");
  write_file_atomically("tools.json", "{}");
  expect_generate_refused("--chat chatml --tools tools.json --prompt Hello", "tools.json: not a list of tools");
  write_file_atomically("tools.json", "[{}]");
  expect_generate_refused("--chat chatml --tools tools.json --prompt Hello", "writes no tools");
  expect_generate_refused("--chat --prompt Hello", "no chat template");
  expect_generate_refused("--chat nonsense --prompt Hello", "nonsense");
}

TEST_F(Generation, StopsAtStopTokensAndWhenTheContextIsFull) {
  const Json first = texts("--prompt ab --length 9 --temperature 0")[0]["tokens"];
  write("generation_config.json", {{"eos_token_id", {first[4], 258}}, {"do_sample", false}});
  const Json stopped = texts("--prompt ab --length 9")[0];
  EXPECT_EQ(stopped["end"], "stop");
  EXPECT_EQ(stopped["tokens"].back(), first[4]);
  EXPECT_LE(stopped["tokens"].size(), 5u);
  write("generation_config.json", {{"do_sample", true}, {"top_k", 1}, {"eos_token_id", first[4]}});
  EXPECT_EQ(texts("--prompt ab --length 9")[0], stopped) << "the stop token is the most likely token";

  fs::remove("model/generation_config.json");  // <|im_end|>, which alone stops now, is not sampled here
  const std::string almost_full = "--temperature 2 --top-p 1 --prompt " + std::string(290, 'a');
  const Json full = texts(almost_full)[0];
  EXPECT_EQ(full["end"], "context");
  EXPECT_EQ(full["tokens"].size(), 11u);
  // RoPE goes on, if that is asked for.
  EXPECT_EQ(texts(almost_full + " --length 50")[0]["tokens"].size(), 50u);
  EXPECT_EQ(texts("--length 5 --prompt " + std::string(301, 'a'))[0]["tokens"].size(), 5u);
}

// The model writes letters only.
class Letters : public Generation {
 protected:
  void SetUp() override {
    Commands::SetUp();
    save_chat_model("model", config(), [](auto& m) {
      for (Index token = 0; token < kVocabulary; ++token)
        for (Index i = 0; i < 32 && (token < 'a' || token > 'z'); ++i) m.weights.head.weight(token, i) = 0;
    });
  }
};

TEST_F(Letters, EndBeforeAStopText) {
  const std::string greedy = "--prompt ab --length 9 --temperature 0 --repetition-penalty 100";
  const Json whole = texts(greedy)[0];
  const std::string text = whole["text"], stop = text.substr(4, 3);
  ASSERT_EQ(text.size(), 9u);
  const Json stopped = texts(greedy + " --stop 0 " + stop + " --prompt cd")[0];
  EXPECT_EQ(stopped["text"], text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped["end"], "stop_text");
  EXPECT_EQ(stopped["tokens"].size(), text.find(stop) + 3) << "with the tokens that made it";
  EXPECT_EQ(whole["end"], "length");
  const std::string shown = expect_ok("generate --model model " + greedy + " --stop " + stop + " 2> /dev/null");
  EXPECT_EQ(shown, text.substr(0, text.find(stop)) + "\n");
  expect_generate_refused("--prompt a --stop ''", "--stop");
}

TEST_F(Letters, RepeatLessWithAPenalty) {
  const std::string greedy = "--prompt ab --length 9 --temperature 0";
  const std::string text = texts(greedy + " --repetition-penalty 100")[0]["text"];
  EXPECT_EQ(std::set<char>(text.begin(), text.end()).size(), 9u) << text;
  EXPECT_EQ(text.find_first_of("ab"), text.npos) << "letters of the prompt";
  write("generation_config.json", {{"repetition_penalty", 100}, {"temperature", 0}});
  EXPECT_EQ(texts(greedy)[0]["text"], text);
  EXPECT_EQ(parse_json_file("out.json")["repetition_penalty"], 100);
  EXPECT_NE(texts(greedy + " --repetition-penalty 1")[0]["text"], text);
  expect_generate_refused("--prompt a --repetition-penalty 0", "repetition penalty must be between");
}

// What may begin a stop text is not shown before it is clear.
TEST_F(Generation, StopTextsAreNeverShown) {
  const Tokenizer tokenizer = read_tokenizer("model");
  const auto shown = [&](const std::string& written) {
    GrowingText text(tokenizer, false, {}, {}, {"END.", "NDX"});
    testing::internal::CaptureStdout();
    Continuation all;
    for (const char c : written) {
      all.tokens.push_back(c);
      if (all.tokens.size() == written.size()) all.end = Ending::length;
      text.add(all), text.show_more();
      if (all.end == Ending::text) break;
    }
    EXPECT_EQ(text.reasoned().answer, testing::internal::GetCapturedStdout()) << written;
    return text.reasoned().answer + (all.end == Ending::text ? "|" : "");
  };
  EXPECT_EQ(shown("The EN END. more"), "The EN |");
  EXPECT_EQ(shown("The ENDX more"), "The E|");
  EXPECT_EQ(shown("The ENEND"), "The ENEND");
  EXPECT_EQ(shown("The ENEND."), "The EN|");
}

TEST_F(Generation, RefusesInvalidInputWithARemedy) {
  expect_generate_refused("--prompt a --temperature -1", "temperature");
  expect_generate_refused("--prompt a --temperature nan", "temperature");
  expect_generate_refused("--prompt a --top-p 0", "top-p");
  expect_generate_refused("--prompt a --top-k -3", "top-k");
  expect_generate_refused("--prompt a --length 0", "--length");
  expect_generate_refused("--prompt ''", "is empty");
  expect_generate_refused("< /dev/null", "standard input: is empty");
  expect_generate_refused("< /dev/zero", "standard input: has more than 67108864 bytes; shorten the prompt");
  expect_generate_refused("--prompts nowhere", "nowhere");
  expect_generate_refused("--prompt a --json no/such/file.json", "no/such");
  write_file_atomically("empty.txt", "\n\n");
  expect_generate_refused("--prompts empty.txt", "has no prompts");
  write_file_atomically("bad.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": 3}\n");
  expect_generate_refused("--prompts bad.jsonl", "bad.jsonl:2: ");
  write_file_atomically("bad.jsonl", "{\"prompt\": ");
  expect_generate_refused("--prompts bad.jsonl", "bad.jsonl:1: ");
  expect_refused("generate --prompt a", "--model");
  expect_refused("generate --prompt a --model nowhere", "nowhere");
  const std::pair<Json, std::string> wrong_settings[] = {{{{"temperature", "hot"}}, "\"temperature\""},
                                                         {{{"top_k", 1.5}}, "\"top_k\""},
                                                         {{{"top_p", 7}}, "top-p"},
                                                         {{{"do_sample", 1}}, "\"do_sample\""},
                                                         {{{"eos_token_id", "x"}}, "\"eos_token_id\""},
                                                         {{{"eos_token_id", {1, -2}}}, "\"eos_token_id\""},
                                                         {Json::array(), "object"}};
  for (const auto& [json, said] : wrong_settings) {
    write("generation_config.json", json);
    expect_generate_refused("--prompt a", "generation_config.json", said);
  }
  fs::remove("model/generation_config.json");

  write("tokenizer.json", byte_tokenizer({"<|im_start|>", "<|im_end|>", "<x>", "<y>"}));
  expect_ok("generate --model model --prompt a --length 2");
  expect_generate_refused("--prompt 'a<y>'", "token 259 (\"<y>\") is outside the model's vocabulary of 259");
  save_chat_model("model", config(),
                  [](auto& m) { m.weights.head.weight(5, 3) = m.weights.norm.weight(0, 3) = 3e38f; });
  expect_generate_refused("--prompt a", "prompt 1: the logit of token");
  fs::remove("model/tokenizer.json");
  expect_generate_refused("--prompt a", "tokenizer.json");
  fs::remove("model/model.safetensors");
  write("tokenizer.json", byte_tokenizer({"<|im_start|>", "<|im_end|>"}));
  expect_generate_refused("--prompt a", "model.safetensors");
}

TEST_F(Generation, ReportsWhatFitsBeforeItStarts) {
  write("config.json", config_to_json(make_config("llama", {kVocabulary, 4096, 1, 32, 32, 128, 32, 1 << 24, false})));
  expect_failed("generate --model model --prompt a --length 16777000", "are free: there is room for ");
}

TEST_F(Generation, ReportsItsSpeed) {
  expect_ok("generate --model model --prompt a --length 20 --temperature 2 --stats", " tokens/s",
            "of memory bandwidth (");
}

// --- eval ---

TEST_F(Generation, EvalMatchesTheWalkByFileAndPosition) {
  write_file_atomically("long.txt", std::string(500, 'a') + "b");
  fs::create_directory("short");
  write_file_atomically("short/a.jsonl", "{\"text\": \"abcabc\"}\n");
  write_file_atomically("short/b.jsonl", "{\"prompt\": \"ab\", \"completion\": \"cab\"}\n");
  auto eval = [&](const std::string& arguments) {
    expect_ok("eval --model model --json eval.json " + arguments);
    return parse_json_file("eval.json");
  };
  const std::string both = "--data long.txt short";
  const Json result = eval(both);
  EXPECT_EQ(result["length"], 300) << "the context length of the model";
  ASSERT_EQ(result["files"].size(), 2u);
  EXPECT_EQ(result["files"][0]["targets"], 501) << "with the token that ends the text";
  EXPECT_EQ(result["files"][1]["targets"], 6 + 4);
  EXPECT_EQ(result["files"][0]["split"], 1) << "502 tokens do not fit";
  EXPECT_EQ(result["files"][1]["split"], 0);
  EXPECT_EQ(result["total"]["targets"], 511);
  ASSERT_EQ(result["positions"].size(), 3u);
  const Index targets[] = {128 + 128 + 10, 128 + 74, 44};  // of pieces of 300 and 202 tokens, the last without a target
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(result["positions"][i]["targets"], targets[i] - (i == 1)) << i;

  // the loss of the first file, computed by the walk for each piece separately
  Tokens text(500, 'a');
  text.push_back('b'), text.push_back(257);
  Cpu dev(std::size_t{1} << 26);
  const Config c = read_config("model");
  Trainer<Cpu, float> trainer(dev, c, 300, OptimizerKind::none);
  load_model(dev, "model", trainer.model);
  double sum = 0;
  for (std::size_t begin : {0, 300}) {
    const std::size_t end = std::min<std::size_t>(begin + 300, text.size());
    Batch batch;
    batch.append(Tokens(&text[begin], text.data() + end), end < text.size() ? text[end] : -1);
    for (float logp : trainer.evaluate(batch, Schedule::full(300))) sum -= static_cast<double>(logp);
  }
  EXPECT_NEAR(result["files"][0]["loss"].get<double>(), sum / 501, 1e-5 * sum / 501);
  EXPECT_NEAR(result["total"]["perplexity"].get<double>(), std::exp(result["total"]["loss"].get<double>()), 1e-6);

  EXPECT_EQ(eval(both + " --length 100")["positions"].size(), 1u);
  expect_ok("eval --model model " + both, "long.txt", "total", "perplexity", "256-511",
            "1 of 3 documents are longer than 300 tokens");
  EXPECT_EQ(eval(both + " --length 502")["files"][0]["split"], 0);
  EXPECT_FALSE(contains(expect_ok("eval --model model --length 502 " + both), "documents are longer"));
  write_file_atomically("bad.jsonl", "{\"text\": \"abc\"}\nnonsense\n");
  expect_ok("eval --model model --skip-bad --data bad.jsonl", "examples skipped: 1, the first: bad.jsonl:2: ");
  expect_ok("tokenize --model model --data long.txt --out tokens.SAFETENSORS");
  EXPECT_EQ(eval("--data tokens.SAFETENSORS")["total"], eval("--data long.txt")["total"]);
  expect_refused("eval --model model", "--data");
  expect_refused("eval --model model --data nowhere.txt", "nowhere.txt");
  expect_refused("eval --model model --data long.txt --length 1", "--length");
  save_random_model("model", config(200));
  expect_refused("eval --model model --data long.txt", "vocabulary of 200");
}

// --- on a terminal ---

// Why this machine has no pseudo-terminals (a minimal container, a chroot); empty if it has.
std::string why_no_terminal() {
  int terminal = -1, program_side = -1;
  if (openpty(&terminal, &program_side, nullptr, nullptr, nullptr) != 0) return std::strerror(errno);
  close(terminal), close(program_side);
  return {};
}

// Runs the program on a pseudo-terminal and types `input`. The outcome holds what the terminal shows. Without echo, lines
// cannot be edited.
Outcome on_terminal(const std::string& arguments, const std::string& input, const std::string& echo = "-echo") {
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", ("stty " + echo + "; TERM=dumb exec " + binary() + " " + arguments).c_str(), nullptr);
    _exit(127);
  }
  Outcome outcome{arguments, -1, ""};
  EXPECT_EQ(write(terminal, input.data(), input.size()), static_cast<ssize_t>(input.size()));
  char buffer[4096];
  for (ssize_t n; (n = ::read(terminal, buffer, sizeof buffer)) > 0;)
    outcome.output.append(buffer, static_cast<std::size_t>(n));
  outcome.exit_code = exit_code(child);
  close(terminal);
  return outcome;
}

TEST_F(Generation, ChatsOnATerminal) {
  if (const std::string reason = why_no_terminal(); !reason.empty()) {
    GTEST_SKIP() << "no pseudo-terminal on this machine: " << reason;
  }
  const std::string greedy = " --model model --chat chatml --length 12 --temperature 0";
  const std::string answer = texts("--chat chatml --length 12 --temperature 0 --prompt Hello")[0]["text"];
  std::string shown;  // a terminal begins a line with "\r\n"
  for (char c : without_controls(answer)) shown += c == '\n' ? "\r\n" : std::string(1, c);
  expect_outcome(0, on_terminal("generate" + greedy, "Hello\n/quit\n"), "chat template chatml, context of 300 tokens",
                 shown);

  // a second turn sees the first, and after /reset does not
  auto answers = [&](const std::string& input) {
    const std::string output = expect_outcome(0, on_terminal("generate" + greedy, input));
    std::vector<std::string> parts;
    for (std::size_t at = 0, next; (next = output.find("> ", at)) != std::string::npos; at = next + 2)
      parts.push_back(output.substr(at, next - at));
    return parts;
  };
  const auto reset = answers("Hello\n/reset\nHello\n\x04"), twice = answers("Hello\nHello\n\x04");
  ASSERT_EQ(reset.size(), 4u);
  EXPECT_EQ(reset[1], reset[3]);
  EXPECT_EQ(twice[1], reset[1]);
  EXPECT_NE(twice[2], twice[1]);

  expect_outcome(0, on_terminal("generate" + greedy, std::string(290, 'x') + "\n/quit\n"),
                 " tokens exceed the context of 300; /reset");

  // what looks like a command does not reach the model
  const std::string help = expect_outcome(
      0, on_terminal("generate" + greedy, "/rest\n/help\n/quit\n"),
      "[/rest is not a command; did you mean /reset? With a space before it, the line goes to the model]",
      "  /quit or Ctrl-D         end the chat");
  EXPECT_FALSE(contains(help, "[stopped")) << help;

  // an earlier line is recalled and edited: ä is deleted as one character
  const std::string echoed = expect_outcome(
      0, on_terminal("generate" + greedy, "Hello\n/help\n\x1b[A\x1b[A\xc3\xa4\x7f\n/quit\n", "echo iutf8"));
  const bool edits = contains(echoed, "recall earlier lines");
  EXPECT_TRUE(!edits || contains(echoed, twice[2].substr(0, twice[2].find("\r\n\r\n")))) << echoed;
}

}  // namespace
}  // namespace streambp
