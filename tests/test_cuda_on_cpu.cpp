// The emulation of CUDA itself: barriers, warps, fragments and copies do what CUDA specifies, in every order of threads,
// and errors are found.
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <thread>
#include <vector>

namespace streambp {
namespace {

using cuda_on_cpu::launch;
using cuda_on_cpu::Schedule;
constexpr unsigned kAllLanes = 0xffffffff;

// Calls body() under every order of threads.
void for_all_schedules(const std::function<void()>& body) {
  for (const Schedule s : {Schedule::forward, Schedule::backward, Schedule::shuffled}) {
    for (unsigned seed = 1; seed <= (s == Schedule::shuffled ? 5u : 1u); ++seed) {
      cuda_on_cpu::schedule = s, cuda_on_cpu::shuffle_seed = seed;
      SCOPED_TRACE("schedule " + std::to_string(static_cast<int>(s)) + ", seed " + std::to_string(seed));
      body();
    }
  }
  cuda_on_cpu::schedule = Schedule::forward;
}

template <class T>
T* shared() {
  return static_cast<T*>(cuda_on_cpu::shared_memory());
}

// The message that launch throws, or "none".
template <class F>
std::string complaint(dim3 grid, dim3 block, std::size_t shared_bytes, F&& body) {
  try {
    launch(grid, block, shared_bytes, body);
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "none";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// ---- The language -----------------------------------------------------------------------------------------------

static_assert(alignof(int4) == 16 && alignof(uint4) == 16 && alignof(float4) == 16 && alignof(float2) == 8);
static_assert(sizeof(uint3) == 12 && sizeof(dim3) == 12);

__global__ void __launch_bounds__(1024) count_visits(__grid_constant__ const int width, int* visits) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  ++visits[block * static_cast<unsigned>(width) + thread];
}

TEST(CudaOnCpu, EveryThreadOfEveryBlockRunsOnce) {
  for_all_schedules([] {
    std::vector<int> visits(2 * 3 * 5 * 7 * 4 * 2);
    EXPECT_EQ(launch({2, 3, 5}, {7, 4, 2}, 0, [&] { count_visits(7 * 4 * 2, visits.data()); }), cudaSuccess);
    for (const int n : visits) EXPECT_EQ(n, 1);
  });
}

TEST(CudaOnCpu, SchedulesAreOrdersOfBlocksWarpsAndLanes) {
  std::vector<std::vector<unsigned>> orders;
  for_all_schedules([&] {
    std::vector<unsigned> order;
    launch(3, 64, 0, [&] { order.push_back(blockIdx.x * 64 + threadIdx.x); });
    orders.push_back(order);
  });
  for (unsigned i = 0; i < 192; ++i) {
    EXPECT_EQ(orders[0][i], i);
    EXPECT_EQ(orders[1][i], 191 - i);
  }
  EXPECT_NE(orders[2], orders[3]);
  int whole_warps = 0;  // steps of a shuffled order within a warp
  for (std::size_t i = 1; i < 192; ++i) whole_warps += orders[2][i] / 32 == orders[2][i - 1] / 32;
  EXPECT_LT(whole_warps, 130);
  std::vector<std::vector<unsigned>> blocks(3);  // every block is shuffled differently
  for (const unsigned i : orders[2]) blocks[i / 64].push_back(i % 64);
  EXPECT_NE(blocks[0], blocks[1]);
}

TEST(CudaOnCpu, LaunchesThatDoNotFitAreRefused) {
  const auto nothing = [] { FAIL(); };
  EXPECT_EQ(launch(1, 1025, 0, nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1, 65536}, 32, 0, nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(0, 32, 0, nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// The default GPU is the one with the least shared memory.
TEST(CudaOnCpu, SharedMemoryIsThatOfTheArchitecture) {
  ASSERT_EQ(cuda_on_cpu::gpu.shared_bytes, 99u << 10);
  for (const cuda_on_cpu::Gpu& gpu : {cuda_on_cpu::kGeForce, cuda_on_cpu::kA100, cuda_on_cpu::kHopper}) {
    cuda_on_cpu::gpu = gpu;
    const auto limit = static_cast<int>(gpu.shared_bytes);
    EXPECT_EQ(launch(1, 32, gpu.shared_bytes, [] {}), cudaSuccess);
    EXPECT_EQ(launch(1, 32, gpu.shared_bytes + 1, [] { FAIL(); }), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFuncSetAttribute(count_visits, cudaFuncAttributeMaxDynamicSharedMemorySize, limit), cudaSuccess);
    EXPECT_EQ(cudaFuncSetAttribute(count_visits, cudaFuncAttributeMaxDynamicSharedMemorySize, limit + 1),
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

TEST(CudaOnCpu, BarriersOrderTheThreads) {
  std::vector<int> in(1024);
  for (int i = 0; i < 1024; ++i) in[static_cast<std::size_t>(i)] = i * i;
  for_all_schedules([&] {
    for (const unsigned threads : {2u, 64u, 1024u}) {
      int out = 0, expected = 0;
      for (unsigned i = 0; i < threads; ++i) expected += in[i];
      launch(2, threads, threads * sizeof(int), [&] { block_sum(in.data(), &out, true); });
      EXPECT_EQ(out, expected);
    }
  });
}

TEST(CudaOnCpu, AMissingBarrierShowsInSomeSchedule) {
  const std::vector<int> in(64, 1);
  int wrong = 0;
  for_all_schedules([&] {
    int out = 0;
    launch(1, 64, 64 * sizeof(int), [&] { block_sum(in.data(), &out, false); });
    wrong += out != 64;
  });
  EXPECT_GT(wrong, 0);

  // A value read before it is written, and one overwritten before it is read. Each shows in one of the two plain orders
  // and not in the other.
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

TEST(CudaOnCpu, ThreadsThatReturnedCountAsArrived) {
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

TEST(CudaOnCpu, ThreadsThatCanNeverGoOnAreReported) {
  for_all_schedules([] {
    std::string what = complaint({2, 1}, 64, 0, [] {
      if (blockIdx.x == 1 && threadIdx.x >= 40)
        __syncthreads();
      else if (blockIdx.x == 1)
        __shfl_sync(kAllLanes, 1, 0);
    });
    EXPECT_TRUE(has(what, "block (1, 0, 0)")) << what;
    EXPECT_TRUE(has(what, "threads 0..31: returned, 32..39: __shfl_sync, 40..63: __syncthreads")) << what;

    what = complaint(1, 32, 0, [] {
      if (threadIdx.x < 7)
        __shfl_xor_sync(kAllLanes, 1.0f, 1);
      else
        __syncwarp();
    });
    EXPECT_TRUE(has(what, "__shfl_xor_sync") && has(what, "__syncwarp")) << what;
    EXPECT_TRUE(has(complaint(1, 32, 0, [] { __any_sync(0xffff, 1); }), "another mask"));

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

TEST(CudaOnCpu, ShufflesAndVotes) {
  for_all_schedules([] {
    launch(2, {16, 8}, 0, [] {
      const int lane = static_cast<int>(threadIdx.y * 16 + threadIdx.x) % 32;
      const int warp = static_cast<int>(threadIdx.y) / 2;
      const double wide = 1e100 * lane;
      EXPECT_EQ(__shfl_sync(kAllLanes, lane + 100 * warp, 5), 5 + 100 * warp);
      EXPECT_EQ(__shfl_sync(kAllLanes, wide, lane + 1), 1e100 * ((lane + 1) % 32));
      EXPECT_EQ(__shfl_sync(kAllLanes, lane, 2, 8), lane / 8 * 8 + 2);
      EXPECT_EQ(__shfl_up_sync(kAllLanes, lane, 3), lane < 3 ? lane : lane - 3);
      EXPECT_EQ(__shfl_up_sync(kAllLanes, lane, 1, 4), lane % 4 == 0 ? lane : lane - 1);
      EXPECT_EQ(__shfl_down_sync(kAllLanes, lane, 16), lane < 16 ? lane + 16 : lane);
      EXPECT_EQ(__shfl_down_sync(kAllLanes, lane, 2, 4), lane % 4 < 2 ? lane + 2 : lane);
      float sum = static_cast<float>(lane);
      for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bits);
      EXPECT_EQ(sum, 496);
      EXPECT_EQ(__ballot_sync(kAllLanes, lane % 2), 0xaaaaaaaau);
      EXPECT_EQ(__any_sync(kAllLanes, lane == 7), 1);
      EXPECT_EQ(__any_sync(kAllLanes, 0), 0);
      EXPECT_EQ(__all_sync(kAllLanes, lane != 7), 0);
      EXPECT_EQ(__all_sync(kAllLanes, -1), 1);
    });
  });
}

TEST(CudaOnCpu, TheLastWarpMayBeSmall) {
  for_all_schedules([] {
    launch(1, 40, 0, [] {
      const int thread = static_cast<int>(threadIdx.x);
      EXPECT_EQ(__ballot_sync(kAllLanes, 1), thread < 32 ? kAllLanes : 0xffu);
      EXPECT_EQ(__shfl_xor_sync(kAllLanes, thread, 3), thread ^ 3);
      const float beyond = __shfl_down_sync(kAllLanes, 1.0f, 4);
      EXPECT_EQ(std::isnan(beyond), thread >= 36);  // lanes that do not exist
    });
    EXPECT_TRUE(has(complaint(1, 40, 0,
                              [] {
                                float d[4];
                                ptx::mma_m16n8k16(d, {0, 0, 0, 0}, {0, 0});
                              }),
                    "8 lanes"));
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

// ---- Fragments --------------------------------------------------------------------------------------------------

// A row-major matrix of bf16 numbers: small integers, whose products sum exactly, or any numbers.
std::vector<std::uint16_t> random_bf16(std::size_t count, unsigned seed, bool integers) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> m(count);
  for (auto& x : m) {
    const float number = integers ? static_cast<float>(static_cast<int>(random() % 17) - 8) : normal(random);
    x = static_cast<std::uint16_t>(ptx::pack_bf16(number, 0));
  }
  return m;
}

// The warp's A (16 x 16), B (16 x 8 stored as n x k or as k x n) and D (16 x 8) in shared memory and back, loaded as
// tensor-core kernels load them.
__global__ void multiply_tile(const std::uint16_t* a, const std::uint16_t* b, bool b_is_k_by_n, float* d) {
  auto* a_tile = shared<std::uint16_t>();
  auto* b_tile = a_tile + 16 * 16;  // 16 columns n, for a whole ldmatrix
  for (unsigned i = threadIdx.x; i < 256; i += 32) a_tile[i] = a[i], b_tile[i] = b[i];
  __syncwarp();
  const unsigned lane = threadIdx.x, r = lane % 8, group = lane / 8;
  std::uint32_t a_fragment[4], b_fragment[4];
  // Matrices 0, 1: the upper and lower rows; 2, 3: the same of the right columns.
  ptx::ldmatrix_x4(a_fragment, a_tile + (r + group % 2 * 8) * 16 + group / 2 * 8);
  // Matrices 0, 1: the first and last k of the first eight columns; 2, 3: of the next eight columns.
  if (b_is_k_by_n)
    ptx::ldmatrix_x4_trans(b_fragment, b_tile + (r + group % 2 * 8) * 16 + group / 2 * 8);
  else
    ptx::ldmatrix_x4(b_fragment, b_tile + (r + group / 2 * 8) * 16 + group % 2 * 8);
  for (unsigned half = 0; half < 2; ++half) {
    float sums[4];
    for (unsigned i = 0; i < 4; ++i) sums[i] = d[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2];
    ptx::mma_m16n8k16(sums, a_fragment, {b_fragment[2 * half], b_fragment[2 * half + 1]});
    for (unsigned i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + i % 2] = sums[i];
  }
}

TEST(CudaOnCpu, FragmentsMultiplyAsMatrices) {
  for_all_schedules([] {
    for (const bool b_is_k_by_n : {false, true}) {
      for (const bool integers : {true, false}) {
        const auto a = random_bf16(256, 1, integers), b = random_bf16(256, 2, integers);
        std::vector<float> d(256), expected(256);
        for (std::size_t i = 0; i < 256; ++i) d[i] = expected[i] = static_cast<float>(i % 7);
        launch(1, 32, 1024, [&] { multiply_tile(a.data(), b.data(), b_is_k_by_n, d.data()); });
        for (std::size_t i = 0; i < 16; ++i) {
          for (std::size_t j = 0; j < 16; ++j) {
            for (std::size_t k = 0; k < 16; ++k) {
              const float b_kj = cuda_on_cpu::low_bf16(b[b_is_k_by_n ? k * 16 + j : j * 16 + k]);
              expected[i * 16 + j] += cuda_on_cpu::low_bf16(a[i * 16 + k]) * b_kj;
            }
          }
        }
        EXPECT_EQ(d, expected);
      }
    }
  });
}

TEST(CudaOnCpu, LdmatrixWantsAlignedRowsOfSharedMemory) {
  std::uint32_t outside[4];
  std::uint32_t r[4];
  EXPECT_TRUE(has(complaint(1, 32, 1024, [&] { ptx::ldmatrix_x4(r, shared<char>() + 8); }), "aligned"));
  EXPECT_TRUE(has(complaint(1, 32, 1024, [&] { ptx::ldmatrix_x4(r, shared<char>() + 1024); }), "outside"));
  EXPECT_TRUE(has(complaint(1, 32, 1024, [&] { ptx::ldmatrix_x4_trans(r, outside); }), "ldmatrix_x4_trans"));
}

TEST(CudaOnCpu, Bf16RoundsToNearestEven) {
  const auto rounded = [](float x) { return cuda_on_cpu::low_bf16(ptx::pack_bf16(x, 0)); };
  EXPECT_EQ(ptx::pack_bf16(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(rounded(1.0f + 1.0f / 256), 1.0f);               // a tie, to even
  EXPECT_EQ(rounded(1.0f + 3.0f / 256), 1.0f + 4.0f / 256);  // a tie, to even
  EXPECT_EQ(rounded(1.0f + 1.01f / 256), 1.0f + 2.0f / 256);
  EXPECT_EQ(rounded(-INFINITY), -INFINITY);
  EXPECT_EQ(rounded(3.4e38f), INFINITY);
  EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0xffffffffu))));
  EXPECT_EQ(ptx::exp2_approx(-3), 0.125f);
  EXPECT_EQ(ptx::log2_approx(8), 3);
}

// ---- Copies -----------------------------------------------------------------------------------------------------

TEST(CudaOnCpu, AsyncCopiesArriveWithTheWaitForTheirGroup) {
  alignas(16) const float source[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  launch(1, 1, 48, [&] {
    float* target = shared<float>();
    for (int i = 0; i < 12; ++i) target[i] = -1;
    ptx::cp_async_16(target, source, true);
    ptx::cp_async_commit();
    ptx::cp_async_16(target + 4, nullptr, false);
    ptx::cp_async_commit();
    ptx::cp_async_16(target + 8, source + 8, true);
    EXPECT_TRUE(std::isnan(target[0]));  // neither old nor new before the wait
    ptx::cp_async_wait<1>();
    EXPECT_EQ(target[3], 3);
    EXPECT_TRUE(std::isnan(target[4]));
    ptx::cp_async_wait<0>();
    EXPECT_EQ(target[4], 0);
    EXPECT_TRUE(std::isnan(target[8]));  // not committed yet
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    EXPECT_EQ(target[11], 11);
    ptx::cp_async_commit();  // an empty group may stay
  });
  EXPECT_TRUE(has(complaint(1, 1, 48, [&] { ptx::cp_async_16(shared<float>(), source, true); }), "waited for"));
  EXPECT_TRUE(has(complaint(1, 1, 48, [&] { ptx::cp_async_16(shared<float>(), source + 1, true); }), "aligned"));
  EXPECT_TRUE(has(complaint(1, 1, 48, [&] { ptx::cp_async_16(shared<float>() + 1, source, true); }), "aligned"));
  EXPECT_TRUE(has(complaint(1, 1, 40, [&] { ptx::cp_async_16(shared<float>() + 8, source, true); }), "outside"));
}

TEST(CudaOnCpu, FreshSharedMemoryIsNan) {
  launch(3, 1, 64, [] {
    for (int i = 0; i < 16; ++i) EXPECT_TRUE(std::isnan(shared<float>()[i]));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(shared<float>()) % 1024, 0u);
    shared<float>()[3] = 1;
  });
}

// Recurses, with data in every frame.
int deep(int depth) {
  volatile char frame[512];
  frame[depth % 512] = 1;
  return depth == 0 ? 0 : deep(depth - 1) + frame[depth % 512];
}

TEST(CudaOnCpuDeathTest, AStackThatOverflowsStopsTheProgram) {
  launch(1, 64, 0, [] { EXPECT_EQ(deep(50), 50); });
  EXPECT_DEATH(launch(1, 64, 0, [] { EXPECT_EQ(deep(1000), 1000); }), "");
}

#ifdef __SANITIZE_ADDRESS__
TEST(CudaOnCpuDeathTest, AddressSanitizerSeesTheEndsOfMemory) {
  EXPECT_DEATH(launch(1, 32, 100, [] { shared<char>()[threadIdx.x + 69] = 1; }), "heap-buffer-overflow");
  char* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, 100), cudaSuccess);
  EXPECT_DEATH(launch(1, 101, 0, [&] { data[threadIdx.x] = 1; }), "use-after-poison");
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_DEATH(launch(1, 2, 0,
                      [] {
                        [[maybe_unused]] volatile char local[4];
                        __syncthreads();
                        local[threadIdx.x + 3] = 1;
                      }),
               "stack-buffer-overflow|out of bounds");
}
#endif

// ---- The runtime ------------------------------------------------------------------------------------------------

TEST(CudaOnCpu, DeviceMemoryIsExactAndLimited) {
  cuda_on_cpu::device_memory.free = 1000;
  float *a = nullptr, *b = nullptr;
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMalloc(&a, 900), cudaSuccess);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 256, 0u);
  EXPECT_EQ(cudaMalloc(&b, 101), cudaErrorMemoryAllocation);
  EXPECT_STREQ(cudaGetErrorName(cudaGetLastError()), "cudaErrorMemoryAllocation");
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, 100u);
  EXPECT_EQ(total, 1000u);

  std::vector<float> host(256, 2.0f), fresh(225);
  EXPECT_EQ(cudaMemcpy(fresh.data(), a, 900, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_TRUE(std::isnan(fresh[0]) && std::isnan(fresh[224]));
  EXPECT_EQ(cudaMemcpy(a, host.data(), 900, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(a + 1, 0, 8), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), a, 900, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(host[0] + host[1] + host[2] + host[3], 4);
  EXPECT_EQ(cudaMemset2DAsync(a, 20, 0, 4, 3), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), a, 900, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(host[0] + host[5] + host[10] + host[15], 2);
  EXPECT_EQ(cudaMemcpy2DAsync(host.data(), 8, a + 4, 20, 8, 2, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(std::vector<float>(host.begin(), host.begin() + 4), (std::vector<float>{2, 0, 2, 0}));

  EXPECT_EQ(cudaMemcpy(host.data(), a, 900, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(a, host.data(), 901, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(host.data(), 0, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(host.data()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(a), cudaSuccess);
  EXPECT_EQ(cuda_on_cpu::device_memory.free, 1000u);
  cuda_on_cpu::device_memory.free = std::size_t{1} << 30;
  cudaGetLastError();
}

// In small pages and in huge pages.
TEST(CudaOnCpuDeathTest, TheHostMayNotTouchDeviceMemory) {
  for (const std::size_t count : {64, 100, 1 << 20}) {
    float* data = nullptr;
    ASSERT_EQ(cudaMalloc(&data, count * sizeof(float)), cudaSuccess);
    launch(1, 32, 0, [&] { data[threadIdx.x] = data[count - 1 - threadIdx.x] = 1; });
    EXPECT_DEATH(data[count - 1] = 2, "the host touched device memory outside of kernels");
    EXPECT_DEATH(std::exit(data[0] == 1), "the host touched device memory outside of kernels");
    EXPECT_THROW(launch(1, 1, 0, [] { throw std::logic_error("stops"); }), std::logic_error);
    EXPECT_DEATH(data[0] = 2, "the host touched device memory outside of kernels");
    EXPECT_EQ(cudaFree(data), cudaSuccess);
  }
}

TEST(CudaOnCpuDeathTest, DeviceMemoryEndsAtAPageThatNobodyMayTouch) {
  char* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, 512), cudaSuccess);
  EXPECT_DEATH(launch(1, 2, 0, [&] { data[511 + threadIdx.x] = 1; }), "beyond the end of a block of device memory");
  EXPECT_EQ(cudaFree(data), cudaSuccess);
}

TEST(CudaOnCpu, OperationsFailOnRequestAndStayFailed) {
  float *data = nullptr, number = 0;
  ASSERT_EQ(cudaMalloc(&data, 4), cudaSuccess);
  cuda_on_cpu::operations_before_failure = 2;
  EXPECT_EQ(cudaMemsetAsync(data, 0, 4), cudaSuccess);
  EXPECT_EQ(launch(1, 1, 0, [] {}), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(&number, data, 4, cudaMemcpyDeviceToHost), cudaErrorIllegalAddress);
  EXPECT_EQ(launch(1, 1, 0, [] { FAIL(); }), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaErrorIllegalAddress);
  cuda_on_cpu::operations_before_failure = -1;
  EXPECT_EQ(launch(1, 1, 0, [] {}), cudaSuccess);
  EXPECT_EQ(cudaFree(data), cudaSuccess);
  cudaGetLastError();
}

TEST(CudaOnCpu, StreamsEventsAndProperties) {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr, stop = nullptr;
  float milliseconds = -1;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaEventCreate(&start), cudaSuccess);
  EXPECT_EQ(cudaEventCreateWithFlags(&stop, cudaEventDefault), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(start, stream), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, stop), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(stop, stream), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, stop), cudaSuccess);
  EXPECT_GE(milliseconds, 0);
  cudaEventDestroy(start), cudaEventDestroy(stop), cudaStreamDestroy(stream);
  cudaDeviceProp properties;
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_STREQ(properties.name, "CUDA on CPU");
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 1), cudaErrorInvalidDevice);
  float* pinned = nullptr;
  EXPECT_EQ(cudaHostAlloc(&pinned, 64, cudaHostAllocDefault), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  cudaGetLastError();
}

// ---- cuBLASLt ---------------------------------------------------------------------------------------------------

// A matrix stored by columns, with a gap after every column that must stay untouched.
struct Columns {
  cudaDataType type;
  std::size_t rows, cols, stride;
  std::vector<std::uint32_t> storage;  // room for either type
  cublasLtMatrixLayout_t layout = nullptr;

  Columns(cudaDataType type, std::size_t rows, std::size_t cols, unsigned seed)
      : type(type), rows(rows), cols(cols), stride(rows + 3), storage(stride * cols) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < stride * cols; ++i) cuda_on_cpu::put_number(data(), type, i, normal(random));
    cublasLtMatrixLayoutCreate(&layout, type, rows, cols, static_cast<std::int64_t>(stride));
  }
  Columns(const Columns&) = delete;
  ~Columns() { cublasLtMatrixLayoutDestroy(layout); }
  void* data() { return storage.data(); }
  float operator()(std::size_t i, std::size_t j) const {
    return cuda_on_cpu::number_at(storage.data(), type, i + j * stride);
  }
};

struct Multiplication {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t op = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;

  Multiplication(bool ta, bool tb) {
    const cublasOperation_t a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof(a));
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof(b));
    cublasLtMatmulPreferenceCreate(&preference);
    const std::size_t workspace = 1 << 20;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace));
  }
  Multiplication(const Multiplication&) = delete;
  ~Multiplication() {
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(op);
    cublasLtDestroy(handle);
  }
  void add(Columns& bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const void* data = bias.data();
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &data, sizeof(data));
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias.type, sizeof(bias.type));
  }
  cublasStatus_t operator()(float alpha, Columns& a, Columns& b, float beta, Columns& c, Columns& d) {
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, op, a.layout, b.layout, c.layout, d.layout,
                                                                 preference, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    EXPECT_EQ(count, 1);
    return cublasLtMatmul(handle, op, &alpha, a.data(), a.layout, b.data(), b.layout, &beta,
                          beta == 0 ? nullptr : c.data(), c.layout, d.data(), d.layout, &found.algo, nullptr, 0,
                          nullptr);
  }
};

TEST(CudaOnCpu, CublasLtMultipliesInEveryLayout) {
  const std::size_t m = 45, n = 9, k = 33;
  for (const auto& [ta, tb] : {std::pair(true, false), {false, false}, {false, true}}) {
    for (const auto& [in, out] :
         {std::pair(CUDA_R_16BF, CUDA_R_16BF), {CUDA_R_16BF, CUDA_R_32F}, {CUDA_R_32F, CUDA_R_32F}}) {
      for (const float beta : {0.0f, 1.0f, -0.5f}) {
        for (const bool with_bias : {false, true}) {
          Columns a(in, ta ? k : m, ta ? m : k, 1), b(in, tb ? n : k, tb ? k : n, 2);
          Columns c(out, m, n, 3), d(out, m, n, 4), bias(out, m, 1, 5);
          const Columns before(out, m, n, 4);
          Multiplication multiply(ta, tb);
          if (with_bias) multiply.add(bias);
          ASSERT_EQ(multiply(2, a, b, beta, c, d), CUBLAS_STATUS_SUCCESS);
          for (std::size_t j = 0; j < n; ++j) {
            for (std::size_t i = 0; i < m; ++i) {
              double sum = 0;
              for (std::size_t l = 0; l < k; ++l)
                sum += double{ta ? a(l, i) : a(i, l)} * double{tb ? b(j, l) : b(l, j)};
              const double expected = 2 * sum + (beta != 0 ? beta * c(i, j) : 0) + (with_bias ? bias(i, 0) : 0);
              const double tolerance = out == CUDA_R_32F ? 1e-4 : 1e-4 + std::abs(expected) / 256;
              EXPECT_NEAR(d(i, j), expected, tolerance);
            }
            for (std::size_t i = m; i < m + 3 && j + 1 < n; ++i) EXPECT_EQ(d(i, j), before(i, j));
          }
        }
      }
    }
  }
}

TEST(CudaOnCpu, CublasLtBitsDoNotDependOnTheShape) {
  Columns a(CUDA_R_32F, 70, 50, 1), b(CUDA_R_32F, 50, 20, 2), whole(CUDA_R_32F, 70, 20, 3);
  ASSERT_EQ(Multiplication(false, false)(1, a, b, 0, whole, whole), CUBLAS_STATUS_SUCCESS);
  for (std::size_t i : {0, 31, 32, 69}) {
    for (std::size_t j : {0, 7, 19}) {
      Columns row(CUDA_R_32F, 1, 50, 4), column(CUDA_R_32F, 50, 1, 5), one(CUDA_R_32F, 1, 1, 6);
      for (std::size_t k = 0; k < 50; ++k) {
        cuda_on_cpu::put_number(row.data(), CUDA_R_32F, k * row.stride, a(i, k));
        cuda_on_cpu::put_number(column.data(), CUDA_R_32F, k, b(k, j));
      }
      ASSERT_EQ(Multiplication(false, false)(1, row, column, 0, one, one), CUBLAS_STATUS_SUCCESS);
      EXPECT_EQ(one(0, 0), whole(i, j));
    }
  }
}

TEST(CudaOnCpu, CublasLtRejectsAlgorithmsAndReordersSumsOnRequest) {
  Columns a(CUDA_R_32F, 8, 50, 1), b(CUDA_R_32F, 50, 6, 2), up(CUDA_R_32F, 8, 6, 3), down(CUDA_R_32F, 8, 6, 3);
  Multiplication multiply(false, false);
  cublasLtMatmulHeuristicResult_t check;
  const cublasLtMatmulAlgo_t algorithm{};
  auto checked = [&] {
    return cublasLtMatmulAlgoCheck(multiply.handle, multiply.op, a.layout, b.layout, up.layout, up.layout, &algorithm,
                                   &check);
  };
  EXPECT_EQ(checked(), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::rejects = [](const cuda_on_cpu::Product& p) { return p.n == 6; };
  EXPECT_EQ(checked(), CUBLAS_STATUS_NOT_SUPPORTED);
  cuda_on_cpu::rejects = nullptr;
  EXPECT_EQ(multiply(1, a, b, 0, up, up), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::descends = [](const cuda_on_cpu::Product& p) { return p.k == 50; };
  EXPECT_EQ(multiply(1, a, b, 0, down, down), CUBLAS_STATUS_SUCCESS);
  cuda_on_cpu::descends = nullptr;
  EXPECT_NE(up.storage, down.storage);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_NEAR(up(i, 3), down(i, 3), 1e-4);
}

TEST(CudaOnCpu, CublasLtRefusesWhatDoesNotFit) {
  Columns a(CUDA_R_32F, 8, 4, 1), b(CUDA_R_32F, 4, 6, 2), d(CUDA_R_32F, 8, 6, 3);
  Columns narrow(CUDA_R_16BF, 8, 6, 3), narrow_a(CUDA_R_16BF, 8, 4, 1);
  Multiplication multiply(false, false);
  EXPECT_EQ(multiply(1, a, b, 0, d, d), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(multiply(1, b, a, 0, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(1, a, b, 0, d, b), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(1, a, b, 0, narrow, narrow), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(multiply(1, narrow_a, b, 0, d, d), CUBLAS_STATUS_NOT_SUPPORTED);
  d.layout->stride = 7;
  EXPECT_EQ(multiply(1, a, b, 0, d, d), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_STREQ(cublasGetStatusName(CUBLAS_STATUS_INVALID_VALUE), "CUBLAS_STATUS_INVALID_VALUE");
}

}  // namespace
}  // namespace streambp
