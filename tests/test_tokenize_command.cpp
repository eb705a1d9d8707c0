// The command tokenize.
#include "data/documents/token_file.h"
#include "tests/chat_models.h"

namespace streambp {
namespace {

class TokenizeCommandTest : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    make_tokenizer_directory(dir / "model", "byte_level");
    write_file_atomically(dir / "chats.jsonl",
                          R"({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]}
{"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2\u001b[2J"}]}
)");
    write_file_atomically(dir / "bad.jsonl", "{\"text\": \"One\"}\nnonsense\n");
  }
  std::string arguments(const std::string& data, const std::string& more = "") const {
    return "tokenize --model " + path("model") + " --data " + data + " --out " + path("out.safetensors") + " " + more;
  }
};

TEST_F(TokenizeCommandTest, ShowsTheTokensUnderTheLoss) {
  const Outcome outcome = execute(arguments(path("chats.jsonl"), "--chat chatml --show 2"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"))
      << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "⟦2[2J<|im_end|>⟧")) << outcome.output;  // no escape sequence
  EXPECT_TRUE(contains(outcome.output, "2 documents, ")) << outcome.output;
  const TokenFile file(path("out.safetensors"));
  EXPECT_EQ(file.documents(), 2);
  EXPECT_TRUE(contains(outcome.output, std::to_string(file.token_count()) + " tokens, " +
                                           std::to_string(file.learned_count()) + " of them in the loss"));
}

TEST_F(TokenizeCommandTest, ReadsSeveralFilesAndItsOwnOutput) {
  ASSERT_EQ(execute(arguments(path("chats.jsonl"), "--chat zephyr --learn all")).exit_code, 0);
  const TokenFile first(path("out.safetensors"));
  EXPECT_EQ(first.learned_count(), first.token_count() - 2);
  const std::string again = "tokenize --model " + path("model") + " --data " + path("out.safetensors") + " " +
                            path("chats.jsonl") + " --chat chatml --out " + path("both.safetensors");
  const Outcome outcome = execute(again);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(TokenFile(path("both.safetensors")).documents(), 4);
}

TEST_F(TokenizeCommandTest, ShowsPairs) {
  write_file_atomically(dir / "pairs.jsonl",
                        R"({"prompt": [{"role": "user", "content": "One?"}],
                            "chosen": [{"role": "assistant", "content": "1"}],
                            "rejected": [{"role": "assistant", "content": "eleven"}]})");
  std::string line = read_file(dir / "pairs.jsonl");
  std::erase(line, '\n');
  write_file_atomically(dir / "pairs.jsonl", line + "\n" + line + "\n");
  const Outcome outcome = execute(arguments(path("pairs.jsonl"), "--chat chatml --show 1"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  const TokenFile file(path("out.safetensors"));
  ASSERT_TRUE(file.preferences());
  const auto shown = [&](const std::string& side, Index length, const std::string& answer) {
    return "--- pair 1, " + side + ", " + std::to_string(length) +
           " tokens ---\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦" + answer + "<|im_end|>⟧\n";
  };
  const std::string both = shown("chosen", file.length(0), "1") + "\n" + shown("rejected", file.length(1), "eleven");
  EXPECT_TRUE(contains(outcome.output, both)) << outcome.output << "\nexpected: " << both;
  EXPECT_FALSE(contains(outcome.output, "pair 2")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, ": 2 pairs, " + std::to_string(file.token_count()) + " tokens, "))
      << outcome.output;
  EXPECT_TRUE(
      contains(outcome.output, "the longest pair " + std::to_string(file.length(0) + file.length(1)) + " tokens"))
      << outcome.output;
  expect_refused(arguments(path("pairs.jsonl"), "--chat chatml --learn all"), "--learn all is not for preferences");
  expect_refused(arguments(path("pairs.jsonl") + " " + path("chats.jsonl"), "--chat chatml"),
                 "chats.jsonl:1: a document among preferences");
}

TEST_F(TokenizeCommandTest, CountsWhatItSkips) {
  expect_refused(arguments(path("bad.jsonl")), "bad.jsonl:2: not valid JSON");
  const Outcome outcome = execute(arguments(path("bad.jsonl"), "--skip-bad"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "examples skipped: 1, the first: ")) << outcome.output;
}

TEST_F(TokenizeCommandTest, RefusesMisuse) {
  expect_refused("tokenize", "--model is required");
  expect_refused(arguments(path("chats.jsonl")), "has no chat template; name a layout with --chat");
  expect_refused(arguments(path("chats.jsonl"), "--chat nonsense"), "no such layout; choose one of chatml");
  expect_refused(arguments(path("missing.jsonl")), "no such file");
  expect_refused(arguments(path("chats.jsonl"), "--learn nothing"), "--learn");
  expect_refused("tokenize --model " + path("model") + " --data " + path("chats.jsonl") + " --out x.json",
                 "name it .safetensors");
  expect_refused("tokenize --model " + path("model") + " --chat chatml --data " + path("chats.jsonl") + " --out " +
                     path("no/such/place.safetensors"),
                 "there is no directory");
  expect_refused(
      "tokenize --model " + path("nowhere") + " --data " + path("chats.jsonl") + " --out " + path("x.safetensors"),
      "is not a model directory");
}

}  // namespace
}  // namespace streambp
