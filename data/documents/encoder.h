// From examples to tokens, each with a flag: does the loss cover it?
//
// Special tokens are recognized where a chat template writes them and in rendered text. In a message they are ordinary
// text, and so are the tokens that end a turn or that the template's generation prompt writes, and marks of reasoning
// outside of answers, whether the tokenizer calls them special or not. Text is encoded in one go, template and messages
// together, as at inference, but split where an answer starts, because a prompt ends there.
#pragma once

#include "data/documents/advantages.h"
#include "data/documents/jsonl.h"
#include "data/documents/token_file.h"
#include "data/documents/turns.h"
#include "data/files/generation_config.h"
#include "model/stream.h"
#include "text/tokenizer/tokenizer.h"

namespace streambp {

// The tokenizer's prefix (such as BOS), or nothing if the tokens already start with it.
inline Tokens missing_prefix(const Tokenizer& tokenizer, const Tokens& tokens) {
  const Tokens& prefix = tokenizer.prefix();
  const bool begun = tokens.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
  return begun ? Tokens() : prefix;
}

// The token that ends a sequence: eos_token of tokenizer_config.json, or else the first eos_token_id.
inline std::int32_t read_end_token(const fs::path& model, const Tokenizer& tokenizer) {
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

// The tokens in the loss: answers (completions and the assistant's messages), or all.
enum class Learn { answers, all };

class Encoder {
 public:
  // `no_chat` is the error message for conversations when there is no chat template.
  Encoder(const Tokenizer& tokenizer, const fs::path& model, std::optional<Chat> chat, std::string no_chat, Learn learn)
      : tokenizer_(tokenizer),
        end_(tokenizer.suffix()),
        chat_(std::move(chat)),
        no_chat_(std::move(no_chat)),
        learn_(learn) {
    if (end_.empty()) end_ = {read_end_token(model, tokenizer)};
    if (!chat_) return;
    stop_ = {end_.begin(), end_.end()};
    for (const std::int32_t id : read_eos_tokens(model).ids) stop_.insert(id);
    markers_ = stop_;
    for (const auto& marks : kReasoningMarks)
      for (const char* mark : marks)
        if (const auto found = tokenizer.added().find(mark); found != tokenizer.added().end())
          markers_.insert(found->second);
    const std::string special = tokenizer.decode(Tokens{*stop_.begin()});
    const Tokens after = tokenizer.encode(special + "a", TextStart::continuation);
    const Tokens continued = tokenizer.encode_plain("a", TextStart::continuation);
    if (after.empty() || Tokens(after.begin() + 1, after.end()) != continued) after_token_ = TextStart::beginning;
    try {
      const RenderedChat prompt = chat_->render({.messages = {{"user", "u"}}}, Chat::End::prompt);
      tokenizer.for_each_added(prompt.text, {prompt.data, stop_}, [&](auto id, auto, auto) { markers_.insert(id); });
    } catch (const BadData&) {  // the template wants other conversations
    }
  }

  // The token with which the template ends an answer.
  std::optional<std::int32_t> end_of_turn() const {
    try {
      return Turns(*chat_, tokenizer_, stop_, markers_).end_token();
    } catch (const BadData&) {  // the template wants other conversations
      return {};
    }
  }

  // Returns one document; several if the layout renders earlier answers differently; for a preference the chosen and
  // the rejected one; for a group all completions.
  std::vector<Document> encode(const Example& example) const {
    if (example.kind == Example::preference) return encode_preference(example);
    if (example.kind == Example::group) return encode_group(example);
    std::vector<Document> documents;
    if (example.kind == Example::conversation) {
      require(chat_.has_value(), no_chat_);
      if (learn_ == Learn::all) {
        documents.push_back(encode(TrainingText{chat_->render(example.chat)}));
      } else {
        const Turns turns(*chat_, tokenizer_, stop_, markers_);
        for (const TrainingText& text : turns.of(example.chat, example.first)) documents.push_back(encode(text));
      }
      require_data(!documents.empty(),
                   "no answer of the assistant to train on (with GRPO, prompts alone need --reward or --reward-cmd)");
    } else {
      documents.push_back(text(example.prompt, example.written, InLoss{example.kind == Example::text}));
    }
    for (Document& document : documents) {
      if (learn_ == Learn::all) std::fill(document.learn.begin(), document.learn.end(), 1);
      if (!document.learn.empty()) document.learn[0] = 0;
      require_learned(document);
    }
    return documents;
  }

  // The first message with text that the chat template leaves out: "message 2, of role \"usr\""; empty: there is
  // none. (Answers that it leaves out are errors.)
  std::string left_out(const Example& example) const {
    const Example& shown = example.sides.empty() ? example : example.sides[0];
    if (!chat_ || shown.kind != Example::conversation) return "";
    const std::string text = chat_->render(shown.chat).text;
    for (std::size_t i = 0; i < shown.chat.messages.size(); ++i) {
      const Message& message = shown.chat.messages[i];
      const std::string content = message.content();
      const std::size_t begin = content.find_first_not_of(" \t\r\n"), end = content.find_last_not_of(" \t\r\n");
      if (message.has_role("assistant") || begin == content.npos) continue;
      if (text.find(content.substr(begin, end + 1 - begin)) != text.npos) continue;
      Conversation marked = shown.chat;  // the template may have changed the text
      marked.messages[i].value = jinja::marked(message.value, jinja::kAnswer);
      if (chat_->render(marked).answer != std::string::npos) continue;
      const jinja::Value* role = message.find("role");
      return "message " + std::to_string(i + 1) + ", of role " +
             quote(role->text() ? jinja::to_utf8(*role->text()) : "");
    }
    return "";
  }

  // The conversation as a prompt. If it begins with what `known` says, it keeps these tokens: those that the model has
  // read and written.
  Document prompt(const Conversation& c, const Tokens& known = {}) const {
    return encode(TrainingText{chat_->render(c, Chat::End::prompt)}, known);
  }

  // Encodes a rendered conversation, or the beginning of one.
  Document encode(const TrainingText& text, const Tokens& known = {}) const {
    Document document;
    std::size_t done = 0;
    const std::string begun = tokenizer_.decode(known);
    if (text.chat.text.starts_with(begun)) document.add(known, InLoss::no), done = begun.size();
    std::set<std::size_t> ends;  // of added tokens
    if (after_token_ == TextStart::beginning) {
      tokenizer_.for_each_added(text.chat.text, {text.chat.data, markers_},
                                [&](auto, auto, auto end) { ends.insert(end); });
    }
    const auto add = [&](std::size_t end, InLoss learn) {
      if (end == done) return;
      const Origin origin = {std::string_view(text.chat.data).substr(done, end - done), markers_};
      const std::string_view part = std::string_view(text.chat.text).substr(done, end - done);
      const TextStart start = done == 0             ? TextStart::beginning
                              : ends.contains(done) ? after_token_
                                                    : TextStart::continuation;
      document.add(chat_->trusts_messages() ? tokenizer_.encode(part, start) : tokenizer_.encode(part, start, origin),
                   learn);
      done = end;
    };
    for (const Rows& rows : text.learned) {
      require_data(std::cmp_greater_equal(rows.begin, done), "the chat template renders its answers in another order");
      add(static_cast<std::size_t>(rows.begin), InLoss::no);
      add(static_cast<std::size_t>(rows.end), InLoss::yes);
    }
    add(text.chat.text.size(), InLoss::no);
    if (text.lacks_end) document.add(end_, InLoss::yes);
    return document;
  }

 private:
  static constexpr const char* kNoPrompt = "the prompt is empty, so there is no token to predict the first one from";

  static void require_learned(const Document& document) {
    const std::size_t count = document.tokens.size();
    require_data(document.learned() > 0, "no tokens to train on: ",
                 count == 0   ? "the text has no tokens"
                 : count == 1 ? "the text has one token, and no other to predict it from"
                              : "none of its tokens belong to an answer");
  }

  // Encodes one answer of a preference or group.
  Document encode_side(const Example& side) const {
    require(learn_ == Learn::answers,
            "--learn all is not for preferences and groups, which compare answers; remove it");
    require_data(side.kind == Example::conversation || !side.prompt.empty() || !tokenizer_.prefix().empty(), kNoPrompt);
    if (!side.tokens.empty()) return encode_sampled(side);
    std::vector<Document> documents = encode(side);
    require_data(documents.size() == 1, "after the prompt come ", documents.size(),
                 " answers, and the chat template renders earlier answers differently; give one answer");
    return std::move(documents[0]);
  }

  // Sampled tokens are used unchanged.
  Document encode_sampled(const Example& side) const {
    const bool conversation = side.kind == Example::conversation;
    require(!conversation || chat_.has_value(), no_chat_);
    Document document = conversation ? prompt(side.chat) : begin(side.prompt, side.tokens);
    document.add(side.tokens, InLoss::yes);
    document.learn[0] = 0;
    require_learned(document);
    return document;
  }

  std::vector<Document> encode_group(const Example& example) const {
    const std::vector<double>& rewards = example.rewards;
    const auto plain = example.relative ? rewards : advantages(rewards, Scaled::no),
               scaled = example.relative ? rewards : advantages(rewards, Scaled::yes);
    std::vector<Document> group;
    for (std::size_t i = 0; i < example.sides.size(); ++i) {
      Document document = encode_side(example.sides[i]);
      require_data(is_advantage({plain[i], scaled[i]}), "the reward of completion ", i + 1, " is too large");
      document.advantage = {plain[i], scaled[i]};
      if (!example.old.empty()) document.old = old_of(document, example.old[i], i);
      group.push_back(std::move(document));
    }
    return group;
  }

  // old[t] is the log-prob of token t + 1 when it was sampled.
  static std::vector<float> old_of(const Document& document, const std::vector<double>& given, std::size_t i) {
    require_data(std::cmp_equal(given.size(), document.learned()), "completion ", i + 1, " is ", document.learned(),
                 " tokens with its end, and has ", given.size(),
                 " old_logps; give the completion as the sampled tokens");
    std::vector<float> old(document.tokens.size());
    auto next = given.begin();
    for (std::size_t t = 1; t < old.size(); ++t) {
      if (!document.learn[t]) continue;
      require_data(is_log_probability(*next), "old_logps of completion ", i + 1, ": ", *next,
                   " is not the log-prob of a sampled token");
      old[t - 1] = static_cast<float>(*next++);
    }
    return old;
  }

  // Both documents start with the same prompt and differ in the answer.
  std::vector<Document> encode_preference(const Example& example) const {
    std::vector<Document> pair;
    for (const Example& side : example.sides) pair.push_back(encode_side(side));
    const auto prompt = [](const Document& d) {
      return Tokens(d.tokens.begin(), d.tokens.begin() + (std::ranges::find(d.learn, 1) - d.learn.begin()));
    };
    require_data(pair[0].tokens != pair[1].tokens,
                 "nothing to prefer: \"chosen\" and \"rejected\" are the same tokens");
    require_data(prompt(pair[0]) == prompt(pair[1]), kNoPrompt);
    return pair;
  }

  // A prompt with the tokenizer's prefix. `rest` follows and can start with the prefix if the prompt is empty.
  Document begin(const std::string& prompt, const Tokens& rest, InLoss learn = InLoss::no) const {
    const Tokens tokens = tokenizer_.encode(prompt);
    Document document;
    document.add(missing_prefix(tokenizer_, prompt.empty() ? rest : tokens), learn);
    document.add(tokens, learn);
    return document;
  }

  // Adds the end-of-text token unless the text ends with it.
  Document text(const std::string& prompt, const std::string& written, InLoss learn_prompt) const {
    const Tokens rest = tokenizer_.encode(written, prompt.empty() ? TextStart::beginning : TextStart::continuation);
    Document document = begin(prompt, rest, learn_prompt);
    document.add(rest, InLoss::yes);
    if (!std::equal(end_.begin(), end_.end(), rest.end() - shorter(end_, rest), rest.end()))
      document.add(end_, InLoss::yes);
    return document;
  }
  static std::ptrdiff_t shorter(const Tokens& a, const Tokens& b) {
    return static_cast<std::ptrdiff_t>(std::min(a.size(), b.size()));
  }

  const Tokenizer& tokenizer_;
  Tokens end_;
  std::optional<Chat> chat_;
  std::string no_chat_;
  Learn learn_;
  std::set<std::int32_t> stop_;                      // tokens that end a sequence or a turn
  TextStart after_token_ = TextStart::continuation;  // how the tokenizer encodes text after an added token
  std::set<std::int32_t> markers_;  // these, and what the generation prompt writes: ordinary text in messages
};

}  // namespace streambp
