// CUDA on CPU: this folder's <cuda_runtime.h> lets g++ compile CUDA kernels as they are and run them on the host.
//
// Every CUDA thread is a fiber. It runs until it waits at a barrier or in an operation of its warp; then `schedule`
// picks the next fiber. This tests a kernel's indexing, synchronization and arithmetic without a GPU, under sanitizers,
// and in several orders of threads, which expose missing barriers. Memory that a kernel must not rely on (fresh shared
// or device memory, the target of an unfinished copy) holds 0xff bytes, which read as NaN. The host cannot access
// device memory. The emulation says nothing about speed or real hardware.
//
//   language.h         qualifiers, built-in types and variables
//   emulated_gpu.h     architecture, driver, errors, memory
//   multiprocessor.h   the scheduler of fibers, and launch
//   warp.h             shuffles, votes, inline assembly
//   streams.h          streams and events
//   nccl.h             messages between GPUs
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "streams.h"
#include "warp.h"

#define CUDA_ON_CPU 1
#define CUDART_VERSION 13000
#define __CUDA_ARCH_LIST__ 800, 900

// ---- The runtime API: calls have finished their work when they return, except NCCL's messages and pinned copies ----

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline constexpr unsigned cudaHostRegisterDefault = 0, cudaStreamDefault = 0, cudaStreamNonBlocking = 1,
                          cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
  int major, minor, multiProcessorCount, l2CacheSize, warpSize, maxThreadsPerBlock;
};
namespace cuda_on_cpu {

// A status of a library.
template <class Status>
struct Name {
  Status status;
  const char *name, *text;
};
template <class Status, std::size_t n>
const Name<Status>& find_name(const Name<Status> (&names)[n], Status status) {
  return *std::find_if(names, names + n - 1, [&](const auto& name) { return name.status == status; });
}
inline constexpr Name<cudaError_t> kErrorNames[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available"},
    {cudaErrorUnsupportedPtxVersion, "cudaErrorUnsupportedPtxVersion", "the PTX has an unsupported version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"}};

inline std::size_t rectangle(std::size_t pitch, std::size_t width, std::size_t height) {
  return height == 0 ? 0 : (height - 1) * pitch + width;
}

// A copy from or to pinned memory, beside the host. Until it is done, its target holds 0xff bytes.
template <class Copy>
cudaError_t copy_later(CUstream_st& stream, void* to, std::size_t bytes, Copy&& copy) {
  if (stream.host_work != host_work)
    throw std::logic_error("CUDA on CPU: a stream copies, but has not waited for the work launched before");
  {
    const DeviceMemory::Access access;
    std::memset(to, 0xff, bytes);
  }
  return stream.later(copy, CUstream_st::When::late), cudaSuccess;
}

}  // namespace cuda_on_cpu

inline const char* cudaGetErrorName(cudaError_t error) {
  return cuda_on_cpu::find_name(cuda_on_cpu::kErrorNames, error).name;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return cuda_on_cpu::find_name(cuda_on_cpu::kErrorNames, error).text;
}
inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }

inline cudaError_t cudaDriverGetVersion(int* version) { return *version = cuda_on_cpu::driver_version, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = cuda_on_cpu::driver_version > 0 ? cuda_on_cpu::gpu_count : 0;
  return cuda_on_cpu::answer(*count ? cudaSuccess : cudaErrorNoDevice);
}
inline cudaError_t cudaGetDevice(int* device) { return *device = cuda_on_cpu::current_gpu, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cuda_on_cpu::gpu_count) return cuda_on_cpu::answer(cudaErrorInvalidDevice);
  cuda_on_cpu::current_gpu = device;
  return cuda_on_cpu::answer(cuda_on_cpu::context_error);
}
inline cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0", 0xc0 + device);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cuda_on_cpu::next_operation(); }
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = cuda_on_cpu::device_memory.free;
  *total = cuda_on_cpu::device_memory.free + cuda_on_cpu::device_memory.used();
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= cuda_on_cpu::gpu_count) return cuda_on_cpu::answer(cudaErrorInvalidDevice);
  const std::size_t memory = cuda_on_cpu::device_memory.free + cuda_on_cpu::device_memory.used();
  const cuda_on_cpu::Gpu& gpu = device == 0 ? cuda_on_cpu::gpu : cuda_on_cpu::later_gpus;
  *properties = {"CUDA on CPU", memory, 48 << 10, gpu.shared_bytes, gpu.major, gpu.minor, 4, 1 << 20, warpSize, 1024};
  return cudaSuccess;
}
template <class Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute, int value) {
  const bool fits = value >= 0 && static_cast<std::size_t>(value) <= cuda_on_cpu::gpu.shared_bytes;
  return cuda_on_cpu::answer(fits ? cudaSuccess : cudaErrorInvalidValue);
}

