// Memory: one piece with a stack at each end, growing towards each other.
//
// Leaving a scope frees everything allocated in it, so a training step never asks the system for memory. Without a
// block, an Arena only counts bytes; `streambp plan` uses this to find the peak.
#pragma once

#include <array>
#include <cstddef>
#include <functional>

#include "kernels/base/system.h"

namespace streambp {

// What memory is used for. `streambp plan` breaks the peak down by kind.
enum class Kind { weights, gradients, optimizer, stream, saved, keys_values, chunk, logits, sums, kept, count };
inline constexpr std::array<const char*, static_cast<int>(Kind::count)> kKindNames = {
    "weights",         "gradients",         "optimizer", "token stream",          "saved layer inputs",
    "keys and values", "chunk activations", "logits",    "float32 gradient sums", "kept activations"};
template <class T>
using ByKind = std::array<T, static_cast<int>(Kind::count)>;
using Bytes = ByKind<std::size_t>;

enum class End { bottom, top };

// A piece of host memory. The system provides its pages on first write.
class HostBlock {
 public:
  explicit HostBlock(std::size_t bytes) : bytes(bytes) {
    if (bytes == 0) return;
    require(bytes <= available_memory(), "this run needs ", bytes >> 20, " MiB and only ", available_memory() >> 20,
            " MiB are free; use a shorter stream or a smaller model");
    void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(block != MAP_FAILED, "cannot reserve ", bytes, " bytes of memory: ", std::strerror(errno));
    use_huge_pages(block, bytes);
    spread_pages(block, bytes);
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

  // Set by tests: fills new allocations with NaN, so that reads of uninitialized memory are detected.
  static inline void (*poison)(void* data, std::size_t bytes) = nullptr;

  // Called after every allocation and release, to record a memory timeline.
  std::function<void()> on_change;

  // With a null block, the arena only counts bytes.
  Arena(std::size_t capacity, std::byte* block) : block_(block), capacity_(round_up(capacity)) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes, Kind kind, End end) {
    const std::size_t offset = reserve(bytes, kind, end);
    if (poison && block_) poison(block_ + offset, bytes);
    return block_ ? block_ + offset : nullptr;
  }

  // The same, but returns the place in the block.
  std::size_t reserve(std::size_t bytes, Kind kind, End end) {
    bytes = round_up(bytes);
    require(used() + bytes <= capacity_, "out of memory: ", used(), " of ", capacity_,
            " planned bytes are in use, and ", bytes, " more are needed for ", kKindNames[static_cast<int>(kind)],
            "; please report this");
    const std::size_t offset = end == End::bottom ? bottom_ : capacity_ - top_ - bytes;
    (end == End::bottom ? bottom_ : top_) += bytes;
    stack(end).push_back({bytes, kind});
    by_kind_[static_cast<int>(kind)] += bytes;
    if (used() > peak_) {
      peak_ = used();
      peak_by_kind_ = by_kind_;
    }
    if (on_change) on_change();
    return offset;
  }

  // A position of the bottom stack; release frees everything allocated there after the mark.
  using Mark = std::size_t;
  Mark mark() const { return bottom_stack_.size(); }
  void release(Mark mark) { pop(End::bottom, mark); }
  void release_top() { pop(End::top, 0); }

  std::size_t capacity() const { return capacity_; }
  std::size_t used() const { return bottom_ + top_; }
  std::size_t peak() const { return peak_; }
  const Bytes& by_kind() const { return by_kind_; }
  const Bytes& peak_by_kind() const { return peak_by_kind_; }

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

}  // namespace streambp
