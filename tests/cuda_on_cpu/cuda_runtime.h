// CUDA on CPU: this folder's <cuda_runtime.h> lets g++ compile CUDA kernels as they are and run them on the host.
//
// Every CUDA thread is a fiber. It runs until it waits, at a barrier or in an operation of the whole warp, and then
// another one goes on; `schedule` says which. So a kernel's indexing, synchronisation and arithmetic can be tested
// without a GPU, under sanitizers, and in several orders of its threads: one of them shows a barrier that is missing.
// Memory that a kernel must not rely on (fresh shared or device memory, the target of an unfinished copy) holds 0xff
// bytes, which read as NaN. Nothing here says anything about the speed of a kernel or about the real hardware.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fibers.h"

#define CUDA_ON_CPU 1

// ---- The language -----------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
constexpr int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
constexpr uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
constexpr float2 make_float2(float x, float y) { return {x, y}; }

// Those of the running fiber.
inline constinit thread_local uint3 threadIdx{}, blockIdx{};
inline constinit thread_local dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400
};

namespace cuda_on_cpu {

inline constexpr std::size_t kMaxSharedBytes = 227 << 10;
inline constexpr int kMaxThreads = 1024;

// The order in which blocks are visited, and in which the threads of a block that can run are picked: always the first
// of them, so it runs as far ahead of the others as barriers let it. Every block is shuffled in its own way.
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
  for (int i = 0; i < 4; ++i) random();  // neighbouring seeds begin alike
  std::shuffle(order.begin(), order.end(), random);
}

// ---- The scheduler ----------------------------------------------------------------------------------------------

// What threads can wait for together. The last lane of a warp to come completes the work for all; operands[lane] is
// what a lane brought, on its own stack, which also takes its result.
struct Meeting {
  const char* name;
  void (*complete)(void* const* operands, int lanes) = nullptr;
  bool whole_warp = false;  // needs all 32 lanes; otherwise the lanes that exist are enough
};
inline constexpr Meeting kBarrier{"__syncthreads"};

