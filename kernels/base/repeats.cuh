// Work that a device does again and again: the same operations on the same memory, such as the next token of eight
// sequences. A GPU records it as a CUDA graph, which then takes one launch.
#pragma once

#include "kernels/base/device.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/cuda.cuh"
#endif

namespace streambp {

template <class Device>
class Repeats {
 public:
  // Does work(), which only calls operations on `dev`. For equal keys they are the same, on the same memory.
  template <class F>
  void run(Device&, Index, F&& work) {
    work();
  }
  void forget() {}
};

#ifdef STREAMBP_CUDA

template <>
class Repeats<Cuda> {
 public:
  Repeats() = default;
  Repeats(const Repeats&) = delete;
  ~Repeats() { forget(); }

  template <class F>
  void run(Cuda& dev, Index key, F&& work) {
    if (dev.profile) return work();  // each operation is timed
    Recorded& r = recorded_[key];
    if (++r.times < kTimes) return work();
    if (!r.graph) r = {record(dev, work), dev.work_since(r.)...};
  }

 private:
};

#endif

}  // namespace streambp
