// Conversations as text: the model's chat template, executed (text/template).
//
// A conversation reaches the template as transformers' apply_chat_template passes it, but for two things that published data
// and templates disagree on. Arguments of tool calls are objects, as at inference, unless the template wants strings. Content
// in parts becomes one string unless the template reads parts, and a string becomes a part if it reads nothing else.
//
// In an assistant's content the marks of reasoning, such as <think>, are the tokens that they are for the model. Other
// special tokens in messages are text.
#pragma once

#include <ctime>
#include <vector>

#include "data/documents/reasoning.h"
#include "data/files/tokenizer_config.h"
#include "text/template/template.h"

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

struct ChatOptions {
  std::string given = "";                   // a chat template to use instead of the model's: a file, or "chatml"
  std::string date = "";                    // that templates see, "YYYY-MM-DD"; empty: today
  bool trusts_messages = false;             // special tokens in messages are tokens, as in transformers
  std::vector<std::string> arguments = {};  // variables of the template: "NAME=VALUE", JSON or text
};

inline std::string today() {
  char text[16];
  const std::time_t now = std::time(nullptr);
  std::tm day = {};
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", localtime_r(&now, &day))};
}

// A dict with "role", "content" and whatever else the template reads.
struct Message {
  jinja::Value value;
  bool learned = true;  // false: the data say that it is not to be learned

  explicit Message(jinja::Value value) : value(std::move(value)) {}
  Message(const char* role, const std::string& content)
      : value(jinja::dict_of({{"role", role}, {"content", jinja::to_text(content, jinja::kData)}})) {}

  const jinja::Value* find(std::string_view member) const { return value.dict()->member(member); }
  bool has_role(std::string_view role) const { return jinja::equal(*find("role"), jinja::to_text(role)); }
  // "" if it is no text
  std::string content() const {
    const jinja::Value* content = find("content");
    return content && content->text() ? jinja::to_utf8(*content->text()) : "";
  }
  bool empty() const {
    const jinja::Value *text = find("content"), *calls = find("tool_calls");
    return !(text && jinja::is_true(*text)) && !(calls && jinja::is_true(*calls));
  }
  bool operator==(const Message& other) const { return jinja::equal(value, other.value); }
};

struct Conversation {
  std::vector<Message> messages = {};
  jinja::Value tools = jinja::None{};
  jinja::Variables variables = {};  // "chat_template_kwargs"

  Conversation first(std::size_t count) const {
    return {{messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(count)}, tools, variables};
  }
  bool operator==(const Conversation& other) const {
    return messages == other.messages && jinja::equal(tools, other.tools);
  }
};

// A rendered conversation. For each byte: is it the template's (0), text of the data (1), or a mark of reasoning in the data
// (2)? And is it in a {% generation %} block?
struct RenderedChat {
  std::string text, data, marked;
  std::string answers;                     // what is from the content of the assistant's messages
  std::size_t answer = std::string::npos;  // the first byte from the last message, if that is wanted

  RenderedChat() = default;
  // opened: the mark of reasoning that begins every answer, written by the generation prompt
  explicit RenderedChat(jinja::TextView rendered, const std::string& opened = "") {
    text.reserve(rendered.size());
    std::string spoken;                                                           // 1 for each such byte
    for (std::size_t begin = 0, end = 0; begin < rendered.size(); begin = end) {  // a run of equal marks
      const char32_t marks = rendered[begin] & ~jinja::kCode;
      while (end < rendered.size() && (rendered[end] & ~jinja::kCode) == marks) ++end;
      if ((marks & jinja::kAnswer) != 0) answer = std::min(answer, text.size());
      const std::size_t before = text.size();
      jinja::append_utf8(text, rendered.substr(begin, end - begin));
      spoken.resize(text.size(), (marks & jinja::kSpoken) != 0);
      if (spoken.back()) answers.append(text, before);
      data.resize(text.size(), (marks & jinja::kData) != 0), marked.resize(text.size(), (marks & jinja::kLearned) != 0);
    }
    for (const auto& [open, close] : kReasoningMarks) mark_reasoning(open, close, spoken, open == opened);
  }

