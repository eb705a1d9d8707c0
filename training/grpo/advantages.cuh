// How much better than its group a completion is: GRPO's answer to "compared with what?".
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

namespace streambp {

// Of the rewards of a group: each less their mean and, if scaled, in units of their deviation. Where all are equal nothing
// is to be learned, and all advantages are zero.
inline std::vector<double> advantages(std::span<const double> rewards, bool scaled) {
  std::vector<double> result(rewards.size());
  if (std::ranges::max(rewards) == std::ranges::min(rewards)) return result;
  const auto n = static_cast<double>(rewards.size());
  const double mean = std::accumulate(rewards.begin(), rewards.end(), 0.0) / n;
  double squares = 0;
  for (double reward : rewards) squares += (reward - mean) * (reward - mean);
  const double unit = scaled ? std::sqrt(squares / (n - 1)) + 1e-4 : 1;
  std::ranges::transform(rewards, result.begin(), [&](double reward) { return (reward - mean) / unit; });
  return result;
}

}  // namespace streambp
