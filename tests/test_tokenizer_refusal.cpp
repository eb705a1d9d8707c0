// A damaged, malicious or unsupported tokenizer.json is refused. The error names the file and the reason.
#include <fstream>

#include "kernels/base/random.h"
#include "tests/temporary.h"
#include "tests/tokenizers.h"

namespace streambp {
namespace {

class TokenizerRefusal : public TemporaryDirectory {
 protected:
  // The error message, or "" if the file is accepted.
  std::string refusal(const std::string& contents) const {
    std::ofstream(dir / "tokenizer.json", std::ios::binary) << contents;
    const std::string message = error_of([&] {
      const Tokenizer tokenizer = read_tokenizer(dir);
      tokenizer.decode(tokenizer.encode("some text, \u4e2d and \xFF more"));
    });
    EXPECT_TRUE(message.empty() || contains(message, path("tokenizer.json"))) << message;
    return message;
  }
  void expect_refused(const Json& json, const std::string& part) const {
    EXPECT_PRED2(contains, refusal(json.dump()), part);
  }
};

// GPT-2's tokenizer with another component.
Json gpt2_with(const char* field, const Json& component) {
  Json json = tokenizer_definition("gpt2");
  json[field] = component;
  return json;
}

TEST_F(TokenizerRefusal, OfComponentsByName) {
  for (const char* type : {"BertNormalizer", "Nmt", "Precompiled", "ByteLevel", "Later"}) {
    expect_refused(gpt2_with("normalizer", {{"type", type}}),
                   std::string("a normalizer of type \"") + type + "\" is not supported");
  }
  for (const char* type : {"BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit", "Punctuation",
                           "UnicodeScripts", "FixedLength"}) {
    const Json step = {{"type", type}};
    expect_refused(gpt2_with("pre_tokenizer", step),
                   std::string("a pre_tokenizer of type \"") + type + "\" is not supported");
    expect_refused(gpt2_with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {step}}}), type);
  }
  for (const char* type : {"BPEDecoder", "WordPiece", "CTC"}) {
    expect_refused(gpt2_with("decoder", {{"type", type}}),
                   std::string("a decoder of type \"") + type + "\" is not supported");
  }
  for (const char* type : {"BertProcessing", "RobertaProcessing"}) {
    expect_refused(gpt2_with("post_processor", {{"type", type}}),
                   std::string("a post_processor of type \"") + type + "\" is not supported");
  }
}

TEST_F(TokenizerRefusal, OfFieldsByName) {
  for (const char* field : {"normalizer", "pre_tokenizer", "decoder", "post_processor"}) {
    expect_refused(gpt2_with(field, {{"no_type", 1}}), "the field \"type\" is missing");
    expect_refused(gpt2_with(field, 5), "expected a JSON object");
    expect_refused(gpt2_with(field, {{"type", 5}}), "of the wrong type");
  }
  expect_refused(gpt2_with("normalizer", {{"type", "NFC"}, {"new_option", true}}),
                 "\"new_option\": true is not supported");
  expect_refused(gpt2_with("pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", "yes"}}), "of the wrong type");
  expect_refused(gpt2_with("pre_tokenizer", {{"type", "ByteLevel"}}), "\"add_prefix_space\" is missing");
  expect_refused(gpt2_with("added_things", 1), "\"added_things\": 1 is not supported");
  expect_refused(gpt2_with("version", "2.0"), "only \"1.0\" is");
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}},
             bytes = tokenizer_definition("gpt2")["pre_tokenizer"];
  expect_refused(gpt2_with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {bytes, digits}}}),
                 "after ByteLevel");
  expect_refused(gpt2_with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", 3}}), "is not a list");
  expect_refused(gpt2_with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {nullptr}}}), "number 1");
  Json nested = bytes;
  for (int i = 0; i < 60; ++i) nested = {{"type", "Sequence"}, {"pretokenizers", {nested}}};
  expect_refused(gpt2_with("pre_tokenizer", nested), "more deeply");
  expect_refused(gpt2_with("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", Json(100, digits)}}),
                 "more steps");
  EXPECT_EQ(refusal(gpt2_with("truncation", {{"max_length", 5}}).dump()), "");  // without effect on tokens
  EXPECT_EQ(refusal(gpt2_with("padding", {{"strategy", "BatchLongest"}}).dump()), "");
}