struct cudaFuncAttributes {};
template <class Function>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Function*) {
  return cuda_on_cpu::answer(cuda_on_cpu::image_error);
}

template <class T>
cudaError_t cudaMalloc(T** data, std::size_t bytes) {
  *data = bytes == 0 ? nullptr : static_cast<T*>(cuda_on_cpu::device_memory.allocate(bytes));
  return cuda_on_cpu::answer(bytes == 0 || *data ? cudaSuccess : cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFree(void* data) {
  return cuda_on_cpu::answer(!data || cuda_on_cpu::device_memory.release(data) ? cudaSuccess : cudaErrorInvalidValue);
}
inline cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  return cuda_on_cpu::answer(cuda_on_cpu::pinned_memory.pin(data, bytes) ? cudaSuccess : cudaErrorMemoryAllocation);
}
inline cudaError_t cudaHostUnregister(void* data) {
  return cuda_on_cpu::answer(cuda_on_cpu::pinned_memory.unpin(data) ? cudaSuccess : cudaErrorInvalidValue);
}

inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream = nullptr) {
  if (width == 0 || height == 0) return cudaSuccess;
  const bool to_device = cuda_on_cpu::device_memory.holds(to, cuda_on_cpu::rectangle(to_pitch, width, height));
  const bool from_device = cuda_on_cpu::device_memory.holds(from, cuda_on_cpu::rectangle(from_pitch, width, height));
  const bool as_said = kind == cudaMemcpyDefault ||
                       (to_device == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
                        from_device == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice));
  if (!as_said || width > to_pitch || width > from_pitch) return cuda_on_cpu::answer(cudaErrorInvalidValue);
  const auto copy = [=] {
    const cuda_on_cpu::DeviceMemory::Access access;
    for (std::size_t i = 0; i < height; ++i)
      std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  };
  const void* const on_host = to_device ? from : to;
  const bool pinned = cuda_on_cpu::pinned_memory.holds(on_host);
  const std::size_t host_bytes = cuda_on_cpu::rectangle(to_device ? from_pitch : to_pitch, width, height);
  if (pinned && !cuda_on_cpu::pinned_memory.holds(on_host, host_bytes))  // two pieces that were pinned apart
    return cuda_on_cpu::answer(cudaErrorInvalidValue);
  if (stream && pinned) return cuda_on_cpu::copy_later(*stream, to, height == 1 ? width : 0, copy);
  if (const cudaError_t error = cuda_on_cpu::next_operation(); error != cudaSuccess) return error;
  copy();
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind);
}
inline cudaError_t cudaMemset2DAsync(void* data, std::size_t pitch, int value, std::size_t width, std::size_t height,
                                     cudaStream_t stream = nullptr) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (cuda_on_cpu::recording) {
    cuda_on_cpu::recording->push_back([=] { return cudaMemset2DAsync(data, pitch, value, width, height, stream); });
    return cudaSuccess;
  }
  if (width > pitch || !cuda_on_cpu::device_memory.holds(data, cuda_on_cpu::rectangle(pitch, width, height)))
    return cuda_on_cpu::answer(cudaErrorInvalidValue);
  if (const cudaError_t error = cuda_on_cpu::next_operation(); error != cudaSuccess) return error;
  const cuda_on_cpu::DeviceMemory::Access access;
  for (std::size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(data) + i * pitch, value, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream = nullptr) {
  return cudaMemset2DAsync(data, bytes, value, bytes, 1, stream);
}
