// The options of on-line GRPO: what is sampled, and who rewards it. Without a reward it is off-line, and learns from
// completions that the data bring along.
#pragma once

#include "commands/options.cuh"
#include "training/grpo/prompts.cuh"
#include "training/grpo/reward_program.cuh"

namespace streambp {

struct GroupOptions {
  Index prompts = 4, size = 8, completion = 64, inner = 1;
  std::string reward = "", program = "";
  double seconds = 60;
  CLI::App* app = nullptr;

  void add_to(CLI::App& parent) {
    app = &parent;
    option("--prompts", prompts, "Prompts in a round; each gets a group of completions")->check(CLI::Range(1, 1 << 16));
    option("--group", size, "Completions of a prompt")->check(CLI::Range(2, 1 << 12));
    option("--completion", completion, "Tokens of a completion at most")->check(CLI::Range(1, 1 << 20));
    option("--inner", inner, "Optimizer steps that a round's completions are used for")->check(CLI::Range(1, 1 << 10));
    option("--reward", reward, "exact: 1 where a completion is the line's \"answer\", else 0")
        ->check(CLI::IsMember({"exact"}));
    option("--reward-cmd", program,
           "A program that rewards: reads lines of JSON with prompt, completion and the data's other fields, and "
           "writes a number for each, a line; it is started once");
    option("--reward-seconds", seconds, "How long it may take for a round")->check(CLI::PositiveNumber);
  }

  bool online() const { return !reward.empty() || !program.empty(); }
  bool any_given() const {
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return app->count(name) > 0; });
  }

  // What decides the bits of a run.
  template <class F>
  void for_each_lasting(F&& f) {
    f("--prompts", prompts), f("--group", size), f("--completion", completion), f("--inner", inner);
    f("--reward", reward), f("--reward-cmd", program);
  }

  void check() const {
    require(reward.empty() || program.empty(), "--reward and --reward-cmd both reward; give one of them");
    require(online() || !any_given(),
            "the options of groups are for completions that the program samples, with --reward or --reward-cmd");
    require(prompts > 0 && size > 1 && completion > 0 && inner > 0, "the sizes of a round are damaged");
    require(reward.empty() || reward == "exact", "--reward cannot be \"", reward, "\"");
  }

 private:
  template <class V>
  CLI::Option* option(const std::string& name, V& value, const std::string& help) {
    names.push_back(name);
    return app->add_option(name, value, help)->capture_default_str()->group("Groups, for --objective grpo");
  }

  std::vector<std::string> names;
};

// Prompts from JSON lines, all in memory.
inline std::vector<Prompt> read_prompts(const std::vector<std::string>& files, Prompter& prompter, bool need_answer) {
  std::vector<Prompt> prompts;
  for (const std::string& file : files) {
    Lines lines(file);
    for (std::string line; lines.next(line);) {
      if (line.find_first_not_of(" \t") == std::string::npos) continue;
      try {
        prompts.push_back(prompter.line(line));
        require_data(!prompts.back().tokens.empty(), "an empty prompt");
        require_data(
            !need_answer || (prompts.back().line.contains("answer") && prompts.back().line["answer"].is_string()),
            "no text \"answer\", which --reward exact compares with");
      } catch (const BadData& error) {
        fail(lines.where(), error.what());
      }
    }
  }
  require(!prompts.empty(), files[0], ": no prompts in there; give lines such as {\"prompt\": \"...\"}");
  return prompts;
}

// Rewards completions, by the program or by comparing with the answer.
class Rewarder {
 public:
  explicit Rewarder(const GroupOptions& options) {
    if (!options.program.empty()) program_.emplace(options.program, options.seconds);
  }

  std::vector<double> rewards(const std::vector<const Prompt*>& prompts, const std::vector<std::string>& completions) {
    if (program_) {
      std::vector<Json> requests;
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        requests.push_back(prompts[i]->line);
        requests.back()["completion"] = completions[i];
      }
      return program_->rewards(requests);
    }
    std::vector<double> rewards;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      rewards.push_back(trimmed(completions[i]) == trimmed(prompts[i]->line["answer"].get<std::string>()));
    }
    return rewards;
  }

 private:
  static std::string trimmed(const std::string& text) {
    const auto begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
  }

  std::optional<RewardProgram> program_;
};

}  // namespace streambp
