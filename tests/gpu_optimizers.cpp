// The optimizers' operations on both devices, against float64: AdamW in every combination of types, stochastic rounding,
// moments in 8 bits, and orthogonalised matrices.
#include "kernels/adamw_8bit.cuh"
#include "kernels/orthogonalise.h"
#include "model/quantised.h"
#include "tests/gpu.h"

namespace streambp {
namespace {

template <class T, class G, class M, class Device>
void expect_adamw(Device& gpu, bool with_master, double tolerance) {
  auto scope = gpu.scope();
  Cpu host(0);
  const Index n = 30, d = 40;
  const Twin<T> w(gpu, n, d, 1);
  const Twin<G> g(gpu, n, d, 2);
  const Twin<M> m(gpu, n, d, 3, 0), v(gpu, n, d, 4, 0);
  const Twin<float> master(gpu, n, d, 5);
  gpu.upload(master.gpu, std::vector<float>(w.host.storage->begin(), w.host.storage->end()).data());
  OptimizerStep s{0.01, 0.9, 0.95, 1e-8, 0.1, 0.5, 1};
  for (s.step = 1; s.step <= 20; ++s.step) {
    adamw(host, std::vector{AdamWUpdate<double, double, AdamWState<double>>{w.host, g.host, {{}, m.host, v.host}, s}});
    const AdamWState<M> state = {with_master ? master.gpu : Matrix<float>{}, m.gpu, v.gpu};
    adamw(gpu, std::vector{AdamWUpdate<T, G, AdamWState<M>>{w.gpu, g.gpu, state, s}});
  }
  EXPECT_LE(error_of(gpu, w), tolerance) << "w";
  EXPECT_LE(error_of(gpu, m), tolerance) << "m";
  EXPECT_LE(error_of(gpu, v), tolerance) << "v";
  if (!with_master) return;
  const auto rounded = to_host(gpu, w.gpu);
  const auto exact = to_host(gpu, master.gpu);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    ASSERT_EQ(static_cast<float>(rounded[i]), static_cast<float>(T(exact[i])))
        << "the weight must be the rounded master copy";
    ASSERT_NEAR(exact[i], (*w.host.storage)[i], 2e-5);
  }
}

template <class Device>
void expect_adamw_in_every_combination_of_types(Device&& dev) {
  expect_adamw<float, float, float>(dev, false, 1e-5);
  expect_adamw<BFloat16, BFloat16, float>(dev, true, 1e-2);
  expect_adamw<BFloat16, float, float>(dev, true, 1e-2);
  expect_adamw<BFloat16, BFloat16, BFloat16>(dev, false, 5e-2);
  expect_adamw<BFloat16, float, BFloat16>(dev, false, 5e-2);
}

class GpuAdamW : public GpuTest {};

TEST_F(GpuAdamW, MatchesTheCpuInEveryCombinationOfTypes) {
  expect_adamw_in_every_combination_of_types(Cuda(1 << 22, kTile));
}
TEST(CpuAdamW, MatchesFloat64InEveryCombinationOfTypes) { expect_adamw_in_every_combination_of_types(Cpu(1 << 22)); }

// The weights after 20 steps, with bfloat16 moments and without master weights.
template <class Device>
std::vector<BFloat16> stochastically_rounded(Device&& gpu, std::uint64_t seed = 1) {
  const Index n = 64, d = 256;
  const Twin<BFloat16> w(gpu, n, d, 1, 0, 1), g(gpu, n, d, 2, 0, 1), m(gpu, n, d, 3, 0, 1), v(gpu, n, d, 4, 0, 1);
  OptimizerStep s{1e-4, 0.9, 0.9, 0, 0, 1, 100000};  // every update is 1e-4; an ulp of 1 is 8e-3, and 4e-3 below 1
  s.seed = seed;
  using Update = AdamWUpdate<BFloat16, BFloat16, AdamWState<BFloat16>>;
  for (int i = 0; i < 20; ++i, ++s.step) adamw(gpu, std::vector{Update{w.gpu, g.gpu, {{}, m.gpu, v.gpu}, s}});
  return to_host(gpu, w.gpu);
}

// Updates far below an ulp of bfloat16 must add up on average, and be reproducible bit for bit.
void expect_unbiased(const std::vector<BFloat16>& w, const std::vector<BFloat16>& again) {
  double mean = 0;
  for (BFloat16 x : w) mean += static_cast<double>(x) / static_cast<double>(w.size());
  EXPECT_NEAR(1 - mean, 20 * 1e-4, 1e-4);
  EXPECT_EQ(std::memcmp(w.data(), again.data(), w.size() * sizeof(BFloat16)), 0);
}

TEST_F(GpuAdamW, StochasticRoundingIsUnbiased) {
  expect_unbiased(stochastically_rounded(Cuda(1 << 24, kTile)), stochastically_rounded(Cuda(1 << 24, kTile)));
}
// The emulated GPU has the CPU's arithmetic, so it must round to the same bits.
TEST(CpuAdamW, StochasticRoundingIsUnbiasedAndTheGpus) {
  const auto w = stochastically_rounded(Cpu(1 << 24));
  expect_unbiased(w, kEmulated ? stochastically_rounded(Cuda(1 << 24, kTile)) : w);
  const auto other = stochastically_rounded(Cpu(1 << 24), 2);
  expect_unbiased(other, other);
  EXPECT_NE(std::memcmp(w.data(), other.data(), w.size() * sizeof(BFloat16)), 0) << "the seed has no effect";
}

TEST(DynamicMaps, HaveTheValuesOfBitsandbytes) {
  auto decoded = [](auto&& decode) {
    std::vector<float> values;
    for (int code = 0; code < 256; ++code) values.push_back(decode(static_cast<std::uint8_t>(code)));
    return values;
  };
  const auto with_sign = decoded(DynamicMap<Sign::both>::decode), without = decoded(DynamicMap<Sign::none>::decode);
  const std::vector<float> truth_with = dynamic_map(true), truth_without = dynamic_map(false);
  for (std::size_t i = 0; i < 256; ++i) {
    EXPECT_NEAR(with_sign[i], truth_with[i], 1e-6f * std::abs(truth_with[i])) << i;
    EXPECT_NEAR(without[i], truth_without[i], 1e-6f * truth_without[i]) << i;
    EXPECT_EQ(DynamicMap<Sign::both>::encode(with_sign[i]), i);
    EXPECT_EQ(DynamicMap<Sign::none>::encode(without[i]), i);
  }
}

// The distance to the value of a code, over the distance to the nearest value of the map.
double excess(const std::vector<float>& map, std::uint8_t code, double x) {
  double nearest = INFINITY;
  for (const float value : map) nearest = std::min(nearest, std::abs(static_cast<double>(value) - x));
  return std::abs(static_cast<double>(map[code]) - x) - nearest;
}

TEST(DynamicMaps, RoundToTheNearestValue) {
  const Random random(1);
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const double size = std::pow(10, -8 * random.uniform(3 * i)), x = i % 2 == 0 ? size : random.uniform(3 * i + 1);
    const auto rounded = static_cast<float>(x), negative = -rounded;
    EXPECT_LE(excess(dynamic_map(false), DynamicMap<Sign::none>::encode(rounded), x), 1e-6 * x) << x;
    EXPECT_LE(excess(dynamic_map(true), DynamicMap<Sign::both>::encode(rounded), x), 1e-6 * x) << x;
    if (x < 0.99) {
      EXPECT_LE(excess(dynamic_map(true), DynamicMap<Sign::both>::encode(negative), -x), 1e-6 * x) << x;
    }
  }
  EXPECT_EQ(DynamicMap<Sign::both>::encode(-1), 0);  // -0.993: there is no -1
}

// 8-bit moments of one parameter: the state on the device, and its values on the host.
template <class Device>
class EightBits {
 public:
  EightBits(Device& dev, Index rows, Index cols) : state(no_moments(dev, rows, cols)), dev_(dev), cols_(cols) {
    download();
  }

  void download() {
    codes_[0] = to_host(dev_, state.m.codes), codes_[1] = to_host(dev_, state.v.codes);
    scales_[0] = to_host(dev_, state.m.scales), scales_[1] = to_host(dev_, state.v.scales);
  }
  double value(int moment, Index i) const {
    return static_cast<double>(maps_[moment][code(moment, i)]) * scale(moment, i);
  }
  // The code must have the value that is nearest to the exact moment. A second moment does not become zero.
  void expect_nearest(int moment, Index i, double exact) const {
    const double ratio = exact / scale(moment, i);
    if (scale(moment, i) == 0) {
      EXPECT_EQ(exact, 0);
      return;
    }
    EXPECT_LE(std::abs(ratio), 1.000001);
    if (moment == 1 && exact > 0) {
      EXPECT_GT(code(1, i), 0) << "element " << i;
      if (code(1, i) == 1) return;
    }
    EXPECT_LE(excess(maps_[moment], code(moment, i), ratio), 1e-5 * std::abs(ratio) + 1e-12)
        << "moment " << moment << ", element " << i;
  }

  const QuantisedMoments state;

 private:
  std::uint8_t code(int moment, Index i) const { return codes_[moment][static_cast<std::size_t>(i)]; }
  double scale(int moment, Index i) const {
    const Index blocks = ceil_div(cols_, kMomentBlock), block = i / cols_ * blocks + i % cols_ / kMomentBlock;
    return static_cast<double>(scales_[moment][static_cast<std::size_t>(block)]);
  }

  Device& dev_;
  const Index cols_;
  const std::vector<float> maps_[2] = {dynamic_map(true), dynamic_map(false)};
  std::vector<std::uint8_t> codes_[2];
  std::vector<float> scales_[2];
};

// Magnitudes of all decades, and zeros in the first row.
template <class G, class Device>
Twin<G> gradient_of_all_sizes(Device& dev, Index rows, Index cols, std::uint64_t seed) {
  Twin<G> g(dev, rows, cols, seed);
  for (Index i = 0; i < rows * cols; i += 7) {
    double& x = (*g.host.storage)[static_cast<std::size_t>(i)];
    x = i < cols ? 0 : x * std::pow(10, -static_cast<double>(i % 9));
    x = static_cast<double>(static_cast<G>(static_cast<float>(x)));
  }
  dev.upload(g.gpu, std::vector<G>(g.host.storage->begin(), g.host.storage->end()).data());
  return g;
}

// The state after a step must be that of the formula, which begins with the codes and scales before it.
template <class T, class G, class Device>
void expect_adamw_8bit(Device& dev, Index rows, Index cols, double tolerance) {
  auto scope = dev.scope();
  const Twin<T> w(dev, rows, cols, 1);
  EightBits<Device> moments(dev, rows, cols);
  OptimizerStep s{0.01, 0.9, 0.95, 1e-8, 0.1, 0.5};
  for (s.step = 1; s.step <= 4; ++s.step) {
    const auto g = gradient_of_all_sizes<G>(dev, rows, cols, 10 + static_cast<std::uint64_t>(s.step));
    std::vector<double> m, v;
    const double t = static_cast<double>(s.step), b1 = 1 - std::pow(0.9, t), b2 = 1 - std::pow(0.95, t);
    for (Index i = 0; i < rows * cols; ++i) {
      const double gradient = 0.5 * (*g.host.storage)[static_cast<std::size_t>(i)];
      double& x = (*w.host.storage)[static_cast<std::size_t>(i)];
      m.push_back(0.9 * moments.value(0, i) + 0.1 * gradient);
      v.push_back(0.95 * moments.value(1, i) + 0.05 * gradient * gradient);
      x -= 0.01 * (m.back() / b1 / (std::sqrt(v.back() / b2) + 1e-8) + 0.1 * x);
    }
    adamw_8bit(dev, std::vector{AdamW8bit<T, G>{w.gpu, g.gpu, moments.state, s}});
    moments.download();
    for (Index i = 0; i < rows * cols; ++i) {
      moments.expect_nearest(0, i, m[static_cast<std::size_t>(i)]);
      moments.expect_nearest(1, i, v[static_cast<std::size_t>(i)]);
    }
    EXPECT_LE(error_of(dev, w), tolerance);
  }
}

// The square of such a gradient overflows float32.
template <class Device>
void expect_finite_after_huge_gradients(Device&& dev) {
  const Twin<float> w(dev, 2, 300, 1), g(dev, 2, 300, 2, 1e25);
  EightBits<std::remove_reference_t<Device>> moments(dev, 2, 300);
  OptimizerStep s{0.01, 0.9, 0.95, 1e-8, 0.1};
  for (s.step = 1; s.step <= 4; ++s.step)
    adamw_8bit(dev, std::vector{AdamW8bit<float, float>{w.gpu, g.gpu, moments.state, s}});
  for (const float x : to_host(dev, w.gpu)) ASSERT_TRUE(std::isfinite(x));
}
TEST(CpuAdamW, InEightBitsSurvivesHugeGradients) { expect_finite_after_huge_gradients(Cpu(1 << 20)); }
TEST_F(GpuAdamW, InEightBitsSurvivesHugeGradients) { expect_finite_after_huge_gradients(Cuda(1 << 20, kTile)); }

template <class Device>
void expect_adamw_8bit_in_all_shapes(Device&& dev) {
  for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{3, 512}, {5, 300}, {40, 8}, {1, 777}, {9, 264}}) {
    expect_adamw_8bit<float, float>(dev, rows, cols, 1e-5);
    expect_adamw_8bit<BFloat16, BFloat16>(dev, rows, cols, 2e-2);
    expect_adamw_8bit<BFloat16, float>(dev, rows, cols, 2e-2);
  }
}
TEST_F(GpuAdamW, InEightBitsFollowsItsFormula) {
  in_every_order([] { expect_adamw_8bit_in_all_shapes(Cuda(1 << 22, kTile)); });
}
TEST(CpuAdamW, InEightBitsFollowsItsFormula) { expect_adamw_8bit_in_all_shapes(Cpu(1 << 22)); }

