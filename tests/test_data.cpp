// Training data: lines and examples from hostile files, files of tokens, and packing.
#include <cmath>

#include "data/documents/jsonl.cuh"
#include "data/documents/sources.cuh"
#include "tests/commands.cuh"

namespace streambp {
namespace {

template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}
#define EXPECT_ERROR(action, said) EXPECT_TRUE(contains(error_of([&] { action; }), said)) << error_of([&] { action; })

class DataFiles : public Commands {
 protected:
  fs::path write(const std::string& name, const std::string& text) {
    write_file_atomically(dir / name, text);
    return dir / name;
  }
  std::vector<std::string> lines(const std::string& text, std::size_t longest = Lines::kLongest) {
    Lines file(write("lines", text), longest);
    std::vector<std::string> all;
    for (std::string line; file.next(line);) all.push_back(line);
    return all;
  }
};

using Strings = std::vector<std::string>;

TEST_F(DataFiles, LinesEndInEveryWay) {
  EXPECT_EQ(lines(""), Strings{});
  EXPECT_EQ(lines("a\nb\n"), (Strings{"a", "b"}));
  EXPECT_EQ(lines("a\r\n\r\nb"), (Strings{"a", "", "b"}));
  EXPECT_EQ(lines("\xef\xbb\xbf"), (Strings{""}));
  EXPECT_EQ(lines("\xef\xbb\xbfx\n\xef\xbb\xbfy"), (Strings{"x", "\xef\xbb\xbfy"}));
  EXPECT_EQ(lines(std::string("a\0b\n", 4)), (Strings{std::string("a\0b", 3)}));
  const std::string wide(3'000'000, 'x');  // longer than what is read at a time
  EXPECT_EQ(lines(wide + "\n" + wide), (Strings{wide, wide}));
}

TEST_F(DataFiles, LinesThatNeverEndAreRefusedWithTheirNumber) {
  EXPECT_EQ(lines("a\n12345", 5).size(), 2u);
  EXPECT_ERROR(lines("a\n123456", 5), "lines:2: a line of more than 5 bytes");
}

TEST_F(DataFiles, LinesNameWhatIsNoFile) {
  EXPECT_ERROR(Lines(dir / "missing"), "no such file");
  EXPECT_ERROR(Lines{dir}, "is a directory");
}

TEST(Examples, AreUnderstood) {
  const Example chat =
      parse_example(R"({"messages": [{"role": "user", "content": "a", "id": 3}], "prompt": "ignored"})");
  EXPECT_EQ(chat.kind, Example::conversation);
  ASSERT_EQ(chat.messages.size(), 1u);
  EXPECT_EQ(chat.messages[0].content, "a");
  const Example parts = parse_example(
      R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]})");
  EXPECT_EQ(parts.first, 1u);
  EXPECT_EQ(parts.messages.size(), 2u);
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
  // with the prompt apart, in both, or some of each
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
        lists("\"a\"", before + good + R"(], "messages": [)" + before + good, before + bad),  // as it is published
        lists("[" + ask + "]", say + "," + more + "," + good, say + "," + more + "," + bad)}) {
    EXPECT_EQ(example.kind, Example::preference);
    ASSERT_EQ(example.sides.size(), 2u);
    for (const Example& side : example.sides) {
      EXPECT_EQ(side.kind, Example::conversation);
      EXPECT_EQ(side.first, 3u);
      ASSERT_EQ(side.messages.size(), 4u);
      EXPECT_EQ(side.messages[2].content, "c");
    }
    EXPECT_EQ(example.sides[0].messages[3].content + example.sides[1].messages[3].content, "de");
  }
}

