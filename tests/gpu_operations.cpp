// Each operation of both devices, in float32 and bfloat16, against the CPU in float64, for awkward shapes.
#include "kernels/cached_attention.cuh"
#include "model/quantised.h"
#include "tests/gpu.h"
#include "training/optimizer.h"

namespace streambp {
namespace {

template <class Device, class Number>
struct On {
  using D = Device;
  using T = Number;
};

template <class Tested>
class DeviceOperations : public testing::Test {
 public:
  using D = typename Tested::D;
  using T = typename Tested::T;

  void SetUp() override {
    constexpr std::size_t room = std::size_t{1} << 27;
    host = std::make_unique<Cpu>(2 * room);
    if constexpr (D::kind == DeviceKind::cpu) {
      gpu = std::make_unique<D>(room);
    } else {
      if (const std::string reason = cuda::unusable(); !reason.empty()) GTEST_SKIP() << "no GPU: " << reason;
      gpu = std::make_unique<D>(room, kTile);
    }
  }
  Twin<T> random(Index rows, Index cols, double spread = 1, double mean = 0) {
    return {*gpu, rows, cols, ++seed, spread, mean};
  }
  Twin<float> wide(Index rows, Index cols, double spread = 1) { return {*gpu, rows, cols, ++seed, spread}; }
  template <class U>
  void expect_near(const char* what, const Twin<U>& twin, double tolerance = kRounding<T>) {
    EXPECT_LE(error_of(*gpu, twin), tolerance) << what;
  }
  // Calls f(device, arguments...) on both devices; a Twin is each device's matrix.
  template <class F, class... Arguments>
  void both(F&& f, const Arguments&... arguments) {
    f(*host, on_host(arguments)...);
    f(*gpu, on_gpu(arguments)...);
  }

