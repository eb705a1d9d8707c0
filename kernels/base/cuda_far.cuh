// Far memory of the GPU: pinned host memory, with a stream for each direction. Events order the copies and the
// computation without blocking the host.
#pragma once

#include <memory>

#include "kernels/base/far.h"

namespace streambp::cuda {

// Orders the later work of one stream after the earlier work of another.
class Order {
 public:
  Order() { STREAMBP_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Order() { cudaEventDestroy(event_); }
  Order(const Order&) = delete;
  void put(cudaStream_t later, cudaStream_t earlier) {
    record(earlier);
    await(later);
  }
  void record(cudaStream_t earlier) { STREAMBP_CHECK(cudaEventRecord(event_, earlier)); }
  void await(cudaStream_t later) const { STREAMBP_CHECK(cudaStreamWaitEvent(later, event_, 0)); }

 private:
  cudaEvent_t event_ = nullptr;
};

class FarBlock {
 public:
  explicit FarBlock(std::size_t bytes) {
    require(bytes <= available_memory(), "this run needs ", bytes >> 20, " MiB of host memory as far memory, and only ",
            available_memory() >> 20, " MiB are free; use less --far-memory");
    const cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&data_), bytes, cudaHostAllocDefault);
    require(error == cudaSuccess, "cannot pin ", bytes >> 20,
            " MiB of host memory as far memory: ", cudaGetErrorString(error),
            "; use less --far-memory, or --keep near");
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&putting_, cudaStreamNonBlocking));
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&getting_, cudaStreamNonBlocking));
  }
  ~FarBlock() {
    for (cudaStream_t stream : {putting_, getting_}) {
      if (stream) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
    }
    cudaFreeHost(data_);
  }
  FarBlock(const FarBlock&) = delete;

  PendingCopy put(std::size_t offset, const void* near, std::size_t bytes, cudaStream_t compute) {
    order_.put(putting_, compute);
    return copy(data_ + offset, near, bytes, cudaMemcpyDeviceToHost, putting_, compute);
  }
  PendingCopy get(void* near, std::size_t offset, std::size_t bytes, cudaStream_t compute) {
    order_.put(getting_, compute);
    return copy(near, data_ + offset, bytes, cudaMemcpyHostToDevice, getting_, compute);
  }

  // For the host, once no copy is under way.
  std::byte* at(std::size_t offset) const { return data_ + offset; }

 private:
  PendingCopy copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                   cudaStream_t compute) {
    STREAMBP_CHECK(cudaMemcpyAsync(to, from, bytes, kind, stream));
    auto done = std::make_shared<Order>();
    done->record(stream);
    return PendingCopy([done, compute] { done->await(compute); });
  }

  std::byte* data_ = nullptr;
  cudaStream_t putting_ = nullptr, getting_ = nullptr;
  Order order_;
};

}  // namespace streambp::cuda
