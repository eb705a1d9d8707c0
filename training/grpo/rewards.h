// Prompts with their data, and the rewards of completions.
#pragma once

#include "data/documents/data_files.h"
#include "data/documents/jsonl.h"
#include "parallel/processes.h"
#include "training/grpo/prompts.h"
#include "training/grpo/reward_program.h"
#include "training/grpo/settings.h"

namespace streambp {

// Only templates print numbers of more than 64 bits as they are written. A reward program would get others.
inline bool has_larger_numbers(const Json& json) {
  if (json.is_structured()) return std::ranges::any_of(json, has_larger_numbers);
  return json.is_binary() || (json.is_number_float() && std::isinf(json.get<double>()));
}

// All prompts of the JSON files.
inline std::vector<Prompt> read_prompts(const std::vector<std::string>& data, Prompter& prompter,
                                        const GrpoSettings& settings) {
  const bool need_answer = !settings.reward.empty();
  std::vector<Prompt> prompts;
  for (const fs::path& file : data_files(data)) {
    JsonValues lines(file);
    for (std::string line; lines.next(line);) {
      try {
        prompts.push_back(prompter.line(line));
        require_data(!prompts.back().tokens.empty(), "the prompt is empty");
        require_data(
            !has_larger_numbers(prompts.back().line),
            "a number of more than 64 bits, which JSON gives a reward program as another one; write it as text");
        require_data(
            !need_answer || (prompts.back().line.contains("answer") && prompts.back().line["answer"].is_string()),
            "no text \"answer\", which --reward exact compares with");
      } catch (const BadData& error) {
        fail(lines.where(), error.what());
      }
    }
  }
  require(!prompts.empty(), data[0], ": no prompts; give lines such as {\"prompt\": \"...\"}");
  return prompts;
}

// Rewards completions, by the reward program or by comparing with the answer. Of the ranks, the first one does.
class Rewarder {
 public:
  explicit Rewarder(const GrpoSettings& settings) : round_(settings.completions()) {
    if (!settings.program.empty() && this_process().rank == 0) program_.emplace(settings.program, settings.seconds);
  }

  std::vector<double> rewards(const std::vector<const Prompt*>& prompts, const std::vector<Reasoned>& completions) {
    if (this_process().rank > 0) return {};
    if (program_) return ask_program(prompts, completions);
    std::vector<double> rewards;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      rewards.push_back(trimmed(completions[i].answer) == trimmed(prompts[i]->line["answer"].get<std::string>()));
    }
    return rewards;
  }

  // See RewardProgram.
  void check_quiet() {
    if (program_) program_->check_quiet();
  }
  void finish(double seconds) {
    if (program_) program_->finish(seconds);
  }

 private:
  // The program's time limit is for the completions of a round, so a call never asks for more.
  std::vector<double> ask_program(const std::vector<const Prompt*>& prompts, const std::vector<Reasoned>& completions) {
    std::vector<double> rewards;
    const auto all = static_cast<Index>(prompts.size());
    for (Index call = 0; call < ceil_div(all, round_); ++call) {
      const Rows rows = piece(call, round_, all);
      std::vector<Json> requests;
      for (auto i = static_cast<std::size_t>(rows.begin); i < static_cast<std::size_t>(rows.end); ++i) {
        requests.push_back(prompts[i]->line);
        requests.back()["completion"] = completions[i].answer;
        requests.back()["completion_reasoning"] = completions[i].reasoning;
      }
      const std::vector<double> answers = program_->rewards(requests);
      rewards.insert(rewards.end(), answers.begin(), answers.end());
    }
    return rewards;
  }

  static std::string trimmed(const std::string& text) {
    const auto begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
  }

  std::optional<RewardProgram> program_;
  const Index round_;  // completions of a round
};

}  // namespace streambp
