// One multiprocessor: runs the threads of a block as fibers, one block after the other.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "fibers.h"

namespace cuda_on_cpu {

inline constexpr int kMaxThreads = 1024;

// The order of blocks, and of the threads of a block. The first thread that can run always runs next, as far ahead of
// the others as barriers allow. Every block is shuffled differently.
enum class Schedule { forward, backward, shuffled };
inline Schedule schedule = Schedule::forward;
inline unsigned shuffle_seed = 1;

// The numbers 0..count-1 in the order of the schedule.
inline void put_in_order(std::vector<int>& order, std::size_t count, std::size_t seed) {
  order.resize(count);
  std::iota(order.begin(), order.end(), 0);
  if (schedule == Schedule::backward) std::reverse(order.begin(), order.end());
  if (schedule != Schedule::shuffled) return;
  std::minstd_rand random(static_cast<unsigned>(shuffle_seed * 7919 + seed * 104729 + 1));
  for (int i = 0; i < 4; ++i) random();  // similar seeds start with similar numbers
  std::shuffle(order.begin(), order.end(), random);
}

// An operation that threads execute together. The last lane to arrive does the work for its warp. operands[lane] points
// to the operand on that lane's stack, which also receives the result.
struct Meeting {
  const char* name;
  void (*complete)(void* const* operands, int lanes) = nullptr;
  bool whole_warp = false;  // needs all 32 lanes; otherwise the existing lanes are enough
};
inline constexpr Meeting kBarrier{"__syncthreads"};

// Runs the blocks of a launch one after the other. Every OS thread has its own.
class Multiprocessor {
 public:
  static constexpr int kWarp = 32;

  struct Copy {  // a cp.async that was issued and not yet waited for
    char* shared;
    const char* global;  // null: zeros
    int group;
  };
  struct Thread {
    Fiber fiber;
    int number = 0, rank = 0;  // within the block; ready threads run in the order of their ranks
    uint3 index{};
    const Meeting* waits_for = nullptr;
    bool returned = false;
    std::vector<Copy> copies;
    int groups = 0;  // committed so far
  };

  void run(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    gridDim = grid, blockDim = block;
    count_ = static_cast<int>(block.x * block.y * block.z);
    shared_bytes_ = shared_bytes;
    const auto free_shared = [](char* p) { ::operator delete (p, std::align_val_t{1024}); };
    const std::unique_ptr<char, decltype(free_shared)> shared(
        static_cast<char*>(::operator new (shared_bytes, std::align_val_t{1024})), free_shared);
    shared_ = shared.get();
    std::vector<int> blocks;
    put_in_order(blocks, std::size_t{grid.x} * grid.y * grid.z, 0);
    for (const int b : blocks) {
      const auto i = static_cast<unsigned>(b);
      blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
      run_block(i);
    }
  }

  // The calling lane waits for all lanes of its warp.
  void meet(const Meeting& meeting, void* operand) {
    Thread& me = *running_;
    Warp& warp = warps_[static_cast<std::size_t>(me.number / kWarp)];
    const int lanes = std::min(kWarp, count_ - me.number / kWarp * kWarp);
    if (warp.arrived == 0) warp.meeting = &meeting;
    if (warp.meeting != &meeting)
      fail("thread ", me.number, " is in ", meeting.name, " while others of its warp are in ", warp.meeting->name);
    if (meeting.whole_warp && lanes < kWarp)
      fail("thread ", me.number, " is in ", meeting.name, " with ", lanes, " lanes of 32");
    warp.operands[me.number % kWarp] = operand;
    me.waits_for = &meeting;
    if (++warp.arrived == lanes) {
      warp.arrived = 0;
      if (meeting.complete) meeting.complete(warp.operands, lanes);
      for (int i = 0; i < lanes; ++i) make_ready(threads_[static_cast<std::size_t>(me.number / kWarp * kWarp + i)]);
    }
    pause();
  }

