// Tokenizers give the results of the `tokenizers` library for texts in many scripts (scripts/make_tokenizer_golden.py
// writes the cases), and merge long words according to the definition.
#include <algorithm>
#include <map>
#include <thread>

#include "data/files/hash.h"
#include "kernels/base/random.h"
#include "tests/tokenizers.h"

namespace streambp {
namespace {

using Ids = std::vector<std::int32_t>;

std::vector<std::string> from_hex(const Json& list) {
  std::vector<std::string> all;
  for (const std::string hex : list) {
    std::string bytes;
    for (std::size_t i = 0; i < hex.size(); i += 2)
      bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    all.push_back(bytes);
  }
  return all;
}

// The text of a StreamingDecoder. Each of its pieces is UTF-8.
std::string streamed(const Tokenizer& tokenizer, const Ids& ids, Skip skip) {
  StreamingDecoder decoder(tokenizer, skip);
  std::string all;
  const auto take = [&](const std::string& piece) {
    EXPECT_TRUE(is_utf8(piece));
    all += piece;
  };
  for (const std::int32_t id : ids) take(decoder.add(id));
  take(decoder.finish());
  return all;
}

std::string repaired(const std::string& bytes) {
  std::string text;
  append_repaired(text, bytes);
  return text;
}

class Layout : public testing::TestWithParam<const char*> {
 protected:
  const std::string name = GetParam();
  const Tokenizer tokenizer = read_tokenizer(golden_tokenizer(name + ".tokenizer.json"));
  const Json cases = parse_json_file(golden_tokenizer(name + ".json"));
  const Json texts = parse_json_file(golden_tokenizer("texts.json"));
};

TEST_P(Layout, EncodesLikeTheLibrary) {
  EXPECT_EQ(tokenizer.size(), cases["size"].get<Index>());
  EXPECT_EQ(tokenizer.prefix(), cases["prefix"].get<Ids>());
  EXPECT_EQ(tokenizer.suffix(), cases["suffix"].get<Ids>());
  const std::vector<std::string> all = from_hex(texts["texts"]);
  ASSERT_EQ(all.size(), cases["texts"].size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(texts["texts"][i]);
    const Json& row = cases["texts"][i];
    const Ids ids = row[0];
    const std::string text = row[2].is_null() ? repaired(all[i]) : row[2].get<std::string>();
    const std::string shown = row[3].is_null() ? text : row[3].get<std::string>();
    EXPECT_EQ(tokenizer.encode(all[i]), ids);
    EXPECT_EQ(tokenizer.encode_plain(all[i]), row[1].is_null() ? ids : row[1].get<Ids>());
    EXPECT_EQ(tokenizer.decode(ids), text);
    EXPECT_EQ(tokenizer.decode(ids, Skip::special), shown);
    EXPECT_EQ(streamed(tokenizer, ids, Skip::none), text);
    EXPECT_EQ(streamed(tokenizer, ids, Skip::special), shown);
  }
}

// The generator of scripts/make_tokenizer_golden.py.
struct Draw {
  Random random;
  std::uint64_t index = 0;
  std::uint64_t below(std::uint64_t n) { return random.below(n, index++); }

