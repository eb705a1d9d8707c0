// The GPU: one block of its memory, one stream of work, and how kernels are launched.
//
// Kernels are plain functions, launched by launch(dev, kernel, grid, threads, shared bytes, arguments...), so that their
// sources also compile with g++ under a stand-in for cuda_runtime.h in which every thread is a fiber (tests/cuda_on_cpu).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <map>
#include <tuple>

#include "kernels/base/device.cuh"

namespace streambp {

namespace cuda {

inline void check(cudaError_t error, const char* call, const char* file, int line) {
  require(error == cudaSuccess, file, ":", line, ": ", call, ": ", cudaGetErrorString(error), " (",
          cudaGetErrorName(error), ")");
}
inline void check(cublasStatus_t status, const char* call, const char* file, int line) {
  require(status == CUBLAS_STATUS_SUCCESS, file, ":", line, ": ", call, ": ", cublasLtGetStatusString(status));
}
#define STREAMBP_CHECK(call) ::streambp::cuda::check(call, #call, __FILE__, __LINE__)

// Why no GPU can be used, or nothing if one can.
inline std::string unusable() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (count == 0) return "the driver lists no GPU";
  cudaDeviceProp properties;
  STREAMBP_CHECK(cudaGetDeviceProperties(&properties, 0));
  if (properties.major >= 8) return {};
  return std::string(properties.name) + " has compute capability " + std::to_string(properties.major) + "." +
         std::to_string(properties.minor) + ", and 8.0 is the least that can be used";
}

inline std::string name() {
  cudaDeviceProp properties;
  STREAMBP_CHECK(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}

// What a run may take. Kernels and libraries are loaded when they are first used, and want some of what is free.
inline std::size_t free_memory() {
  constexpr std::size_t reserve = std::size_t{384} << 20;
  std::size_t free = 0, total = 0;
  STREAMBP_CHECK(cudaMemGetInfo(&free, &total));
  return free > reserve ? free - reserve : 0;
}

// A block of the GPU's memory.
class Block {
 public:
  explicit Block(std::size_t bytes) {
    const std::string reason = unusable();
    require(reason.empty(), "no GPU can be used: ", reason, "; use --device cpu");
    require(bytes <= free_memory(), "this run needs ", bytes >> 20, " MiB of GPU memory and ", name(), " has ",
            free_memory() >> 20, " MiB free; use a smaller --chunk, --length or model");
    if (bytes > 0) STREAMBP_CHECK(cudaMalloc(reinterpret_cast<void**>(&data), bytes));
  }
  ~Block() { cudaFree(data); }
  Block(const Block&) = delete;

  std::byte* data = nullptr;
};

}  // namespace cuda

// Computes on the GPU.
class Cuda : private cuda::Block, public DeviceBase {
 public:
  static constexpr bool computes = true;
  explicit Cuda(std::size_t capacity, Index tile = kGpuTile)
      : Block(Arena::round_up(capacity)), DeviceBase(capacity, Block::data, tile) {
    require(tile % kTile == 0, "the tile of the GPU must be a multiple of ", kTile, " rows, not ", tile);
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    STREAMBP_CHECK(cublasLtCreate(&blas));
  }
  ~Cuda() {
    for (const Span& s : spans) cudaEventDestroy(s.start), cudaEventDestroy(s.stop);
    cublasLtDestroy(blas);
    cudaStreamDestroy(stream);
  }

  template <class T>
  void upload(Matrix<T> to, const T* from) {
    transfer(to.data, from, to, cudaMemcpyHostToDevice);
  }
  template <class T>
  void download(T* to, Matrix<T> from) {
    transfer(to, from.data, from, cudaMemcpyDeviceToHost);
  }
  template <class T>
  void copy(Matrix<T> to, Matrix<T> from) {
    const std::size_t bytes = static_cast<std::size_t>(from.size()) * sizeof(T);
    STREAMBP_CHECK(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  // Waits for the work that was launched and, when profiling, for its times.
  void synchronize() {
    STREAMBP_CHECK(cudaStreamSynchronize(stream));
    for (const Span& s : spans) {
      float milliseconds = 0;
      STREAMBP_CHECK(cudaEventElapsedTime(&milliseconds, s.start, s.stop));
      account(s.name, 0, 0, 0).seconds += milliseconds * 1e-3;
      STREAMBP_CHECK(cudaEventDestroy(s.start));
      STREAMBP_CHECK(cudaEventDestroy(s.stop));
    }
    spans.clear();
  }

  // Counts the work, which goes on while the host goes on; with `profile` also times it.
  auto operation(const char* name, double flops, double bytes) {
    account(name, flops, bytes);
    struct Timer {
      Cuda& dev;
      const char* name;
      cudaEvent_t start;
      ~Timer() {
        if (start) dev.spans.push_back({name, start, dev.record()});
      }
    };
    return Timer{*this, name, profile ? record() : nullptr};
  }

  cudaStream_t stream = nullptr;
  cublasLtHandle_t blas = nullptr;
  bool profile = false;
  std::map<std::array<Index, 15>, cublasLtMatmulAlgo_t> algorithms;  // of matrix products, chosen once for each shape

 private:
  struct Span {
    const char* name;
    cudaEvent_t start, stop;
  };

  cudaEvent_t record() {
    cudaEvent_t event = nullptr;
    if (cudaEventCreate(&event) != cudaSuccess || cudaEventRecord(event, stream) != cudaSuccess) return nullptr;
    return event;
  }

  template <class T>
  void transfer(T* to, const T* from, const Matrix<T>& m, cudaMemcpyKind kind) {
    require(m.contiguous(), "a matrix with gaps cannot be copied between host and GPU");
    STREAMBP_CHECK(cudaMemcpyAsync(to, from, static_cast<std::size_t>(m.size()) * sizeof(T), kind, stream));
    STREAMBP_CHECK(cudaStreamSynchronize(stream));
  }

  std::vector<Span> spans;
};

namespace cuda {

// Runs kernel(arguments...) on a grid of blocks, after the work launched before it.
template <class... Parameters, class... Arguments>
void launch(Cuda& dev, void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  std::tuple<Parameters...> values(arguments...);
#ifdef __CUDACC__
  if (shared > (48u << 10)) {
    STREAMBP_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        const auto function = reinterpret_cast<const void*>(kernel);
        STREAMBP_CHECK(cudaLaunchKernel(function, grid, dim3(threads), pointers, shared, dev.stream));
      },
      values);
#else
  static_cast<void>(dev);
  STREAMBP_CHECK(
      cuda_on_cpu::launch(grid, dim3(static_cast<unsigned>(threads)), shared, [&] { std::apply(kernel, values); }));
#endif
}

inline dim3 grid_of(Index x, Index y = 1) { return {static_cast<unsigned>(x), static_cast<unsigned>(y)}; }

// --- What kernels are written with ---

constexpr int kWarp = 32;

// The block's dynamic shared memory.
template <class T>
__device__ T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(1024) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
#else
  return reinterpret_cast<T*>(cuda_on_cpu::shared_memory());
#endif
}

// Every lane gets the sum (or maximum) of all 32, in the same bits: x + y is y + x.
template <class T>
__device__ T warp_sum(T x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
template <class T>
__device__ T warp_max(T x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

}  // namespace cuda
}  // namespace streambp