// Runs the blocks of a launch one after the other. Every OS thread has one of its own.
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

  // The calling lane waits until all lanes of its warp have come.
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

  // The calling thread waits until all threads of its block have come or have returned.
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

  // Says where and what to stderr, and throws it.
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
    const Meeting* meeting = nullptr;  // what its lanes are gathering for, once one has come
    int arrived = 0;
    void* operands[kWarp] = {};
  };
  struct Cancelled {};  // unwinds the stacks of the fibers that an error left waiting

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

  // One thread from its beginning to its end; names the fiber that goes on.
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

  // Lets the first ready thread run; returns when the caller is ready and its turn has come.
  void pause() {
    Thread& me = *running_;
    running_ = take_ready();
    if (running_ != &me) {
      me.fiber.switch_to(running_ ? running_->fiber : host_);  // the host if nothing can run: then we are stuck
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

inline constinit thread_local Multiprocessor* running_on = nullptr;  // null outside of kernels

inline Fiber& Multiprocessor::thread_main() { return running_on->run_thread(); }

inline Multiprocessor& here() {
  if (!running_on) throw std::logic_error("CUDA on CPU: a device function was called outside of a kernel");
  return *running_on;
}

inline void* shared_memory() { return here().shared_memory(); }

inline constinit thread_local cudaError_t last_error = cudaSuccess;
inline cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Calls body() once for every thread of every block. What a thread throws is thrown from here, and so is a
// std::logic_error for a kernel that can never end.
template <class F>
cudaError_t launch(dim3 grid, dim3 block, std::size_t shared_bytes, F&& body) {
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  if (shared_bytes > kMaxSharedBytes) return answer(cudaErrorInvalidValue);
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || blocks == 0 || grid.y > 65535 || grid.z > 65535)
    return answer(cudaErrorInvalidConfiguration);
  if (running_on) throw std::logic_error("CUDA on CPU: a kernel was launched inside a kernel");
  static thread_local const auto mine = std::make_unique<Multiprocessor>();
  struct Running {
    explicit Running(Multiprocessor& m) { running_on = &m; }
    ~Running() { running_on = nullptr; }
  } running(*mine);
  mine->run(grid, block, shared_bytes, std::ref(body));
  return cudaSuccess;
}

// ---- Operations of a warp ---------------------------------------------------------------------------------------

inline void meet_all(const Meeting& meeting, unsigned mask, void* operand) {
  Multiprocessor& m = here();
  if (mask != 0xffffffff)
    m.fail("thread ", m.running().number, ": ", meeting.name, " with another mask than 0xffffffff");
  m.meet(meeting, operand);
}

inline int lane() { return here().running().number % Multiprocessor::kWarp; }

struct Shuffled {
  std::uint64_t value, result;
  int source;
};
inline void shuffle(void* const* operands, int lanes) {
  for (int i = 0; i < lanes; ++i) {
    auto& mine = *static_cast<Shuffled*>(operands[i]);
    mine.result = mine.source < lanes ? static_cast<Shuffled*>(operands[mine.source])->value : ~std::uint64_t{0};
  }
}
inline constexpr Meeting kShuffle{"__shfl_sync", shuffle}, kShuffleUp{"__shfl_up_sync", shuffle},
    kShuffleDown{"__shfl_down_sync", shuffle}, kShuffleXor{"__shfl_xor_sync", shuffle};

template <class T>
T shuffled(const Meeting& meeting, unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Shuffled operand{0, 0, source};
  std::memcpy(&operand.value, &value, sizeof(T));
  meet_all(meeting, mask, &operand);
  std::memcpy(&value, &operand.result, sizeof(T));
  return value;
}

inline void vote(void* const* operands, int lanes) {
  unsigned ballot = 0;
  for (int i = 0; i < lanes; ++i) ballot |= (*static_cast<unsigned*>(operands[i]) ? 1u : 0u) << i;
  for (int i = 0; i < lanes; ++i) *static_cast<unsigned*>(operands[i]) = ballot;
}
inline void vote_all(void* const* operands, int lanes) {
  bool all = true;
  for (int i = 0; i < lanes; ++i) all = all && *static_cast<unsigned*>(operands[i]);
  for (int i = 0; i < lanes; ++i) *static_cast<unsigned*>(operands[i]) = all;
}
inline constexpr Meeting kSyncWarp{"__syncwarp"}, kBallot{"__ballot_sync", vote}, kAny{"__any_sync", vote},
    kAll{"__all_sync", vote_all};

inline unsigned voted(const Meeting& meeting, unsigned mask, int predicate) {
  unsigned operand = predicate != 0;
  meet_all(meeting, mask, &operand);
  return operand;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::here().barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffff) { cuda_on_cpu::meet_all(cuda_on_cpu::kSyncWarp, mask, nullptr); }

// The lanes of a warp exchange values within sections of `width` lanes. A lane whose source lies outside keeps its
// own value; what comes from a lane that does not exist is NaN.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int begin = cuda_on_cpu::lane() & ~(width - 1);
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffle, mask, value, begin | (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = cuda_on_cpu::lane(), source = lane - static_cast<int>(delta);
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffleUp, mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = cuda_on_cpu::lane(), source = lane + static_cast<int>(delta);
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffleDown, mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
  const int lane = cuda_on_cpu::lane(), source = lane ^ bits;
  return cuda_on_cpu::shuffled(cuda_on_cpu::kShuffleXor, mask, value, source > (lane | (width - 1)) ? lane : source);
}

inline int __any_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::voted(cuda_on_cpu::kAny, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::voted(cuda_on_cpu::kAll, mask, predicate) != 0;
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return cuda_on_cpu::voted(cuda_on_cpu::kBallot, mask, predicate);
}

// ---- What the kernels' inline assembly means --------------------------------------------------------------------

namespace cuda_on_cpu {

inline float low_bf16(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline float high_bf16(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }

inline std::uint32_t round_to_bf16(float x) {  // to the nearest, ties to even
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

struct MmaOperand {
  float* d;
  const std::uint32_t *a, *b;
};

// D += A B for A of 16 x 16 and B of 16 x 8. With g = lane / 4 and t = lane % 4 a lane holds
//   of A: rows g and g + 8, columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]);
//   of B: column g, rows 2t, 2t + 1 (b[0]) and 2t + 8, 2t + 9 (b[1]);
//   of D: row g (d[0], d[1]) and row g + 8 (d[2], d[3]), columns 2t, 2t + 1.
inline void multiply_fragments(void* const* operands, int) {
  using Four = float __attribute__((vector_size(16)));  // what every processor multiplies at once
  float a[16][16];
  Four b[16][2], d[16][2];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      a[g + i % 2 * 8][t + i / 2 * 8] = low_bf16(mine.a[i]);
      a[g + i % 2 * 8][t + i / 2 * 8 + 1] = high_bf16(mine.a[i]);
      d[g + i / 2 * 8][t / 4][t % 4 + i % 2] = mine.d[i];
    }
    for (int i = 0; i < 2; ++i) {
      b[t + i * 8][g / 4][g % 4] = low_bf16(mine.b[i]);
      b[t + i * 8 + 1][g / 4][g % 4] = high_bf16(mine.b[i]);
    }
  }
  for (int i = 0; i < 16; ++i) {
    Four left = d[i][0], right = d[i][1];
    for (int k = 0; k < 16; ++k) {
      left += a[i][k] * b[k][0];
      right += a[i][k] * b[k][1];
    }
    d[i][0] = left, d[i][1] = right;
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* mine = static_cast<const MmaOperand*>(operands[lane])->d;
    for (int i = 0; i < 4; ++i) mine[i] = d[lane / 4 + i / 2 * 8][lane % 4 / 2][lane % 2 * 2 + i % 2];
  }
}
inline constexpr Meeting kMma{"mma_m16n8k16", multiply_fragments, true};

struct LdmatrixOperand {
  std::uint32_t* r;
  const void* row;
};

// Lane l brings the address of row l % 8 of matrix l / 8. It takes from matrix m, as r[m], row l / 4, columns
// 2 (l % 4) and the next; or, transposed, that of the rows and columns exchanged.
template <bool kTransposed>
void load_matrices(void* const* operands, int) {
  std::uint16_t rows[32][8];
  for (int lane = 0; lane < 32; ++lane)
    std::memcpy(rows[lane], static_cast<const LdmatrixOperand*>(operands[lane])->row, 16);
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) {
      const int i = lane / 4, j = lane % 4 * 2;
      const std::uint32_t low = kTransposed ? rows[8 * m + j][i] : rows[8 * m + i][j];
      const std::uint32_t high = kTransposed ? rows[8 * m + j + 1][i] : rows[8 * m + i][j + 1];
      static_cast<const LdmatrixOperand*>(operands[lane])->r[m] = low | high << 16;
    }
  }
}
inline constexpr Meeting kLdmatrix{"ldmatrix_x4", load_matrices<false>, true};
inline constexpr Meeting kLdmatrixTrans{"ldmatrix_x4_trans", load_matrices<true>, true};