TEST(Examples, ThatAreNotUnderstoodAreRefusedInWords) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "not valid JSON"},
      {"{\"text\": ", "not valid JSON: column 10"},
      {"[1]", "not a JSON object"},
      {"3", "not a JSON object"},
      {"{}", "neither \"messages\""},
      {R"({"text": NaN})", "not valid JSON"},
      {R"({"text": 3})", "\"text\" is not a text"},
      {R"({"text": 1e999})", "not valid JSON"},
      {R"({"text": "a)", "not valid JSON"},
      {"{\"text\": \"\xff\"}", "not valid JSON: column 11: syntax error while parsing value - invalid string"},
      {"{\"text\": \"\xed\xa0\x80\"}", "not valid JSON"},  // a surrogate in UTF-8
      {R"({"text": "\ud800"})", "not valid JSON"},
      {R"({"text": "a", "text": "b"})", "\"text\" stands twice"},
      {R"({"messages": [{"role": "user", "role": "user", "content": ""}]})", "\"role\" stands twice"},
      {R"({"completion": "b"})", "without a \"prompt\""},
      {R"({"prompt": "a"})", "nothing that follows it"},
      {R"({"prompt": "a", "chosen": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],)"
       R"( "rejected": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "d"}]})",
       "\"chosen\" is a list of messages that does not begin with the \"prompt\""},
      {R"({"prompts": "a"})", "neither \"messages\""},
      {R"({"prompt": "a", "completion": 3})", "must both be text"},
      {R"({"prompt": [], "completion": "b"})", "\"completion\" is not a list of messages"},
      {R"({"prompt": "a", "completion": []})", "must both be text"},
      {R"({"messages": "a"})", "not a list of messages"},
      {R"({"messages": ["a"]})", "message 1: not an object"},
      {R"({"messages": [{"content": "a"}]})", "message 1: no \"role\""},
      {R"({"messages": [{"role": "user"}]})", "message 1: no \"content\""},
      {R"({"messages": [{"role": "user", "content": null}]})", "\"content\" is not a text"},
      {R"({"messages": [{"role": "user", "content": [{"text": "a"}]}]})", "\"content\" is not a text"},
      {R"({"messages": [{"role": 3, "content": "a"}]})", "\"role\" is not a text"},
      {R"({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]})",
       "\"tool_calls\" is not supported"},
      {R"({"messages": [], "tools": [{}]})", "\"tools\" is not supported"},
      {R"({"messages": [{"role": "assistant", "content": "", "weight": 0}]})", "\"weight\" is not supported"},
      {R"({"text": "a", "completion": "b"})", "more than one of"},
      {R"({"messages": [], "chosen": [], "rejected": []})", "more than one of"},
      {R"({"prompt": "a", "completion": "b", "rejected": "c"})", "more than one of"},
      {R"({"prompt": "a", "chosen": "b"})", "a preference without \"rejected\""},
      {R"({"prompt": "a", "chosen": null, "rejected": "c"})", "a preference without \"chosen\""},
      {R"({"prompt": "a", "chosen": "b", "rejected": "b"})", "nothing to prefer"},
      {R"({"prompt": "a", "chosen": "", "rejected": "b"})", "\"chosen\" is an empty answer"},
      {R"({"prompt": "a", "chosen": "b", "rejected": ""})", "\"rejected\" is an empty answer"},
      {R"({"prompt": "a", "chosen": "b", "rejected": 3})", "\"prompt\" and \"rejected\" must both be text"},
      {R"({"prompt": "a", "chosen": [], "rejected": []})",
       "\"chosen\" is a list of messages that does not begin with the"},
      {R"({"prompt": [], "chosen": "b", "rejected": "c"})", "\"chosen\" is not a list of messages"},
      {R"({"chosen": "b", "rejected": "c"})", "\"chosen\" is not a list of messages"},
      {R"({"prompt": [], "chosen": [{"role": "assistant", "content": "a"}], "rejected": []})",
       "\"rejected\" has no message besides those that both begin with"},
      {R"({"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]})",
       "nothing to prefer"},
      {R"({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]})",
       "\"rejected\" parts from the other at message 1, which is not the assistant's"},
      {R"({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": ""}]})",
       "\"rejected\" is an empty answer"},
      {R"({"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant"}]})",
       "rejected, message 1: no \"content\""},
      {R"({"chosen": [], "rejected": [], "tools": [1]})", "\"tools\" is not supported"},
  };
  for (const auto& [line, said] : cases) {
    try {
      parse_example(line);
      ADD_FAILURE() << line;
    } catch (const BadData& error) {
      EXPECT_TRUE(contains(error.what(), said)) << line << "\n" << error.what();
      EXPECT_LT(std::string(error.what()).size(), 400u);
    }
  }
}

TEST(Examples, NestedBeyondReasonAreRefusedAndNotFollowed) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string line = "{\"text\": ";
    for (int i = 0; i < 100'000; ++i) line += open;
    EXPECT_ERROR(parse_example(line), "nested deeper than");
  }
}

TEST_F(DataFiles, TokensComeBackAsTheyWereWritten) {
  const std::vector<Document> documents = {{{1, 2, 3}, {0, 1, 1}}, {{INT32_MAX}, {0}}, {{0, 7}, {1, 1}}};
  TokenWriter writer(dir / "t.safetensors");
  EXPECT_EQ(files(), Strings{});  // nothing lies about while it is made
  for (const Document& document : documents) writer.add(document);
  writer.finish({{"made_from", "a test"}});
  EXPECT_EQ(files(), Strings{"t.safetensors"});
  const TokenFile file(dir / "t.safetensors");
  ASSERT_EQ(file.documents(), 3);
  EXPECT_EQ(file.token_count(), 6);
  EXPECT_EQ(file.learned_count(), 3);  // what comes first in a document cannot be predicted
  EXPECT_EQ(file.longest(), 3);
  EXPECT_EQ(file.lengths(), (std::vector<Index>{3, 1, 2}));
  EXPECT_EQ(file.metadata().at("made_from"), "a test");
  for (Index i = 0; i < 3; ++i) {
    const auto tokens = file.tokens(i);
    const auto learn = file.learn(i);
    EXPECT_EQ(std::vector(tokens.begin(), tokens.end()), documents[static_cast<std::size_t>(i)].tokens);
    EXPECT_EQ(std::vector(learn.begin(), learn.end()), documents[static_cast<std::size_t>(i)].learn);
  }
  EXPECT_ERROR(file.require_vocabulary(8), "token 3 is 2147483647, outside the model's vocabulary of 8");
}

