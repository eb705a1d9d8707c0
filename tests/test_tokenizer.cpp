// Tokenizers: what the `tokenizers` library makes of texts in many scripts is what this one makes of them (the cases
// are written by scripts/make_tokenizer_golden.py), long words are merged as the definition says, and what a
// tokenizer.json must not say is refused in words.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "data/tokenizer/tokenizer.cuh"
#include "kernels/base/random.cuh"

namespace streambp {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<std::int32_t>;

fs::path golden(const std::string& name) { return fs::path(STREAMBP_SOURCE) / "tests/golden/tokenizers" / name; }
Json read_json(const fs::path& path) { return Json::parse(read_file(path)); }
Json definition(const std::string& layout) { return read_json(golden(layout + ".tokenizer.json")); }

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

// The whole text, put together from pieces that are UTF-8 each.
std::string decoded_by_and_by(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  StreamingDecoder decoder(tokenizer, skip_special);
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
  append_repaired(text, bytes, true);
  return text;
}

class Layout : public testing::TestWithParam<const char*> {
 protected:
  const std::string name = GetParam();
  const Tokenizer tokenizer{golden(name + ".tokenizer.json")};
  const Json cases = read_json(golden(name + ".json"));
  const Json texts = read_json(golden("texts.json"));
};

TEST_P(Layout, TextsAsTheLibrary) {
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
    EXPECT_EQ(tokenizer.decode(ids, true), shown);
    EXPECT_EQ(decoded_by_and_by(tokenizer, ids, false), text);
    EXPECT_EQ(decoded_by_and_by(tokenizer, ids, true), shown);
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

TEST_P(Layout, RandomTextsAsTheLibrary) {
  const std::vector<std::string> pieces = from_hex(texts["pieces"]);
  for (std::size_t seed = 0; seed < cases["random"].size(); ++seed) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    const auto add = [&](std::string_view bytes) {
      for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    };
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
      for (const bool skip : {false, true}) {
        const std::string decoded = tokenizer.decode(ids, skip);
        EXPECT_EQ(decoded_by_and_by(tokenizer, ids, skip), decoded);
        add(decoded), add("\xFF");
      }
    }
    EXPECT_EQ(std::to_string(hash), cases["random"][seed].get<std::string>()) << "seed " << seed;
  }
}

// Any ids at all, in any order, are decoded the same by and by, and those that no token has are skipped.
TEST_P(Layout, RandomIdsByAndBy) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Draw draw{Random(seed)};
    Ids ids, known;
    for (std::uint64_t i = draw.below(40); i > 0; --i) {
      ids.push_back(static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(tokenizer.size()) + 20)) - 10);
      if (ids.back() >= 0 && ids.back() < tokenizer.size()) known.push_back(ids.back());
    }
    for (const bool skip : {false, true}) {
      EXPECT_EQ(decoded_by_and_by(tokenizer, ids, skip), tokenizer.decode(ids, skip));
      EXPECT_EQ(tokenizer.decode(known, skip), tokenizer.decode(ids, skip));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Layout,
                         testing::Values("gpt2", "gpt2_prefix_space", "llama3", "qwen2", "o200k", "deepseek", "llama2",
                                         "mistral", "gemma", "unknown", "bare"),
                         [](const auto& info) { return std::string(info.param); });

// --- Long texts ---

// Merging by definition: of all neighbours the pair of the lowest rank, the leftmost of equals.
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

TEST(LongWords, AreMergedByDefinition) {
  const Tokenizer bytes(golden("gpt2_prefix_space.tokenizer.json")), characters(golden("gemma.tokenizer.json"));
  Json byte_model = definition("gpt2_prefix_space")["model"], character_model = definition("gemma")["model"];
  for (Json& merge : byte_model["merges"]) {
    const std::string text = merge;
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Draw draw{Random(seed)};
    const std::uint64_t length = 30 + draw.below(300);
    std::vector<std::string> letters, written{"Ġ"};
    std::string text;
    for (std::uint64_t i = 0; i < length; ++i) {  // a few letters, so that many merge, and that equal ranks occur
      letters.push_back(std::string(1, "etheaonr"[draw.below(2 + seed % 7)]));
      text += letters.back();
    }
    written.insert(written.end(), letters.begin(), letters.end());
    EXPECT_EQ(bytes.encode(text), merged_by_definition(byte_model, written)) << text;
    EXPECT_EQ(characters.encode(text), merged_by_definition(character_model, letters)) << text;
  }
}

