// Tokens are sampled from the specified distribution.
#include "kernels/sampling.cuh"

#include <set>

#include "tests/support.cuh"

namespace streambp {
namespace {

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p)) + 3);
  return logits;
}
std::int32_t token(const std::vector<double>& probabilities, const Sampling& s, double uniform) {
  return draw<float>(logits_of(probabilities), s, uniform).token;
}

TEST(Draw, IsTheQuantileOfTheDistribution) {
  const std::vector<double> p = {0.2, 0.5, 0.3};
  EXPECT_EQ(token(p, {.temperature = 0}, 0.99), 1);
  for (const auto& [uniform, expected] :
       {std::pair{0.1, 0}, {0.199, 0}, {0.21, 1}, {0.69, 1}, {0.71, 2}, {0.9999, 2}}) {
    EXPECT_EQ(token(p, {}, uniform), expected) << uniform;
  }
  EXPECT_EQ(token(p, {.temperature = 0.01}, 0.9), 1) << "cold: nearly greedy";
  EXPECT_EQ(token(p, {.temperature = 1e-300}, 0.9), 1);
  EXPECT_EQ(token(p, {.temperature = 1e9}, 0.34), 1) << "hot: nearly uniform";
  EXPECT_NEAR(draw<float>(logits_of(p), {.temperature = 0.1, .top_k = 1}, 0.5).logp, std::log(0.5), 1e-6);
}

