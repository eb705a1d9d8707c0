// Attention of both devices, in training and in generation, against the CPU in float64, for awkward shapes.
#include "kernels/cached_attention.cuh"
#include "tests/both_devices.h"
#include "tests/paged.h"

namespace streambp {
namespace {

template <class Tested>
class DeviceAttention : public OnBothDevices<Tested> {};
TYPED_TEST_SUITE(DeviceAttention, DeviceTypes, DeviceTypeNames);

struct AttentionCase {
  Index heads, kv_heads, dim, window;
  std::vector<Index> documents;
  double cap = 0;
};

template <class Fixture>
void expect_attention(Fixture& on, const AttentionCase& p) {
  using T = typename Fixture::T;
  SCOPED_TRACE(std::to_string(p.heads) + " heads, " + std::to_string(p.kv_heads) + " kv heads of " +
               std::to_string(p.dim) + ", window " + std::to_string(p.window));
  auto& gpu = *on.gpu;
  auto scope = gpu.scope();
  const AttentionShape shape{p.heads, p.kv_heads, p.dim, p.window, 0, p.cap};
  std::vector<std::int32_t> b;
  for (Index length : p.documents)
    b.insert(b.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(b.size()));
  const TwinIntegers begins(gpu, b);
  const Index n = begins.host.cols, q_width = p.heads * p.dim, kv_width = p.kv_heads * p.dim;
  const Twin<T> q(gpu, n, q_width, 1), k(gpu, n, kv_width, 2), v(gpu, n, kv_width, 3), dout(gpu, n, q_width, 6);
  const Twin<T> out(gpu, n, q_width, 4), dq(gpu, n, q_width, 7);
  const Twin<float> lse(gpu, n, p.heads, 5), dk(gpu, n, kv_width, 8), dv(gpu, n, kv_width, 9);
  const auto forward = [&](auto& dev, Rows r, auto out, auto lse, auto q, auto k, auto v, auto begins) {
    attention(dev, AttentionOutput{out.slice(r), lse.slice(r)}, {q.slice(r), k, v}, {{begins}, r, shape});
  };
  const auto backward = [&](auto& dev, Rows r, auto dq, auto dk, auto dv, auto dout, auto q, auto k, auto v, auto out,
                            auto lse, auto begins) {
    attention_backward(dev, AttentionGradient{dq.slice(r), dk, dv}, dout.slice(r), {q.slice(r), k, v},
                       {out.slice(r), lse.slice(r)}, {{begins}, r, shape});
  };
  on.both(forward, Rows{0, n}, out, lse, q, k, v, begins);
  on.expect_near("out", out);
  on.expect_near("lse", lse, kRounding<T>);
  on.both(backward, Rows{0, n}, dq, dk, dv, dout, q, k, v, out, lse, begins);
  on.expect_near("dq", dq, 2 * kRounding<T>);
  on.expect_near("dk", dk, 2 * kRounding<T>);
  on.expect_near("dv", dv, 2 * kRounding<T>);

  // by chunks: the same bits
  const Twin<T> out2(gpu, n, q_width, 14), dq2(gpu, n, q_width, 17);
  const Twin<float> lse2(gpu, n, p.heads, 15), dk2(gpu, n, kv_width, 8), dv2(gpu, n, kv_width, 9);
  const auto rows_on_gpu = [&](const auto& f, Rows r, const auto&... twins) { f(gpu, r, on_gpu(twins)...); };
  for (Rows r : chunks(n, kTile)) rows_on_gpu(forward, r, out2, lse2, q, k, v, begins);
  for (Rows r : last_to_first(chunks(n, kTile)))
    rows_on_gpu(backward, r, dq2, dk2, dv2, dout, q, k, v, out2, lse2, begins);
  const auto expect_equal = [&](const char* what, const auto& a, const auto& b) {
    const auto x = to_host(gpu, on_gpu(a)), y = to_host(gpu, on_gpu(b));
    EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])), 0) << what << ": chunks changed bits";
  };
  expect_equal("out", out, out2), expect_equal("lse", lse, lse2), expect_equal("dq", dq, dq2);
  expect_equal("dk", dk, dk2), expect_equal("dv", dv, dv2);

  // as in generation: rows that start inside a tile
  for (Rows r : {Rows{0, 1}, Rows{n / 2, n / 2 + 1}, Rows{n - 1, n}}) {
    rows_on_gpu(forward, r, out2, lse2, q, k, v, begins);
  }
  expect_equal("a row alone", out, out2);
}

