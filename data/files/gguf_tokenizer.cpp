// A tokenizer.json from the metadata of a GGUF file: its vocabulary and merges, and the steps that llama.cpp takes for the name
// "tokenizer.ggml.pre" before it merges.
#include <numeric>

#include "data/files/gguf_model.h"
#include "text/fields.h"

namespace streambp {

namespace {

// clang-format off
constexpr const char *kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
    *kDigit = R"(\p{N})", *kDigits = R"(\p{N}{1,3})",
    *kLlama3 = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    *kQwen2 = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    *kQwen35 = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    *kSeed = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+)",
    *kTekken = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    *kGpt4o = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    *kHan = R"([一-龥぀-ゟ゠-ヿ]+)",
    *kDeepseek = R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Words {
  std::vector<const char*> names;  // of tokenizer.ggml.pre
  std::vector<const char*> patterns;
  bool ignore_merges = false, adds_bos = false;
};
const std::vector<Words>& words() {
  static const std::vector<Words> all = {
      {{"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2"}, {kLlama3}, true, true},
      {{"dbrx", "smaug-bpe", "chatglm-bpe"}, {kLlama3}},
      {{"glm4"}, {kLlama3}, true},
      {{"qwen2", "deepseek-r1-qwen", "hunyuan", "stablelm2"}, {kQwen2}},
      {{"qwen35"}, {kQwen35}},
      {{"gpt-2", "phi-2", "mpt", "olmo", "exaone4", "granite-docling", "default-gpt2"}, {kGpt2}},
      {{"starcoder", "refact", "codeshell", "exaone", "command-r", "smollm"}, {kDigit, kGpt2}},
      {{"tekken"}, {kTekken}, true, true},
      {{"gpt-4o", "llama4"}, {kGpt4o}},
      {{"seed-coder"}, {kSeed}},
      {{"deepseek-v3", "hunyuan-dense"}, {kDigits, kHan, kDeepseek}}};
  return all;
}
// clang-format on

enum Type { normal = 1, unknown, control, user_defined, unused, byte };

class TokenizerOf {
 public:
  TokenizerOf(const Json& metadata, const std::string& file)
      : f_(metadata, file), model_(f_.get<std::string>("tokenizer.ggml.model")), file_(file) {
    for (const Json& token : strings("tokenizer.ggml.tokens")) {
      const auto text = token.get<std::string>();
      tokens_.push_back(text.empty() ? "[EMPTY_" + std::to_string(tokens_.size()) + "]" : text);
    }
    types_.assign(tokens_.size(), normal);
    if (f_.has("tokenizer.ggml.token_type")) {
      const std::vector<double> types = f_.numbers("tokenizer.ggml.token_type");
      require(types.size() >= tokens_.size(), file, ": has ", types.size(), " types for ", tokens_.size(), " tokens");
      for (std::size_t i = 0; i < tokens_.size(); ++i)
        types_[i] = types[i] > 0 && types[i] < 99 ? static_cast<int>(types[i]) : unused;
    }
  }

  std::map<std::string, std::string> texts() {
    tokenizer_ = {{"version", "1.0"},         {"truncation", nullptr},
                  {"padding", nullptr},       {"added_tokens", Json::array()},
                  {"normalizer", nullptr},    {"pre_tokenizer", nullptr},
                  {"post_processor", nullptr}};
    model_json_ = {{"type", "BPE"},
                   {"dropout", nullptr},
                   {"unk_token", nullptr},
                   {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr},
                   {"fuse_unk", false},
                   {"byte_fallback", false},
                   {"ignore_merges", false}};
    read_model();
    add_tokens();
    const auto bos = token_of("tokenizer.ggml.bos_token_id"), eos = token_of("tokenizer.ggml.eos_token_id");
    if (bos >= 0 && f_.get<bool>("tokenizer.ggml.add_bos_token", adds_bos_)) begin_with(bos);
    tokenizer_["model"] = std::move(model_json_);
    Json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
    if (bos >= 0) config["bos_token"] = text(bos);
    if (eos >= 0) config["eos_token"] = text(eos);
    if (const auto pad = token_of("tokenizer.ggml.padding_token_id"); pad >= 0) config["pad_token"] = text(pad);
    if (f_.has("tokenizer.chat_template")) config["chat_template"] = f_.get<std::string>("tokenizer.chat_template");
    Json ends = Json::array();
    for (const char* name : {"eos", "eot", "eom"})
      if (const auto id = token_of("tokenizer.ggml." + std::string(name) + "_token_id"); id >= 0) ends.push_back(id);
    std::map<std::string, std::string> all = {{"tokenizer.json", tokenizer_.dump() + "\n"},
                                              {"tokenizer_config.json", config.dump(2) + "\n"}};
    if (!ends.empty()) all["generation_config.json"] = Json{{"eos_token_id", ends}}.dump(2) + "\n";
    return all;
  }

 private:
  const Json& strings(const char* name) const {
    const Json& list = f_.list(name);
    for (const Json& s : list)
      if (!s.is_string()) fail(file_, ": ", quote(name), " is not a list of texts");
    return list;
  }
  Index token_of(const std::string& key) const {
    const auto id = f_.get<Index>(key.c_str(), -1);
    if (id < 0 || id >= std::ssize(tokens_)) return -1;
    return id;
  }
  const std::string& text(Index id) const { return tokens_[static_cast<std::size_t>(id)]; }

  void read_model() {
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      require(ids_.emplace(tokens_[i], i).second, file_, ": has the token ", quote(tokens_[i]), " twice");
    const bool bpe = model_ == "gpt2", spm = model_ == "llama", raw = model_ == "gemma4";
    require(bpe || spm || raw, file_, ": a tokenizer of type ", quote(model_),
            " is not supported; gpt2, llama and gemma4 are");
    bpe ? read_byte_level() : read_characters(spm);
    model_json_["vocab"] = std::move(ids_);
  }

