// Conversations as text: messages, rendered in the layout of the model's chat template.
//
// Templates are Jinja programs, but they are not executed. A hash of the text identifies a published template, and
// chat_layouts.h describes its layout as data. An unknown template is an error.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/documents/chat_layouts.h"
#include "data/files/hash.h"
#include "data/files/tokenizer_config.h"
#include "data/tokenizer/utf8.h"

namespace streambp {

// An error in one example. With --skip-bad, the example is skipped.
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

// Refuses a text of so many bytes that would be repeated so many times. A line of data could fill the memory with it.
inline void require_repeatable(const char* what, std::size_t bytes, std::size_t times) {
  require_data(bytes <= (std::size_t{1} << 29) / std::max<std::size_t>(times, 1), what, " of ", bytes,
               " bytes would be repeated ", times, " times, for each of its answers; split it");
}

struct Message {
  std::string role, content;
  bool operator==(const Message&) const = default;
};

// A part of a rendered conversation.
struct Piece {
  std::string text;
  bool learn;   // the loss covers this part: the assistant's answer and its end token
  bool markup;  // written by the layout: special tokens are tokens; in content they are plain text
};

// Jinja's trim removes Unicode white space and four separators of ASCII.
inline std::string_view trimmed(std::string_view text) {
  const auto trimmed_away = [](char32_t c) { return is_space(c) || (0x1C <= c && c <= 0x1F); };
  text.remove_prefix(leading_space(text, trimmed_away));
  text.remove_suffix(trailing_space(text, trimmed_away));
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

  // The layout of the model's template, or the layout named `forced`.
  static Chat of(const fs::path& model, const std::string& forced = "") {
    if (!forced.empty()) return Chat(named(forced), model);
    const Template found = read_template(model);
    const char* remedy =
        "; name a layout with --chat, or use data that is rendered already: {\"text\"} or "
        "{\"prompt\", \"completion\"}";
    require(!found.text.empty(), model.string(), ": the model has no chat template", remedy);
    const std::uint64_t hash = text_hash(found.text.substr(0, found.text.find_last_not_of(" \t\r\n\f\v") + 1));
    const auto known = std::ranges::find_if(kKnownTemplates, [&](const KnownTemplates& templates) {
      return std::ranges::count(templates.hashes, hash) > 0;
    });
    require(known != std::end(kKnownTemplates), found.file, ": unknown chat template", remedy, ". Layouts: ", names());
    return Chat(named(known->layout), model);
  }

  static std::string names() {
    std::vector<std::string> names;
    for (const Layout& layout : chat_layouts()) names.push_back(layout.name);
    return join(names);
  }

  Chat(const Layout& layout, const TextTokens& own) : layout_(layout) {
    const auto replace = [&](std::string& text, const char* mark, const std::string& token, const char* name) {
      for (std::size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += token.size()) {
        require(!token.empty(), "the chat layout ", layout.name, " needs a ", name,
                ", but the model's tokenizer_config.json has none; choose another layout with --chat");
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
  // The text that a model generates at the end of an answer.
  const std::string& end() const { return layout_.end; }
  // Texts of the layout that are single tokens in tokenizers made for it.
  const std::vector<std::string>& tokens() const { return layout_.tokens; }

  // The whole conversation, as rendered by the template.
  std::vector<Piece> render(Messages messages) const { return rendered(messages).pieces; }

  // The conversation up to the generation prompt. The model's answer follows.
  std::vector<Piece> prompt(Messages messages) const {
    Writer out = rendered(messages);
    out.markup(layout_.assistant.before);
    if (layout_.reasoning == Reasoning::begun_by_prompt) out.markup("<think>\n");
    return out.pieces;
  }

  // The sequences to train on. Each answer from message `first` on appears exactly as the model would generate it.
  // Usually this is one sequence. Some layouts rewrite earlier turns (Qwen3 drops their reasoning): then there is one
  // sequence per answer.
  std::vector<std::vector<Piece>> training_sequences(Messages messages, std::size_t first = 0) const {
    check(messages);
    std::vector<std::vector<Piece>> sequences;
    if (!rewrites_earlier_turns(messages)) {
      Writer out{layout_.tokens};
      write(messages, out, first);
      sequences.push_back(std::move(out.pieces));
      return sequences;
    }
    std::size_t bytes = 0, answers = 0;
    for (const Message& message : messages)
      bytes += 256 + message.content.size(), answers += message.role == "assistant";
    require_repeatable("the conversation", bytes, answers);
    for (std::size_t i = first; i < messages.size(); ++i) {
      if (messages[i].role != "assistant") continue;
      Writer out{layout_.tokens};
      write(messages.first(i), out, i);
      out.markup(layout_.assistant.before);
      answer(messages.first(i + 1), i, i, out);
      sequences.push_back(std::move(out.pieces));
    }
    return sequences;
  }

 private:
  // Collects pieces. Within markup, each token is its own piece.
  struct Writer {
    const std::vector<std::string>& tokens;
    std::vector<Piece> pieces = {};

    void add(std::string_view text, bool learn, bool markup) {
      if (!text.empty()) pieces.push_back({std::string(text), learn, markup});
    }
    void content(std::string_view text, bool learn = false) { add(text, learn, false); }
    void markup(std::string_view text, bool learn = false) {
      std::size_t begin = 0;  // of the text after the last token
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

  Chat(const Layout& layout, const fs::path& model) : Chat(layout, read_text_tokens(model)) {}

  static const Layout& named(const std::string& name) {
    const auto found = std::ranges::find(chat_layouts(), name, &Layout::name);
    if (found != chat_layouts().end()) return *found;
    fail("--chat ", excerpt(name), ": no such layout; choose one of ", names());
  }

  bool rewrites_earlier_turns(Messages messages) const {
    const bool moving_system = layout_.system_place == SystemPlace::last_user_turn && messages[0].role == "system";
    return moving_system || layout_.reasoning != Reasoning::none;
  }

  void check(Messages messages) const {
    require_data(!messages.empty(), "the conversation has no messages");
    const bool system = messages[0].role == "system";
    require_data(!system || layout_.system_place != SystemPlace::refused, "the chat layout ", layout_.name,
                 " has no system message");
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const std::string& role = messages[i].role;
      const bool known = role == "system" || role == "user" || role == "assistant";
      require_data(known, "message ", i + 1, ": the role ", quote(role), " is not system, user or assistant");
      require_data(role != "system" || i == 0 || !layout_.later_system.before.empty(), "message ", i + 1,
                   ": in the chat layout ", layout_.name, " a system message must come first");
      const bool users = (i - system) % 2 == 0;
      require_data(!layout_.alternates || (system && i == 0) || role == (users ? "user" : "assistant"), "message ",
                   i + 1, ": in the chat layout ", layout_.name,
                   " user and assistant must alternate, starting with the user");
    }
  }

  Writer rendered(Messages messages) const {
    check(messages);
    Writer out{layout_.tokens};
    write(messages, out);
    return out;
  }

  // The loss covers answers from message `first` on.
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
        answer(messages, i, first, out);
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

  // The text that the model generates after the prompt, and the layout's text after it.
  void answer(Messages messages, std::size_t i, std::size_t first, Writer& out) const {
    const std::string& content = messages[i].content;
    const bool learn = i >= first;
    out.markup(layout_.lead, learn);
    if (layout_.reasoning == Reasoning::none) {
      out.content(layout_.assistant.trim ? trimmed(content) : content, learn);
    } else {
      reasoned(messages, i, out, learn);
    }
    out.markup(layout_.end, learn);
    out.markup(layout_.assistant.after);
  }

  // Qwen3: reasoning stays in answers to the last question. Without reasoning, the last answer gets an empty block.
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

  // The last user message that is not the result of a tool.
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
