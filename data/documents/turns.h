// What is learned of a conversation: what the model would generate for each of the assistant's messages, with the token
// that ends the turn.
//
// A template with {% generation %} blocks says so itself. For others, each turn is compared with its prompt, the
// conversation before it with the generation prompt:
//
//   prompt   <|im_start|>user⏎One?<|im_end|>⏎<|im_start|>assistant⏎
//   turn     <|im_start|>user⏎One?<|im_end|>⏎<|im_start|>assistant⏎1<|im_end|>⏎
//                                                                  ^----------^ learned
//
// The end is the first token after the text that stops generation, or else the first special one. Some templates render a
// turn differently once others follow, because they drop old reasoning. Such a turn becomes a separate document.
#pragma once

#include <set>

#include "data/documents/chat.h"
#include "model/stream.h"
#include "text/tokenizer/tokenizer.h"

namespace streambp {

// A text, what is learned of it, and whether a stop token has to follow, because the template writes none.
struct TrainingText {
  RenderedChat chat;
  std::vector<Rows> learned = {};  // bytes
  bool lacks_end = false;
};

class Turns {
 public:
  // stop: tokens that end a turn. markers: these, and others of the template that may end one.
  Turns(const Chat& chat, const Tokenizer& tokenizer, const std::set<std::int32_t>& stop,
        const std::set<std::int32_t>& markers)
      : chat_(chat), tokenizer_(tokenizer), stop_(stop), markers_(markers) {}

  // The token that ends an answer.
  std::optional<std::int32_t> end_token() const {
    const RenderedChat chat = chat_.render({.messages = {{"user", "u"}, {"assistant", "a"}}});
    const std::size_t end = end_after(chat, chat.data.find_last_not_of('\0') + 1);
    std::optional<std::int32_t> token;
    for_each_token(chat, 0, [&](std::int32_t id, std::size_t, std::size_t at) {
      if (at == end) token = id;
    });
    return token;
  }

  // Covers the assistant's messages from number `first` on.
  std::vector<TrainingText> of(const Conversation& c, std::size_t first) const {
    if (chat_.marks_answers()) return {marked(c, first)};
    TrainingText whole{chat_.render(c)};
    std::vector<TrainingText> texts;
    const std::size_t turns = answers(c, first).size();
    require_repeatable("the conversation", whole.chat.text.size() + 256 * c.messages.size(), turns);
    for (const std::size_t i : answers(c, first)) {
      Turn turn = this->turn(c, i, whole.chat);
      const bool same = whole.chat.text.compare(0, turn.end, turn.chat.text, 0, turn.end) == 0;
      // A template without end tokens: the next turn's first token stops generation. If that does not either, only the
      // last turn can be followed by an end token.
      const std::size_t next = turn.has_end ? turn.end : same ? stop_at(whole.chat, turn.end) : std::string::npos;
      if (same && (next != std::string::npos || i + 1 == c.messages.size())) {
        whole.lacks_end = next == std::string::npos;
        whole.learned.push_back({position(turn.begin), position(next == std::string::npos ? turn.end : next)});
      } else {
        TrainingText own{std::move(turn.chat), {{position(turn.begin), position(turn.end)}}, !turn.has_end};
        texts.push_back(std::move(own));
      }
    }
    if (!whole.learned.empty()) texts.insert(texts.begin(), std::move(whole));
    for (TrainingText& text : texts) cut(text.chat, static_cast<std::size_t>(text.learned.back().end));
    return texts;
  }

 private:
  struct Turn {
    RenderedChat chat;
    std::size_t begin, end;
    bool has_end;
  };

