// Far memory: larger and slower than a device's own memory. For a GPU it is pinned host memory, for the CPU a file.
//
//   const FarMatrix<T> far = allocate_far<T>(dev, rows, cols, kind);
//   PendingCopy copy = dev.put(far, near);    copies to far memory, or back: dev.get(near, far)
//   copy.wait();                              work from here on comes after the copy
//
// Copies run beside the computation, after the work that was launched before them. Until wait(), the near matrix must not
// be written (put) or used (get), and the far matrix must not be copied again.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "kernels/base/arena.h"
#include "kernels/base/matrix.cuh"

namespace streambp {

// In the device's memory, in far memory, or not kept at all but recomputed.
enum class Place { near, far, nowhere };

// Direct file access needs aligned blocks.
constexpr std::size_t kFarAlignment = 4096;

// Pieces of so many rows are aligned in any matrix.
constexpr auto kFarRows = static_cast<Index>(kFarAlignment);

// A matrix in far memory, or some of its rows.
template <class T>
struct FarMatrix {
  std::size_t offset = 0;
  Index rows = 0, cols = 0;
  Kind kind = Kind::count;

  constexpr bool empty() const { return rows == 0 || cols == 0; }
  constexpr Index size() const { return rows * cols; }
  std::size_t bytes() const { return static_cast<std::size_t>(size()) * sizeof(T); }
  FarMatrix slice(Rows r) const {
    require(0 <= r.begin && r.begin <= r.end && r.end <= rows, "rows ", r.begin, "..", r.end, " of ", rows);
    const FarMatrix part = {offset + static_cast<std::size_t>(r.begin * cols) * sizeof(T), r.size(), cols, kind};
    require(part.offset % kFarAlignment == 0, "far memory: row ", r.begin, " is not aligned");
    return part;
  }
};

template <class T>
void require_copy(const FarMatrix<T>& far, const Matrix<T>& near) {
  require_shape("far memory", "the matrix", near, far.rows, far.cols);
  require(near.contiguous(), "far memory: the matrix is not contiguous");
}

// A copy under way. Its destructor waits too, so the near matrix is never freed too early.
class PendingCopy {
 public:
  PendingCopy() = default;
  explicit PendingCopy(std::function<void()> finish) : finish_(std::move(finish)) {}
  PendingCopy(PendingCopy&& other) noexcept : finish_(std::exchange(other.finish_, {})) {}
  PendingCopy& operator=(PendingCopy&& other) {
    wait();
    finish_ = std::exchange(other.finish_, {});
    return *this;
  }
  ~PendingCopy() {
    try {
      wait();
    } catch (const std::exception&) {  // the copy's data is not needed any more
    }
  }

  void wait() {
    if (const auto finish = std::exchange(finish_, {})) finish();
  }

 private:
  std::function<void()> finish_;
};

inline void wait_for(std::vector<PendingCopy>& copies) {
  for (PendingCopy& copy : copies) copy.wait();
  copies.clear();
}

}  // namespace streambp