  std::unique_ptr<Cpu> host;
  std::unique_ptr<D> gpu;  // the device under test
  std::uint64_t seed = 0;
};
#ifdef CUDA_ON_CPU  // without a GPU: sizes are small
using Types = testing::Types<On<Cuda, float>, On<Cuda, BFloat16>, On<Cpu, float>, On<Cpu, BFloat16>>;
#else
using Types = testing::Types<On<Cuda, float>, On<Cuda, BFloat16>>;
#endif
struct TypeNames {
  template <class Tested>
  static std::string GetName(int) {
    return std::string(Tested::D::kind == DeviceKind::cuda ? "cuda_" : "cpu_") +
           (sizeof(typename Tested::T) == 4 ? "float32" : "bfloat16");
  }
};
TYPED_TEST_SUITE(DeviceOperations, Types, TypeNames);

// A function template as an argument.
#define FUNCTION(name) [](auto& dev, const auto&... arguments) { return name(dev, arguments...); }

TYPED_TEST(DeviceOperations, MatrixProducts) {
  constexpr std::array<Index, 3> shapes[] = {{1, 8, 16},    {3, 5, 2},     {256, 40, 24},
                                             {300, 77, 31}, {513, 64, 96}, {700, 33, 130}};
  for (const auto& [n, in, out] : shapes) {
    auto scope = this->gpu->scope();
    const auto x = this->random(n, in), w = this->random(out, in), bias = this->random(1, out),
               residual = this->random(n, out), y = this->random(n, out), dy = this->random(n, out),
               dx = this->random(n, in);
    this->both(FUNCTION(matmul), y, x, w);
    this->expect_near("y", y);
    this->both(FUNCTION(matmul), y, x, w, bias);
    this->expect_near("y with bias", y);
    this->both(FUNCTION(matmul), y, x, w, bias, residual);
    this->expect_near("y with bias and residual", y);
    this->both(FUNCTION(matmul_backward_input), dx, dy, w, Update::add);
    this->expect_near("dx, added", dx);
    this->both(FUNCTION(matmul_backward_input), dx, dy, w, Update::assign);
    this->expect_near("dx", dx);
    const auto dw = this->wide(out, in), db = this->wide(1, out);
    this->both(FUNCTION(matmul_backward_weight), dw, db, dy, x);
    this->expect_near("dw", dw, 1e-5);  // sums are in float32 for any type
    this->expect_near("db", db, 1e-5);
  }
}

TYPED_TEST(DeviceOperations, Norms) {
  in_every_order([&] {
    for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{
             {1, 8}, {5, 7}, {300, 24}, {258, 33}, {700, 128}, {17, 1000}, {35, sized<Index>(8192, 4160, 1032)}}) {
      for (const NormStyle style :
           {NormStyle{.eps = 1e-5}, NormStyle{.eps = 1e-5, .offset = 1}, NormStyle{.eps = 1e-5, .centered = true}}) {
        auto scope = this->gpu->scope();
        const auto x = this->random(rows, cols, 1, 0.3), w = this->random(1, cols, 0.2, 1), b = this->random(1, cols),
                   y = this->random(rows, cols), dy = this->random(rows, cols), dx = this->random(rows, cols);
        const auto dw = this->wide(1, cols), db = this->wide(1, cols);
        const bool bias = style.centered;
        const auto if_biased = [=](auto m) { return bias ? m : decltype(m){}; };
        const auto forward = [=](auto& dev, auto y, auto x, auto w, auto b) {
          norm(dev, y, {x, {w, if_biased(b)}, style});
        };
        this->both(forward, y, x, w, b);
        this->expect_near("y", y);
        const auto backward = [=](auto& dev, auto dx, auto dw, auto db, auto dy, auto x, auto w) {
          norm_backward(dev, dx, norm_weights(dw, if_biased(db)), dy, {x, {w, {}}, style}, Update::add);
        };
        this->both(backward, dx, dw, db, dy, x, w);
        this->expect_near("dx", dx);
        this->expect_near("dweight", dw, 3e-5);
        if (bias) this->expect_near("dbias", db, 3e-5);
        const auto frozen = [=](auto& dev, auto dx, auto db, auto dy, auto x, auto w) {
          norm_backward(dev, dx, norm_weights(decltype(db){}, if_biased(db)), dy, {x, {w, {}}, style}, Update::add);
        };
        this->both(frozen, dx, db, dy, x, w);
        this->expect_near("dx beside a frozen weight", dx);
        if (bias) this->expect_near("dbias beside a frozen weight", db, 3e-5);
        const auto in_place = [=](auto& dev, auto dy, auto dw, auto x, auto w) {
          norm_backward(dev, dy, norm_weights(dw, decltype(dw){}), dy, {x, {w, {}}, style}, Update::assign);
        };
        this->both(in_place, dy, dw, x, w);
        this->expect_near("dx in the memory of dy", dy);
      }
    }
  });
}

TYPED_TEST(DeviceOperations, RotaryPositions) {
  for (const Index dim : {6, 64, 128}) {
    auto scope = this->gpu->scope();
    const Index n = 37, heads = 3;
    std::vector<std::int32_t> p;
    for (int i = 0; i < n; ++i) p.push_back(i * i * 700);  // up to a million: too large for angles in float32
    const TwinIntegers positions(*this->gpu, p);
    const auto x = this->random(n, heads * dim);
    const RopeFrequencies f = {rope_frequencies(dim, 10000, {}).values, 1.1};
    this->both(FUNCTION(rope), x, positions, f, Direction::forward);
    this->expect_near("forward", x);
    this->both(FUNCTION(rope), x, positions, f, Direction::backward);
    this->expect_near("backward", x);
  }
}

TYPED_TEST(DeviceOperations, Activations) {
  for (const Mlp kind : {Mlp::gelu, Mlp::swiglu, Mlp::geglu}) {
    for (const Index cols : {19, 64}) {
      auto scope = this->gpu->scope();
      const auto gate = this->random(130, cols, 2), up = this->random(130, cols, 2), y = this->random(130, cols),
                 dy = this->random(130, cols);
      const auto if_gated = [=](auto gate) { return kind == Mlp::gelu ? decltype(gate){} : gate; };
      const auto forward = [=](auto& dev, auto y, auto gate, auto up) { activation(dev, kind, y, if_gated(gate), up); };
      this->both(forward, y, gate, up);
      this->expect_near("y", y);
      const auto backward = [=](auto& dev, auto gate, auto up, auto dy) {
        activation_backward(dev, kind, if_gated(gate), up, dy);
      };
      this->both(backward, gate, up, dy);
      this->expect_near("dgate", gate);
      this->expect_near("dup", up);
    }
  }
}

TYPED_TEST(DeviceOperations, LogProbabilities) {
  in_every_order([&] {
    for (const Index vocab : {5, 1024, sized(151936, 20011, 4003)}) {
      auto scope = this->gpu->scope();
      const Index n = 9;
      std::vector<std::int32_t> t;
      for (int i = 0; i < n; ++i) t.push_back(i % 4 == 3 ? -1 : static_cast<std::int32_t>((i * 7919) % vocab));
      const TwinIntegers targets(*this->gpu, t);
      const auto logits = this->random(n, vocab, 3);
      const auto logp = this->wide(1, n), w = this->wide(1, n);
      const auto backward = [](auto& dev, auto logp, auto logits, auto targets, auto w) {
        log_probabilities_backward(dev, logp, logits, targets, {w});
      };
      this->both(backward, logp, logits, targets, w);
      this->expect_near("logp", logp, 1e-5);
      this->expect_near("dlogits", logits);
    }
  });
}

TYPED_TEST(DeviceOperations, Embeddings) {
  for (const Index d : {20, 64}) {
    auto scope = this->gpu->scope();
    const Index n = 300, vocab = 9;
    std::vector<std::int32_t> t, p;
    for (int i = 0; i < n; ++i) t.push_back(i * i % 9), p.push_back(i % 60);
    const TwinIntegers tokens(*this->gpu, t), positions(*this->gpu, p), by_token(*this->gpu, rows_by_index(t)),
        by_position(*this->gpu, rows_by_index(p));
    const auto table = this->random(vocab, d), position_table = this->random(60, d), x = this->random(n, d);
    const auto forward = [](auto& dev, auto x, auto table, auto positions, auto... index) {
      embedding(dev, x, {index...}, {table, positions}, 1.5);
    };
    this->both(forward, x, table, position_table, tokens, positions, by_token, by_position);
    this->expect_near("x", x);
    const auto dx = this->random(n, d);
    const auto dtable = this->wide(vocab, d), dpositions = this->wide(60, d);
    const auto backward = [](auto& dev, auto dtable, auto dpositions, auto dx, auto... index) {
      embedding_backward(dev, EmbeddingTables{dtable, dpositions}, {index...}, dx, 1.5);
    };
    this->both(backward, dtable, dpositions, dx, tokens, positions, by_token, by_position);
    this->expect_near("dtable", dtable, 1e-5);
    this->expect_near("dpositions", dpositions, 1e-5);
    const auto frozen = [](auto& dev, auto dpositions, auto dx, auto... index) {
      embedding_backward(dev, EmbeddingTables{decltype(dpositions){}, dpositions}, {index...}, dx, 1.5);
    };
    this->both(frozen, dpositions, dx, tokens, positions, by_token, by_position);
    this->expect_near("dpositions beside a frozen table", dpositions, 1e-5);
    const Division lanes = {n, kTile, 0, 1, 2};
    const TwinIntegers by_lane_and_token(*this->gpu, rows_by_index(t, lanes));
    const auto both_lanes = this->wide(2 * vocab, d);
    const auto in_lanes = [](auto& dev, auto dtable, auto dx, auto tokens, auto positions, auto by_token) {
      embedding_backward(dev, EmbeddingTables{dtable, decltype(dtable){}}, {tokens, positions, by_token, {}, 2}, dx,
                         1.5);
    };
    this->both(in_lanes, both_lanes, dx, tokens, positions, by_lane_and_token);
    this->expect_near("dtable of two lanes", both_lanes, 1e-5);
  }
}

TYPED_TEST(DeviceOperations, SumsAndConversions) {
  in_every_order([&] {
    for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{1, 3}, {300, 21}, {1000, 40}, {4500, 8}}) {
      auto scope = this->gpu->scope();
      const auto x = this->random(rows, cols), y = this->random(rows, cols);
      const auto sums = this->wide(1, cols), floats = this->wide(rows, cols);
      this->both(FUNCTION(add_column_sums), sums, x);
      this->expect_near("column sums", sums, 1e-5);
      this->both(FUNCTION(add), y, floats);
      this->expect_near("add", y);
      this->both(FUNCTION(convert), y, floats);
      this->expect_near("convert", y);
      this->both(FUNCTION(scale), y, -1.5);
      this->expect_near("scale", y);
      auto squares = [&](auto& dev, auto m) {
        const auto parts = allocate<double>(dev, 1, m.rows, Kind::sums);
        row_squares(dev, parts, m);
        double sum = 0;
        for (double part : to_host(dev, parts)) sum += part;
        return sum;
      };
      auto host_scope = this->host->scope();
      const double truth = squares(*this->host, x.host.m);
      EXPECT_NEAR(squares(*this->gpu, x.gpu), truth, 1e-12 * truth);
      zero(*this->gpu, x.gpu);
      EXPECT_EQ(squares(*this->gpu, x.gpu), 0);
    }
  });
}

