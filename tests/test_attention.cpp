// Attention: forward against its formula in float64, and backward against central finite differences.
#include "kernels/cached_attention.cuh"
#include "tests/operations.h"
#include "tests/paged.h"

namespace streambp {
namespace {

struct AttentionCase {
  Index heads, kv_heads, dim, window;
  std::vector<Index> documents;
  double score_scale = 0, score_cap = 0;
};
void PrintTo(const AttentionCase& p, std::ostream* out) {
  *out << p.heads << " heads, " << p.kv_heads << " kv heads of " << p.dim << ", window " << p.window;
}
class AttentionOperation : public testing::TestWithParam<AttentionCase> {};
INSTANTIATE_TEST_SUITE_P(Operations, AttentionOperation,
                         testing::Values(AttentionCase{2, 2, 8, 0, {50}}, AttentionCase{6, 2, 5, 0, {300}},
                                         AttentionCase{3, 1, 7, 0, {1, 127, 128, 2, 90}},
                                         AttentionCase{4, 4, 3, 17, {280, 40}, 0.7}, AttentionCase{2, 1, 6, 1, {140}},
                                         AttentionCase{2, 1, 4, 150, {400}}, AttentionCase{1, 1, 260, 3, {6, 2}},
                                         AttentionCase{4, 2, 6, 30, {150, 40}, 1.5, 2.5}));

TEST_P(AttentionOperation, MatchesItsFormulaForwardAndBackward) {
  const AttentionCase& p = GetParam();
  const AttentionShape shape{p.heads, p.kv_heads, p.dim, p.window, p.score_scale, p.score_cap};
  std::vector<std::int32_t> begins;
  for (Index length : p.documents)
    begins.insert(begins.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(begins.size()));
  const auto n = static_cast<Index>(begins.size());
  const auto key_begin = integers(begins);
  const Index q_width = p.heads * p.dim, kv_width = p.kv_heads * p.dim, group = p.heads / p.kv_heads;
  Owned<double> q(n, q_width, 1), k(n, kv_width, 2), v(n, kv_width, 3), out(n, q_width, 4), lse(n, p.heads, 5),
      dout(n, q_width, 6);
  const AttentionInput<double> input{q.m, k.m, v.m};
  const AttentionOutput<double> output{out.m, lse.m};
  auto span = [&](Rows rows) { return AttentionSpan{{key_begin, begins}, rows, shape}; };
  const Rows all = {0, n};
  const Loss loss = [&] {
    attention(device(), output, input, span(all));
    return dot(out.m, dout.m);
  };
  loss();
  expect_near(out.m, [&](Index i, Index j) {
    const Index h = j / p.dim, kv = h / group;
    double total = 0, sum = 0;
    for (Index t = begins[static_cast<std::size_t>(i)]; t <= i; ++t) {
      if (p.window > 0 && t <= i - p.window) continue;
      double score = 0;
      for (Index c = 0; c < p.dim; ++c) score += q.m(i, h * p.dim + c) * k.m(t, kv * p.dim + c);
      score *= p.score_scale > 0 ? p.score_scale : 1 / std::sqrt(static_cast<double>(p.dim));
      const double e = std::exp(p.score_cap > 0 ? p.score_cap * std::tanh(score / p.score_cap) : score);
      total += e, sum += e * v.m(t, kv * p.dim + j % p.dim);
    }
    return sum / total;
  });
  Owned<double> dq(n, q_width, 7), dk = zeros(n, kv_width), dv = zeros(n, kv_width);
  attention_backward(device(), AttentionGradient<double>{dq.m, dk.m, dv.m}, dout.m, input, output, span(all));
  expect_gradient("dq", q.m, dq.m, loss);
  expect_gradient("dk", k.m, dk.m, loss);
  expect_gradient("dv", v.m, dv.m, loss);
  double pairs = 0;
  for (Index i = 0; i < n; ++i) {
    const Index begin = begins[static_cast<std::size_t>(i)];
    pairs += static_cast<double>(p.window > 0 ? std::min(i - begin + 1, p.window) : i - begin + 1);
  }
  EXPECT_EQ(attention_pairs(span(all)), pairs);
}

// --- Generation: the next tokens of several sequences, against a cache ---

class CachedAttention : public testing::TestWithParam<AttentionCase> {};
// In place of the documents of a case: sequences of these lengths.
INSTANTIATE_TEST_SUITE_P(Operations, CachedAttention,
                         testing::Values(AttentionCase{4, 2, 8, 0, {1, 129, 50}},
                                         AttentionCase{6, 2, 5, 0, {300, 1, 7}},
                                         AttentionCase{3, 1, 7, 40, {128, 256, 200}, 0.7, 1.5},
                                         AttentionCase{2, 2, 3, 1, {140}}));

// Sequences read the last tokens of what they hold, at most 9 rows or one row each, and one reads nothing.
TEST_P(CachedAttention, MatchesItsFormula) {
  const AttentionCase& p = GetParam();
  const AttentionShape shape{p.heads, p.kv_heads, p.dim, p.window, p.score_scale, p.score_cap};
  const Index room = 320, q_width = p.heads * p.dim, kv_width = p.kv_heads * p.dim, group = p.heads / p.kv_heads;
  ShuffledPages pages(static_cast<Index>(p.documents.size()), room);
  for (const Index most : {1, 9, 400}) {
    std::vector<SequencePiece> pieces = {{0, {7, 7}, 0}};
    std::vector<std::int32_t> sequences, positions, begins(static_cast<std::size_t>(room));
    for (auto s = static_cast<Index>(p.documents.size()) - 1; s >= 0; --s) {
      const Index length = p.documents[static_cast<std::size_t>(s)], begin = std::max<Index>(0, length - most);
      pieces.push_back({s, {begin, length}, static_cast<Index>(positions.size())});
      for (Index i = begin; i < length; ++i) {
        sequences.push_back(static_cast<std::int32_t>(s)), positions.push_back(static_cast<std::int32_t>(i));
      }
    }
    const auto n = static_cast<Index>(positions.size());
    Owned<double> q(n, q_width, 1), k(pages.rows(), kv_width, 2), v(pages.rows(), kv_width, 3), out(n, q_width, 4),
        lse(n, p.heads, 5), new_k(n, kv_width, 6), new_v(n, kv_width, 7);
    const SequenceRows rows = {
        pieces,
        {integers(pages.tables).reshape(pages.of_sequence), integers(sequences), integers(positions)},
        {integers(begins), {}}};
    append_to_cache(device(), KeysValues<double>{k.m, v.m}, {new_k.m, new_v.m}, rows);
    cached_attention(device(), AttentionOutput<double>{out.m, lse.m}, {q.m, k.m, v.m}, rows, shape);
    expect_near(out.m, [&](Index i, Index j) {
      const Index h = j / p.dim, kv = h / group, position = positions[static_cast<std::size_t>(i)];
      double total = 0, sum = 0;
      for (Index t = p.window > 0 ? std::max<Index>(0, position - p.window + 1) : 0; t <= position; ++t) {
        const Index key = pages.row(sequences[static_cast<std::size_t>(i)], t);
        double score = 0;
        for (Index c = 0; c < p.dim; ++c) score += q.m(i, h * p.dim + c) * k.m(key, kv * p.dim + c);
        score *= shape.scale();
        const double e = std::exp(p.score_cap > 0 ? p.score_cap * std::tanh(score / p.score_cap) : score);
        total += e, sum += e * v.m(key, kv * p.dim + j % p.dim);
      }
      return sum / total;
    });
    for (const SequencePiece& piece : pieces) {
      for (Index i = 0; i < piece.tokens.size(); ++i) {
        for (Index j = 0; j < kv_width; ++j) {
          const Index row = pages.row(piece.sequence, piece.tokens.begin + i);
          ASSERT_EQ(k.m(row, j), new_k.m(piece.row + i, j));
          ASSERT_EQ(v.m(row, j), new_v.m(piece.row + i, j));
        }
      }
    }
  }
}

TEST(Operations, AttentionPairsMatchTheirClosedForm) {
  for (Index window : {0, 1, 5, 100}) {
    std::vector<std::int32_t> begins(60, 0);
    for (const Rows rows : {Rows{0, 60}, Rows{3, 4}, Rows{10, 47}}) {
      const AttentionShape shape{.heads = 1, .kv_heads = 1, .head_dim = 1, .window = window};
      EXPECT_EQ(attention_pairs({{}, rows, shape}), attention_pairs({{{}, begins}, rows, shape})) << window;
    }
  }
}

// A probability of 0 times NaN would be NaN: earlier rows of the tile must not see it.
TEST(AttentionOperations, WhatIsNotFiniteDoesNotReachEarlierRows) {
  const Index n = 200, bad = 150;
  std::vector<std::int32_t> one_document(static_cast<std::size_t>(n), 0);
  const auto key_begin = integers(one_document);
  const AttentionShape shape{4, 2, 8, 0};
  const AttentionSpan span{{key_begin, {}}, {0, n}, shape};
  auto run = [&](Index row, float value, bool in_k) {
    Owned<float> q(n, 32, 1), k(n, 16, 2), v(n, 16, 3), out(n, 32, 4), lse(n, 4, 5), dout(n, 32, 6), dq(n, 32, 7),
        dk(n, 16, 8), dv(n, 16, 9);
    if (row < n) (in_k ? k : v).m(row, 3) = value;
    const AttentionInput<float> input{q.m, k.m, v.m};
    const AttentionOutput<float> output{out.m, lse.m};
    attention(device(), output, input, span);
    attention_backward(device(), AttentionGradient<float>{dq.m, dk.m, dv.m}, dout.m, input, output, span);
    return std::pair{out, dq};
  };
  const auto finite = run(n, 0, false);
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    for (const bool in_k : {false, true}) {
      const auto result = run(bad, value, in_k);
      for (const auto& [one, other] : {std::pair{finite.first, result.first}, {finite.second, result.second}}) {
        for (Index i = 0; i < bad; ++i)
          for (Index j = 0; j < 8; ++j) ASSERT_EQ(one.m(i, j), other.m(i, j)) << "row " << i << " of " << value;
        if (!in_k) {
          EXPECT_FALSE(std::isfinite(other.m(bad, 3))) << "row " << bad << " sees " << value;
        }
      }
    }
  }
}

}  // namespace
}  // namespace streambp
