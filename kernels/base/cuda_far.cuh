// Far memory of the GPU: pinned host memory, with a stream for each direction. Events order the copies and the
// computation without blocking the host.
#pragma once

#include <sys/mman.h>

#include <functional>
#include <memory>

#include "kernels/base/device.cuh"
#include "kernels/base/gpus.cuh"

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

inline std::size_t pinned_piece = std::size_t{1} << 30;  // the tests have smaller ones

// Host memory, pinned piece by piece: a terabyte takes minutes, and the caller hears how far it is.
class PinnedMemory {
 public:
  PinnedMemory(std::size_t bytes, const std::function<void(double share)>& on_pinned) : bytes_(bytes) {
    void* const block =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(block != MAP_FAILED, "cannot allocate ", bytes >> 20,
            " MiB of host memory as far memory: ", std::strerror(errno), "; use less --far-memory");
    data = static_cast<std::byte*>(block);
    try {
      place_near(address(), data, bytes);
      use_huge_pages(data, bytes);
      pin(on_pinned);
    } catch (...) {
      release();
      throw;
    }
  }
  ~PinnedMemory() { release(); }
  PinnedMemory(const PinnedMemory&) = delete;

  std::byte* data = nullptr;

 private:
  // The system provides a page when it is first written, which takes most of the time; threads share it.
  static void touch(std::byte* piece, std::size_t bytes) {
    constexpr std::size_t page = 4096;
#pragma omp parallel for schedule(static, 512)
    for (std::size_t i = 0; i < bytes; i += page) piece[i] = std::byte{0};
  }
  void pin(const std::function<void(double share)>& on_pinned) {
    while (pinned_ < bytes_) {
      const std::size_t piece = std::min(pinned_piece, bytes_ - pinned_);
      touch(data + pinned_, piece);
      const cudaError_t error = cudaHostRegister(data + pinned_, piece, cudaHostRegisterDefault);
      require(error == cudaSuccess, "cannot pin ", bytes_ >> 20, " MiB of host memory as far memory, only ",
              pinned_ >> 20, " MiB: ", cudaGetErrorString(error), "; ", limit_of_pinned_memory(pinned_, bytes_),
              "use less --far-memory, or --keep near");
      pinned_ += piece;
      if (on_pinned) on_pinned(static_cast<double>(pinned_) / static_cast<double>(bytes_));
    }
  }
  void release() {
    for (std::size_t i = 0; i < pinned_; i += pinned_piece) cudaHostUnregister(data + i);
    munmap(data, bytes_);
  }

  const std::size_t bytes_;
  std::size_t pinned_ = 0;
};

class FarBlock {
 public:
  explicit FarBlock(const Capacity& capacity) : memory_(checked(capacity.far), capacity.on_reserved) {
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&putting_, cudaStreamNonBlocking));
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&getting_, cudaStreamNonBlocking));
  }
  ~FarBlock() {
    for (cudaStream_t stream : {putting_, getting_}) {
      if (stream) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
    }
  }
  FarBlock(const FarBlock&) = delete;

  PendingCopy put(std::size_t offset, const std::byte* near, std::size_t bytes, cudaStream_t compute) {
    order_.put(putting_, compute);
    for_each_piece(offset, bytes, [&](std::size_t done, std::size_t n) {
      STREAMBP_CHECK(cudaMemcpyAsync(at(offset + done), near + done, n, cudaMemcpyDeviceToHost, putting_));
    });
    return pending(putting_, compute);
  }
  PendingCopy get(std::byte* near, std::size_t offset, std::size_t bytes, cudaStream_t compute) {
    order_.put(getting_, compute);
    for_each_piece(offset, bytes, [&](std::size_t done, std::size_t n) {
      STREAMBP_CHECK(cudaMemcpyAsync(near + done, at(offset + done), n, cudaMemcpyHostToDevice, getting_));
    });
    return pending(getting_, compute);
  }

  // For the host, once no copy is under way.
  std::byte* at(std::size_t offset) const { return memory_.data + offset; }

 private:
  static std::size_t checked(std::size_t bytes) {
    require(bytes <= available_memory(), "this run needs ", bytes >> 20, " MiB of host memory as far memory, and only ",
            available_memory() >> 20, " MiB are free; use less --far-memory");
    return bytes;
  }

  // A copy may not cross pieces that were pinned apart.
  template <class F>
  static void for_each_piece(std::size_t offset, std::size_t bytes, F&& f) {
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t n = std::min(bytes - done, pinned_piece - (offset + done) % pinned_piece);
      f(done, n);
      done += n;
    }
  }

  static PendingCopy pending(cudaStream_t stream, cudaStream_t compute) {
    auto done = std::make_shared<Order>();
    done->record(stream);
    return PendingCopy([done, compute] { done->await(compute); });
  }

  const PinnedMemory memory_;
  cudaStream_t putting_ = nullptr, getting_ = nullptr;
  Order order_;
};

}  // namespace streambp::cuda