  // The calling thread waits until all threads of its block have arrived or returned.
  void barrier() {
    running_->waits_for = &kBarrier;
    ++at_barrier_;
    open_barrier_if_all_came();
    pause();
  }

  void check_shared(const char* operation, const void* address) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(shared_);
    if (offset % 16 != 0)
      fail("thread ", running_->number, ": ", operation, " needs a shared address aligned to 16 bytes");
    if (offset >= shared_bytes_ || shared_bytes_ - offset < 16)
      fail("thread ", running_->number, ": ", operation, " outside of shared memory");
  }

  // Throws an error that names block and cause, and prints it.
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::ostringstream message;
    message << "CUDA on CPU: block (" << blockIdx.x << ", " << blockIdx.y << ", " << blockIdx.z << ") of " << blockDim.x
            << " x " << blockDim.y << " x " << blockDim.z << " threads: ";
    (message << ... << parts);
    std::fprintf(stderr, "%s\n", message.str().c_str());
    throw std::logic_error(message.str());
  }

  Thread& running() { return *running_; }
  void* shared_memory() { return shared_; }

 private:
  struct Warp {
    const Meeting* meeting = nullptr;  // what the lanes that arrived are waiting for
    int arrived = 0;
    void* operands[kWarp] = {};
  };
  struct Cancelled {};  // unwinds the stacks of fibers that still wait after an error

  void run_block(std::size_t block) {
    std::memset(shared_, 0xff, shared_bytes_);
    put_in_order(order_, static_cast<std::size_t>(count_), block + 1);
    error_ = nullptr;
    left_ = count_;
    at_barrier_ = 0;
    any_ready_ = 0;
    ready_ = {};
    warps_ = {};
    for (int rank = 0; rank < count_; ++rank) {
      Thread& t = threads_[static_cast<std::size_t>(order_[static_cast<std::size_t>(rank)])];
      t.number = order_[static_cast<std::size_t>(rank)], t.rank = rank;
      const auto i = static_cast<unsigned>(t.number);
      t.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
      t.waits_for = nullptr;
      t.returned = false;
      t.copies.clear();
      t.groups = 0;
      t.fiber.start(&Multiprocessor::thread_main, t.number);
      make_ready(t);
    }
    running_ = take_ready();
    host_.switch_to(running_->fiber);
    if (left_ == 0 && !error_) return;
    const std::string stuck = error_ ? "" : who_waits();
    cancelling_ = true;
    for (int i = 0; i < count_; ++i) {
      running_ = &threads_[static_cast<std::size_t>(i)];
      if (running_->waits_for) host_.switch_to(running_->fiber);
    }
    cancelling_ = false;
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    fail(stuck);
  }

  static Fiber& thread_main();

  // Runs one thread to its end and returns the next fiber.
  Fiber& run_thread() {
    Thread& me = *running_;
    threadIdx = me.index;
    try {
      (*kernel_)();
      if (!me.copies.empty())
        fail("thread ", me.number, " returned before ", me.copies.size(), " cp.async were waited for");
    } catch (const Cancelled&) {
    } catch (...) {
      error_ = std::current_exception();
    }
    me.returned = true;
    me.waits_for = nullptr;
    --left_;
    if (error_ || cancelling_) return host_;
    open_barrier_if_all_came();
    running_ = take_ready();
    return running_ ? running_->fiber : host_;
  }

  // Switches to the first ready thread; returns when the caller is picked again.
  void pause() {
    Thread& me = *running_;
    running_ = take_ready();
    if (running_ != &me) {
      me.fiber.switch_to(running_ ? running_->fiber : host_);  // to the host if nothing can run: a deadlock
      threadIdx = me.index;
    }
    if (cancelling_) throw Cancelled{};
    me.waits_for = nullptr;
  }

  void open_barrier_if_all_came() {
    if (at_barrier_ == 0 || at_barrier_ < left_) return;
    at_barrier_ = 0;
    for (int i = 0; i < count_; ++i) {
      Thread& t = threads_[static_cast<std::size_t>(i)];
      if (t.waits_for == &kBarrier) make_ready(t);
    }
  }

  // The ready threads are a set of bits in the order of ranks.
  void make_ready(Thread& t) {
    by_rank_[static_cast<std::size_t>(t.rank)] = &t;
    ready_[static_cast<std::size_t>(t.rank / 64)] |= std::uint64_t{1} << t.rank % 64;
    any_ready_ |= 1u << t.rank / 64;
  }
  Thread* take_ready() {
    if (any_ready_ == 0) return nullptr;
    const auto word = static_cast<std::size_t>(std::countr_zero(any_ready_));
    const auto bit = static_cast<std::size_t>(std::countr_zero(ready_[word]));
    ready_[word] &= ready_[word] - 1;
    if (ready_[word] == 0) any_ready_ &= any_ready_ - 1;
    return by_rank_[64 * word + bit];
  }

  // "nothing can run; threads 0..31: returned, 32..39: __shfl_sync, 40..63: __syncthreads"
  std::string who_waits() const {
    const auto state = [&](int i) {
      const Thread& t = threads_[static_cast<std::size_t>(i)];
      return std::string(t.returned ? "returned" : t.waits_for->name);
    };
    std::ostringstream message;
    message << "nothing can run; threads ";
    for (int begin = 0, end; begin < count_; begin = end) {
      for (end = begin + 1; end < count_ && state(end) == state(begin);) ++end;
      message << (begin > 0 ? ", " : "") << begin << ".." << end - 1 << ": " << state(begin);
    }
    return message.str();
  }

  const std::function<void()>* kernel_ = nullptr;
  char* shared_ = nullptr;
  std::size_t shared_bytes_ = 0;
  int count_ = 0, left_ = 0, at_barrier_ = 0;  // threads: of the block, not returned, at the barrier
  Fiber host_;
  Thread* running_ = nullptr;
  std::array<Thread, kMaxThreads> threads_;
  std::array<Warp, kMaxThreads / kWarp> warps_;
  std::vector<int> order_;
  std::array<Thread*, kMaxThreads> by_rank_{};
  std::array<std::uint64_t, kMaxThreads / 64> ready_{};
  std::uint32_t any_ready_ = 0;  // which words of ready_ are not zero
  std::exception_ptr error_;
  bool cancelling_ = false;
};

