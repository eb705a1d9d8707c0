// streambp generate as a user runs it, on a tiny model that the test makes.
#include <pty.h>

#include "commands/display.h"
#include "tests/byte_model.h"
#include "tests/commands.h"

namespace streambp {
namespace {

class Generation : public Commands {
 protected:
  static constexpr Index kVocabulary = 259;  // bytes, <|im_start|>, <|im_end|>, and one that no text contains

  void SetUp() override {
    Commands::SetUp();
    fs::create_directories(path("model"));
    Config c = make_config("llama", {kVocabulary, 32, 2, 4, 2, 8, 64, 300, false});
    save(c);
    write("tokenizer.json", byte_tokenizer({"<|im_start|>", "<|im_end|>"}));
    write("tokenizer_config.json", {{"eos_token", "<|im_end|>"}});
    model = " --model " + path("model");
  }

  void save(const Config& c, std::uint64_t seed = 1, bool damaged = false) {
    save_random_model(path("model"), c, seed, [&](Model<float>& m) {
      if (damaged) m.weights.head.weight(5, 3) = m.weights.norm.weight(0, 3) = 3e38f;
    });
  }
  void write(const std::string& name, const Json& json) { write_file_atomically(path("model/" + name), json.dump()); }

  // The texts that a run writes to its --json file.
  Json texts(const std::string& arguments) {
    const Outcome outcome = execute("generate" + model + " --json " + path("out.json") + " " + arguments);
    EXPECT_EQ(outcome.exit_code, 0) << arguments << "\n" << outcome.output;
    return outcome.exit_code == 0 ? Json::parse(read_file(path("out.json")))["texts"] : Json::array();
  }
  void expect_generate_refused(const std::string& arguments, const std::string& said) {
    expect_refused("generate" + model + " " + arguments, said);
  }

