// Conversations as a model reads them: messages, written in the chat layout of its template.
//
// Templates are programs in a language of their own. They are not run: the published ones are recognised by a hash of
// their text, and what they do is written down in chat_layouts.cuh. So a template that is not known is refused, never
// guessed at.
#pragma once

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/documents/chat_layouts.cuh"
#include "data/files/fields.cuh"
#include "data/files/text_hash.cuh"

namespace streambp {

// An error in one document of the data, which can be left out while the others are used.
struct BadData : Error {
  using Error::Error;
};
template <class... Parts>
void require_data(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw BadData(message.str());
}

struct Message {
  std::string role, content;
  bool operator==(const Message&) const = default;
};

// A stretch of a rendered conversation.
struct Piece {
  std::string text;
  bool learn;   // written by the model: the assistant's answer with the token that ends it
  bool markup;  // written by the layout, where special tokens are tokens; in content they are mere text
};

// The model's own tokens for the beginning and end of a text, "" where it has none.
struct TextTokens {
  std::string bos, eos;
};

// A small JSON file of a model directory; null if there is none.
inline Json read_model_json(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return nullptr;
  Json json = parse_json_file(path);
  require(json.is_object(), path.string(), ": is not a JSON object; is the file complete?");
  return json;
}

inline TextTokens read_text_tokens(const std::filesystem::path& model) {
  TextTokens tokens;
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json"}) {  // the latter counts
    const Json json = read_model_json(model / name);
    const auto take = [&](const char* key, std::string& token) {
      if (!json.is_object() || !json.contains(key)) return;
      const Json& value = json[key];
      const Json& text = value.is_object() && value.contains("content") ? value["content"] : value;
      if (text.is_string()) token = text.get<std::string>();
    };
    take("bos_token", tokens.bos);
    take("eos_token", tokens.eos);
  }
  return tokens;
}

// The text of a model's chat template, and where it was; empty if it has none.
struct Template {
  std::string text, file;
};
inline Template read_template(const std::filesystem::path& model) {
  const std::filesystem::path jinja = model / "chat_template.jinja";
  if (std::filesystem::exists(jinja)) return {read_file(jinja), jinja.string()};
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    const Json json = read_model_json(model / name);
    if (!json.is_object() || !json.contains("chat_template") || json["chat_template"].is_null()) continue;
    const std::string file = (model / name).string();
    const Json& value = json["chat_template"];
    if (value.is_string()) return {value.get<std::string>(), file};
    require(value.is_array(), file, ": \"chat_template\" is neither text nor a list of named templates");
    for (const Json& entry : value) {
      const auto is = [&](const char* key) {
        return entry.is_object() && entry.contains(key) && entry[key].is_string();
      };
      if (is("name") && is("template") && entry["name"] == "default")
        return {entry["template"].get<std::string>(), file};
    }
    fail(file, ": none of the chat templates is named \"default\"; choose a layout with --chat");
  }
  return {};
}

