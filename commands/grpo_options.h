// The options of on-line GRPO: sampling and rewards. Without a reward, GRPO is off-line.
#pragma once

#include "commands/option_table.h"
#include "kernels/base/sampling.h"
#include "training/grpo/settings.h"

namespace streambp {

struct GrpoOptions : GrpoSettings {
  static constexpr const char* kFlags[] = {"--prompts",    "--group",          "--completion", "--inner", "--reward",
                                           "--reward-cmd", "--reward-seconds", "--top-p",      "--top-k"};

  void add_to(OptionTable& options) {
    options_ = &options;
    options.section("Groups, for --objective grpo");
    options.add("--prompts", &prompts, "Prompts in a round; each gets a group of completions",
                checks::between(1, 1 << 16));
    options.add("--group", &group, "Completions of a prompt", checks::between(2, 1 << 12));
    options.add("--completion", &completion, "Maximum tokens of a completion", checks::between(1, 1 << 20),
                "512, or what the model's context and memory have room for");
    options.add("--temperature", &temperature,
                "Temperature of sampling and of all log-probs, 0.1 to 10; from scratch: of the sample, 0: greedy",
                checks::not_negative(), "1; from scratch 0.5");
    options.add("--top-p", &top_p, "Sample from the smallest set of tokens with this total probability",
                checks::positive());
    options.add("--top-k", &top_k, "Sample from the k most likely tokens; 0: all tokens");
    options.add("--inner", &inner, "Optimizer steps per round", checks::between(1, 1 << 10));
    options.add("--reward", &reward,
                "exact: 1 for a completion, without its reasoning, that equals the line's \"answer\", else 0",
                checks::one_of({"exact"}));
    options.add(
        "--reward-cmd", &program,
        "A reward program: reads lines of JSON with prompt, completion, completion_reasoning and the data's other "
        "fields, and writes one number per line; started once; not stored, so give it again with --resume");
    options.add("--reward-seconds", &seconds, "Time limit of the reward program for a round", checks::positive());
  }

  bool any_given() const { return options_->any_given({std::begin(kFlags), std::end(kFlags)}); }

  void check() const {
    require(reward.empty() || program.empty(), "--reward and --reward-cmd cannot be combined; give one of them");
    require(online() || !any_given(), "options such as --group are for completions that the program samples, with ",
            "--reward or --reward-cmd");
    validate(Sampling{temperature, top_p, top_k});
    require(temperature >= 0.1 && temperature <= 10, "--temperature ", temperature,
            ": use one between 0.1 and 10, so that completions differ and are no noise");
  }

 private:
  OptionTable* options_ = nullptr;
};

}  // namespace streambp
