// Each operation of both devices, in float32 and bfloat16, against the CPU in float64, for awkward shapes.
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
 protected:
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
  // Calls f(device, matrices...) on both devices.
  template <class F, class... Twins>
  void both(F&& f, const Twins&... twins) {
    f(*host, twins.host.m...);
    f(*gpu, twins.gpu...);
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

TYPED_TEST(DeviceOperations, MatrixProducts) {
  for (const auto& [n, in, out] : std::vector<std::array<Index, 3>>{
           {1, 8, 16}, {3, 5, 2}, {256, 40, 24}, {300, 77, 31}, {513, 64, 96}, {700, 33, 130}}) {
    auto scope = this->gpu->scope();
    const auto x = this->random(n, in), w = this->random(out, in), bias = this->random(1, out),
               residual = this->random(n, out), y = this->random(n, out), dy = this->random(n, out),
               dx = this->random(n, in);
    this->both([](auto& dev, auto y, auto x, auto w) { matmul(dev, y, x, w); }, y, x, w);
    this->expect_near("y", y);
    this->both([](auto& dev, auto y, auto x, auto w, auto b) { matmul(dev, y, x, w, b); }, y, x, w, bias);
    this->expect_near("y with bias", y);
    this->both([](auto& dev, auto y, auto x, auto w, auto b, auto r) { matmul(dev, y, x, w, b, r); }, y, x, w, bias,
               residual);
    this->expect_near("y with bias and residual", y);
    this->both([](auto& dev, auto dx, auto dy, auto w) { matmul_backward_input(dev, dx, dy, w, Update::add); }, dx, dy,
               w);
    this->expect_near("dx, added", dx);
    this->both([](auto& dev, auto dx, auto dy, auto w) { matmul_backward_input(dev, dx, dy, w, Update::assign); }, dx,
               dy, w);
    this->expect_near("dx", dx);
    const auto dw = this->wide(out, in), db = this->wide(1, out);
    this->both([](auto& dev, auto dw, auto db, auto dy, auto x) { matmul_backward_weight(dev, dw, db, dy, x); }, dw, db,
               dy, x);
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
        this->both(
            [=](auto& dev, auto y, auto x, auto w, auto b) {
              norm(dev, y, {x, {w, bias ? b : decltype(b){}}, style});
            },
            y, x, w, b);
        this->expect_near("y", y);
        this->both(
            [=](auto& dev, auto dx, auto dw, auto db, auto dy, auto x, auto w) {
              norm_backward(dev, dx, NormWeights{dw, bias ? db : decltype(db){}}, dy, {x, {w, {}}, style}, Update::add);
            },
            dx, dw, db, dy, x, w);
        this->expect_near("dx", dx);
        this->expect_near("dweight", dw, 3e-5);
        if (bias) this->expect_near("dbias", db, 3e-5);
        // frozen
        this->both(
            [=](auto& dev, auto dx, auto db, auto dy, auto x, auto w) {
              norm_backward(dev, dx, NormWeights{decltype(db){}, bias ? db : decltype(db){}}, dy, {x, {w, {}}, style},
                            Update::add);
            },
            dx, db, dy, x, w);
        this->expect_near("dx beside a frozen weight", dx);
        if (bias) this->expect_near("dbias beside a frozen weight", db, 3e-5);
        // in place
        this->both(
            [=](auto& dev, auto dy, auto dw, auto x, auto w) {
              norm_backward(dev, dy, NormWeights{dw, decltype(dw){}}, dy, {x, {w, {}}, style}, Update::assign);
            },
            dy, dw, x, w);
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
    rope(*this->host, x.host.m, positions.host, f, Direction::forward);
    rope(*this->gpu, x.gpu, positions.gpu, f, Direction::forward);
    this->expect_near("forward", x);
    rope(*this->host, x.host.m, positions.host, f, Direction::backward);
    rope(*this->gpu, x.gpu, positions.gpu, f, Direction::backward);
    this->expect_near("backward", x);
  }
}

TYPED_TEST(DeviceOperations, Activations) {
  for (const Mlp kind : {Mlp::gelu, Mlp::swiglu, Mlp::geglu}) {
    for (const Index cols : {19, 64}) {
      auto scope = this->gpu->scope();
      const auto gate = this->random(130, cols, 2), up = this->random(130, cols, 2), y = this->random(130, cols),
                 dy = this->random(130, cols);
      this->both([&](auto& dev, auto y, auto gate,
                     auto up) { activation(dev, kind, y, kind == Mlp::gelu ? decltype(gate){} : gate, up); },
                 y, gate, up);
      this->expect_near("y", y);
      this->both([&](auto& dev, auto gate, auto up,
                     auto dy) { activation_backward(dev, kind, kind == Mlp::gelu ? decltype(gate){} : gate, up, dy); },
                 gate, up, dy);
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
      log_probabilities_backward(*this->host, logp.host.m, logits.host.m, targets.host, {w.host.m});
      log_probabilities_backward(*this->gpu, logp.gpu, logits.gpu, targets.gpu, {w.gpu});
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
    const EmbeddingIndex on_host{tokens.host, positions.host, by_token.host, by_position.host};
    const EmbeddingIndex on_gpu{tokens.gpu, positions.gpu, by_token.gpu, by_position.gpu};
    embedding(*this->host, x.host.m, on_host, {table.host.m, position_table.host.m}, 1.5);
    embedding(*this->gpu, x.gpu, on_gpu, {table.gpu, position_table.gpu}, 1.5);
    this->expect_near("x", x);
    const auto dx = this->random(n, d);
    const auto dtable = this->wide(vocab, d), dpositions = this->wide(60, d);
    embedding_backward(*this->host, EmbeddingTables<double>{dtable.host.m, dpositions.host.m}, on_host, dx.host.m, 1.5);
    embedding_backward(*this->gpu, EmbeddingTables<float>{dtable.gpu, dpositions.gpu}, on_gpu, dx.gpu, 1.5);
    this->expect_near("dtable", dtable, 1e-5);
    this->expect_near("dpositions", dpositions, 1e-5);
    embedding_backward(*this->host, EmbeddingTables<double>{{}, dpositions.host.m}, on_host, dx.host.m, 1.5);
    embedding_backward(*this->gpu, EmbeddingTables<float>{{}, dpositions.gpu}, on_gpu, dx.gpu, 1.5);
    this->expect_near("dpositions beside a frozen table", dpositions, 1e-5);
    const Division lanes = {n, kTile, 0, 1, 2};
    const TwinIntegers by_lane_and_token(*this->gpu, rows_by_index(t, lanes));
    const auto both_lanes = this->wide(2 * vocab, d);
    embedding_backward(*this->host, EmbeddingTables<double>{both_lanes.host.m, {}},
                       {tokens.host, positions.host, by_lane_and_token.host, {}, 2}, dx.host.m, 1.5);
    embedding_backward(*this->gpu, EmbeddingTables<float>{both_lanes.gpu, {}},
                       {tokens.gpu, positions.gpu, by_lane_and_token.gpu, {}, 2}, dx.gpu, 1.5);
    this->expect_near("dtable of two lanes", both_lanes, 1e-5);
  }
}

TYPED_TEST(DeviceOperations, SumsAndConversions) {
  in_every_order([&] {
    for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{1, 3}, {300, 21}, {1000, 40}, {4500, 8}}) {
      auto scope = this->gpu->scope();
      const auto x = this->random(rows, cols), y = this->random(rows, cols);
      const auto sums = this->wide(1, cols), floats = this->wide(rows, cols);
      this->both([](auto& dev, auto out, auto x) { add_column_sums(dev, out, x); }, sums, x);
      this->expect_near("column sums", sums, 1e-5);
      this->both([](auto& dev, auto y, auto x) { add(dev, y, x); }, y, floats);
      this->expect_near("add", y);
      this->both([](auto& dev, auto y, auto x) { convert(dev, y, x); }, y, floats);
      this->expect_near("convert", y);
      this->both([](auto& dev, auto y) { scale(dev, y, -1.5); }, y);
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

template <class T, class Device>
void expect_attention(Cpu& host, Device& gpu, const AttentionCase& p) {
  SCOPED_TRACE(std::to_string(p.heads) + " heads, " + std::to_string(p.kv_heads) + " kv heads of " +
               std::to_string(p.dim) + ", window " + std::to_string(p.window));
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
  auto forward = [&](auto& dev, auto out, auto lse, auto q, auto k, auto v, auto begins, Rows r) {
    attention(dev, AttentionOutput{out.slice(r), lse.slice(r)}, {q.slice(r), k, v}, {{begins}, r, shape});
  };
  auto backward = [&](auto& dev, auto dq, auto dk, auto dv, auto dout, auto q, auto k, auto v, auto out, auto lse,
                      auto begins, Rows r) {
    attention_backward(dev, AttentionGradient{dq.slice(r), dk, dv}, dout.slice(r), {q.slice(r), k, v},
                       {out.slice(r), lse.slice(r)}, {{begins}, r, shape});
  };
  const Rows all = {0, n};
  auto forward_on_gpu = [&](const Twin<T>& out, const Twin<float>& lse, Rows r) {
    forward(gpu, out.gpu, lse.gpu, q.gpu, k.gpu, v.gpu, begins.gpu, r);
  };
  forward(host, out.host.m, lse.host.m, q.host.m, k.host.m, v.host.m, begins.host, all);
  forward_on_gpu(out, lse, all);
  EXPECT_LE(error_of(gpu, out), kRounding<T>) << "out";
  EXPECT_LE(error_of(gpu, lse), kRounding<T>) << "lse";
  backward(host, dq.host.m, dk.host.m, dv.host.m, dout.host.m, q.host.m, k.host.m, v.host.m, out.host.m, lse.host.m,
           begins.host, all);
  backward(gpu, dq.gpu, dk.gpu, dv.gpu, dout.gpu, q.gpu, k.gpu, v.gpu, out.gpu, lse.gpu, begins.gpu, all);
  EXPECT_LE(error_of(gpu, dq), 2 * kRounding<T>) << "dq";
  EXPECT_LE(error_of(gpu, dk), 2 * kRounding<T>) << "dk";
  EXPECT_LE(error_of(gpu, dv), 2 * kRounding<T>) << "dv";

  // by chunks: the same bits
  const Twin<T> out2(gpu, n, q_width, 14), dq2(gpu, n, q_width, 17);
  const Twin<float> lse2(gpu, n, p.heads, 15), dk2(gpu, n, kv_width, 8), dv2(gpu, n, kv_width, 9);
  for (Rows r : chunks(n, kTile)) forward_on_gpu(out2, lse2, r);
  for (Rows r : last_to_first(chunks(n, kTile))) {
    backward(gpu, dq2.gpu, dk2.gpu, dv2.gpu, dout.gpu, q.gpu, k.gpu, v.gpu, out2.gpu, lse2.gpu, begins.gpu, r);
  }
  auto expect_equal = [&](auto a, auto b, const char* what) {
    const auto x = to_host(gpu, a), y = to_host(gpu, b);
    EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])), 0) << what << ": chunks changed bits";
  };
  expect_equal(out.gpu, out2.gpu, "out"), expect_equal(lse.gpu, lse2.gpu, "lse"), expect_equal(dq.gpu, dq2.gpu, "dq");
  expect_equal(dk.gpu, dk2.gpu, "dk"), expect_equal(dv.gpu, dv2.gpu, "dv");

  // as in generation: rows that start inside a tile
  for (Rows r : {Rows{0, 1}, Rows{n / 2, n / 2 + 1}, Rows{n - 1, n}}) forward_on_gpu(out2, lse2, r);
  expect_equal(out.gpu, out2.gpu, "a row alone");
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
  for (const AttentionCase& p : cases) expect_attention<typename TypeParam::T>(*this->host, *this->gpu, p);
}

TYPED_TEST(DeviceOperations, AttentionInEveryOrderOfThreads) {
  in_every_order([&] { expect_attention<typename TypeParam::T>(*this->host, *this->gpu, {2, 1, 24, 0, {150, 130}}); });
}

TYPED_TEST(DeviceOperations, AttentionSurvivesExtremeScores) {
  using T = typename TypeParam::T;
  const Index n = 200;
  const TwinIntegers begins(*this->gpu, std::vector<std::int32_t>(static_cast<std::size_t>(n), 0));
  const auto q = this->random(n, 16, 100), k = this->random(n, 16, 100), v = this->random(n, 16),
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

TEST_F(GpuDevice, RefusesMoreMemoryThanTheGpuHas) {
  try {
    Cuda dev(std::size_t{1} << 50);
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("MiB of GPU memory"), std::string::npos) << e.what();
  }
}

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
