// Connects the devices of a run. CPUs exchange messages as their hosts do; GPUs have their own way (parallel/nccl.cuh).
#pragma once

#include "parallel/gather.h"

namespace streambp {

// `hosts`: the ranks, with transports between their hosts. All ranks must create it. Before messages, it is attached to the
// device; it exists earlier, because it takes a GPU's memory before a run takes the rest.
template <class Device>
class Connection {
 public:
  explicit Connection(const Ranks& hosts) : ranks(hosts) {}
  void attach(Device&) {}
  void close() {}  // before the device ends

  Ranks ranks;  // with transports between their devices
};

}  // namespace streambp

#ifdef STREAMBP_CUDA
#include "parallel/nccl.cuh"
#endif
