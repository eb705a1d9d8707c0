// Collective operations on devices.
//
//   exchange      messages between the ranks of a group: started, and finished
//   shared_rows   the messages by which every rank gets the rows of a matrix that the others own
#pragma once

#include "parallel/gather.h"

namespace streambp {

inline double bytes_sent(const Transfers& transfers) {
  double sum = 0;
  for (const Transfer& m : transfers.sends) sum += static_cast<double>(m.bytes);
  return sum;
}

// The device can do other work before finish_exchange, which finishes all exchanges of the group.
template <class Device>
void start_exchange(Device& dev, const char* name, const Group& group, const Transfers& transfers) {
  auto op = dev.operation(name, 0, 0, bytes_sent(transfers));
  if constexpr (Device::computes) group.transport->start(transfers);
}
template <class Device>
void finish_exchange(Device& dev, const char* name, const Group& group) {
  auto op = dev.operation(name, 0, 0);
  if constexpr (Device::computes) group.transport->finish();
}
template <class Device>
void exchange(Device& dev, const char* name, const Group& group, const Transfers& transfers) {
  auto op = dev.operation(name, 0, 0, bytes_sent(transfers));
  if constexpr (Device::computes) group.transport->start(transfers), group.transport->finish();
}

// Every rank has its shard of the rows of a matrix, and gets the others. Adds to other transfers.
template <class T>
Transfers shared_rows(const Group& group, Matrix<T> m, Transfers transfers = {}) {
  for (Index peer = 0; peer < group.size; ++peer) {
    if (peer == group.rank) continue;
    transfers.send(peer, m.slice(shard(m.rows, group)));
    transfers.receive(peer, m.slice(shard(m.rows, group, peer)));
  }
  return transfers;
}

}  // namespace streambp
