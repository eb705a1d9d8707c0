// The options that say what is minimised, for all commands that compute a gradient or plan one.
#pragma once

#include "commands/options.cuh"
#include "data/documents/token_file.cuh"
#include "training/objectives.cuh"

namespace streambp {

struct ObjectiveOptions {
  std::string objective = "sft", mean = "", preference = "sigmoid";
  double beta = 0.1, label_smoothing = 0, margin = 0.5, clip_low = 0.2, clip_high = 0.2, kl = 0;
  CLI::App* app = nullptr;

  void add_to(CLI::App& parent) {
    app = &parent;
    option("--objective", objective,
           "sft: learn the data; dpo: prefer the chosen of two; grpo: do what is rewarded within a group")
        ->check(CLI::IsMember({"sft", "dpo", "grpo"}));
    option("--mean", mean,
           "sft, grpo: over all tokens (BNPO), over documents of each one's tokens (GRPO), or over documents of one "
           "length, --completion or that of the longest (Dr. GRPO, with rewards less their mean, but not scaled)")
        ->check(CLI::IsMember({"tokens", "documents", "length"}))
        ->default_str("sft: tokens, grpo: documents");
    option("--preference", preference, "dpo: sigmoid; ipo; or simpo, which needs no starting model")
        ->check(CLI::IsMember({"sigmoid", "ipo", "simpo"}));
    option("--beta", beta, "dpo: how much a score counts")->check(CLI::PositiveNumber);
    option("--label-smoothing", label_smoothing, "dpo: part of the pairs that may be the wrong way round")
        ->check(CLI::Range(0.0, 0.5));
    option("--margin", margin, "dpo, simpo: by which the chosen is to be better")->check(CLI::NonNegativeNumber);
    option("--clip-low", clip_low, "grpo: a token's ratio is clipped below 1 less this")->check(CLI::Range(0.0, 1.0));
    option("--clip-high", clip_high, "grpo: and above 1 plus this")->check(CLI::NonNegativeNumber);
    option("--kl", kl, "grpo: cost of the distance to the starting model")->check(CLI::NonNegativeNumber);
  }

  // Each belongs to some objectives only; an option without effect would deceive.
  void check() const {
    auto belongs = [&](const char* name, bool fits, const char* to) {
      require(app->count(name) == 0 || fits, name, " is for ", to, ", and the objective is ", objective);
    };
    const bool dpo = objective == "dpo", grpo = objective == "grpo";
    belongs("--mean", !dpo, "--objective sft and grpo");
    for (const char* name : {"--preference", "--beta"}) belongs(name, dpo, "--objective dpo");
    belongs("--label-smoothing", dpo && preference != "ipo", "--objective dpo, but not --preference ipo");
    belongs("--margin", dpo && preference == "simpo", "--objective dpo --preference simpo");
    for (const char* name : {"--clip-low", "--clip-high", "--kl"}) belongs(name, grpo, "--objective grpo");
    for (double x : {beta, label_smoothing, margin, clip_low, clip_high, kl}) {
      require(std::isfinite(x), "the settings of --objective must be finite numbers");
    }
  }

  // Each objective learns from data of a kind of its own.
  void require_kind(const TokenFile& file) const {
    const bool dpo = objective == "dpo", grpo = objective == "grpo";
    if (dpo != file.preferences()) {
      fail(file.name(), dpo ? ": no preferences; --objective dpo learns from lines such as "
                              R"({"prompt": "...", "chosen": "...", "rejected": "..."})"
                            : ": preferences, which --objective dpo learns from");
    }
    if (grpo != file.groups()) {
      fail(file.name(), grpo ? ": no groups of completions; --objective grpo learns from lines such as "
                               R"({"prompt": "...", "completions": ["...", "..."], "rewards": [1, 0]}, )"
                               "or with --reward or --reward-cmd from completions of its own"
                             : ": groups of completions, which --objective grpo learns from");
    }
  }

  // length: what --mean length divides by.
  Objective settings(Index length) const {
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
    o.preference = preference == "sigmoid" ? Preference::sigmoid
                   : preference == "ipo"   ? Preference::ipo
                                           : Preference::simpo;
    return o;
  }

 private:
  template <class V>
  CLI::Option* option(const std::string& name, V& value, const std::string& help) {
    return app->add_option(name, value, help)->capture_default_str()->group("Objective");
  }
};

}  // namespace streambp
