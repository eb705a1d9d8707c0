// AdamW on both devices, in every combination of types, against float64; and its stochastic rounding.
#include "kernels/adamw.cuh"

#include "tests/gpu.cuh"

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
  AdamW s{0.01, 0.9, 0.95, 1e-8, 0.1, 0.5, 1};
  for (s.step = 1; s.step <= 20; ++s.step) {
    adamw(host, w.host.m, g.host.m, AdamWState<double>{{}, m.host.m, v.host.m}, s);
    adamw(gpu, w.gpu, g.gpu, AdamWState<M>{with_master ? master.gpu : Matrix<float>{}, m.gpu, v.gpu}, s);
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
std::vector<BFloat16> stochastically_rounded(Device&& gpu) {
  const Index n = 64, d = 256;
  const Twin<BFloat16> w(gpu, n, d, 1, 0, 1), g(gpu, n, d, 2, 0, 1), m(gpu, n, d, 3, 0, 1), v(gpu, n, d, 4, 0, 1);
  AdamW s{1e-4, 0.9, 0.9, 0, 0, 1, 100000};  // every update is 1e-4; an ulp of 1 is 8e-3, and 4e-3 below 1
  for (int i = 0; i < 20; ++i, ++s.step) adamw(gpu, w.gpu, g.gpu, AdamWState<BFloat16>{{}, m.gpu, v.gpu}, s);
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
}

}  // namespace
}  // namespace streambp
