// JSON lines from untrusted files: the lines, the JSON parser and its limits, and the examples.
#include "data/documents/jsonl.h"

#include <ctime>

#include "tests/data_files.h"

namespace streambp {
namespace {

class LinesOfFiles : public DataFiles {
 protected:
  Strings lines_of(const std::string& text, std::size_t longest = kLongestText) {
    Lines file(write("lines", text), longest);
    Strings all;
    for (std::string line; file.next(line);) all.push_back(line);
    return all;
  }
};

TEST_F(LinesOfFiles, EndInAllWays) {
  EXPECT_EQ(lines_of(""), Strings{});
  EXPECT_EQ(lines_of("a\nb\n"), (Strings{"a", "b"}));
  EXPECT_EQ(lines_of("a\r\n\r\nb"), (Strings{"a", "", "b"}));
  EXPECT_EQ(lines_of("\xef\xbb\xbf"), Strings{});
  EXPECT_EQ(lines_of("\xef\xbb\xbfx\n\xef\xbb\xbfy"), (Strings{"x", "\xef\xbb\xbfy"}));
  EXPECT_EQ(lines_of(std::string("a\0b\n", 4)), (Strings{std::string("a\0b", 3)}));
  const std::string wide(3'000'000, 'x');  // longer than a block
  EXPECT_EQ(lines_of(wide + "\n" + wide), (Strings{wide, wide}));
}

TEST_F(LinesOfFiles, AreRefusedIfTooLong) {
  EXPECT_EQ(lines_of("a\n12345", 5).size(), 2u);
  EXPECT_ERROR(lines_of("a\n123456", 5), "lines:2: the line has more than 5 bytes");
}

TEST_F(LinesOfFiles, NeedAFile) {
  EXPECT_ERROR(Lines(dir / "missing"), "no such file");
  EXPECT_ERROR(Lines{dir}, "is a directory");
}

// --- JSON ---

TEST(JsonParser, ReadsAllTypes) {
  const Json json = parse_json(R"({"a": [null, true, -1, 18446744073709551615, 0.5, "x"], "b": {"c": {}}, "d": []})");
  EXPECT_EQ(json.dump(), R"({"a":[null,true,-1,18446744073709551615,0.5,"x"],"b":{"c":{}},"d":[]})");
  EXPECT_TRUE(json["a"][3].is_number_unsigned() && json["a"][2].is_number_integer());
  EXPECT_EQ(parse_json(" 3 "), 3);
}

TEST(JsonParser, EnforcesItsLimits) {
  EXPECT_EQ(parse_json("[[1, 2], {\"a\": 3}]", JsonLimits{.values = 6, .depth = 2}).size(), 2u);
  EXPECT_ERROR(parse_json("[[1, 2], {\"a\": 3}]", JsonLimits{.values = 5, .depth = 2}), "more than 5 values");
  EXPECT_ERROR(parse_json("[[1, 2], {\"a\": 3}]", JsonLimits{.values = 6, .depth = 1}),
               "nested more deeply than 1 levels");
  EXPECT_ERROR(parse_json("{\"a\": 1, \"b\": {\"a\": 2}, \"a\": 3}"), "duplicate key \"a\"");
  EXPECT_ERROR(parse_json("[1]]", "x.json"), "x.json: not valid JSON: column 4: syntax error");
  EXPECT_ERROR(parse_json("[1e400]"), "not valid JSON: number overflow parsing '1e400'");
  EXPECT_ERROR(parse_json("[\n\n1 2]"), "not valid JSON: line 3, column 3: syntax error");
}

TEST_F(LinesOfFiles, HaveNothingBesideTheirValue) {
  const std::string nul(1, '\0'), one = "{\"text\": \"first\"}";
  EXPECT_ERROR(parse_json(one + nul + one), "not valid JSON: byte 18 is NUL");
  EXPECT_ERROR(parse_json(one + " \n" + nul), "byte 20 is NUL");
  EXPECT_ERROR(parse_json("\"a" + nul + "b\""), "byte 3 is NUL");
  EXPECT_ERROR(parse_json(nul), "byte 1 is NUL");
  EXPECT_ERROR(parse_example(one + nul), "byte 18 is NUL");
  EXPECT_ERROR(parse_json(one + nul, "config.json"),
               "config.json: not valid JSON: byte 18 is NUL; is the file complete");
  EXPECT_EQ(parse_json(one + " \t\r\n"), parse_json(one));
  // A hole of zeros after a crash, between lines and in a list.
  for (const std::string& text : {one + "\n" + std::string(100, '\0') + "\n", "[" + one + "," + nul + "]"}) {
    JsonValues values(write("holes", text));
    std::string first, second;
    EXPECT_TRUE(values.next(first) && values.next(second));
    EXPECT_EQ(error_of([&] { parse_json(first); }), "");
    EXPECT_ERROR(parse_json(second), "byte 1 is NUL");
  }
  EXPECT_ERROR(
      {
        JsonValues values(write("holes", "[" + one + "]" + nul));
        for (std::string value; values.next(value);) {
        }
      },
      "is followed by text after the list");
}

TEST(JsonParser, IsTheOnlyOne) {
  for (const char* folder : {"commands", "data", "kernels", "memory", "model", "parallel", "training"})
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(STREAMBP_SOURCE) / folder)) {
      if (!entry.is_regular_file() || entry.path().filename() == "json.h") continue;
      for (const char* other : {"Json::parse(", "json::parse(", "sax_parse("})
        EXPECT_FALSE(contains(read_file(entry.path()), other)) << entry.path();
    }
}

