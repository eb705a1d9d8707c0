// Work that a device does again and again: the same operations on the same memory, such as the next token of eight
// sequences. A GPU records it as a CUDA graph, which is one launch.
#pragma once

#include "kernels/base/device.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif

namespace streambp {

template <class Device>
class Repeats {
 public:
  // work() calls operations on `dev` and nothing else. For equal keys these are the same operations on the same memory.
  template <class F>
  void run(Device&, Index /*key*/, F&& work) {
    work();
  }
  void forget() {}
};

#ifdef STREAMBP_CUDA

template <>
class Repeats<Cuda> {
 public:
  Repeats() = default;
  Repeats(const Repeats&) = delete;
  ~Repeats() { forget(); }

  template <class F>
  void run(Cuda& dev, Index key, F&& work) {
    if (dev.profile) return work();  // which times every operation
    if (recorded_.size() == kMost && !recorded_.contains(key)) forget();
    Recorded& r = recorded_[key];
    if (++r.times < kTimes) return work();
    const bool is_new = !r.graph;
    if (is_new) r.graph = record(dev, work);
    ++dev.launches;
    STREAMBP_CHECK(cudaGraphLaunch(r.graph, dev.stream));
    if (is_new) return;
    dev.only_accounts = true;  // while the GPU works
    work();
    dev.only_accounts = false;
  }
  void forget() {
    for (const auto& [key, r] : recorded_)
      if (r.graph) cudaGraphExecDestroy(r.graph);
    recorded_.clear();
  }

 private:
  // Work is recorded when it comes for the kTimes-th time: recording costs about as much as launching it twice, and the
  // driver must have loaded its kernels before.
  static constexpr int kTimes = 4;
  static constexpr std::size_t kMost = 16;  // a graph of 600 launches takes some memory

  struct Recorded {
    int times = 0;
    cudaGraphExec_t graph = nullptr;
  };

  template <class F>
  static cudaGraphExec_t record(Cuda& dev, F&& work) {
    struct Capture {
      cudaStream_t stream;
      cudaGraph_t graph = nullptr;
      bool ended = false;
      ~Capture() {
        if (!ended) cudaStreamEndCapture(stream, &graph);  // work() has thrown
        if (graph) cudaGraphDestroy(graph);
      }
    } capture{dev.stream};
    STREAMBP_CHECK(cudaStreamBeginCapture(dev.stream, cudaStreamCaptureModeThreadLocal));
    const Index launches = dev.launches;
    work();
    dev.launches = launches;
    capture.ended = true;
    STREAMBP_CHECK(cudaStreamEndCapture(dev.stream, &capture.graph));
    cudaGraphExec_t graph = nullptr;
    STREAMBP_CHECK(cudaGraphInstantiateWithFlags(&graph, capture.graph, 0));
    return graph;
  }

  std::map<Index, Recorded> recorded_;
};

#endif

}  // namespace streambp
