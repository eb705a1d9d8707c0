// A chat on a terminal.
#pragma once

#include <clocale>
#include <iostream>

#include "commands/display.h"
#include "commands/help.h"
#include "training/engine.h"
#include "training/grpo/prompts.h"
#ifdef STREAMBP_EDITLINE
#include <editline/readline.h>
#endif

namespace streambp {

// Lines of the user. With libedit, they can be edited, and earlier ones be recalled.
struct LineReader {
#ifdef STREAMBP_EDITLINE
  const bool edits = isatty(STDOUT_FILENO);
  LineReader() {
    if (!edits) return;
    if (!std::setlocale(LC_CTYPE, "C.UTF-8")) std::setlocale(LC_CTYPE, "");
    rl_initialize();
    rl_bind_key('\t', rl_insert);  // not the names of files
  }
#else
  const bool edits = false;
#endif

  bool next(std::string& line) const {
    show(edits ? "\n" : "\n> ", false);
#ifdef STREAMBP_EDITLINE
    if (edits) {
      const std::unique_ptr<char, void (*)(void*)> typed(readline("> "), std::free);
      if (typed && *typed) add_history(typed.get());
      line = typed ? typed.get() : "";
      return typed != nullptr;
    }
#endif
    return static_cast<bool>(std::getline(std::cin, line));
  }
};

// The speed of generating tokens.
struct GenerationTime {
  const Stopwatch watch = {};
  double first = 0, all = 0;                    // seconds until the first token, and the last one
  Index tokens = 0, first_step = 0, steps = 0;  // steps after the first sampled token
  void drawn(Index step) {
    if (tokens++ == 0) first = watch.seconds(), first_step = step;
  }
  void stop(Index step) { all = watch.seconds(), steps = step - first_step; }
};

struct TerminalChat {
  TextGenerator& generator;
  Prompter& prompter;
  const GenerationSettings settings;
  const std::function<void(const Tokens& prompt)> check;           // refuses what the model cannot read
  const std::function<GrowingText(const Tokens& prompt)> growing;  // the answer
  const std::function<void(const GenerationTime&)> report;         // of each answer
  const LineReader reader = {};
  Conversation conversation = {};
  Tokens known = {};  // what the model has read and written

  void run() {
    std::vector<Message>& messages = conversation.messages;
    for (std::string line; reader.next(line) && line != "/quit";) {
      if (line == "/reset" || !prompter.chat) messages.clear(), known.clear();
      if (line.empty() || line == "/reset" || answers_command(line)) continue;
      const bool of_tool = line.starts_with(kTool);
      messages.push_back({of_tool ? "tool" : "user", of_tool ? line.substr(kTool.size()) : line});
      Tokens asked;
      try {
        messages.push_back(answer(asked = prompt()));
      } catch (const Error& error) {
        if (!asked.empty()) throw;  // the message is not the reason
        print("[%s]\n", error.what());
        messages.pop_back();
      }
    }
    print("\n");
  }

 private:
  static constexpr std::string_view kTool = "/tool ";

  // What looks like a command does not reach the model.
  bool answers_command(const std::string& line) const {
    const std::string word = line.substr(0, line.find(' '));
    if (line[0] != '/' || word.find('/', 1) != word.npos || line.starts_with(kTool)) return false;
    if (line == "/help") {
      show(help_entry("/reset", "start a new conversation") +
               help_entry("/tool TEXT", "answer a call of a tool (see --tools)") +
               help_entry("/quit or Ctrl-D", "end the chat") +
               "A line that begins with a space goes to the model, whatever follows.\n" +
               (reader.edits ? "The keys Up and Down recall earlier lines.\n" : ""),
           false);
      return true;
    }
    if (line == "/tool") {
      print("[write the answer of the tool after it: /tool TEXT]\n");
      return true;
    }
    const std::string guess = did_you_mean(word, {"/help", "/reset", "/quit", "/tool"});
    print("[%s is not a command; %s With a space before it, the line goes to the model]\n", line,
          guess.empty() ? "/help lists them." : guess);
    return true;
  }

  Tokens prompt() const {
    Tokens tokens = (prompter.chat ? prompter.conversation(conversation, known)
                                   : prompter.text(conversation.messages.back().content()))
                        .tokens;
    check(tokens);
    require(static_cast<Index>(tokens.size()) <= generator.room(), tokens.size(), " tokens exceed the context of ",
            generator.room(), "; /reset starts a new conversation");
    return tokens;
  }

  // The model's answer. Its tokens become known.
  Message answer(const Tokens& tokens) {
    GrowingText text = growing(tokens);
    GenerationTime watch;
    const auto reply = generator.generate({tokens}, settings, [&](std::size_t, Continuation& more) {
      watch.drawn(generator.steps());
      text.add(more);
      text.show_more();
    });
    watch.stop(generator.steps());
    const std::string said = note(reply.front(), generator.room());
    print("\n%s%s", said, Escape{said.empty() ? "" : "\n"});
    report(watch);
    known = tokens;
    known.insert(known.end(), reply.front().tokens.begin(), reply.front().tokens.end());
    const auto [thought, answer] = text.reasoned();
    std::vector<std::pair<jinja::Value, jinja::Value>> members = {{"role", "assistant"},
                                                                  {"content", jinja::to_text(answer, jinja::kData)}};
    if (!thought.empty()) members.emplace_back("reasoning_content", jinja::to_text(thought, jinja::kData));
    return Message(jinja::dict_of(std::move(members)));
  }
};

}  // namespace streambp