TEST(JsonMembers, HaveTheOrderOfTheText) {
  const std::string text = "\ufeff { \"b\" : [1, {\"x\": \"}\\\"],\"}],\n\"a\\u0041\":{\"b\": 2} , \"\": \":,\" } ";
  const std::vector<JsonMember> members = members_of(text);
  ASSERT_EQ(members.size(), 3u);
  EXPECT_EQ(members[0].key, "b");
  EXPECT_EQ(members[0].value, "[1, {\"x\": \"}\\\"],\"}]");
  EXPECT_EQ(members[1].key, "aA");
  EXPECT_EQ(members[1].text, "\"a\\u0041\":{\"b\": 2}");
  EXPECT_EQ(members[2].value, "\":,\"");
  EXPECT_TRUE(members_of(" { } ").empty());
}

TEST(JsonMembers, ChangeAndNoOtherText) {
  const std::string text = "{ \"a\": 1.0,\n   \"b\" :[2] }\n";
  EXPECT_EQ(with_member(text, "a", "x\""), "{ \"a\": \"x\\\"\",\n   \"b\" :[2] }\n");
  EXPECT_EQ(with_member(text, "b", nullptr), "{ \"a\": 1.0,\n   \"b\" :null }\n");
  EXPECT_EQ(with_member(text, "c", 3), "{ \"a\": 1.0,\n   \"b\" :[2],\n  \"c\": 3 }\n");
  EXPECT_EQ(parse_json(with_member(" {} ", "c", 3)), parse_json("{\"c\": 3}"));
  EXPECT_EQ(without_member(text, "a"), "{ \"b\" :[2] }\n");
  EXPECT_EQ(without_member(text, "b"), "{ \"a\": 1.0 }\n");
  EXPECT_EQ(without_member(text, "c"), text);
  EXPECT_EQ(without_member("{\"a\": 1}", "a"), "{}");
}