TYPED_TEST(DeviceAttention, MatchesItsFormula) {
  std::vector<AttentionCase> cases = {{6, 2, 5, 0, {300}},       {2, 1, 40, 0, {1, 127, 128, 2, 90}},
                                      {2, 2, 64, 17, {280, 40}}, {2, 1, 6, 2, {140}},
                                      {1, 1, 16, 150, {400}},    {2, 1, 24, 60, {170, 30}, 0.7}};
  for (Index dim : {80, 96, 128, 256, 300, 512})
    cases.push_back({2, 1, dim, 0, {sized<Index>(130, 130, 70), 160}, dim == 256 ? 1.5 : 0});
  if (sized(true, false, false)) {
    for (Index dim : {64, 80, 96, 128, 256, 512}) {
      for (Index window : {0, 700})
        cases.push_back({4, 2, dim, window, {1500, 1, 64, 2000, 63, 469}, window == 0 || dim > 256 ? 0 : 2.0});
    }
  }
  for (const AttentionCase& p : cases) expect_attention(*this, p);
}

TYPED_TEST(DeviceAttention, InEveryOrderOfThreads) {
  in_every_order([&] { expect_attention(*this, {2, 1, 24, 0, {150, 130}}); });
}

// Sequences of a cache that read their last tokens. Each case: these lengths, and the number of tokens that each reads.
struct CachedCase {
  Index heads, kv_heads, dim, window;
  std::vector<Index> lengths, reads;
  double cap = 0;
};

template <class Fixture>
void expect_cached_attention(Fixture& on, const CachedCase& p) {
  using T = typename Fixture::T;
  SCOPED_TRACE(std::to_string(p.heads) + " heads, " + std::to_string(p.kv_heads) + " kv heads of " +
               std::to_string(p.dim) + ", window " + std::to_string(p.window));
  auto& gpu = *on.gpu;
  auto scope = gpu.scope();
  const AttentionShape shape{p.heads, p.kv_heads, p.dim, p.window, 0, p.cap};
  const Index room = *std::max_element(p.lengths.begin(), p.lengths.end()), q_width = p.heads * p.dim,
              kv_width = p.kv_heads * p.dim;
  std::vector<SequencePiece> pieces;
  std::vector<std::int32_t> s, t;
  const ShuffledPages pages(static_cast<Index>(p.lengths.size()), room);
  for (std::size_t i = 0; i < p.lengths.size(); ++i) {
    pieces.push_back({static_cast<Index>(i), {p.lengths[i] - p.reads[i], p.lengths[i]}, static_cast<Index>(t.size())});
    s.resize(s.size() + static_cast<std::size_t>(p.reads[i]), static_cast<std::int32_t>(i));
    for (Index j = pieces[i].tokens.begin; j < pieces[i].tokens.end; ++j) t.push_back(static_cast<std::int32_t>(j));
  }
  const TwinIntegers tables(gpu, pages.tables), sequences(gpu, s), positions(gpu, t),
      zeros(gpu, Tokens(static_cast<std::size_t>(room)));
  const Index n = positions.host.cols;
  const Twin<T> q(gpu, n, q_width, 1), k(gpu, pages.rows(), kv_width, 2), v(gpu, pages.rows(), kv_width, 3),
      out(gpu, n, q_width, 4), new_k(gpu, n, kv_width, 5), new_v(gpu, n, kv_width, 6);
  const Twin<float> lse(gpu, n, p.heads, 7);
  const auto rows_of = [&](auto tables, auto sequences, auto positions) {
    return SequenceIndex{tables.reshape(pages.of_sequence), sequences, positions};
  };
  const auto append = [&](auto& dev, auto k, auto v, auto new_k, auto new_v, auto... rows) {
    append_to_cache(dev, KeysValues{k, v}, {new_k, new_v}, {pieces, rows_of(rows...), {}});
  };
  on.both(append, k, v, new_k, new_v, tables, sequences, positions);
  EXPECT_EQ(error_of(gpu, k), 0);
  EXPECT_EQ(error_of(gpu, v), 0);
  const auto attend = [&](auto& dev, auto out, auto lse, auto q, auto k, auto v, auto zeros, auto... rows) {
    cached_attention(dev, AttentionOutput{out, lse}, {q, k, v}, {pieces, rows_of(rows...), {zeros}}, shape);
  };
  on.both(attend, out, lse, q, k, v, zeros, tables, sequences, positions);
  on.expect_near("out", out);
  on.expect_near("lse", lse);

  // Each sequence alone, as a stream that begins with it and as the only one of a chunk: the same bits.
  const auto bits = [&](auto m) {
    const auto numbers = to_host(gpu, m);
    const auto* bytes = reinterpret_cast<const char*>(numbers.data());
    return std::string(bytes, bytes + numbers.size() * sizeof(numbers[0]));
  };
  const auto expect_bits = [&](const char* what, const SequencePiece& piece, const AttentionOutput<T>& alone) {
    EXPECT_EQ(bits(out.gpu.slice(piece.rows())), bits(alone.attended)) << what << ", sequence " << piece.sequence;
    EXPECT_EQ(bits(lse.gpu.slice(piece.rows())), bits(alone.lse)) << what << ", sequence " << piece.sequence;
  };
  for (const SequencePiece& piece : pieces) {
    const Twin<T> out2(gpu, piece.tokens.size(), q_width, 8);
    const Twin<float> lse2(gpu, piece.tokens.size(), p.heads, 9);
    const AttentionOutput<T> alone = {out2.gpu, lse2.gpu};
    const Matrix<T> queries = q.gpu.slice(piece.rows());
    const Twin<T> keys(gpu, piece.tokens.end, kv_width, 0), values(gpu, piece.tokens.end, kv_width, 0);
    pages.gather(gpu, keys.gpu, k.gpu, piece.sequence), pages.gather(gpu, values.gpu, v.gpu, piece.sequence);
    attention(gpu, alone, {queries, keys.gpu, values.gpu}, {{zeros.gpu}, piece.tokens, shape});
    expect_bits("a stream", piece, alone);
    const std::vector<SequencePiece> only = {{piece.sequence, piece.tokens, 0}};
    const Rows rows = piece.rows();
    cached_attention(gpu, alone, {queries, k.gpu, v.gpu},
                     {only, rows_of(tables.gpu, sequences.gpu.columns(rows), positions.gpu.columns(rows)), {zeros.gpu}},
                     shape);
    expect_bits("alone", piece, alone);
  }
}

