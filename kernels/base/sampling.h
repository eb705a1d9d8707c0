// How the next token is sampled, and the result.
#pragma once

#include <cmath>

#include "kernels/base/error.h"
#include "kernels/base/matrix.cuh"

namespace streambp {

struct Sampling {
  double temperature = 1, top_p = 1;
  Index top_k = 0;
  std::uint64_t seed = 1;
  double repetition_penalty = 1;

  bool operator==(const Sampling&) const = default;
};

inline void validate(const Sampling& s) {
  require(std::isfinite(s.temperature) && s.temperature >= 0, "the temperature must be 0 or more, not ", s.temperature);
  require(s.top_p > 0 && s.top_p <= 1, "top-p must be more than 0 and at most 1, not ", s.top_p);
  require(s.top_k >= 0, "top-k must be 0 (all tokens) or more, not ", s.top_k);
  require(s.repetition_penalty >= 0.01 && s.repetition_penalty <= 100,
          "the repetition penalty must be between 0.01 and 100 (1: none), not ", s.repetition_penalty);
}

// A sampled token and its log-prob at temperature 1, before the repetition penalty, top-k and top-p.
struct Draw {
  std::int64_t token;  // as long as logp: padding would count as uninitialized memory
  double logp;

  // A logit that is not finite, of some token.
  static constexpr Draw of_bad_logit(Index id, double logit) { return {-1 - id, logit}; }
  bool is_bad() const { return token < 0; }
  std::int32_t bad_token() const { return static_cast<std::int32_t>(-1 - token); }
};

}  // namespace streambp