inline void load_matrix(const Meeting& meeting, std::uint32_t* r, const void* row) {
  Multiprocessor& m = here();
  m.check_shared(meeting.name, row);
  LdmatrixOperand operand{r, row};
  m.meet(meeting, &operand);
}

// Makes the thread's copies, all but those of its latest `recent` groups.
inline void finish_copies(int recent) {
  Multiprocessor::Thread& me = here().running();
  const auto end = std::find_if(me.copies.begin(), me.copies.end(),
                                [&](const auto& copy) { return copy.group >= me.groups - recent; });
  for (auto copy = me.copies.begin(); copy != end; ++copy) {
    if (copy->global)
      std::memcpy(copy->shared, copy->global, 16);
    else
      std::memset(copy->shared, 0, 16);
  }
  me.copies.erase(me.copies.begin(), end);
}

}  // namespace cuda_on_cpu

namespace streambp::ptx {

inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  cuda_on_cpu::MmaOperand operand{d, a, b};
  cuda_on_cpu::here().meet(cuda_on_cpu::kMma, &operand);
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::load_matrix(cuda_on_cpu::kLdmatrix, r, row);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
  cuda_on_cpu::load_matrix(cuda_on_cpu::kLdmatrixTrans, r, row);
}

// The hardware copies at any time between here and the wait. We spoil the target now, for those who still read what
// was there, and bring the data with the wait, for those who read too early.
inline void cp_async_16(void* shared, const void* global, bool valid) {
  cuda_on_cpu::Multiprocessor& m = cuda_on_cpu::here();
  m.check_shared("cp_async_16", shared);
  if (reinterpret_cast<std::uintptr_t>(global) % 16 != 0)
    m.fail("thread ", m.running().number, ": cp_async_16 needs a global address aligned to 16 bytes");
  std::memset(shared, 0xff, 16);
  auto& me = m.running();
  me.copies.push_back({static_cast<char*>(shared), valid ? static_cast<const char*>(global) : nullptr, me.groups});
}
inline void cp_async_commit() { ++cuda_on_cpu::here().running().groups; }
template <int N>
void cp_async_wait() {
  cuda_on_cpu::finish_copies(N);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline std::uint32_t pack_bf16(float low, float high) {
  return cuda_on_cpu::round_to_bf16(low) | cuda_on_cpu::round_to_bf16(high) << 16;
}

}  // namespace streambp::ptx

