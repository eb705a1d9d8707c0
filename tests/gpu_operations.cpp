// Each operation of both devices, in float32 and bfloat16, against the CPU in float64, for awkward shapes.
#include "kernels/chosen_experts.cuh"
#include "kernels/group_bias.cuh"
#include "kernels/grouped_matmul.cuh"
#include "kernels/router.cuh"
#include "kernels/sinks.cuh"
#include "model/quantised.h"
#include "tests/both_devices.h"
#include "training/optimizer.h"

namespace streambp {
namespace {

template <class Tested>
class DeviceOperations : public OnBothDevices<Tested> {};
TYPED_TEST_SUITE(DeviceOperations, DeviceTypes, DeviceTypeNames);

// Of odd widths too, where cuBLASLt's algorithm may depend on the number of rows: results are near, their bits may differ.
TYPED_TEST(DeviceOperations, MatrixProducts) {
  constexpr std::array<Index, 3> shapes[] = {{1, 8, 16},     {3, 5, 2},    {256, 40, 24}, {300, 77, 31}, {513, 64, 96},
                                             {700, 33, 130}, {300, 40, 1}, {300, 1, 40},  {1, 1, 1}};
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

// Groups of all sizes; one expert that everybody chooses, and one that nobody does.
TYPED_TEST(DeviceOperations, Experts) {
  using T = typename TestFixture::T;
  in_every_order([&] {
    constexpr std::array<Index, 4> shapes[] = {{700, 7, 40, 24}, {300, 5, 136, 264}, {90, 3, 5, 9}, {2, 4, 8, 8}};
    for (const auto& [n, experts, in, out] : shapes) {
      auto scope = this->gpu->scope();
      const Index chosen = 2, packed = n * chosen;
      const auto x = this->random(n, in), w = this->random(experts * out, in), y = this->random(packed, out),
                 dy = this->random(packed, out), dx = this->random(packed, in), combined = this->random(n, in);
      const auto logits = this->wide(n, experts), dw = this->wide(2 * experts * out, in),
                 weights = this->wide(n, chosen), dweights = this->wide(n, chosen);
      this->both(
          [&](auto& dev, auto logits, auto x, auto w, auto y, auto dy, auto dx, auto combined, auto dw, auto weights,
              auto dweights) {
            using Device = std::remove_reference_t<decltype(dev)>;
            using Number = std::remove_pointer_t<decltype(x.data)>;
            auto scope = dev.scope();
            const Routes routes = allocate_routes(dev, n, chosen, experts);
            const auto favoured = allocate<std::remove_pointer_t<decltype(logits.data)>>(dev, n, experts, Kind::chunk);
            std::vector<std::remove_pointer_t<decltype(logits.data)>> numbers = to_host(dev, logits);
            for (Index i = 0; i < n; ++i) numbers[i * experts + 1] += 10, numbers[i * experts + 2] -= 10;
            dev.upload(favoured, numbers.data());
            route(dev, routes.chosen, weights, {favoured, {}, {RouterKind::softmax, true, 0, 1}});
            sort_by_expert(dev, routes);
            const auto rows = allocate<Number>(dev, packed, in, Kind::chunk);
            gather_rows<Device, Number>(dev, rows, x, routes);
            grouped_matmul<Device, Number>(dev, y, rows, w, routes, Update::assign);
            grouped_matmul<Device, Number>(dev, y, rows, w, routes, Update::add);
            grouped_matmul_backward_input<Device, Number>(dev, dx, dy, w, routes, Update::assign);
            grouped_matmul_backward_input<Device, Number>(dev, dx, dy, w, routes, Update::add);
            grouped_matmul_backward_weight(dev, dw, dy, Input<Number>(rows), routes);
            combine_rows<Device, Number>(dev, combined, dx, weights, routes, x);
            combine_rows_backward<Device, Number>(dev, dweights, dx, rows, weights, routes);
          },
          logits, x, w, y, dy, dx, combined, dw, weights, dweights);
      this->expect_near("y", y), this->expect_near("dx", dx), this->expect_near("combined", combined);
      this->expect_near("dw", dw, 1e-5), this->expect_near("weights", weights, 1e-5);
      this->expect_near("dweights", dweights, kRounding<T>);
    }
  });
}

// In two lanes, with experts that few or no rows choose.
TYPED_TEST(DeviceOperations, BiasesOfExperts) {
  const auto run = []<class T>(auto& dev, Matrix<T> y, Matrix<T> bias, Matrix<T> dy, auto logits, auto weights,
                               auto dweights, auto dbias) {
    using Device = std::remove_reference_t<decltype(dev)>;
    auto scope = dev.scope();
    const Routes routes = allocate_routes(dev, weights.rows, weights.cols, logits.cols);
    route(dev, routes.chosen, weights, {logits, {}, {RouterKind::softmax, true, 0, 1}});
    sort_by_expert(dev, routes);
    add_group_bias<Device, T>(dev, y, bias, routes);
    weighted_bias_backward<Device, T>(dev, dweights, dy, bias, weights, routes);
    group_bias_backward<Device, T>(dev, dbias, dy, routes);
  };
  for (const auto& [n, experts, width] : std::vector<std::array<Index, 3>>{{700, 7, 24}, {600, 5, 301}, {2, 4, 8}}) {
    auto scope = this->gpu->scope();
    const auto y = this->random(2 * n, width), bias = this->random(1, experts * width), dy = this->random(2 * n, width);
    const auto logits = this->wide(n, experts, 3), weights = this->wide(n, 2), dweights = this->wide(n, 2),
               dbias = this->wide(2, experts * width);
    this->both(run, y, bias, dy, logits, weights, dweights, dbias);
    this->expect_near("y", y), this->expect_near("dy", dy), this->expect_near("dweights", dweights, 1e-5);
    this->expect_near("dbias", dbias, kRounding<typename TestFixture::T>);
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
        const auto without_weights = [=](auto& dev, auto y, auto dy, auto x) {
          norm(dev, y, {x, {}, style});
          norm_backward(dev, dy, norm_weights(decltype(dw.gpu){}, decltype(dw.gpu){}), dy, {x, {}, style},
                        Update::assign);
        };
        this->both(without_weights, y, dy, x);
        this->expect_near("y without weights", y);
        this->expect_near("dx without weights", dy);
      }
    }
  });
}

