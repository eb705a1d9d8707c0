// The emulation of CUDA itself: threads, barriers and warps do what CUDA specifies, in every order of threads, and errors
// are found.
#include "tests/emulation.cuh"

namespace streambp::emulation {
namespace {

// ---- The language -----------------------------------------------------------------------------------------------

__global__ void nothing() {}

TEST(CudaOnCpu, RefusesLaunchesThatExceedLimits) {
  const auto fails = [] { FAIL(); };
  EXPECT_EQ(launch(1, 1025, 0, fails), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1, 65536}, 32, 0, fails), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0, 32, 0, fails), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// The default GPU is the one with the least shared memory.
TEST(CudaOnCpu, SharedMemoryLimitDependsOnTheArchitecture) {
  ASSERT_EQ(cuda_on_cpu::gpu.shared_bytes, 99u << 10);
  for (const cuda_on_cpu::Gpu& gpu : {cuda_on_cpu::kGeForce, cuda_on_cpu::kA100, cuda_on_cpu::kHopper}) {
    cuda_on_cpu::gpu = gpu;
    const auto limit = static_cast<int>(gpu.shared_bytes);
    EXPECT_EQ(launch(1, 32, gpu.shared_bytes, [] {}), cudaSuccess);
    EXPECT_EQ(launch(1, 32, gpu.shared_bytes + 1, [] { FAIL(); }), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, limit), cudaSuccess);
    EXPECT_EQ(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, limit + 1),
              cudaErrorInvalidValue);
    cudaDeviceProp properties;
    EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    EXPECT_EQ(properties.sharedMemPerBlockOptin, gpu.shared_bytes);
    EXPECT_EQ(properties.major, gpu.major);
  }
  cuda_on_cpu::gpu = cuda_on_cpu::kGeForce;
  cudaGetLastError();
}

// ---- Barriers ---------------------------------------------------------------------------------------------------

// Sums `in` over the block by halving, with or without barriers.
__global__ void block_sum(const int* in, int* out, bool with_barriers) {
  int* sums = shared<int>();
  const unsigned i = threadIdx.x;
  sums[i] = in[i];
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (with_barriers) __syncthreads();
    if (i < half) sums[i] += sums[i + half];
  }
  if (i == 0) *out = sums[0];
}

TEST(CudaOnCpu, SomeScheduleExposesAMissingBarrier) {
  const std::vector<int> in(64, 1);
  int wrong = 0;
  for_all_schedules([&] {
    int out = 0;
    launch(1, 64, 64 * sizeof(int), [&] { block_sum(in.data(), &out, false); });
    wrong += out != 64;
  });
  EXPECT_GT(wrong, 0);

  // One value is read before it is written, another is overwritten before it is read. Each error shows in only one of
  // the two plain orders.
  const auto neighbour = [](bool early_write) {
    std::vector<int> got(64);
    launch(1, 64, 64 * sizeof(int), [&] {
      int* values = shared<int>();
      const unsigned i = threadIdx.x;
      values[i] = 1;
      if (early_write) __syncthreads();
      got[i] = values[(i + 63) % 64];  // written by the previous thread
      if (early_write) values[i] = 2;
    });
    return static_cast<int>(std::count(got.begin(), got.end(), 1));
  };
  EXPECT_EQ(neighbour(false), 63);
  EXPECT_EQ(neighbour(true), 1);
  cuda_on_cpu::schedule = Schedule::backward;
  EXPECT_EQ(neighbour(false), 1);
  EXPECT_EQ(neighbour(true), 63);
  cuda_on_cpu::schedule = Schedule::forward;
}

TEST(CudaOnCpu, ReturnedThreadsCountAsArrived) {
  for_all_schedules([] {
    int sum = 0;
    launch(1, 100, sizeof(int), [&] {
      if (threadIdx.x == 0) *shared<int>() = 0;
      __syncthreads();
      if (threadIdx.x % 3 == 0) return;
      ++*shared<int>();
      __syncthreads();
      if (threadIdx.x == 1) sum = *shared<int>();
    });
    EXPECT_EQ(sum, 66);
  });
}

TEST(CudaOnCpu, ReportsDeadlocks) {
  for_all_schedules([] {
    std::string what = complaint({2, 1}, 64, 0, [] {
      if (blockIdx.x == 1 && threadIdx.x >= 40)
        __syncthreads();
      else if (blockIdx.x == 1)
        __shfl_sync(kAllLanes, 1, 0);
    });
    EXPECT_PRED2(contains, what, "block (1, 0, 0)");
    EXPECT_PRED2(contains, what, "threads 0..31: returned, 32..39: __shfl_sync, 40..63: __syncthreads");

    what = complaint(1, 32, 0, [] {
      if (threadIdx.x < 7)
        __shfl_xor_sync(kAllLanes, 1.0f, 1);
      else
        __syncwarp();
    });
    EXPECT_PRED2(contains, what, "__shfl_xor_sync");
    EXPECT_PRED2(contains, what, "__syncwarp");
    EXPECT_PRED2(contains, complaint(1, 32, 0, [] { __any_sync(0xffff, 1); }), "another mask");

    int sum = 0;  // and the next kernel runs
    launch(1, 64, 0, [&] { __syncthreads(), ++sum; });
    EXPECT_EQ(sum, 64);
  });
}

TEST(CudaOnCpu, ExceptionsReachTheCallerAndStacksAreUnwound) {
  int alive = 0;
  struct Counted {
    int& count;
    explicit Counted(int& n) : count(n) { ++count; }
    ~Counted() { --count; }
  };
  for_all_schedules([&] {
    EXPECT_THROW(launch(3, 96, 0,
                        [&] {
                          const Counted counted(alive);
                          __syncthreads();
                          if (blockIdx.x == 1 && threadIdx.x == 33) throw std::out_of_range("thread 33");
                          __syncthreads();
                        }),
                 std::out_of_range);
    EXPECT_EQ(alive, 0);
  });
  EXPECT_THROW(launch(1, 1, 0, [] { launch(1, 1, 0, [] {}); }), std::logic_error);
  EXPECT_THROW(__syncthreads(), std::logic_error);
}

TEST(CudaOnCpu, SeveralOsThreadsMayLaunch) {
  std::vector<int> in(256, 3), out(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] { launch(20, 256, 1024, [&] { block_sum(in.data(), &out[t], true); }); });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(out, std::vector<int>(4, 768));
}

// ---- Warps ------------------------------------------------------------------------------------------------------

TEST(CudaOnCpu, TheLastWarpMayBeSmall) {
  for_all_schedules([] {
    launch(1, 40, 0, [] {
      const int thread = static_cast<int>(threadIdx.x);
      EXPECT_EQ(__ballot_sync(kAllLanes, 1), thread < 32 ? kAllLanes : 0xffu);
      EXPECT_EQ(__shfl_xor_sync(kAllLanes, thread, 3), thread ^ 3);
      const float beyond = __shfl_down_sync(kAllLanes, 1.0f, 4);
      EXPECT_EQ(std::isnan(beyond), thread >= 36);  // lanes that do not exist
    });
    float d[4];
    EXPECT_PRED2(contains, complaint(1, 40, 0, [&] { ptx::mma_m16n8k16(d, {0, 0, 0, 0}, {0, 0}); }), "8 lanes");
  });
}

TEST(CudaOnCpu, SyncwarpOrdersLanes) {
  const auto neighbours = [](bool with_sync) {
    int right = 0;
    launch(1, 64, 64 * sizeof(int), [&] {
      int* values = shared<int>();
      values[threadIdx.x] = static_cast<int>(threadIdx.x);
      if (with_sync) __syncwarp();
      right += values[threadIdx.x ^ 1] == static_cast<int>(threadIdx.x ^ 1);
    });
    return right;
  };
  for_all_schedules([&] {
    EXPECT_EQ(neighbours(true), 64);
    EXPECT_EQ(neighbours(false), 32);
  });
}

}  // namespace
}  // namespace streambp::emulation
