// Prompts as tokens: a text to continue, or a conversation in the layout of the model's chat template.
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
  // layout: the chat layout; empty: the layout of the model's template.
  Prompter(const std::filesystem::path& model, std::string layout, std::string system = "")
      : tokenizer(model),
        stop(read_generation_defaults(model).stop),
        model_(model),
        layout_(std::move(layout)),
        system_(std::move(system)) {}

  // From now on, each prompt is a user message.
  void open_chat() { prepare_chat(), talks_ = true; }

  Prompt conversation(std::vector<Message> messages) {
    prepare_chat();
    if (!system_.empty() && messages.front().role != "system") messages.insert(messages.begin(), {"system", system_});
    return {messages.back().content, encoder_->encode_pieces(chat->prompt(messages)).tokens};
  }

  // Prepends the tokenizer's prefix, such as BOS, unless the text already begins with it.
  Prompt text(const std::string& text) {
    if (talks_) return conversation({{"user", text}});
    const Tokens rest = tokenizer.encode(text);
    Tokens tokens = missing_prefix(tokenizer, rest);
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    return {text, tokens};
  }

  // A line of JSON, with "prompt" or "messages".
  Prompt line(const std::string& line) {
    const Json json = parse_line(line);
    for (const char* name : {"messages", "prompt"}) {
      if (!json.contains(name)) continue;
      const bool is_text = json[name].is_string();
      const bool is_list = json[name].is_array() && !json[name].empty();
      require_data(is_list || (is_text && name == std::string("prompt")), "\"", name, "\" is not a ",
                   name == std::string("prompt") ? "text" : "list of messages");
      Prompt prompt = is_list ? conversation(parse_messages(json[name], name)) : text(json[name].get<std::string>());
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
    chat.emplace(Chat::of(model_, layout_));
    encoder_.emplace(tokenizer, model_, *chat, "", Learn::answers);
    if (const auto end = tokenizer.find(chat->end())) stop.insert(*end);
  }

  const std::filesystem::path model_;
  const std::string layout_, system_;
  std::optional<Encoder> encoder_;
  bool talks_ = false;  // prompts are user messages
};

}  // namespace streambp