// RoPE for heads of `dim` numbers, of which the first `rotated` are rotated.
inline RopeFrequencies turns(Index dim, Index rotated, RopePairs pairs = RopePairs::halves) {
  return {rope_frequencies(rotated, 10000, {}).values, 1.1, dim, pairs};
}

inline RopeFrequencies growing(RopeFrequencies f) {
  f.beta = 0.3, f.length = 1000;
  return f;
}

TYPED_TEST(DeviceOperations, RotaryPositions) {
  const auto halves = RopePairs::halves, interleaved = RopePairs::interleaved;
  for (const RopeFrequencies& f :
       {turns(6, 6), turns(64, 64), turns(128, 128), turns(96, 64, halves), turns(10, 6, halves),
        turns(64, 64, interleaved), turns(64, 32, interleaved), growing(turns(64, 64))}) {
    auto scope = this->gpu->scope();
    const Index n = 37, heads = 3;
    std::vector<std::int32_t> p;
    for (int i = 0; i < n; ++i) p.push_back(i * i * 700);  // up to a million: too large for angles in float32
    const TwinIntegers positions(*this->gpu, p);
    const auto x = this->random(n, heads * f.dim);
    this->both(FUNCTION(rope), x, x, positions, f, Direction::forward);
    this->expect_near("forward", x);
    this->both(FUNCTION(rope), x, x, positions, f, Direction::backward);
    this->expect_near("backward", x);
  }
}

// Queries and keys are normed, or converted, in the pass that rotates them.
template <class T, class Device>
void expect_bits_of_two_passes(Device& dev, const RopeFrequencies& f, Index heads, const NormStyle& style) {
  auto scope = dev.scope();
  const Index n = 3, dim = f.dim, cols = heads * dim;
  const TwinIntegers at(dev, {0, 77, 131071});
  const Twin<T> x(dev, n, cols, 1, 1, 0.3), w(dev, 1, dim, 2, 0.2, 1), b(dev, 1, dim, 3), y(dev, n, cols, 4);
  const Twin<Accumulator<T>> sums(dev, n, cols, 5);
  const HeadNorm<T> head_norm = {norm_weights(w.gpu, style.centered ? b.gpu : Matrix<T>()), style};
  const Twin<T> from(dev, n, cols + 16, 6), to(dev, n, cols + 16, 7);
  const Matrix<T> strided_x = from.gpu.columns(8, cols), strided_y = to.gpu.columns(8, cols);
  const auto expect_same = [&](const char* what, Matrix<T> m) {
    const std::vector<T> expected = to_host(dev, y.gpu), values = to_host(dev, m);
    EXPECT_EQ(std::memcmp(values.data(), expected.data(), values.size() * sizeof(T)), 0) << what;
  };
  norm(dev, y.gpu.reshape(dim), {x.gpu.reshape(dim), head_norm.weights, style});
  rope(dev, y.gpu, y.gpu, at.gpu, f, Direction::forward);
  convert(dev, strided_x, x.gpu);
  dev.reset_work();
  rope(dev, strided_y, strided_x, at.gpu, f, Direction::forward, head_norm);
  EXPECT_EQ(dev.launches, Device::kind == DeviceKind::cuda ? 1 : 0);
  EXPECT_EQ(dev.work().front().bytes, 2.0 * sizeof(T) * x.gpu.size());
  expect_same("normed", strided_y);
  rope(dev, x.gpu, x.gpu, at.gpu, f, Direction::forward, head_norm);
  expect_same("normed in place", x.gpu);

  convert(dev, y.gpu, sums.gpu);
  rope(dev, y.gpu, y.gpu, at.gpu, f, Direction::backward);
  rope(dev, strided_y, sums.gpu, at.gpu, f, Direction::backward);
  expect_same("converted", strided_y);
}
template <class T, class Device>
void expect_bits_of_two_passes(Device& dev) {
  in_every_order([&] {
    for (const RopeFrequencies& f :
         {turns(6, 6), turns(10, 10), turns(24, 24), turns(80, 80), turns(96, 96), turns(128, 128), turns(256, 256),
          turns(24, 10), turns(96, 64), turns(64, 64, RopePairs::interleaved), turns(80, 40, RopePairs::interleaved)}) {
      for (const Index heads : {1, 2, 3, 4, 5, 37}) {
        for (const NormStyle& style :
             {NormStyle{.eps = 1e-5}, NormStyle{.eps = 1e-5, .offset = 1}, NormStyle{.eps = 1e-5, .centered = true}}) {
          SCOPED_TRACE(testing::Message() << heads << " heads of " << f.dim);
          expect_bits_of_two_passes<T>(dev, f, heads, style);
        }
      }
    }
  });
}
TYPED_TEST(DeviceOperations, NormAndRotationInOnePass) {
  expect_bits_of_two_passes<typename TestFixture::T>(*this->gpu);
}
TEST(CpuOperations, NormAndRotationInOnePass) {
  Cpu dev(std::size_t{1} << 24);
  expect_bits_of_two_passes<double>(dev);
}

TYPED_TEST(DeviceOperations, Activations) {
  for (const Mlp kind : {Mlp::gelu, Mlp::swiglu, Mlp::geglu, Mlp::relu2, Mlp::clamped_swiglu}) {
    for (const Index cols : {19, 64}) {
      auto scope = this->gpu->scope();
      const double spread = kind == Mlp::clamped_swiglu ? 5 : 2;
      const auto gate = this->random(130, cols, spread), up = this->random(130, cols, spread),
                 y = this->random(130, cols), dy = this->random(130, cols);
      const auto if_gated = [=](auto gate) {
        return kind == Mlp::gelu || kind == Mlp::relu2 ? decltype(gate){} : gate;
      };
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
      const auto logp = this->wide(1, n), w = this->wide(1, n);
      const auto dlogits = this->random(n, vocab);
      for (const double cap : {0.0, 4.0}) {
        const auto logits = this->wide(n, vocab, 3);
        const auto backward = [=](auto& dev, auto dlogits, auto logp, auto logits, auto targets, auto w) {
          using U = std::remove_pointer_t<decltype(dlogits.data)>;
          if (cap > 0) soft_cap(dev, logits, cap);
          convert(dev, dlogits, log_probabilities_backward<U>(dev, logp, logits, targets, {w}, cap));
        };
        this->both(backward, dlogits, logp, logits, targets, w);
        this->expect_near("logp", logp, 1e-5);
        this->expect_near("dlogits", dlogits);
      }
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

// Random weights have the same bits on every device.
TYPED_TEST(DeviceOperations, InitialValues) {
  using T = typename TestFixture::T;
  const Random random(3, 5);
  for (const InitialValues& values : {InitialValues{random, 0, 0.02}, InitialValues{random, 1, 0.15, 0, 12345},
                                      InitialValues{random, 1}, InitialValues{random, 0, 0, std::sqrt(24.0)}}) {
    for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{1, 3}, {5, 27}, {300, 72}}) {
      auto scope = this->gpu->scope();
      const auto m = allocate<T>(*this->gpu, rows, cols, Kind::weights);
      initialise(*this->gpu, m, values);
      const std::vector<T> found = to_host(*this->gpu, m), expected = on_host<T>(values, m.size());
      for (std::size_t i = 0; i < found.size(); ++i)
        ASSERT_EQ(static_cast<float>(found[i]), static_cast<float>(expected[i])) << i;
    }
  }
}

// Weights in 4 bits have the same bits on every device.
TYPED_TEST(DeviceOperations, WeightsInFourBits) {
  using T = typename TestFixture::T;
  for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{1, 3}, {5, 26}, {96, 64}, {300, 72}}) {
    std::vector<float> weights(static_cast<std::size_t>(rows * cols));
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(Random(3).normal(i));
    for (const FourBitNumbers& numbers : {quantise(weights), quantise(weights, OriginalType::bf16),
                                          quantise(weights, OriginalType::f16), quantise_mxfp4(weights)}) {
      auto scope = this->gpu->scope();
      std::vector<float> expected(weights.size());
      dequantise(numbers, Matrix<float>(expected.data(), 1, rows * cols));
      FourBits q = allocate_four_bits(*this->gpu, rows * cols, kNf4Blocks, numbers.mxfp4);
      upload(*this->gpu, q, numbers);
      const auto w = allocate<T>(*this->gpu, rows, cols, Kind::weights);
      dequantise(*this->gpu, w, q);
      const std::vector<T> values = to_host(*this->gpu, w);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(static_cast<float>(values[i]), static_cast<float>(T(expected[i]))) << i;
    }
  }
}

