// Fuzz tests of tokenizers: tokenizer.json, texts, token ids and regular expressions.
#include "data/files/hash.h"
#include "data/files/tokenizer_file.h"
#include "tests/fuzz_fixture.h"
#include "tests/golden.h"

namespace streambp {
namespace {

// Encodes and decodes in every way, and checks what the tokenizer promises.
void use(const Tokenizer& tokenizer, const std::string& text) {
  for (const bool plain : {false, true}) {
    const auto tokens = plain ? tokenizer.encode_plain(text, TextStart::continuation) : tokenizer.encode(text);
    for (const std::int32_t token : tokens) ensure(token >= 0 && token < tokenizer.size(), "tokens have an id");
    for (const Skip skip : {Skip::none, Skip::special}) {
      const std::string whole = tokenizer.decode(tokens, skip);
      ensure(is_utf8(whole), "tokens are text");
      StreamingDecoder decoder(tokenizer, skip);
      std::string streamed;
      for (const std::int32_t token : tokens) streamed += decoder.add(token);
      ensure(streamed + decoder.finish() == whole, "a stream of tokens is the text of all of them");
    }
  }
}

// Texts from the golden data of tokenizers.
std::vector<std::string> golden_texts() {
  std::vector<std::string> texts;
  const Json golden = Json::parse(read_file(golden_folder() / "tokenizers/texts.json"));
  for (const Json& hex : golden.at("texts")) {
    const auto digits = hex.get<std::string>();
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(digits.size(), 600); i += 2) {
      text += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
    }
    texts.push_back(text);
  }
  return texts;
}

std::vector<fs::path> golden_tokenizers() {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(golden_folder() / "tokenizers")) {
    if (entry.path().string().ends_with(".tokenizer.json")) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Keeps few merges, the tokens that they need, and the added tokens. The file is so small that damage is likely to have
// an effect.
Json shortened(Json tokenizer) {
  Json& model = tokenizer["model"];
  const Json all = model["vocab"], merges = model["merges"];
  Json few = Json::array(), vocabulary = Json::object();
  const auto keep = [&](const std::string& text) {
    if (!all.contains(text) || vocabulary.contains(text)) return;
    const std::size_t id = vocabulary.size();
    vocabulary[text] = id;
  };
  for (const char* byte : {"<0x00>", "<0x41>", "<0xC3>", "<0xA9>", "<0xFF>"}) keep(byte);
  for (std::size_t i = 0; i < std::min<std::size_t>(merges.size(), 20); ++i) {
    const Json& merge = merges[i];
    const auto text = merge.is_string() ? merge.get<std::string>() : "";
    const std::string left = merge.is_string() ? text.substr(0, text.find(' ')) : merge[0].get<std::string>();
    const std::string right = merge.is_string() ? text.substr(text.find(' ') + 1) : merge[1].get<std::string>();
    keep(left), keep(right), keep(left + right);
    few.push_back(merge);
  }
  for (const Json& token : tokenizer["added_tokens"]) keep(token["content"]);
  std::size_t next = vocabulary.size();
  for (Json& token : tokenizer["added_tokens"]) {
    token["id"] = vocabulary.contains(token["content"]) ? vocabulary[std::string(token["content"])] : Json(next++);
  }
  model["vocab"] = vocabulary, model["merges"] = few;
  const std::function<void(Json&)> renumber = [&](Json& json) {  // the ids in templates
    if (json.is_object() && json.contains("ids")) json["ids"] = {0};
    if (!json.is_structured()) return;
    for (Json& part : json) renumber(part);
  };
  renumber(tokenizer["post_processor"]);
  return tokenizer;
}

TEST_F(Fuzz, Tokenizer) {
  std::vector<Files> seeds;
  const auto texts = golden_texts();
  for (const fs::path& path : golden_tokenizers()) {
    seeds.push_back({{"tokenizer.json", shortened(Json::parse(read_file(path))).dump()},
                     {"text", texts[seeds.size() * 7 % texts.size()]}});
  }
  fuzz(seeds, [&](const Files& files) {
    const Tokenizer tokenizer = read_tokenizer((*folder)(files) / "tokenizer.json");
    if (files.contains("text")) use(tokenizer, files.at("text"));
    for (const std::int32_t token : tokenizer.prefix()) ensure(token < tokenizer.size(), "tokens before a text exist");
  });
}

TEST_F(Fuzz, TextsAndTokens) {
  std::vector<Tokenizer> tokenizers;
  for (const fs::path& path : golden_tokenizers()) tokenizers.push_back(read_tokenizer(path));
  std::vector<Files> seeds;
  for (const std::string& text : golden_texts()) {
    const Tokenizer& tokenizer = tokenizers[seeds.size() % tokenizers.size()];
    std::string ids;
    for (const std::int32_t token : tokenizer.encode(text)) {
      (ids += static_cast<char>(token & 255)) += static_cast<char>(token >> 8);
    }
    seeds.push_back({{"text", text}, {"ids", ids}});
  }
  fuzz(seeds, [&](const Files& files) {
    require(files.size() == 2, "a file is missing");
    const std::string &text = files.at("text"), &bytes = files.at("ids");
    const Tokenizer& tokenizer = tokenizers[text_hash(text) % tokenizers.size()];
    use(tokenizer, text);
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      ids.push_back(static_cast<unsigned char>(bytes[i]) | bytes[i + 1] * 256);
    }
    ensure(is_utf8(tokenizer.decode(ids)), "tokens are text");
    std::string repaired;
    append_repaired(repaired, text);
    for (const NormalForm form : {NormalForm::nfc, NormalForm::nfd, NormalForm::nfkc, NormalForm::nfkd}) {
      const std::string normal = normalized(form, repaired);
      ensure(normalized(form, normal) == normal, "a normal form is stable");
      ensure(!surely_normal(form, repaired) || normal == repaired, "a normal text stays");
      ensure(static_cast<double>(normal.size()) <= longest_expansion(form) * static_cast<double>(repaired.size()),
             "growth is bounded");
    }
    ensure(is_utf8(lowercase(repaired)) && is_utf8(without_marks(repaired)), "results are text");
  });
}

TEST_F(Fuzz, Expressions) {
  std::vector<Files> seeds;
  const auto texts = golden_texts();
  const auto add = [&](const std::string& expression) {
    seeds.push_back({{"expression", expression}, {"text", texts[seeds.size() * 11 % texts.size()]}});
  };
  const std::function<void(const Json&)> search = [&](const Json& json) {
    if (json.is_object() && json.contains("Regex")) add(json["Regex"]);
    if (!json.is_structured()) return;
    for (const Json& part : json) search(part);
  };
  for (const fs::path& path : golden_tokenizers()) search(Json::parse(read_file(path)));
  for (const char* other :
       {"(?:a|aa)+b|a", "[^\\s\\d]{2,}(?=x)|(?<!a)\\S+", "(?>a*)b|(?i:x)+?", "\\x{9}|\\p{Han}|\\P{L}"}) {
    add(other);
  }
  fuzz(seeds, [&](const Files& files) {
    require(files.size() == 2, "a file is missing");
    std::string text;
    append_repaired(text, files.at("text"));
    const Pattern pattern = Pattern::expression("expression", files.at("expression"));
    std::size_t done = 0;
    pattern.for_each(text, [&](std::size_t begin, std::size_t end, Span) {
      ensure(begin == done && end > begin && is_utf8(std::string_view(text).substr(begin, end - begin)),
             "parts are text and are contiguous");
      done = end;
    });
    ensure(done == text.size(), "parts are all of the text");
  });
}

}  // namespace
}  // namespace streambp
