// Each operation: forward against its formula in float64, backward against central finite differences, and the bits of
// a row alone against those of the same row in a larger matrix.
#include "kernels/elementwise.cuh"
#include "tests/operations.h"
#include "training/optimizer.h"

namespace streambp {
namespace {

// --- matmul ---

struct Shape {
  Index rows, inputs, outputs;
};
class Matmul : public testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(Operations, Matmul,
                         testing::Values(Shape{1, 1, 1}, Shape{3, 5, 2}, Shape{256, 17, 9}, Shape{257, 8, 385},
                                         Shape{300, 770, 31}, Shape{257, 33, 800}));

TEST_P(Matmul, MatchesItsFormulaForwardAndBackward) {
  const Index n = GetParam().rows, in = GetParam().inputs, out = GetParam().outputs;
  Owned<double> x(n, in, 1), w(out, in, 2), bias(1, out, 3), residual(n, out, 4), y(n, out, 5), dy(n, out, 6);
  auto formula = [&](bool b, bool r) {
    return [&, b, r](Index i, Index j) {
      double sum = (b ? bias.m(0, j) : 0) + (r ? residual.m(i, j) : 0);
      for (Index k = 0; k < in; ++k) sum += x.m(i, k) * w.m(j, k);
      return sum;
    };
  };
  matmul(device(), y.m, x.m, w.m);
  expect_near(y.m, formula(false, false));
  matmul(device(), y.m, x.m, w.m, bias.m);
  expect_near(y.m, formula(true, false));
  matmul(device(), y.m, x.m, w.m, {}, residual.m);
  expect_near(y.m, formula(false, true));
  const Loss loss = [&] {
    matmul(device(), y.m, x.m, w.m, bias.m, residual.m);
    return dot(y.m, dy.m);
  };
  loss();
  expect_near(y.m, formula(true, true));

  Owned<double> dx(n, in, 7), dw = zeros(out, in), dbias = zeros(1, out);
  matmul_backward_input(device(), dx.m, dy.m, w.m, Update::assign);
  matmul_backward_weight(device(), dw.m, dbias.m, dy.m, x.m);
  expect_gradient("dx", x.m, dx.m, loss);
  expect_gradient("dw", w.m, dw.m, loss);
  expect_gradient("dbias", bias.m, dbias.m, loss);
}

TEST(Operations, RefuseShapesThatDoNotMatch) {
  Owned<double> x(4, 5, 1), w(3, 5, 1), y(4, 3, 1), wrong(4, 4, 1);
  EXPECT_THROW(matmul(device(), wrong.m, x.m, w.m), Error);
  EXPECT_THROW(matmul(device(), y.m, wrong.m, w.m), Error);
  EXPECT_THROW(matmul_backward_input(device(), wrong.m, y.m, w.m, Update::assign), Error);
  EXPECT_THROW(x.m.slice({2, 5}), Error);
  EXPECT_THROW(x.m.columns(3, 3), Error);
  EXPECT_THROW(x.m.reshape(3), Error);
}

// --- norms ---

enum class Has { nothing, weight, weight_and_bias };
struct NormCase {
  NormStyle style;
  Has has;
  Index rows, cols;
};
class NormOperation : public testing::TestWithParam<NormCase> {};
INSTANTIATE_TEST_SUITE_P(Operations, NormOperation,
                         testing::Values(NormCase{{.eps = 1e-5}, Has::weight, 300, 24},
                                         NormCase{{.eps = 1e-5, .centered = true}, Has::weight_and_bias, 300, 24},
                                         NormCase{{.eps = 1e-5, .offset = 1}, Has::weight, 2, 7},
                                         NormCase{{.eps = 1e-5, .centered = true}, Has::weight, 129, 33},
                                         NormCase{{.eps = 1e-5}, Has::nothing, 140, 19},
                                         NormCase{{.eps = 1e-5}, Has::weight, 256, 1}));

TEST_P(NormOperation, MatchesItsFormulaForwardAndBackward) {
  const auto [style, has, n, d] = GetParam();
  Owned<double> x(n, d, 1, 1, 0.3), w(1, d, 2, 0.2, 1), b(1, d, 3), y(n, d, 4), dy(n, d, 5);
  const M weight = has == Has::nothing ? M{} : w.m, bias = has == Has::weight_and_bias ? b.m : M{};
  const Index cols = d;
  const NormStyle s = style;
  const Loss loss = [&] {
    norm(device(), y.m, {x.m, {weight, bias}, s});
    return dot(y.m, dy.m);
  };
  loss();
  expect_near(y.m, [&](Index i, Index j) {
    double mean = 0, squares = 0;
    for (Index k = 0; s.centered && k < cols; ++k) mean += x.m(i, k) / static_cast<double>(cols);
    for (Index k = 0; k < cols; ++k) squares += (x.m(i, k) - mean) * (x.m(i, k) - mean) / static_cast<double>(cols);
    return (x.m(i, j) - mean) / std::sqrt(squares + s.eps) * (weight ? s.offset + w.m(0, j) : 1) +
           (bias ? b.m(0, j) : 0);
  });
  Owned<double> dx = zeros(n, d), dw = zeros(1, d), db = zeros(1, d);
  const NormInput<double> input{x.m, {weight, bias}, style};
  norm_backward(device(), dx.m, NormWeights<double>{weight ? dw.m : M{}, bias ? db.m : M{}}, dy.m, input, Update::add);
  expect_gradient("dx", x.m, dx.m, loss);
  if (weight) expect_gradient("dw", w.m, dw.m, loss);
  if (bias) expect_gradient("db", b.m, db.m, loss);
}

// --- rope ---

TEST(Operations, RopeNeedsFiniteFrequencies) {
  EXPECT_THROW(rope_frequencies(16, 1e4, RopeScaling{RopeType::linear, 1e-310}), Error);
}

TEST(Operations, RopeRotatesPairsAndBack) {
  for (const RopeScaling& scaling : {RopeScaling{}, RopeScaling{RopeType::llama3, 8, 64}}) {
    const Index dim = 14, heads = 3, n = 40;
    const RopeFrequencies f = rope_frequencies(dim, 300, scaling);
    std::vector<std::int32_t> positions;
    for (int i = 0; i < n; ++i) positions.push_back(i * 7);
    Owned<double> x(n, heads * dim, 1), original(n, heads * dim, 1), dy(n, heads * dim, 2), y(n, heads * dim, 1);
    rope(device(), x.m, x.m, integers(positions), f, Direction::forward);
    expect_near(
        x.m,
        [&](Index i, Index j) {
          const Index h = j / dim * dim, k = j % dim, pair = k % (dim / 2);
          double frequency = std::pow(300.0, -2.0 * static_cast<double>(pair) / dim);
          const double wavelength = 2 * M_PI / frequency;
          if (scaling.factor != 1) {
            if (wavelength > 64) {
              frequency /= 8;
            } else if (wavelength >= 16) {
              const double s = (64 / wavelength - 1) / 3;
              frequency = (1 - s) * frequency / 8 + s * frequency;
            }
          }
          const double angle = static_cast<double>(i) * 7 * frequency, c = std::cos(angle), s = std::sin(angle);
          const double a = original.m(i, h + pair), b = original.m(i, h + pair + dim / 2);
          return k < dim / 2 ? a * c - b * s : b * c + a * s;
        },
        1e-11);
    rope(device(), x.m, x.m, integers(positions), f, Direction::backward);
    expect_near(x.m, [&](Index i, Index j) { return original.m(i, j); });
    Owned<double> dx(n, heads * dim, 2);
    rope(device(), dx.m, dx.m, integers(positions), f, Direction::backward);
    expect_gradient("dx", original.m, dx.m, [&] {
      std::copy_n(original.m.data, original.m.size(), y.m.data);
      rope(device(), y.m, y.m, integers(positions), f, Direction::forward);
      return dot(y.m, dy.m);
    });
  }
}

// A head of 5 + 5 rotated numbers and 4 others, in pairs of neighbours.
TEST(Operations, RopeRotatesAPartOfAHead) {
  const Index dim = 14, rotated = 10, n = 20;
  std::vector<std::int32_t> positions;
  for (int i = 0; i < n; ++i) positions.push_back(i * 3);
  for (const RopePairs pairs : {RopePairs::halves, RopePairs::interleaved}) {
    RopeFrequencies f = rope_frequencies(rotated, 300, {});
    f.dim = dim, f.pairs = pairs;
    const Owned<double> x(n, 2 * dim, 1), original(n, 2 * dim, 1);
    rope(device(), x.m, x.m, integers(positions), f, Direction::forward);
    for (Index i = 0; i < n; ++i) {
      for (Index h = 0; h < 2 * dim; h += dim) {
        for (Index p = 0; p < rotated / 2; ++p) {
          const Index first = h + (pairs == RopePairs::halves ? p : 2 * p);
          const Index second = pairs == RopePairs::halves ? first + rotated / 2 : first + 1;
          const double angle = 3.0 * static_cast<double>(i) * std::pow(300.0, -0.2 * static_cast<double>(p));
          const double a = original.m(i, first), b = original.m(i, second);
          EXPECT_NEAR(x.m(i, first), a * std::cos(angle) - b * std::sin(angle), 1e-12);
          EXPECT_NEAR(x.m(i, second), b * std::cos(angle) + a * std::sin(angle), 1e-12);
        }
        for (Index j = h + rotated; j < h + dim; ++j) EXPECT_EQ(x.m(i, j), original.m(i, j));
      }
    }
    rope(device(), x.m, x.m, integers(positions), f, Direction::backward);
    expect_near(x.m, [&](Index i, Index j) { return original.m(i, j); });
  }
}

// --- activations ---

class ActivationOperation : public testing::TestWithParam<Mlp> {};
INSTANTIATE_TEST_SUITE_P(Operations, ActivationOperation,
                         testing::Values(Mlp::gelu, Mlp::swiglu, Mlp::geglu, Mlp::relu2, Mlp::clamped_swiglu));

TEST_P(ActivationOperation, MatchesItsFormulaForwardAndBackward) {
  const Mlp kind = GetParam();
  const Index n = 130, d = 19;
  const bool clamped = kind == Mlp::clamped_swiglu;
  const double spread = clamped ? 5 : 2;
  Owned<double> g(n, d, 1, spread), up(n, d, 2, spread), y(n, d, 3), dy(n, d, 4);
  const M gate = kind == Mlp::gelu || kind == Mlp::relu2 ? M{} : g.m;
  const Loss loss = [&] {
    activation(device(), kind, y.m, gate, up.m);
    return dot(y.m, dy.m);
  };
  loss();
  expect_near(y.m, [&](Index i, Index j) {
    const double x = gate ? g.m(i, j) : up.m(i, j), below = std::min(x, 7.0);
    if (clamped) return below / (1 + std::exp(-1.702 * below)) * (std::clamp(up.m(i, j), -7.0, 7.0) + 1);
    const double a = kind == Mlp::relu2 ? (x > 0 ? x * x : 0)
                     : kind == Mlp::swiglu
                         ? x / (1 + std::exp(-x))
                         : 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return gate ? a * up.m(i, j) : a;
  });
  const Owned<double> gate_copy(n, d, 1, spread), up_copy(n, d, 2, spread);
  const auto [dgate, dup] = activation_backward(device(), kind, gate ? gate_copy.m : M{}, up_copy.m, dy.m);
  expect_gradient("dup", up.m, dup, loss);
  if (gate) expect_gradient("dgate", g.m, dgate, loss);
}

// --- head ---

TEST(Operations, HeadComputesLogProbsAndTheirGradient) {
  const Index n = 140, vocab = 37;
  Owned<double> logits(n, vocab, 1, 3), logp(1, n, 2), w(1, n, 3), scratch(n, vocab, 4);
  std::vector<std::int32_t> targets;
  for (Index i = 0; i < n; ++i) targets.push_back(i % 5 == 0 ? -1 : static_cast<std::int32_t>(i * 7 % vocab));
  const Loss loss = [&] {
    std::copy_n(logits.m.data, logits.m.size(), scratch.m.data);
    log_probabilities(device(), logp.m, scratch.m, integers(targets));
    return dot(logp.m, w.m);
  };
  loss();
  expect_near(logp.m, [&](Index, Index i) {
    const std::int32_t target = targets[static_cast<std::size_t>(i)];
    double sum = 0;
    for (Index j = 0; j < vocab; ++j) sum += std::exp(logits.m(i, j));
    return target < 0 ? 0 : logits.m(i, target) - std::log(sum);
  });
  Owned<double> dlogits(n, vocab, 1, 3);
  log_probabilities_backward<double>(device(), logp.m, dlogits.m, integers(targets), {w.m});
  expect_gradient("dlogits", logits.m, dlogits.m, loss);
}

TEST(Operations, HeadGoesBackThroughTheSoftCap) {
  const Index n = 9, vocab = 37;
  const double cap = 2.5;
  Owned<double> logits(n, vocab, 1, 3), logp(1, n, 2), w(1, n, 3), capped(n, vocab, 4);
  std::vector<std::int32_t> targets;
  for (Index i = 0; i < n; ++i) targets.push_back(i % 5 == 0 ? -1 : static_cast<std::int32_t>(i * 7 % vocab));
  const auto cap_logits = [&] {
    std::copy_n(logits.m.data, logits.m.size(), capped.m.data);
    soft_cap(device(), capped.m, cap);
  };
  const Loss loss = [&] {
    cap_logits();
    log_probabilities(device(), logp.m, capped.m, integers(targets));
    return dot(logp.m, w.m);
  };
  cap_logits();
  expect_near(capped.m, [&](Index i, Index j) { return cap * std::tanh(logits.m(i, j) / cap); });
  log_probabilities_backward<double>(device(), logp.m, capped.m, integers(targets), {w.m}, cap);
  const Owned<double> dlogits(n, vocab, 5);
  std::copy_n(capped.m.data, capped.m.size(), dlogits.m.data);
  const std::vector<double> before = *logp.storage;
  loss();
  EXPECT_EQ(*logp.storage, before);
  expect_gradient("dlogits", logits.m, dlogits.m, loss);
}

TEST(Operations, HeadSurvivesExtremeLogits) {
  std::vector<std::int32_t> targets = {0, 1, 2};
  Owned<float> logits(3, 4, 1, 0), logp(1, 3, 2), w(1, 3, 3);
  const float rows[3][4] = {{1e30f, 0, 0, 0}, {-1e30f, 0, 1e4f, 0}, {-88, -100, -1000, -90}};
  std::copy_n(&rows[0][0], 12, logits.m.data);
  log_probabilities_backward<float>(device(), logp.m, logits.m, integers(targets), {w.m});
  for (float x : *logits.storage) EXPECT_TRUE(std::isfinite(x));
  EXPECT_EQ(logp.m(0, 0), 0);
  EXPECT_EQ(logp.m(0, 1), -1e4f);
}

// The weights of a policy objective against finite differences of its loss, for clipped and unclipped ratios.
TEST(Operations, PolicyWeightsAreTheDerivativeOfTheClippedLoss) {
  const double lowest = 0.8, highest = 1.3, h = 1e-6;
  Owned<double> advantage(1, 40, 1), old(1, 40, 2), kl(1, 40, 3), reference(1, 40, 4), logp(1, 40, 5);
  const TokenWeights<double> w{{}, advantage.m, old.m, kl.m, reference.m, lowest, highest};
  int clipped = 0;
  for (Index t = 0; t < 40; ++t) {
    auto loss = [&](double logp) {
      const double ratio = std::exp(logp - old.m(0, t)), a = advantage.m(0, t), delta = reference.m(0, t) - logp;
      return -std::min(ratio * a, std::clamp(ratio, lowest, highest) * a) + kl.m(0, t) * (std::exp(delta) - delta - 1);
    };
    const double x = logp.m(0, t), ratio = std::exp(x - old.m(0, t));
    EXPECT_NEAR(w(t, x), (loss(x + h) - loss(x - h)) / (2 * h), 1e-6 * (1 + std::abs(w(t, x)))) << t;
    const ClippedRatio<double> policy(ratio, advantage.m(0, t), lowest, highest);
    EXPECT_NEAR(policy.value, loss(x) - kl.m(0, t) * (std::exp(reference.m(0, t) - x) - (reference.m(0, t) - x) - 1),
                1e-12 * (1 + ratio));
    clipped += policy.clipped;
  }
  EXPECT_GT(clipped, 5);
  EXPECT_LT(clipped, 35);
  EXPECT_FALSE(ClippedRatio<double>(9, 0, lowest, highest).clipped);  // no advantage, nothing to clip
}

// --- embedding ---

TEST(Operations, EmbeddingAndItsGradient) {
  const Index n = 150, d = 70, vocab = 9;
  Owned<double> tokens_table(vocab, d, 1), positions_table(n, d, 2), x(n, d, 3), dx(n, d, 4);
  std::vector<std::int32_t> tokens, positions;
  for (int i = 0; i < n; ++i) tokens.push_back(i * i % static_cast<int>(vocab)), positions.push_back(i % 60);
  std::vector<std::int32_t> by_token = rows_by_index(tokens), by_position = rows_by_index(positions);
  const EmbeddingIndex index{integers(tokens), integers(positions), integers(by_token), integers(by_position)};
  const Loss loss = [&] {
    embedding(device(), x.m, index, {tokens_table.m, positions_table.m}, 3.5);
    return dot(x.m, dx.m);
  };
  loss();
  expect_near(x.m, [&](Index i, Index j) {
    return 3.5 * tokens_table.m(tokens[static_cast<std::size_t>(i)], j) +
           positions_table.m(positions[static_cast<std::size_t>(i)], j);
  });
  Owned<double> dtable = zeros(vocab, d), dpositions = zeros(n, d);
  embedding_backward(device(), EmbeddingTables<double>{dtable.m, dpositions.m}, index, dx.m, 3.5);
  expect_gradient("dtable", tokens_table.m, dtable.m, loss);
  expect_gradient("dpositions", positions_table.m, dpositions.m, loss);
}

TEST(Operations, SumsAndConversions) {
  Owned<double> x(300, 21, 1), sums = zeros(1, 21), y(300, 21, 2), before(300, 21, 2);
  add_column_sums(device(), sums.m, x.m);
  expect_near(sums.m, [&](Index, Index j) {
    double sum = 0;
    for (Index i = 0; i < 300; ++i) sum += x.m(i, j);
    return sum;
  });
  Owned<double> squares(1, 300, 3);
  row_squares(device(), squares.m, x.m);
  for (Index i = 0; i < 300; ++i)
    EXPECT_NEAR(squares.m(0, i), dot(x.m.slice({i, i + 1}), x.m.slice({i, i + 1})), 1e-12);
  add(device(), y.m, x.m);
  expect_near(y.m, [&](Index i, Index j) { return before.m(i, j) + x.m(i, j); });
  Owned<float> narrow(300, 21, 3);
  convert(device(), narrow.m, x.m);
  EXPECT_EQ(narrow.m(7, 7), static_cast<float>(x.m(7, 7)));
  zero(device(), y.m);
  EXPECT_EQ(dot(y.m, y.m), 0);
}

// --- arena ---

TEST(ArenaTest, TwoStacksShareOneBlock) {
  Cpu dev(1024);
  auto a = allocate<float>(dev, 1, 64, Kind::saved);  // 256 bytes
  {
    auto scope = dev.scope();
    auto b = allocate<float>(dev, 1, 65, Kind::chunk);  // rounded up to 512
    EXPECT_EQ(static_cast<void*>(b.data), static_cast<void*>(a.data + 64));
    auto c = allocate<float>(dev, 1, 10, Kind::gradients, End::top);
    EXPECT_EQ(static_cast<void*>(c.data), static_cast<void*>(a.data + 192));
    EXPECT_EQ(dev.arena.used(), 1024u);
    EXPECT_THROW(allocate<float>(dev, 1, 1, Kind::chunk), Error);
  }
  EXPECT_EQ(dev.arena.used(), 512u);  // a scope leaves the top alone
  dev.arena.release_top();
  EXPECT_EQ(dev.arena.used(), 256u);
  EXPECT_EQ(dev.arena.peak(), 1024u);
  EXPECT_EQ(dev.arena.peak_by_kind()[static_cast<int>(Kind::chunk)], 512u);
}

TEST(ArenaTest, RefusesMoreMemoryThanTheMachineHas) { EXPECT_THROW(Cpu(std::size_t{1} << 50), Error); }

}  // namespace
}  // namespace streambp