// ---- The runtime API: device memory is the host's and everything is done when its call returns ------------------

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
inline constexpr unsigned cudaHostAllocDefault = 0, cudaStreamDefault = 0, cudaStreamNonBlocking = 1,
                          cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
  int major, minor, multiProcessorCount, l2CacheSize, warpSize, maxThreadsPerBlock;
};
struct CUstream_st {};
struct CUevent_st {
  std::chrono::steady_clock::time_point time{};
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

namespace cuda_on_cpu {

inline std::size_t free_memory = std::size_t{1} << 30;  // what cudaMalloc can still give

// Which memory is the device's. Copies that take one side for the other fail here as they fail on a GPU.
struct DeviceMemory {
  std::mutex mutex;
  std::map<const char*, std::size_t> allocations;

  bool holds(const void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex);
    const auto* begin = static_cast<const char*>(data);
    const auto after = allocations.upper_bound(begin);
    if (after == allocations.begin()) return false;
    const auto& [base, size] = *std::prev(after);
    return static_cast<std::size_t>(begin - base) < size && bytes <= size - static_cast<std::size_t>(begin - base);
  }
  std::size_t used() {
    const std::lock_guard lock(mutex);
    std::size_t sum = 0;
    for (const auto& [base, size] : allocations) sum += size;
    return sum;
  }
};
inline DeviceMemory device_memory;

struct ErrorName {
  cudaError_t error;
  const char *name, *text;
};
inline constexpr ErrorName kErrorNames[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"}};
inline constexpr ErrorName kUnknownError{cudaSuccess, "unrecognized error code", "unrecognized error code"};
inline const ErrorName& error_name(cudaError_t error) {
  for (const ErrorName& e : kErrorNames) {
    if (e.error == error) return e;
  }
  return kUnknownError;
}

inline std::size_t rectangle(std::size_t pitch, std::size_t width, std::size_t height) {
  return height == 0 ? 0 : (height - 1) * pitch + width;
}

}  // namespace cuda_on_cpu

inline const char* cudaGetErrorName(cudaError_t error) { return cuda_on_cpu::error_name(error).name; }
inline const char* cudaGetErrorString(cudaError_t error) { return cuda_on_cpu::error_name(error).text; }
inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }

inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  return cuda_on_cpu::answer(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = cuda_on_cpu::free_memory;
  *total = cuda_on_cpu::free_memory + cuda_on_cpu::device_memory.used();
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return cuda_on_cpu::answer(cudaErrorInvalidDevice);
  const std::size_t memory = cuda_on_cpu::free_memory + cuda_on_cpu::device_memory.used();
  *properties = {"CUDA on CPU", memory, 48 << 10, cuda_on_cpu::kMaxSharedBytes, 8, 0, 4, 1 << 20, warpSize, 1024};
  return cudaSuccess;
}
template <class Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute attribute, int value) {
  const bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
                    (value >= 0 && static_cast<std::size_t>(value) <= cuda_on_cpu::kMaxSharedBytes);
  return cuda_on_cpu::answer(fits ? cudaSuccess : cudaErrorInvalidValue);
}

// Exactly as many bytes as were asked for, so that AddressSanitizer sees the first one too many.
template <class T>
cudaError_t cudaMalloc(T** data, std::size_t bytes) {
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  const std::lock_guard lock(cuda_on_cpu::device_memory.mutex);
  if (bytes > cuda_on_cpu::free_memory) return cuda_on_cpu::answer(cudaErrorMemoryAllocation);
  void* block = ::operator new (bytes, std::align_val_t{256}, std::nothrow);
  if (!block) return cuda_on_cpu::answer(cudaErrorMemoryAllocation);
  std::memset(block, 0xff, bytes);
  cuda_on_cpu::free_memory -= bytes;
  cuda_on_cpu::device_memory.allocations[static_cast<const char*>(block)] = bytes;
  *data = static_cast<T*>(block);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  if (!data) return cudaSuccess;
  const std::lock_guard lock(cuda_on_cpu::device_memory.mutex);
  const auto found = cuda_on_cpu::device_memory.allocations.find(static_cast<const char*>(data));
  if (found == cuda_on_cpu::device_memory.allocations.end()) return cuda_on_cpu::answer(cudaErrorInvalidValue);
  cuda_on_cpu::free_memory += found->second;
  cuda_on_cpu::device_memory.allocations.erase(found);
  ::operator delete (data, std::align_val_t{256});
  return cudaSuccess;
}
template <class T>
cudaError_t cudaHostAlloc(T** data, std::size_t bytes, unsigned) {
  *data = static_cast<T*>(::operator new (bytes, std::align_val_t{256}, std::nothrow));
  return cuda_on_cpu::answer(*data ? cudaSuccess : cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFreeHost(void* data) { return ::operator delete (data, std::align_val_t{256}), cudaSuccess; }

inline cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                     std::size_t width, std::size_t height, cudaMemcpyKind kind,
                                     cudaStream_t = nullptr) {
  if (width == 0 || height == 0) return cudaSuccess;
  const bool to_device = cuda_on_cpu::device_memory.holds(to, cuda_on_cpu::rectangle(to_pitch, width, height));
  const bool from_device = cuda_on_cpu::device_memory.holds(from, cuda_on_cpu::rectangle(from_pitch, width, height));
  const bool as_said = kind == cudaMemcpyDefault ||
                       (to_device == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
                        from_device == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice));
  if (!as_said || width > to_pitch || width > from_pitch) return cuda_on_cpu::answer(cudaErrorInvalidValue);
  for (std::size_t i = 0; i < height; ++i)
    std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind);
}
inline cudaError_t cudaMemset2DAsync(void* data, std::size_t pitch, int value, std::size_t width, std::size_t height,
                                     cudaStream_t = nullptr) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (width > pitch || !cuda_on_cpu::device_memory.holds(data, cuda_on_cpu::rectangle(pitch, width, height)))
    return cuda_on_cpu::answer(cudaErrorInvalidValue);
  for (std::size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(data) + i * pitch, value, width);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream = nullptr) {
  return cudaMemset2DAsync(data, bytes, value, bytes, 1, stream);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new CUstream_st, cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
  return event->time = std::chrono::steady_clock::now(), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (start->time == CUevent_st{}.time || end->time == CUevent_st{}.time)
    return cuda_on_cpu::answer(cudaErrorInvalidResourceHandle);
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}
