// Devices. Every operation takes a device first and does two things with it:
//
//   auto op = dev.operation("norm", flops, bytes);                     // account the work (and its time)
//   if constexpr (Device::computes) compute_norm(dev, ...);            // do the work: overloads for Cpu and Cuda
//
// Cpu and Cuda compute. Plan only accounts: running the same algorithm on Plan gives the exact peak memory and FLOPs of
// a model at any length, in milliseconds and without data.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/arena.h"
#include "kernels/base/far.h"
#include "kernels/base/far_file.h"
#include "kernels/base/matrix.cuh"

namespace streambp {

enum class DeviceKind { cpu, cuda };

// Below this many elements, starting threads costs more than it saves.
constexpr Index kWorthThreads = Index{1} << 14;

// Seconds since it was created.
class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Number of calls, cost and time of an operation.
struct Work {
  std::string_view name;
  Index calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
  double sent = 0;  // bytes sent to other ranks
};

// Of all operations with names that start with this.
inline double total_of(std::string_view start, double Work::*field, const std::vector<Work>& work) {
  double sum = 0;
  for (const Work& w : work)
    if (w.name.starts_with(start)) sum += w.*field;
  return sum;
}

// Bytes of a device's memory and of its far memory.
struct Capacity {
  std::size_t near = 0, far = 0;
  fs::path directory = {};  // of the CPU's far memory; empty: the temporary directory

  std::function<void(double share)> on_reserved = {};  // called while far memory is reserved, which can take minutes

  Capacity(std::size_t near, std::size_t far = 0) : near(near), far(far) {}
};

// A cell of a step: a pass through one layer (of the model's n; n is the head) for some rows of the stream.
struct Cell {
  const char* pass;
  Index layer;
  Rows rows;
};

// What all devices share: the arenas with their scopes, and the accounting of work.
class DeviceBase {
 public:
  DeviceBase(const Capacity& capacity, std::byte* block, Index tile)
      : arena(capacity.near, block), far(capacity.far, nullptr), tile(tile) {}

  Arena arena, far;
  const Index tile;  // rows over which weight gradients are summed at a time; chunks are multiples of it

  // At the end of the returned object's scope, frees what was allocated at the bottom of both arenas since this call.
  auto scope() {
    struct Scope {
      DeviceBase* dev;
      Arena::Mark near, far;
      Scope(DeviceBase& dev) : dev(&dev), near(dev.arena.mark()), far(dev.far.mark()) {}
      Scope(Scope&& other) : dev(std::exchange(other.dev, nullptr)), near(other.near), far(other.far) {}
      ~Scope() {
        if (dev) dev->arena.release(near), dev->far.release(far);
      }
    };
    return Scope(*this);
  }
  // The same for a cell of a step, which on_cell is told of.
  auto scope(const Cell& cell) {
    auto memory = scope();
    struct CellScope : decltype(memory) {
      ~CellScope() {
        if (this->dev && this->dev->on_cell) this->dev->on_cell(nullptr);
      }
    };
    if (on_cell) on_cell(&cell);
    return CellScope{std::move(memory)};
  }
  std::function<void(const Cell*)> on_cell;  // called when a cell of a step begins, and with null when it ends

  // Called with one call of an operation when it is counted; a GPU may not have begun it.
  std::function<void(const Work&)> on_work;

  // Kernels and matrix products that a GPU was told to run, since reset_work(). Each costs some microseconds.
  Index launches = 0;

  // GPU matrix products that could not use their one-tile algorithm. Their bits may depend on the chunk.
  std::vector<std::string> algorithm_changes;

  const std::vector<Work>& work() const { return work_; }
  void reset_work() { work_.clear(), far_traffic_ = {}, launches = 0; }
  double flops() const { return total_of("", &Work::flops, work_); }
  double sent() const { return total_of("", &Work::sent, work_); }
  // Bytes copied to and from far memory.
  const ByKind<double>& far_traffic() const { return far_traffic_; }

 protected:
  Work& account(std::string_view name, double flops, double bytes, double sent, Index calls = 1) {
    const auto same = [&](const Work& w) { return w.name.data() == name.data() || w.name == name; };
    auto found = std::find_if(work_.begin(), work_.end(), same);
    Work& w = found != work_.end() ? *found : work_.emplace_back(Work{name});
    w.calls += calls;
    w.flops += flops;
    w.bytes += bytes;
    w.sent += sent;
    if (on_work) on_work({name, calls, flops, bytes, 0, sent});
    return w;
  }
  template <class T>
  void account(const FarMatrix<T>& far, const Matrix<T>& near) {
    require_copy(far, near);
    far_traffic_[static_cast<std::size_t>(far.kind)] += static_cast<double>(far.bytes());
  }

