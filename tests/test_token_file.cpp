// Token files: round trips, damage, and llm.c's format.
#include <cmath>

#include "data/documents/llmc_file.h"
#include "tests/data_files.h"

namespace streambp {
namespace {

TEST_F(DataFiles, TokensRoundTrip) {
  const std::vector<Document> documents = {{{1, 2, 3}, {0, 1, 1}}, {{INT32_MAX}, {0}}, {{0, 7}, {1, 1}}};
  TokenWriter writer(dir / "t.safetensors");
  EXPECT_EQ(files(), Strings{});  // no temporary file is visible
  for (const Document& document : documents) writer.add(document);
  writer.finish({{"made_from", "a test"}});
  EXPECT_EQ(files(), Strings{"t.safetensors"});
  const TokenFile file(dir / "t.safetensors");
  ASSERT_EQ(file.documents(), 3);
  EXPECT_EQ(file.token_count(), 6);
  EXPECT_EQ(file.learned_count(), 3);  // not a document's first token
  EXPECT_EQ(file.longest(), 3);
  EXPECT_EQ(file.lengths(), (std::vector<Index>{3, 1, 2}));
  EXPECT_EQ(file.metadata("made_from"), "a test");
  for (Index i = 0; i < 3; ++i) {
    const auto tokens = file.tokens(i);
    const auto learn = file.learn(i);
    EXPECT_EQ(std::vector(tokens.begin(), tokens.end()), documents[static_cast<std::size_t>(i)].tokens);
    EXPECT_EQ(std::vector(learn.begin(), learn.end()), documents[static_cast<std::size_t>(i)].learn);
  }
  EXPECT_ERROR(file.require_vocabulary(8), "token 3 is 2147483647, outside the model's vocabulary of 8");
  const TokenFile cached(dir / "t.safetensors", "a.jsonl, b.jsonl");  // errors name the data, not the cache
  EXPECT_TRUE(error_of([&] { cached.require_vocabulary(8); }).starts_with("a.jsonl, b.jsonl: token 3 is"));
}

TEST_F(DataFiles, FingerprintsDiffer) {
  const auto fingerprint = [&](const std::vector<Document>& documents) { return token_file(documents).fingerprint(); };
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
    return token_file(documents, {{"kind", kind}});
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
  EXPECT_ERROR(file({a, b, c}, "preferences"), "pairs of documents, but there are 3");
  EXPECT_ERROR(file({a, b, c, none}, "preferences"), "the rejected document of pair 2 has no token to learn");
  EXPECT_ERROR(file({none, b}, "preferences"), "the chosen document of pair 1 has no token to learn");
  EXPECT_ERROR(file({a, b}, "rewards"), "unknown kind \"rewards\"; documents, preferences and groups are known");
}

TEST_F(GroupFiles, HoldAdvantagesAndOldLogProbs) {
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
  // all of it changes the fingerprint
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

TEST_F(GroupFiles, RefuseIncompleteGroups) {
  const auto refused = [&](const std::function<void(Document&)>& change, const char* said) {
    Document other = b;
    change(other);
    const std::vector<Document> group = {a, other};
    EXPECT_ERROR(file(group), said);
  };
  refused([](Document& d) { d.advantage.reset(); }, "and others do not");
  refused([](Document& d) { d.old.clear(); }, "and others do not");
  refused([](Document& d) { d.old[0] = NAN; }, "old log-prob of token 3 is out of range");
  refused([](Document& d) { d.learn[1] = 0; }, "completion 2 has no token to learn");
  refused([](Document& d) { d.advantage->scaled = INFINITY; },
          "advantages of completion 2, -0.5 and inf, are out of range");
  EXPECT_ERROR(file({Document{{1, 2}, {0, 1}}}), "advantages");  // there are none
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
  EXPECT_EQ(error_of([&] { file({1, 3}, {0, 1, 9}, {0, 1, 1}); }), "");
  EXPECT_ERROR(file({}, {}, {}), "t.safetensors: holds no documents");
  EXPECT_ERROR(file({1, 1, 3}, {0, 1, 9}, {0, 1, 1}), "document 1 ends at token 1 but begins at 1");
  EXPECT_ERROR(file({2, 1, 3}, {0, 1, 9}, {0, 1, 1}), "document 1 ends at token 1 but begins at 2");
  EXPECT_ERROR(file({-1, 3}, {0, 1, 9}, {0, 1, 1}), "document 0 ends at token -1");
  EXPECT_ERROR(file({2}, {0, 1, 9}, {0, 1, 1}), "documents end after 2 tokens");
  EXPECT_ERROR(file({INT64_MAX}, {0, 1, 9}, {0, 1, 1}), "documents end after 9223372036854775807 tokens");
  EXPECT_ERROR(file({3}, {0, 1, 9}, {0, 1}), "2 entries of \"learn\"");
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
  EXPECT_ERROR(TokenFile(dir / "s.safetensors"), "tensor \"tokens\": expected I32 of one dimension");
  SafetensorsWriter skewed(dir / "a.safetensors", {});
  skewed.add("learn", "U8", {1}, &learn, 1);
  skewed.add("ends", "I64", {1}, &end, 8);
  skewed.add("tokens", "I32", {1}, &token, 4);
  skewed.finish();
  EXPECT_ERROR(TokenFile(dir / "a.safetensors"), "not aligned to its type");
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
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 1, 3, {1, 2})), "claims 3 tokens, but has room for 2");
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 1, -1, {1, 2})), "claims -1 tokens");
  EXPECT_ERROR(add(bin<std::uint16_t>(20240520, 1, 2, {1, 2}) + "x"), "claims 2 tokens");
  EXPECT_ERROR(add(bin<std::uint32_t>(20240801, 7, 1, {0x80000000u})), "outside every vocabulary");
}

}  // namespace
}  // namespace streambp
