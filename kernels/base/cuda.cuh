// The GPU: one piece of its memory, one stream of work, and the launch of kernels.
//
// Kernels are plain functions, started by launch(dev, kernel, grid, threads, shared bytes, arguments...) and not with
// <<< >>>. This lets g++ compile them too, with a cuda_runtime.h that runs every CUDA thread as a fiber
// (tests/cuda_on_cpu).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <map>
#include <tuple>

#include "kernels/base/cuda_far.cuh"
#include "kernels/base/device.cuh"
#include "kernels/base/gpus.cuh"

namespace streambp {

namespace cuda {

inline void check(cublasStatus_t status, const char* call, const char* file, int line) {
  require(status == CUBLAS_STATUS_SUCCESS, file, ":", line, ": ", call, ": ", cublasLtGetStatusString(status));
}

// For the counter with which thread blocks of a product take the next tile of the result. Partial sums do not fit.
constexpr std::size_t kCounterBytes = 256;

// A piece of the GPU's memory, and a few bytes for cuBLASLt.
class Block {
 public:
  explicit Block(std::size_t bytes) {
    const std::string reason = unusable();
    require(reason.empty(), "no GPU can be used: ", reason, "; use --device cpu");
    const MemoryOfGpu memory = memory_of_gpu();
    const std::size_t taken = memory.total - memory.free;
    require(bytes <= memory.free, "this run needs ", bytes >> 20, " MiB of GPU memory and ", name(), " has ",
            memory.free >> 20, " MiB free",
            taken > memory.total / 8 ? ", because " + std::to_string(taken >> 20) +
                                           " MiB are in use already (nvidia-smi lists the processes)"
                                     : "",
            "; use a smaller --chunk, --length or model");
    STREAMBP_CHECK(cudaMalloc(reinterpret_cast<void**>(&data), bytes + kCounterBytes));
    counter = data + bytes;
  }
  ~Block() { cudaFree(data); }
  Block(const Block&) = delete;

  std::byte *data = nullptr, *counter = nullptr;
};

}  // namespace cuda

// Computes on the GPU.
class Cuda : private cuda::Block, public DeviceBase {
 public:
  static constexpr bool computes = true;
  static constexpr DeviceKind kind = DeviceKind::cuda;
  explicit Cuda(const Capacity& capacity, Index tile = kGpuTile)
      : Block(Arena::round_up(capacity.near)), DeviceBase(capacity, Block::data, tile) {
    require(tile % kTile == 0, "the tile of the GPU must be a multiple of ", kTile, " rows, not ", tile);
    if (capacity.far > 0) far_block.emplace(capacity);
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    STREAMBP_CHECK(cublasLtCreate(&blas));
  }
  ~Cuda() {
    forget_spans();
    far_block.reset();
    cublasLtDestroy(blas);
    cudaStreamDestroy(stream);
  }