TEST_F(DataFiles, FingerprintsTellDataApart) {
  const auto fingerprint = [&](const std::vector<Document>& documents) {
    TokenWriter writer(dir / "t.safetensors");
    for (const Document& document : documents) writer.add(document);
    writer.finish({});
    return TokenFile(dir / "t.safetensors").fingerprint();
  };
  std::set<std::string> all;
  const std::vector<std::vector<Document>> cases = {
      {{{1, 2, 3, 4}, {0, 1, 1, 1}}},       {{{1, 2, 3, 4}, {0, 0, 1, 1}}},       {{{1, 2, 4, 3}, {0, 1, 1, 1}}},
      {{{1, 2}, {0, 1}}, {{3, 4}, {1, 1}}}, {{{3, 4}, {1, 1}}, {{1, 2}, {0, 1}}}, {{{1, 2}, {0, 1}}}};
  for (const auto& documents : cases) {
    all.insert(fingerprint(documents));
    EXPECT_EQ(all.count(fingerprint(documents)), 1u);
  }
  EXPECT_EQ(all.size(), cases.size());
}

TEST_F(DataFiles, PreferencesAreDocumentsInPairs) {
  const auto file = [&](const std::vector<Document>& documents, const std::string& kind) {
    TokenWriter writer(dir / "t.safetensors");
    for (const Document& document : documents) writer.add(document);
    writer.finish({{"kind", kind}});
    return TokenFile(dir / "t.safetensors");
  };
  const Document a{{1, 2, 3}, {0, 1, 1}}, b{{1, 4}, {0, 1}}, c{{1, 2, 3, 4}, {0, 0, 0, 1}}, none{{5, 6}, {1, 0}};
  const TokenFile pairs = file({a, b, b, c}, "preferences"), documents = file({a, b, b, c}, "documents");
  EXPECT_TRUE(pairs.preferences());
  EXPECT_EQ(pairs.together(), 2);
  EXPECT_EQ(pairs.documents(), 4);
  EXPECT_EQ(pairs.longest(), 4);
  EXPECT_EQ(pairs.longest_together(), 6);
  EXPECT_FALSE(documents.preferences());
  EXPECT_EQ(documents.longest_together(), 4);
  EXPECT_NE(documents.fingerprint(), pairs.fingerprint());
  EXPECT_EQ(file({none, a, b}, "documents").documents(), 3);
  EXPECT_ERROR(file({a, b, c}, "preferences"), "pairs of documents, and there are 3");
  EXPECT_ERROR(file({a, b, c, none}, "preferences"), "the rejected document of pair 2 has nothing to learn");
  EXPECT_ERROR(file({none, b}, "preferences"), "the chosen document of pair 1 has nothing to learn");
  EXPECT_ERROR(file({a, b}, "rewards"), "the data are \"rewards\", neither documents nor preferences");
}

class Groups : public DataFiles {
 protected:
  TokenFile file(const std::vector<Document>& documents) {
    TokenWriter writer(dir / "t.safetensors");
    for (const Document& document : documents) writer.add(document);
    writer.finish({{"kind", "groups"}});
    return TokenFile(dir / "t.safetensors");
  }
  const Document a{{1, 2, 3}, {0, 1, 1}, Advantage{0.5, 2}, {-1, -2, 0}},
      b{{1, 4}, {0, 1}, Advantage{-0.5, -2}, {-3, 0}};
};

TEST_F(Groups, AreDocumentsWithAdvantagesAndWithWhatTheirTokensWereGiven) {
  const TokenFile known = file({a, b});
  EXPECT_TRUE(known.groups());
  EXPECT_EQ(known.together(), 1);
  EXPECT_EQ(known.advantage(1).plain, -0.5);
  EXPECT_EQ(known.advantage(1).scaled, -2);
  EXPECT_EQ(std::vector<float>(known.old().begin(), known.old().end()), (std::vector<float>{-1, -2, 0, -3, 0}));
  const Document again = document(known, 1);
  EXPECT_EQ(again.tokens, b.tokens);
  EXPECT_EQ(again.advantage->plain, -0.5);
  EXPECT_EQ(again.old, b.old);
  // fingerprints tell all of it apart
  std::set<std::string> all = {known.fingerprint()};
  for (const auto& change : std::vector<std::function<void(Document&)>>{
           [](Document& d) { d.advantage->plain = 1; }, [](Document& d) { d.advantage->scaled = 1; },
           [](Document& d) { d.old[0] = -3; }, [](Document& d) { d.learn[1] = 0; }}) {
    Document other = a;
    change(other);
    all.insert(file({other, b}).fingerprint());
  }
  EXPECT_EQ(all.size(), 5u);
}

TEST_F(Groups, ThatAreIncompleteAreRefused) {
  const auto changed = [&](const std::function<void(Document&)>& change) {
    Document other = b;
    change(other);
    return error_of([&] { file({a, other}); });
  };
  EXPECT_TRUE(contains(changed([](Document& d) { d.advantage.reset(); }), "others have none"));
  EXPECT_TRUE(contains(changed([](Document& d) { d.old.clear(); }), "others have none"));
  EXPECT_TRUE(contains(changed([](Document& d) { d.old[0] = NAN; }), "old log-probability of token 3 cannot be"));
  EXPECT_TRUE(contains(changed([](Document& d) { d.learn[1] = 0; }), "completion 2 has nothing to learn"));
  EXPECT_TRUE(contains(changed([](Document& d) { d.advantage->scaled = INFINITY; }),
                       "advantages of completion 2, -0.5 and inf, cannot be"));
  EXPECT_ERROR(file({Document{{1, 2}, {0, 1}}}), "advantages");  // there are none
}