 private:
  // Marks come in pairs: one that is alone in an answer is text. The template may have written the opening one.
  void mark_reasoning(const std::string& open, const std::string& close, const std::string& spoken, bool opened) {
    for (std::size_t end = 0, from = 0; (end = text.find(close, from)) != text.npos; from = end + close.size()) {
      const std::size_t back = std::string_view(text).substr(from, end - from).rfind(open), begin = from + back;
      if ((back == text.npos && !opened) || spoken.find('\0', end) < end + close.size()) continue;
      const bool in_answer = back != text.npos && spoken.find('\0', begin) > end;
      if (!in_answer && !opened && data[begin] != '\0') continue;
      data.replace(end, close.size(), close.size(), '\2');
      if (in_answer) data.replace(begin, open.size(), open.size(), '\2');
    }
  }
};

// What the conversation sets is no variable of the user's.
inline void require_free_variable(const std::string& name, const char* where) {
  for (const char* own : {"messages", "tools", "documents", "add_generation_prompt"})
    require_data(name != own, where, " cannot set \"", own, "\"; the conversation does");
}

// For models without a template.
constexpr const char* kChatml =
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

class Chat {
 public:
  // The model's template; or the one in this file, or "chatml".
  static Chat of(const fs::path& model, const ChatOptions& options = {}) {
    const std::string& given = options.given;
    const auto compile = [&](const std::string& text, const std::string& name) {
      try {
        return Chat(text, name, read_text_tokens(model), options);
      } catch (const jinja::TemplateError& error) {
        fail(name, ": ", error.what());
      }
    };
    if (given == "chatml") return compile(kChatml, given);
    if (!given.empty()) {
      require(fs::is_regular_file(given), "--chat ", excerpt(given),
              fs::exists(given) ? ": is not a file" : ": no such file", "; name a Jinja template, or chatml");
      return compile(read_file(given, jinja::kLongestTemplate), given);
    }
    const Template found = read_template(model);
    require(
        !found.text.empty(), model.string(),
        ": the model has no chat template; name one with --chat (FILE.jinja, or chatml), or use data that is rendered "
        "already: {\"text\"} or {\"prompt\", \"completion\"}");
    return compile(found.text, found.file);
  }

  // Does the template ask for the date?
  static bool reads_date(const fs::path& model, const std::string& given) {
    const bool is_file = fs::is_regular_file(given);
    const std::string text = is_file         ? read_file(given, jinja::kLongestTemplate)
                             : given.empty() ? read_template(model).text
                                             : "";
    return text.find("strftime_now") != text.npos;
  }

  Chat(const std::string& source, std::string name, const TextTokens& own, const ChatOptions& options = {})
      : trusts_messages_(options.trusts_messages),
        source_(source),
        name_(std::move(name)),
        own_(own),
        program_(source, options.date.empty() ? today() : options.date) {
    for (const std::string& argument : options.arguments) add_argument(argument);
    const Content user = content_of("user"), assistant = content_of("assistant"), system = content_of("system");
    user_ = user, assistant_ = assistant, system_ = system;
    wants_argument_text_ = !reads_argument_objects();
    const std::string prompt = tried({.messages = {{"user", "x"}}}, End::prompt);
    for (const auto& [open, close] : kReasoningMarks)
      if (const std::size_t at = prompt.rfind(open); at != prompt.npos && prompt.find(close, at) == prompt.npos)
        opened_ = open;
  }

  const std::string& name() const { return name_; }
  const std::string& source() const { return source_; }
  bool trusts_messages() const { return trusts_messages_; }
  bool marks_answers() const { return program_.marks_answers(); }

  enum class End { whole, prompt };  // prompt: with the generation prompt; the model's answer follows

  RenderedChat render(const Conversation& c, End end = End::whole) const {
    require_data(!c.messages.empty(), "the conversation has no messages");
    try {
      const RenderedChat chat(execute(c, end), opened_);
      if (end == End::whole) require_answers(c, chat);
      return chat;
    } catch (const jinja::TemplateError& error) {
      throw BadData(name_ + ": " + error.what());
    }
  }

 private:
  using Value = jinja::Value;

  void add_argument(const std::string& argument) {
    const std::size_t end = argument.find('=');
    require(end != 0 && end != argument.npos, "--template-arg ", excerpt(argument),
            ": has no name and value; write it like enable_thinking=false");
    const std::string name = argument.substr(0, end), text = argument.substr(end + 1);
    require_free_variable(name, "--template-arg");
    require(program_.reads(name), "--template-arg ", excerpt(argument), ": the chat template ", name_,
            " has no variable of this name; look there for its spelling");
    OrderedJson value = text;
    try {
      value = parse_json<OrderedJson>(text, kArgumentLimits);
    } catch (const BadJson&) {  // it is text
    }
    arguments_.emplace_back(name, jinja::from_json(value));
  }
  enum class Content { as_given, text, parts };

