// Reasoning apart from the answer, and conversations whose tokens are kept.
#include "data/documents/reasoning.h"

#include "tests/encoding.h"
#include "training/grpo/prompts.h"

namespace streambp {
namespace {

TEST(Reasoning, HasTheMarksOfTheTemplate) {
  EXPECT_EQ(reasoning_marks("... {{ '<think>' + reasoning + '</think>' }} ...").open, "<think>");
  EXPECT_EQ(reasoning_marks("[THINK]{{ x }}[/THINK]").close, "[/THINK]");
  EXPECT_EQ(reasoning_marks("{{ content.split('</think>')[-1] }}").open, "<think>");
  EXPECT_EQ(reasoning_marks("<|START_THINKING|>{{ x }}<|END_THINKING|>").close, "<|END_THINKING|>");
  EXPECT_EQ(reasoning_marks("<|channel>thought\n{{ x }}<channel|>").open, "<|channel>thought");
  EXPECT_EQ(reasoning_marks("{{ content }}").open, "");
  const ReasoningMarks marks = {"<think>", "</think>"};
  EXPECT_TRUE(opened(marks, "assistant\n<think>\n").opened);
  EXPECT_FALSE(opened(marks, "assistant\n<think>\n\n</think>\n\n").opened);
  EXPECT_FALSE(opened({}, "assistant\n").opened);
}

TEST(Reasoning, IsSplitFromTheAnswer) {
  ReasoningMarks marks = {"<think>", "</think>"};
  const auto split = [&](const char* text) {
    const auto [reasoning, answer] = split_reasoning(text, marks);
    return reasoning + "|" + answer;
  };
  EXPECT_EQ(split("\n<think>\nOne.\nTwo.\n</think>\n\nThree. \n"), "One.\nTwo.|Three. \n");
  EXPECT_EQ(split("<think>\n\n</think>\n\nOne"), "|One");
  EXPECT_EQ(split("One </think> two"), "|One </think> two");
  EXPECT_EQ(split("One <think>two</think>"), "|One <think>two</think>");
  EXPECT_EQ(split("<think>One"), "One|");
  EXPECT_EQ(split(" One\n"), "| One\n");
  EXPECT_EQ(split(""), "|");
  marks.opened = true;
  EXPECT_EQ(split("One.\n</think>\n\nTwo"), "One.|Two");
  EXPECT_EQ(split("One."), "One.|");
  EXPECT_EQ(reasoning_end("One.</think>Two", marks), 12u);
  EXPECT_EQ(reasoning_end("One.", marks), std::string_view::npos);
  marks = {};
  EXPECT_EQ(split("<think>One</think>Two"), "|<think>One</think>Two");
}

// What the model has read and written keeps its tokens, which encoding its text could split differently.
TEST_F(Encoding, KnownTokensOfAConversationAreKept) {
  model("byte_level");
  Prompter prompter(dir / "model", {"chatml"});
  Conversation c{.messages = {{"user", "Hello"}}};
  Tokens known = prompter.conversation(c).tokens;
  for (const char letter : std::string("word"))
    known.push_back(prompter.tokenizer.encode(std::string(1, letter)).at(0));
  known.push_back(prompter.tokenizer.find("<|im_end|>").value());
  c.messages.push_back({"assistant", "word"}), c.messages.push_back({"user", "More"});
  const Tokens kept = prompter.conversation(c, known).tokens, fresh = prompter.conversation(c).tokens;
  EXPECT_EQ(prompter.tokenizer.decode(kept), prompter.tokenizer.decode(fresh));
  EXPECT_TRUE(std::equal(known.begin(), known.end(), kept.begin()));
  EXPECT_NE(kept, fresh);
  // Other text before it: everything is encoded.
  c.messages[0] = {"user", "Good morning"};
  EXPECT_EQ(prompter.conversation(c, known).tokens, prompter.conversation(c).tokens);
}

// What rewards are for.
TEST_F(Encoding, CompletionsAreAnswersAndReasoning) {
  model("byte_level");
  const std::string messages = "{% for m in messages %}{{ m.content }}{% endfor %}";
  const auto answer = [&](const std::string& source, const char* completion) {
    Prompter prompter(dir / "model", {write("chat.jinja", source).string()});
    const auto [reasoning, answer] =
        prompter.reasoned(prompter.conversation({.messages = {{"user", "Hi"}}}), completion);
    return reasoning + "|" + answer;
  };
  EXPECT_EQ(answer(messages + "{# </think> #}", "<think>\nHm, 3?\n</think>\n\n4"), "Hm, 3?|4");
  EXPECT_EQ(answer(messages + "{# </think> #}", "<think>\nHm, 4"), "Hm, 4|") << "it is not done";
  EXPECT_EQ(answer(messages + "{# </think> #}{{ '<think>\n' }}", "Hm, 3?</think>4"), "Hm, 3?|4")
      << "the prompt opens it";
  EXPECT_EQ(answer(messages, "<think>3</think>4"), "|<think>3</think>4") << "this model does not reason";
  EXPECT_EQ(Prompter(dir / "model", {}).reasoned({}, "<think>3</think>4").answer, "<think>3</think>4")
      << "without a template";
}

TEST_F(Encoding, PromptsGetSystemMessageAndTools) {
  model("byte_level");
  const fs::path file = write("tools.jinja",
                              "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}"
                              "{{ m.role }}: {{ m.content }}\n{% endfor %}");
  const auto tools = [](const char* name) {
    return jinja::Value(std::vector<jinja::Value>{jinja::dict_of({{"name", name}})});
  };
  Prompter prompter(dir / "model", {file.string()}, "Be brief.", tools("search"));
  const auto text = [&](const Conversation& c) { return prompter.tokenizer.decode(prompter.conversation(c).tokens); };
  EXPECT_EQ(text({.messages = {{"user", "Hi"}}}), "[search]system: Be brief.\nuser: Hi\n");
  EXPECT_EQ(text({.messages = {{"system", "Sing."}, {"user", "Hi"}}, .tools = tools("own")}),
            "[own]system: Sing.\nuser: Hi\n");
}

}  // namespace
}  // namespace streambp