// The batches of completions that were sampled, and of the same ones from a file.
TEST_F(Groups, BatchesSayWhatTheDataSay) {
  const TokenFile known = file({a, b});
  const DocumentSettings settings{.evaluation_fraction = 0,
                                  .length = 5,
                                  .longest = 5,
                                  .packs = 1,
                                  .micro_batches = 1,
                                  .seed = 1,
                                  .too_long = TooLong::split,
                                  .scaled = false};
  Documents data(known, settings);
  const Batch batch = data.batch(1, 0);
  const bool first = batch.targets[0] == 2;  // packs have an order of their own
  using Numbers = std::vector<double>;
  EXPECT_EQ(batch.advantages, first ? (Numbers{0.5, 0.5, 0.5, -0.5, -0.5}) : (Numbers{-0.5, -0.5, 0.5, 0.5, 0.5}));
  EXPECT_EQ(batch.old, first ? (Numbers{-1, -2, 0, -3, 0}) : (Numbers{-3, 0, -1, -2, 0}));
  EXPECT_TRUE(batch.reference.empty());
  data.attach(std::vector<float>{-5, -6, 0, -7, 0});
  EXPECT_EQ(data.batch(1, 0).old, batch.old) << "what the data say counts";
  EXPECT_EQ(data.batch(1, 0).reference, first ? (Numbers{-5, -6, 0, -7, 0}) : (Numbers{-7, 0, -5, -6, 0}));
  // Of completions of unknown origin the starting model is the sampler.
  Document x = a, y = b;
  x.old.clear(), y.old.clear();
  Documents unknown(file({x, y}), settings);
  EXPECT_TRUE(unknown.batch(1, 0).old.empty());
  unknown.attach(std::vector<float>{-5, -6, 0, -7, 0});
  EXPECT_EQ(unknown.batch(1, 0).old, unknown.batch(1, 0).reference);
  // Groups are held out as wholes: those of one prompt, which follow each other
  std::vector<Document> many;
  for (std::int32_t prompt = 0; prompt < 40; ++prompt) {
    for (std::int32_t answer = 0; answer < 3; ++answer) {
      many.push_back({{prompt, 100 + prompt, answer}, {0, 0, 1}, Advantage{1, 1}});
    }
  }
  DocumentSettings apart = settings;
  apart.evaluation_fraction = 0.3;
  apart.length = apart.longest = 9;
  Documents split(file(many), apart);
  std::map<std::int32_t, int> held_out, trained;
  const auto count = [](const Batch& b, std::map<std::int32_t, int>& times) {
    for (const std::int32_t token : b.tokens) times[token] += token >= 100;
  };
  for (const Batch& b : split.evaluation) count(b, held_out);
  for (Index step = 1; step <= split.steps_per_epoch(); ++step) count(split.batch(step, 0), trained);
  std::erase_if(held_out, [](const auto& x) { return x.second == 0; });
  std::erase_if(trained, [](const auto& x) { return x.second == 0; });
  EXPECT_GT(held_out.size(), 4u);
  EXPECT_LT(held_out.size(), 8 * 3 + 1);  // of eight batches
  for (const auto& [prompt, times] : held_out) EXPECT_FALSE(trained.contains(prompt)) << prompt;
  for (const auto& [prompt, times] : trained) EXPECT_EQ(times, 3) << prompt;
  // and none is split
  DocumentSettings narrow = settings;
  narrow.length = narrow.longest = 2;
  EXPECT_ERROR(Documents(known, narrow), "completion 1 has 3 tokens");
  narrow.too_long = TooLong::truncate;
  EXPECT_EQ(Documents(known, narrow).batch(1, 0).size(), 2);
}

