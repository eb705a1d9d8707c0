// Streams and events. The host does the work of a stream at once; only NCCL's messages and copies from or to pinned memory
// travel beside it, in a thread of their stream: messages after a random delay, copies when something waits for them.
// So results that depend on a wait that was forgotten are seen to be wrong.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "emulated_gpu.h"

namespace cuda_on_cpu {

// When the work before an event is done.
class Moment {
 public:
  void come() {
    const std::lock_guard lock(mutex_);
    time_ = std::chrono::steady_clock::now();
    come_ = true;
    changed_.notify_all();
  }
  void wait() {
    if (hurry) hurry();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return come_; });
  }
  bool has_come() {
    const std::lock_guard lock(mutex_);
    return come_;
  }
  std::function<void()> hurry;  // makes it come
  std::chrono::steady_clock::time_point time() const { return time_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point time_{};
  bool come_ = false;
};

}  // namespace cuda_on_cpu

struct CUevent_st {
  std::shared_ptr<cuda_on_cpu::Moment> moment;  // null: not recorded yet
  std::size_t host_work = 0;                    // launched before it
};

struct CUstream_st {
  CUstream_st() = default;
  CUstream_st(const CUstream_st&) = delete;
  ~CUstream_st() {
    if (!worker_.joinable()) return;
    later(nullptr);
    hurry();
    worker_.join();
  }

  // Does `work` after the earlier work of this stream, beside the host: soon, or as late as possible.
  enum class When { soon, late };
  void later(std::function<void()> work, When when = When::soon) {
    const std::lock_guard lock(mutex_);
    if (!worker_.joinable()) worker_ = std::thread([this] { run(); });
    queue_.push_back({std::move(work), when});
    changed_.notify_all();
  }
  // Something waits for the work so far.
  void hurry() {
    const std::lock_guard lock(mutex_);
    hurried_ = finished_ + queue_.size();
    changed_.notify_all();
  }
  bool is_beside_host() {
    const std::lock_guard lock(mutex_);
    return worker_.joinable();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty();
  }
  void wait() {
    hurry();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }

  std::size_t host_work = 0;  // what its work comes after, by the events that it has waited for

 private:
  void run() {
    std::minstd_rand random(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 4));
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const auto [work, when] = queue_.front();
      if (!work) return;
      if (when == When::late) {
        changed_.wait(lock, [&] { return hurried_ > finished_; });
        lock.unlock();
      } else {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      }
      work();
      lock.lock();
      ++finished_;
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  struct Work {
    std::function<void()> work;
    When when;
  };
  std::deque<Work> queue_;                  // the first one is being done
  std::size_t finished_ = 0, hurried_ = 0;  // how much work is done, and how much is waited for
  std::thread worker_;
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new CUstream_st, cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream) stream->wait();
  return cuda_on_cpu::next_operation();
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream && !stream->idle() ? cuda_on_cpu::answer(cudaErrorNotReady) : cuda_on_cpu::next_operation();
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
  if (const cudaError_t error = cuda_on_cpu::next_operation(); error != cudaSuccess) return error;
  const auto moment = event->moment = std::make_shared<cuda_on_cpu::Moment>();
  event->host_work = stream && stream->is_beside_host() ? stream->host_work : cuda_on_cpu::host_work;
  if (stream && !stream->idle()) {
    stream->later([moment] { moment->come(); });
    moment->hurry = [stream, moment = std::weak_ptr(moment)] {
      if (const auto m = moment.lock(); m && !m->has_come()) stream->hurry();
    };
    return cudaSuccess;
  }
  return moment->come(), cudaSuccess;
}
// Graphs. Their work is done when they are launched, as one operation of the host.
struct CUgraph_st {
  cuda_on_cpu::Graph work;
};
struct CUgraphExec_st : CUgraph_st {};
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };

inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  if (cuda_on_cpu::recording) return cuda_on_cpu::answer(cudaErrorStreamCaptureUnsupported);
  return cuda_on_cpu::recording = new cuda_on_cpu::Graph, cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  const std::unique_ptr<cuda_on_cpu::Graph> work(std::exchange(cuda_on_cpu::recording, nullptr));
  if (!work || std::exchange(cuda_on_cpu::refused_to_record, false))
    return cuda_on_cpu::answer(cudaErrorStreamCaptureUnsupported);
  return *graph = new CUgraph_st{*work}, cudaSuccess;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* graph, cudaGraph_t from, unsigned long long) {
  return *graph = new CUgraphExec_st{*from}, cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  if (const cudaError_t error = cuda_on_cpu::next_operation(); error != cudaSuccess) return error;
  const std::size_t host_work = cuda_on_cpu::host_work;
  for (const auto& work : graph->work)
    if (const cudaError_t error = work(); error != cudaSuccess) return error;
  return cuda_on_cpu::host_work = host_work, cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete graph, cudaSuccess; }

// A stream without messages is as far as its host, so its host waits.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  if (!event->moment) return cudaSuccess;
  stream->host_work = std::max(stream->host_work, event->host_work);
  event->moment->wait();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->moment) event->moment->wait();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->moment || !end->moment) return cuda_on_cpu::answer(cudaErrorInvalidResourceHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(end->moment->time() - start->moment->time()).count();
  return cudaSuccess;
}