// x / ‖x‖, then five times a x + b A x + c A A x with A = x xᵀ, in plain loops
std::vector<double> orthogonalised(const Owned<double>& x) {
  const Index rows = x.m.rows, cols = x.m.cols;
  std::vector<double> now(x.storage->begin(), x.storage->end());
  auto product = [](const std::vector<double>& a, const std::vector<double>& b, Index n, Index k, Index m) {
    std::vector<double> c(static_cast<std::size_t>(n * m));
    for (Index i = 0; i < n; ++i) {
      for (Index l = 0; l < k; ++l) {
        for (Index j = 0; j < m; ++j)
          c[static_cast<std::size_t>(i * m + j)] +=
              a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(l * m + j)];
      }
    }
    return c;
  };
  double squares = 0;
  for (const double value : now) squares += value * value;
  for (double& value : now) value /= std::sqrt(squares);
  for (int step = 0; step < 5; ++step) {
    std::vector<double> transposed(now.size());
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < cols; ++j)
        transposed[static_cast<std::size_t>(j * rows + i)] = now[static_cast<std::size_t>(i * cols + j)];
    }
    const auto gram = product(now, transposed, rows, cols, rows);
    const auto first = product(gram, now, rows, rows, cols), second = product(gram, first, rows, rows, cols);
    for (std::size_t i = 0; i < now.size(); ++i) now[i] = 3.4445 * now[i] - 4.7750 * first[i] + 2.0315 * second[i];
  }
  return now;
}

template <class T, class Device>
void expect_orthogonalised(Device&& dev, double tolerance) {
  for (const auto& [rows, cols] :
       std::vector<std::array<Index, 2>>{{24, 40}, {40, 24}, {16, 16}, {3, 50}, {65, 7}, {1, 8}}) {
    auto scope = dev.scope();
    Twin<T> x(dev, rows, cols, 1, 1e-3);
    *x.host.storage = orthogonalised(x.host);
    orthogonalise(dev, x.gpu);
    EXPECT_LE(error_of(dev, x), tolerance) << rows << "x" << cols;
  }
}
class GpuMuon : public GpuTest {};
TEST(CpuMuon, Orthogonalises) {
  expect_orthogonalised<double>(Cpu(1 << 22), 1e-11);
  expect_orthogonalised<float>(Cpu(1 << 22), 1e-3);
  expect_orthogonalised<BFloat16>(Cpu(1 << 22), 0.2);
}
TEST_F(GpuMuon, Orthogonalises) {
  expect_orthogonalised<float>(Cuda(1 << 22, kTile), 1e-3);
  expect_orthogonalised<BFloat16>(Cuda(1 << 22, kTile), 0.2);
}

TEST(CpuMuon, LeavesNothingAtZero) {
  Cpu dev(1 << 22);
  const Owned<double> none(4, 6, 0, 0);
  orthogonalise(dev, none.m);
  for (const double value : *none.storage) EXPECT_EQ(value, 0);
}

template <class T, class Device>
void expect_combined_and_transposed(Device&& dev) {
  for (const auto& [rows, cols] : std::vector<std::array<Index, 2>>{{5, 7}, {40, 64}, {33, 100}}) {
    auto scope = dev.scope();
    const Twin<T> y(dev, rows, cols, 1), turned(dev, cols, rows, 2);
    const Twin<float> x(dev, rows, cols, 3);
    combine(dev, 0.5, y.gpu, -2, x.gpu);
    transpose(dev, turned.gpu, Matrix<const T>(y.gpu));
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < cols; ++j)
        y.host.m(i, j) = 0.5 * y.host.m(i, j) - 2 * x.host.m(i, j), turned.host.m(j, i) = y.host.m(i, j);
    }
    EXPECT_LE(error_of(dev, y), kRounding<T>);
    EXPECT_LE(error_of(dev, turned), kRounding<T>);
  }
}
TEST(CpuMuon, CombinesAndTransposes) { expect_combined_and_transposed<BFloat16>(Cpu(1 << 22)); }
TEST_F(GpuMuon, CombinesAndTransposes) {
  expect_combined_and_transposed<float>(Cuda(1 << 22, kTile));
  expect_combined_and_transposed<BFloat16>(Cuda(1 << 22, kTile));
}

}  // namespace
}  // namespace streambp
