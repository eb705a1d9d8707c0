// Training examples, one JSON object per line:
//
//   {"messages": [{"role": "user", "content": "..."}, ...]}     a conversation
//   {"prompt": "...", "completion": "..."}                      rendered text; or both are lists of messages
//   {"text": "..."}                                             text
//   {"prompt": "...", "chosen": "...", "rejected": "..."}       a preference between two completions, in either form;
//                                                               without a prompt, both are whole conversations
//   {"prompt": "...", "completions": [...], "rewards": [...]}   a GRPO group: completions, in either form or as token
//                                                               ids, and their rewards; or "advantages" instead of
//                                                               "rewards"; optionally "old_logps": for each completion
//                                                               the log-probs of its tokens when they were sampled
//
// Other members are ignored, unless they would change what the model reads; then the line is refused.
#pragma once

#include <cmath>

#include "data/documents/chat.h"
#include "data/files/lines.h"

namespace streambp {

struct Example {
  enum Kind { conversation, completion, text, preference, group } kind;
  std::vector<Message> messages = {};
  std::size_t first = 0;  // the loss covers answers from this message on
  std::string prompt = "", written = "";
  std::vector<std::int32_t> tokens = {};      // a completion given as tokens instead of text
  std::vector<Example> sides = {};            // chosen and rejected; or the completions of a group
  std::vector<double> rewards = {};           // of the completions
  bool relative = false;                      // the rewards are already advantages
  std::vector<std::vector<double>> old = {};  // log-probs when sampled, of each completion; empty: unknown
};

constexpr JsonLimits kLineLimits = {.values = 2'000'000, .depth = 32};

inline Json parse_line(std::string_view line) {
  try {
    Json json = parse_json(line, kLineLimits);
    require_data(json.is_object(), "not a JSON object, {...}");
    return json;
  } catch (const BadJson& error) {
    throw BadData(error.what());
  }
}

// Refuses members that would change the text that the model reads but that no layout supports.
inline void refuse_members(const Json& object, const std::string& where, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const bool there = object.contains(name) && !object[name].is_null() && !object[name].empty() && object[name] != "";
    require_data(!there, where, "\"", name, "\" is not supported; remove it, or use rendered text");
  }
}

