// The command tokenize.
#include "data/documents/token_file.h"
#include "data/files/lines.h"
#include "tests/chat_models.h"

namespace streambp {
namespace {

class TokenizeCommandTest : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    make_tokenizer_directory("model", "byte_level");
    write_file_atomically("chats.jsonl",
                          R"({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]}
{"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2\u001b[2J"}]}
)");
    write_file_atomically("bad.jsonl", "{\"text\": \"One\"}\nnonsense\n");
  }
  std::string arguments(const std::string& data, const std::string& more = "") const {
    return "tokenize --model model --data " + data + " --out out.safetensors " + more;
  }
};

TEST_F(TokenizeCommandTest, ShowsTheTokensUnderTheLoss) {
  const std::string shown = expect_ok(arguments("chats.jsonl", "--chat chatml --show 2"), "2 documents, ",
                                      "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n",
                                      "⟦2[2J<|im_end|>⟧");  // no escape sequence
  const TokenFile file("out.safetensors");
  EXPECT_EQ(file.documents(), 2);
  EXPECT_PRED2(
      contains, shown,
      std::to_string(file.token_count()) + " tokens, " + std::to_string(file.learned_count()) + " of them in the loss");
}

TEST_F(TokenizeCommandTest, ShowsPairs) {
  const std::string line = R"({"prompt": [{"role": "user", "content": "One?"}],)"
                           R"( "chosen": [{"role": "assistant", "content": "1"}],)"
                           R"( "rejected": [{"role": "assistant", "content": "eleven"}]})";
  write_file_atomically("pairs.jsonl", line + "\n" + line + "\n");
  const std::string outcome = expect_ok(arguments("pairs.jsonl", "--chat chatml --show 1"));
  const TokenFile file("out.safetensors");
  ASSERT_TRUE(file.preferences());
  const auto shown = [&](const std::string& side, Index length, const std::string& answer) {
    return "--- pair 1, " + side + ", " + std::to_string(length) +
           " tokens ---\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦" + answer + "<|im_end|>⟧\n";
  };
  const std::string both = shown("chosen", file.length(0), "1") + shown("rejected", file.length(1), "eleven");
  EXPECT_PRED2(contains, outcome, both) << outcome << "\nexpected: " << both;
  EXPECT_FALSE(contains(outcome, "pair 2")) << outcome;
  EXPECT_PRED2(contains, outcome, ": 2 pairs, " + std::to_string(file.token_count()) + " tokens, ");
  EXPECT_PRED2(contains, outcome, "the longest pair " + std::to_string(file.length(0) + file.length(1)) + " tokens");
  expect_refused(arguments("pairs.jsonl", "--chat chatml --learn all"), "--learn all is not for preferences");
  expect_refused(arguments("pairs.jsonl chats.jsonl", "--chat chatml"), "chats.jsonl:1: a document among preferences");
}

TEST_F(TokenizeCommandTest, WritesRenderings) {
  expect_ok(arguments("chats.jsonl", "--chat chatml --render seen.jsonl"));
  Lines lines("seen.jsonl");
  std::string line;
  ASSERT_TRUE(lines.next(line));
  const Json first = Json::parse(line);
  const std::string text = first["text"];
  EXPECT_EQ(text, "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>");
  ASSERT_EQ(first["learned"].size(), 1u);
  const std::size_t begin = first["learned"][0][0], end = first["learned"][0][1];
  EXPECT_EQ(text.substr(begin, end - begin), "1<|im_end|>");
  EXPECT_EQ(std::ssize(first["tokens"]), TokenFile("out.safetensors").length(0));
  expect_refused(arguments("chats.jsonl", "--chat chatml --render seen.jsonl"), "exists already");
}

TEST_F(TokenizeCommandTest, RefusesMisuse) {
  expect_refused("tokenize", "--model is required");
  expect_refused(arguments("chats.jsonl"), "has no chat template; name one with --chat");
  expect_refused(arguments("chats.jsonl", "--chat nonsense"), "no such file; name a Jinja template, or chatml");
  expect_refused(arguments("missing.jsonl"), "no such file");
  expect_refused(arguments("chats.jsonl", "--learn nothing"), "--learn");
  expect_refused("tokenize --model model --data chats.jsonl --out x.json", "name it .safetensors");
  expect_refused("tokenize --model model --chat chatml --data chats.jsonl --out no/such/place.safetensors",
                 "there is no directory");
  expect_refused("tokenize --model nowhere --data chats.jsonl --out x.safetensors", "is not a model directory");
}

}  // namespace
}  // namespace streambp
