// Prompts as tokens: a text to continue, or a conversation in the model's chat template.
#pragma once

#include "data/documents/encoder.h"
#include "data/documents/reasoning.h"
#include "data/files/generation_config.h"
#include "data/files/tokenizer_file.h"

namespace streambp {

struct Prompt {
  std::string text;
  Tokens tokens;
  Json line = {};  // its line of JSONL, if it has one
};

// The tools of a file: a JSON list of functions as in OpenAI's API.
inline jinja::Value read_tools(const fs::path& file) {
  if (file.empty()) return jinja::None{};
  const std::string text = read_file(file);
  try {
    const auto tools = parse_json<OrderedJson>(text, kLineLimits);
    const bool good = tools.is_array() && !tools.empty() && std::ranges::all_of(tools, &OrderedJson::is_object);
    require_data(good, "not a list of tools, [{\"type\": \"function\", ...}, ...]");
    return data_value(tools);
  } catch (const Error& error) {
    fail(file.string(), ": ", error.what());
  }
}

class Prompter {
 public:
  // system, tools: of conversations without them.
  Prompter(const std::filesystem::path& model, ChatOptions options, std::string system = "",
           jinja::Value tools = jinja::None{})
      : tokenizer(read_tokenizer(model)),
        stop(read_generation_defaults(model).stop),
        model_(model),
        options_(std::move(options)),
        system_(std::move(system)),
        tools_(std::move(tools)) {}

  // From now on, each prompt is a user message.
  void open_chat() {
    prepare_chat();
    talks_ = true;
  }

  // `known`: the tokens with which it probably begins, because the model has read and written them.
  Prompt conversation(Conversation c, const Tokens& known = {}) {
    prepare_chat();
    if (!system_.empty() && !c.messages.front().has_role("system"))
      c.messages.insert(c.messages.begin(), {"system", system_});
    if (!c.tools.list()) c.tools = tools_;
    return {c.messages.back().content(), encoder_->prompt(c, known).tokens};
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

  // A completion as an answer and the reasoning before it.
  Reasoned reasoned(const Prompt& prompt, const std::string& completion) const {
    if (!chat) return {"", completion};
    const ReasoningMarks marks = opened(reasoning_marks(chat->source()), tokenizer.decode(prompt.tokens));
    return split_reasoning(completion, marks);
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
  const jinja::Value tools_;
  std::optional<Encoder> encoder_;
  bool talks_ = false;  // prompts are user messages
};

}  // namespace streambp