// Texts for which a careless implementation takes forever, overflows a stack or gives up.
TEST(LongTexts, OfAnyShape) {
  const std::size_t size = 1 << 18;
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
  for (const std::string layout : {"gpt2", "llama3", "qwen2", "o200k", "deepseek", "llama2", "mistral", "gemma"}) {
    const Tokenizer tokenizer(golden(layout + ".tokenizer.json"));
    for (const std::string& text :
         {repeat("a"), repeat(" "), repeat("\n"), repeat("7"), repeat("!"), repeat(" a"), repeat("a1"), repeat("\n "),
          repeat(" \t"), repeat("😀"), repeat("e\u0301"), repeat("'s"), repeat("\u0301\u0323"), repeat(" ") + "x",
          repeat("\r\n") + "  x", repeat("한"), repeat("<|im_start|"), letters}) {
      const Ids ids = tokenizer.encode(text);
      if (layout == "deepseek" || layout == "qwen2") {  // which normalise
        EXPECT_GT(ids.size(), size / 64);
      } else if (layout == "llama2" || layout == "mistral") {  // which put spaces before the text, and take them away
        EXPECT_TRUE(without_spaces(tokenizer.decode(ids)) == without_spaces(text)) << layout << text.substr(0, 8);
      } else {
        EXPECT_TRUE(tokenizer.decode(ids) == text) << layout << ", " << text.substr(0, 8);
      }
    }
  }
}

TEST(Threads, ShareATokenizer) {
  const Tokenizer tokenizer(golden("llama3.tokenizer.json"));
  const std::vector<std::string> texts = from_hex(read_json(golden("texts.json"))["texts"]);
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

// --- Parts of the interface that the library has not ---

TEST(Tokens, AreFoundByTheirText) {
  const Tokenizer tokenizer(golden("llama3.tokenizer.json"));
  const Json json = definition("llama3");
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

// What continues has no space put before it; what follows a special token in it begins anew.
TEST(Continuing, PutsNothingBefore) {
  for (const std::string layout : {"gpt2_prefix_space", "llama2", "mistral"}) {
    const Tokenizer tokenizer(golden(layout + ".tokenizer.json"));
    const Ids whole = tokenizer.encode("x y");
    const Ids rest = tokenizer.encode(" y", true);
    ASSERT_GE(whole.size(), rest.size()) << layout;
    EXPECT_EQ(Ids(whole.end() - static_cast<std::ptrdiff_t>(rest.size()), whole.end()), rest) << layout;
    EXPECT_NE(tokenizer.encode("x"), tokenizer.encode("x", true)) << layout;
    EXPECT_EQ(tokenizer.encode("x", true), tokenizer.encode_plain("x", true)) << layout;
    EXPECT_EQ(tokenizer.encode("", true), Ids()) << layout;
  }
  const Tokenizer tokenizer(golden("llama2.tokenizer.json"));
  EXPECT_EQ(tokenizer.encode("<s>x", true), tokenizer.encode("<s>x"));
  const Tokenizer plain(golden("gpt2.tokenizer.json"));
  EXPECT_EQ(plain.encode("x y", true), plain.encode("x y"));
}

TEST(Utf8, IsRepairedAsPythonDoes) {
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

// --- Refusals ---

class Refusal : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = fs::path(testing::TempDir()) / ("streambp-" + std::to_string(getpid()) + "-" + test->name());
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }

  // The words with which a tokenizer.json is refused, or "" if it is not.
  std::string refusal(const std::string& contents) const {
    std::ofstream(directory_ / "tokenizer.json", std::ios::binary) << contents;
    try {
      const Tokenizer tokenizer(directory_);
      tokenizer.decode(tokenizer.encode("some text, \u4e2d and \xFF more"));
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find((directory_ / "tokenizer.json").string()), std::string::npos) << message;
      return message;
    }
    return "";
  }
  void expect_refused(const Json& json, const std::string& part) const {
    const std::string message = refusal(json.dump());
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in \"" << message << "\"";
  }

  fs::path directory_;
};