// White space as templates see it when they trim: that of Unicode, of which these are the characters.
inline std::string_view trimmed(std::string_view text) {
  static constexpr std::string_view spaces[] = {
      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",   " ",
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  for (bool more = true; more;) {
    more = false;
    for (const std::string_view space : spaces) {
      if (text.starts_with(space)) text.remove_prefix(space.size()), more = true;
      if (text.ends_with(space)) text.remove_suffix(space.size()), more = true;
    }
  }
  return text;
}
inline std::string_view without_leading(std::string_view text, char c) {
  return text.substr(std::min(text.find_first_not_of(c), text.size()));
}
inline std::string_view without_trailing(std::string_view text, char c) {
  return text.substr(0, text.find_last_not_of(c) + 1);
}

class Chat {
 public:
  using Messages = std::span<const Message>;

  // The layout of a model's template, or the one of this name.
  static Chat of(const std::filesystem::path& model, const std::string& forced = "") {
    if (!forced.empty()) return Chat(named(forced), model);
    const Template found = read_template(model);
    const char* remedy =
        "; name a layout with --chat, or give data that is rendered already: {\"text\"} or "
        "{\"prompt\", \"completion\"}";
    require(!found.text.empty(), model.string(), ": the model has no chat template", remedy);
    const std::uint64_t hash = text_hash(found.text.substr(0, found.text.find_last_not_of(" \t\r\n\f\v") + 1));
    const auto known = std::find_if(std::begin(kKnownTemplates), std::end(kKnownTemplates),
                                    [&](const KnownTemplate& t) { return t.hash == hash; });
    require(known != std::end(kKnownTemplates), found.file, ": the chat template is none of those that are known",
            remedy, ". Layouts: ", names());
    return Chat(named(known->layout), model);
  }

  static std::string names() {
    std::string all;
    for (const Layout& layout : chat_layouts()) all += (all.empty() ? "" : ", ") + layout.name;
    return all;
  }

  Chat(const Layout& layout, const TextTokens& own) : layout_(layout) {
    const auto replace = [&](std::string& text, const char* mark, const std::string& token, const char* name) {
      for (std::size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += token.size()) {
        require(!token.empty(), "the chat layout ", layout.name, " needs the model's ", name,
                ", and its tokenizer_config.json has none; choose another layout with --chat");
        text.replace(at, std::strlen(mark), token);
      }
    };
    const auto fill = [&](std::string& text) {
      replace(text, "{bos}", own.bos, "bos_token");
      replace(text, "{eos}", own.eos, "eos_token");
    };
    fill(layout_.begin), fill(layout_.end);
    for (Frame* frame : {&layout_.system, &layout_.later_system, &layout_.user, &layout_.assistant}) {
      fill(frame->before), fill(frame->after);
    }
    for (std::string& token : layout_.tokens) fill(token);
  }

  const std::string& name() const { return layout_.name; }
  // What a model writes when its answer is complete.
  const std::string& end() const { return layout_.end; }
  // What the layout writes and a tokenizer may have as one token.
  const std::vector<std::string>& tokens() const { return layout_.tokens; }

  // The whole conversation, as the template writes it.
  std::vector<Piece> render(Messages messages) const {
    check(messages);
    Writer out{layout_.tokens};
    write(messages, out);
    return out.pieces;
  }

  // The conversation up to where the model is to answer.
  std::vector<Piece> prompt(Messages messages) const {
    check(messages);
    Writer out{layout_.tokens};
    write(messages, out);
    ask(out);
    return out.pieces;
  }

  // What to train on, so that every answer from message `first` on is learned just where the model would give it. As a
  // rule that is the whole conversation; but some layouts write what is past otherwise than when it was new, and then
  // it is one text an answer.
  std::vector<std::vector<Piece>> lessons(Messages messages, std::size_t first = 0) const {
    check(messages);
    std::vector<std::vector<Piece>> lessons;
    if (!rewrites_the_past(messages)) {
      Writer out{layout_.tokens};
      write(messages, out, first);
      lessons.push_back(std::move(out.pieces));
      return lessons;
    }
    for (std::size_t i = first; i < messages.size(); ++i) {
      if (messages[i].role != "assistant") continue;
      Writer out{layout_.tokens};
      write(messages.first(i), out, i);
      out.markup(layout_.assistant.before);
      answer(messages.first(i + 1), i, out, true);
      lessons.push_back(std::move(out.pieces));
    }
    return lessons;
  }

 private:
  // Collects pieces; in markup every token is a piece of its own.
  struct Writer {
    const std::vector<std::string>& tokens;
    std::vector<Piece> pieces = {};

    void add(std::string_view text, bool learn, bool markup) {
      if (!text.empty()) pieces.push_back({std::string(text), learn, markup});
    }
    void content(std::string_view text, bool learn = false) { add(text, learn, false); }
    void markup(std::string_view text, bool learn = false) {
      std::size_t begin = 0;  // of the text since the last token
      for (std::size_t at = 0; at < text.size();) {
        const std::string_view rest = text.substr(at);
        const auto token = std::find_if(tokens.begin(), tokens.end(), [&](auto& t) { return rest.starts_with(t); });
        if (token == tokens.end()) {
          ++at;
          continue;
        }
        add(text.substr(begin, at - begin), learn, true);
        add(*token, learn, true);
        begin = at += token->size();
      }
      add(text.substr(begin), learn, true);
    }
    void turn(const Frame& frame, std::string_view text) {
      markup(frame.before);
      content(frame.trim ? trimmed(text) : text);
      markup(frame.after);
    }
  };

  Chat(const Layout& layout, const std::filesystem::path& model) : Chat(layout, read_text_tokens(model)) {}

  static const Layout& named(const std::string& name) {
    for (const Layout& layout : chat_layouts()) {
      if (layout.name == name) return layout;
    }
    fail("--chat ", name, ": there is no such layout; choose one of ", names());
  }

  bool rewrites_the_past(Messages messages) const {
    const bool moving_system = layout_.system_place == SystemPlace::last_user_turn && messages[0].role == "system";
    return moving_system || layout_.reasoning != Reasoning::none;
  }

  void check(Messages messages) const {
    require_data(!messages.empty(), "a conversation without messages");
    const bool system = messages[0].role == "system";
    require_data(!system || layout_.system_place != SystemPlace::refused, "the chat layout ", layout_.name,
                 " has no place for a system message");
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const std::string& role = messages[i].role;
      const bool known = role == "system" || role == "user" || role == "assistant";
      require_data(known, "message ", i + 1, ": the role \"", role, "\" is none of system, user and assistant");
      require_data(role != "system" || i == 0 || !layout_.later_system.before.empty(), "message ", i + 1,
                   ": in the chat layout ", layout_.name, " a system message must come first");
      const bool users = (i - system) % 2 == 0;
      require_data(!layout_.alternates || (system && i == 0) || role == (users ? "user" : "assistant"), "message ",
                   i + 1, ": in the chat layout ", layout_.name,
                   " user and assistant must take turns, beginning with the user");
    }
  }

  // Answers before message `first` are not learned.
  void write(Messages messages, Writer& out, std::size_t first = 0) const {
    out.markup(layout_.begin);
    const bool given = !messages.empty() && messages[0].role == "system";
    const bool shared = given && layout_.system_place != SystemPlace::own_turn;
    if (given && !shared) out.turn(layout_.system, messages[0].content);
    if (!given && layout_.default_system) out.turn(layout_.system, *layout_.default_system);
    for (std::size_t i = given; i < messages.size(); ++i) {
      const Message& message = messages[i];
      if (message.role == "assistant") {
        out.markup(layout_.assistant.before);
        answer(messages, i, out, i >= first);
      } else if (message.role == "system") {
        out.turn(layout_.later_system, message.content);
      } else {
        const std::size_t place = layout_.system_place == SystemPlace::last_user_turn ? messages.size() - 1 : 1;
        user_turn(message, shared && i == place ? &messages[0] : nullptr, out);
      }
    }
  }

  void user_turn(const Message& message, const Message* system, Writer& out) const {
    out.markup(layout_.user.before);
    if (system) {
      out.content(system->content);
      out.markup(layout_.system.after);
    }
    out.content(layout_.user.trim ? trimmed(message.content) : message.content);
    out.markup(layout_.user.after);
  }

  void ask(Writer& out) const {
    out.markup(layout_.assistant.before);
    if (layout_.reasoning == Reasoning::begun_by_prompt) out.markup("<think>\n");
  }

  // What the model writes after the prompt, and what then follows.
  void answer(Messages messages, std::size_t i, Writer& out, bool learn) const {
    const std::string& content = messages[i].content;
    out.markup(layout_.lead, learn);
    if (layout_.reasoning == Reasoning::none) {
      out.content(layout_.assistant.trim ? trimmed(content) : content, learn);
    } else {
      reasoned(messages, i, out, learn);
    }
    out.markup(layout_.end, learn);
    out.markup(layout_.assistant.after);
  }

  // Qwen3: reasoning stays in answers to the last question, and an answer without any gets an empty block.
  void reasoned(Messages messages, std::size_t i, Writer& out, bool learn) const {
    const std::string_view content = messages[i].content, open = "<think>", close = "</think>";
    std::string_view reasoning = "", answer = content;
    if (content.find(close) != content.npos) {
      reasoning = without_trailing(content.substr(0, content.find(close)), '\n');
      if (const std::size_t at = reasoning.rfind(open); at != reasoning.npos) reasoning.remove_prefix(at + open.size());
      reasoning = without_leading(reasoning, '\n');
      answer = without_leading(content.substr(content.rfind(close) + close.size()), '\n');
    }
    if (i > last_question(messages) && (i + 1 == messages.size() || !reasoning.empty())) {
      out.markup("<think>\n", learn && layout_.reasoning == Reasoning::begun_by_model);
      out.content(without_trailing(without_leading(reasoning, '\n'), '\n'), learn);
      out.markup("\n</think>\n\n", learn);
      answer = without_leading(answer, '\n');
    }
    out.content(answer, learn);
  }

  // The last message of the user that does not report the result of a tool.
  static std::size_t last_question(Messages messages) {
    for (std::size_t i = messages.size(); i-- > 0;) {
      const std::string& text = messages[i].content;
      if (messages[i].role == "user" && !(text.starts_with("<tool_response>") && text.ends_with("</tool_response>")))
        return i;
    }
    return messages.size() - 1;
  }

  Layout layout_;
};

}  // namespace streambp