  std::string model;
};

// RoPE is scaled for the longest text of the run.
TEST_F(Generation, ScalesRopeByLength) {
  Json config = parse_json_file(path("model/config.json"));
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
  write_file_atomically(path("prompts.txt"), "first\n\nsecond, longer\n");
  const Json lines = texts("--prompts " + path("prompts.txt") + " --samples 2 --length 5");
  ASSERT_EQ(lines.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(lines[i]["prompt"], i < 2 ? "first" : "second, longer");
  EXPECT_NE(lines[0]["tokens"], lines[1]["tokens"]);

  write_file_atomically(path("prompts.jsonl"), "{\"prompt\": \"first\"}\n{\"prompt\": \"second, longer\"}\n");
  EXPECT_EQ(texts("--prompts " + path("prompts.jsonl") + " --samples 2 --length 5"), lines);
  fs::rename(path("prompts.jsonl"), path("prompts.JSONL"));
  EXPECT_EQ(texts("--prompts " + path("prompts.JSONL") + " --samples 2 --length 5"), lines);
  EXPECT_EQ(texts("--prompt first 'second, longer' --samples 2 --length 5"), lines);
  EXPECT_EQ(texts("--length 5 --prompt first < /dev/null")[0], lines[0]);

  const Outcome piped =
      execute("generate" + model + " --json " + path("out.json") + " --length 5", "printf first | " + binary());
  EXPECT_EQ(piped.exit_code, 0) << piped.output;
  EXPECT_EQ(Json::parse(read_file(path("out.json")))["texts"][0], lines[0]);

  // each completion appears under its prompt, in the order of the prompts
  const Outcome shown = execute("generate" + model + " --prompts " + path("prompts.txt") + " --length 5 2> /dev/null");
  EXPECT_TRUE(shown.output.starts_with("--- first\n")) << shown.output;
  EXPECT_TRUE(contains(shown.output, "\n--- second, longer\n")) << shown.output;
}

TEST_F(Generation, RendersConversationsInTheChatLayout) {
  const Json chat = texts("--chat chatml --system Brief. --prompt Hello --length 3");
  std::string written;
  for (const Json& token : chat[0]["prompt_tokens"]) {
    const int id = token.get<int>();
    written += id < 256 ? std::string(1, static_cast<char>(id)) : id == 256 ? "<S>" : "<E>";
  }
  EXPECT_EQ(written, "<S>system\nBrief.<E>\n<S>user\nHello<E>\n<S>assistant\n");
  write_file_atomically(path("chats.jsonl"),
                        "{\"messages\": [{\"role\": \"system\", \"content\": \"Brief.\"}, {\"role\": \"user\", "
                        "\"content\": \"Hello\"}]}\n");
  EXPECT_EQ(texts("--chat chatml --prompts " + path("chats.jsonl") + " --length 3"), chat);
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

  fs::remove(path("model/generation_config.json"));  // <|im_end|>, which alone stops now, is not sampled here
  const std::string almost_full = "--temperature 2 --top-p 1 --prompt " + std::string(290, 'a');
  const Json full = texts(almost_full)[0];
  EXPECT_EQ(full["end"], "context");
  EXPECT_EQ(full["tokens"].size(), 11u);
  // RoPE goes on, if that is asked for.
  EXPECT_EQ(texts(almost_full + " --length 50")[0]["tokens"].size(), 50u);
  EXPECT_EQ(texts("--length 5 --prompt " + std::string(301, 'a'))[0]["tokens"].size(), 5u);
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
  expect_generate_refused("--prompts " + path("nowhere"), "nowhere");
  expect_generate_refused("--prompt a --json " + path("no/such/file.json"), "no/such");
  write_file_atomically(path("empty.txt"), "\n\n");
  expect_generate_refused("--prompts " + path("empty.txt"), "has no prompts");
  write_file_atomically(path("bad.jsonl"), "{\"prompt\": \"a\"}\n{\"prompt\": 3}\n");
  expect_generate_refused("--prompts " + path("bad.jsonl"), "bad.jsonl:2: ");
  write_file_atomically(path("bad.jsonl"), "{\"prompt\": ");
  expect_generate_refused("--prompts " + path("bad.jsonl"), "bad.jsonl:1: ");
  expect_refused("generate --prompt a", "--model");
  expect_refused("generate --prompt a --model " + path("nowhere"), "nowhere");
  for (const auto& [json, said] :
       std::vector<std::pair<Json, std::string>>{{{{"temperature", "hot"}}, "\"temperature\""},
                                                 {{{"top_k", 1.5}}, "\"top_k\""},
                                                 {{{"top_p", 7}}, "top-p"},
                                                 {{{"do_sample", 1}}, "\"do_sample\""},
                                                 {{{"eos_token_id", "x"}}, "\"eos_token_id\""},
                                                 {{{"eos_token_id", {1, -2}}}, "\"eos_token_id\""},
                                                 {Json::array(), "object"}}) {
    write("generation_config.json", json);
    expect_generate_refused("--prompt a", "generation_config.json");
    expect_generate_refused("--prompt a", said);
  }
  fs::remove(path("model/generation_config.json"));

  write("tokenizer.json", byte_tokenizer({"<|im_start|>", "<|im_end|>", "<x>", "<y>"}));
  EXPECT_EQ(execute("generate" + model + " --prompt a --length 2").exit_code, 0);
  expect_generate_refused("--prompt 'a<y>'", "token 259 (\"<y>\") is outside the model's vocabulary of 259");
  save(make_config("llama", {kVocabulary, 32, 2, 4, 2, 8, 64, 300, false}), 1, true);
  expect_generate_refused("--prompt a", "prompt 1: the logit of token");
  fs::remove(path("model/tokenizer.json"));
  expect_generate_refused("--prompt a", "tokenizer.json");
  fs::remove(path("model/model.safetensors"));
  write("tokenizer.json", byte_tokenizer({"<|im_start|>", "<|im_end|>"}));
  expect_generate_refused("--prompt a", "model.safetensors");
}

TEST_F(Generation, ReportsWhatFitsBeforeItStarts) {
  Config c = make_config("llama", {kVocabulary, 4096, 1, 32, 32, 128, 32, 1 << 24, false});
  write("config.json", config_to_json(c));
  const Outcome outcome = execute("generate" + model + " --prompt a --length 16777000");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(contains(outcome.output, "are free: there is room for ")) << outcome.output;
}

TEST_F(Generation, ReportsItsSpeed) {
  const Outcome outcome = execute("generate" + model + " --prompt a --length 20 --temperature 2 --stats");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_TRUE(contains(outcome.output, " tokens/s")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "of memory bandwidth (")) << outcome.output;
}

// --- eval ---

TEST_F(Generation, EvalMatchesTheWalkByFileAndPosition) {
  write_file_atomically(path("long.txt"), std::string(500, 'a') + "b");
  write_file_atomically(path("short.jsonl"), "{\"text\": \"abcabc\"}\n{\"prompt\": \"ab\", \"completion\": \"cab\"}\n");
  auto eval = [&](const std::string& arguments) {
    const Outcome outcome = execute("eval" + model + " --json " + path("eval.json") + " " + arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return Json::parse(read_file(path("eval.json")));
  };
  const std::string both = "--data " + path("long.txt") + " " + path("short.jsonl");
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
  Tokens text;
  for (int i = 0; i < 500; ++i) text.push_back('a');
  text.push_back('b'), text.push_back(257);
  Cpu dev(std::size_t{1} << 26);
  const Config c = read_config(path("model"));
  Trainer<Cpu, float> trainer(dev, c, 300, OptimizerKind::none);
  load_model(dev, path("model"), trainer.model);
  double sum = 0;
  for (std::size_t begin : {0, 300}) {
    const std::size_t end = std::min<std::size_t>(begin + 300, text.size());
    Batch batch;
    batch.append(
        Tokens(text.begin() + static_cast<std::ptrdiff_t>(begin), text.begin() + static_cast<std::ptrdiff_t>(end)),
        end < text.size() ? text[end] : -1);
    for (float logp : trainer.evaluate(batch, Schedule::full(300))) sum -= static_cast<double>(logp);
  }
  EXPECT_NEAR(result["files"][0]["loss"].get<double>(), sum / 501, 1e-5 * sum / 501);
  EXPECT_NEAR(result["total"]["perplexity"].get<double>(), std::exp(result["total"]["loss"].get<double>()), 1e-6);

  EXPECT_EQ(eval(both + " --length 100")["positions"].size(), 1u);
  const Outcome outcome = execute("eval" + model + " " + both);
  for (const char* part : {"long.txt", "total", "perplexity", "256-511", "1 of 3 documents are longer than 300 tokens"})
    EXPECT_TRUE(contains(outcome.output, part)) << part;
  EXPECT_EQ(eval(both + " --length 502")["files"][0]["split"], 0);
  EXPECT_FALSE(contains(execute("eval" + model + " " + both + " --length 502").output, "documents are longer"));
  write_file_atomically(path("bad.jsonl"), "{\"text\": \"abc\"}\nnonsense\n");
  const Outcome skipping = execute("eval" + model + " --skip-bad --data " + path("bad.jsonl"));
  EXPECT_TRUE(contains(skipping.output, "examples skipped: 1, the first: " + path("bad.jsonl:2: "))) << skipping.output;
  const std::string tokens = path("tokens.SAFETENSORS");
  ASSERT_EQ(execute("tokenize" + model + " --data " + path("long.txt") + " --out " + tokens).exit_code, 0);
  EXPECT_EQ(eval("--data " + tokens)["total"], eval("--data " + path("long.txt"))["total"]);
  expect_refused("eval" + model, "--data");
  expect_refused("eval" + model + " --data " + path("nowhere.txt"), "nowhere.txt");
  expect_refused("eval" + model + " --data " + path("long.txt") + " --length 1", "--length");
  save(make_config("llama", {200, 32, 2, 4, 2, 8, 64, 300, false}));
  expect_refused("eval" + model + " --data " + path("long.txt"), "vocabulary of 200");
}

// --- on a terminal ---

// Why this machine has no pseudo-terminals (a minimal container, a chroot); empty if it has.
std::string why_no_terminal() {
  int terminal = -1, program_side = -1;
  if (openpty(&terminal, &program_side, nullptr, nullptr, nullptr) != 0) return std::strerror(errno);
  close(terminal), close(program_side);
  return {};
}

// Runs the program on a pseudo-terminal and types `input`. The outcome holds what the terminal shows.
Outcome on_terminal(const std::string& arguments, const std::string& input) {
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    execl("/bin/sh", "sh", "-c", ("stty -echo; exec " + binary() + " " + arguments).c_str(), nullptr);
    _exit(127);
  }
  Outcome outcome{-1, ""};
  EXPECT_EQ(write(terminal, input.data(), input.size()), static_cast<ssize_t>(input.size()));
  char buffer[4096];
  for (ssize_t n; (n = ::read(terminal, buffer, sizeof buffer)) > 0;)
    outcome.output.append(buffer, static_cast<std::size_t>(n));
  int status = 0;
  waitpid(child, &status, 0);
  close(terminal);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

TEST_F(Generation, ChatsOnATerminal) {
  if (const std::string reason = why_no_terminal(); !reason.empty()) {
    GTEST_SKIP() << "no pseudo-terminal on this machine: " << reason;
  }
  const std::string greedy = model + " --chat chatml --length 12 --temperature 0";
  const Outcome once = on_terminal("generate" + greedy, "Hello\n/quit\n");
  EXPECT_EQ(once.exit_code, 0) << once.output;
  EXPECT_TRUE(contains(once.output, "chat layout chatml, context of 300 tokens")) << once.output;
  const std::string answer = texts("--chat chatml --length 12 --temperature 0 --prompt Hello")[0]["text"];
  std::string shown;  // a terminal begins a line with "\r\n"
  for (char c : without_controls(answer)) shown += c == '\n' ? "\r\n" : std::string(1, c);
  EXPECT_TRUE(contains(once.output, shown)) << once.output;

  // a second turn sees the first, and after /reset does not
  auto answers = [&](const std::string& input) {
    const Outcome outcome = on_terminal("generate" + greedy, input);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    std::vector<std::string> parts;
    for (std::size_t at = 0, next; (next = outcome.output.find("> ", at)) != std::string::npos; at = next + 2) {
      parts.push_back(outcome.output.substr(at, next - at));
    }
    return parts;
  };
  const auto reset = answers("Hello\n/reset\nHello\n\x04"), twice = answers("Hello\nHello\n\x04");
  ASSERT_EQ(reset.size(), 4u);
  EXPECT_EQ(reset[1], reset[3]);
  EXPECT_EQ(twice[1], reset[1]);
  EXPECT_NE(twice[2], twice[1]);

  const Outcome full = on_terminal("generate" + greedy, std::string(290, 'x') + "\n/quit\n");
  EXPECT_EQ(full.exit_code, 0);
  EXPECT_TRUE(contains(full.output, " tokens exceed the context of 300; /reset")) << full.output;
}

}  // namespace
}  // namespace streambp