TEST_F(Refusal, OfComponentsByName) {
  const auto with = [](const char* field, const Json& component) {
    Json json = definition("gpt2");
    json[field] = component;
    return json;
  };
  for (const char* type :
       {"BertNormalizer", "StripAccents", "NFKC", "NFKD", "Lowercase", "Nmt", "Precompiled", "ByteLevel", "Later"}) {
    expect_refused(with("normalizer", {{"type", type}}),
                   std::string("a normalizer of type \"") + type + "\" is not supported");
  }
  for (const char* type : {"BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit", "Punctuation",
                           "UnicodeScripts", "FixedLength"}) {
    const Json step = {{"type", type}};
    expect_refused(with("pre_tokenizer", step),
                   std::string("a pre_tokenizer of type \"") + type + "\" is not supported");
    expect_refused(with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {step}}}), type);
  }
  for (const char* type : {"BPEDecoder", "WordPiece", "CTC"}) {
    expect_refused(with("decoder", {{"type", type}}),
                   std::string("a decoder of type \"") + type + "\" is not supported");
  }
  for (const char* type : {"BertProcessing", "RobertaProcessing"}) {
    expect_refused(with("post_processor", {{"type", type}}),
                   std::string("a post_processor of type \"") + type + "\" is not supported");
  }
  for (const char* field : {"normalizer", "pre_tokenizer", "decoder", "post_processor"}) {
    expect_refused(with(field, {{"no_type", 1}}), "the field \"type\" is missing");
    expect_refused(with(field, 5), "expected a JSON object");
    expect_refused(with(field, {{"type", 5}}), "of the wrong type");
  }
  expect_refused(with("normalizer", {{"type", "NFC"}, {"new_option", true}}), "\"new_option\": true is not supported");
  expect_refused(with("pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", "yes"}}), "of the wrong type");
  expect_refused(with("pre_tokenizer", {{"type", "ByteLevel"}}), "\"add_prefix_space\" is missing");
  expect_refused(with("added_things", 1), "\"added_things\": 1 is not supported");
  expect_refused(with("version", "2.0"), "only \"1.0\" is");
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}}, bytes = definition("gpt2")["pre_tokenizer"];
  expect_refused(with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {bytes, digits}}}), "after ByteLevel");
  expect_refused(with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", 3}}), "is not a list");
  expect_refused(with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {nullptr}}}), "number 1");
  Json nested = bytes;
  for (int i = 0; i < 60; ++i) nested = {{"type", "Sequence"}, {"pretokenizers", {nested}}};
  expect_refused(with("pre_tokenizer", nested), "more deeply");
  expect_refused(with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", Json(100, digits)}}), "more steps");
  EXPECT_EQ(refusal(with("truncation", {{"max_length", 5}}).dump()), "");  // no part of the tokens of a text
  EXPECT_EQ(refusal(with("padding", {{"strategy", "BatchLongest"}}).dump()), "");
}