TEST_F(TokenizerRefusal, OfMetaspaceAndSplitAndStrip) {
  const auto with = [](const Json& normalizer, const Json& step) {
    Json json = tokenizer_definition("mistral");
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
  expect_refused(with(strip, metaspace({{"prepend_scheme", "first"}})), "can remove the first character");
  expect_refused(with({{"type", "StripAccents"}}, metaspace({{"prepend_scheme", "first"}})), "can remove the first");
  EXPECT_EQ(refusal(with({{"type", "Lowercase"}}, metaspace({{"prepend_scheme", "first"}})).dump()), "");
  const auto split = [&](const Json& pattern, const char* behavior) {
    return with(nullptr, {{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}});
  };
  expect_refused(split({{"String", ""}}, "Isolated"), "an empty string");
  expect_refused(split({{"String", "a"}, {"Regex", "b"}}, "Isolated"), "expected \"String\" or \"Regex\"");
  expect_refused(split({{"Glob", "*"}}, "Isolated"), "\"Glob\"");
  expect_refused(split({{"String", "a"}}, "Shuffled"), "behavior \"Shuffled\"");
  Json json = tokenizer_definition("mistral");
  json["decoder"] = {{"type", "Strip"}, {"content", "ab"}, {"start", 1}, {"stop", 0}};
  expect_refused(json, "not one character");
  json["decoder"] = {{"type", "Strip"}, {"content", " "}, {"start", -1}, {"stop", 0}};
  expect_refused(json, "negative");
  json["decoder"] = {{"type", "Metaspace"}, {"replacement", ""}};
  expect_refused(json, "not one character");
}

// A few replacements that make a text fill memory.
TEST_F(TokenizerRefusal, OfExponentialGrowth) {
  const Json doubling = {{"type", "Replace"}, {"pattern", {{"String", "z"}}}, {"content", "zz"}};
  const auto repeated = [](const char* name, std::size_t times, const std::vector<Json>& steps) {
    Json list = Json::array();
    for (std::size_t i = 0; i < times * steps.size(); ++i) list.push_back(steps[i % steps.size()]);
    return Json{{"type", "Sequence"}, {name, list}};
  };
  const auto with = [&](const char* field, const Json& component) {
    Json json = tokenizer_definition("mistral");
    json["pre_tokenizer"] = nullptr;
    json[field] = component;
    return json;
  };
  EXPECT_EQ(refusal(with("normalizer", repeated("normalizers", 12, {doubling})).dump()), "");
  expect_refused(with("normalizer", repeated("normalizers", 13, {doubling})), "8192 times as long");
  expect_refused(with("decoder", repeated("decoders", 50, {doubling})), "8192 times as long");
  const Json nfkc = {{"type", "NFKC"}},
             ligature = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "\uFDFA"}};
  EXPECT_EQ(refusal(with("normalizer", repeated("normalizers", 2, {nfkc})).dump()), "");
  expect_refused(with("normalizer", repeated("normalizers", 4, {ligature, nfkc})), "times as long");
  const Json shrinking = {{"type", "Replace"}, {"pattern", {{"Regex", "[a-z]{4,}"}}}, {"content", "abcd"}};
  EXPECT_EQ(refusal(with("normalizer", repeated("normalizers", 50, {shrinking})).dump()), "");
  expect_refused(with("normalizer", repeated("normalizers", 65, {shrinking})), "more steps than are supported");
  expect_refused(with("decoder", repeated("decoders", 65, {{{"type", "Fuse"}}})), "more steps than are supported");
  const Json split = {{"type", "Split"}, {"pattern", {{"Regex", "."}}}, {"behavior", "Isolated"}};
  const auto space = [](const char* text) { return Json{{"type", "Metaspace"}, {"replacement", text}}; };
  const auto prefixes = [&](std::size_t n) {
    return repeated("pretokenizers", n, {split, space("x"), split, space("y")});
  };
  EXPECT_EQ(refusal(with("pre_tokenizer", prefixes(4)).dump()), "");
  expect_refused(with("pre_tokenizer", prefixes(10)), "more steps than are supported");
}

