// Text to tokens and back by a Hugging Face tokenizer.json, with the results of the `tokenizers` library:
//
//   1. split off added tokens (added_tokens.h)
//   2. normalize the text between them (normalizer.h)
//   3. split off the added tokens that are matched in normalized text
//   4. split the rest into words (pretokenizer.h)
//   5. merge each word into tokens (bpe.h)
//
// Unsupported components and fields are errors that name them; they are never ignored.
#pragma once

#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "kernels/base/unfinished.h"
#include "text/fields.h"
#include "text/tokenizer/added_tokens.h"
#include "text/tokenizer/bpe.h"
#include "text/tokenizer/detokenizer.h"
#include "text/tokenizer/pretokenizer.h"

namespace streambp {

enum class Skip { none, special };  // tokens that decoding leaves out

class Tokenizer {
 public:
  // json: of a tokenizer.json; messages call it `name`.
  explicit Tokenizer(std::string_view json, const std::string& name = "tokenizer.json")
      : Tokenizer(Fields(parse_json(json, name), name)) {}

  // The largest id + 1.
  std::int64_t size() const { return std::ssize(texts_); }

  // The tokens of a text, without prefix() and suffix().
  std::vector<std::int32_t> encode(std::string_view text, TextStart start = TextStart::beginning) const {
    return encode(text, start, nullptr);
  }
  // The same, but what comes from the data cannot become special tokens, so a user's message cannot fake a chat turn.
  std::vector<std::int32_t> encode(std::string_view text, TextStart start, const Origin& origin) const {
    return encode(text, start, &origin);
  }
  std::vector<std::int32_t> encode_plain(std::string_view text, TextStart start = TextStart::beginning) const {
    return encode(text, start, Origin{{}, none_});
  }
  // Calls f(id, end) for each added token in the text, as in `encode`.
  template <class F>
  void for_each_added(std::string_view text, const Origin& origin, F&& f) const {
    template_tokens_.for_each(text, &origin, [&](const AddedToken* token, std::size_t begin, std::size_t) {
      if (token) f(token->id, begin, begin + token->text.size());
    });
  }

  // The post-processor's tokens before a text, such as BOS, and after it; can be empty.
  const std::vector<std::int32_t>& prefix() const { return prefix_; }
  const std::vector<std::int32_t>& suffix() const { return suffix_; }

  // The text of tokens. Skips ids without a token.
  std::string decode(std::span<const std::int32_t> tokens, Skip skip = Skip::none) const {
    std::vector<std::string> texts;
    for (const std::int32_t token : tokens) {
      if (visible(token, skip)) texts.push_back(texts_[token]);
    }
    return Detokenizer(detokenizer_).add(std::move(texts), TextEnd::closed);
  }

  // The id of the token with this text.
  std::optional<std::int32_t> find(std::string_view token) const {
    const auto found = added_ids_.find(std::string(token));
    return found == added_ids_.end() ? model_.find(std::string(token)) : found->second;
  }
  bool special(std::int32_t id) const { return has(id) && special_[id]; }
  // Tokens beside the vocabulary, with their ids.
  const std::unordered_map<std::string, std::int32_t>& added() const { return added_ids_; }

 private:
  friend class StreamingDecoder;

  explicit Tokenizer(const Fields& f)
      : normalizer_(f),
        pretokenizer_(f, normalizer_),
        model_(f.object("model"), pretokenizer_.byte_level() ? Bpe::Symbols::bytes : Bpe::Symbols::characters),
        detokenizer_(f) {
    // Truncation and padding are ignored, because packing decides on lengths.
    f.known({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
             "decoder", "model"});
    f.only("version", "1.0");
    texts_ = model_.texts();
    present_ = model_.present();
    special_.resize(texts_.size());
    read_added_tokens(f);
    for_each_component(f, "post_processor", "processors",
                       [&](const std::string& type, const Fields& processor) { read_processor(type, processor); });
  }

  bool has(std::int64_t id) const { return id >= 0 && id < size() && present_[id]; }
  bool visible(std::int32_t id, Skip skip) const {
    return has(id) && !(skip == Skip::special && special_texts_.count(texts_[id]) > 0);
  }