inline constinit thread_local Multiprocessor* running_on = nullptr;  // null outside kernels

inline Fiber& Multiprocessor::thread_main() { return running_on->run_thread(); }

inline Multiprocessor& here() {
  if (!running_on) throw std::logic_error("CUDA on CPU: a device function was called outside of a kernel");
  return *running_on;
}

inline void* shared_memory() { return here().shared_memory(); }

// All kernels of an OS thread run on the same fibers: each has a mapping of its own, and a process may have 65 530.
inline Multiprocessor& multiprocessor() {
  static thread_local const auto mine = std::make_unique<Multiprocessor>();
  return *mine;
}

// Calls body() for every thread of every block. Rethrows what a thread throws, and throws std::logic_error for a kernel
// that cannot end.
template <class F>
cudaError_t launch(dim3 grid, dim3 block, std::size_t shared_bytes, F&& body) {
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  if (shared_bytes > gpu.shared_bytes) return answer(cudaErrorInvalidValue);
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || blocks == 0 || grid.y > 65535 || grid.z > 65535)
    return answer(cudaErrorInvalidConfiguration);
  if (recording) {
    recording->push_back([=]() mutable { return launch(grid, block, shared_bytes, body); });
    return cudaSuccess;
  }
  if (const cudaError_t error = next_operation(); error != cudaSuccess) return error;
  if (running_on) throw std::logic_error("CUDA on CPU: a kernel was launched inside a kernel");
  struct Running {
    explicit Running(Multiprocessor& m) { running_on = &m; }
    ~Running() { running_on = nullptr; }
  } running(multiprocessor());
  const DeviceMemory::Access access;
  running_on->run(grid, block, shared_bytes, std::ref(body));
  return cudaSuccess;
}

}  // namespace cuda_on_cpu