TEST(JsonMembers, TakeLinearTime) {
  std::string text = "{\"key\": 0";
  for (int i = 0; i < 100'000; ++i) text += ",\"key-" + std::to_string(i) + "\":" + std::to_string(i);
  text += "}";
  EXPECT_EQ(with_member(without_member(text, "key-7"), "key", 1).size(), text.size() - 10);
}

TEST(JsonParser, RefusesHugeInputsAfterBoundedWork) {
  std::string line = R"({"text": "x", "rest": [)";
  for (int i = 0; i < 1'000'000; ++i) line += i ? R"(,{"a":{}})" : R"({"a":{}})";
  EXPECT_ERROR(parse_example(line + "]}"), "more than 2000000 values");
  EXPECT_ERROR(parse_example(line + "]"), "more than 2000000 values");  // before the end of the text
}

// The callback parser needed more than a minute of processor time.
TEST(JsonParser, TakesLinearTime) {
  std::string line = R"({"text": "x", "rest": [{})";
  for (int i = 0; i < 400'000; ++i) line += ",{}";
  const std::clock_t start = std::clock();
  EXPECT_EQ(parse_example(line + "]}").written, "x");
  EXPECT_LT(static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, 20);
}

TEST(JsonParser, QuotesLongTextBriefly) {
  const std::string wide(1'000'000, 'w');
  for (const std::string& line :
       {"{\"" + wide + "\":1,\"" + wide + "\":2}", "{\"text\":" + wide + "}",
        "{\"text\":1" + std::string(1'000'000, '0') + "}",
        R"({"messages": [{"role": ")" + wide + R"(", "content": ""}], "prompt": [], "chosen": 1})"}) {
    const std::string said = error_of([&] { parse_example(line); });
    EXPECT_NE(said, "");
    EXPECT_LT(said.size(), 400u) << said.substr(0, 1000);
  }
  EXPECT_EQ(quote("a\n\x7f"), R"("a\x0a\x7f")");
  EXPECT_EQ(excerpt(std::string(199, 'a') + "\u00e4"), std::string(199, 'a') + "...") << "not half a character";
}

// --- Examples ---

TEST(Examples, OfAllForms) {
  const Example chat =
      parse_example(R"({"messages": [{"role": "user", "content": "a", "id": 3}], "prompt": "ignored"})");
  EXPECT_EQ(chat.kind, Example::conversation);
  ASSERT_EQ(chat.chat.messages.size(), 1u);
  EXPECT_EQ(chat.chat.messages[0].content(), "a");
  // Some exporters write every member, empty or not.
  const char* members = R"("reasoning_content": "", "tool_calls": [], "thinking": null)";
  EXPECT_EQ(parse_example(R"({"messages": [{"role": "assistant", "content": "b", )" + std::string(members) + "}]}")
                .chat.messages.size(),
            1u);
  const Example tools = parse_example(
      R"({"messages": [{"role": "assistant", "content": null, "train": false, "tool_calls": [{"function": {"name": "f"}}]}],
          "tools": "[{\"b\": 1, \"a\": 2}]", "chat_template_kwargs": {"think": true}})");
  EXPECT_FALSE(tools.chat.messages[0].learned);
  EXPECT_EQ(jinja::to_utf8(jinja::str(tools.chat.tools)), "[{'b': 1, 'a': 2}]") << "in the order of the file";
  EXPECT_EQ(tools.chat.variables.at(0).first, "think");
  const Example sharegpt = parse_example(
      R"({"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})");
  ASSERT_EQ(sharegpt.chat.messages.size(), 3u);
  EXPECT_EQ(sharegpt.chat.messages[1], (Message{"user", "a"}));
  EXPECT_EQ(sharegpt.chat.messages[2], (Message{"assistant", "b"}));
  const Example alpaca = parse_example(R"({"instruction": "Add.", "input": "1 2", "output": "3"})");
  EXPECT_EQ(parse_example(R"({"instruction": "Add.", "output": "3", "system": "", "history": [], "label": true})").kind,
            Example::conversation);
  EXPECT_EQ(alpaca.chat.messages, (std::vector<Message>{{"user", "Add.\n\n1 2"}, {"assistant", "3"}}));
  const Example parts = parse_example(
      R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]})");
  EXPECT_EQ(parts.first, 1u);
  EXPECT_EQ(parts.chat.messages.size(), 2u);
  const Example completion = parse_example(R"({"prompt": "a", "completion": "b"})");
  EXPECT_EQ(completion.kind, Example::completion);
  EXPECT_EQ(completion.prompt + completion.written, "ab");
  EXPECT_EQ(parse_example(R"({"text": "\u00e4\ud83c\udf0d"})").written, "ä🌍");
  EXPECT_EQ(parse_example(R"({"text": "x", "tools": [1], "messages": null})").kind, Example::text);
}

