// What a model is to continue, as tokens: a text, or a conversation in the layout of the model's chat template.
#pragma once

#include <optional>
#include <set>

#include "data/files/generation_config.cuh"
#include "data/tokenizer/encoder.cuh"

namespace streambp {

struct Prompt {
  std::string text;
  Tokens tokens;
  Json line = {};  // what it came from, if from JSON
};

class Prompter {
 public:
  // layout: that of conversations; empty: that of the model's template.
  Prompter(const std::filesystem::path& model, std::string layout, std::string system = "")
      : tokenizer(model),
        stop(read_generation_defaults(model).stop),
        model_(model),
        layout_(std::move(layout)),
        system_(std::move(system)) {}

  // Each text is one of the user's from now on, to be answered.
  void open_chat() { prepare_chat(), talks_ = true; }

  Prompt conversation(std::vector<Message> messages) {
    prepare_chat();
    if (!system_.empty() && messages.front().role != "system") messages.insert(messages.begin(), {"system", system_});
    return {messages.back().content, encoder_->encode_pieces(chat->prompt(messages)).tokens};
  }

  // A text to be continued begins as the tokenizer begins texts, also if that is written already.
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
  std::set<std::int32_t> stop;  // tokens that end a text
  std::optional<Chat> chat;     // once it is open

 private:
  void prepare_chat() {
    if (chat) return;
    chat.emplace(Chat::of(model_, layout_));
    encoder_.emplace(tokenizer, model_, *chat, "", false);
    if (const auto end = tokenizer.find(chat->end())) stop.insert(*end);
  }

  const std::filesystem::path model_;
  const std::string layout_, system_;
  std::optional<Encoder> encoder_;
  bool talks_ = false;  // all texts are a user's
};

}  // namespace streambp
