// Advantages: how much better a completion is than the average of its group.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

namespace streambp {

enum class Scaled { no, yes };

// A[i] = r[i] - mean(r), and scaled A[i] / (std(r) + 1e-4), over the rewards r of a group. Equal rewards have advantage 0.
inline std::vector<double> advantages(std::span<const double> rewards, Scaled scaled) {
  std::vector<double> result(rewards.size());
  if (std::ranges::max(rewards) == std::ranges::min(rewards)) return result;
  const auto n = static_cast<double>(rewards.size());
  const double mean = std::accumulate(rewards.begin(), rewards.end(), 0.0) / n;
  double squares = 0;
  for (double reward : rewards) squares += (reward - mean) * (reward - mean);
  const double unit = scaled == Scaled::yes ? std::sqrt(squares / (n - 1)) + 1e-4 : 1;
  std::ranges::transform(rewards, result.begin(), [&](double reward) { return (reward - mean) / unit; });
  return result;
}

}  // namespace streambp
