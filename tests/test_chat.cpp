// Conversations rendered by chat templates (tests/golden/chat_templates), against transformers
// (scripts/make_chat_golden.py); and what is learned of them.
#include "data/documents/encoder.h"
#include "data/files/tokenizer_file.h"
#include "tests/chat_models.h"

namespace streambp {
namespace {

const OrderedJson& golden_chat() {
  static const auto json = parse_json<OrderedJson>(read_file(golden_folder() / "chat.json"));
  return json;
}

Chat chat_of(const std::string& name) {
  ChatOptions options;
  options.date = "2026-11-25";
  return Chat(read_file(chat_template(name)), name, {"<s>", "</s>"}, options);
}

Conversation from_golden(const OrderedJson& json) {
  Conversation c = conversation_of(json, parse_messages(json["messages"], "messages")).chat;
  for (const char* name : {"enable_thinking", "date_string"})
    if (json.contains(name)) c.variables.emplace_back(name, jinja::from_json(json[name]));
  return c;
}

class Templates : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Templates,
                         testing::Values("turns", "marked", "headers", "brackets", "roles", "parts", "plain"));

TEST_P(Templates, RenderAsTransformersDoes) {
  const Chat chat = chat_of(GetParam());
  const OrderedJson& golden = golden_chat()["templates"][GetParam()];
  for (std::size_t i = 0; i < golden_chat()["conversations"].size(); ++i) {
    const auto render = [&](Chat::End end) -> OrderedJson {
      try {
        return chat.render(from_golden(golden_chat()["conversations"][i]), end).text;
      } catch (const BadData&) {
        return nullptr;
      }
    };
    EXPECT_EQ(render(Chat::End::whole), golden["whole"][i]) << i;
    EXPECT_EQ(render(Chat::End::prompt), golden["prompts"][i]) << i;
  }
}

class LearnedTurns : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    use("byte_level");
  }
  void use(const std::string& tokenizer) {
    make_tokenizer_directory(dir, tokenizer);
    tokenizer_ = read_tokenizer(dir);
  }
  // The learned texts of each document, between bars.
  std::vector<std::string> learned(const std::string& name, const std::string& line) {
    const Encoder encoder(*tokenizer_, dir, chat_of(name), "", Learn::answers);
    std::vector<std::string> all;
    for (const Document& document : encoder.encode(parse_example(line))) {
      std::string text;
      for (std::size_t t = 0; t < document.tokens.size(); ++t) {
        if (!document.learn[t]) continue;
        if (!document.learn[t - 1] && !text.empty()) text += "|";
        text += tokenizer_->decode({&document.tokens[t], 1});
      }
      all.push_back(text);
    }
    return all;
  }
  std::string refusal(const std::string& name, const std::string& line) {
    return error_of([&] { learned(name, line); });
  }

  std::optional<Tokenizer> tokenizer_;
};
using Learned = std::vector<std::string>;

TEST_F(LearnedTurns, EndWithTheirEndToken) {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": " 1 "},
                               {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"},
                               {"role": "user", "content": "Three?"}]})";
  EXPECT_EQ(learned("marked", line), Learned{"1<|im_end|>|2<|im_end|>"});
  EXPECT_EQ(learned("headers", line), Learned{"1<|eot_id|>|2<|eot_id|>"});
  use("metaspace");
  EXPECT_EQ(learned("parts", line), Learned{"1<end_of_turn>|2<end_of_turn>"});
  EXPECT_EQ(learned("brackets", line), Learned{"1</s>|2</s>"});
}

// Reasoning stays in the turns after the last question only, as at inference; earlier turns become separate documents.
TEST_F(LearnedTurns, ThatAreRenderedDifferentlyLaterAreTheirOwnDocuments) {
  const std::string line = R"({"messages": [{"role": "user", "content": "One?"},
      {"role": "assistant", "reasoning_content": "Easy.", "content": "1"}, {"role": "user", "content": "Two?"},
      {"role": "assistant", "content": "<think>\nHard.\n</think>\n\n2"}]})";
  EXPECT_EQ(learned("turns", line),
            (Learned{"<think>\nHard.\n</think>\n\n2<|im_end|>", "<think>\nEasy.\n</think>\n\n1<|im_end|>"}));
}