 private:
  ByKind<double> far_traffic_{};
  std::vector<Work> work_;
};

// A matrix in the device's memory; its contents are undefined.
template <class T>
Matrix<T> allocate(DeviceBase& dev, Index rows, Index cols, Kind kind, End end = End::bottom) {
  const auto bytes = static_cast<std::size_t>(rows * cols) * sizeof(T);
  return {static_cast<T*>(dev.arena.allocate(bytes, kind, end)), rows, cols};
}

// A matrix in the device's far memory.
template <class T>
FarMatrix<T> allocate_far(DeviceBase& dev, Index rows, Index cols, Kind kind, End end = End::bottom) {
  FarMatrix<T> m = {0, rows, cols, kind};
  m.offset = dev.far.reserve((m.bytes() + kFarAlignment - 1) / kFarAlignment * kFarAlignment, kind, end);
  return m;
}

// A matrix with every row aligned to 128 bytes. Tensor cores need rows aligned to 16 bytes, which unpadded logits of
// GPT-2 (vocabulary 50257) are not; their rows are padded to 50272 float32. No operation of ours reads or writes the
// padding. (cuBLASLt may choose another algorithm for another stride, but all runs have this one.)
template <class T>
constexpr Index aligned_width(Index cols) {
  return round_up(cols, 128 / static_cast<Index>(sizeof(T)));
}
template <class T>
Matrix<T> allocate_aligned(DeviceBase& dev, Index rows, Index cols, Kind kind) {
  return allocate<T>(dev, rows, aligned_width<T>(cols), kind).columns(0, cols);
}

// Counts the memory and work of a device. Computes nothing.
class Plan : public DeviceBase {
 public:
  static constexpr bool computes = false;
  static constexpr std::size_t kUnlimited = std::size_t{1} << 62;
  explicit Plan(DeviceKind kind = DeviceKind::cpu, Index tile = kTile)
      : DeviceBase({kUnlimited, kUnlimited}, nullptr, tile), kind(kind) {}

  const DeviceKind kind;

  template <class M, class T>
  void upload(const M&, const T*) {}
  template <class M, class T>
  void download(T*, const M&) {}
  template <class T>
  void copy(Matrix<T>, Matrix<T>) {}
  template <class T>
  PendingCopy put(FarMatrix<T> far, Matrix<T> near) {
    return account(far, near), PendingCopy();
  }
  template <class T>
  PendingCopy get(Matrix<T> near, FarMatrix<T> far) {
    return account(far, near), PendingCopy();
  }
  void synchronize() {}

  auto operation(const char* name, double flops, double bytes, double sent = 0) {
    struct Counted {
      ~Counted() {}
    };
    account(name, flops, bytes, sent);
    return Counted{};
  }
};

// Computes on the host.
class Cpu : private HostBlock, public DeviceBase {
 public:
  static constexpr bool computes = true;
  static constexpr DeviceKind kind = DeviceKind::cpu;
  explicit Cpu(const Capacity& capacity)
      : HostBlock(Arena::round_up(capacity.near)), DeviceBase(capacity, HostBlock::data, kTile) {
    if (capacity.far == 0) return;
    far_file_.emplace(far_directory(capacity.directory), capacity.far);
  }

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
  // Copies between host and far memory.
  template <class T>
  void upload(FarMatrix<T> to, const T* from) {
    write(to, from).wait();
  }
  template <class T>
  void download(T* to, FarMatrix<T> from) {
    read(to, from).wait();
  }
  template <class T>
  PendingCopy put(FarMatrix<T> far, Matrix<T> near) {
    return account(far, near), write(far, near.data);
  }
  template <class T>
  PendingCopy get(Matrix<T> near, FarMatrix<T> far) {
    return account(far, near), read(near.data, far);
  }
  void synchronize() {}

  // Accounts the work, and measures the time until the end of the returned object's scope.
  auto operation(const char* name, double flops, double bytes, double sent = 0) {
    struct Timer {
      Cpu& dev;
      const char* name;
      double flops, bytes, sent;
      Stopwatch watch = {};
      ~Timer() { dev.account(name, flops, bytes, sent).seconds += watch.seconds(); }
    };
    return Timer{*this, name, flops, bytes, sent};
  }

 private:
  template <class T>
  PendingCopy write(FarMatrix<T> to, const T* from) {
    return start(FarFile::Copy{to.offset, to.bytes(), reinterpret_cast<const std::byte*>(from), nullptr});
  }
  template <class T>
  PendingCopy read(T* to, FarMatrix<T> from) {
    return start(FarFile::Copy{from.offset, from.bytes(), nullptr, reinterpret_cast<std::byte*>(to)});
  }
  PendingCopy start(const FarFile::Copy& copy) {
    if (copy.bytes == 0) return {};
    return PendingCopy([this, number = far_file_->start(copy)] {
      auto op = operation("wait for far memory", 0, 0);
      far_file_->wait(number);
    });
  }

  std::optional<FarFile> far_file_;
};

// Copies a matrix to the host.
template <class Device, template <class> class AnyMatrix, class T>
std::vector<T> to_host(Device& dev, AnyMatrix<T> m) {
  std::vector<T> values(m.size());
  dev.download(values.data(), m);
  return values;
}

}  // namespace streambp

#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif
