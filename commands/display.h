// Prints generated text as valid UTF-8; on a terminal, without control characters.
#pragma once

#include <unistd.h>

#include "commands/text.h"
#include "data/documents/reasoning.h"
#include "generation/generate.h"
#include "text/tokenizer/tokenizer.h"

namespace streambp {

inline void show(std::string_view text, bool raw) {
  static const bool terminal = isatty(STDOUT_FILENO);
  const std::string shown = terminal && !raw ? without_controls(text) : std::string(text);
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  std::fflush(stdout);
}

// Tells the user that a completion was cut off.
inline std::string note(const Continuation& text, Index room) {
  if (text.end == Ending::length)
    return "[stopped after " + std::to_string(text.tokens.size()) + " tokens; --length allows more]";
  if (text.end == Ending::room) return "[stopped: the context of " + std::to_string(room) + " tokens is full]";
  return "";
}

// The text of a completion during generation, without its stop token; raw: with all special tokens. `before`: the
// tokens that precede it; `reasoning`: the marks of reasoning, if it can begin with some; `stops`: texts that end it.
class GrowingText {
 public:
  GrowingText(const Tokenizer& tokenizer, bool raw, const Tokens& before, const ReasoningMarks& reasoning = {},
              const std::vector<std::string>& stops = {})
      : decoder(tokenizer, raw ? Skip::none : Skip::special),
        tokenizer(tokenizer),
        raw(raw),
        marks(reasoning),
        stops(stops) {
    for (const std::int32_t token : before) decoder.add(token);
  }

  // Decodes the newest token. Text is missing while a character is incomplete. A stop text ends it.
  void add(Continuation& text) {
    const std::int32_t token = text.tokens.back();
    const std::size_t before = all.size();
    if (raw || text.end != Ending::stop)
      all += is_mark(token) && !raw ? tokenizer.decode({&token, 1}) : decoder.add(token);
    if (text.end != Ending::none) all += decoder.finish();
    std::size_t end = std::string::npos;
    for (const std::string& stop : stops) end = std::min(end, all.find(stop, before - std::min(before, stop.size())));
    if (end != std::string::npos) all.resize(end), text.end = Ending::text;
    ended = text.end != Ending::none;
  }
  Reasoned reasoned() const { return split_reasoning(all, marks); }

  // Prints what is new, but nothing that may begin a stop text. On a terminal, reasoning is dim.
  void show_more() {
    std::size_t size = all.size();
    for (const std::string& stop : stops)
      for (std::size_t n = std::min(stop.size(), all.size()); n > 0 && !ended; --n)
        if (all.ends_with(std::string_view(stop).substr(0, n))) size = std::min(size, all.size() - n);
    const std::size_t begin = std::exchange(shown, size);
    const std::string_view more = std::string_view(all).substr(begin, size - begin);
    const std::size_t end = reasoning_end(all, marks), dim = end <= begin ? 0 : std::min(end - begin, more.size());
    const bool dims = dim > 0 && !raw && isatty(STDOUT_FILENO);
    if (dims) print("\033[2m");
    show(more.substr(0, dim), raw);
    if (dims) print("\033[22m");
    show(more.substr(dim), raw);
  }

 private:
  // Marks are often special tokens, which are not shown otherwise.
  bool is_mark(std::int32_t token) const {
    return token == tokenizer.find(marks.open) || token == tokenizer.find(marks.close);
  }

  StreamingDecoder decoder;
  const Tokenizer& tokenizer;
  bool raw;
  ReasoningMarks marks;
  std::vector<std::string> stops;
  std::string all;
  std::size_t shown = 0;  // bytes
  bool ended = false;
};

// Prints parallel completions in order, each under its heading. The first unfinished one is streamed; the others are
// printed after it.
class Display {
 public:
  Display(Index room, bool raw) : room(room), raw(raw) {}

  void open(const std::string& heading, GrowingText text) { texts.push_back({heading, std::move(text)}); }

  void add(std::size_t number, Continuation& text) {
    Entry& entry = texts[number];
    entry.text.add(text);
    entry.ended = text.end != Ending::none;
    if (text.end == Ending::room) entry.note = note(text, room);
    while (front < texts.size() && show_front()) ++front;
  }
  Reasoned text(std::size_t number) const { return texts[number].text.reasoned(); }

 private:
  struct Entry {
    std::string heading;
    GrowingText text;
    std::string note = "";
    bool ended = false;
  };

  // Prints the new part of the first unfinished completion. Returns whether it is now finished.
  bool show_front() {
    Entry& entry = texts[front];
    if (!opened) show(entry.heading, raw), opened = true;
    entry.text.show_more();
    if (!entry.ended) return false;
    show("\n", raw);
    if (!entry.note.empty()) print_error("%s\n", entry.note);
    opened = false;
    return true;
  }

  Index room;
  bool raw, opened = false;
  std::vector<Entry> texts;
  std::size_t front = 0;
};

}  // namespace streambp
