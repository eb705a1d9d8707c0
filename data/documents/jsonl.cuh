// Training examples, one JSON object a line:
//
//   {"messages": [{"role": "user", "content": "..."}, ...]}     a conversation
//   {"prompt": "...", "completion": "..."}                      text, rendered already; or both are lists of messages
//   {"text": "..."}                                             text
//   {"prompt": "...", "chosen": "...", "rejected": "..."}       a preference between two completions, in either form;
//                                                               without a prompt they are whole conversations
//   {"prompt": "...", "completions": [...], "rewards": [...]}   a group: completions, in either form or as tokens, and
//                                                               what each is worth; instead of "rewards" one may give
//                                                               "advantages", and besides "old_logps", of each a list
//                                                               with the log-probability of every token
//
// Other members are left alone, except those that would change what a model reads: such a line is refused, not half
// understood.
#pragma once

#include <cmath>
#include <cstdio>
#include <memory>
#include <set>

#include "data/documents/chat.cuh"

namespace streambp {

// The lines of a file that may be larger than memory, without their ends and without a byte order mark.
class Lines {
 public:
  static constexpr std::size_t kLongest = std::size_t{1} << 26;

  explicit Lines(const std::filesystem::path& path, std::size_t longest = kLongest) : path_(path), longest_(longest) {
    bytes_ = regular_file_size(path);
    file_.reset(std::fopen(path.c_str(), "rb"));
    require(file_ != nullptr, path.string(), ": cannot read: ", std::strerror(errno), "; check its permissions");
    block_.resize(1 << 20);
  }

  bool next(std::string& line) {
    line.clear();
    ++number_;
    bool any = false;
    for (bool complete = false; !complete;) {
      if (at_ == end_ && !fill()) {
        if (!any) return false;
        break;
      }
      any = true;
      const char* begin = block_.data() + at_;
      const auto* found = static_cast<const char*>(std::memchr(begin, '\n', end_ - at_));
      complete = found != nullptr;
      const std::size_t n = complete ? static_cast<std::size_t>(found - begin) : end_ - at_;
      require(line.size() + n <= longest_, where(), "a line of more than ", longest_,
              " bytes; is it one example a line?");
      line.append(begin, n);
      at_ += n + complete;
    }
    if (number_ == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
    if (line.ends_with('\r')) line.pop_back();
    return true;
  }

  // "file:17: ", the line last read.
  std::string where() const { return path_.string() + ":" + std::to_string(number_) + ": "; }
  // Of the file that have been read.
  double fraction() const { return bytes_ == 0 ? 1 : static_cast<double>(read_) / static_cast<double>(bytes_); }

 private:
  bool fill() {
    at_ = 0;
    end_ = std::fread(block_.data(), 1, block_.size(), file_.get());
    read_ += end_;
    require(!std::ferror(file_.get()), path_.string(), ": cannot read: ", std::strerror(errno));
    return end_ > 0;
  }

  struct Close {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::size_t longest_, bytes_ = 0, read_ = 0, at_ = 0, end_ = 0;
  std::unique_ptr<FILE, Close> file_;
  std::string block_;
  std::size_t number_ = 0;
};

struct Example {
  enum Kind { conversation, completion, text, preference, group } kind;
  std::vector<Message> messages = {};
  std::size_t first = 0;  // answers from this message on are to be learned
  std::string prompt = "", written = "";
  std::vector<std::int32_t> tokens = {};  // that follow, instead of a written completion
  // What is compared: a preference's two answers, chosen and rejected, or those of a group.
  std::vector<Example> sides = {};
  std::vector<double> rewards = {};
  bool relative = false;  // the rewards are advantages already
  std::vector<std::vector<double>> old = {};
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

// What would change the text that a model reads, and is not written by any layout here.
inline void refuse_members(const Json& object, const std::string& where, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const bool there = object.contains(name) && !object[name].is_null() && !object[name].empty();
    require_data(!there, where, "\"", name, "\" is not supported; remove it, or render the text yourself");
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
      require_data(entry[key].is_string(), where, "\"", key, "\" is not a text");
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
               "\" must both be text, or both lists of messages");
  return {.kind = Example::completion, .prompt = prompt.get<std::string>(), .written = completion.get<std::string>()};
}

// Of two conversations the prompt is all that both begin with, also where the line ends it before: in that there is
// nothing to prefer. It may stand there once more as a text.
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
                 "\" is a list of messages that does not begin with the \"prompt\"");
  }
  const auto &a = example.sides[0].messages, &b = example.sides[1].messages;
  require_data(a != b || example.sides[0].written != example.sides[1].written,
               "nothing to prefer: \"chosen\" and \"rejected\" are the same");
  const auto common = static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  for (const std::size_t i : {0, 1}) {
    Example& side = example.sides[i];
    const bool conversation = side.kind == Example::conversation;
    require_data(!conversation || common < side.messages.size(), "\"", names[i],
                 "\" has no message besides those that both begin with");
    require_data(!conversation || side.messages[common].role == "assistant", "\"", names[i],
                 "\" parts from the other at message ", common + 1, ", which is not the assistant's");
    require_data(!(conversation ? side.messages[common].content : side.written).empty(), "\"", names[i],
                 "\" is an empty answer");
    side.first = common;
  }
  return example;
}

// Tables have null where there is nothing.
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

// A completion that is tokens already: what a model sampled, also where its text would be tokenised otherwise.
inline Example parse_sampled(const Json& prompt, const Json& tokens, const std::string& name) {
  Example example{.kind = Example::completion};
  if (prompt.is_array()) {
    example.kind = Example::conversation;
    example.messages = parse_messages(prompt, "prompt");
    require_data(!example.messages.empty(), "\"prompt\" has no message");
  } else {
    require_data(prompt.is_string(), "\"prompt\" is neither a text nor a list of messages");
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
               "\"completions\" need \"rewards\" or \"advantages\": one of them");
  example.rewards = example.relative ? parse_numbers(json["advantages"], "\"advantages\"")
                                     : parse_numbers(json["rewards"], "\"rewards\"");
  const std::size_t n = example.sides.size();
  require_data(example.rewards.size() == n, "there are ", n, " completions, and ", example.rewards.size(), " \"",
               example.relative ? "advantages" : "rewards", "\"");
  require_data(example.relative || n > 1, "a group of one completion; there is nothing to compare its reward with");
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
  // Published preferences have the chosen conversation once more, as "messages".
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
               "a \"prompt\" and nothing that follows it; train --objective grpo completes prompts, with --reward or "
               "--reward-cmd");
  require_data(has("text"),
               "neither \"messages\" nor \"prompt\" and \"completion\" nor \"text\" nor \"chosen\" and \"rejected\"");
  require_data(json["text"].is_string(), "\"text\" is not a text");
  return {.kind = Example::text, .written = json["text"].get<std::string>()};
}

}  // namespace streambp
