// Data that compares answers: preferences and groups as tokens.
#include "tests/encoding.h"

namespace streambp {
namespace {

// --- Preferences ---

// A preference is two documents that differ only from the point where the model starts to generate.
TEST_F(Encoding, OfPreferencesDiffersOnlyInTheAnswer) {
  model("byte_level");
  const Message system = {"system", "Brief!"}, one = {"user", "One?"}, first = {"assistant", "1"},
                two = {"user", "Two?"};
  const auto preference = [](std::vector<Message> prompt, const std::string& chosen, const std::string& rejected) {
    Example example{.kind = Example::preference};
    for (const std::string& answer : {chosen, rejected}) {
      example.sides.push_back({.kind = Example::conversation, .chat = {.messages = prompt}, .first = prompt.size()});
      example.sides.back().chat.messages.push_back({"assistant", answer});
    }
    return example;
  };
  const std::vector<Message> prompt = {system, one, first, two};
  const std::pair<const char*, std::vector<std::string>> cases[] = {
      {"chatml", {"2<|im_end|>", " 3<|im_end|>"}},
      {"headers", {"2<|eot_id|>", "3<|eot_id|>"}},
      {"brackets", {" 2</s>", " 3</s>"}},
      {"marked", {"2<|im_end|>", "3<|im_end|>"}},
      {"turns", {"<think>\n\n</think>\n\n2<|im_end|>", "<think>\n\n</think>\n\n 3<|im_end|>"}}};
  for (const auto& [used, answers] : cases) {
    const Encoder encoder = this->encoder(used);
    const auto pair = encoder.encode(preference(prompt, "2", " 3"));
    ASSERT_EQ(pair.size(), 2u) << used;
    const Tokens before = encoder.prompt({.messages = prompt}).tokens;
    for (const std::size_t side : {0, 1}) {
      const Document& document = pair[side];
      EXPECT_EQ(learned(document), answers[side]) << used;
      ASSERT_LT(before.size(), document.tokens.size()) << used;
      EXPECT_TRUE(std::equal(before.begin(), before.end(), document.tokens.begin())) << used;
      EXPECT_EQ(std::ranges::find(document.learn, 1) - document.learn.begin(), static_cast<Index>(before.size()))
          << used;
    }
  }
  EXPECT_EQ(learned(encoder("turns").encode(preference(prompt, "<think>\nhm\n</think>\n\n2", "3")).at(0)),
            "<think>\nhm\n</think>\n\n2<|im_end|>");
}

TEST_F(Encoding, OfPreferencesEqualsThatOfCompletions) {
  model("byte_level");
  const Example texts = parse_example(R"({"prompt": "One? ", "chosen": "Two.", "rejected": "Three.</s>"})");
  const auto pair = encoder().encode(texts);
  ASSERT_EQ(pair.size(), 2u);
  for (const std::size_t side : {0, 1}) {
    const Document alone = encoder().encode(texts.sides[side]).at(0);
    EXPECT_EQ(pair[side].tokens, alone.tokens);
    EXPECT_EQ(pair[side].learn, alone.learn);
  }
  EXPECT_EQ(text(pair[0].tokens), "One? Two.</s>");
  EXPECT_EQ(learned(pair[1]), "Three.</s>");
}

TEST_F(Encoding, RefusesInvalidPreferences) {
  model("byte_level");
  const auto refused = [&](const Encoder& encoder, const std::string& line, const char* said) {
    EXPECT_PRED2(contains, error_of<BadData>([&] { encoder.encode(parse_example(line)); }), said) << line;
  };
  refused(encoder(), R"({"prompt": "a", "chosen": "b", "rejected": "b</s>"})", "nothing to prefer");
  refused(encoder(), R"({"prompt": "", "chosen": "b", "rejected": "c"})", "the prompt is empty");
  const std::string spaces = R"({"prompt": [{"role": "user", "content": "a"}], )"
                             R"("chosen": [{"role": "assistant", "content": "b"}], )"
                             R"("rejected": [{"role": "assistant", "content": "b "}]})";
  refused(encoder("headers"), spaces, "nothing to prefer");  // this template trims
  EXPECT_EQ(encoder("chatml").encode(parse_example(spaces)).size(), 2u);
  const std::string longer =
      R"({"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}], )"
      R"("rejected": [{"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}, )"
      R"({"role": "assistant", "content": "e"}]})";
  refused(encoder("turns"), longer, "after the prompt come 2 answers");
  EXPECT_EQ(learned(encoder("chatml").encode(parse_example(longer)).at(1)), "c<|im_end|>e<|im_end|>");
  // This error is not caused by the line.
  for (const std::string& line : {spaces, std::string(R"({"prompt": "a", "chosen": "b", "rejected": "c"})")}) {
    const auto encode = [&] { encoder("chatml", Learn::all).encode(parse_example(line)); };
    EXPECT_ERROR(EXPECT_EQ(error_of<BadData>(encode), ""), "--learn all");
  }
}

// --- Groups ---