  void read_added_tokens(const Fields& f) {
    if (!f.has("added_tokens")) return;
    std::int64_t next = static_cast<std::int64_t>(model_.count());
    for (const Json& entry : f.list("added_tokens")) {
      const Fields token(entry, f.file + ", \"added_tokens\"");
      token.known({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      const auto content = token.get<std::string>("content");
      if (content.empty()) continue;  // as in the library
      const std::string where = token.file + ", " + quote(content);
      const std::int64_t id = token.get<std::int64_t>("id");
      // The library takes the id from the vocabulary and numbers the other added tokens itself.
      const auto known = model_.find(content);
      const std::int64_t expected = known ? *known : next++;
      require(id == expected, where, ": has the id ", id, "; the vocabulary implies ", expected);
      require(id <= Bpe::kLargestId, where, ": the id is larger than ", Bpe::kLargestId);
      require(added_ids_.emplace(content, static_cast<std::int32_t>(id)).second, where, ": is listed twice");
      add(token, where, content, static_cast<std::int32_t>(id));
    }
    for (AddedTokens* tokens : {&raw_tokens_, &normalized_tokens_, &template_tokens_}) {
      require(tokens->finish(), f.file, ", \"added_tokens\": two have the same normalized text");
    }
  }

  void add(const Fields& f, const std::string& where, const std::string& content, std::int32_t id) {
    if (id >= size()) texts_.resize(id + 1), present_.resize(id + 1), special_.resize(id + 1);
    present_[id] = true;
    special_[id] = f.get<bool>("special");
    if (special_[id]) special_texts_.insert(content);
    const bool normalized = f.get<bool>("normalized");
    std::string buffer;
    std::string& text = texts_[id];
    text = normalized ? normalizer_.apply(content, TextStart::beginning, buffer) : content;
    require(!text.empty(), where, ": its normalized text is empty");
    require(text.size() <= AddedTokens::kLongest, where, ": has ", text.size(), " bytes; at most ",
            AddedTokens::kLongest, " are supported");
    const AddedToken token = {
        id, text, f.get<bool>("special"), f.get<bool>("single_word"), f.get<bool>("lstrip"), f.get<bool>("rstrip")};
    (normalized ? normalized_tokens_ : raw_tokens_).add(token);
    if (!normalized || (token.special && text == content)) template_tokens_.add(token);
  }

  void read_processor(const std::string& type, const Fields& f) {
    if (type == "ByteLevel") {  // changes only offsets
      f.known({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    } else if (type == "TemplateProcessing") {
      f.known({"type", "single", "pair", "special_tokens"});
      read_template(f);
    } else {
      fail(f.file, ": a post_processor of type ", quote(type),
           " is not supported; ByteLevel, TemplateProcessing and Sequence are");
    }
  }

  // "single" is a list of {"SpecialToken": {"id": text, "type_id": 0}} around one {"Sequence": {"id": "A", "type_id": 0}}.
  void read_template(const Fields& f) {
    std::vector<std::int32_t> before, after;
    int texts = 0;
    for (const Json& entry : f.list("single")) {
      const Fields piece(entry, f.file + ", \"single\"");
      piece.known({"SpecialToken", "Sequence"});
      if (piece.has("Sequence")) {
        const Fields sequence = piece.object("Sequence");
        require(sequence.get<std::string>("id") == "A" && piece.json.size() == 1 && ++texts == 1, sequence.file,
                ": expected one sequence, \"A\"");
        continue;
      }
      const auto ids = template_ids(f, piece.object("SpecialToken").get<std::string>("id"));
      auto& place = texts == 0 ? before : after;
      place.insert(place.end(), ids.begin(), ids.end());
      require(before.size() + after.size() + prefix_.size() + suffix_.size() <= 64, f.file,
              ": adds more than the 64 tokens to a text that are supported");
    }
    require(texts == 1, f.file, ": \"single\" has no place for the text");
    prefix_.insert(prefix_.begin(), before.begin(), before.end());
    suffix_.insert(suffix_.end(), after.begin(), after.end());
  }

  std::vector<std::int32_t> template_ids(const Fields& f, const std::string& name) const {
    const Fields token = f.object("special_tokens").object(name.c_str());
    std::vector<std::int32_t> ids;
    for (const Json& id : token.list("ids")) {
      require(id.is_number_integer() && has(id.get<std::int64_t>()), token.file, ": ", shown(id),
              " is not the id of a token");
      ids.push_back(id.get<std::int32_t>());
    }
    return ids;
  }

  std::vector<std::int32_t> encode(std::string_view bytes, TextStart start, const Origin* origin) const {
    std::string repaired;
    if (!is_utf8(bytes)) append_repaired(repaired, bytes), bytes = repaired;
    std::vector<std::int32_t> tokens;
    Bpe::Scratch scratch;
    std::string buffer;
    const Origin data = {{}, origin ? origin->plain : none_};  // normalizing loses the origin
    const AddedTokens& first_tokens = origin ? template_tokens_ : raw_tokens_;
    first_tokens.for_each(bytes, origin, [&](const AddedToken* raw, std::size_t begin, std::size_t end) {
      if (raw) return tokens.push_back(raw->id);
      const bool first = begin == 0;
      const std::string_view text =
          normalizer_.apply(bytes.substr(begin, end - begin), first ? start : TextStart::beginning, buffer);
      normalized_tokens_.for_each(
          text, origin ? &data : nullptr, [&](const AddedToken* token, std::size_t from, std::size_t to) {
            if (token) return tokens.push_back(token->id);
            pretokenizer_.for_each_word(text.substr(from, to - from), {first && from == 0, start},
                                        [&](std::string_view word) {
                                          Unfinished::check();
                                          model_.encode(word, scratch, tokens);
                                        });
          });
    });
    return tokens;
  }

  Normalizer normalizer_;
  PreTokenizer pretokenizer_;
  Bpe model_;
  Detokenizer detokenizer_;
  AddedTokens raw_tokens_, normalized_tokens_;  // matched in the text and in the normalized text
  AddedTokens template_tokens_;                 // in text with a known origin: these too, if special and unchanged
  std::set<std::int32_t> none_;
  std::unordered_map<std::string, std::int32_t> added_ids_;
  std::unordered_set<std::string> special_texts_;
  std::vector<std::string> texts_;  // by id, for decoding
  std::vector<bool> present_, special_;
  std::vector<std::int32_t> prefix_, suffix_;
};

// Decodes token by token. The results of all `add` and of `finish` together equal that of `decode`. Each is whole
// characters that no later token changes.
class StreamingDecoder {
 public:
  explicit StreamingDecoder(const Tokenizer& tokenizer, Skip skip = Skip::none)
      : tokenizer_(tokenizer), skip_(skip), detokenizer_(tokenizer.detokenizer_) {}

  std::string add(std::int32_t token) {
    if (!tokenizer_.visible(token, skip_)) return "";
    return detokenizer_.add({tokenizer_.texts_[token]}, TextEnd::open);
  }
  std::string finish() { return detokenizer_.add({}, TextEnd::closed); }

 private:
  const Tokenizer& tokenizer_;
  const Skip skip_;
  Detokenizer detokenizer_;
};

}  // namespace streambp
