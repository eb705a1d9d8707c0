// Connects the devices of a run. CPUs exchange messages as their hosts do; GPUs have their own way (parallel/nccl.cuh).
#pragma once

#include "parallel/gather.h"

namespace streambp {

// `hosts`: the ranks, with transports between their hosts. All ranks must create it.
template <class Device>
class Connection {
 public:
  Connection(Device&, const Ranks& hosts) : ranks(hosts) {}

  Ranks ranks;  // with transports between their devices
};

}  // namespace streambp

#ifdef STREAMBP_CUDA
#include "parallel/nccl.cuh"
#endif