TYPED_TEST(DeviceOperations, Sinks) {
  const auto forward = []<class T>(auto& dev, Matrix<T> attended, auto lse, Matrix<T> sinks) {
    add_sinks(dev, AttentionOutput<T>{attended, lse}, sinks);
  };
  const auto backward = []<class T>(auto& dev, auto terms, Matrix<T> dout, Matrix<T> attended, auto lse,
                                    Matrix<T> sinks) {
    sinks_backward<std::decay_t<decltype(dev)>, T>(dev, terms, dout, AttentionOutput<T>{attended, lse}, sinks);
  };
  for (const auto& [rows, heads, dim] : std::vector<std::array<Index, 3>>{{1, 1, 3}, {300, 3, 22}, {130, 4, 64}}) {
    auto scope = this->gpu->scope();
    const auto attended = this->random(rows, heads * dim), dout = this->random(rows, heads * dim),
               sinks = this->random(1, heads, 20);
    const auto lse = this->wide(rows, heads, 5), terms = this->wide(rows, heads);
    this->both(forward, attended, lse, sinks);
    this->expect_near("attended", attended);
    this->expect_near("lse", lse, 1e-6);
    this->both(backward, terms, dout, attended, lse, sinks);
    this->expect_near("terms", terms);
  }
}

// Of 5 experts in 4 bits, rows choose some, then others. Their sizes divide packs and blocks of scales, or not.
TYPED_TEST(DeviceOperations, ChosenExpertsInFourBits) {
  using T = typename TestFixture::T;
  constexpr Index kExperts = 5;
  auto& dev = *this->gpu;
  for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{3, 7}, {5, 24}, {16, 64}}) {
    auto scope = dev.scope();
    const Index size = rows * cols;
    std::vector<float> weights(static_cast<std::size_t>(kExperts * size)), expected(weights.size());
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(Random(5).normal(i));
    const FourBitNumbers numbers = rows == 5 ? quantise_mxfp4(weights) : quantise(weights);
    dequantise(numbers, Matrix<float>(expected.data(), kExperts, size));
    FourBits q = allocate_four_bits(dev, kExperts * size, kNf4Blocks, numbers.mxfp4);
    upload(dev, q, numbers);
    const auto w = allocate<T>(dev, kExperts * rows, cols, Kind::weights);
    const auto ready = allocate<std::int32_t>(dev, 1, kExperts, Kind::weights);
    zero(dev, w), zero(dev, ready);
    const Routes routes = allocate_routes(dev, 2, 2, kExperts);
    std::vector<bool> is_ready(kExperts);
    for (const std::vector<std::int32_t>& chosen : {std::vector<std::int32_t>{1, 4, 1, 4}, {0, 1, 1, 4}}) {
      dev.upload(routes.chosen, chosen.data());
      sort_by_expert(dev, routes);
      dequantise_chosen<typename TypeParam::D, T>(dev, {{w, q}}, routes, ready);
      for (const std::int32_t e : chosen) is_ready[static_cast<std::size_t>(e)] = true;
      const std::vector<T> values = to_host(dev, w);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const bool here = is_ready[i / static_cast<std::size_t>(size)];
        ASSERT_EQ(static_cast<float>(values[i]), here ? static_cast<float>(T(expected[i])) : 0) << i;
      }
      EXPECT_EQ(to_host(dev, ready), std::vector<std::int32_t>(is_ready.begin(), is_ready.end()));
      zero(dev, w.slice({rows, 2 * rows}));  // expert 1 is ready: it is not dequantised again
      std::fill_n(expected.begin() + size, size, 0.0f);
    }
  }
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
