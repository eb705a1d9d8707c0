// The options of other trainers. One that means the same as an option here is another name for it; others are refused
// with the reason.
#pragma once

#include <vector>

#include "parallel/processes.h"

namespace streambp {

struct OtherName {
  const char *command, *flag, *name;  // command "": every one that has the option
  const char* value = nullptr;        // the name is a flag that stands for this value
};

inline constexpr OtherName kOtherNames[] = {
    {"train", "--rate", "--lr"},
    {"train", "--rate", "--learning-rate"},
    {"train", "--batch", "--batch-size"},
    {"train", "--batch", "--per-device-train-batch-size"},
    {"train", "--accumulate", "--gradient-accumulation-steps"},
    {"train", "--decay", "--weight-decay"},
    {"train", "--length", "--max-length"},
    {"train", "--length", "--max-seq-length"},
    {"train", "--epochs", "--num-train-epochs"},
    {"train", "--steps", "--max-steps"},
    {"train", "--warmup", "--warmup-steps"},
    {"train", "--clip", "--max-grad-norm"},
    {"train", "--out", "--output-dir"},
    {"train", "--completion", "--max-completion-length"},
    {"generate", "--length", "--max-new-tokens"},
    {"", "--group", "--num-generations"},
    {"", "--lora", "--lora-r"},
    {"", "--base", "--load-in-4bit", "nf4"},
};

// The other names of a command's option.
inline std::vector<OtherName> other_names(const std::string& command, const std::string& flag) {
  std::vector<OtherName> names;
  for (const OtherName& other : kOtherNames) {
    const bool of_each_process = other.name == std::string("--gradient-accumulation-steps");
    const bool same = !of_each_process || this_process().count == 1;
    if (other.flag == flag && (!*other.command || other.command == command) && same) names.push_back(other);
  }
  return names;
}

// Why an option of other trainers is none here; empty if it is not known.
inline std::string why_no_option(const std::string& name) {
  const std::pair<const char*, const char*> reasons[] = {
      {"--fp16", ": use --dtype bf16, or f32"},
      {"--bf16", ": it is --dtype bf16, the default on a GPU"},
      {"--use-liger-kernel", ": logits are never whole, and need no option"},
      {"--warmup-ratio", " is a share of the steps; --warmup takes a number of steps"},
      {"--load-in-8bit", ": weights have 4 bits (--base nf4) or their type in the model's files"},
      {"--gradient-accumulation-steps",
       " counts the micro-batches of each process; --accumulate counts those of all processes"},
      {"--gradient-checkpointing", ": layers are always recomputed, as far as --memory requires; leave it out"}};
  const auto found = std::ranges::find(reasons, name, [](const auto& reason) { return std::string(reason.first); });
  return found == std::end(reasons) ? "" : found->first + std::string(found->second);
}

}  // namespace streambp