TEST_F(Refusal, OfMetaspaceAndSplitAndStrip) {
  const auto with = [](const Json& normalizer, const Json& step) {
    Json json = definition("mistral");
    json["normalizer"] = normalizer, json["pre_tokenizer"] = step;
    return json;
  };
  const auto metaspace = [](const Json& fields) {
    Json step = {{"type", "Metaspace"}, {"replacement", "▁"}};
    step.update(fields);
    return step;
  };
  expect_refused(with(nullptr, metaspace({{"prepend_scheme", "last"}})), "prepend_scheme \"last\"");
  expect_refused(with(nullptr, metaspace({{"prepend_scheme", "first"}, {"add_prefix_space", false}})), "contradicts");
  expect_refused(with(nullptr, metaspace({{"replacement", "ab"}})), "not one character");
  expect_refused(with(nullptr, metaspace({{"replacement", ""}})), "not one character");
  EXPECT_EQ(refusal(with(nullptr, metaspace({{"add_prefix_space", false}})).dump()), "");
  const Json strip = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}};
  expect_refused(with(strip, metaspace({{"prepend_scheme", "first"}})), "where the text begins");
  const auto split = [&](const Json& pattern, const char* behavior) {
    return with(nullptr, {{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}});
  };
  expect_refused(split({{"String", ""}}, "Isolated"), "an empty text");
  expect_refused(split({{"String", "a"}, {"Regex", "b"}}, "Isolated"), "expected \"String\" or \"Regex\"");
  expect_refused(split({{"Glob", "*"}}, "Isolated"), "\"Glob\"");
  expect_refused(split({{"String", "a"}}, "Shuffled"), "behavior \"Shuffled\"");
  Json json = definition("mistral");
  json["decoder"] = {{"type", "Strip"}, {"content", "ab"}, {"start", 1}, {"stop", 0}};
  expect_refused(json, "not one character");
  json["decoder"] = {{"type", "Strip"}, {"content", " "}, {"start", -1}, {"stop", 0}};
  expect_refused(json, "negative");
  json["decoder"] = {{"type", "Metaspace"}, {"replacement", ""}};
  expect_refused(json, "not one character");
}

// Few words in a file that make a word as long as the memory allows, or longer.
TEST_F(Refusal, OfTextsThatGrowWithoutEnd) {
  const Json doubling = {{"type", "Replace"}, {"pattern", {{"String", "e"}}}, {"content", "ee"}};
  const auto repeated = [](const char* name, std::size_t times, const std::vector<Json>& steps) {
    Json list = Json::array();
    for (std::size_t i = 0; i < times * steps.size(); ++i) list.push_back(steps[i % steps.size()]);
    return Json{{"type", "Sequence"}, {name, list}};
  };
  const auto with = [&](const char* field, const Json& component) {
    Json json = definition("mistral");
    json["pre_tokenizer"] = nullptr;
    json[field] = component;
    return json;
  };
  EXPECT_EQ(refusal(with("normalizer", repeated("normalizers", 12, {doubling})).dump()), "");
  expect_refused(with("normalizer", repeated("normalizers", 13, {doubling})), "8192 times as long");
  expect_refused(with("decoder", repeated("decoders", 50, {doubling})), "8192 times as long");
  const Json shrinking = {{"type", "Replace"}, {"pattern", {{"Regex", "[a-z]{4,}"}}}, {"content", "abcd"}};
  EXPECT_EQ(refusal(with("normalizer", repeated("normalizers", 50, {shrinking})).dump()), "");
  const Json split = {{"type", "Split"}, {"pattern", {{"Regex", "."}}}, {"behavior", "Isolated"}};
  const auto space = [](const char* text) { return Json{{"type", "Metaspace"}, {"replacement", text}}; };
  const auto prefixes = [&](std::size_t n) {
    return repeated("pretokenizers", n, {split, space("x"), split, space("y")});
  };
  EXPECT_EQ(refusal(with("pre_tokenizer", prefixes(4)).dump()), "");
  expect_refused(with("pre_tokenizer", prefixes(10)), "more steps than are supported");
}

// Where Oniguruma's language and PCRE2's differ, or where there is nothing to split at.
TEST_F(Refusal, OfRegularExpressions) {
  for (const std::string expression :
       {"[a[b]]",   "[a&&b]",  "[[:alpha:]]", "[]a]",          "[a",          "a{2}+",       "a{1,2}?",
        "a{,2}",    "{",       "(?i)a",       "(?<n>a)",       "(?#x)a",      "(*F)a",       "\\w",
        "\\bx",     "\\Kx",    "\\h",         "\\A",           "\\1",         "\\",          "[\\S]",
        "[\\P{L}]", "\\pL",    "\\p{^L}",     "\\p{Nonsense}", "(a",          "a)",          "*",
        "a*",       "",        "x|",          "(?=a)",         "\\C",         "\\x{110000}", "\\xE9",
        "\\x{41",   "\\p{Cn}", "\\p{C}",      "\\p{Runic}",    "(?i:\u00df)", "(?i:SS)",     "(?i:a|(b))"}) {
    Json json = definition("qwen2");
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression;
    expect_refused(json, "the regular expression " + expression);
  }
}