TEST_F(DataFiles, DamagedTokenFilesAreRefused) {
  const auto file = [&](std::vector<Index> ends, std::vector<std::int32_t> tokens, std::vector<std::uint8_t> learn) {
    SafetensorsWriter writer(dir / "t.safetensors", {});
    writer.add("ends", "I64", {static_cast<Index>(ends.size())}, ends.data(), ends.size() * 8);
    writer.add("tokens", "I32", {static_cast<Index>(tokens.size())}, tokens.data(), tokens.size() * 4);
    writer.add("learn", "U8", {static_cast<Index>(learn.size())}, learn.data(), learn.size());
    writer.finish();
    TokenFile(dir / "t.safetensors").require_vocabulary(10);
  };
  EXPECT_EQ(error_of([&] { file({1, 3}, {0, 1, 9}, {0, 1, 1}); }), "no error");
  EXPECT_ERROR(file({1, 1, 3}, {0, 1, 9}, {0, 1, 1}), "document 1 ends at token 1 but begins at 1");
  EXPECT_ERROR(file({2, 1, 3}, {0, 1, 9}, {0, 1, 1}), "document 1 ends at token 1 but begins at 2");
  EXPECT_ERROR(file({-1, 3}, {0, 1, 9}, {0, 1, 1}), "document 0 ends at token -1");
  EXPECT_ERROR(file({2}, {0, 1, 9}, {0, 1, 1}), "documents end after 2 tokens");
  EXPECT_ERROR(file({INT64_MAX}, {0, 1, 9}, {0, 1, 1}), "documents end after 9223372036854775807 tokens");
  EXPECT_ERROR(file({3}, {0, 1, 9}, {0, 1}), "2 marks of what to learn");
  EXPECT_ERROR(file({3}, {0, 1, 10}, {0, 1, 1}), "token 2 is 10, outside");
  EXPECT_ERROR(file({3}, {0, -1, 9}, {0, 1, 1}), "token 1 is -1, outside");
  EXPECT_ERROR(file({3}, {0, 1, 9}, {0, 2, 1}), "\"learn\" of token 1 is 2");
  SafetensorsWriter shapes(dir / "s.safetensors", {});
  const Index end = 1;
  const std::int32_t token = 0;
  const std::uint8_t learn = 0;
  shapes.add("ends", "I64", {1}, &end, 8);
  shapes.add("tokens", "I32", {1, 1}, &token, 4);
  shapes.add("learn", "U8", {1}, &learn, 1);
  shapes.finish();
  EXPECT_ERROR(TokenFile(dir / "s.safetensors"), "tensor \"tokens\": a list of I32 is expected");
  SafetensorsWriter skewed(dir / "a.safetensors", {});
  skewed.add("learn", "U8", {1}, &learn, 1);
  skewed.add("ends", "I64", {1}, &end, 8);
  skewed.add("tokens", "I32", {1}, &token, 4);
  skewed.finish();
  EXPECT_ERROR(TokenFile(dir / "a.safetensors"), "does not lie at a multiple");
}

template <class T>
std::string bin(std::int32_t magic, std::int32_t version, std::int32_t count, const std::vector<T>& tokens) {
  std::vector<std::int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
         std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T));
}

TEST_F(DataFiles, LlmCFilesBecomeDocuments) {
  const auto documents = [&](const std::string& bytes) {
    TokenWriter writer(dir / "t.safetensors");
    add_bin_file(write("x.bin", bytes), writer);
    writer.finish({});
    const TokenFile file(dir / "t.safetensors");
    EXPECT_EQ(file.learned_count(), file.token_count() - file.documents());
    std::vector<std::vector<std::int32_t>> all;
    for (Index i = 0; i < file.documents(); ++i) all.emplace_back(file.tokens(i).begin(), file.tokens(i).end());
    return all;
  };
  using Lists = std::vector<std::vector<std::int32_t>>;
  const std::vector<std::uint16_t> gpt2 = {5, 50256, 6, 7, 50256, 65535};
  EXPECT_EQ(documents(bin(20240520, 1, 6, gpt2)), (Lists{{5}, {50256, 6, 7}, {50256, 65535}}));
  const std::vector<std::uint32_t> llama3 = {128000, 1, 2, 128000, 3};
  EXPECT_EQ(documents(bin(20240801, 7, 5, llama3)), (Lists{{128000, 1, 2}, {128000, 3}}));
  EXPECT_EQ(documents(bin<std::uint32_t>(20240801, 7, 2, {8, 9})), (Lists{{8, 9}}));
}

TEST_F(DataFiles, DamagedLlmCFilesAreRefused) {
  TokenWriter writer(dir / "t.safetensors");
  const auto add = [&](const std::string& bytes) { add_bin_file(write("x.bin", bytes), writer); };
  EXPECT_ERROR(add(""), "0 bytes are too few");
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 7, 0, {})), "magic number 20240520 and version 7");
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 1, 3, {1, 2})), "claims 3 tokens, and has room for 2");
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 1, -1, {1, 2})), "claims -1 tokens");
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 1, 2, {1, 2}) + "x"), "claims 2 tokens");
  EXPECT_ERROR(add(bin<std::uint32_t>(20240801, 7, 1, {0x80000000u})), "in no vocabulary");
}

// --- Packing ---

// Lengths as they are in nature: many short ones, few long ones.
std::vector<Index> natural_lengths(std::size_t n) {
  std::vector<Index> lengths(n);
  for (std::size_t i = 0; i < n; ++i) {
    lengths[i] = 2 + static_cast<Index>(std::exp(5.5 + 1.1 * Random(8).normal(i)));
  }
  return lengths;
}

std::vector<std::vector<Index>> packs_of(Packing& packing, Index from, Index count) {
  std::vector<std::vector<Index>> all;
  for (Index n = from; n < from + count; ++n) {
    auto& pack = all.emplace_back();
    for (const PackedPiece& p : packing.pack(n)) pack.insert(pack.end(), {p.document, p.begin, p.length});
  }
  return all;
}

