// The options of the training objective, for all commands that compute or plan a gradient.
#pragma once

#include <cmath>

#include "commands/option_table.h"
#include "data/documents/token_file.h"
#include "training/objectives.h"

namespace streambp {

struct ObjectiveOptions {
  std::string objective = "sft", mean = "", preference = "sigmoid";
  Objective numbers;

  void add_to(OptionTable& options) {
    options_ = &options;
    options.section("Objective");
    auto add = [&](const char* flag, Target value, const char* help, const Check& check, const char* shown = "") {
      options.add(flag, value, help, check, shown);
    };
    add("--objective", &objective,
        "sft: imitate the data; dpo: prefer the chosen of two completions; grpo: prefer the better rewarded of a group",
        checks::one_of({"sft", "dpo", "grpo"}));
    add("--mean", &mean,
        "sft, grpo: average the loss over all tokens (tokens: BNPO), over the tokens of each document (documents: "
        "GRPO), "
        "or divide each document's sum by a fixed length (--completion, or the longest document; length: Dr. GRPO; it "
        "also leaves rewards unscaled)",
        checks::one_of({"tokens", "documents", "length"}), "sft: tokens, grpo: documents");
    add("--preference", &preference, "dpo: loss of a pair: sigmoid, ipo, or simpo (which needs no reference model)",
        checks::one_of({"sigmoid", "ipo", "simpo"}));
    add("--beta", &numbers.beta, "dpo: strength of the preference", checks::positive());
    add("--label-smoothing", &numbers.label_smoothing, "dpo: assumed fraction of mislabelled pairs",
        checks::between(0, 0.5));
    add("--margin", &numbers.margin, "dpo with simpo: target margin between the rewards", checks::not_negative());
    add("--clip-low", &numbers.clip_low, "grpo: the policy ratio is clipped at 1 - this", checks::between(0, 1));
    add("--clip-high", &numbers.clip_high, "grpo: the policy ratio is clipped at 1 + this", checks::not_negative());
    add("--kl", &numbers.kl, "grpo: coefficient of the KL penalty against the reference model", checks::not_negative());
  }

  // Refuses options that have no effect with this objective.
  void check() const {
    const bool dpo = objective == "dpo", grpo = objective == "grpo";
    const auto is_for = [&](const std::vector<std::string>& flags, bool fits, const std::string& what) {
      options_->only(flags, fits, " is for --objective " + what + "; leave it out");
    };
    is_for({"--mean"}, !dpo, "sft and grpo");
    is_for({"--preference", "--beta"}, dpo, "dpo");
    is_for({"--label-smoothing"}, dpo && preference != "ipo", "dpo with --preference sigmoid or simpo");
    is_for({"--margin"}, dpo && preference == "simpo", "dpo with --preference simpo");
    is_for({"--clip-low", "--clip-high", "--kl"}, grpo, "grpo");
  }
  // Refuses data of the wrong kind.
  void require_kind(const TokenFile& file) const {
    const bool dpo = objective == "dpo", grpo = objective == "grpo";
    if (dpo != file.preferences()) {
      fail(file.name(), dpo ? ": no preferences; --objective dpo trains on lines such as "
                              R"({"prompt": "...", "chosen": "...", "rejected": "..."})"
                            : ": contains preferences; train on them with --objective dpo");
    }
    if (grpo != file.groups()) {
      fail(file.name(), grpo ? ": no groups of completions; --objective grpo trains on lines such as "
                               R"({"prompt": "...", "completions": ["...", "..."], "rewards": [1, 0]}, )"
                               "or, with --reward or --reward-cmd, on completions that it samples"
                             : ": contains groups of completions; train on them with --objective grpo");
    }
  }
  // length: the divisor of --mean length.
  Objective settings(Index length) const {
    check();
    Objective o = numbers;
    o.length = length;
    o.kind = objective == "dpo" ? ObjectiveKind::dpo : objective == "grpo" ? ObjectiveKind::grpo : ObjectiveKind::sft;
    const std::string chosen = !mean.empty() ? mean : objective == "grpo" ? "documents" : "tokens";
    o.mean = chosen == "tokens" ? Mean::tokens : chosen == "documents" ? Mean::documents : Mean::length;
    o.scale_rewards = o.mean != Mean::length;  // as in Dr. GRPO
    o.preference = preference == "sigmoid" ? Preference::sigmoid
                   : preference == "ipo"   ? Preference::ipo
                                           : Preference::simpo;
    return o;
  }

 private:
  OptionTable* options_ = nullptr;
};

}  // namespace streambp