  // Answers that the template leaves out would be learned as nothing. It may drop reasoning, and text beside calls.
  void require_answers(const Conversation& c, const RenderedChat& chat) const {
    std::size_t from = 0;
    for (std::size_t i = 0; i < c.messages.size(); ++i) {
      const Value *content = c.messages[i].find("content"), *calls = c.messages[i].find("tool_calls");
      if (!c.messages[i].has_role("assistant") || !content || (calls && jinja::is_true(*calls))) continue;
      for (const Value& part : content->list() ? content->list()->items : std::vector<Value>{*content}) {
        const Value* text = part.dict() ? part.dict()->member("text") : &part;
        if (!text || !text->text()) continue;
        const std::string answer = without_reasoning(*text->text());
        const std::size_t at = chat.answers.find(answer, from);
        require_data(at != std::string::npos, name_, ": message ", i + 1, ": the template does not write the answer ",
                     quote(answer), " as it is; name another template with --chat");
        from = at + answer.size();
      }
    }
  }
  static std::string without_reasoning(jinja::TextView text) {
    for (const auto& marks : kReasoningMarks) {
      const jinja::Text close = jinja::to_text(marks[1]);
      if (const std::size_t at = text.rfind(close); at != text.npos) text.remove_prefix(at + close.size());
    }
    return jinja::to_utf8(jinja::without_ends(text, true, true, jinja::is_white));
  }

  jinja::Text execute(const Conversation& c, End end) const {
    std::vector<Value> messages;
    for (const Message& message : c.messages) messages.push_back(adapted(message));
    jinja::Variables variables = {{"messages", messages},
                                  {"tools", c.tools},
                                  {"documents", jinja::None{}},
                                  {"add_generation_prompt", end == End::prompt}};
    const auto token = [&](const char* name, const std::string& text) {
      if (!text.empty()) variables.emplace_back(name, jinja::to_text(text));
    };
    token("bos_token", own_.bos), token("eos_token", own_.eos);
    token("unk_token", own_.unk), token("pad_token", own_.pad);
    variables.insert(variables.end(), arguments_.begin(), arguments_.end());
    variables.insert(variables.end(), c.variables.begin(), c.variables.end());
    return program_.render(variables);
  }

  // Names of roles are part of the markup: templates write "<|" + role + "|>".
  static bool is_known_role(const jinja::Text& role) {
    constexpr const char* known[] = {"system", "user", "assistant", "tool", "developer", "function", "model"};
    return std::ranges::any_of(known, [&](const char* name) { return role == jinja::to_text(name); });
  }