TEST(Packing, UsesEveryTokenOnceAnEpochAndFillsThePacks) {
  const std::vector<Index> lengths = natural_lengths(20'000);
  constexpr Index length = 2048;
  Packing packing(cut(lengths, length, TooLong::split), length, 3);
  for (const Index epoch : {0, 1}) {
    std::vector<Index> next(lengths.size(), 0);
    std::vector<std::vector<std::pair<Index, Index>>> spans(lengths.size());
    for (Index n = 0; n < packing.size(); ++n) {
      Index sum = 0;
      for (const PackedPiece& piece : packing.pack(epoch * packing.size() + n)) {
        sum += piece.length;
        spans[static_cast<std::size_t>(piece.document)].push_back({piece.begin, piece.length});
      }
      ASSERT_LE(sum, length);
      ASSERT_GT(sum, 0);
    }
    for (std::size_t d = 0; d < lengths.size(); ++d) {
      std::sort(spans[d].begin(), spans[d].end());
      Index end = 0;
      for (const auto& [begin, n] : spans[d]) {
        ASSERT_EQ(begin, end);
        end += n;
      }
      ASSERT_EQ(end, lengths[d]);
    }
  }
  const double fill = static_cast<double>(packing.tokens()) / static_cast<double>(packing.size() * length);
  EXPECT_GE(fill, 0.98);
  RecordProperty("fill", std::to_string(fill));
}

// Where a piece goes is where it leaves the least room: {6, 5, 4, 3, 2} in packs of 10 are {6, 4} and {5, 3, 2}.
TEST(Packing, IsBestFit) {
  Packing packing(cut(std::vector<Index>{2, 3, 4, 5, 6}, 10, TooLong::split), 10, 1);
  ASSERT_EQ(packing.size(), 2);
  std::set<std::set<Index>> packs;
  for (Index n : {0, 1}) {
    std::set<Index> lengths;
    for (const PackedPiece& piece : packing.pack(n)) lengths.insert(piece.length);
    packs.insert(lengths);
  }
  EXPECT_EQ(packs, (std::set<std::set<Index>>{{6, 4}, {5, 3, 2}}));
}

TEST(Packing, IsAFunctionOfItsArgumentsSoThatRunsResumeAnywhere) {
  const std::vector<Index> lengths = natural_lengths(1000);
  const auto pieces = cut(lengths, 1000, TooLong::split);
  Packing packing(pieces, 1000, 3), again(pieces, 1000, 3), other(pieces, 1000, 4);
  const Index n = packing.size();
  ASSERT_EQ(other.size(), n);
  const auto all = packs_of(packing, 0, 3 * n);
  const auto late = packs_of(again, n + n / 2, n);  // begins in the middle of the second epoch
  EXPECT_TRUE(std::equal(late.begin(), late.end(), all.begin() + n + n / 2));
  EXPECT_EQ(packs_of(packing, 0, n), std::vector(all.begin(), all.begin() + n));  // and back
  EXPECT_NE(packs_of(other, 0, n), packs_of(packing, 0, n));
  EXPECT_NE(packs_of(packing, 0, n), packs_of(packing, n, n));
}

TEST(Packing, OfLongDocumentsIsAChoice) {
  const std::vector<Index> lengths = {25, 10, 3};
  const auto count = [&](TooLong choice) { return Packing(cut(lengths, 10, choice), 10, 1).tokens(); };
  EXPECT_EQ(count(TooLong::split), 38);
  EXPECT_EQ(count(TooLong::truncate), 23);
  EXPECT_ERROR(count(TooLong::refuse), "document 1 has 25 tokens, more than the 10");
  EXPECT_ERROR(Packing({}, 10, 1), "no documents");
  EXPECT_ERROR(cut(lengths, 0, TooLong::split), "hold nothing");
  EXPECT_ERROR(Packing({{0, 0, 11}}, 10, 1), "does not fit a pack of 10");
}

TEST(Packing, KeepsPairsTogetherInTheirOrder) {
  const std::vector<Index> lengths = natural_lengths(4000);
  constexpr Index length = 2048;
  const auto pieces = cut_pairs(lengths, length, length, TooLong::truncate);
  ASSERT_EQ(pieces.size(), lengths.size());
  Packing packing(pieces, length, 3, 2), again(pieces, length, 3, 2);
  const Index n = packing.size();
  for (const Index epoch : {0, 1}) {
    std::set<Index> seen;
    for (Index i = 0; i < n; ++i) {
      const auto pack = packing.pack(epoch * n + i);
      ASSERT_EQ(pack.size() % 2, 0u);
      Index sum = 0;
      for (std::size_t p = 0; p < pack.size(); p += 2) {
        ASSERT_EQ(pack[p].document % 2, 0);
        ASSERT_EQ(pack[p + 1].document, pack[p].document + 1);
        ASSERT_TRUE(seen.insert(pack[p].document).second);
        sum += pack[p].length + pack[p + 1].length;
      }
      ASSERT_LE(sum, length);
    }
    ASSERT_EQ(2 * seen.size(), lengths.size());
  }
  const auto all = packs_of(packing, 0, 2 * n), late = packs_of(again, n + n / 2, n / 2);
  EXPECT_TRUE(std::equal(late.begin(), late.end(), all.begin() + n + n / 2));
  EXPECT_GE(static_cast<double>(packing.tokens()) / static_cast<double>(n * length), 0.95);
}

TEST(Packing, OfLongPairsCutsTheLongerSide) {
  using Lengths = std::vector<Index>;
  const auto cut_to = [](const Lengths& pair, Index length, Index longest, TooLong choice = TooLong::truncate) {
    Lengths lengths;
    for (const PackedPiece& piece : cut_pairs(pair, length, longest, choice)) {
      EXPECT_EQ(piece.document, static_cast<Index>(lengths.size()));
      EXPECT_EQ(piece.begin, 0);
      lengths.push_back(piece.length);
    }
    return lengths;
  };
  EXPECT_EQ(cut_to({6, 4}, 10, 10, TooLong::refuse), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({6, 4}, 10, 10, TooLong::split), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({20, 4}, 10, 10), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({4, 20}, 10, 10), (Lengths{4, 6}));
  EXPECT_EQ(cut_to({6, 5}, 10, 10), (Lengths{5, 5}));
  EXPECT_EQ(cut_to({20, 30}, 11, 11), (Lengths{5, 5}));
  EXPECT_EQ(cut_to({20, 4}, 20, 8), (Lengths{8, 4}));
  EXPECT_EQ(cut_to({20, 30}, 20, 8), (Lengths{8, 8}));
  for (const TooLong choice : {TooLong::refuse, TooLong::split}) {
    EXPECT_ERROR(cut_to({1, 1, 6, 5}, 10, 10, choice), "pair 2 has 11 tokens, 6 chosen and 5 rejected");
    EXPECT_ERROR(cut_to({9, 5}, 20, 8, choice), "20 in all and 8 in each; give a larger --length");
  }
  EXPECT_ERROR(Packing({{0, 0, 6}, {1, 0, 5}}, 10, 1, 2), "a piece of 11 tokens does not fit a pack of 10");
}

// Pairs of a prompt and two answers, their tokens all different but for the prompts; and what each token's target was
// given, which tells it.
class Preferences : public DataFiles {
 protected:
  void make(const std::vector<std::array<Index, 3>>& lengths) {
    TokenWriter writer(dir / "t.safetensors");
    std::int32_t token = 0;
    for (const auto& [prompt, chosen, rejected] : lengths) {
      Document begin;
      for (Index i = 0; i < prompt; ++i, ++token) begin.add({&token, 1}, false);
      for (const Index answer : {chosen, rejected}) {
        Document document = begin;
        for (Index i = 0; i < answer; ++i, ++token) document.add({&token, 1}, true);
        writer.add(document);
      }
    }
    writer.finish({{"kind", "preferences"}});
    file.emplace(dir / "t.safetensors");
    config = make_config("llama", token, 8, 1, 1, 1, 8, 8, 0, true);
  }
  static float given(std::int32_t token) { return -0.5f - static_cast<float>(token); }
  std::vector<float> reference() const {
    std::vector<float> reference;
    for (Index d = 0; d < file->documents(); ++d) {
      const auto tokens = file->tokens(d);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        reference.push_back(i + 1 < tokens.size() ? given(tokens[i + 1]) : NAN);
      }
    }
    return reference;
  }
  Documents documents(Index length, TooLong too_long, double evaluation_fraction = 0) const {
    return Documents(*file, {.evaluation_fraction = evaluation_fraction,
                             .length = length,
                             .longest = length,
                             .packs = 2,
                             .micro_batches = 3,
                             .seed = 5,
                             .too_long = too_long});
  }
  // The pairs of a batch, each by its first tokens and how often it is there; looks at all of it meanwhile.
  void look(const Batch& batch, bool attached, std::map<std::int32_t, int>& pairs) const {
    validate(config, batch);
    std::vector<std::size_t> begin;
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
      if (batch.positions[i] == 0) begin.push_back(i);
    }
    ASSERT_EQ(begin.size() % 2, 0u);
    begin.push_back(batch.tokens.size());
    for (std::size_t d = 0; d + 1 < begin.size(); d += 2) {
      ASSERT_EQ(batch.tokens[begin[d]], batch.tokens[begin[d + 1]]);  // one prompt
      std::int32_t last[2] = {-1, -1};
      for (const std::size_t side : {0, 1}) {
        for (std::size_t i = begin[d + side]; i < begin[d + side + 1]; ++i) {
          last[side] = std::max(last[side], batch.targets[i]);
        }
        ASSERT_GE(last[side], 0);
      }
      ASSERT_LT(last[0], last[1]);  // the chosen one came first
      ++pairs[batch.tokens[begin[d]]];
    }
    ASSERT_EQ(batch.reference.size(), attached ? batch.tokens.size() : 0u);
    for (std::size_t i = 0; i < batch.reference.size(); ++i) {
      ASSERT_EQ(batch.reference[i], batch.targets[i] < 0 ? 0 : static_cast<double>(given(batch.targets[i])));
    }
  }

  std::optional<TokenFile> file;
  Config config;
};

