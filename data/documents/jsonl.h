// Training examples, as JSON objects (docs/fine-tuning.md has their forms). A file has one object per line, or a list
// of them. Prompts and answers are texts or lists of messages; without a prompt, "chosen" and "rejected" are whole
// conversations. Completions of a group may be token ids, with "advantages" instead of "rewards", and with "old_logps",
// the log-probs of their tokens when they were sampled. A message with "weight": 0 or "train": false is not learned.
#pragma once

#include <cmath>

#include "data/documents/chat.h"
#include "data/files/files.h"
#include "data/files/lines.h"

namespace streambp {

struct Example {
  enum Kind { conversation, completion, text, preference, group } kind;
  Conversation chat = {};
  std::size_t first = 0;  // the loss covers answers from this message on
  std::string prompt = "", written = "";
  std::vector<std::int32_t> tokens = {};      // a completion given as tokens instead of text
  std::vector<Example> sides = {};            // chosen and rejected; or the completions of a group
  std::vector<double> rewards = {};           // of the completions
  bool relative = false;                      // the rewards are already advantages
  std::vector<std::vector<double>> old = {};  // log-probs when sampled, of each completion; empty: unknown
  std::string form = "";                      // the members that hold it, for messages
};

constexpr JsonLimits kLineLimits = {.values = 2'000'000, .depth = 32};

// Numbers beyond those of a double are infinite, as in Python, but the parser refuses them. So they are replaced by an
// integer that stands for infinity and does not occur in the line.
inline OrderedJson parse_as_python(std::string_view line) {
  try {
    return parse_json<OrderedJson>(line, kLineLimits);
  } catch (const BadJson& error) {
    if (!std::string_view(error.what()).starts_with("not valid JSON: number overflow")) throw;
  }
  std::string infinity(25, '9'), text;
  while (line.find(infinity) != line.npos) infinity += '9';
  for (std::size_t at = 0, end; at < line.size(); at = end) {
    end = at + 1;
    if (line[at] == '"') {
      while (end < line.size() && line[end] != '"') end += line[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, line.size());
    } else if (const std::size_t sign = line[at] == '-';
               at + sign < line.size() && line[at + sign] >= '0' && line[at + sign] <= '9') {
      end = std::min(line.find_first_not_of("0123456789+-.eE", at), line.size());
      const std::string number(line.substr(at + sign, end - at - sign));
      if (number.find_first_of(".eE") != number.npos && std::isinf(std::strtod(number.c_str(), nullptr))) {
        text += (sign ? "-" : "") + infinity;
        continue;
      }
    }
    text += line.substr(at, end - at);
  }
  return parse_json<OrderedJson>(text, {kLineLimits.values, kLineLimits.depth, infinity});
}

inline OrderedJson parse_line(std::string_view line) {
  try {
    OrderedJson json = parse_as_python(line);
    require_data(json.is_object(), "not a JSON object, {...}");
    return json;
  } catch (const BadJson& error) {
    throw BadData(error.what());
  }
}

// Exported tables have null for missing members.
inline bool has_member(const OrderedJson& json, const char* name) {
  return json.contains(name) && !json[name].is_null();
}

// JSON as a template's value. Objects with very many members would be slow there.
inline jinja::Value data_value(const OrderedJson& json) {
  try {
    return jinja::from_json(json);
  } catch (const jinja::TemplateError& error) {
    throw BadData(error.what());
  }
}

// "weight" is 0 or 1, "train" true or false.
inline bool is_learned(const OrderedJson& message, const std::string& where) {
  for (const char* name : {"weight", "train"}) {
    if (!has_member(message, name)) continue;
    const OrderedJson& value = message[name];
    require_data(value == 0 || value == 1 || value.is_boolean(), where, "\"", name, "\" must be 0 or 1, or a boolean");
    if (value == 0 || value == false) return false;
  }
  return true;
}

inline void require_text(const OrderedJson& content, const std::string& where) {
  if (content.is_null() || content.is_string() || content.is_object()) return;
  require_data(content.is_array(), where, "\"content\" is not a string");
  for (const OrderedJson& part : content) {
    require_data(part.is_object() && part.contains("type"), where, "\"content\" has a part without a type");
    require_data(part["type"] == "text", where, "\"content\" has a part of type ", part["type"].dump(),
                 "; only text is supported");
    require_data(part.contains("text") && part["text"].is_string(), where, "a part of \"content\" has no text");
  }
}

inline std::vector<Message> parse_messages(const OrderedJson& list, const char* name) {
  require_data(list.is_array(), "\"", name, "\" is not a list of messages");
  std::vector<Message> messages;
  for (const OrderedJson& entry : list) {
    const std::string where = std::string(name) + ", message " + std::to_string(messages.size() + 1) + ": ";
    require_data(entry.is_object(), where, "not an object with role and content");
    require_data(has_member(entry, "role") && entry["role"].is_string(), where, "no \"role\"");
    require_data(!has_member(entry, "function_call"), where,
                 "\"function_call\" is not read by chat templates; write it as ",
                 R"("tool_calls": [{"type": "function", "function": {"name": ..., "arguments": {...}}}])");
    require_data(has_member(entry, "tool_calls") || has_member(entry, "content"), where, "no \"content\"");
    if (entry.contains("content")) require_text(entry["content"], where);
    jinja::Dict message = *data_value(entry).dict();  // without nulls, as in transformers' apply_chat_template
    std::erase_if(message.members, [](const auto& member) { return member.second.none(); });
    messages.emplace_back(jinja::Dict{std::move(message.members)}).learned = is_learned(entry, where);
  }
  return messages;
}

// Lists, also as text that holds JSON, as tables store them.
inline OrderedJson parse_list(const OrderedJson& json, const char* name) {
  try {
    OrderedJson list = json.is_string() ? parse_json<OrderedJson>(json.get<std::string>(), kLineLimits) : json;
    require_data(list.is_array(), "\"", name, "\" is not a list");
    return list;
  } catch (const BadJson& error) {
    throw BadData("\"" + std::string(name) + "\" is text that is " + error.what());
  }
}

// What a conversation has besides its messages.
inline Conversation parse_surroundings(const OrderedJson& json) {
  Conversation chat;
  if (has_member(json, "tools")) {
    const OrderedJson tools = parse_list(json["tools"], "tools");
    if (!tools.empty()) chat.tools = data_value(tools);
  }
  if (!has_member(json, "chat_template_kwargs")) return chat;
  const OrderedJson& variables = json["chat_template_kwargs"];
  require_data(variables.is_object(), "\"chat_template_kwargs\" is not an object");
  for (const auto& [name, value] : variables.items()) {
    require_free_variable(name, "\"chat_template_kwargs\"");
    chat.variables.emplace_back(name, data_value(value));
  }
  return chat;
}

inline Example conversation_of(const OrderedJson& line, std::vector<Message> messages) {
  Example example{.kind = Example::conversation, .chat = parse_surroundings(line)};
  example.chat.messages = std::move(messages);
  return example;
}

// ShareGPT's names of roles.
inline Example parse_sharegpt(const OrderedJson& line) {
  static const std::map<std::string, const char*> roles = {
      {"human", "user"},          {"user", "user"},        {"gpt", "assistant"},
      {"assistant", "assistant"}, {"bot", "assistant"},    {"system", "system"},
      {"tool", "tool"},           {"observation", "tool"}, {"function_response", "tool"}};
  OrderedJson messages = OrderedJson::array();
  const OrderedJson list = parse_list(line["conversations"], "conversations");
  if (has_member(line, "system")) messages.push_back({{"role", "system"}, {"content", line["system"]}});
  for (const OrderedJson& entry : list) {
    const std::string where = "conversations, message " + std::to_string(messages.size() + 1) + ": ";
    require_data(entry.is_object(), where, "not an object with from and value");
    if (has_member(entry, "role")) {
      messages.push_back(entry);
      continue;
    }
    require_data(has_member(entry, "from") && entry["from"].is_string() && has_member(entry, "value"), where,
                 "no \"from\" and \"value\"");
    const auto role = roles.find(entry["from"].get<std::string>());
    require_data(role != roles.end(), where, "the role ", entry["from"].dump(),
                 " is not known; name it human, gpt, system or tool");
    OrderedJson message = {{"role", role->second}, {"content", entry["value"]}};
    for (const char* name : {"weight", "train"})
      if (entry.contains(name)) message[name] = entry[name];
    messages.push_back(std::move(message));
  }
  return conversation_of(line, parse_messages(messages, "conversations"));
}

inline Example parse_alpaca(const OrderedJson& line) {
  for (const char* name : {"instruction", "output"})
    require_data(has_member(line, name) && line[name].is_string(), "\"", name, "\" is not a string");
  std::string question = line["instruction"].get<std::string>();
  if (has_member(line, "input")) {
    require_data(line["input"].is_string(), "\"input\" is not a string");
    const auto input = line["input"].get<std::string>();
    if (!input.empty()) question += "\n\n" + input;
  }
  for (const char* name : {"system", "history"})
    require_data(!has_member(line, name) || line[name].empty() || line[name] == "", "\"", name,
                 "\" beside \"instruction\" is ",
                 R"(not read; write the conversation as "messages": [{"role": ..., "content": ...}, ...])");
  return conversation_of(line, {{"user", question}, {"assistant", line["output"].get<std::string>()}});
}

inline Example parse_completion(const OrderedJson& line, const OrderedJson& prompt, const OrderedJson& completion,
                                const char* name) {
  if (prompt.is_array()) {
    Example example = conversation_of(line, parse_messages(prompt, "prompt"));
    example.first = example.chat.messages.size();
    for (Message& message : parse_messages(completion, name)) example.chat.messages.push_back(std::move(message));
    return example;
  }
  require_data(prompt.is_string() && completion.is_string(), "\"prompt\" and \"", name,
               "\" must both be text, or both be lists of messages");
  return {.kind = Example::completion, .prompt = prompt.get<std::string>(), .written = completion.get<std::string>()};
}

// The prompt of two conversations is their common prefix, even if it is longer than the line's "prompt". A "prompt"
// string may repeat the first question.
inline Example parse_preference(const OrderedJson& line) {
  const OrderedJson empty = OrderedJson::array();
  const OrderedJson &prompt = has_member(line, "prompt") ? line["prompt"] : empty, &chosen = line["chosen"],
                    &rejected = line["rejected"];
  Example example{.kind = Example::preference};
  const char* names[] = {"chosen", "rejected"};
  const bool repeated = prompt.is_string() && chosen.is_array() && rejected.is_array();
  const OrderedJson& begin = repeated ? empty : prompt;
  example.sides = {parse_completion(line, begin, chosen, names[0]), parse_completion(line, begin, rejected, names[1])};
  for (std::size_t i = 0; i < 2 && repeated; ++i) {
    const auto& messages = example.sides[i].chat.messages;
    const auto first = std::ranges::find_if(messages, [](const Message& m) { return m.has_role("user"); });
    require_data(first != messages.end() && first->content() == prompt, "\"", names[i],
                 "\" is a list of messages that does not start with the \"prompt\"");
  }
  const auto &a = example.sides[0].chat.messages, &b = example.sides[1].chat.messages;
  require_data(a != b || example.sides[0].written != example.sides[1].written,
               "nothing to prefer: \"chosen\" and \"rejected\" are equal");
  const auto common = static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  for (const std::size_t i : {0, 1}) {
    Example& side = example.sides[i];
    const bool conversation = side.kind == Example::conversation;
    const std::vector<Message>& messages = side.chat.messages;
    require_data(!conversation || common < messages.size(), "\"", names[i],
                 "\" has no answer: all its messages are in the common prefix");
    require_data(!conversation || messages[common].has_role("assistant"), "\"", names[i],
                 "\" differs from the other at message ", common + 1, ", which is not an assistant message");
    const bool empty_answer = conversation ? messages[common].empty() : side.written.empty();
    require_data(!empty_answer, "\"", names[i], "\" is an empty answer");
    side.first = common;
  }
  return example;
}

// A list of finite numbers.
inline std::vector<double> parse_numbers(const OrderedJson& list, const std::string& name) {
  require_data(list.is_array(), name, " is not a list of numbers");
  std::vector<double> numbers;
  for (const OrderedJson& number : list) {
    require_data(number.is_number() && std::isfinite(number.get<double>()), name, ", entry ", numbers.size() + 1,
                 ": not a finite number");
    numbers.push_back(number.get<double>());
  }
  return numbers;
}

// A completion as the token ids that a model sampled. The tokenizer may split the same text differently.
inline Example parse_sampled(const OrderedJson& line, const OrderedJson& tokens, const std::string& name) {
  Example example{.kind = Example::completion};
  const OrderedJson& prompt = line["prompt"];
  if (prompt.is_array()) {
    example = conversation_of(line, parse_messages(prompt, "prompt"));
    require_data(!example.chat.messages.empty(), "\"prompt\" has no message");
  } else {
    require_data(prompt.is_string(), "\"prompt\" is neither a string nor a list of messages");
    example.prompt = prompt.get<std::string>();
  }
  for (const OrderedJson& token : tokens) {
    require_data(token.is_number_unsigned() && token.get<std::uint64_t>() < INT32_MAX, name, ": not a list of tokens");
    example.tokens.push_back(token.get<std::int32_t>());
  }
  return example;
}

inline Example parse_group(const OrderedJson& json) {
  require_data(has_member(json, "prompt"), "\"completions\" without a \"prompt\"");
  const OrderedJson& completions = json["completions"];
  require_data(completions.is_array() && !completions.empty(), "\"completions\" is not a list of completions");
  require_repeatable("the prompt", text_of(json["prompt"]).size(), completions.size());
  Example example{.kind = Example::group};
  for (const OrderedJson& completion : completions) {
    const std::string name = "completion " + std::to_string(example.sides.size() + 1);
    require_data(!completion.is_array() || !completion.empty(), name, ": an empty list");
    const bool sampled = completion.is_array() && completion[0].is_number();
    example.sides.push_back(sampled ? parse_sampled(json, completion, name)
                                    : parse_completion(json, json["prompt"], completion, name.c_str()));
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
  const OrderedJson& old = json["old_logps"];
  require_data(old.is_array() && old.size() == n, "\"old_logps\" is not a list of ", n, " lists of numbers");
  for (const OrderedJson& numbers : old) example.old.push_back(parse_numbers(numbers, "\"old_logps\""));
  return example;
}

// What to name members that are not read.
inline std::string other_names(const OrderedJson& json) {
  constexpr const char* others[][2] = {{"question", "prompt"},   {"query", "prompt"},        {"instruction", "prompt"},
                                       {"answer", "completion"}, {"response", "completion"}, {"output", "completion"}};
  std::string all;
  for (const auto& [name, known] : others)
    if (has_member(json, name))
      all += std::string(all.empty() ? "; name " : " and ") + quote(name) + " " + quote(known);
  return all;
}

inline Example parse_form(const OrderedJson& json) {
  const auto has = [&](const char* name) { return has_member(json, name); };
  const auto has_list = [&](const char* name) { return has(name) && json[name].is_array(); };
  const bool preference = has("chosen") || has("rejected");
  const bool answers = has("completion") || has("messages");
  const bool avoided =
      answers && has("label") && (json["label"] == false || json["label"] == 0 || json["label"] == "false");
  require_data(!avoided, "\"label\" is false: an answer to avoid (KTO), which is not supported; ",
               R"(leave it out, or make pairs of "chosen" and "rejected")");
  require_data(!answers || !has("system") || json["system"].empty() || json["system"] == "",
               R"("system" beside the conversation is not read; make it the first message: )",
               R"({"role": "system", "content": ...})");
  require_data(!has("text") || !(has("instruction") && has("output")),
               R"(both "instruction" with "output", of which the )",
               R"(output is learned, and "text", of which all is learned; remove one of them)");
  // Published preference data often repeats the chosen conversation as "messages".
  const bool repeated = has("messages") && has_list("chosen") && json["messages"] == json["chosen"];
  const bool conversation = has("messages") && (!repeated || json["chosen"].empty());
  require_data(
      conversation + has("conversations") + has("completion") + has("completions") + has("text") + preference <= 1,
      "more than one of \"messages\", \"conversations\", \"completion\", \"completions\", \"text\" and "
      "\"chosen\"");
  if (conversation) return conversation_of(json, parse_messages(parse_list(json["messages"], "messages"), "messages"));
  if (has("conversations")) return parse_sharegpt(json);
  if (has("completion")) {
    require_data(has("prompt"), "a \"completion\" without a \"prompt\"");
    return parse_completion(json, json["prompt"], json["completion"], "completion");
  }
  if (has("completions")) return parse_group(json);
  if (preference) {
    for (const char* name : {"chosen", "rejected"}) require_data(has(name), "a preference without \"", name, "\"");
    return parse_preference(json);
  }
  if (has("instruction") && has("output")) return parse_alpaca(json);
  require_data(!has("prompt"),
               "a \"prompt\" without a completion; to sample completions, use train --objective grpo with --reward or "
               "--reward-cmd");
  require_data(has("text"),
               "none of \"messages\", \"conversations\", \"prompt\" and \"completion\", \"instruction\" and "
               "\"output\", \"text\", \"chosen\" and \"rejected\"",
               other_names(json));
  require_data(json["text"].is_string(), "\"text\" is not a string");
  return {.kind = Example::text, .written = json["text"].get<std::string>()};
}

// Which members hold the example, and whether they are text or messages.
inline std::string form_of(const OrderedJson& json, const Example& example) {
  const char* prompt = has_member(json, "prompt") ? "prompt, " : "";
  if (example.kind == Example::text) return "text";
  if (example.kind == Example::group) return "prompt, completions";
  if (example.kind == Example::preference)
    return std::string(prompt) + "chosen, rejected" + (json["chosen"].is_array() ? " as messages" : "");
  if (has_member(json, "completion"))
    return std::string(prompt) + "completion" + (json["prompt"].is_array() ? " as messages" : "");
  return has_member(json, "messages")        ? "messages"
         : has_member(json, "conversations") ? "conversations"
                                             : "instruction, output";
}

inline Example parse_example(std::string_view line) {
  const OrderedJson json = parse_line(line);
  Example example = parse_form(json);
  example.form = form_of(json, example);
  return example;
}

}  // namespace streambp
