// From examples to tokens, and which of them are learned.
//
// Special tokens are tokens where a chat layout writes them, and in text that is rendered already; in a message they
// are mere text. What stands between two special tokens is tokenised in one go, layout and messages together, as it
// will be when the model is used; but never across the place where an answer begins, for there a prompt ends.
#pragma once

#include <map>
#include <optional>

#include "data/documents/chat.cuh"
#include "data/documents/jsonl.cuh"
#include "data/documents/token_file.cuh"
#include "data/files/generation_config.cuh"
#include "data/tokenizer/tokenizer.cuh"
#include "training/grpo/advantages.cuh"

namespace streambp {

using Tokens = std::vector<std::int32_t>;

// A prompt's tokens begin as the tokenizer begins a text, unless that is written already: what is to come before them.
inline Tokens missing_prefix(const Tokenizer& tokenizer, const Tokens& tokens) {
  const Tokens& prefix = tokenizer.prefix();
  const bool begun = tokens.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
  return begun ? Tokens() : prefix;
}

// The token that ends a sequence: eos_token of tokenizer_config.json, or else the first eos_token_id.
inline std::int32_t read_end_token(const std::filesystem::path& model, const Tokenizer& tokenizer) {
  const std::string text = read_text_tokens(model).eos;
  if (!text.empty()) {
    const auto id = tokenizer.find(text);
    if (!id) fail((model / "tokenizer_config.json").string(), ": the tokenizer has no eos_token ", quote(text));
    return *id;
  }
  const EosTokens eos = read_eos_tokens(model);
  require(!eos.ids.empty(), model.string(), ": no token ends a sequence; name \"eos_token\" in tokenizer_config.json");
  require(eos.ids[0] < tokenizer.size(), eos.file, ": \"eos_token_id\" is ", eos.ids[0],
          ", but the tokenizer has only ", tokenizer.size(), " tokens");
  return eos.ids[0];
}

class Encoder {
 public:
  // Without a chat layout `chat` is empty, and `no_chat` says why.
  Encoder(const Tokenizer& tokenizer, const std::filesystem::path& model, std::optional<Chat> chat, std::string no_chat,
          bool learn_all)
      : tokenizer_(tokenizer),
        end_(tokenizer.suffix()),
        chat_(std::move(chat)),
        no_chat_(std::move(no_chat)),
        learn_all_(learn_all) {
    if (end_.empty()) end_ = {read_end_token(model, tokenizer)};
    if (!chat_) return;
    for (const std::string& text : chat_->tokens()) {
      const auto id = tokenizer.find(text);
      if (!id || tokenizer.encode(text, true) != Tokens{*id}) continue;  // mere text to this tokenizer
      special_[text] = *id;
      const Tokens after = tokenizer.encode(text + "a", true);
      fresh_after_special_ = Tokens(after.begin() + 1, after.end()) != tokenizer.encode_plain("a", true);
    }
  }

  // One document, or several where the layout writes what is past otherwise than when it was new; of a preference two,
  // the chosen one first; of a group each completion.
  std::vector<Document> encode(const Example& example) const {
    if (example.kind == Example::preference) return encode_preference(example);
    if (example.kind == Example::group) return encode_group(example);
    std::vector<Document> documents;
    if (example.kind == Example::conversation) {
      require(chat_.has_value(), no_chat_);
      if (learn_all_) {
        documents.push_back(encode_pieces(chat_->render(example.messages)));
      } else {
        for (const auto& lesson : chat_->lessons(example.messages, example.first))
          documents.push_back(encode_pieces(lesson));
      }
      require_data(!documents.empty(), "no answer of the assistant to learn from");
    } else {
      documents.push_back(text(example.prompt, example.written, example.kind == Example::text));
    }
    for (Document& document : documents) {
      if (learn_all_) std::fill(document.learn.begin(), document.learn.end(), 1);
      if (!document.learn.empty()) document.learn[0] = 0;
      require_data(document.learned() > 0, "nothing to learn from");
    }
    return documents;
  }

  // A rendered conversation, or the beginning of one.
  Document encode_pieces(const std::vector<Piece>& pieces) const {
    Document document;
    std::string text;
    bool learn = false, fresh = true;
    const auto flush = [&] {
      if (!text.empty()) document.add(tokenizer_.encode_plain(text, !fresh), learn), fresh = false;
      text.clear();
    };
    for (const Piece& piece : pieces) {
      const auto special = piece.markup ? special_.find(piece.text) : special_.end();
      if (piece.learn != learn) flush(), learn = piece.learn;
      if (special == special_.end()) {
        text += piece.text;
      } else {
        flush();
        document.add({&special->second, 1}, learn);
        fresh = fresh_after_special_;
      }
    }
    flush();
    return document;
  }