TEST_F(Preferences, ComeOnceAnEpochOrAreHeldOut) {
  std::vector<std::array<Index, 3>> lengths;
  for (std::uint64_t i = 0; i < 300; ++i) {
    const auto length = [&](std::uint64_t use) { return 1 + static_cast<Index>(Random(i).below(30, use)); };
    lengths.push_back({length(0), length(1), length(2)});
  }
  make(lengths);
  for (const bool attached : {false, true}) {
    Documents all = documents(120, TooLong::split, 0.08);  // none is too long
    EXPECT_EQ(all.left_out, 0);
    if (attached) all.attach(reference());
    std::map<std::int32_t, int> learned, held_out;
    for (const Batch& batch : all.evaluation) look(batch, attached, held_out);
    EXPECT_GT(held_out.size(), 10u);
    for (Index step = 1; step <= all.steps_per_epoch(); ++step) {
      for (Index i = 0; i < 3; ++i) look(all.batch(step, i), attached, learned);
    }
    for (const auto& [pair, times] : held_out) EXPECT_FALSE(learned.contains(pair)) << times;
    EXPECT_EQ(learned.size() + held_out.size(), lengths.size());
    // the last step goes on into the next epoch
    Index twice = 0;
    for (const auto& [pair, times] : learned) EXPECT_LE(times, 2), twice += times == 2;
    EXPECT_LT(twice, static_cast<Index>(learned.size()) / 4);
    // as a run sees it that begins there
    Documents resumed = documents(120, TooLong::split, 0.08);
    if (attached) resumed.attach(reference());
    for (const Index step : {9, 2}) {
      const Batch before = all.batch(step, 1), after = resumed.batch(step, 1);
      EXPECT_EQ(before.tokens, after.tokens);
      EXPECT_EQ(before.targets, after.targets);
      EXPECT_EQ(before.reference, after.reference);
    }
  }
}