// Weights in 4 bits have the same bits on every device.
TYPED_TEST(DeviceOperations, WeightsInFourBits) {
  using T = typename TestFixture::T;
  for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{1, 3}, {5, 26}, {96, 64}, {300, 72}}) {
    for (const Nf4Type type : {Nf4Type::f32, Nf4Type::bf16, Nf4Type::f16}) {
      auto scope = this->gpu->scope();
      std::vector<float> weights(static_cast<std::size_t>(rows * cols));
      for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(Random(3).normal(i));
      const Nf4Numbers numbers = quantise(weights, type);
      std::vector<float> expected(weights.size());
      dequantise(numbers, Matrix<float>(expected.data(), 1, rows * cols));
      Nf4 q = allocate_nf4(*this->gpu, rows * cols);
      upload(*this->gpu, q, numbers);
      const auto w = allocate<T>(*this->gpu, rows, cols, Kind::weights);
      dequantise(*this->gpu, w, q);
      const std::vector<T> values = to_host(*this->gpu, w);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(static_cast<float>(values[i]), static_cast<float>(T(expected[i]))) << i;
    }
  }
}

// --- attention ---

struct AttentionCase {
  Index heads, kv_heads, dim, window;
  std::vector<Index> documents;
};

template <class Fixture>
void expect_attention(Fixture& on, const AttentionCase& p) {
  using T = typename Fixture::T;
  SCOPED_TRACE(std::to_string(p.heads) + " heads, " + std::to_string(p.kv_heads) + " kv heads of " +
               std::to_string(p.dim) + ", window " + std::to_string(p.window));
  auto& gpu = *on.gpu;
  auto scope = gpu.scope();
  const AttentionShape shape{p.heads, p.kv_heads, p.dim, p.window};
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

TYPED_TEST(DeviceOperations, Attention) {
  std::vector<AttentionCase> cases = {{6, 2, 5, 0, {300}},
                                      {2, 1, 40, 0, {1, 127, 128, 2, 90}},
                                      {2, 2, 64, 17, {280, 40}},
                                      {2, 1, 6, 2, {140}},
                                      {1, 1, 16, 150, {400}}};
  for (Index dim : {80, 96, 128, 200}) cases.push_back({2, 1, dim, 0, {sized<Index>(130, 130, 70), 160}});
  if (sized(true, false, false)) {
    for (Index dim : {64, 80, 96, 128, 256}) {
      for (Index window : {0, 700}) cases.push_back({4, 2, dim, window, {1500, 1, 64, 2000, 63, 469}});
    }
  }
  for (const AttentionCase& p : cases) expect_attention(*this, p);
}

TYPED_TEST(DeviceOperations, AttentionInEveryOrderOfThreads) {
  in_every_order([&] { expect_attention(*this, {2, 1, 24, 0, {150, 130}}); });
}

// Sequences of a cache that read their last tokens. Each case: these lengths, and the number of tokens that each reads.
struct CachedCase {
  Index heads, kv_heads, dim, window;
  std::vector<Index> lengths, reads;
};

template <class Fixture>
void expect_cached_attention(Fixture& on, const CachedCase& p) {
  using T = typename Fixture::T;
  SCOPED_TRACE(std::to_string(p.heads) + " heads, " + std::to_string(p.kv_heads) + " kv heads of " +
               std::to_string(p.dim) + ", window " + std::to_string(p.window));
  auto& gpu = *on.gpu;
  auto scope = gpu.scope();
  const AttentionShape shape{p.heads, p.kv_heads, p.dim, p.window};
  const Index room = *std::max_element(p.lengths.begin(), p.lengths.end()), q_width = p.heads * p.dim,
              kv_width = p.kv_heads * p.dim;
  std::vector<SequencePiece> pieces;
  std::vector<std::int32_t> s, t;
  for (std::size_t i = 0; i < p.lengths.size(); ++i) {
    const auto start = static_cast<Index>(i) * room;
    pieces.push_back({start, {p.lengths[i] - p.reads[i], p.lengths[i]}, static_cast<Index>(t.size())});
    s.resize(s.size() + static_cast<std::size_t>(p.reads[i]), static_cast<std::int32_t>(start));
    for (Index j = pieces[i].tokens.begin; j < pieces[i].tokens.end; ++j) t.push_back(static_cast<std::int32_t>(j));
  }
  const TwinIntegers starts(gpu, s), positions(gpu, t), zeros(gpu, Tokens(static_cast<std::size_t>(room)));
  const Index n = starts.host.cols, cached = room * static_cast<Index>(p.lengths.size());
  const Twin<T> q(gpu, n, q_width, 1), k(gpu, cached, kv_width, 2), v(gpu, cached, kv_width, 3),
      out(gpu, n, q_width, 4), new_k(gpu, n, kv_width, 5), new_v(gpu, n, kv_width, 6);
  const Twin<float> lse(gpu, n, p.heads, 7);
  const auto append = [&](auto& dev, auto k, auto v, auto new_k, auto new_v, auto starts, auto positions) {
    append_to_cache(dev, KeysValues{k, v}, {new_k, new_v}, {pieces, {starts, positions}, {}});
  };
  on.both(append, k, v, new_k, new_v, starts, positions);
  EXPECT_EQ(error_of(gpu, k), 0);
  EXPECT_EQ(error_of(gpu, v), 0);
  const auto attend = [&](auto& dev, auto out, auto lse, auto q, auto k, auto v, auto starts, auto positions,
                          auto zeros) {
    cached_attention(dev, AttentionOutput{out, lse}, {q, k, v}, {pieces, {starts, positions}, {zeros}}, shape);
  };
  on.both(attend, out, lse, q, k, v, starts, positions, zeros);
  on.expect_near("out", out);
  on.expect_near("lse", lse);

  // Each sequence alone, as a stream that begins with it and as the only one of a chunk: the same bits.
  const auto bits = [&](auto m) {
    const auto numbers = to_host(gpu, m);
    const auto* bytes = reinterpret_cast<const char*>(numbers.data());
    return std::string(bytes, bytes + numbers.size() * sizeof(numbers[0]));
  };
  const auto expect_bits = [&](const char* what, const SequencePiece& piece, const AttentionOutput<T>& alone) {
    EXPECT_EQ(bits(out.gpu.slice(piece.rows())), bits(alone.attended)) << what << ", sequence at " << piece.start;
    EXPECT_EQ(bits(lse.gpu.slice(piece.rows())), bits(alone.lse)) << what << ", sequence at " << piece.start;
  };
  for (const SequencePiece& piece : pieces) {
    const Twin<T> out2(gpu, piece.tokens.size(), q_width, 8);
    const Twin<float> lse2(gpu, piece.tokens.size(), p.heads, 9);
    const AttentionOutput<T> alone = {out2.gpu, lse2.gpu};
    const Matrix<T> queries = q.gpu.slice(piece.rows());
    attention(gpu, alone, {queries, k.gpu.slice(piece.cached()), v.gpu.slice(piece.cached())},
              {{zeros.gpu}, piece.tokens, shape});
    expect_bits("a stream", piece, alone);
    const std::vector<SequencePiece> only = {{piece.start, piece.tokens, 0}};
    const Rows rows = piece.rows();
    cached_attention(gpu, alone, {queries, k.gpu, v.gpu},
                     {only, {starts.gpu.columns(rows), positions.gpu.columns(rows)}, {zeros.gpu}}, shape);
    expect_bits("alone", piece, alone);
  }
}

TYPED_TEST(DeviceOperations, CachedAttention) {
  std::vector<CachedCase> cases = {{6, 2, 5, 0, {300, 1, 64, 65}, {1, 1, 1, 1}},
                                   {4, 1, 40, 0, {130, 20, 1, 129}, {100, 1, 1, 3}},
                                   {2, 2, 64, 17, {200, 3, 90}, {1, 3, 70}},
                                   {8, 2, 16, 150, {270, 300}, {1, 31}},
                                   {70, 1, 8, 0, {20, 100}, {5, 1}},  // more heads of a group than rows of a tile
                                   {2, 1, 6, 2, {140, 1}, {4, 1}}};
  for (Index dim : {80, 96, 128, 200, 256}) cases.push_back({4, 2, dim, 0, {sized<Index>(700, 130, 70), 33}, {1, 20}});
  if (sized(true, false, false)) cases.push_back({16, 2, 128, 0, {5000, 1, 64, 2000}, {1, 1, 64, 500}});
  for (const CachedCase& p : cases) expect_cached_attention(*this, p);
}

TYPED_TEST(DeviceOperations, CachedAttentionInEveryOrderOfThreads) {
  in_every_order([&] { expect_cached_attention(*this, {4, 2, 24, 0, {150, 9}, {1, 9}}); });
}

TYPED_TEST(DeviceOperations, AttentionSurvivesExtremeScores) {
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

// --- the device ---

class GpuDevice : public GpuTest {};

TEST_F(GpuDevice, RefusesMoreMemoryThanTheGpuHas) { EXPECT_ERROR(Cuda(std::size_t{1} << 50), "MiB of GPU memory"); }

TEST_F(GpuDevice, ProfilesOperations) {
  Cuda dev(1 << 20);
  dev.profile = true;
  const auto m = allocate<float>(dev, 10, 10, Kind::chunk);
  zero(dev, m);
  zero(dev, m);
  dev.synchronize();
  ASSERT_EQ(dev.work().size(), 1u);
  EXPECT_EQ(dev.work()[0].name, "zero");
  EXPECT_EQ(dev.work()[0].calls, 2);
  EXPECT_EQ(dev.work()[0].bytes, 800);
  EXPECT_GT(dev.work()[0].seconds, 0);
}

}  // namespace
}  // namespace streambp