  // The message in the form that the template reads.
  Value adapted(const Message& message) const {
    std::vector<std::pair<Value, Value>> members = message.value.dict()->members;
    bool changed = false;
    for (auto& [key, value] : members) {
      const std::string name = key.text() ? jinja::to_utf8(*key.text()) : "";
      if (name == "role" && value.text() && is_known_role(*value.text()))
        value = jinja::unmarked(value), changed = true;
      if (name == "content") value = in_form(value, message), changed = true;
      if (name == "tool_calls" && value.list()) value = with_arguments(value), changed = true;
    }
    // Reasoning has three names.
    for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
      if (const Value* reasoning = message.find(name); reasoning && reasoning->text()) {
        for (const char* other : {"reasoning_content", "thinking", "reasoning"}) {
          if (message.find(other) || source_.find(other) == source_.npos) continue;
          members.emplace_back(other, *reasoning), changed = true;
        }
        break;
      }
    }
    return changed ? Value(jinja::Dict{std::move(members)}) : message.value;
  }

  Value in_form(const Value& content, const Message& message) const {
    const bool assistant = message.has_role("assistant");
    const Content form = assistant ? assistant_ : message.has_role("system") ? system_ : user_;
    Value value = content;
    if (value.list() && form == Content::text) value = joined_parts(value);
    if (value.text() && form == Content::parts) value = one_part(value);
    return assistant ? jinja::marked(value, jinja::kSpoken) : value;
  }
  static Value one_part(const Value& text) {
    return std::vector<Value>{jinja::dict_of({{"type", "text"}, {"text", text}})};
  }
  static jinja::Text joined_parts(const Value& parts) {
    jinja::Text text;
    for (const Value& part : parts.list()->items) {
      const Value* content = part.dict() ? part.dict()->member("text") : nullptr;
      if (content && content->text()) text += *content->text();
    }
    return text;
  }

  Value with_arguments(const Value& calls) const {
    std::vector<Value> all;
    for (const Value& call : calls.list()->items) {
      const Value* function = call.dict() ? call.dict()->member("function") : nullptr;
      const bool nested = function && function->dict();
      const Value* arguments = call.dict() ? (nested ? *function : call).dict()->member("arguments") : nullptr;
      if (!arguments) {
        all.push_back(call);
        continue;
      }
      const Value inner = with(nested ? *function : call, "arguments", converted(*arguments));
      all.push_back(nested ? with(call, "function", inner) : inner);
    }
    return all;
  }
  static Value with(const Value& dict, const char* name, Value value) {
    std::vector<std::pair<Value, Value>> members = dict.dict()->members;
    for (auto& [key, old] : members)
      if (jinja::equal(key, name)) old = value;
    return jinja::Dict{std::move(members)};
  }
  Value converted(const Value& arguments) const {
    if (wants_argument_text_ && arguments.dict()) {
      jinja::Text text;
      jinja::append_json(text, arguments, {});
      return text;
    }
    if (wants_argument_text_ || !arguments.text()) return arguments;
    try {
      const auto json = parse_json<OrderedJson>(jinja::to_utf8(*arguments.text()), kArgumentLimits);
      return json.is_object() ? jinja::from_json(json) : arguments;
    } catch (const BadJson&) {
      return arguments;
    }
  }
  static constexpr JsonLimits kArgumentLimits = {.values = 100'000, .depth = 32};

  // --- What the template reads, found out by trying ---

  // The text of a question and an answer, or "" if the template refuses it.
  std::string tried(const Message& question, const Message& answer) const {
    return tried({.messages = {question, answer}}, End::whole);
  }
  std::string tried(const Conversation& c, End end) const {
    try {
      return jinja::to_utf8(execute(c, end));
    } catch (const jinja::TemplateError&) {
      return "";
    }
  }
  Content content_of(const std::string& role) const {
    const auto message = [](const std::string& role, const Value& content) {
      return Message(jinja::dict_of({{"role", role.c_str()}, {"content", content}}));
    };
    const auto rendered = [&](const Value& content) {
      const Message probe = message(role, content);
      std::string text;
      for (const Value& other : {Value("x"), one_part("x")}) {  // the message beside it
        if (text.empty())
          text = role == "assistant" ? tried(message("user", other), probe)
                                     : tried(probe, message(role == "user" ? "assistant" : "user", other));
      }
      return text;
    };
    const std::string text = rendered("probe"), parts = rendered(one_part("probe"));
    const auto reads = [](const std::string& rendering) {
      return rendering.find("probe") != rendering.npos &&
             rendering.find("'text'") == rendering.npos;  // not printed as a dict
    };
    return !reads(text) && reads(parts) ? Content::parts : parts == text ? Content::as_given : Content::text;
  }
  bool reads_argument_objects() {
    const Value arguments = jinja::dict_of({{"probe", "text"}});
    const Value function = jinja::dict_of({{"name", "f"}, {"arguments", arguments}});
    const Value call = jinja::dict_of({{"id", "000000000"}, {"type", "function"}, {"function", function}});
    const Value calls(std::vector<Value>{call});
    for (const Value& content : {Value(""), Value(jinja::None{})}) {
      const Message message(jinja::dict_of({{"role", "assistant"}, {"content", content}, {"tool_calls", calls}}));
      for (const bool wants_text : {false, true}) {
        wants_argument_text_ = wants_text;
        const std::string text = tried({"user", "u"}, message);
        if (text.find("probe") != text.npos && text.find("{'probe'") == text.npos) return !wants_text;
      }
    }
    return true;  // it reads none
  }

  bool trusts_messages_;
  std::string source_, name_;
  TextTokens own_;
  jinja::Template program_;
  jinja::Variables arguments_ = {};
  Content user_ = Content::as_given, assistant_ = Content::as_given, system_ = Content::as_given;
  bool wants_argument_text_ = false;
  std::string opened_ = "";
};

}  // namespace streambp
