// The Cuda device itself: drivers, errors, and the algorithms of matrix products.
#include "kernels/matmul.cuh"
#include "tests/gpu.h"
#include "tests/temporary.h"
#include "training/products.cuh"

namespace streambp {
namespace {

class CudaDevice : public GpuTest {};

TEST(GpuDriver, MustBeNewEnoughForTheToolkit) {
  EXPECT_EQ(cuda::driver_problem(13000, 13000), "");
  EXPECT_EQ(cuda::driver_problem(13010, 13000), "");
  EXPECT_EQ(cuda::driver_problem(13000, 12040), "");
  EXPECT_EQ(cuda::driver_problem(12000, 12080), "");  // minor versions are compatible
  EXPECT_EQ(
      cuda::driver_problem(12040, 13000),
      "the NVIDIA driver supports CUDA 12.4, and this program was built with CUDA 13.0, which needs driver r580 or "
      "newer; update the driver, or build with CUDA 12");
  EXPECT_EQ(
      cuda::driver_problem(11080, 12080),
      "the NVIDIA driver supports CUDA 11.8, and this program was built with CUDA 12.8, which needs driver r525 or "
      "newer; update the driver");
}

// In every shape of a model, a row has the same bits for any number of other rows.
TEST_F(CudaDevice, ProductsHaveTheSameBitsAloneAndInsideAChunk) {
  const Config c = make_config("gpt2", {67, 36, 2, 3, 3, 12, 100, 800, true});
  EXPECT_NO_THROW(cuda::check_products<float>(c, kTile));
  EXPECT_NO_THROW(cuda::check_products<BFloat16>(c, kTile));
}

TEST_F(CudaDevice, TimesProductsAgainstTheFreeChoice) {
  const Config c = make_config("qwen3", {83, 24, 2, 2, 1, 16, 40, 0, true});
  const auto timings = cuda::time_products<BFloat16>(c, 300, kTile);
  ASSERT_EQ(timings.size(), 3 * cuda::linear_shapes(c).size());
  for (const ProductTiming& t : timings) {
    EXPECT_GT(t.ours.rate, 0) << t.name;
    EXPECT_GT(t.ours.waves, 0) << t.name;
    EXPECT_GT(t.with_workspace.rate, 0) << t.name;
    EXPECT_GT(t.free_choice.rate, 0) << t.name;
    EXPECT_GT(t.free_choice.waves, 0) << t.name;
  }
  EXPECT_EQ(timings[0].name.find("forward: the product of 300 rows"), 0u) << timings[0].name;
  EXPECT_GT(cuda::time_large_product<BFloat16>().free_choice.rate, 0);
}

template <class Device, class T>
Matrix<T> random_matrix(Device& dev, Index rows, Index cols, std::uint64_t seed) {
  const Matrix<T> m = allocate<T>(dev, rows, cols, Kind::chunk);
  std::vector<T> values;
  for (Index i = 0; i < m.size(); ++i) {
    values.push_back(static_cast<T>(static_cast<float>(Random(seed).normal(static_cast<std::uint64_t>(i)))));
  }
  dev.upload(m, values.data());
  return m;
}

// All results of the head, with aligned rows of logits and with contiguous rows.
template <class Device, class T>
void expect_same_bits_with_aligned_logits(Device&& dev) {
  using A = Accumulator<T>;
  constexpr Index rows = 300, inputs = 40, vocab = 67;
  const auto x = random_matrix<Device, T>(dev, rows, inputs, 1), w = random_matrix<Device, T>(dev, vocab, inputs, 2);
  const Matrix<A> weights = random_matrix<Device, A>(dev, 1, rows, 3);
  const auto targets = allocate<std::int32_t>(dev, 1, rows, Kind::stream);
  std::vector<std::int32_t> values;
  for (Index i = 0; i < rows; ++i) values.push_back(static_cast<std::int32_t>(i * 7 % (vocab + 1) - 1));
  dev.upload(targets, values.data());
  auto head = [&](Matrix<A> logits) {
    const auto dx = allocate<T>(dev, rows, inputs, Kind::chunk);
    const auto logp = allocate<A>(dev, 1, rows, Kind::chunk), dw = allocate<A>(dev, vocab, inputs, Kind::chunk);
    std::vector<double> all;
    auto collect = [&](auto m) {
      for (auto number : to_host(dev, m)) all.push_back(static_cast<double>(number));
    };
    zero(dev, dw);
    matmul<Device, A, T>(dev, logits, x, w);
    collect(logits);
    const Matrix<T> dlogits = log_probabilities_backward<T>(dev, logp, logits, targets, {.fixed = weights});
    matmul_backward_input(dev, dx, dlogits, w, Update::assign);
    matmul_backward_weight(dev, dw, Matrix<A>{}, dlogits, x);
    collect(logp), collect(dlogits), collect(dx), collect(dw);
    return all;
  };
  const Matrix<A> aligned = allocate_aligned<A>(dev, rows, vocab, Kind::logits);
  EXPECT_EQ(aligned.stride * static_cast<Index>(sizeof(A)) % 128, 0);
  EXPECT_EQ(head(aligned), head(allocate<A>(dev, rows, vocab, Kind::logits)));
}
TEST_F(CudaDevice, AligningLogitsChangesNoBits) {
  constexpr std::size_t room = std::size_t{1} << 22;
  if (kEmulated) {  // cuBLASLt may choose another algorithm for another stride
    expect_same_bits_with_aligned_logits<Cuda, float>(Cuda(room, kTile));
    expect_same_bits_with_aligned_logits<Cuda, BFloat16>(Cuda(room, kTile));
  }
  expect_same_bits_with_aligned_logits<Cpu, float>(Cpu(room));
  expect_same_bits_with_aligned_logits<Cpu, double>(Cpu(room));
}

#ifdef CUDA_ON_CPU

// Even with an odd vocabulary, as in GPT-2, tensor cores can read the rows of every operand.
TEST_F(CudaDevice, AlignsEveryOperandOfAProduct) {
  const Config c = make_config("gpt2", {67, 32, 2, 2, 2, 16, 64, 800, true});
  cuda_on_cpu::misaligned_products = 0;
  run_gradient<Cuda, BFloat16>(c, packed(c, {300}), Schedule::stream(kTile, kTile), random_weights(), {}, kTile);
  EXPECT_EQ(cuda_on_cpu::misaligned_products, 0u);
}

// The first error reaches the caller, and std::terminate is not called on the way.
TEST_F(CudaDevice, TheFirstErrorIsReported) {
  const Config c = make_config("qwen3", {83, 24, 2, 2, 1, 16, 40, 0, true});
  const Batch batch = packed(c, {100});
  for (const int operations : {0, 1, 40, 80, 120, 160, 200, 240, 280, 320, 360, 400}) {
    SCOPED_TRACE(std::to_string(operations) + " operations before the failure");
    auto weights = [&](auto& dev, auto& model) {
      random_weights()(dev, model);
      cuda_on_cpu::operations_before_failure = operations;
      if constexpr (requires { dev.profile; }) dev.profile = operations % 80 == 0;
    };
    const std::string error = error_of([&] {
      run_gradient<Cuda, BFloat16>(c, batch, Schedule::stream(kTile, kTile), weights, {}, kTile);
      cuda_on_cpu::operations_before_failure = -1;
    });
    const bool finished = cuda_on_cpu::operations_before_failure < 0;
    cuda_on_cpu::operations_before_failure = -1;
    if (finished) {
      EXPECT_GE(operations, 160);
      return;
    }
    const bool named = error.find("illegal memory access") != std::string::npos ||
                       error.find("failed to execute") != std::string::npos;
    EXPECT_TRUE(named) << error;
  }
}

TEST_F(CudaDevice, ReportsEveryChangeOfAlgorithm) {
  Cuda dev(std::size_t{1} << 22, kTile);
  const auto x = allocate<float>(dev, 300, 40, Kind::chunk), w = allocate<float>(dev, 24, 40, Kind::chunk),
             y = allocate<float>(dev, 300, 24, Kind::chunk);
  zero(dev, x), zero(dev, w);
  cuda_on_cpu::rejects = [](const cuda_on_cpu::Product& p) { return p.n == 300; };
  matmul(dev, y.slice({0, 256}), x.slice({0, 256}), w);
  EXPECT_TRUE(dev.algorithm_changes.empty());
  for (int again = 0; again < 2; ++again) matmul(dev, y, x, w);
  cuda_on_cpu::rejects = nullptr;
  ASSERT_EQ(dev.algorithm_changes.size(), 1u);
  EXPECT_PRED2(contains, dev.algorithm_changes[0], "the product of 300 rows of 40 numbers to 24 (float32)");
}

// With sums that depend on the number of rows, the run takes another algorithm, or multiplies tile by tile.
TEST_F(CudaDevice, FindsProductsWhoseBitsDoNotDependOnTheNumberOfRows) {
  const Config c = make_config("gpt2", {67, 36, 1, 3, 3, 12, 100, 800, true});
  const auto error_if = [&](auto descends) {
    cuda_on_cpu::descends = [=](const cuda_on_cpu::Product& p) { return p.k == 100 && descends(p); };
    const std::string error = error_of([&] { cuda::check_products<float>(c, kTile); });
    if (error.empty() && !kSanitized) {
      const auto adapted = [](const auto& choice) { return choice.second.candidate > 0 || choice.second.by_tile; };
      EXPECT_TRUE(std::ranges::any_of(cuda::choices, adapted));
      const auto run = [&](Index chunk) {
        return run_gradient<Cuda, float>(c, packed(c, {520}), Schedule::stream(chunk, kTile), random_weights(), {},
                                         kTile);
      };
      expect_same_bits(run(kTile), run(3 * kTile));
    }
    cuda_on_cpu::descends = nullptr;
    cuda::choices.clear();
    return error;
  };
  cuda_on_cpu::candidates = 3;
  EXPECT_EQ(error_if([](const auto& p) { return p.n == 512 && p.algorithm < 2; }), "") << "the third candidate";
  cuda_on_cpu::rejects = [](const auto& p) { return p.n == 512 && p.k == 100 && p.algorithm == 0; };
  EXPECT_EQ(error_if([](const auto&) { return false; }), "") << "the first one is rejected for a chunk";
  cuda_on_cpu::rejects = nullptr;
  cuda_on_cpu::candidates = 1;
  EXPECT_EQ(error_if([](const auto& p) { return p.n > 256; }), "") << "tile by tile";
  for (const std::size_t rows : {255, 256})
    EXPECT_PRED2(contains, error_if([=](const auto& p) { return p.n == rows; }),
                 "rows of 100 numbers to 36 (float32) has different bits inside a chunk of 512");
}

#endif

}  // namespace
}  // namespace streambp
