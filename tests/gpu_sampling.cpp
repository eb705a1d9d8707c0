// Sampling as an operation of both devices: the tokens that draw() draws, and the log-probs of training.
#include "kernels/sampling.cuh"
#include "tests/both_devices.h"

namespace streambp {
namespace {

template <class Tested>
class DeviceSampling : public OnBothDevices<Tested> {
 protected:
  // Random logits with many ties; the first row has nothing else.
  static std::vector<float> random_logits(Index rows, Index cols) {
    std::vector<float> logits(static_cast<std::size_t>(rows * cols));
    const Random random(static_cast<std::uint64_t>(cols));
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const bool tied = i < static_cast<std::size_t>(cols) || random.below(3, 3 * i) == 0;
      logits[i] = static_cast<float>(tied ? static_cast<double>(random.below(4, 3 * i + 1)) : 2 * random.normal(i));
    }
    return logits;
  }
  // Row i continues text 7 + i of length 3 i.
  std::vector<Draw> draws_of(const std::vector<float>& logits, Index rows, const Sampling& s) {
    const Index cols = static_cast<Index>(logits.size()) / rows;
    auto& dev = *this->gpu;
    auto scope = dev.scope();
    const auto m = allocate<float>(dev, rows, cols, Kind::logits);
    const auto index = allocate<std::int32_t>(dev, 2, rows, Kind::stream);
    const auto draws = allocate<Draw>(dev, 1, rows, Kind::stream);
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(2 * rows));
    for (Index i = 0; i < rows; ++i) {
      numbers[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(7 + i);
      numbers[static_cast<std::size_t>(rows + i)] = static_cast<std::int32_t>(3 * i);
    }
    dev.upload(m, logits.data());
    dev.upload(index, numbers.data());
    sample(dev, draws, m, {index.slice({0, 1}), index.slice({1, 2})}, s);
    std::vector<Draw> result(static_cast<std::size_t>(rows));
    dev.download(result.data(), draws);
    return result;
  }
  static std::span<const float> row_of(const std::vector<float>& logits, std::size_t rows, std::size_t i) {
    const std::size_t cols = logits.size() / rows;
    return std::span(logits).subspan(i * cols, cols);
  }
};
#ifdef CUDA_ON_CPU
using Float32Devices = testing::Types<On<Cuda, float>, On<Cpu, float>>;
#else
using Float32Devices = testing::Types<On<Cuda, float>>;
#endif
TYPED_TEST_SUITE(DeviceSampling, Float32Devices, DeviceTypeNames);

TYPED_TEST(DeviceSampling, DrawsTheTokensOfDraw) {
  const auto rows = sized<std::size_t>(40, 4, 2);
  for (const Index cols : sized<std::vector<Index>>({1, 2, 83, 1024, 9000, 50257}, {1, 83, 2056}, {1, 83})) {
    const std::vector<float> logits = this->random_logits(static_cast<Index>(rows), cols);
    for (const Sampling& s : {Sampling{},
                              {.temperature = 0},
                              {.temperature = 1e-300},
                              {.temperature = 0.7, .seed = 5},
                              {.top_k = 1},
                              {.top_k = 20},
                              {.top_k = cols + 1},
                              {.top_p = 1e-9},
                              {.top_p = 0.5},
                              {.temperature = 1.5, .top_p = 0.9, .top_k = 50},
                              {.temperature = 0.9, .top_p = 0.99}}) {
      const std::vector<Draw> draws = this->draws_of(logits, static_cast<Index>(rows), s);
      for (std::size_t i = 0; i < rows; ++i) {
        const Draw truth = draw(this->row_of(logits, rows, i), s, Random(s.seed, 7 + i).uniform(3 * i));
        EXPECT_EQ(draws[i].token, truth.token) << "row " << i << " of " << cols << ": temperature " << s.temperature
                                               << ", top-p " << s.top_p << ", top-k " << s.top_k;
        EXPECT_NEAR(draws[i].logp, truth.logp, 1e-5 * (1 + std::abs(truth.logp)));
      }
    }
  }
}

TYPED_TEST(DeviceSampling, LogProbsAreThoseOfTraining) {
  auto& dev = *this->gpu;
  constexpr Index rows = 9, cols = 500;
  const auto logits = this->random_logits(rows, cols);
  const std::vector<Draw> draws = this->draws_of(logits, rows, {.temperature = 2, .top_k = 100});
  const auto m = allocate<float>(dev, rows, cols, Kind::logits);
  const auto targets = allocate<std::int32_t>(dev, 1, rows, Kind::stream);
  const auto logps = allocate<float>(dev, 1, rows, Kind::stream);
  std::vector<std::int32_t> tokens;
  for (const Draw& d : draws) tokens.push_back(static_cast<std::int32_t>(d.token));
  dev.upload(m, logits.data());
  dev.upload(targets, tokens.data());
  log_probabilities(dev, logps, m, targets);
  const std::vector<float> truth = to_host(dev, logps);
  for (std::size_t i = 0; i < draws.size(); ++i) EXPECT_EQ(draws[i].logp, static_cast<double>(truth[i])) << i;
}

TYPED_TEST(DeviceSampling, ReportsTheFirstBadLogitOfARow) {
  constexpr std::size_t rows = 4, cols = 3000;
  auto logits = this->random_logits(rows, cols);
  logits[cols + 2999] = std::nanf("");
  logits[2 * cols + 17] = -INFINITY, logits[2 * cols + 800] = std::nanf("");
  logits[3 * cols] = INFINITY;
  for (const Sampling& s : {Sampling{}, {.temperature = 0}, {.top_p = 0.9}}) {
    const std::vector<Draw> draws = this->draws_of(logits, rows, s);
    EXPECT_FALSE(draws[0].is_bad());
    EXPECT_TRUE(draws[1].is_bad() && std::isnan(draws[1].logp) && draws[1].bad_token() == 2999);
    EXPECT_TRUE(draws[2].is_bad() && draws[2].logp == -INFINITY && draws[2].bad_token() == 17);
    EXPECT_TRUE(draws[3].is_bad() && draws[3].logp == INFINITY && draws[3].bad_token() == 0);
  }
}

}  // namespace
}  // namespace streambp
