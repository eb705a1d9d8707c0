// The reasoning at the beginning of an answer: "<think>...</think>The answer".
#pragma once

#include <string>
#include <string_view>

namespace streambp {

// The marks around reasoning.
struct ReasoningMarks {
  std::string open = "", close = "";  // empty: none
  bool opened = false;                // the prompt has written the opening one
};

constexpr const char* kReasoningMarks[][2] = {{"<think>", "</think>"},
                                              {"[THINK]", "[/THINK]"},
                                              {"<seed:think>", "</seed:think>"},
                                              {"<mm:think>", "</mm:think>"},
                                              {"<|START_THINKING|>", "<|END_THINKING|>"},
                                              {"<|thought_start|>", "<|thought_end|>"},
                                              {"<|channel>thought", "<channel|>"},
                                              {"<thinking>", "</thinking>"},
                                              {"<reasoning>", "</reasoning>"}};

// The marks that a chat template knows.
inline ReasoningMarks reasoning_marks(std::string_view chat_template) {
  for (const auto& [open, close] : kReasoningMarks)
    if (chat_template.find(close) != std::string_view::npos) return {open, close};
  return {};
}

// The marks of the answer to this prompt.
inline ReasoningMarks opened(ReasoningMarks marks, std::string_view prompt) {
  const std::size_t end = prompt.find_last_not_of(" \n");
  marks.opened = !marks.open.empty() && prompt.substr(0, end + 1).ends_with(marks.open);
  return marks;
}

// The end of the reasoning with its closing mark: 0 if the text has none, npos if the end is still to come.
inline std::size_t reasoning_end(std::string_view text, const ReasoningMarks& marks) {
  const std::size_t begin = text.find_first_not_of(" \n");
  const bool begins = begin != text.npos && !marks.open.empty() && text.substr(begin).starts_with(marks.open);
  if (!begins && !marks.opened) return 0;
  const std::size_t end = text.find(marks.close);
  return end == text.npos ? end : end + marks.close.size();
}

struct Reasoned {
  std::string reasoning, answer;
};

// Without the marks, and without spaces and line ends beside them.
inline Reasoned split_reasoning(std::string_view text, const ReasoningMarks& marks) {
  const std::size_t end = reasoning_end(text, marks);
  if (end == 0) return {"", std::string(text)};
  const auto trimmed = [](std::string_view part) {
    const std::size_t first = part.find_first_not_of(" \n"), last = part.find_last_not_of(" \n");
    return first == part.npos ? "" : std::string(part.substr(first, last + 1 - first));
  };
  std::string reasoning = trimmed(text.substr(0, end == text.npos ? end : end - marks.close.size()));
  if (reasoning.starts_with(marks.open)) reasoning = trimmed(std::string_view(reasoning).substr(marks.open.size()));
  const std::string_view answer = end == text.npos ? "" : text.substr(end);
  const std::size_t first = answer.find_first_not_of(" \n");
  return {reasoning, first == answer.npos ? "" : std::string(answer.substr(first))};
}

}  // namespace streambp