// A hostile expression comes to an end, in words.
TEST_F(Refusal, OfExpressionsThatTakeForever) {
  Json json = definition("qwen2");
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:(?:a|b|[a-c])+)+[0-9]";
  ASSERT_EQ(refusal(json.dump()), "");
  const Tokenizer tokenizer(directory_);
  EXPECT_THROW(tokenizer.encode(std::string(60, 'a')), Error);
  // nor may it take its time again and again
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:a|a)+b|a";
  ASSERT_EQ(refusal(json.dump()), "");
  const Tokenizer slow(directory_);
  std::string text;
  for (int i = 0; i < 200; ++i) text += std::string(18, 'a') + "c";
  EXPECT_THROW(slow.encode(text), Error);
  EXPECT_EQ(slow.decode(slow.encode(text.substr(0, 19))), text.substr(0, 19));
}

TEST_F(Refusal, OfModels) {
  const auto with = [](const char* field, const Json& value) {
    Json json = definition("gpt2");
    json["model"][field] = value;
    return json;
  };
  expect_refused(with("type", "Unigram"), "only \"BPE\" is");
  expect_refused(with("dropout", 0.1), "only 0.0 is");
  expect_refused(with("continuing_subword_prefix", "##"), "continuing_subword_prefix");
  expect_refused(with("end_of_word_suffix", "</w>"), "end_of_word_suffix");
  expect_refused(with("fuse_unk", 1), "of the wrong type");
  expect_refused(with("byte_fallback", "no"), "of the wrong type");
  expect_refused(with("vocab", {1, 2}), "expected a JSON object");
  expect_refused(with("vocab", nullptr), "\"vocab\" is missing");
  expect_refused(with("vocab", {{"a", "0"}}), "is not a whole number");
  expect_refused(with("vocab", {{"a", 0.5}}), "is not a whole number");
  expect_refused(with("vocab", {{"a", -1}}), "not from 0 to");
  expect_refused(with("vocab", {{"a", 1 << 30}}), "not from 0 to");
  expect_refused(with("vocab", {{"a", 0}, {"b", 65569}}), "not from 0 to 65568, as ids of 2 tokens");
  expect_refused(with("vocab", {{"a", 18446744073709551615u}}), "not from 0 to");
  expect_refused(with("vocab", {{"a", 3}, {"b", 3}}), "have the same id 3");
  expect_refused(with("merges", "a b"), "expected a list");
  expect_refused(with("merges", nullptr), "expected a list");
  expect_refused(with("merges", {"a"}), "is not two texts");
  expect_refused(with("merges", {"a b c"}), "is not two texts");
  expect_refused(with("merges", Json::array({Json::array({"a", "b", "c"})})), "is not a pair");
  expect_refused(with("merges", Json::array({Json::array({"a", 5})})), "is not a pair");
  expect_refused(with("merges", {5}), "is not a pair");
  expect_refused(with("merges", Json::array({Json::array({"nonsense ", "b"})})), "needs the token \"nonsense \"");
  expect_refused(with("merges", Json::array({Json::array({"q", "\u0120"})})), "needs the token \"q\u0120\"");
  EXPECT_EQ(refusal(with("dropout", 0).dump()), "");
  EXPECT_EQ(refusal(with("continuing_subword_prefix", "").dump()), "");
  Json json = definition("unknown");
  json["model"]["unk_token"] = "<nothing>";
  expect_refused(json, "the text needs the token for what is unknown, \"<nothing>\"");
}