TYPED_TEST(DeviceAttention, Cached) {
  std::vector<CachedCase> cases = {{6, 2, 5, 0, {300, 1, 64, 65}, {1, 1, 1, 1}},
                                   {4, 1, 40, 0, {130, 20, 1, 129}, {100, 1, 1, 3}},
                                   {2, 2, 64, 17, {200, 3, 90}, {1, 3, 70}},
                                   {8, 2, 16, 150, {270, 300}, {1, 31}, 0.7},
                                   {70, 1, 8, 0, {20, 100}, {5, 1}},  // more heads of a group than rows of a tile
                                   {2, 1, 6, 2, {140, 1}, {4, 1}}};
  for (Index dim : {80, 96, 128, 200, 256, 512})
    cases.push_back({4, 2, dim, 0, {sized<Index>(700, 130, 70), 33}, {1, 20}, dim == 256 ? 1.5 : 0});
  if (sized(true, false, false)) cases.push_back({16, 2, 128, 0, {5000, 1, 64, 2000}, {1, 1, 64, 500}});
  // Several segments of keys: of few rows, each in its own thread block; of many, one after the other.
  if constexpr (std::is_same_v<typename TypeParam::T, BFloat16>) {
    cases.push_back({4, 1, 16, 0, {2 * kSegment + 70, kSegment + 1, kSegment, 40}, {1, 1, 1, 1}});
    cases.push_back({3, 1, 16, 0, {kSegment + 10}, {40}, 0.7});  // tiles of 21 queries, one on both sides of a cut
    cases.push_back({2, 2, 16, 0, {kSegment + 30, 2 * kSegment}, {70, 1}});
    cases.push_back({2, 2, 24, 300, {kSegment + 200, kSegment + 1}, {3, 2}});
  }
  for (const CachedCase& p : cases) expect_cached_attention(*this, p);
}

TYPED_TEST(DeviceAttention, CachedInEveryOrderOfThreads) {
  in_every_order([&] {
    expect_cached_attention(*this, {4, 2, 24, 0, {150, 9}, {1, 9}});
    if constexpr (std::is_same_v<typename TypeParam::T, BFloat16> && !kSanitized)
      expect_cached_attention(*this, {1, 1, 300, 0, {2 * kSegment + 20}, {3}});  // two warps share their rows
  });
}

