// The distribution that tokens are sampled from, and sampling on the CPU:
//
//   p = softmax(logits / temperature)          temperature 0: greedy decoding
//   top-k      keep the k most likely tokens; 0: all
//   top-p      of these keep the smallest set of most likely tokens with a total probability of at least top-p
//
// Before that, a repetition penalty divides the positive logits of all tokens of the text so far, and multiplies the
// negative ones (transformers' RepetitionPenaltyLogitsProcessor).
//
// Ties go to the smaller token id. The kept set is found by selection, not by sorting. The draw scans tokens in order
// of id, so a rounding error can only move the border between two neighbours.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/base/random.h"
#include "kernels/base/row_sums.h"
#include "kernels/base/sampling.h"
#include "kernels/head.cuh"

namespace streambp {

// A token and its probability relative to the most likely token.
struct Candidate {
  float weight;
  std::int32_t token;
  // More likely tokens come first.
  bool operator<(const Candidate& other) const {
    return weight != other.weight ? weight > other.weight : token < other.token;
  }
};

inline double total(std::span<const Candidate> candidates) {
  double sum = 0;
  for (const Candidate& c : candidates) sum += static_cast<double>(c.weight);
  return sum;
}

// The k most likely tokens with a weight of at least `least`, in one pass that holds fewer than 2k candidates.
inline std::vector<Candidate> most_likely(std::span<const float> weights, std::size_t k, float least) {
  std::vector<Candidate> found;
  auto shrink = [&] {
    std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(k - 1), found.end());
    found.resize(k);
    least = std::nextafter(found.back().weight, 2.0f);  // on a tie, the later token is dropped
  };
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] < least) continue;
    found.push_back({weights[i], static_cast<std::int32_t>(i)});
    if (found.size() == 2 * k) shrink();
  }
  if (found.size() > k) shrink();
  return found;
}

// Keeps the smallest set of most likely candidates with a total weight of at least `wanted`.
inline void keep_nucleus(std::vector<Candidate>& candidates, double wanted) {
  std::size_t inside = 0, outside = candidates.size();  // [0, inside) is kept, [outside, end) is not
  while (outside - inside > 1) {
    const std::size_t middle = inside + (outside - inside) / 2;
    const auto at = [&](std::size_t i) { return candidates.begin() + static_cast<std::ptrdiff_t>(i); };
    std::nth_element(at(inside), at(middle), at(outside));
    const double half = total({at(inside), at(middle)});
    if (half >= wanted) {
      outside = middle;
    } else {
      wanted -= half, inside = middle;
    }
  }
  candidates.resize(outside);
}

// The least likely token that top-k and top-p keep. `sum` becomes the total weight of the kept tokens.
inline Candidate last_candidate(std::span<const float> weights, const Sampling& s, double& sum) {
  const auto n = static_cast<double>(weights.size());
  // Tokens with a probability below (1 - top_p) / n sum to less than 1 - top_p, so top_p is reached without them.
  const double needless = s.top_k == 0 ? (1 - s.top_p) * sum / n : 0;
  const std::size_t k = s.top_k > 0 ? static_cast<std::size_t>(s.top_k) : weights.size();
  std::vector<Candidate> left = most_likely(weights, std::min(k, weights.size()), static_cast<float>(needless));
  if (s.top_p < 1) keep_nucleus(left, s.top_p * (s.top_k > 0 ? total(left) : sum));
  sum = total(left);
  return *std::max_element(left.begin(), left.end());
}

template <class A>
std::vector<A> penalised(std::span<const A> logits, std::span<const std::int32_t> text, double penalty) {
  std::vector<A> changed(logits.begin(), logits.end());
  const auto p = static_cast<A>(penalty);
  for (const std::int32_t token : text) {  // a token that occurs twice gets the same value twice
    const auto i = static_cast<std::size_t>(token);
    changed[i] = logits[i] < 0 ? logits[i] * p : logits[i] / p;
  }
  return changed;
}

// Samples with a uniform random number from (0, 1).
template <class A>
Draw draw(std::span<const A> logits, const Sampling& s, double uniform) {
  const auto n = static_cast<Index>(logits.size());
  const A* x = logits.data();
  const auto is_bad = [](A logit) { return !std::isfinite(logit); };
  if (const auto bad = std::find_if(logits.begin(), logits.end(), is_bad); bad != logits.end())
    return Draw::of_bad_logit(bad - logits.begin(), static_cast<double>(*bad));
  std::vector<float> weights(logits.size());  // exp((x - maximum) / temperature), at first with temperature 1
  float* w = weights.data();
  const auto softmax = cpu::softmax_of(x, n, [=](Index j, A term) { w[j] = static_cast<float>(term); });
  const auto largest = std::max_element(logits.begin(), logits.end());
  auto drawn = [&](std::size_t token) {
    return Draw{static_cast<std::int64_t>(token), static_cast<double>(softmax.logp(logits[token]))};
  };
  if (s.temperature == 0) return drawn(static_cast<std::size_t>(largest - logits.begin()));

  if (s.temperature != 1) {
    const auto sharpness = static_cast<float>(1 / std::max(s.temperature, 1e-30));
    const auto maximum = static_cast<float>(softmax.maximum);
#pragma omp simd
    for (Index j = 0; j < n; ++j) w[j] = exponential((static_cast<float>(x[j]) - maximum) * sharpness);
  }
  double left = cpu::sum_of(n, [=](Index j) { return static_cast<double>(w[j]); });
  Candidate last{0, 0};
  if (s.top_k > 0 || s.top_p < 1) last = last_candidate(weights, s, left);
  left *= uniform;
  auto token = static_cast<std::size_t>(largest - logits.begin());  // the fallback if rounding leaves no token
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] < last.weight || last < Candidate{weights[i], static_cast<std::int32_t>(i)}) continue;
    token = i;
    if ((left -= static_cast<double>(weights[i])) <= 0) break;
  }
  return drawn(token);
}

// The same after a text, with the repetition penalty. The log-prob is the one without it.
template <class A>
Draw draw(std::span<const A> logits, std::span<const std::int32_t> text, const Sampling& s, double uniform) {
  Draw drawn = draw<A>(penalised(logits, text, s.repetition_penalty), s, uniform);
  const auto softmax = cpu::softmax_of(logits.data(), static_cast<Index>(logits.size()), [](Index, A) {});
  if (!drawn.is_bad()) drawn.logp = static_cast<double>(softmax.logp(logits[static_cast<std::size_t>(drawn.token)]));
  return drawn;
}

}  // namespace streambp
