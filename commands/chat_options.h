// The options that say how conversations become text.
#pragma once

#include "commands/option_table.h"
#include "data/documents/chat.h"

namespace streambp {

constexpr const char* kChatHelp = "Chat template to use instead of the model's: a Jinja file, or chatml";

// All but --chat
inline void add_rendering_options(OptionTable& options, ChatOptions& chat) {
  if (chat.date.empty()) chat.date = today();
  options.add("--date", &chat.date, "The date that chat templates see, YYYY-MM-DD", {}, "today");
  options.add("--template-arg", &chat.arguments,
              "Variables of the chat template: NAME=VALUE, such as enable_thinking=false");
  options.add("--trust-messages", &chat.trusts_messages,
              "Special tokens in messages are tokens, as in transformers; without this option they are text");
}

inline void add_chat_options(OptionTable& options, ChatOptions& chat) {
  options.add("--chat", &chat.given, kChatHelp, {}, "the model's");
  add_rendering_options(options, chat);
}

}  // namespace streambp