TEST_F(Encoding, OfGroupsHasEveryCompletion) {
  model("byte_level");
  const auto of = [&](const std::string& line, const DataOptions& options = {.chat = {"chatml"}}) {
    return tokenise({write("g.jsonl", line + "\n")}, options);
  };
  const TokenFile written = of(R"({"prompt": "ab", "completions": ["c", "de", ""], "rewards": [1, 0, 2]})");
  ASSERT_EQ(written.documents(), 3);
  EXPECT_EQ(written.metadata("kind"), "groups");
  EXPECT_EQ(text(written.tokens(0)), "abc</s>");
  EXPECT_EQ(text(written.tokens(1)), "abde</s>");
  EXPECT_EQ(text(written.tokens(2)), "ab</s>") << "an empty completion";
  EXPECT_EQ(written.advantage(1).plain, -1);
  EXPECT_NEAR(written.advantage(2).scaled, 1 / (1 + 1e-4), 1e-12);
  EXPECT_TRUE(written.old().empty());
  // Completions as sampled tokens with their log-probs.
  const std::string c = std::to_string(written.tokens(0)[2]);
  const TokenFile sampled = of(R"({"prompt": "ab", "completions": [[)" + c + "," + c + "], [" + c +
                               R"(]], "advantages": [7, -3], "old_logps": [[-1, -2], [-3]]})");
  EXPECT_EQ(text(sampled.tokens(0)), "abcc");
  EXPECT_EQ(sampled.advantage(0).plain, 7);
  EXPECT_EQ(sampled.advantage(0).scaled, 7);
  EXPECT_EQ(std::vector<float>(sampled.old().begin(), sampled.old().end()),
            (std::vector<float>{0, -1, -2, 0, 0, -3, 0}));
  EXPECT_EQ(sampled.learned_count(), 3);
  // The model can have more tokens than the tokenizer. null is the same as no field.
  const TokenFile padded = of(R"({"prompt": "ab", "completions": [[99999]], "advantages": [1], "rewards": null,)"
                              R"( "old_logps": null, "text": null})");
  EXPECT_EQ(padded.tokens(0).back(), 99999);
  // In a conversation both forms follow the prompt.
  const TokenFile talk = of(R"({"prompt": [{"role": "user", "content": "a"}], "completions": [[)" + c +
                            R"(], [{"role": "assistant", "content": "c"}]], "rewards": [1, 0]})");
  EXPECT_EQ(text(talk.tokens(0)) + text(talk.tokens(1)).substr(text(talk.tokens(0)).size()), text(talk.tokens(1)));
  EXPECT_EQ(talk.learn(0).back(), 1);
}

TEST_F(Encoding, RefusesInvalidGroups) {
  model("byte_level");
  const auto expect_refused = [&](const std::string& line, const std::string& said) {
    const std::string refused = refusal({write("g.jsonl", line + "\n")}, {.chat = {"chatml"}});
    EXPECT_TRUE(contains(refused, "g.jsonl:1: ") && contains(refused, said)) << line << "\n" << refused;
  };
  const std::string begin = R"({"prompt": "ab", "completions": )", two = begin + R"(["c", "d"], )";
  expect_refused(R"({"completions": ["c", "d"], "rewards": [1, 0]})", "without a \"prompt\"");
  expect_refused(begin + "[]}", "not a list of completions");
  expect_refused(begin + R"(["c", 3], "rewards": [1, 0]})", "\"completion 2\" must both be text");
  expect_refused(begin + R"(["c", "d"]})", "either \"rewards\" or \"advantages\"");
  expect_refused(two + R"("rewards": [1, 0], "advantages": [1, 0]})", "either \"rewards\" or \"advantages\"");
  expect_refused(two + R"("rewards": [1]})", "2 completions, but 1 \"rewards\"");
  expect_refused(two + R"("rewards": [1, "0"]})", "\"rewards\", entry 2: not a finite number");
  expect_refused(two + R"("rewards": [1e308, -1e308]})", "too large");
  expect_refused(begin + R"(["c"], "rewards": [1]})", "a group of one");
  expect_refused(begin + R"([[1, -2], "d"], "rewards": [1, 0]})", "not a list of tokens");
  expect_refused(begin + R"([[], "d"], "rewards": [1, 0]})", "completion 1: an empty list");
  expect_refused(begin + R"([[2147483647], "d"], "rewards": [1, 0]})", "completion 1: not a list of tokens");
  expect_refused(R"({"prompt": "", "completions": ["c", "d"], "rewards": [1, 0]})", "the prompt is empty");
  expect_refused(R"({"prompt": "", "completions": [[5], [6]], "rewards": [1, 0]})", "the prompt is empty");
  expect_refused(two + R"("rewards": [1, 0], "old_logps": [[-1, -1], [-1, -9999]]})",
                 "old_logps of completion 2: -9999");
  expect_refused(two + R"("rewards": [1, 0], "old_logps": [[-1, -1]]})", "not a list of 2");
  expect_refused(two + R"("rewards": [1, 0], "old_logps": [[-1, -1], [-1]]})", "completion 2 is 2 tokens");
  expect_refused(two + R"("rewards": [1, 0], "old_logps": [[-1, -1], [-1, 1]]})",
                 "not the log-prob of a sampled token");
  expect_refused(R"({"prompt": "ab"})", "--reward");
  expect_refused(two + R"("rewards": [1, 0], "text": "a"})", "more than one of");
}

// All groups have log-probs or none has, and groups do not mix with documents.
TEST_F(Encoding, RefusesMixedGroups) {
  model("byte_level");
  const std::string group = R"({"prompt": "a", "completions": [[5], [6]], "rewards": [1, 0])";
  const auto mixed = [&](const std::string& a, const std::string& b) {
    return refusal({write("m.jsonl", a + "\n" + b + "\n")}, {.chat = {"chatml"}, .skip_bad = true});
  };
  EXPECT_PRED2(contains, mixed(group + "}", group + R"(, "old_logps": [[-1], [-1]]})"),
               "m.jsonl:2: has \"old_logps\", unlike");
  EXPECT_PRED2(contains, mixed(group + R"(, "old_logps": [[-1], [-1]]})", group + "}"),
               "m.jsonl:2: lacks \"old_logps\", unlike");
  EXPECT_PRED2(contains, mixed(group + "}", R"({"text": "a"})"), "m.jsonl:2: a document among groups");
}

}  // namespace
}  // namespace streambp