// Marks of reasoning in an answer are the tokens that the template and the model write; in other messages they are text.
TEST_F(LearnedTurns, HaveMarksOfReasoningAsTokens) {
  const Tokens marks = {tokenizer_->find("<think>").value(), tokenizer_->find("</think>").value()};
  const auto count = [&](const std::string& source, const char* user, const char* answer) {
    const Encoder encoder(*tokenizer_, dir, Chat(source, "t", {"<s>", "</s>"}), "", Learn::answers);
    const std::string line = R"({"messages": [{"role": "user", "content": ")" + std::string(user) +
                             R"("}, {"role": "assistant", "content": ")" + answer + "\"}]}";
    std::string all;
    const std::vector<Document> documents = encoder.encode(parse_example(line));
    for (const std::int32_t id : documents.at(0).tokens) all += id == marks[0] ? "<" : id == marks[1] ? ">" : "";
    return all;
  };
  const std::string chatml = kChatml;
  std::string opens = chatml;  // its prompt begins the reasoning
  opens.insert(opens.find("assistant\n") + 10, "<think>\n");
  for (const std::string& source : {chatml, opens}) {
    EXPECT_EQ(count(source, "One?", "<think>\\nEasy.\\n</think>\\n\\n1"), "<>");
    EXPECT_EQ(count(source, "<think>One?</think>", "<think>\\nEasy.</think>"), "<>") << "the user's are text";
  }
  EXPECT_EQ(count(opens, "One?", "Easy.</think>1"), ">") << "the prompt of inference opens it";
  for (const char* alone : {"The tag <think> opens.", "Easy.</think>1", "</think> or <think>"})
    EXPECT_EQ(count(chatml, "<think>", alone), "") << alone;
  // An answer that ends with a mark, and one without a question
  EXPECT_EQ(learned("headers", R"({"messages": [{"role": "assistant", "content": "<think>a</think>"}]})"),
            Learned{"<think>a</think><|eot_id|>"});
}

// The template has the system message in prompts only.
TEST_F(LearnedTurns, FollowThePromptOfInference) {
  use("metaspace");
  const std::string line =
      R"({"messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "One?"},
      {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2"}]})";
  EXPECT_EQ(learned("brackets", line), (Learned{"1</s>", "2</s>"}));
  const Encoder encoder(*tokenizer_, dir, chat_of("brackets"), "", Learn::answers);
  const auto documents = encoder.encode(parse_example(line));
  EXPECT_EQ(tokenizer_->decode(documents.at(0).tokens), "<s>[INST] Brief.\n\nOne?[/INST]\n 1</s>");
  EXPECT_EQ(tokenizer_->decode(documents.at(1).tokens),
            "<s>[INST] One?[/INST]\n 1</s>\n[INST] Brief.\n\nTwo?[/INST]\n 2</s>");
}

TEST_F(LearnedTurns, OfToolsAndTheirResults) {
  const std::string line = R"({"messages": [{"role": "user", "content": "Warm?"},
      {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", "type": "function", "function":
          {"name": "weather", "arguments": "{\"city\":\"Bern\",\"days\":1}"}}]},
      {"role": "tool", "content": "<|im_end|>21"}, {"role": "assistant", "content": "21"}],
      "tools": [{"name": "weather"}]})";
  const std::string call =
      "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 1}}\n</tool_call><|im_end|>";
  EXPECT_EQ(learned("turns", line),
            (Learned{"<think>\n\n</think>\n\n21<|im_end|>", "<think>\n\n</think>\n\nI look.\n" + call}));
}

TEST_F(LearnedTurns, LeaveOutMessagesThatAreNotToBeLearned) {
  const std::string line = R"({"messages": [{"role": "user", "content": "One?"},
      {"role": "assistant", "content": "1", "weight": 0}, {"role": "user", "content": "Two?"},
      {"role": "assistant", "content": "2", "train": true}]})";
  EXPECT_EQ(learned("headers", line), Learned{"2<|eot_id|>"});
  EXPECT_EQ(learned("marked", line), Learned{"2<|im_end|>"});
  EXPECT_PRED2(contains, refusal("marked", R"({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]})"),
               "\"weight\" must be 0 or 1");
}

// The prompt opens a block that the turn leaves out, and no token ends a turn: the end token is added.
TEST_F(LearnedTurns, WithoutAnEndTokenGetTheModels) {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]})";
  EXPECT_EQ(learned("plain", line), Learned{"1</s>"});
  write("generation_config.json", "{\"eos_token_id\": [" + std::to_string(*tokenizer_->find("<|eot_id|>")) + "]}");
  EXPECT_EQ(learned("headers", line), Learned{"1<|eot_id|>"});
}

TEST_F(LearnedTurns, StartWhereTheConversationDoesIfTheAssistantBegins) {
  EXPECT_EQ(learned("headers",
                    R"({"messages": [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "?"}]})"),
            Learned{"Hi.<|eot_id|>"});
}

TEST_F(LearnedTurns, AreRefusedIfTheTemplateContradictsItself) {
  const Chat chat("{% for m in messages %}{{ m.content ~ loop.length }}{% endfor %}", "counts", {});
  const Encoder encoder(*tokenizer_, dir, chat, "", Learn::answers);
  const std::string line =
      R"({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]})";
  EXPECT_ERROR(encoder.encode(parse_example(line)), "not clear what the model would generate");
}

TEST(Chat, GivesTemplatesArgumentsInTheFormThatTheyRead) {
  const std::string source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments";
  const auto render = [&](const std::string& end, const std::string& arguments) {
    const std::string line =
        R"({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f",
                               "arguments": )" +
        arguments + "}}]}]}";
    return Chat(source + end + " }}{% endfor %}{% endfor %}", "calls", {}).render(parse_example(line).chat).text;
  };
  for (const char* arguments : {R"({"a": 1})", R"("{\"a\":1}")"}) {
    EXPECT_EQ(render(" | tojson", arguments), R"({"a": 1})");
    EXPECT_EQ(render(".items() | list", arguments), "[('a', 1)]");
  }
  EXPECT_EQ(render(" + '!'", R"({"a": 1})"), R"({"a": 1}!)");
  EXPECT_EQ(render(" + '!'", R"("{\"a\":1}")"), R"({"a":1}!)");
}

TEST(Chat, JoinsPartsForTemplatesThatReadText) {
  const Conversation c = parse_example(R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a "},
                                          {"type": "text", "text": " b"}]}]})")
                             .chat;
  EXPECT_EQ(Chat("{{ messages[0].content + '!' }}", "text", {}).render(c).text, "a  b!");
  EXPECT_EQ(chat_of("parts").render(c).text, "<s><start_of_turn>user\nab<end_of_turn>\n");
}

// For each role alone: the first template writes no string, the second refuses one, the third reads strings of the assistant.
TEST(Chat, MakesPartsForTemplatesThatReadNothingElse) {
  const std::string user = R"({"role": "user", "content": "One?"}, )";
  for (const char* answer : {R"("content": "1")", R"("content": [{"type": "text", "text": "1"}])"}) {
    const Conversation c =
        parse_example("{\"messages\": [" + user + "{\"role\": \"assistant\", " + answer + "}]}").chat;
    for (const char* source :
         {"{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor "
          "%};{% endfor %}",
          "{% for m in messages %}{{ m['content'][0]['text'] + ';' }}{% endfor %}",
          "{% for m in messages %}{{ (m.content if m.role == 'assistant' else m.content[0].text) + ';' }}{% endfor %}"})
      EXPECT_EQ(Chat(source, "parts", {}).render(c).text, "One?;1;") << source;
  }
}

