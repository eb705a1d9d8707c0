// The settings of on-line GRPO.
#pragma once

#include "kernels/base/matrix.cuh"

namespace streambp {

struct GrpoSettings {
  Index prompts = 4, group = 8;           // of a round: prompts, and completions of each
  Index completion = 512;                 // maximum tokens of a completion
  Index inner = 1;                        // optimizer steps per round
  double temperature = 1, top_p = 1;      // of sampling; the temperature also of log-probs
  Index top_k = 0;                        // 0: all tokens
  std::string reward = "", program = "";  // "exact", or a shell command
  double seconds = 60;                    // the program may take for a round

  // On-line GRPO samples completions itself; off-line GRPO trains on groups from the data.
  bool online() const { return !reward.empty() || !program.empty(); }
  const char* resume_hint() const { return program.empty() ? "" : " and the same --reward-cmd"; }
  Index completions() const { return prompts * group; }
};

}  // namespace streambp