inline std::vector<Message> parse_messages(const Json& list, const char* name) {
  require_data(list.is_array(), "\"", name, "\" is not a list of messages");
  std::vector<Message> messages;
  for (const Json& entry : list) {
    const std::string where = std::string(name) + ", message " + std::to_string(messages.size() + 1) + ": ";
    require_data(entry.is_object(), where, "not an object with role and content");
    refuse_members(entry, where,
                   {"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "weight", "train"});
    for (const char* key : {"role", "content"}) {
      require_data(entry.contains(key), where, "no \"", key, "\"");
      require_data(entry[key].is_string(), where, "\"", key, "\" is not a string");
    }
    messages.push_back({entry["role"].get<std::string>(), entry["content"].get<std::string>()});
  }
  return messages;
}

inline Example parse_completion(const Json& prompt, const Json& completion, const char* name) {
  if (prompt.is_array()) {
    Example example{.kind = Example::conversation, .messages = parse_messages(prompt, "prompt")};
    example.first = example.messages.size();
    for (Message& message : parse_messages(completion, name)) example.messages.push_back(std::move(message));
    return example;
  }
  require_data(prompt.is_string() && completion.is_string(), "\"prompt\" and \"", name,
               "\" must both be text, or both be lists of messages");
  return {.kind = Example::completion, .prompt = prompt.get<std::string>(), .written = completion.get<std::string>()};
}

// The prompt of two conversations is their common prefix, even if it is longer than the line's "prompt". A "prompt"
// string may repeat the first question.
inline Example parse_preference(const Json& prompt, const Json& chosen, const Json& rejected) {
  Example example{.kind = Example::preference};
  const char* names[] = {"chosen", "rejected"};
  const bool repeated = prompt.is_string() && chosen.is_array() && rejected.is_array();
  const Json& begin = repeated ? Json::array() : prompt;
  example.sides = {parse_completion(begin, chosen, names[0]), parse_completion(begin, rejected, names[1])};
  for (std::size_t i = 0; i < 2 && repeated; ++i) {
    const auto& messages = example.sides[i].messages;
    const auto first = std::ranges::find(messages, "user", &Message::role);
    require_data(first != messages.end() && first->content == prompt, "\"", names[i],
                 "\" is a list of messages that does not start with the \"prompt\"");
  }
  const auto &a = example.sides[0].messages, &b = example.sides[1].messages;
  require_data(a != b || example.sides[0].written != example.sides[1].written,
               "nothing to prefer: \"chosen\" and \"rejected\" are equal");
  const auto common = static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  for (const std::size_t i : {0, 1}) {
    Example& side = example.sides[i];
    const bool conversation = side.kind == Example::conversation;
    require_data(!conversation || common < side.messages.size(), "\"", names[i],
                 "\" has no answer: all its messages are in the common prefix");
    require_data(!conversation || side.messages[common].role == "assistant", "\"", names[i],
                 "\" differs from the other at message ", common + 1, ", which is not an assistant message");
    require_data(!(conversation ? side.messages[common].content : side.written).empty(), "\"", names[i],
                 "\" is an empty answer");
    side.first = common;
  }
  return example;
}

// Exported tables have null for missing members.
inline bool has_member(const Json& json, const char* name) { return json.contains(name) && !json[name].is_null(); }

// A list of finite numbers.
inline std::vector<double> parse_numbers(const Json& list, const std::string& name) {
  require_data(list.is_array(), name, " is not a list of numbers");
  std::vector<double> numbers;
  for (const Json& number : list) {
    require_data(number.is_number() && std::isfinite(number.get<double>()), name, ", entry ", numbers.size() + 1,
                 ": not a finite number");
    numbers.push_back(number.get<double>());
  }
  return numbers;
}

// A completion as the token ids that a model sampled. The tokenizer may split the same text differently.
inline Example parse_sampled(const Json& prompt, const Json& tokens, const std::string& name) {
  Example example{.kind = Example::completion};
  if (prompt.is_array()) {
    example.kind = Example::conversation;
    example.messages = parse_messages(prompt, "prompt");
    require_data(!example.messages.empty(), "\"prompt\" has no message");
  } else {
    require_data(prompt.is_string(), "\"prompt\" is neither a string nor a list of messages");
    example.prompt = prompt.get<std::string>();
  }
  for (const Json& token : tokens) {
    require_data(token.is_number_unsigned() && token.get<std::uint64_t>() < INT32_MAX, name, ": not a list of tokens");
    example.tokens.push_back(token.get<std::int32_t>());
  }
  return example;
}

inline Example parse_group(const Json& json) {
  require_data(has_member(json, "prompt"), "\"completions\" without a \"prompt\"");
  const Json& completions = json["completions"];
  require_data(completions.is_array() && !completions.empty(), "\"completions\" is not a list of completions");
  require_repeatable("the prompt", json["prompt"].dump(-1, ' ', false, Json::error_handler_t::replace).size(),
                     completions.size());
  Example example{.kind = Example::group};
  for (const Json& completion : completions) {
    const std::string name = "completion " + std::to_string(example.sides.size() + 1);
    require_data(!completion.is_array() || !completion.empty(), name, ": an empty list");
    const bool sampled = completion.is_array() && completion[0].is_number();
    example.sides.push_back(sampled ? parse_sampled(json["prompt"], completion, name)
                                    : parse_completion(json["prompt"], completion, name.c_str()));
  }
  example.relative = has_member(json, "advantages");
  require_data(has_member(json, "rewards") != example.relative,
               "\"completions\" need either \"rewards\" or \"advantages\"");
  example.rewards = example.relative ? parse_numbers(json["advantages"], "\"advantages\"")
                                     : parse_numbers(json["rewards"], "\"rewards\"");
  const std::size_t n = example.sides.size();
  require_data(example.rewards.size() == n, "there are ", n, " completions, but ", example.rewards.size(), " \"",
               example.relative ? "advantages" : "rewards", "\"");
  require_data(example.relative || n > 1, "a group of one completion: its reward cannot be compared");
  if (!has_member(json, "old_logps")) return example;
  const Json& old = json["old_logps"];
  require_data(old.is_array() && old.size() == n, "\"old_logps\" is not a list of ", n, " lists of numbers");
  for (const Json& numbers : old) example.old.push_back(parse_numbers(numbers, "\"old_logps\""));
  return example;
}

inline Example parse_example(std::string_view line) {
  const Json json = parse_line(line);
  const auto has = [&](const char* name) { return has_member(json, name); };
  const auto has_list = [&](const char* name) { return has(name) && json[name].is_array(); };
  const bool preference = has("chosen") || has("rejected");
  // Published preference data often repeats the chosen conversation as "messages".
  const bool repeated = has("messages") && has_list("chosen") && json["messages"] == json["chosen"];
  const bool conversation = has("messages") && (!repeated || json["chosen"].empty());
  require_data(conversation + has("completion") + has("completions") + has("text") + preference <= 1,
               "more than one of \"messages\", \"completion\", \"completions\", \"text\" and \"chosen\"");
  if (conversation || has_list("prompt") || has_list("chosen")) refuse_members(json, "", {"tools", "functions"});
  if (conversation) return {.kind = Example::conversation, .messages = parse_messages(json["messages"], "messages")};
  if (has("completion")) {
    require_data(has("prompt"), "a \"completion\" without a \"prompt\"");
    return parse_completion(json["prompt"], json["completion"], "completion");
  }
  if (has("completions")) return parse_group(json);
  if (preference) {
    for (const char* name : {"chosen", "rejected"}) require_data(has(name), "a preference without \"", name, "\"");
    return parse_preference(has("prompt") ? json["prompt"] : Json::array(), json["chosen"], json["rejected"]);
  }
  require_data(!has("prompt"),
               "a \"prompt\" without a completion; to sample completions, use train --objective grpo with --reward or "
               "--reward-cmd");
  require_data(has("text"),
               "none of \"messages\", \"prompt\" and \"completion\", \"text\", \"chosen\" and \"rejected\"");
  require_data(json["text"].is_string(), "\"text\" is not a string");
  return {.kind = Example::text, .written = json["text"].get<std::string>()};
}

}  // namespace streambp
