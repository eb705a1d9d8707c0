// CUDA graphs of repeated work: the same operations on the same memory, such as the next token of eight sequences. A graph
// is one launch.
#pragma once

#include "kernels/base/device.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif

namespace streambp {

template <class Device>
class GraphCache {
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
class GraphCache<Cuda> {
 public:
  GraphCache() = default;
  GraphCache(const GraphCache&) = delete;
  ~GraphCache() { forget(); }

  template <class F>
  void run(Cuda& dev, Index key, F&& work) {
    if (dev.profile || refused_) return work();  // a profile times every operation
    if (entries_.size() == kMostKeys && !entries_.contains(key)) forget();
    Entry& e = entries_[key];
    if (++e.runs <= kRunsBeforeGraph) return work();
    const bool is_new = !e.graph;
    if (is_new) e.graph = record(dev, work);
    if (!e.graph) {
      refused_ = true;
      return work();
    }
    ++dev.launches;
    STREAMBP_CHECK(cudaGraphLaunch(e.graph, dev.stream));
    if (is_new) return;
    const OnlyAccounts only_accounts(dev);  // while the GPU works
    work();
  }
  void forget() {
    for (const auto& [key, e] : entries_)
      if (e.graph) cudaGraphExecDestroy(e.graph);
    entries_.clear();
  }

 private:
  // Recording costs time, and the driver must have loaded the kernels before. Graphs take memory.
  static constexpr int kRunsBeforeGraph = 3;
  static constexpr std::size_t kMostKeys = 16;

  struct Entry {
    int runs = 0;
    cudaGraphExec_t graph = nullptr;
  };

  struct OnlyAccounts {
    Cuda& dev;
    explicit OnlyAccounts(Cuda& dev) : dev(dev) { dev.only_accounts = true; }
    ~OnlyAccounts() { dev.only_accounts = false; }
  };

  // Accounts the work and records its launches. Null if the driver refuses.
  template <class F>
  static cudaGraphExec_t record(Cuda& dev, F&& work) {
    struct Capture {
      Cuda& dev;
      Index launches;
      cudaGraph_t graph = nullptr;
      bool ended = false;

      cudaError_t end() {
        ended = true;
        dev.launches = launches;
        return cudaStreamEndCapture(dev.stream, &graph);
      }
      ~Capture() {
        if (!ended) end();
        if (graph) cudaGraphDestroy(graph);
        cudaGetLastError();  // clears what was refused
      }
    };
    if (cudaStreamBeginCapture(dev.stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    Capture capture{dev, dev.launches};
    try {
      work();
    } catch (const Error&) {
      return nullptr;  // launched singly, it will report what is wrong
    }
    cudaGraphExec_t graph = nullptr;
    if (capture.end() != cudaSuccess || cudaGraphInstantiateWithFlags(&graph, capture.graph, 0) != cudaSuccess)
      return nullptr;
    return graph;
  }

  std::map<Index, Entry> entries_;
  bool refused_ = std::getenv("STREAMBP_NO_GRAPHS") != nullptr;  // by the user, to compare, or later by the driver
};

#endif

}  // namespace streambp
