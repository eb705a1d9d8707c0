// The emulation of CUDA itself finds errors of asynchronous copies and of device memory. That its operations are right is
// seen by the kernels' results.
#include "tests/emulation.cuh"

namespace streambp::emulation {
namespace {

// ---- Fragments --------------------------------------------------------------------------------------------------

TEST(CudaOnCpu, LdmatrixNeedsAlignedRowsInSharedMemory) {
  std::uint32_t outside[4];
  std::uint32_t r[4];
  EXPECT_PRED2(contains, complaint(1, 32, 1024, [&] { ptx::ldmatrix_x4(r, shared<char>() + 8); }), "aligned");
  EXPECT_PRED2(contains, complaint(1, 32, 1024, [&] { ptx::ldmatrix_x4(r, shared<char>() + 1024); }), "outside");
  EXPECT_PRED2(contains, complaint(1, 32, 1024, [&] { ptx::ldmatrix_x4_trans(r, outside); }), "ldmatrix_x4_trans");
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
  EXPECT_PRED2(contains, complaint(1, 1, 48, [&] { ptx::cp_async_16(shared<float>(), source, true); }), "waited for");
  EXPECT_PRED2(contains, complaint(1, 1, 48, [&] { ptx::cp_async_16(shared<float>(), source + 1, true); }), "aligned");
  EXPECT_PRED2(contains, complaint(1, 1, 48, [&] { ptx::cp_async_16(shared<float>() + 1, source, true); }), "aligned");
  EXPECT_PRED2(contains, complaint(1, 1, 40, [&] { ptx::cp_async_16(shared<float>() + 8, source, true); }), "outside");
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

TEST(CudaOnCpuDeathTest, StackOverflowStopsTheProgram) {
  launch(1, 64, 0, [] { EXPECT_EQ(deep(50), 50); });
  EXPECT_DEATH(launch(1, 64, 0, [] { EXPECT_EQ(deep(1000), 1000); }), "");
}

#ifdef __SANITIZE_ADDRESS__
TEST(CudaOnCpuDeathTest, AddressSanitizerDetectsOutOfBounds) {
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
  EXPECT_EQ(cuda_on_cpu::device_memory.free.load(), 1000u);
  cuda_on_cpu::device_memory.free = std::size_t{1} << 30;
  cudaGetLastError();
}

// In small pages and in huge pages.
TEST(CudaOnCpuDeathTest, HostAccessToDeviceMemoryFails) {
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

TEST(CudaOnCpuDeathTest, DeviceMemoryEndsAtAGuardPage) {
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

}  // namespace
}  // namespace streambp::emulation
