// Prompts as tokens: a text to continue, or a conversation in the model's chat template.
#pragma once

#include <optional>
#include <set>

#include "data/documents/encoder.h"
#include "data/files/generation_config.h"

namespace streambp {

struct Prompt {
  std::string text;
  Tokens tokens;
  Json line = {};  // its line of JSONL, if it has one
};

class Prompter {
 public:
  Prompter(const std::filesystem::path& model, ChatOptions options, std::string system = "")
      : tokenizer(model),
        stop(read_generation_defaults(model).stop),
        model_(model),
        options_(std::move(options)),
        system_(std::move(system)) {}

  // From now on, each prompt is a user message.
  void open_chat() { prepare_chat(), talks_ = true; }

  Prompt conversation(Conversation c) {
    prepare_chat();
    if (!system_.empty() && !c.messages.front().has_role("system"))
      c.messages.insert(c.messages.begin(), {"system", system_});
    return {c.messages.back().content(), encoder_->prompt(c).tokens};
  }

  // Prepends the tokenizer's prefix, such as BOS, unless the text already begins with it.
  Prompt text(const std::string& text) {
    if (talks_) return conversation({.messages = {{"user", text}}});
    const Tokens rest = tokenizer.encode(text);
    Tokens tokens = missing_prefix(tokenizer, rest);
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    return {text, tokens};
  }

  // A line of JSON, with "prompt" or "messages".
  Prompt line(const std::string& line) {
    const OrderedJson json = parse_line(line);
    for (const char* name : {"messages", "prompt"}) {
      if (!json.contains(name)) continue;
      const bool is_text = json[name].is_string();
      const bool is_list = json[name].is_array() && !json[name].empty();
      require_data(is_list || (is_text && name == std::string("prompt")), "\"", name, "\" is not a ",
                   name == std::string("prompt") ? "text" : "list of messages");
      Prompt prompt = is_list ? conversation(conversation_of(json, parse_messages(json[name], name)).chat)
                              : text(json[name].get<std::string>());
      prompt.line = json;
      return prompt;
    }
    throw BadData("neither \"prompt\" nor \"messages\"");
  }

  const Tokenizer tokenizer;
  std::set<std::int32_t> stop;  // tokens that end a sequence
  std::optional<Chat> chat;     // after the first conversation

 private:
  void prepare_chat() {
    if (chat) return;
    chat.emplace(Chat::of(model_, options_));
    encoder_.emplace(tokenizer, model_, *chat, "", Learn::answers);
    if (const auto end = encoder_->end_of_turn()) stop.insert(*end);
  }

  const std::filesystem::path model_;
  const ChatOptions options_;
  const std::string system_;
  std::optional<Encoder> encoder_;
  bool talks_ = false;  // prompts are user messages
};

}  // namespace streambp
