// Devices. Every operation takes a device first and does two things with it:
//
//   auto op = dev.operation("matmul", flops, bytes);           // count the work (and, where it computes, time it)
//   if constexpr (Device::computes) run::matmul(dev, ...);     // do the work: one overload for Cpu, one for Cuda
//
// Cpu and Cuda compute. Plan only counts: run on it, the very same algorithm yields the exact peak memory and the exact
// work of a model at any length, in milliseconds and without touching data.
//
// Memory comes from an Arena: one block with a stack at each end, growing towards each other. Scopes give back what was
// allocated inside them, so no matrix is allocated from the system while a step runs.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/error.cuh"
#include "kernels/base/host_memory.cuh"
#include "kernels/base/matrix.cuh"

namespace streambp {

// What memory is used for; `streambp plan` prints the peak by these kinds.
enum class Kind { weights, gradients, optimizer, stream, saved, keys_values, chunk, logits, sums, count };
inline constexpr std::array<const char*, static_cast<int>(Kind::count)> kKindNames = {
    "weights",         "gradients",         "optimizer", "token stream",         "saved layer inputs",
    "keys and values", "chunk activations", "logits",    "float32 gradient sums"};
using Bytes = std::array<std::size_t, static_cast<int>(Kind::count)>;

enum class End { bottom, top };

// Work on fewer numbers than these is done before another thread has woken up.
constexpr Index kWorthThreads = Index{1} << 14;

// A block of the host's memory, whose pages come when first written.
class HostBlock {
 public:
  explicit HostBlock(std::size_t bytes) : bytes(bytes) {
    if (bytes == 0) return;
    require(bytes <= available_memory(), "this run needs ", bytes >> 20, " MiB and the machine has ",
            available_memory() >> 20, " MiB free; use a smaller --chunk, --length or model");
    void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(block != MAP_FAILED, "cannot reserve ", bytes, " bytes of memory: ", std::strerror(errno));
    madvise(block, bytes, MADV_HUGEPAGE);
    data = static_cast<std::byte*>(block);
  }
  ~HostBlock() {
    if (data) munmap(data, bytes);
  }
  HostBlock(const HostBlock&) = delete;

  const std::size_t bytes;
  std::byte* data = nullptr;
};

class Arena {
 public:
  static constexpr std::size_t kAlignment = 256;
  static std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // Tests set it to fill what is allocated with NaN, so that reading before writing shows.
  static inline void (*poison)(void* data, std::size_t bytes) = nullptr;

  // Called after every allocation and release: a timeline of memory listens here.
  std::function<void()> on_change;

  // Without a block, sizes are only counted.
  Arena(std::size_t capacity, std::byte* block) : block_(block), capacity_(round_up(capacity)) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes, Kind kind, End end) {
    bytes = round_up(bytes);
    require(used() + bytes <= capacity_, "out of memory: ", used(), " of ", capacity_, " bytes in use and ", bytes,
            " more wanted for ", kKindNames[static_cast<int>(kind)], "; use a smaller chunk, length or model");
    const std::size_t offset = end == End::bottom ? bottom_ : capacity_ - top_ - bytes;
    (end == End::bottom ? bottom_ : top_) += bytes;
    stack(end).push_back({bytes, kind});
    by_kind_[static_cast<int>(kind)] += bytes;
    if (used() > peak_) {
      peak_ = used();
      peak_by_kind_ = by_kind_;
    }
    if (poison && block_) poison(block_ + offset, bytes);
    if (on_change) on_change();
    return block_ ? block_ + offset : nullptr;
  }

  // Positions of the bottom stack; release gives back everything allocated there after the mark.
  using Mark = std::size_t;
  Mark mark() const { return bottom_stack_.size(); }
  void release(Mark mark) { pop(End::bottom, mark); }
  void release_top() { pop(End::top, 0); }

  std::size_t capacity() const { return capacity_; }
  std::size_t used() const { return bottom_ + top_; }
  std::size_t peak() const { return peak_; }
  const Bytes& by_kind() const { return by_kind_; }
  const Bytes& peak_by_kind() const { return peak_by_kind_; }
  void reset_peak() {
    peak_ = used();
    peak_by_kind_ = by_kind_;
  }

 private:
  struct Allocation {
    std::size_t bytes;
    Kind kind;
  };
  std::vector<Allocation>& stack(End end) { return end == End::bottom ? bottom_stack_ : top_stack_; }
  void pop(End end, std::size_t count) {
    if (stack(end).size() <= count) return;
    for (auto& s = stack(end); s.size() > count; s.pop_back()) {
      (end == End::bottom ? bottom_ : top_) -= s.back().bytes;
      by_kind_[static_cast<int>(s.back().kind)] -= s.back().bytes;
    }
    if (on_change) on_change();
  }

  std::byte* const block_;
  std::size_t capacity_, bottom_ = 0, top_ = 0, peak_ = 0;
  std::vector<Allocation> bottom_stack_, top_stack_;
  Bytes by_kind_{}, peak_by_kind_{};
};

// How often an operation ran, what it cost and how long it took.
struct Work {
  std::string_view name;
  Index calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};

// What all devices share: the arena, scopes, and the account of work.
class DeviceBase {
 public:
  DeviceBase(std::size_t capacity, std::byte* block, Index tile) : arena(capacity, block), tile(tile) {}

  Arena arena;
  const Index tile;  // what chunks must be multiples of: the rows whose weight gradients are added up at a time

  template <class T>
  Matrix<T> allocate(Index rows, Index cols, Kind kind, End end = End::bottom) {
    return {static_cast<T*>(arena.allocate(static_cast<std::size_t>(rows * cols) * sizeof(T), kind, end)), rows, cols};
  }

  // Everything allocated at the bottom while the returned object lives is given back when it dies.
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
  return dev.allocate<T>(rows, cols, kind, end);
}

// Counts, and does nothing else.
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

// Computes on the host's processors.
class Cpu : private HostBlock, public DeviceBase {
 public:
  static constexpr bool computes = true;
  explicit Cpu(std::size_t capacity)
      : HostBlock(Arena::round_up(capacity)), DeviceBase(capacity, HostBlock::data, kTile) {}

  // Between memory of the host and the device's; a matrix without gaps.
  template <class T>
  void upload(Matrix<T> to, const T* from) {
    std::copy_n(from, to.size(), to.data);
  }
  template <class T>
  void download(T* to, Matrix<T> from) {
    std::copy_n(from.data, from.size(), to);
  }
  template <class T>
  void copy(Matrix<T> to, Matrix<T> from) {
#pragma omp parallel for schedule(static) if (from.size() > kWorthThreads)
    for (Index block = 0; block < ceil_div(from.size(), 1 << 16); ++block) {
      std::copy_n(from.data + (block << 16), least(1 << 16, from.size() - (block << 16)), to.data + (block << 16));
    }
  }
  void synchronize() {}

  // The work is accounted, with its time, when the returned object dies.
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

// A copy of a matrix on the host.
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