 private:
  static constexpr const char* kNoPrompt =
      "the prompt is empty, and so nothing comes before the first token, to predict it from";

  // The one document of an answer that is compared with others.
  Document encode_side(const Example& side) const {
    require(!learn_all_, "--learn all is not for preferences and groups: what is compared are answers; leave it out");
    require_data(side.kind == Example::conversation || !side.prompt.empty() || !tokenizer_.prefix().empty(), kNoPrompt);
    if (!side.tokens.empty()) return encode_sampled(side);
    std::vector<Document> documents = encode(side);
    require_data(documents.size() == 1, "after the prompt come ", documents.size(),
                 " answers, and the chat layout writes what is past otherwise than when it was new; give one answer");
    return std::move(documents[0]);
  }

  // Tokens that a model sampled, which are learned as they are.
  Document encode_sampled(const Example& side) const {
    const bool conversation = side.kind == Example::conversation;
    require(!conversation || chat_.has_value(), no_chat_);
    Document document = conversation ? encode_pieces(chat_->prompt(side.messages)) : begin(side.prompt, side.tokens);
    document.add(side.tokens, true);
    document.learn[0] = 0;
    require_data(document.learned() > 0, "nothing to learn from");
    return document;
  }

  std::vector<Document> encode_group(const Example& example) const {
    const std::vector<double>& rewards = example.rewards;
    const auto plain = example.relative ? rewards : advantages(rewards, false),
               scaled = example.relative ? rewards : advantages(rewards, true);
    std::vector<Document> group;
    for (std::size_t i = 0; i < example.sides.size(); ++i) {
      Document document = encode_side(example.sides[i]);
      require_data(is_advantage({plain[i], scaled[i]}), "the reward of completion ", i + 1,
                   " is too large to be compared");
      document.advantage = {plain[i], scaled[i]};
      if (!example.old.empty()) document.old = old_of(document, example.old[i], i);
      group.push_back(std::move(document));
    }
    return group;
  }

  // Of each token: what the one after it was given when it was sampled.
  static std::vector<float> old_of(const Document& document, const std::vector<double>& given, std::size_t i) {
    require_data(std::cmp_equal(given.size(), document.learned()), "completion ", i + 1, " is ", document.learned(),
                 " tokens, its end included, and has ", given.size(),
                 " old_logps; give the completion as the tokens that were sampled");
    std::vector<float> old(document.tokens.size());
    auto next = given.begin();
    for (std::size_t t = 1; t < old.size(); ++t) {
      if (!document.learn[t]) continue;
      require_data(is_log_probability(*next), "old_logps of completion ", i + 1, ": ", *next,
                   " is no log-probability of what was sampled");
      old[t - 1] = static_cast<float>(*next++);
    }
    return old;
  }

  // The two part where their answers begin, and not before.
  std::vector<Document> encode_preference(const Example& example) const {
    std::vector<Document> pair;
    for (const Example& side : example.sides) pair.push_back(encode_side(side));
    const auto prompt = [](const Document& d) {
      return Tokens(d.tokens.begin(), d.tokens.begin() + (std::ranges::find(d.learn, 1) - d.learn.begin()));
    };
    require_data(pair[0].tokens != pair[1].tokens,
                 "nothing to prefer: \"chosen\" and \"rejected\" are the same to the model");
    require_data(prompt(pair[0]) == prompt(pair[1]), kNoPrompt);
    return pair;
  }

  // A prompt as a text begins; without a prompt, `rest` may have begun it.
  Document begin(const std::string& prompt, const Tokens& rest, bool learn = false) const {
    const Tokens tokens = tokenizer_.encode(prompt);
    Document document;
    document.add(missing_prefix(tokenizer_, prompt.empty() ? rest : tokens), learn);
    document.add(tokens, learn);
    return document;
  }

  // Ends as the model ends a text, also if that is written already.
  Document text(const std::string& prompt, const std::string& written, bool learn_prompt) const {
    const Tokens rest = tokenizer_.encode(written, !prompt.empty());
    Document document = begin(prompt, rest, learn_prompt);
    document.add(rest, true);
    if (!std::equal(end_.begin(), end_.end(), rest.end() - shorter(end_, rest), rest.end())) document.add(end_, true);
    return document;
  }
  static std::ptrdiff_t shorter(const Tokens& a, const Tokens& b) {
    return static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  }

  const Tokenizer& tokenizer_;
  Tokens end_;
  std::optional<Chat> chat_;
  std::string no_chat_;
  bool learn_all_;
  std::map<std::string, std::int32_t> special_;  // tokens of the layout that are tokens of the tokenizer
  bool fresh_after_special_ = false;             // text after one is tokenised like the beginning of a text
};

}  // namespace streambp