// Where the syntax of Oniguruma and PCRE2 differs, or an empty match is possible.
TEST_F(TokenizerRefusal, OfRegularExpressions) {
  for (const std::string expression :
       {"[a[b]]",   "[a&&b]",  "[[:alpha:]]", "[]a]",          "[a",          "a{2}+",       "a{1,2}?",
        "a{,2}",    "{",       "(?i)a",       "(?<n>a)",       "(?#x)a",      "(*F)a",       "\\w",
        "\\bx",     "\\Kx",    "\\h",         "\\A",           "\\1",         "\\",          "[\\S]",
        "[\\P{L}]", "\\pL",    "\\p{^L}",     "\\p{Nonsense}", "(a",          "a)",          "*",
        "a*",       "",        "x|",          "(?=a)",         "\\C",         "\\x{110000}", "\\xE9",
        "\\x{41",   "\\p{Cn}", "\\p{C}",      "\\p{Runic}",    "(?i:\u00df)", "(?i:SS)",     "(?i:a|(b))"}) {
    Json json = tokenizer_definition("qwen2");
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression;
    expect_refused(json, "the regular expression " + expression);
  }
}

// A malicious expression ends with an error.
TEST_F(TokenizerRefusal, OfExpressionsThatTakeForever) {
  Json json = tokenizer_definition("qwen2");
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:(?:a|b|[a-c])+)+[0-9]";
  ASSERT_EQ(refusal(json.dump()), "");
  const Tokenizer tokenizer = read_tokenizer(dir);
  EXPECT_THROW(tokenizer.encode(std::string(60, 'a')), Error);
  // The steps of many slow matches are limited together.
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:a|a)+b|a";
  ASSERT_EQ(refusal(json.dump()), "");
  const Tokenizer slow = read_tokenizer(dir);
  std::string text;
  for (int i = 0; i < 200; ++i) text += std::string(18, 'a') + "c";
  EXPECT_THROW(slow.encode(text), Error);
  EXPECT_EQ(slow.decode(slow.encode(text.substr(0, 19))), text.substr(0, 19));
  // Each match is quick, but looks at the rest of the text; or its state fills memory.
  const auto expect_limit = [&](const char* expression, std::size_t size, const std::string& part) {
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression;
    ASSERT_EQ(refusal(json.dump()), "");
    const Tokenizer tokenizer = read_tokenizer(dir);
    EXPECT_ERROR(tokenizer.encode(std::string(size, 'a') + "dc"), part);
  };
  expect_limit("a(?=[^b]*e)|.", 200'000, "it takes too long; split the text");
  // Each of many places takes long, most of them without a match.
  for (const char* expression : {"a(?=.*b)", "a(?!.*b)", "(a{1,30}a{1,30}a{1,30}a{1,30}c)"})
    expect_limit(expression, 200'000, "it takes too long; split the text");
  expect_limit("(a|b)+", 4'000'000, "stack limit");
  // Published expressions look far ahead, too.
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = R"(\d{1,3}(?=(?:\d{3})*(?:\D|$))|\D+)";
  ASSERT_EQ(refusal(json.dump()), "");
  const std::string digits(10'000, '7');
  EXPECT_EQ(read_tokenizer(dir).decode(read_tokenizer(dir).encode(digits)), digits);
}

// A search goes on in blocks; one may end before, at or after a match, or inside a character.
TEST(Patterns, FindAMatchAtEveryDistance) {
  const Pattern pattern = Pattern::expression("p", "(?<=a|é)bb");
  for (const std::string filler : {"a", "é"}) {
    std::string text;
    for (std::size_t gap = 1; gap < 3000; gap += gap < 120 || gap > 1000 ? 61 : 1) {
      text += filler;
      while (text.size() < gap) text += filler;
      std::vector<std::pair<std::size_t, std::size_t>> matches;
      pattern.for_each(text + "bb" + filler, [&](std::size_t begin, std::size_t end, Span span) {
        if (span == Span::match) matches.emplace_back(begin, end);
      });
      EXPECT_EQ(matches, (std::vector{std::pair{text.size(), text.size() + 2}})) << gap;
    }
  }
}

// A long run costs at each place no more than a longest token.
TEST_F(TokenizerRefusal, OfAddedTokensThatTakeForever) {
  Json json = tokenizer_definition("gpt2");
  Json& added = json["added_tokens"];
  Json token = added[0];
  token["normalized"] = false;
  std::size_t id = json["model"]["vocab"].size();
  for (const Json& known : added) id = std::max(id, known["id"].get<std::size_t>() + 1);
  const auto add = [&](const std::string& content) {
    token["id"] = id++, token["content"] = content;
    added.push_back(token);
  };
  for (int i = 0; i < 3000; ++i) add(std::string(508, 'x') + std::to_string(1000 + i));
  token["rstrip"] = true;
  add("\t");
  ASSERT_EQ(refusal(json.dump()), "");
  const Tokenizer tokenizer = read_tokenizer(dir);
  const std::string text(200'000, 'x');
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_EQ(tokenizer.encode("x" + text.substr(0, 508) + "2345").back(), tokenizer.find(text.substr(0, 508) + "2345"));
  EXPECT_EQ(tokenizer.encode(std::string(100'000, '\t')).size(), 100'000u);
  add(std::string(513, 'x'));
  expect_refused(json, "has 513 bytes; at most 512 are supported");
}

TEST_F(TokenizerRefusal, OfModels) {
  const auto with = [](const char* field, const Json& value) {
    Json json = tokenizer_definition("gpt2");
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
  expect_refused(with("vocab", {{"a", "0"}}), "is not an integer");
  expect_refused(with("vocab", {{"a", 0.5}}), "is not an integer");
  expect_refused(with("vocab", {{"a", -1}}), "needs ids from 0 to");
  expect_refused(with("vocab", {{"a", 1 << 30}}), "needs ids from 0 to");
  expect_refused(with("vocab", {{"a", 0}, {"b", 65569}}), "a vocabulary of 2 tokens needs ids from 0 to 65568");
  expect_refused(with("vocab", {{"a", 18446744073709551615u}}), "needs ids from 0 to");
  expect_refused(with("vocab", {{"a", 3}, {"b", 3}}), "have the same id 3");
  expect_refused(with("merges", "a b"), "expected a list");
  expect_refused(with("merges", nullptr), "expected a list");
  expect_refused(with("merges", {"a"}), "is not two strings");
  expect_refused(with("merges", {"a b c"}), "is not two strings");
  expect_refused(with("merges", Json::array({Json::array({"a", "b", "c"})})), "is not a pair");
  expect_refused(with("merges", Json::array({Json::array({"a", 5})})), "is not a pair");
  expect_refused(with("merges", {5}), "is not a pair");
  expect_refused(with("merges", Json::array({Json::array({"nonsense ", "b"})})), "needs the token \"nonsense \"");
  expect_refused(with("merges", Json::array({Json::array({"q", "\u0120"})})), "needs the token \"q\u0120\"");
  EXPECT_EQ(refusal(with("dropout", 0).dump()), "");
  EXPECT_EQ(refusal(with("continuing_subword_prefix", "").dump()), "");
  Json json = tokenizer_definition("unknown");
  json["model"]["unk_token"] = "<nothing>";
  expect_refused(json, "the text needs the unknown token \"<nothing>\"");
}

TEST_F(TokenizerRefusal, OfAddedTokens) {
  const Json whole = tokenizer_definition("llama3");
  const std::size_t size = whole["model"]["vocab"].size();
  const auto added = [&](const char* field, const Json& value) {
    Json json = whole;
    json["added_tokens"][0][field] = value;
    return json;
  };
  expect_refused(added("id", size + 1), "the vocabulary implies " + std::to_string(size));
  expect_refused(added("id", -1), "the vocabulary implies");
  expect_refused(added("id", 18446744073709551615u), "of the wrong type");
  expect_refused(added("content", 7), "of the wrong type");
  expect_refused(added("content", "<|im_end|>"), "is listed twice");
  expect_refused(added("special", nullptr), "\"special\" is missing");
  expect_refused(added("lstrip", 1), "of the wrong type");
  expect_refused(added("new_flag", 1), "\"new_flag\"");
  Json json = whole;
  json["added_tokens"] = 7;
  expect_refused(json, "is not a list");
  json["added_tokens"] = {7};
  expect_refused(json, "expected a JSON object");
  json = tokenizer_definition("qwen2");
  json["added_tokens"][0]["content"] = "caf\u00e9", json["added_tokens"][0]["normalized"] = true;
  expect_refused(json, "the same normalized text");
  json = tokenizer_definition("unknown");
  json["added_tokens"].back()["normalized"] = true;  // white space, which Strip removes
  expect_refused(json, "its normalized text is empty");
}

TEST_F(TokenizerRefusal, OfTemplates) {
  const auto post = [&](const char* field, const Json& value) {
    Json changed = tokenizer_definition("llama3");
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
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", {99999}}}}}), "99999 is not the id of a token");
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", {-1}}}}}), "-1 is not the id of a token");
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", 5}}}}), "is not a list");
  expect_refused(post("special_tokens", {{"<|im_start|>", {{"ids", Json(65, 5)}}}}), "more than the 64 tokens");
  Json many = tokenizer_definition("llama3")["post_processor"]["processors"][1]["single"];
  many.insert(many.end(), 1000, special);
  expect_refused(post("single", many), "more than the 64 tokens");
}

TEST_F(TokenizerRefusal, IsBrief) {
  const std::string endless(100'000, 'x');
  Json vocabulary = tokenizer_definition("gpt2"), merge = vocabulary, pattern = tokenizer_definition("qwen2");
  vocabulary["model"]["vocab"][endless] = -1;
  merge["model"]["merges"] = {endless};
  pattern["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = endless + "(";
  Json type = vocabulary;
  type["normalizer"] = {{"type", endless}};
  for (const Json& json : {vocabulary, merge, pattern, type}) {
    const std::string message = refusal(json.dump());
    EXPECT_PRED2(contains, message, "xxx");
    EXPECT_LT(message.size(), 1000u);
  }
}

TEST_F(TokenizerRefusal, OfDamagedFiles) {
  const std::string whole = tokenizer_definition("llama2").dump();
  ASSERT_EQ(refusal(whole), "");
  for (std::size_t size = 0; size < whole.size(); size += 1 + whole.size() / 50) {
    EXPECT_PRED2(contains, refusal(whole.substr(0, size)), "not valid JSON") << size;
  }
  EXPECT_PRED2(contains, refusal("[]"), "expected a JSON object");
  EXPECT_PRED2(contains, refusal("{}"), "\"model\" is missing");
  EXPECT_PRED2(contains, refusal(std::string(100000, '[')), "more deeply");
  std::string deep;
  for (int i = 0; i < 20000; ++i) deep += R"({"type":"Sequence","normalizers":[)";
  deep += "null";
  for (int i = 0; i < 20000; ++i) deep += "]}";
  EXPECT_PRED2(contains, refusal("{\"normalizer\":" + deep + "}"), "more deeply");
  std::filesystem::remove(dir / "tokenizer.json");
  EXPECT_ERROR(read_tokenizer(dir), "no such file");
}

}  // namespace
}  // namespace streambp