TEST_F(Preferences, ThatAreTooLongAreCutOrLeftOut) {
  make({{4, 3, 20}, {4, 3, 3}, {10, 5, 8}, {4, 30, 30}, {9, 1, 30}, {30, 4, 4}});
  EXPECT_ERROR(documents(20, TooLong::split), "pair 1 has 31 tokens, 7 chosen and 24 rejected");
  EXPECT_ERROR(documents(5, TooLong::truncate), "nothing to learn");
  Documents cut = documents(20, TooLong::truncate);
  EXPECT_EQ(cut.left_out, 1);  // the last, whose prompt leaves no room
  EXPECT_TRUE(cut.evaluation.empty());
  cut.attach(reference());
  std::map<std::int32_t, int> pairs;
  for (Index i = 0; i < 3; ++i) look(cut.batch(1, i), true, pairs);
  EXPECT_EQ(pairs.size(), 5u);
  EXPECT_ERROR(cut.attach(std::vector<float>(7)), "there are log-probabilities of 7");
}

// Answers that differ only in what was cut.
TEST_F(Preferences, ThatCuttingMakesTheSameAreLeftOut) {
  TokenWriter writer(dir / "t.safetensors");
  for (const std::int32_t last : {8, 9}) writer.add(Document{{1, 2, 3, 4, 5, last}, {0, 1, 1, 1, 1, 1}});
  for (const std::int32_t only : {8, 9}) writer.add(Document{{1, only}, {0, 1}});
  writer.finish({{"kind", "preferences"}});
  file.emplace(dir / "t.safetensors");
  EXPECT_EQ(documents(12, TooLong::refuse).left_out, 0);
  EXPECT_EQ(documents(10, TooLong::truncate).left_out, 0);  // the sixth tokens are targets
  EXPECT_EQ(documents(8, TooLong::truncate).left_out, 1);
}

TEST_F(Preferences, BatchesHaveAReferenceForAllTokensOrNone) {
  make({{2, 2, 2}});
  Documents pair = documents(8, TooLong::refuse);
  pair.attach(reference());
  const Batch good = pair.batch(1, 0);
  EXPECT_EQ(error_of([&] { validate(config, good); }), "no error");
  for (const double wrong : {-std::numeric_limits<double>::infinity(), std::nan("")}) {
    Batch bad = good;
    bad.reference[1] = wrong;
    EXPECT_ERROR(validate(config, bad), "reference log-probabilities of a batch is ");
  }
  Batch bad = good;
  bad.reference.pop_back();
  EXPECT_ERROR(validate(config, bad), "reference log-probabilities");
}

// What is learned is predicted exactly once in an epoch, also across the places where long documents are split.
TEST_F(DataFiles, BatchesPredictWhatIsLearned) {
  TokenWriter writer(dir / "t.safetensors");
  std::map<std::int32_t, int> expected;  // tokens are all different
  std::int32_t token = 0;
  for (const Index length : natural_lengths(200)) {
    Document document;
    for (Index i = 0; i < length; ++i, ++token) {
      const bool learn = i > 0 && Random(2).below(3, static_cast<std::uint64_t>(token)) > 0;
      document.add({&token, 1}, learn);
      if (learn) ++expected[token];
    }
    writer.add(document);
  }
  writer.finish({});
  const TokenFile file(dir / "t.safetensors");
  Packing packing(cut(file.lengths(), 300, TooLong::split), 300, 1);
  Config config = make_config("llama", token, 8, 1, 1, 1, 8, 8, 0, true);
  std::map<std::int32_t, int> predicted;
  Index tokens = 0;
  for (Index n = 0; n < packing.size(); ++n) {
    Batch batch;
    append(batch, file, packing.pack(n));
    validate(config, batch);
    tokens += batch.size();
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      if (batch.targets[i] < 0) continue;
      EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
      ++predicted[batch.targets[i]];
    }
    Index at = 0;
    for (const PackedPiece& piece : packing.pack(n)) {
      for (Index i = 0; i < piece.length; ++i, ++at) {
        ASSERT_EQ(batch.positions[static_cast<std::size_t>(at)], i);
        ASSERT_EQ(batch.key_begin[static_cast<std::size_t>(at)], at - i);
      }
    }
  }
  EXPECT_EQ(tokens, file.token_count());
  EXPECT_EQ(predicted, expected);
}

}  // namespace
}  // namespace streambp