TEST(Chat, RefusesTemplatesThatLeaveOutAnAnswer) {
  const auto refusal = [](const std::string& source, const std::string& message) {
    const Conversation c =
        parse_example(R"({"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", )" + message + "}]}")
            .chat;
    return error_of<BadData>([&] { Chat(source, "t", {}).render(c); });
  };
  const std::string said =
      R"(t: message 2: the template does not write the answer "One?" as it is; name another template with --chat)";
  EXPECT_EQ(refusal("{{ messages[0].content }}", R"("content": "One?")"), said);  // the user's words are not the answer
  EXPECT_EQ(refusal("{{ messages[0].content }}{{ messages[1].content[0] }}", R"("content": "One?")"), said);
  const char* first_part = "{{ messages[0].content[0].text }}{{ messages[1].content[0].text }}";
  EXPECT_PRED2(contains,
               refusal(first_part, R"("content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])"),
               "does not write the answer \"b\"");
  // A template may trim, leave out reasoning, and prefer calls.
  const std::string last = "{{ messages[1].content.split('</think>')[-1]|trim }}";
  EXPECT_EQ(refusal(last, R"("content": "<think>Easy.</think>\n One? ")"), "");
  EXPECT_EQ(refusal("{{ messages[1].tool_calls|length }}", R"("content": "I look.", "tool_calls": [{}])"), "");
}

// As in transformers' apply_chat_template
TEST(Chat, HasNoMembersThatAreNull) {
  const Conversation c = parse_example(R"({"messages": [{"role": "user", "content": "a", "name": null},
      {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": null}}}]}]})")
                             .chat;
  const char* source =
      "{% for m in messages %}{{ m|list }}{{ m.content is defined }}{% endfor %}{{ messages[1].tool_calls|tojson }}";
  EXPECT_EQ(Chat(source, "nulls", {}).render(c).text,
            "['role', 'content']True['role', 'tool_calls']False"
            R"([{"function": {"name": "f", "arguments": {"x": null}}}])");
}

TEST(Chat, PrintsNumbersBeyond64BitsAsTheyAre) {
  const Conversation c =
      parse_example(R"({"messages": [{"role": "user", "content": "1e400 9999999999999999999999999", "x":
      [18446744073709551615, -123456789012345678901234567890, 1e400, -2.5E+999, 1e5]}]})")
          .chat;
  EXPECT_EQ(
      Chat("{{ messages[0].x|tojson }} {{ messages[0].x }} {{ messages[0].content }}", "numbers", {}).render(c).text,
      "[18446744073709551615, -123456789012345678901234567890, Infinity, -Infinity, 100000.0] "
      "[18446744073709551615, -123456789012345678901234567890, inf, -inf, 100000.0] "
      "1e400 9999999999999999999999999");
  EXPECT_EQ(Chat("{{ messages[0].x[1] is integer and messages[0].x[1] == messages[0].x[1] }}", "", {}).render(c).text,
            "True");
  EXPECT_ERROR(Chat("{{ messages[0].x[0] + 1 }}", "", {}).render(c), "integer of more than 64 bits and integer");
}

TEST(Chat, GivesReasoningTheNameThatTheTemplateReads) {
  for (const char* given : {"reasoning", "thinking", "reasoning_content"}) {
    const std::string line =
        std::string(R"({"messages": [{"role": "assistant", "content": "a", ")") + given + "\": \"b\"}]}";
    for (const char* read : {"reasoning", "thinking", "reasoning_content"})
      EXPECT_EQ(Chat("{{ messages[0].content + messages[0]." + std::string(read) + " }}", "", {})
                    .render(parse_example(line).chat)
                    .text,
                "ab");
  }
}

TEST(Chat, GivesTemplatesTheArgumentsOfTheUser) {
  const std::string source = "{{ messages[0].content }} {{ think is false }} {{ name }} {{ list }}";
  const auto chat = [&](const std::vector<std::string>& arguments) {
    return Chat(source, "t", {}, {.arguments = arguments});
  };
  Conversation c = {.messages = {{"user", "a"}}};
  const Chat given = chat({"think=false", "name=x = y", "list=[1, \"b\"]"});
  EXPECT_EQ(given.render(c).text, "a True x = y [1, 'b']");
  EXPECT_EQ(chat({}).render(c).text, "a False  ");
  c.variables = {{"name", "line"}};
  EXPECT_EQ(given.render(c).text, "a True line [1, 'b']") << "a line of the data comes first";
  EXPECT_ERROR(chat({"thinking=false"}), "t has no variable of this name");
  for (const char* wrong : {"think", "=false", ""}) EXPECT_ERROR(chat({wrong}), "write it like enable_thinking=false");
  EXPECT_ERROR(chat({"messages=[]"}), "--template-arg cannot set \"messages\"");
}

class ModelDirectory : public TemporaryDirectory {
 protected:
  void expect_refused(const std::string& said, const std::string& given = "") {
    EXPECT_ERROR(Chat::of(dir, {given}), said);
  }
};

TEST_F(ModelDirectory, WithoutATemplateNamesTheRemedies) {
  expect_refused("no chat template; name one with --chat");
  write("tokenizer_config.json", R"({"chat_template": null})");
  expect_refused("no chat template");
  EXPECT_EQ(Chat::of(dir, {"chatml"}).name(), "chatml");
  expect_refused("no such file; name a Jinja template, or chatml", "nonsense");
}

TEST_F(ModelDirectory, WithABrokenTemplateNamesItsFile) {
  write("chat_template.jinja", "\n{% if %}");
  expect_refused("chat_template.jinja: line 2: expected a value");
  write("own.jinja", "{{ messages[0].content");
  expect_refused("own.jinja: line 1: {{ has no }}", (dir / "own.jinja").string());
  write("own.jinja", "\xff");
  expect_refused("not UTF-8", (dir / "own.jinja").string());
}

TEST_F(ModelDirectory, FindsTheTemplateInEveryFile) {
  const auto found = [&] {
    const Chat chat = Chat::of(dir);
    return chat.render({.messages = {{"user", "u"}}}).text + " " + fs::path(chat.name()).filename().string();
  };
  write("tokenizer_config.json",
        R"({"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}{{ eos_token }}"})");
  write("special_tokens_map.json", R"({"bos_token": "<b0>", "eos_token": "<e0>"})");
  EXPECT_EQ(found(), "<b><e0> tokenizer_config.json");
  write("tokenizer_config.json",
        R"({"chat_template": [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}]})");
  EXPECT_EQ(found(), "x tokenizer_config.json");
  write("chat_template.json", R"({"chat_template": "z"})");
  EXPECT_EQ(found(), "z chat_template.json");
  write("chat_template.jinja", "w");
  EXPECT_EQ(found(), "w chat_template.jinja");
  fs::remove(dir / "chat_template.jinja"), fs::remove(dir / "chat_template.json");
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
  write("generation_config.json", R"({"eos_token_id": [5, 3], "repetition_penalty": 1.25})");
  EXPECT_EQ(read_generation_defaults(dir).sampling, (Sampling{0.8, 0.95, 0, 1, 1.25}))
      << "the others are the usual ones";
  for (const char* wrong : {"-1", "2147483648", "9223372036854775809", "1e3", "\"</s>\"", "[true]", "[3, null]"}) {
    write("generation_config.json", std::string("{\"eos_token_id\": ") + wrong + "}");
    EXPECT_THROW(read_eos_tokens(dir), Error) << wrong;
    EXPECT_THROW(read_generation_defaults(dir), Error) << wrong;
  }
}

}  // namespace
}  // namespace streambp