TEST_F(Refusal, OfAddedTokensAndTemplates) {
  const Json whole = definition("llama3");
  const std::size_t size = whole["model"]["vocab"].size();
  const auto added = [&](const char* field, const Json& value) {
    Json json = whole;
    json["added_tokens"][0][field] = value;
    return json;
  };
  expect_refused(added("id", size + 1), "where the vocabulary says " + std::to_string(size));
  expect_refused(added("id", -1), "where the vocabulary says");
  expect_refused(added("id", 18446744073709551615u), "of the wrong type");
  expect_refused(added("content", 7), "of the wrong type");
  expect_refused(added("content", "<|im_end|>"), "is there twice");
  expect_refused(added("special", nullptr), "\"special\" is missing");
  expect_refused(added("lstrip", 1), "of the wrong type");
  expect_refused(added("new_flag", 1), "\"new_flag\"");
  Json json = whole;
  json["added_tokens"] = 7;
  expect_refused(json, "is not a list");
  json["added_tokens"] = {7};
  expect_refused(json, "expected a JSON object");
  json = definition("qwen2");
  json["added_tokens"][0]["content"] = "caf\u00e9", json["added_tokens"][0]["normalized"] = true;
  expect_refused(json, "the same text once they are normalised");
  json = definition("unknown");
  json["added_tokens"].back()["normalized"] = true;  // white space only, which Strip takes away
  expect_refused(json, "nothing is left of it");

  const auto post = [&](const char* field, const Json& value) {
    Json changed = whole;
    changed["post_processor"]["processors"][1][field] = value;
    return changed;
  };
  const Json sequence = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
             second = {{"Sequence", {{"id", "B"}, {"type_id", 0}}}};
  const Json special = {{"SpecialToken", {{"id", "<|im_start|>"}, {"type_id", 0}}}};
  expect_refused(post("single", 5), "is not a list");
  expect_refused(post("single", Json::array({special})), "no place for the text");
  expect_refused(post("single", {sequence, sequence}), "expected one sequence");
  expect_refused(post("single", {sequence, second}), "expected one sequence");
  expect_refused(post("single", {sequence, {{"Other", 1}}}), "\"Other\"");
  expect_refused(post("special_tokens", Json::object()), "\"<|im_start|>\" is missing");
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", {99999}}}}}), "99999 is the id of no token");
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", {-1}}}}}), "-1 is the id of no token");
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", 5}}}}), "is not a list");
}

TEST_F(Refusal, OfDamagedFiles) {
  const std::string whole = definition("llama2").dump();
  ASSERT_EQ(refusal(whole), "");
  for (std::size_t size = 0; size < whole.size(); size += 1 + whole.size() / 50) {
    EXPECT_NE(refusal(whole.substr(0, size)).find("not valid JSON"), std::string::npos) << size;
  }
  EXPECT_NE(refusal("[]").find("expected a JSON object"), std::string::npos);
  EXPECT_NE(refusal("{}").find("\"model\" is missing"), std::string::npos);
  EXPECT_NE(refusal(std::string(100000, '[')).find("more deeply"), std::string::npos);
  std::string deep;
  for (int i = 0; i < 20000; ++i) deep += R"({"type":"Sequence","normalizers":[)";
  deep += "null";
  for (int i = 0; i < 20000; ++i) deep += "]}";
  EXPECT_NE(refusal("{\"normalizer\":" + deep + "}").find("more deeply"), std::string::npos);
  fs::remove(directory_ / "tokenizer.json");
  try {
    Tokenizer{directory_};
    FAIL() << "a directory without a tokenizer.json was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no such file"), std::string::npos) << error.what();
  }
  // Bytes changed at random: refused in words or taken, but never a crash.
  for (std::uint64_t i = 0; i < 300; ++i) {
    std::string changed = whole;
    for (std::uint64_t k = 0; k < 3; ++k) {
      changed[Random(i).below(changed.size(), 2 * k)] = static_cast<char>(Random(i).below(128, 2 * k + 1));
    }
    refusal(changed);
  }
}

}  // namespace
}  // namespace streambp