  template <class T>
  void upload(Matrix<T> to, const T* from) {
    transfer(to.data, to.stride, from, to.cols, to, cudaMemcpyHostToDevice);
  }
  template <class T>
  void download(T* to, Matrix<T> from) {
    transfer(to, from.cols, from.data, from.stride, from, cudaMemcpyDeviceToHost);
  }
  template <class T>
  void copy(Matrix<T> to, Matrix<T> from) {
    const std::size_t bytes = static_cast<std::size_t>(from.size()) * sizeof(T);
    STREAMBP_CHECK(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  // Copies between host and far memory, after all copies that the computation waits for.
  template <class T>
  void upload(FarMatrix<T> to, const T* from) {
    wait();
    if (!to.empty()) std::memcpy(far_block->at(to.offset), from, to.bytes());
  }
  template <class T>
  void download(T* to, FarMatrix<T> from) {
    wait();
    if (!from.empty()) std::memcpy(to, far_block->at(from.offset), from.bytes());
  }
  template <class T>
  PendingCopy put(FarMatrix<T> far, Matrix<T> near) {
    account(far, near);
    return far.empty() ? PendingCopy()
                       : far_block->put(far.offset, reinterpret_cast<const std::byte*>(near.data), far.bytes(), stream);
  }
  template <class T>
  PendingCopy get(Matrix<T> near, FarMatrix<T> far) {
    account(far, near);
    return far.empty() ? PendingCopy()
                       : far_block->get(reinterpret_cast<std::byte*>(near.data), far.offset, far.bytes(), stream);
  }
  // Waits for all launched work; with `profile`, reads its times.
  void synchronize() {
    wait();
    for (const Span& s : spans) {
      float milliseconds = 0;
      STREAMBP_CHECK(cudaEventElapsedTime(&milliseconds, s.start, s.stop));
      account(s.name, 0, 0, 0, 0).seconds += milliseconds * 1e-3;
    }
    forget_spans();
  }

  // Accounts the work, which runs asynchronously. With `profile`, two events time it.
  auto operation(const char* name, double flops, double bytes, double sent = 0) {
    account(name, flops, bytes, sent);
    struct Timer {
      cudaStream_t stream;
      cudaEvent_t stop;
      ~Timer() {
        if (stop) cudaEventRecord(stop, stream);  // synchronize() reports a failure
      }
    };
    return Timer{stream, profile ? start_span(name) : nullptr};
  }

  // Records that a product could not use its one-tile algorithm. Its bits may depend on the chunk, so `verify` fails.
  void report_algorithm_change(std::string what) { algorithm_changes.push_back(std::move(what)); }

  using Block::counter;
  cudaStream_t stream = nullptr;
  cublasLtHandle_t blas = nullptr;
  bool profile = false;
  bool only_accounts = false;           // operations launch nothing: a graph does their work (graph_cache.cuh)
  std::function<void()> while_waiting;  // called while the host waits; throws if another rank has failed
  std::map<std::array<Index, 15>, cublasLtMatmulAlgo_t> algorithms;  // of matrix products, chosen once per shape

 private:
  struct Span {
    const char* name;
    cudaEvent_t start, stop;
  };

  // Starts timing an operation. Returns the event that ends it.
  cudaEvent_t start_span(const char* name) {
    Span& s = spans.emplace_back(Span{name, nullptr, nullptr});
    STREAMBP_CHECK(cudaEventCreate(&s.start));
    STREAMBP_CHECK(cudaEventCreate(&s.stop));
    STREAMBP_CHECK(cudaEventRecord(s.start, stream));
    return s.stop;
  }
  void forget_spans() {
    for (const Span& s : spans) {
      if (s.start) cudaEventDestroy(s.start);
      if (s.stop) cudaEventDestroy(s.stop);
    }
    spans.clear();
  }

  template <class T>
  void transfer(T* to, Index to_stride, const T* from, Index from_stride, const Matrix<T>& m, cudaMemcpyKind kind) {
    if (while_waiting) wait();  // a copy from or to the host would wait inside the driver
    auto bytes = [](Index count) { return static_cast<std::size_t>(count) * sizeof(T); };
    if (m.contiguous()) {
      STREAMBP_CHECK(cudaMemcpyAsync(to, from, bytes(m.size()), kind, stream));
    } else {
      STREAMBP_CHECK(cudaMemcpy2DAsync(to, bytes(to_stride), from, bytes(from_stride), bytes(m.cols),
                                       static_cast<std::size_t>(m.rows), kind, stream));
    }
    wait();
  }

  void wait() {
    if (!while_waiting) return STREAMBP_CHECK(cudaStreamSynchronize(stream));
    cudaError_t state;
    do {
      state = cudaStreamQuery(stream);
      if (state == cudaErrorNotReady) cudaGetLastError();  // clears it: waiting is not an error
      while_waiting();
    } while (state == cudaErrorNotReady);
    STREAMBP_CHECK(state);
  }

  std::vector<Span> spans;
  std::optional<cuda::FarBlock> far_block;
};

namespace cuda {

// Runs kernel(arguments...) on a grid of thread blocks, after all work launched before it.
template <class... Parameters, class... Arguments>
void launch(Cuda& dev, void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || dev.only_accounts) return;
  ++dev.launches;
  std::tuple<Parameters...> values(arguments...);
  if (shared > (48u << 10)) {  // more than the default limit
    STREAMBP_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
#ifdef __CUDACC__
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {&value...};
        const auto function = reinterpret_cast<const void*>(kernel);
        STREAMBP_CHECK(cudaLaunchKernel(function, grid, dim3(threads), pointers, shared, dev.stream));
      },
      values);
#else
  STREAMBP_CHECK(
      cuda_on_cpu::launch(grid, dim3(static_cast<unsigned>(threads)), shared, [=] { std::apply(kernel, values); }));
#endif
}

inline dim3 grid_of(Index x, Index y = 1) { return {static_cast<unsigned>(x), static_cast<unsigned>(y)}; }

// --- Helpers for kernels ---

constexpr int kWarp = 32;

// The thread block's dynamic shared memory.
template <class T>
__device__ T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(1024) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
#else
  return reinterpret_cast<T*>(cuda_on_cpu::shared_memory());
#endif
}

// Every lane gets the sum (or maximum) of all 32 lanes, with the same bits: x + y == y + x. warp_sum can also sum
// `lanes` neighbours each, a power of two.
template <class T>
__device__ T warp_sum(T x, int lanes = kWarp) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
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