TEST(Draw, KeepsTheMostLikely) {
  const std::vector<double> p = {0.1, 0.4, 0.05, 0.25, 0.2};
  auto kept = [&](Sampling s) {
    std::set<std::int32_t> tokens;
    for (int i = 0; i < 1000; ++i) tokens.insert(token(p, s, (i + 0.5) / 1000));
    return tokens;
  };
  using Set = std::set<std::int32_t>;
  EXPECT_EQ(kept({}), (Set{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept({.top_k = 1}), (Set{1}));
  EXPECT_EQ(kept({.top_k = 3}), (Set{1, 3, 4}));
  EXPECT_EQ(kept({.top_k = 5}), (Set{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept({.top_k = 500}), (Set{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept({.top_p = 1e-9}), (Set{1}));
  EXPECT_EQ(kept({.top_p = 0.39}), (Set{1}));
  EXPECT_EQ(kept({.top_p = 0.41}), (Set{1, 3}));
  EXPECT_EQ(kept({.top_p = 0.84}), (Set{1, 3, 4}));
  EXPECT_EQ(kept({.top_p = 0.86}), (Set{0, 1, 3, 4}));
  EXPECT_EQ(kept({.top_p = 0.96}), (Set{0, 1, 2, 3, 4}));
  EXPECT_EQ(kept({.top_p = 0.7, .top_k = 2}), (Set{1, 3})) << "top-p is a share of what top-k leaves";
  EXPECT_EQ(kept({.top_p = 0.6, .top_k = 2}), (Set{1}));
}

TEST(Draw, TiesGoToTheSmallerToken) {
  const std::vector<double> p(7, 1.0 / 7);
  EXPECT_EQ(token(p, {.temperature = 0}, 0.9), 0);
  EXPECT_EQ(token(p, {.top_k = 3}, 0.999), 2);
  EXPECT_EQ(token(p, {.top_p = 0.4}, 0.999), 2);
  EXPECT_EQ(token({1}, {.top_p = 0.4, .top_k = 4}, 0.999), 0);
}

TEST(Draw, SelectsLikeASort) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::vector<double> p;
    double sum = 0;
    for (std::uint64_t i = 0; i < 3000; ++i)
      sum += p.emplace_back(std::exp(2 * Random(seed).normal(i / (1 + seed % 3))));
    for (double& x : p) x /= sum;
    std::vector<std::size_t> order(p.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return p[a] > p[b]; });
    for (std::size_t k : {1, 10, 700}) {
      const std::set<std::size_t> best(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k));
      EXPECT_EQ(token(p, {.top_k = static_cast<Index>(k)}, 1 - 1e-9), static_cast<std::int32_t>(*best.rbegin()));
    }
    for (double top_p : {0.3, 0.9, 0.99}) {
      double reached = 0;
      std::set<std::size_t> nucleus;
      for (std::size_t i = 0; reached < top_p; ++i) reached += p[order[i]], nucleus.insert(order[i]);
      const double margin = std::abs(reached - top_p);  // where rounding does not decide
      if (margin < 1e-5) continue;
      EXPECT_EQ(token(p, {.top_p = top_p}, 1 - 1e-9), static_cast<std::int32_t>(*nucleus.rbegin())) << top_p;
    }
  }
}

// Pearson's chi-square of 20000 draws, against its 99.99 % quantile. The seed is fixed, so the test is deterministic.
TEST(Draw, FollowsTheDistribution) {
  const std::vector<double> p = {0.02, 0.3, 0.11, 0.001, 0.2, 0.009, 0.06, 0.3};
  constexpr int draws = 20000;
  struct Case {
    Sampling sampling;
    std::vector<double> expected;
    double quantile;
  };
  auto scaled = [&](double temperature, const std::set<int>& kept) {
    std::vector<double> q(p.size());
    double sum = 0;
    for (int i : kept)
      sum += q[static_cast<std::size_t>(i)] = std::pow(p[static_cast<std::size_t>(i)], 1 / temperature);
    for (double& x : q) x /= sum;
    return q;
  };
  const std::set<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
  for (const Case& c : {Case{{.temperature = 1}, scaled(1, all), 29.9},
                        {{.temperature = 0.7}, scaled(0.7, all), 29.9},
                        {{.temperature = 2, .top_k = 4}, scaled(2, {1, 2, 4, 7}), 21.1},
                        {{.temperature = 1, .top_p = 0.85}, scaled(1, {1, 2, 4, 7}), 21.1}}) {
    std::vector<int> counts(p.size());
    const Random random(11, 3);
    for (int i = 0; i < draws; ++i)
      ++counts[static_cast<std::size_t>(token(p, c.sampling, random.uniform(static_cast<std::uint64_t>(i))))];
    double chi_square = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double expected = c.expected[i] * draws;
      if (expected == 0) {
        EXPECT_EQ(counts[i], 0) << i;
        continue;
      }
      chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    EXPECT_LE(chi_square, c.quantile) << c.sampling.temperature;
  }
}

// The values of transformers' RepetitionPenaltyLogitsProcessor in float64.
TEST(Draw, PenalisesTheTokensOfTheText) {
  const std::vector<double> logits = {2, -1.5, 0, 0.75, -0.25, 3};
  const Tokens text = {0, 1, 5, 1, 2, 0};
  const auto of = [&](double penalty) { return penalised<double>(logits, text, penalty); };
  EXPECT_EQ(of(1.3),
            (std::vector<double>{1.5384615384615383, -1.9500000000000002, 0, 0.75, -0.25, 2.3076923076923075}));
  EXPECT_EQ(of(0.8), (std::vector<double>{2.5, -1.2000000000000002, 0, 0.75, -0.25, 3.75}));
  EXPECT_EQ(of(1), logits);
  const Draw drawn = draw<double>(logits, text, {.temperature = 0, .repetition_penalty = 9}, 0.5);
  EXPECT_EQ(drawn.token, 3);
  double sum = 0;
  for (const double x : logits) sum += std::exp(x);
  EXPECT_NEAR(drawn.logp, 0.75 - std::log(sum), 1e-12) << "of the logits without it";
}

TEST(Draw, RefusesInvalidSettings) {
  for (const Sampling& s : {Sampling{.temperature = -1},
                            {.temperature = NAN},
                            {.top_p = 0},
                            {.top_p = 1.1},
                            {.top_p = NAN},
                            {.top_k = -1},
                            {.repetition_penalty = 0},
                            {.repetition_penalty = NAN}}) {
    EXPECT_THROW(validate(s), Error);
  }
  EXPECT_NO_THROW(validate(Sampling{}));
}

}  // namespace
}  // namespace streambp