TEST(Examples, OfPreferencesHaveTwoSides) {
  const Example texts = parse_example(R"({"prompt": "a", "chosen": "b", "rejected": "c", "score": 1})");
  EXPECT_EQ(texts.kind, Example::preference);
  ASSERT_EQ(texts.sides.size(), 2u);
  for (const Example& side : texts.sides) {
    EXPECT_EQ(side.kind, Example::completion);
    EXPECT_EQ(side.prompt, "a");
  }
  EXPECT_EQ(texts.sides[0].written + texts.sides[1].written, "bc");
  // with a separate prompt, in both, or partly in both
  const std::string ask = R"({"role": "user", "content": "a"})", say = R"({"role": "assistant", "content": "b"})",
                    more = R"({"role": "user", "content": "c"})", good = R"({"role": "assistant", "content": "d"})",
                    bad = R"({"role": "assistant", "content": "e"})";
  const auto lists = [](const std::string& prompt, const std::string& chosen, const std::string& rejected) {
    return parse_example("{\"chosen\": [" + chosen + "], \"rejected\": [" + rejected + "], \"prompt\": " + prompt +
                         "}");
  };
  const std::string before = ask + "," + say + "," + more + ",";
  for (const Example& example :
       {lists("[" + ask + "," + say + "," + more + "]", good, bad), lists("null", before + good, before + bad),
        lists("\"a\"", before + good + R"(], "messages": [)" + before + good, before + bad),  // as published
        lists("[" + ask + "]", say + "," + more + "," + good, say + "," + more + "," + bad)}) {
    EXPECT_EQ(example.kind, Example::preference);
    ASSERT_EQ(example.sides.size(), 2u);
    for (const Example& side : example.sides) {
      EXPECT_EQ(side.kind, Example::conversation);
      EXPECT_EQ(side.first, 3u);
      ASSERT_EQ(side.chat.messages.size(), 4u);
      EXPECT_EQ(side.chat.messages[2].content(), "c");
    }
    EXPECT_EQ(example.sides[0].chat.messages[3].content() + example.sides[1].chat.messages[3].content(), "de");
  }
}

