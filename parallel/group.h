// Ranks: the processes of a run. Neighbouring ranks can share a token stream; other streams have other micro-batches.
//
// Ranks communicate through one operation: all ranks of a group exchange messages, each with a list of those that it
// sends and receives. Sums over ranks are added by their receiver, in rank order, so they have the same bits everywhere.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/base/matrix.cuh"

namespace streambp {

// `peer` is a rank of the group. Transfers between two ranks arrive in the order of their lists.
struct Transfer {
  Index peer;
  void* data;
  std::size_t bytes;
};
struct Transfers {
  std::vector<Transfer> sends, receives;

  template <class T>
  void send(Index peer, Matrix<T> m) {
    add(sends, peer, m);
  }
  template <class T>
  void receive(Index peer, Matrix<T> m) {
    add(receives, peer, m);
  }

 private:
  template <class T>
  static void add(std::vector<Transfer>& list, Index peer, Matrix<T> m) {
    require(m.empty() || m.contiguous(), "a message of ", m.rows, "x", m.cols, " is not contiguous");
    if (m)
      list.push_back(
          {peer, const_cast<std::remove_const_t<T>*>(m.data), static_cast<std::size_t>(m.size()) * sizeof(T)});
  }
};

// How the messages of a group travel: MPI between hosts and CPUs (parallel/mpi.cpp), NCCL between GPUs
// (parallel/nccl.cuh).
class Transport {
 public:
  virtual ~Transport() = default;
  // Starts messages between the memories of devices: after the device's work so far, concurrently with its
  // later work.
  virtual void start(const Transfers& transfers) = 0;
  // The device's later work waits for all messages that were started.
  virtual void finish() = 0;
  // Messages between host memories; returns once all have arrived.
  virtual void exchange_on_host(const Transfers& transfers) = 0;
};

// Some ranks of the run, seen from one of them. A group of one needs no transport, nor does the Plan device.
struct Group {
  Index rank = 0, size = 1;
  Transport* transport = nullptr;
};

// This rank's place among all.
struct Ranks {
  Group all;        // divides gradients, optimizer state and weights
  Group sequence;   // divides a token stream; its ranks are neighbours in `all`
  Index lanes = 1;  // of a stream, within a process: see parallel/division.h
  bool shard_weights = false;

  Index streams() const { return all.size / sequence.size; }  // processed at the same time
  Index stream() const { return all.rank / sequence.size; }   // this rank's
};

// The rows of a matrix that a rank owns: its shard. Rank 0 has the largest one, so the plan of rank 0 is enough for all.
inline Rows shard(Index rows, const Group& group, Index rank) {
  return {ceil_div(rows * rank, group.size), ceil_div(rows * (rank + 1), group.size)};
}
inline Rows shard(Index rows, const Group& group) { return shard(rows, group, group.rank); }

}  // namespace streambp