  void read_byte_level() {
    require(f_.has("tokenizer.ggml.pre"), file_, ": has no \"tokenizer.ggml.pre\", so it does not say how texts are ",
            "split into words; convert the model with a newer llama.cpp");
    const auto name = f_.get<std::string>("tokenizer.ggml.pre");
    const auto has = [&](const Words& w) { return std::ranges::find(w.names, name) != w.names.end(); };
    const auto found = std::ranges::find_if(words(), has);
    if (found == words().end()) {
      std::set<std::string> known;
      for (const Words& w : words()) known.insert(w.names.begin(), w.names.end());
      fail(file_, ": \"tokenizer.ggml.pre\" ", quote(name), " is not supported; ", join(known), " are");
    }
    Json steps = Json::array();
    for (const char* pattern : found->patterns)
      steps.push_back(
          {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
    const Json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
    steps.push_back(byte_level);
    tokenizer_["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
    tokenizer_["decoder"] = byte_level;
    model_json_["ignore_merges"] = found->ignore_merges, adds_bos_ = found->adds_bos;
    model_json_["merges"] = strings("tokenizer.ggml.merges");
  }

  // Spaces are "▁"; what the vocabulary lacks becomes the tokens of its bytes.
  void read_characters(bool from_scores) {
    const Json space = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}};
    const bool prefix = f_.get<bool>("tokenizer.ggml.add_space_prefix", from_scores);
    Json steps = Json::array();
    if (prefix) steps.push_back({{"type", "Prepend"}, {"prepend", "▁"}});
    steps.push_back(space);
    tokenizer_["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
    Json decoders = Json::array({{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                                 {{"type", "ByteFallback"}},
                                 {{"type", "Fuse"}}});
    if (prefix) decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    tokenizer_["decoder"] = {{"type", "Sequence"}, {"decoders", decoders}};
    model_json_["byte_fallback"] = model_json_["fuse_unk"] = true;
    if (const Index id = token_of("tokenizer.ggml.unknown_token_id"); id >= 0) model_json_["unk_token"] = text(id);
    adds_bos_ = true;
    if (from_scores) {
      model_json_["merges"] = merges_by_score();
      return;
    }
    tokenizer_["pre_tokenizer"] = {
        {"type", "Split"}, {"pattern", {{"Regex", R"([^\n]+|[\n]+)"}}}, {"behavior", "Isolated"}, {"invert", false}};
    model_json_["merges"] = strings("tokenizer.ggml.merges");
  }

  // Two tokens merge to a third one, that with the highest score first.
  Json merges_by_score() {
    require(f_.has("tokenizer.ggml.scores"), file_, ": has no tokenizer.ggml.scores, which say what merges first");
    const std::vector<double> scores = f_.numbers("tokenizer.ggml.scores");
    require(scores.size() >= tokens_.size() && std::ranges::all_of(scores, [](double x) { return std::isfinite(x); }),
            file_, ": has ", scores.size(), " scores for ", tokens_.size(), " tokens, or some are not finite");
    std::vector<std::size_t> order(tokens_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
    constexpr std::size_t longest = 512;
    Json merges = Json::array();
    for (const std::size_t token : order) {
      const std::string& whole = tokens_[token];
      if (types_[token] == byte || types_[token] == control || whole.size() > longest) continue;
      for (std::size_t at = 1; at < whole.size(); ++at) {
        if ((static_cast<unsigned char>(whole[at]) & 0xc0) == 0x80) continue;  // inside a character
        const std::string left = whole.substr(0, at), right = whole.substr(at);
        if (ids_.contains(left) && ids_.contains(right)) merges.push_back({left, right});
      }
    }
    return merges;
  }

  void add_tokens() {
    auto model = f_.get<std::string>("general.name", "");
    std::ranges::transform(model, model.begin(), [](unsigned char c) { return std::tolower(c); });
    const bool phi3 = model.find("phi-3") != model.npos || model.find("phi3") != model.npos;
    const std::set<std::string> keep_spaces = {"<unk>", "<s>", "<|endoftext|>"};
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      const int type = types_[i];
      if (type != unknown && type != control && type != user_defined) continue;
      tokenizer_["added_tokens"].push_back({{"id", i},
                                            {"content", tokens_[i]},
                                            {"single_word", false},
                                            {"lstrip", false},
                                            {"rstrip", phi3 && !keep_spaces.contains(tokens_[i])},
                                            {"normalized", false},
                                            {"special", type != user_defined}});
    }
  }

  void begin_with(Index bos) {
    const Json sequence = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
               special = {{"SpecialToken", {{"id", text(bos)}, {"type_id", 0}}}};
    const Json second = {{"Sequence", {{"id", "B"}, {"type_id", 1}}}};
    tokenizer_["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", {special, sequence}},
        {"pair", {special, sequence, special, second}},
        {"special_tokens", {{text(bos), {{"id", text(bos)}, {"ids", {bos}}, {"tokens", {text(bos)}}}}}}};
  }

  const Fields f_;
  const std::string model_, file_;
  std::vector<std::string> tokens_;
  std::vector<int> types_;
  std::map<std::string, std::size_t> ids_;
  bool adds_bos_ = false;
  Json tokenizer_, model_json_;
};

}  // namespace

std::map<std::string, std::string> gguf_tokenizer(const Json& metadata, const std::string& file) {
  if (!metadata.contains("tokenizer.ggml.tokens")) return {};
  return TokenizerOf(metadata, file).texts();
}

}  // namespace streambp