TEST(Examples, WithErrorsAreRefusedWithTheCause) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "not valid JSON"},
      {"{\"text\": ", "not valid JSON: column 10"},
      {"[1]", "not a JSON object"},
      {"3", "not a JSON object"},
      {R"({"prompt": ")" + std::string(600'000, 'a') + R"(", "completions": )" + Json(1000, "b").dump() + "}",
       "the prompt of 600002 bytes would be repeated 1000 times"},
      {"{}", "none of \"messages\""},
      {R"({"text": NaN})", "not valid JSON"},
      {R"({"text": 3})", "\"text\" is not a string"},
      {R"({"text": 1e999})", "\"text\" is not a string"},
      {R"({"text": "a)", "not valid JSON"},
      {"{\"text\": \"\xff\"}", "not valid JSON: column 11: syntax error while parsing value - invalid string"},
      {"{\"text\": \"\xed\xa0\x80\"}", "not valid JSON"},  // a surrogate in UTF-8
      {R"({"text": "\ud800"})", "not valid JSON"},
      {R"({"text": "a", "text": "b"})", "duplicate key \"text\""},
      {R"({"messages": [{"role": "user", "role": "user", "content": ""}]})", "duplicate key \"role\""},
      {R"({"completion": "b"})", "without a \"prompt\""},
      {R"({"prompt": "a"})", "without a completion"},
      {R"({"prompt": "a", "chosen": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],)"
       R"( "rejected": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "d"}]})",
       "\"chosen\" is a list of messages that does not start with the \"prompt\""},
      {R"({"prompts": "a"})", "none of \"messages\""},
      {R"({"prompt": "a", "completion": 3})", "must both be text"},
      {R"({"prompt": [], "completion": "b"})", "\"completion\" is not a list of messages"},
      {R"({"prompt": "a", "completion": []})", "must both be text"},
      {R"({"messages": "a"})", "\"messages\" is text that is not valid JSON"},
      {R"({"messages": ["a"]})", "message 1: not an object"},
      {R"({"messages": [{"content": "a"}]})", "message 1: no \"role\""},
      {R"({"messages": [{"role": "user"}]})", "message 1: no \"content\""},
      {R"({"messages": [{"role": "user", "content": null}]})", "message 1: no \"content\""},
      {R"({"messages": [{"role": "user", "content": 3}]})", "\"content\" is not a string"},
      {R"({"messages": [{"role": "user", "content": [{"text": "a"}]}]})", "a part without a type"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image"}]}]})", "a part of type \"image\""},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})", "has no text"},
      {R"({"messages": [{"role": 3, "content": "a"}]})", "no \"role\""},
      {R"({"messages": [{"role": "assistant", "content": "", "weight": 0.5}]})", "\"weight\" must be 0 or 1"},
      {R"({"messages": [], "tools": {}})", "\"tools\" is not a list"},
      {R"({"messages": [], "tools": "[1"})", "not valid JSON"},
      {R"({"messages": [], "chat_template_kwargs": 1})", "\"chat_template_kwargs\" is not an object"},
      {R"({"conversations": [{"from": "nobody", "value": "a"}]})", "the role \"nobody\" is not known; name it"},
      {R"({"conversations": [{"from": "gpt"}]})", "no \"from\" and \"value\""},
      {R"({"conversations": [3]})", "message 1: not an object"},
      {R"({"instruction": "a"})", "; name \"instruction\" \"prompt\""},
      {R"({"instruction": "a", "output": 3})", "\"output\" is not a string"},
      {R"({"instruction": "a", "output": "b", "system": "s"})", "\"system\" beside \"instruction\" is not read; write"},
      {R"({"instruction": "a", "output": "b", "history": [["c", "d"]]})",
       "\"history\" beside \"instruction\" is not read"},
      {R"({"instruction": "a", "output": "b", "text": "c"})", "both \"instruction\" with \"output\""},
      {R"({"question": "a", "answer": "b"})", "; name \"question\" \"prompt\" and \"answer\" \"completion\""},
      {R"({"instruction": "a", "context": "", "response": "b"})",
       "; name \"instruction\" \"prompt\" and \"response\" \"completion\""},
      {R"({"prompt": "a", "completion": "b", "label": false})", "\"label\" is false: an answer to avoid (KTO)"},
      {R"({"prompt": "a", "completion": "b", "label": 0})", "\"label\" is false"},
      {R"({"messages": [], "label": false})", "\"label\" is false"},
      {R"({"prompt": "a", "completion": "b", "label": "false"})", "\"label\" is false"},
      {R"({"messages": [], "system": "Brief."})", "\"system\" beside the conversation is not read"},
      {R"({"prompt": "a", "completion": "b", "system": "Brief."})", "\"system\" beside the conversation is not read"},
      {R"({"messages": [{"role": "assistant", "content": null, "function_call": {"name": "f"}}]})",
       "message 1: \"function_call\" is not read by chat templates; write it as \"tool_calls\""},
      {"{\"text\": 1" + std::string(400, '0') + "}", "number overflow"},
      {R"({"instruction": "a", "output": "b", "input": 3})", "\"input\" is not a string"},
      {R"({"messages": [], "chosen": [], "rejected": []})", "more than one of"},
      {R"({"prompt": "a", "completion": "b", "rejected": "c"})", "more than one of"},
      {R"({"prompt": "a", "chosen": "b"})", "a preference without \"rejected\""},
      {R"({"prompt": "a", "chosen": null, "rejected": "c"})", "a preference without \"chosen\""},
      {R"({"prompt": "a", "chosen": "b", "rejected": "b"})", "nothing to prefer"},
      {R"({"prompt": "a", "chosen": "", "rejected": "b"})", "\"chosen\" is an empty answer"},
      {R"({"prompt": "a", "chosen": "b", "rejected": ""})", "\"rejected\" is an empty answer"},
      {R"({"prompt": "a", "chosen": "b", "rejected": 3})", "\"prompt\" and \"rejected\" must both be text"},
      {R"({"prompt": "a", "chosen": [], "rejected": []})",
       "\"chosen\" is a list of messages that does not start with the"},
      {R"({"prompt": [], "chosen": "b", "rejected": "c"})", "\"chosen\" is not a list of messages"},
      {R"({"chosen": "b", "rejected": "c"})", "\"chosen\" is not a list of messages"},
      {R"({"prompt": [], "chosen": [{"role": "assistant", "content": "a"}], "rejected": []})",
       "\"rejected\" has no answer: all its messages"},
      {R"({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]})",
       "nothing to prefer"},
      {R"({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]})",
       "\"rejected\" differs from the other at message 1, which is not an assistant message"},
      {R"({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": ""}]})",
       "\"rejected\" is an empty answer"},
      {R"({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant"}]})",
       "rejected, message 1: no \"content\""},
  };
  for (const auto& [line, said] : cases) {
    const std::string error = error_of<BadData>([&] { parse_example(line); });
    EXPECT_PRED2(contains, error, said) << line;
    EXPECT_LT(error.size(), 400u);
  }
}

TEST(Examples, NestedTooDeeplyAreRefused) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string line = "{\"text\": ";
    for (int i = 0; i < 100'000; ++i) line += open;
    EXPECT_ERROR(parse_example(line), "nested more deeply than 32 levels");
  }
}

}  // namespace
}  // namespace streambp