// A row has the same bits in any chunk, and in its document alone if that begins at a multiple of 64 rows; also where keys
// have several segments, and where rows are counted from within the stream, as in blocks.
TYPED_TEST(DeviceAttention, ARowHasTheSameBitsInAnyStream) {
  using T = typename TypeParam::T;
  auto& gpu = *this->gpu;
  // The third document begins in the tile in which the second one's next segment would begin.
  const Rows documents[] = {
      {0, 64}, {64, kSegment + 58}, {kSegment + 58, kSegment + 128}, {kSegment + 128, 2 * kSegment + 200}};
  std::vector<std::int32_t> b;
  for (const Rows rows : documents) b.resize(static_cast<std::size_t>(rows.end), static_cast<std::int32_t>(rows.begin));
  const auto n = static_cast<Index>(b.size());
  const TwinIntegers begins(gpu, b), zeros(gpu, Tokens(b.size()));
  const auto q = this->random(n, 16), k = this->random(n, 16), v = this->random(n, 16);
  for (const Index window : {0, 300}) {
    const AttentionShape shape{1, 1, 16, window};
    const auto bits = [&](const AttentionOutput<T>& out) {
      return std::pair(to_host(gpu, out.attended), to_host(gpu, out.lse));
    };
    for (const Rows document : documents) {
      const Rows last = {document.end - 60, document.end},
                 chunk = {std::max(document.end - 300, Index{0}), document.end};
      const auto out = this->random(chunk.size(), 16), again = this->random(last.size(), 16);
      const auto lse = this->wide(chunk.size(), 1), lse_again = this->wide(last.size(), 1);
      const auto compute = [&](const AttentionOutput<T>& out, Rows rows) {
        const Rows of_last = {rows.size() - last.size(), rows.size()};
        attention(gpu, out, {q.gpu.slice(rows), k.gpu, v.gpu}, {{begins.gpu}, rows, shape});
        return bits({out.attended.slice(of_last), out.lse.slice(of_last)});
      };
      SCOPED_TRACE("document " + std::to_string(document.begin) + ", window " + std::to_string(window));
      const auto expected = compute({out.gpu, lse.gpu}, chunk);
      EXPECT_EQ(compute({again.gpu, lse_again.gpu}, last), expected) << "a chunk";
      if (document.begin % 64 != 0) continue;
      attention(gpu, AttentionOutput<T>{again.gpu, lse_again.gpu},
                {q.gpu.slice(last), k.gpu.slice(document), v.gpu.slice(document)},
                {{zeros.gpu}, {last.begin - document.begin, document.size()}, shape});
      EXPECT_EQ(bits({again.gpu, lse_again.gpu}), expected) << "alone";
    }
  }
}

TYPED_TEST(DeviceAttention, SurvivesExtremeScores) {
  using T = typename TypeParam::T;
  const Index n = 200;
  const TwinIntegers begins(*this->gpu, std::vector<std::int32_t>(static_cast<std::size_t>(n), 0));
  const auto q = this->random(n, 16, 300), k = this->random(n, 16, 300), v = this->random(n, 16),
             out = this->random(n, 16), dout = this->random(n, 16), dq = this->random(n, 16);
  const auto lse = this->wide(n, 1), dk = this->wide(n, 16), dv = this->wide(n, 16);
  const AttentionShape shape{1, 1, 16, 0};
  const AttentionSpan span{{begins.gpu}, {0, n}, shape};
  const AttentionOutput<T> output{out.gpu, lse.gpu};
  attention(*this->gpu, output, {q.gpu, k.gpu, v.gpu}, span);
  attention_backward(*this->gpu, AttentionGradient<T>{dq.gpu, dk.gpu, dv.gpu}, dout.gpu, {q.gpu, k.gpu, v.gpu}, output,
                     span);
  auto expect_finite = [&](auto m) {
    for (auto x : to_host(*this->gpu, m)) ASSERT_TRUE(std::isfinite(static_cast<float>(x)));
  };
  expect_finite(out.gpu), expect_finite(lse.gpu), expect_finite(dq.gpu), expect_finite(dk.gpu), expect_finite(dv.gpu);
}

}  // namespace
}  // namespace streambp
