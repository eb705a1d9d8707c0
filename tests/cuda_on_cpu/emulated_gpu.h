// The emulated GPU: its architecture and driver, its errors, and its memory, which the host cannot access.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "language.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_on_cpu {

// Compute capability, and the most shared memory of a block. The default has the least of all supported GPUs.
struct Gpu {
  int major, minor;
  std::size_t shared_bytes;
};
inline constexpr Gpu kGeForce{8, 6, 99 << 10}, kA100{8, 0, 163 << 10}, kHopper{9, 0, 227 << 10};
inline Gpu gpu = kGeForce, later_gpus = kGeForce;  // the first GPU, and all others
// What the driver answers to the first use of a GPU, and to the first use of the program's kernels there.
inline cudaError_t context_error = cudaSuccess, image_error = cudaSuccess;
inline int driver_version = 13000;  // the newest CUDA that the driver supports; 0: no driver
inline int gpu_count = [] {
  const char* count = std::getenv("CUDA_ON_CPU_GPUS");
  return count ? std::atoi(count) : 1;
}();
inline constinit thread_local int current_gpu = 0;

// ---- Errors -----------------------------------------------------------------------------------------------------

inline constinit thread_local cudaError_t last_error = cudaSuccess;
inline cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Operations (launches, copies, events, synchronization) that succeed before one fails. All later ones fail too, as on
// a GPU with a lost context. Negative: none fails.
inline int operations_before_failure = -1;
inline constinit thread_local std::size_t host_work = 0;  // operations of this host thread so far
// The graph that this host thread records. Launches and fills are added to it, and everything else is refused.
using Graph = std::vector<std::function<cudaError_t()>>;
inline constinit thread_local Graph* recording = nullptr;
inline constinit thread_local bool refused_to_record = false;  // then there will be no graph
inline cudaError_t next_operation() {
  if (recording) return refused_to_record = true, answer(cudaErrorStreamCaptureUnsupported);
  ++host_work;
  if (operations_before_failure == 0) return answer(cudaErrorIllegalAddress);
  if (operations_before_failure > 0) --operations_before_failure;
  return cudaSuccess;
}

// ---- Host memory that copies can access beside the host ---------------------------------------------------------

class PinnedMemory {
 public:
  std::size_t limit = SIZE_MAX;  // bytes that can be pinned

  bool pin(void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > limit) return false;
    limit -= bytes;
    std::memset(data, 0xff, bytes);
    return blocks_[static_cast<const char*>(data)] = bytes, true;
  }
  bool unpin(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<const char*>(data));
    if (found == blocks_.end()) return false;
    return limit += found->second, blocks_.erase(found), true;
  }
  bool holds(const void* data, std::size_t bytes = 1) {
    const std::lock_guard lock(mutex_);
    const auto after = blocks_.upper_bound(static_cast<const char*>(data));
    return after != blocks_.begin() &&
           static_cast<const char*>(data) + bytes <= std::prev(after)->first + std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, std::size_t> blocks_;
};
inline PinnedMemory pinned_memory;

// ---- Memory -----------------------------------------------------------------------------------------------------

// A guard page follows every block. Its own pages are accessible only during kernels, copies and matrix products.
class DeviceMemory {
 public:
  std::atomic<std::size_t> free = std::size_t{1} << 30;  // bytes that cudaMalloc can still allocate

  // Fills the memory with 0xff bytes, which read as NaN. Returns null if there is no room.
  void* allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > free) return nullptr;
    // Large blocks get huge pages: their protection changes fast.
    const std::size_t unit = bytes < kHugePage ? page() : kHugePage, pages = (bytes + unit - 1) / unit * unit;
    const std::size_t mapped = pages + unit + page();
    void* mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    explain_faults();
    const auto address = reinterpret_cast<std::uintptr_t>(mapping);
    Block block{static_cast<char*>(mapping), mapped, reinterpret_cast<char*>((address + unit - 1) / unit * unit), pages,
                bytes};
    char* data = block.pages + (pages - bytes) / 256 * 256;
    madvise(block.pages, pages, MADV_HUGEPAGE);
    mprotect(block.pages, pages, PROT_READ | PROT_WRITE);
    std::memset(data, 0xff, bytes);
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(data + bytes, static_cast<std::size_t>(block.pages + pages - data) - bytes);
#endif
    if (accesses_ == 0) mprotect(block.pages, pages, PROT_NONE);
    free -= bytes;
    blocks_[data] = block;
    return data;
  }

  bool release(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<const char*>(data));
    if (found == blocks_.end()) return false;
    const Block& block = found->second;
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(block.pages, block.page_bytes);
#endif
    munmap(block.mapping, block.mapped);
    free += block.bytes;
    blocks_.erase(found);
    return true;
  }

  bool holds(const void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto* begin = static_cast<const char*>(data);
    const auto after = blocks_.upper_bound(begin);
    if (after == blocks_.begin()) return false;
    const auto& [base, block] = *std::prev(after);
    const auto offset = static_cast<std::size_t>(begin - base);
    return offset < block.bytes && bytes <= block.bytes - offset;
  }
  std::size_t used() {
    const std::lock_guard lock(mutex_);
    std::size_t sum = 0;
    for (const auto& [base, block] : blocks_) sum += block.bytes;
    return sum;
  }

  // Makes the memory accessible for its lifetime.
  class Access {
   public:
    Access();
    ~Access();
    Access(const Access&) = delete;
  };

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  struct Block {
    char* mapping;  // what mmap returned
    std::size_t mapped;
    char* pages;  // the pages of the block, which ends within 256 bytes of their end
    std::size_t page_bytes, bytes;
  };

  static std::size_t page() {
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
  }

  void protect(int protection) {
    for (const auto& [data, block] : blocks_) mprotect(block.pages, block.page_bytes, protection);
  }

  // Explains a fault in this memory or in a guard page, and ends the program.
  static void explain_faults() {
    static const bool installed = [] {
      struct sigaction action {};
      action.sa_sigaction = explain;
      action.sa_flags = SA_SIGINFO | SA_ONSTACK;
      return sigaction(SIGSEGV, &action, &earlier_) == 0;
    }();
    static_cast<void>(installed);
  }
  static void explain(int, siginfo_t* info, void*);

  static inline struct sigaction earlier_ {};
  std::mutex mutex_;
  std::map<const char*, Block> blocks_;
  int accesses_ = 0;
};
inline DeviceMemory device_memory;

inline DeviceMemory::Access::Access() {
  const std::lock_guard lock(device_memory.mutex_);
  if (device_memory.accesses_++ == 0) device_memory.protect(PROT_READ | PROT_WRITE);
}
inline DeviceMemory::Access::~Access() {
  const std::lock_guard lock(device_memory.mutex_);
  if (--device_memory.accesses_ == 0) device_memory.protect(PROT_NONE);
}

inline void DeviceMemory::explain(int, siginfo_t* info, void*) {
  const auto* address = static_cast<const char*>(info->si_addr);
  for (const auto& [data, block] : device_memory.blocks_) {
    if (address < block.mapping || address >= block.mapping + block.mapped) continue;
    const char* message = device_memory.accesses_ == 0
                              ? "CUDA on CPU: the host touched device memory outside of kernels and copies\n"
                              : "CUDA on CPU: access beyond the end of a block of device memory\n";
    static_cast<void>(!write(STDERR_FILENO, message, std::strlen(message)));
    signal(SIGABRT, SIG_DFL);
    abort();
  }
  sigaction(SIGSEGV, &earlier_, nullptr);  // not ours: the instruction faults again, for the earlier handler
}

}  // namespace cuda_on_cpu
