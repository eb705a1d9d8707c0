// Ranks on GPUs, connected by NCCL: they give the bits of one GPU. With fewer than four GPUs, visibly skipped.
#include "tests/gpu.h"
#include "tests/ranks.cuh"
#include "training/engine_instances.h"

#ifdef STREAMBP_NCCL

namespace streambp {
namespace {

class GpuRanks : public GpuTest {
 protected:
  static constexpr int kGpus = 4;
  const Config c = models_for_ranks()[1].config;
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
#ifdef CUDA_ON_CPU
    cuda_on_cpu::gpu_count = kGpus;
#endif
    int count = 0;
    cudaGetDeviceCount(&count);
    if (count < kGpus) GTEST_SKIP() << "needs " << kGpus << " GPUs, and this machine has " << count;
  }
#ifdef CUDA_ON_CPU
  void TearDown() override { cuda_on_cpu::gpu_count = 1, cuda_on_cpu::device_memory.free = std::size_t{1} << 30; }
#endif
};

template <class T, class G = T>
void expect_bits_of_one_gpu(Index streams, Index sequence, const Task& task) {
  expect_bits_of_one_process<Cuda, T, G>(streams, sequence, task, kTile);
}

// Two tiles, so that two of four sequence ranks have none.
std::vector<Batch> few_rows(const Config& c, std::size_t count) {
  return batches_of(c, count, sized<Lengths>({520, 40, 300}, {250, 20, 30}, {250, 10}));
}

TEST_F(GpuRanks, SequenceRanksGiveTheBitsOfLanes) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  expect_bits_of_one_gpu<float>(1, 2, {c, few_rows(c, 1), Mode::stream});
  expect_bits_of_one_gpu<BFloat16>(1, 4, {c, few_rows(c, 1), Mode::full});
}

TEST_F(GpuRanks, DataRanksGiveTheBitsOfOneGpuThatAccumulates) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  const Config c = models_for_ranks()[0].config;
  expect_bits_of_one_gpu<BFloat16>(2, 1, {c, few_rows(c, 3), Mode::stream});  // one is idle in the second round
}

TEST_F(GpuRanks, GridsGiveTheBitsOfOneGpu) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  const Task task{c, few_rows(c, 2), Mode::stream, kTile, OptimizerKind::adamw_bf16};
  expect_bits_of_one_gpu<BFloat16, BFloat16>(2, 2, task);
}

TEST_F(GpuRanks, FarMemoryGivesTheBitsOfOneGpu) {
  Task task{c, few_rows(c, 1), Mode::stream, kTile, OptimizerKind::adamw_bf16};
  task.places = {Place::far, Place::far, Place::far, Place::far};
  expect_bits_of_one_gpu<BFloat16>(1, 2, task);
}

// Each rank gathers the rows of one matrix from all ranks and orthogonalises it.
TEST_F(GpuRanks, MuonGivesTheBitsOfOneGpu) {
  const Task task{c, few_rows(c, 2), Mode::stream, kTile, OptimizerKind::muon};
  expect_bits_of_one_gpu<BFloat16>(2, 1, task);
}

#ifdef CUDA_ON_CPU
// NCCL takes its memory before a run takes the rest, and a run knows how much is left.
TEST_F(GpuRanks, MemoryOfTheConnectionIsMeasured) {
  if (kSanitized) GTEST_SKIP() << "needs the engines, which a build with sanitizers does not have";
  const std::size_t alone = gpu::free_memory({});
  as_ranks(2, 2, [&](const Ranks& ranks) { EXPECT_LT(gpu::free_memory(ranks), alone); });
  EXPECT_EQ(gpu::free_memory({}), alone);
  as_ranks(2, 1, [&](const Ranks& ranks) {
    Connection<Cuda> connection(ranks);
    gather_on_host<Index>(ranks.all, {});  // all are connected
    if (ranks.all.rank == 0) cuda_on_cpu::device_memory.free = (std::size_t{2} << 20) + 2 * cuda::kCounterBytes;
    gather_on_host<Index>(ranks.all, {});
    Cuda dev(std::size_t{1} << 20, kTile);
    connection.attach(dev);
    const auto numbers = allocate<float>(dev, 2, 1, Kind::chunk);
    const auto rank = static_cast<float>(ranks.all.rank);
    dev.upload(numbers.slice(shard(2, ranks.all)), &rank);
    exchange(dev, "share", connection.ranks.all, shared_rows(connection.ranks.all, numbers));
    EXPECT_EQ(to_host(dev, numbers), std::vector<float>({0, 1}));
    connection.close();
  });
}

// Another rank fails: a rank that waits for it fails too, and does not hang. On GPUs, MPI ends the others.
TEST_F(GpuRanks, FailTogether) {
  std::atomic<int> failed = 0;
  auto run = [&] {
    as_ranks(2, 1, [&](const Ranks& ranks) {
      cuda::local_rank = static_cast<int>(ranks.all.rank);
      Cuda dev(std::size_t{1} << 20, kTile);
      EXPECT_EQ(cuda::current_gpu(), ranks.all.rank) << "each rank uses its own";
      Connection<Cuda> connection(ranks);
      connection.attach(dev);
      if (ranks.all.rank == 1) fail("the first failure");
      const auto numbers = allocate<float>(dev, 64, 64, Kind::chunk);
      zero(dev, numbers);
      exchange(dev, "share", connection.ranks.all, shared_rows(connection.ranks.all, numbers));
      const std::string said = error_of([&] { dev.synchronize(); });
      EXPECT_PRED2(contains, said, "the connection to another GPU has failed");
      failed += !said.empty();
      fail(said);
    });
  };
  EXPECT_THROW(run(), Error);
  EXPECT_EQ(failed, 1);
}
#endif

}  // namespace
}  // namespace streambp

#endif
