// Devices. Every operation takes a device first and does two things with it:
//
//   auto op = dev.operation("norm", flops, bytes);                     // account the work (and its time)
//   if constexpr (Device::computes) compute_norm(dev, ...);            // do the work: overloads for Cpu and Cuda
//
// Cpu and Cuda compute. Plan only accounts: run on it, the same algorithm yields the exact peak memory and the exact
// work of a model at any length, in milliseconds and without data.
#pragma once

#include <algorithm>
#include <chrono>
#include <string_view>
#include <vector>

#include "kernels/base/arena.cuh"
#include "kernels/base/matrix.cuh"

namespace streambp {

// Below this many elements, one thread finishes before others wake up.
constexpr Index kWorthThreads = Index{1} << 14;

// The calls of an operation, their cost and their time.
struct Work {
  std::string_view name;
  Index calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};

// What all devices share: an arena with scopes, and the account of work.
class DeviceBase {
 public:
  DeviceBase(std::size_t capacity, std::byte* block, Index tile) : arena(capacity, block), tile(tile) {}

  Arena arena;
  const Index tile;  // rows over which weight gradients are summed at a time; chunks are multiples of it

  // Releases what was allocated at the bottom of the arena since this call, at the end of the returned object's scope.
  auto scope() {
    struct Scope {
      Arena& arena;
      Arena::Mark mark;
      ~Scope() { arena.release(mark); }
    };
    return Scope{arena, arena.mark()};
  }

  // Matrix products of a GPU that could not use the algorithm of one tile: bits may depend on the chunk.
  std::vector<std::string> algorithm_changes;

  const std::vector<Work>& work() const { return work_; }
  void reset_work() { work_.clear(); }
  double flops() const {
    double sum = 0;
    for (const Work& w : work_) sum += w.flops;
    return sum;
  }

 protected:
  Work& account(std::string_view name, double flops, double bytes, Index calls = 1) {
    auto found = std::find_if(work_.begin(), work_.end(), [&](const Work& w) { return w.name == name; });
    Work& w = found != work_.end() ? *found : work_.emplace_back(Work{name});
    w.calls += calls;
    w.flops += flops;
    w.bytes += bytes;
    return w;
  }

 private:
  std::vector<Work> work_;
};

// A matrix in the device's memory; its contents are undefined.
template <class T>
Matrix<T> allocate(DeviceBase& dev, Index rows, Index cols, Kind kind, End end = End::bottom) {
  const auto bytes = static_cast<std::size_t>(rows * cols) * sizeof(T);
  return {static_cast<T*>(dev.arena.allocate(bytes, kind, end)), rows, cols};
}

// The same with rows that start at multiples of 128 bytes, whatever their width. Tensor cores want rows that start at
// multiples of 16 bytes, and logits as wide as GPT-2's vocabulary of 50257 would not: their rows are 50304 numbers apart
// in bfloat16. No operation sees the numbers between its rows, so no bit of a result changes.
template <class T>
constexpr Index aligned_width(Index cols) {
  return round_up(cols, 128 / static_cast<Index>(sizeof(T)));
}
template <class T>
Matrix<T> allocate_aligned(DeviceBase& dev, Index rows, Index cols, Kind kind) {
  return allocate<T>(dev, rows, aligned_width<T>(cols), kind).columns(0, cols);
}

// Accounts memory and work; computes nothing.
class Plan : public DeviceBase {
 public:
  static constexpr bool computes = false;
  static constexpr std::size_t kUnlimited = std::size_t{1} << 62;
  explicit Plan(std::size_t capacity = kUnlimited) : DeviceBase(capacity, nullptr, kTile) {}

  template <class T>
  void upload(Matrix<T>, const T*) {}
  template <class T>
  void download(T*, Matrix<T>) {}
  template <class T>
  void copy(Matrix<T>, Matrix<T>) {}
  void synchronize() {}

  auto operation(const char* name, double flops, double bytes) {
    struct Counted {
      ~Counted() {}
    };
    account(name, flops, bytes);
    return Counted{};
  }
};

// Computes on the host.
class Cpu : private HostBlock, public DeviceBase {
 public:
  static constexpr bool computes = true;
  explicit Cpu(std::size_t capacity)
      : HostBlock(Arena::round_up(capacity)), DeviceBase(capacity, HostBlock::data, kTile) {}

  // Copies between host and device memory; for contiguous matrices.
  template <class T>
  void upload(Matrix<T> to, const T* from) {
    std::copy_n(from, to.size(), to.data);
  }
  template <class T>
  void download(T* to, Matrix<T> from) {
    if (from.contiguous()) return static_cast<void>(std::copy_n(from.data, from.size(), to));
    for (Index i = 0; i < from.rows; ++i) std::copy_n(from.row(i), from.cols, to + i * from.cols);
  }
  template <class T>
  void copy(Matrix<T> to, Matrix<T> from) {
#pragma omp parallel for schedule(static) if (from.size() > kWorthThreads)
    for (Index block = 0; block < ceil_div(from.size(), 1 << 16); ++block) {
      std::copy_n(from.data + (block << 16), least(1 << 16, from.size() - (block << 16)), to.data + (block << 16));
    }
  }
  void synchronize() {}

  // Accounts the work, and the time until the end of the returned object's scope.
  auto operation(const char* name, double flops, double bytes) {
    using Clock = std::chrono::steady_clock;
    struct Timer {
      Cpu& dev;
      const char* name;
      double flops, bytes;
      Clock::time_point start;
      ~Timer() {
        dev.account(name, flops, bytes).seconds += std::chrono::duration<double>(Clock::now() - start).count();
      }
    };
    return Timer{*this, name, flops, bytes, Clock::now()};
  }
};

// Copies a matrix to the host.
template <class Device, class T>
std::vector<T> to_host(Device& dev, Matrix<T> m) {
  std::vector<T> values(static_cast<std::size_t>(m.size()));
  dev.download(values.data(), m);
  return values;
}

}  // namespace streambp

#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif
