// Messages between GPUs, by NCCL. They travel on a second CUDA stream while the device computes; events order the two
// streams without blocking the host. NCCL is a build option; without it, a run has one GPU.
#pragma once

#include "kernels/base/cuda.cuh"
#include "parallel/connection.cuh"
#include "parallel/exchange.h"

#ifdef STREAMBP_NCCL
#include <nccl.h>

#include <exception>
#include <memory>
#include <thread>

namespace streambp {

namespace cuda {

inline void check(ncclResult_t result, const char* call, const char* file, int line) {
  require(result == ncclSuccess, file, ":", line, ": ", call, ": ", ncclGetErrorString(result),
          "; set NCCL_DEBUG=WARN for details");
}

class NcclTransport : public Transport {
 public:
  // `hosts` connects the hosts of the same ranks, which must all call this.
  NcclTransport(cudaStream_t stream, const Group& hosts) : stream_(stream), hosts_(hosts) {
    ncclUniqueId id{};
    if (hosts.rank == 0) STREAMBP_CHECK(ncclGetUniqueId(&id));
    const std::vector<char> mine(id.internal, id.internal + sizeof id.internal);
    std::memcpy(id.internal, gather_on_host(hosts, mine)[0].data(), sizeof id.internal);
    STREAMBP_CHECK(ncclCommInitRank(&communicator_, static_cast<int>(hosts.size), id, static_cast<int>(hosts.rank)));
    greet();
  }
  // After an error it does not wait for the other ranks.
  ~NcclTransport() {
    if (std::uncaught_exceptions() > 0) {
      ncclCommAbort(communicator_);
    } else {
      ncclCommFinalize(communicator_);
      ncclCommDestroy(communicator_);
    }
  }

  void attach(Cuda& dev) { computing_ = dev.stream; }
  void start(const Transfers& transfers) override {
    order_.put(stream_, computing_);
    STREAMBP_CHECK(ncclGroupStart());
    ncclResult_t result = ncclSuccess;
    for (const Transfer& t : transfers.sends) {
      if (result == ncclSuccess)
        result = ncclSend(t.data, t.bytes, ncclChar, static_cast<int>(t.peer), communicator_, stream_);
    }
    for (const Transfer& t : transfers.receives) {
      if (result == ncclSuccess)
        result = ncclRecv(t.data, t.bytes, ncclChar, static_cast<int>(t.peer), communicator_, stream_);
    }
    STREAMBP_CHECK(ncclGroupEnd());  // also after an error: the group must not stay open
    STREAMBP_CHECK(result);
  }
  void finish() override { order_.put(computing_, stream_); }
  void exchange_on_host(const Transfers& transfers) override { hosts_.transport->exchange_on_host(transfers); }

  void check_peers() {
    ncclResult_t result = ncclSuccess;
    STREAMBP_CHECK(ncclCommGetAsyncError(communicator_, &result));
    require(result == ncclSuccess, "the connection to another GPU has failed: ", ncclGetErrorString(result),
            "; set NCCL_DEBUG=WARN for details");
  }

 private:
  // Sends a byte to every other rank. NCCL allocates its buffers for a rank, hundreds of MiB, at the first message.
  void greet() {
    const Block block(static_cast<std::size_t>(hosts_.size));
    const Matrix<std::byte> bytes = {block.data, hosts_.size, 1};
    start(shared_rows(hosts_, bytes));
    STREAMBP_CHECK(cudaStreamSynchronize(stream_));
  }

  const cudaStream_t stream_;
  cudaStream_t computing_ = nullptr;
  const Group hosts_;
  Order order_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace cuda

template <>
class Connection<Cuda> {
 public:
  explicit Connection(const Ranks& hosts) : ranks(hosts) {
    if (hosts.all.size == 1) return;
    // Both groups use one stream: all ranks start their messages in the same order, so they cannot wait in a circle.
    STREAMBP_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    auto connect = [&](const Group& group) {
      return transports_.emplace_back(std::make_unique<cuda::NcclTransport>(stream_, group)).get();
    };
    ranks.all.transport = connect(hosts.all);
    if (hosts.sequence.size == hosts.all.size) {
      ranks.sequence.transport = ranks.all.transport;
    } else if (hosts.sequence.size > 1) {
      ranks.sequence.transport = connect(hosts.sequence);
    }
  }
  ~Connection() { close(); }
  Connection(const Connection&) = delete;

  void attach(Cuda& dev) {
    if (transports_.empty()) return;
    dev_ = &dev;
    for (const auto& transport : transports_) transport->attach(dev);
    dev.while_waiting = [this] {
      for (const auto& transport : transports_) transport->check_peers();
      std::this_thread::yield();
    };
  }
  void close() {
    if (Cuda* const dev = std::exchange(dev_, nullptr)) dev->while_waiting = nullptr;
    transports_.clear();
    if (stream_) cudaStreamDestroy(std::exchange(stream_, nullptr));
  }

  Ranks ranks;

 private:
  Cuda* dev_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<cuda::NcclTransport>> transports_;
};

}  // namespace streambp

#else

namespace streambp {

template <>
class Connection<Cuda> {
 public:
  explicit Connection(const Ranks& hosts) : ranks(hosts) {
    require(hosts.all.size == 1,
            "this program was built without NCCL, so a run has one GPU; install NVIDIA's libnccl-dev and "
            "build it again, or use --device cpu");
  }
  void attach(Cuda&) {}
  void close() {}
  Ranks ranks;
};

}  // namespace streambp

#endif
