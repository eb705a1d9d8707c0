#include "commands/objective_options.h"

#include <cmath>

namespace streambp {

void ObjectiveOptions::add_to(OptionTable& options, Lasts lasts) {
  options_ = &options;
  options.section("Objective");
  auto add = [&](const char* flag, Target value, const char* help, const Check& check, const char* shown = "") {
    options.add(flag, {value, help, check, lasts, shown});
  };
  add("--objective", &objective,
      "sft: imitate the data; dpo: prefer the chosen of two completions; grpo: prefer the better rewarded of a group",
      checks::one_of({"sft", "dpo", "grpo"}));
  add("--mean", &mean,
      "sft, grpo: average the loss over all tokens (tokens: BNPO), over the tokens of each document (documents: GRPO), "
      "or divide each document's sum by a fixed length (--completion, or the longest document; length: Dr. GRPO; it "
      "also leaves rewards unscaled)",
      checks::one_of({"tokens", "documents", "length"}), "sft: tokens, grpo: documents");
  add("--preference", &preference, "dpo: loss of a pair: sigmoid, ipo, or simpo (which needs no reference model)",
      checks::one_of({"sigmoid", "ipo", "simpo"}));
  add("--beta", &beta, "dpo: strength of the preference", checks::positive());
  add("--label-smoothing", &label_smoothing, "dpo: assumed fraction of mislabelled pairs", checks::between(0, 0.5));
  add("--margin", &margin, "dpo with simpo: target margin between the rewards", checks::not_negative());
  add("--clip-low", &clip_low, "grpo: the policy ratio is clipped at 1 - this", checks::between(0, 1));
  add("--clip-high", &clip_high, "grpo: the policy ratio is clipped at 1 + this", checks::not_negative());
  add("--kl", &kl, "grpo: coefficient of the KL penalty against the reference model", checks::not_negative());
}

void ObjectiveOptions::check() const {
  auto belongs = [&](const char* flag, bool fits, const char* to) {
    require(!options_->given(flag) || fits, flag, " is for ", to, "; leave it out");
  };
  const bool dpo = objective == "dpo", grpo = objective == "grpo";
  belongs("--mean", !dpo, "--objective sft and grpo");
  for (const char* flag : {"--preference", "--beta"}) belongs(flag, dpo, "--objective dpo");
  belongs("--label-smoothing", dpo && preference != "ipo", "--objective dpo with --preference sigmoid or simpo");
  belongs("--margin", dpo && preference == "simpo", "--objective dpo with --preference simpo");
  for (const char* flag : {"--clip-low", "--clip-high", "--kl"}) belongs(flag, grpo, "--objective grpo");
}

void ObjectiveOptions::require_kind(const TokenFile& file) const {
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

Objective ObjectiveOptions::settings(Index length) const {
  check();
  Objective o{.length = length,
              .beta = beta,
              .label_smoothing = label_smoothing,
              .margin = margin,
              .clip_low = clip_low,
              .clip_high = clip_high,
              .kl = kl};
  o.kind = objective == "dpo" ? ObjectiveKind::dpo : objective == "grpo" ? ObjectiveKind::grpo : ObjectiveKind::sft;
  const std::string chosen = !mean.empty() ? mean : objective == "grpo" ? "documents" : "tokens";
  o.mean = chosen == "tokens" ? Mean::tokens : chosen == "documents" ? Mean::documents : Mean::length;
  o.scale_rewards = o.mean != Mean::length;  // as in Dr. GRPO
  o.preference = preference == "sigmoid" ? Preference::sigmoid
                 : preference == "ipo"   ? Preference::ipo
                                         : Preference::simpo;
  return o;
}

}  // namespace streambp