  std::string text(const std::vector<std::string>& pieces) {
    const std::uint64_t kind = below(4), count = below(24);
    std::string text;
    for (std::uint64_t i = 0; i < count; ++i) {
      constexpr std::uint64_t kLimits[] = {0x80, 0x250, 0x800, 0x3000, 0x10000, 0x110000};
      if (kind < 2) {
        text += pieces[below(pieces.size())];
      } else if (kind == 2) {
        text += static_cast<char>(below(256));
      } else {
        const std::uint64_t limit = kLimits[below(6)];
        append_utf8(text, static_cast<char32_t>(below(limit)));
      }
    }
    return text;
  }
};

TEST_P(Layout, EncodesRandomTextsLikeTheLibrary) {
  const std::vector<std::string> pieces = from_hex(texts["pieces"]);
  for (std::size_t seed = 0; seed < cases["random"].size(); ++seed) {
    std::string results;
    const auto add = [&](std::string_view bytes) { results += bytes; };
    const auto add_ids = [&](const Ids& ids) {
      add({reinterpret_cast<const char*>(ids.data()), 4 * ids.size()});
      add("\xFF\xFF\xFF\xFF");
    };
    Draw draw{Random(seed)};
    for (int i = 0; i < 200; ++i) {
      const std::string text = draw.text(pieces);
      const Ids ids = tokenizer.encode(text);
      add_ids(ids);
      add_ids(tokenizer.encode_plain(text));
      for (const Skip skip : {Skip::none, Skip::special}) {
        const std::string decoded = tokenizer.decode(ids, skip);
        EXPECT_EQ(streamed(tokenizer, ids, skip), decoded);
        add(decoded), add("\xFF");
      }
    }
    EXPECT_EQ(std::to_string(text_hash(results)), cases["random"][seed].get<std::string>()) << "seed " << seed;
  }
}

// Any ids decode the same as a stream, and ids without a token are skipped.
TEST_P(Layout, StreamsRandomIds) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Draw draw{Random(seed)};
    Ids ids, known;
    for (std::uint64_t i = draw.below(40); i > 0; --i) {
      ids.push_back(static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(tokenizer.size()) + 20)) - 10);
      if (ids.back() >= 0 && ids.back() < tokenizer.size()) known.push_back(ids.back());
    }
    for (const Skip skip : {Skip::none, Skip::special}) {
      EXPECT_EQ(streamed(tokenizer, ids, skip), tokenizer.decode(ids, skip));
      EXPECT_EQ(tokenizer.decode(known, skip), tokenizer.decode(ids, skip));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Layout,
                         testing::Values("gpt2", "gpt2_prefix_space", "llama3", "qwen2", "qwen3_5", "o200k", "deepseek",
                                         "llama2", "mistral", "gemma", "nfkc", "uncased", "unknown", "bare"),
                         [](const auto& info) { return std::string(info.param); });

// --- Normalizers ---

Normalizer normalizer(const char* type) {
  const Json json = {{"normalizer", {{"type", type}}}};
  return Normalizer(Fields(json, "tokenizer.json"));
}
std::string normalized(const Normalizer& normalizer, const std::string& text) {
  std::string buffer;
  return std::string(normalizer.apply(text, TextStart::beginning, buffer));
}

class EveryCharacter : public testing::TestWithParam<const char*> {};

TEST_P(EveryCharacter, IsNormalizedLikeTheLibrary) {
  constexpr char32_t kBlock = 0x2000;
  const Json hashes = parse_json_file(golden_tokenizer("normalizers.json"))[GetParam()];
  const Normalizer tested = normalizer(GetParam());
  for (std::size_t block = 0; block < hashes.size(); ++block) {
    const char32_t begin = block + 1 == hashes.size() ? 0x2F000 : static_cast<char32_t>(block) * kBlock;
    std::string results;
    for (char32_t code = begin; code < begin + kBlock; ++code) {
      if (code >= 0xD800 && code < 0xE000) continue;
      const std::string c = to_utf8(code);
      results += normalized(tested, "\u0301" + c + "\u0334" + c + "\u0301");
      results += "\xFF";
    }
    EXPECT_EQ(std::to_string(text_hash(results)), hashes[block].get<std::string>())
        << "U+" << std::hex << unsigned(begin);
  }
}