  // The end of the template's first token at or after `from` that stops generation, or else of the first special one.
  // npos: there is none.
  std::size_t end_after(const RenderedChat& chat, std::size_t from) const {
    std::size_t stops = std::string::npos, special = std::string::npos;
    for_each_token(chat, from, [&](std::int32_t id, std::size_t, std::size_t end) {
      if (stop_.contains(id)) stops = std::min(stops, end);
      if (tokenizer_.special(id) || markers_.contains(id)) special = std::min(special, end);
    });
    return stops != std::string::npos ? stops : special;
  }
  // The end of a token that begins here and stops generation, or npos.
  std::size_t stop_at(const RenderedChat& chat, std::size_t at) const {
    std::size_t stops = std::string::npos;
    for_each_token(chat, at, [&](std::int32_t id, std::size_t begin, std::size_t end) {
      if (begin == at && stop_.contains(id)) stops = end;
    });
    return stops;
  }

  template <class F>
  void for_each_token(const RenderedChat& chat, std::size_t from, F&& f) const {
    tokenizer_.for_each_added(
        std::string_view(chat.text).substr(from), {std::string_view(chat.data).substr(from), markers_},
        [&](std::int32_t id, std::size_t begin, std::size_t end) { f(id, from + begin, from + end); });
  }

  static Index position(std::size_t at) { return static_cast<Index>(at); }

  static void cut(RenderedChat& chat, std::size_t size) {
    for (std::string* part : {&chat.text, &chat.data, &chat.marked}) part->resize(size);
  }

  static std::vector<std::size_t> answers(const Conversation& c, std::size_t first) {
    std::vector<std::size_t> all;
    for (std::size_t i = first; i < c.messages.size(); ++i)
      if (c.messages[i].has_role("assistant") && c.messages[i].learned) all.push_back(i);
    return all;
  }

  static std::size_t common(std::string_view a, std::string_view b) {
    return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  }

  Turn turn(const Conversation& c, std::size_t i, const RenderedChat& whole) const {
    Turn t{i + 1 == c.messages.size() ? whole : chat_.render(c.first(i + 1)), 0, 0, false};
    if (i == 0) {
      t.begin = first_data(t.chat);
    } else {
      find_begin(t, c, i);
    }
    const std::size_t last = t.chat.data.find_last_not_of('\0') + 1;  // npos + 1 is 0
    t.end = end_after(t.chat, std::max(t.begin, last));
    t.has_end = t.end != std::string::npos;
    if (!t.has_end) t.end = t.chat.text.size();
    return t;
  }

  // The first data that is not the name of the role.
  static std::size_t first_data(const RenderedChat& chat) {
    std::size_t begin = chat.data.find_first_not_of('\0');
    if (begin == std::string::npos) return chat.text.size();
    const std::size_t end = chat.data.find('\0', begin);
    if (chat.text.compare(begin, end - begin, "assistant") == 0) begin = chat.data.find_first_not_of('\0', end);
    return std::min(begin, chat.text.size());
  }

  // Where the turn's text leaves its prompt.
  void find_begin(Turn& t, const Conversation& c, std::size_t i) const {
    const RenderedChat prompt = chat_.render(c.first(i), Chat::End::prompt);
    t.begin = common(prompt.text, t.chat.text);
    if (t.begin == prompt.text.size()) return;
    if (t.begin <= common(chat_.render(c.first(i)).text, prompt.text)) return replace_prompt(t, prompt, c, i);
    // The prompt opens what this turn leaves out, such as reasoning.
    for (const RenderedChat& chat : {std::cref(prompt), std::cref(t.chat)}) {  // not within a token
      for_each_token(chat, 0, [&](std::int32_t, std::size_t from, std::size_t to) {
        if (from < t.begin && t.begin < to) t.begin = from;
      });
    }
    while (t.begin > 0 && t.begin < t.chat.text.size() && (t.chat.text[t.begin] & 0xC0) == 0x80) --t.begin;
  }

