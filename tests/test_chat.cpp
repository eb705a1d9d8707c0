// Chat layouts against the published templates, rendered by transformers (scripts/make_chat_golden.py).
#include "data/documents/chat.h"
#include "data/files/generation_config.h"
#include "tests/golden.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

const TextTokens kOwn = {"<s>", "</s>"};

Chat chat_of(const std::string& name) {
  for (const Layout& layout : chat_layouts()) {
    if (layout.name == name) return Chat(layout, kOwn);
  }
  throw std::logic_error(name);
}

const Json& golden_chat() {
  static const Json json = Json::parse(read_file(golden_folder() / "chat.json"));
  return json;
}

std::vector<std::vector<Message>> conversations() {
  std::vector<std::vector<Message>> all;
  for (const Json& conversation : golden_chat().at("conversations")) {
    auto& messages = all.emplace_back();
    for (const Json& m : conversation) messages.push_back({m.at("role"), m.at("content")});
  }
  return all;
}

std::string text_of(const std::vector<Piece>& pieces) {
  std::string text;
  for (const Piece& piece : pieces) text += piece.text;
  return text;
}
std::string learned_of(const std::vector<Piece>& pieces) {
  std::string text;
  for (const Piece& piece : pieces) text += piece.learn ? piece.text : "";
  return text;
}

// The text, or null if the conversation is refused.
template <class Render>
Json rendered(const Render& render) {
  try {
    return text_of(render());
  } catch (const BadData&) {
    return nullptr;
  }
}

class Layouts : public testing::TestWithParam<std::string> {
 protected:
  const Chat chat = chat_of(GetParam());
  const Json& golden = golden_chat().at("layouts").at(GetParam());
};

TEST_P(Layouts, RenderConversationsLikeTheTemplates) {
  const auto all = conversations();
  ASSERT_EQ(all.size(), golden.at("whole").size());
  for (std::size_t c = 0; c < all.size(); ++c) {
    EXPECT_EQ(rendered([&] { return chat.render(all[c]); }), golden["whole"][c]) << "conversation " << c;
    std::size_t next = 0;
    for (std::size_t i = 0; i < all[c].size(); ++i) {
      if (all[c][i].role != "user") continue;
      const std::span<const Message> before(all[c].data(), i + 1);
      EXPECT_EQ(rendered([&] { return chat.prompt(before); }), golden["prompts"][c].at(next++)) << c << ", " << i;
    }
  }
}

// The loss covers every answer once, with the token that ends it.
TEST_P(Layouts, LearnEveryAnswerToItsEnd) {
  for (const auto& messages : conversations()) {
    if (rendered([&] { return chat.render(messages); }).is_null()) continue;
    std::size_t answers = 0, learned = 0;
    for (const Message& message : messages) answers += message.role == "assistant";
    for (const auto& sequence : chat.training_sequences(messages)) {
      for (std::size_t p = 0; p < sequence.size(); ++p) {
        const bool end = sequence[p].learn && sequence[p].markup && sequence[p].text == chat.end();
        learned += end;
        if (sequence[p].learn && (p + 1 == sequence.size() || !sequence[p + 1].learn)) {
          EXPECT_TRUE(end) << sequence[p].text;
        }
      }
    }
    EXPECT_EQ(learned, answers) << text_of(chat.render(messages));
  }
}

// Each answer follows its prompt exactly.
TEST_P(Layouts, TrainingSequencesStartWithTheirPrompts) {
  std::vector<Message> messages = {{"user", "One?"},     {"assistant", "1"}, {"user", "Two?"},
                                   {"assistant", " 2 "}, {"user", "Three?"}, {"assistant", "3"}};
  if (GetParam() != "gemma2" && GetParam() != "mistral-v1") messages.insert(messages.begin(), {"system", "Briefly."});
  std::vector<std::string> texts;
  std::string learned;
  for (const auto& sequence : chat.training_sequences(messages))
    texts.push_back(text_of(sequence)), learned += learned_of(sequence);
  std::string expected;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "assistant") continue;
    const std::string prompt = text_of(chat.prompt(std::span(messages).first(i)));
    const auto found = std::find_if(texts.begin(), texts.end(), [&](auto& text) { return text.starts_with(prompt); });
    ASSERT_NE(found, texts.end()) << prompt;
    const std::size_t end = found->find(chat.end(), prompt.size());
    expected += found->substr(prompt.size(), end + chat.end().size() - prompt.size());
  }
  EXPECT_EQ(learned, expected);
}

TEST_P(Layouts, AreRecognisedByTheirTemplates) {
  std::vector<std::string> hashes;
  for (const KnownTemplates& known : kKnownTemplates)
    if (known.layout == GetParam())
      for (const std::uint64_t hash : known.hashes) hashes.push_back(hash_digits(hash));
  EXPECT_EQ(Json(hashes), golden.at("templates"));
}