INSTANTIATE_TEST_SUITE_P(, EveryCharacter, testing::Values("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Normalizers, ChangeText) {
  const auto expect = [](const char* type, const std::string& text, const std::string& result) {
    EXPECT_EQ(normalized(normalizer(type), text), result) << type << " of " << text;
  };
  expect("NFC", "e\u0301 \uFB01", "\u00E9 \uFB01");
  expect("NFD", "\u00E9 \uFB01", "e\u0301 \uFB01");
  expect("NFKC", "e\u0301 \uFB01 \uFF21", "\u00E9 fi A");
  expect("NFKD", "\u00E9 \uFB01 \u00B2", "e\u0301 fi 2");
  expect("NFC", "\uAC00\u11A8 \uAC00\u11A7", "\uAC01 \uAC00\u11A7");  // utf8proc would lose U+11A7
  expect("NFC", "a\u1DF6\u0301", "a\u1DF6\u0301");  // a mark newer than the library's Unicode blocks composition
  expect("Lowercase", "\u00C9A\u03A3 \u0130 \u1E9E \u1C89", "\u00E9a\u03C3 i\u0307 \u00DF \u1C8A");
  expect("StripAccents", "e\u0301\u0323 \u00E9 \u20E3", "e \u00E9 ");
}

// A run of marks is sorted in O(n log n).
TEST(Normalizers, SortLongRunsOfMarks) {
  std::string text = "a", sorted = "a";
  for (int i = 0; i < 500'000; ++i) text += "\u0301\u0323";
  for (const char* mark : {"\u0323", "\u0301"}) {
    for (int i = 0; i < 500'000; ++i) sorted += mark;
  }
  EXPECT_TRUE(normalized(normalizer("NFD"), text) == sorted);
}

// --- Long texts ---

// Merges the neighbours with the lowest rank, the leftmost of equals.
Ids merged_by_definition(const Json& model, const std::vector<std::string>& symbols) {
  std::map<std::pair<std::string, std::string>, std::size_t> ranks;
  for (std::size_t i = 0; i < model["merges"].size(); ++i) {
    ranks[{model["merges"][i][0], model["merges"][i][1]}] = i;
  }
  std::vector<std::string> word = symbols;
  while (true) {
    std::size_t best = 0, rank = ranks.size();
    for (std::size_t i = 0; i + 1 < word.size(); ++i) {
      const auto found = ranks.find({word[i], word[i + 1]});
      if (found != ranks.end() && found->second < rank) best = i, rank = found->second;
    }
    if (rank == ranks.size()) break;
    word[best] += word[best + 1];
    word.erase(word.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  Ids ids;
  for (const std::string& token : word) ids.push_back(model["vocab"][token]);
  return ids;
}

TEST(LongWords, MergeAccordingToTheDefinition) {
  const Tokenizer bytes = read_tokenizer(golden_tokenizer("gpt2_prefix_space.tokenizer.json")),
                  characters = read_tokenizer(golden_tokenizer("gemma.tokenizer.json"));
  Json byte_model = tokenizer_definition("gpt2_prefix_space")["model"],
       character_model = tokenizer_definition("gemma")["model"];
  for (Json& merge : byte_model["merges"]) {
    const std::string text = merge;
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Draw draw{Random(seed)};
    const std::uint64_t length = 30 + draw.below(300);
    std::vector<std::string> letters, written{"Ġ"};
    std::string text;
    for (std::uint64_t i = 0; i < length; ++i) {  // few letters: many merges and equal ranks
      letters.push_back(std::string(1, "etheaonr"[draw.below(2 + seed % 7)]));
      text += letters.back();
    }
    written.insert(written.end(), letters.begin(), letters.end());
    EXPECT_EQ(bytes.encode(text), merged_by_definition(byte_model, written)) << text;
    EXPECT_EQ(characters.encode(text), merged_by_definition(character_model, letters)) << text;
  }
}

// Texts that make a naive implementation run forever or overflow the stack.
TEST(LongTexts, OfManyShapes) {
  const std::size_t size = sized<std::size_t>(1 << 18, 1 << 15);
  const auto repeat = [&](const std::string& unit) {
    std::string text;
    while (text.size() < size) text += unit;
    return text;
  };
  const auto without_spaces = [](std::string text) {
    text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
    return text;
  };
  std::string letters;
  for (std::size_t i = 0; i < size; ++i) letters += static_cast<char>('a' + Random(1).below(26, i));
  for (const std::string layout :
       {"gpt2", "llama3", "qwen2", "qwen3_5", "o200k", "deepseek", "llama2", "mistral", "gemma"}) {
    const Tokenizer tokenizer = read_tokenizer(golden_tokenizer(layout + ".tokenizer.json"));
    for (const std::string& text :
         {repeat("a"), repeat(" "), repeat("\n"), repeat("7"), repeat("!"), repeat(" a"), repeat("a1"), repeat("\n "),
          repeat(" \t"), repeat("😀"), repeat("e\u0301"), repeat("'s"), repeat("\u0301\u0323"), repeat(" ") + "x",
          repeat("\r\n") + "  x", repeat("한"), repeat("<|im_start|"), letters}) {
      const Ids ids = tokenizer.encode(text);
      if (layout == "deepseek" || layout == "qwen2" || layout == "qwen3_5") {  // which normalize
        EXPECT_GT(ids.size(), size / 64);
      } else if (layout == "llama2" || layout == "mistral") {  // which add a space before the text and remove it
        EXPECT_TRUE(without_spaces(tokenizer.decode(ids)) == without_spaces(text)) << layout << text.substr(0, 8);
      } else {
        EXPECT_TRUE(tokenizer.decode(ids) == text) << layout << ", " << text.substr(0, 8);
      }
    }
  }
}

TEST(Threads, ShareATokenizer) {
  const Tokenizer tokenizer = read_tokenizer(golden_tokenizer("llama3.tokenizer.json"));
  const std::vector<std::string> texts = from_hex(parse_json_file(golden_tokenizer("texts.json"))["texts"]);
  const auto encode_all = [&] {
    std::vector<Ids> all;
    for (const std::string& text : texts) all.push_back(tokenizer.encode(text));
    return all;
  };
  const std::vector<Ids> expected = encode_all();
  std::vector<std::vector<Ids>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = encode_all(); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

// --- Additions to the library's interface ---

TEST(Tokens, AreFoundByTheirText) {
  const Tokenizer tokenizer = read_tokenizer(golden_tokenizer("llama3.tokenizer.json"));
  const Json json = tokenizer_definition("llama3");
  for (const Json& token : json["added_tokens"]) {
    EXPECT_EQ(tokenizer.find(token["content"].get<std::string>()), token["id"].get<std::int32_t>());
    EXPECT_EQ(tokenizer.special(token["id"]), token["special"].get<bool>());
  }
  EXPECT_EQ(tokenizer.find("Ġthe"), json["model"]["vocab"]["Ġthe"].get<std::int32_t>());
  EXPECT_FALSE(tokenizer.find("no such token").has_value());
  EXPECT_FALSE(tokenizer.special(json["model"]["vocab"]["a"]));
  EXPECT_FALSE(tokenizer.special(-1));
  EXPECT_FALSE(tokenizer.special(static_cast<std::int32_t>(tokenizer.size())));
}

// A continuation gets no space before it, but text after a special token in it does.
TEST(Continuation, GetsNoSpaceBefore) {
  for (const std::string layout : {"gpt2_prefix_space", "llama2", "mistral"}) {
    const Tokenizer tokenizer = read_tokenizer(golden_tokenizer(layout + ".tokenizer.json"));
    const Ids whole = tokenizer.encode("x y");
    const Ids rest = tokenizer.encode(" y", TextStart::continuation);
    ASSERT_GE(whole.size(), rest.size()) << layout;
    EXPECT_EQ(Ids(whole.end() - static_cast<std::ptrdiff_t>(rest.size()), whole.end()), rest) << layout;
    EXPECT_NE(tokenizer.encode("x"), tokenizer.encode("x", TextStart::continuation)) << layout;
    EXPECT_EQ(tokenizer.encode("x", TextStart::continuation), tokenizer.encode_plain("x", TextStart::continuation))
        << layout;
    EXPECT_EQ(tokenizer.encode("", TextStart::continuation), Ids()) << layout;
  }
  const Tokenizer tokenizer = read_tokenizer(golden_tokenizer("llama2.tokenizer.json"));
  EXPECT_EQ(tokenizer.encode("<s>x", TextStart::continuation), tokenizer.encode("<s>x"));
  const Tokenizer plain = read_tokenizer(golden_tokenizer("gpt2.tokenizer.json"));
  EXPECT_EQ(plain.encode("x y", TextStart::continuation), plain.encode("x y"));
}

TEST(Utf8, IsRepairedLikeInPython) {
  const std::pair<std::string, std::string> cases[] = {{"a\xFFz", "a\uFFFDz"},
                                                       {"\xC0\x80", "\uFFFD\uFFFD"},
                                                       {"\xE2\x82", "\uFFFD"},
                                                       {"\xE2\x82z", "\uFFFDz"},
                                                       {"\xE0\x80", "\uFFFD\uFFFD"},
                                                       {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
                                                       {"\xF0\x9F\x98", "\uFFFD"},
                                                       {"\xF4\x90", "\uFFFD\uFFFD"},
                                                       {"\xF0\x9F\xF0\x9F\x98\x80", "\uFFFD😀"},
                                                       {"\xF5\x80", "\uFFFD\uFFFD"},
                                                       {"\xEF\xBF\xBD", "\uFFFD"},
                                                       {"\xF4\x8F\xBF\xBF", "\U0010FFFF"},
                                                       {"12345678\x80", "12345678\uFFFD"},
                                                       {"123456789012345\xC3", "123456789012345\uFFFD"}};
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(repaired(bytes), text);
    EXPECT_EQ(is_utf8(bytes), bytes == text);
  }
}

}  // namespace
}  // namespace streambp