  // With the answer, the template renders the conversation before it differently; some drop the system message. What counts
  // is the prompt: it replaces that part. Both end alike after the last text of the message before the answer.
  void replace_prompt(Turn& t, const RenderedChat& prompt, Conversation c, std::size_t i) const {
    c = c.first(i + 1);
    c.messages.back().value = jinja::marked(c.messages.back().value, jinja::kAnswer);
    const RenderedChat turn = chat_.render(c);
    const auto after_data = [](const RenderedChat& chat, std::size_t before) {
      return chat.data.find_last_not_of('\0', before) + 1;  // npos + 1 is 0
    };
    const std::string closing = prompt.text.substr(after_data(prompt, prompt.text.size()));
    const std::size_t begin = after_data(turn, turn.answer == 0 ? 0 : turn.answer - 1),
                      rest = end_of(closing, turn, begin);
    require_data(turn.answer != std::string::npos && rest != std::string::npos, "message ", i + 1,
                 ": the chat template renders the conversation before it as ", quote(around(prompt.text, t.begin)),
                 " for its prompt, but with the message as ", quote(around(turn.text, t.begin)),
                 ", so it is not clear what the model would generate");
    t.chat = prompt, t.begin = prompt.text.size();
    t.chat.text += turn.text.substr(rest), t.chat.data += turn.data.substr(rest),
        t.chat.marked += turn.marked.substr(rest);
  }
  // The end of `closing`, which stands at `begin`, or npos. The template's white space may differ.
  static std::size_t end_of(std::string_view closing, const RenderedChat& turn, std::size_t begin) {
    const auto is_white = [](char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; };
    const auto markup = [&](std::size_t at) { return at < turn.text.size() && turn.data[at] == 0; };
    std::size_t at = begin;
    for (const char c : closing) {
      if (is_white(c)) continue;
      while (markup(at) && is_white(turn.text[at])) ++at;
      if (!markup(at) || turn.text[at++] != c) return std::string::npos;
    }
    const std::size_t last = closing.find_last_not_of(" \n\t\r");
    for (const char c : closing.substr(last == closing.npos ? 0 : last + 1)) at += markup(at) && turn.text[at] == c;
    return at;
  }
  static std::string_view around(std::string_view text, std::size_t at) {  // whole characters
    const auto inside = [&](std::size_t i) { return i < text.size() && (text[i] & 0xC0) == 0x80; };
    std::size_t begin = at < 40 ? 0 : at - 40, end = std::min(begin + 80, text.size());
    while (inside(begin)) ++begin;
    while (inside(end)) ++end;
    return text.substr(begin, end - begin);
  }

  // What the template marks: one run for each message of the assistant.
  TrainingText marked(const Conversation& c, std::size_t first) const {
    TrainingText text{chat_.render(c)};
    const std::string& marks = text.chat.marked;
    for (std::size_t begin = 0; (begin = marks.find('\1', begin)) != marks.npos;) {
      const std::size_t end = std::min(marks.find('\0', begin), marks.size());
      text.learned.push_back({position(begin), position(end)});
      begin = end;
    }
    const std::vector<std::size_t> all = every_answer(c), wanted = answers(c, first);
    if (wanted.size() < all.size()) {
      require_data(all.size() == text.learned.size(), "the chat template marks ", text.learned.size(),
                   " texts of generation, but the conversation has ", all.size(),
                   " messages of the assistant, so it is not clear which are to be learned");
      std::vector<Rows> chosen;
      for (std::size_t k = 0; k < all.size(); ++k)
        if (std::ranges::count(wanted, all[k]) > 0) chosen.push_back(text.learned[k]);
      text.learned = chosen;
    }
    require_data(!text.learned.empty(), "the chat template marks nothing of the conversation as generated");
    cut(text.chat, static_cast<std::size_t>(text.learned.back().end));
    return text;
  }
  static std::vector<std::size_t> every_answer(const Conversation& c) {
    std::vector<std::size_t> all;
    for (std::size_t i = 0; i < c.messages.size(); ++i)
      if (c.messages[i].has_role("assistant")) all.push_back(i);
    return all;
  }

  const Chat& chat_;
  const Tokenizer& tokenizer_;
  const std::set<std::int32_t>&stop_, &markers_;
};

}  // namespace streambp