std::vector<std::string> layout_names() {
  std::vector<std::string> names;
  for (const Layout& layout : chat_layouts()) names.push_back(layout.name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(All, Layouts, testing::ValuesIn(layout_names()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name) c = std::isalnum(c) ? c : '_';
  return name;
});

TEST(Chat, GoldenDataCoversEveryLayout) { EXPECT_EQ(golden_chat().at("layouts").size(), chat_layouts().size()); }

TEST(Chat, LearnsFromTheGivenMessageOn) {
  const std::vector<Message> messages = {{"user", "One?"}, {"assistant", "1"}, {"user", "Two?"}, {"assistant", "2"}};
  EXPECT_EQ(learned_of(chat_of("chatml").training_sequences(messages, 3).at(0)), "2<|im_end|>");
  const auto qwen3 = chat_of("qwen3").training_sequences(messages, 2);
  ASSERT_EQ(qwen3.size(), 1u);
  EXPECT_EQ(learned_of(qwen3[0]), "<think>\n\n</think>\n\n2<|im_end|>");
}

TEST(Chat, OnlyTokensOfTheLayoutAreMarkup) {
  const std::vector<Message> messages = {{"user", "<|im_end|>"}, {"assistant", "<|im_start|>"}};
  std::vector<std::string> markup, content;
  for (const Piece& piece : chat_of("chatml").render(messages)) (piece.markup ? markup : content).push_back(piece.text);
  EXPECT_EQ(content, (std::vector<std::string>{"<|im_end|>", "<|im_start|>"}));
  EXPECT_EQ(markup, (std::vector<std::string>{"<|im_start|>", "user\n", "<|im_end|>", "\n", "<|im_start|>",
                                              "assistant\n", "<|im_end|>", "\n"}));
}

TEST(Chat, RefusesUnknownRoles) {
  const Chat chat = chat_of("chatml");
  EXPECT_THROW(chat.render({}), BadData);
  const std::vector<Message> tool = {{"user", "x"}, {"tool", "y"}};
  EXPECT_THROW(chat.render(tool), BadData);
}

class ModelDirectory : public TemporaryDirectory {
 protected:
  void expect_refused(const std::string& said, const std::string& forced = "") {
    EXPECT_ERROR(Chat::of(dir, forced), said);
  }
};

TEST_F(ModelDirectory, WithoutATemplateNamesTheRemedies) {
  expect_refused("no chat template; name a layout with --chat");
  write("tokenizer_config.json", R"({"chat_template": null})");
  expect_refused("no chat template");
  EXPECT_EQ(Chat::of(dir, "chatml").name(), "chatml");
}

TEST_F(ModelDirectory, WithAnUnknownTemplateIsRefused) {
  write("chat_template.jinja", "{{ messages }}");
  expect_refused("chat_template.jinja: unknown chat template");
  expect_refused("qwen3");  // the list of layouts
  expect_refused("no such layout", "nonsense");
}

// Published templates are not part of the repository, so errors show which template was found.
TEST_F(ModelDirectory, FindsTheTemplateInEveryFile) {
  write("chat_template.json", R"({"chat_template": "x"})");
  expect_refused("chat_template.json: unknown chat template");
  fs::remove(dir / "chat_template.json");
  write("tokenizer_config.json",
        R"({"chat_template": [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}]})");
  expect_refused("tokenizer_config.json: unknown chat template");
  write("tokenizer_config.json", R"({"chat_template": [{"name": "tool_use", "template": "y"}, 3]})");
  expect_refused("no chat template is named \"default\"");
  write("tokenizer_config.json", R"({"chat_template": 3})");
  expect_refused("must be a string or a list");
  write("tokenizer_config.json", "[]");
  expect_refused("is not a JSON object");
  write("tokenizer_config.json", "[");
  expect_refused("not valid JSON");
  write("tokenizer_config.json", "{\"chat_template\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}");
  expect_refused("nested more deeply");
}

TEST_F(ModelDirectory, GivesLayoutsItsBosAndEos) {
  write("special_tokens_map.json", R"({"bos_token": "<b0>", "eos_token": "<e0>"})");
  write("tokenizer_config.json", R"({"bos_token": {"content": "<b>"}})");
  const TextTokens own = read_text_tokens(dir);
  EXPECT_EQ(own.bos, "<b>");
  EXPECT_EQ(own.eos, "<e0>");
  EXPECT_EQ(Chat::of(dir, "zephyr").end(), "<e0>");
  const std::vector<Message> messages = {{"user", "x"}};
  EXPECT_EQ(text_of(Chat::of(dir, "mistral-v1").prompt(messages)), "<b>[INST] x [/INST]");
}

TEST_F(ModelDirectory, MayHaveBosAndEosThatLookLikePlaceholders) {
  write("tokenizer_config.json", R"({"bos_token": "{bos}{eos}", "eos_token": "{bos}"})");
  const std::vector<Message> messages = {{"user", "x"}, {"assistant", "y"}};
  EXPECT_FALSE(text_of(Chat::of(dir, "mistral-v1").render(messages)).empty());
}

TEST_F(ModelDirectory, WithoutTheBosOfALayoutIsRefused) {
  write("tokenizer_config.json", R"({"bos_token": null})");
  expect_refused("needs a bos_token", "llama3");
}

// Training and generation use the same rule: training ends sequences with the first token, generation stops at all.
TEST_F(ModelDirectory, HasEosTokensInOneOfTwoFiles) {
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(read_eos_tokens(dir).ids, Ids{});
  write("config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(read_eos_tokens(dir).ids, Ids{7});
  write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(read_eos_tokens(dir).ids, Ids{7});
  write("generation_config.json", R"({"eos_token_id": [5, 3]})");
  EXPECT_EQ(read_eos_tokens(dir).ids, (Ids{5, 3})) << "in the order of the file";
  EXPECT_EQ(read_generation_defaults(dir).stop, (std::set<std::int32_t>{3, 5}));
  for (const char* wrong : {"-1", "2147483648", "9223372036854775809", "1e3", "\"</s>\"", "[true]", "[3, null]"}) {
    write("generation_config.json", std::string("{\"eos_token_id\": ") + wrong + "}");
    EXPECT_THROW(read_eos_tokens(dir), Error) << wrong;
    EXPECT_THROW(read_generation_defaults(dir), Error) << wrong;
  }
}

}  // namespace
}  // namespace streambp
