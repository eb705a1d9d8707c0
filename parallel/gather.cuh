// Collective operations on numbers in host memory.
#pragma once

#include "kernels/base/device.cuh"
#include "parallel/group.cuh"

namespace streambp {

// Every rank of the group gets the numbers of all of them, rank by rank.
template <class T>
std::vector<std::vector<T>> gather_on_host(const Group& group, const std::vector<T>& mine) {
  std::vector<std::vector<T>> all(static_cast<std::size_t>(group.size));
  all[static_cast<std::size_t>(group.rank)] = mine;
  if (group.size == 1) return all;
  auto to_all = [&](auto&& of_peer, auto own) {
    Transfers transfers;
    for (Index peer = 0; peer < group.size; ++peer) {
      if (peer == group.rank) continue;
      transfers.send(peer, own);
      transfers.receive(peer, of_peer(static_cast<std::size_t>(peer)));
    }
    group.transport->exchange_on_host(transfers);
  };
  std::vector<Index> counts(static_cast<std::size_t>(group.size));
  Index count = static_cast<Index>(mine.size());
  to_all([&](std::size_t peer) { return Matrix<Index>(&counts[peer], 1, 1); }, Matrix<Index>(&count, 1, 1));
  to_all(
      [&](std::size_t peer) {
        all[peer].resize(static_cast<std::size_t>(counts[peer]));
        return Matrix<T>(all[peer].data(), 1, counts[peer]);
      },
      Matrix<const T>(mine.data(), 1, count));
  return all;
}

// Copies a matrix, near or far, to the host of rank 0. Each rank holds its shard of the rows, or every rank holds all of
// them. The other ranks get an empty vector.
template <class T, class Device, class AnyMatrix>
std::vector<T> rows_on_first(Device& dev, const Group& group, AnyMatrix mine, Index rows) {
  if (mine.rows == rows) return group.rank == 0 ? to_host(dev, mine) : std::vector<T>();
  std::vector<T> values = to_host(dev, mine);
  Transfers transfers;
  if (group.rank > 0) {
    transfers.send(0, Matrix<T>(values.data(), mine.rows, mine.cols));
  } else {
    values.resize(static_cast<std::size_t>(rows * mine.cols));
    for (Index peer = 1; peer < group.size; ++peer) {
      transfers.receive(peer, Matrix<T>(values.data(), rows, mine.cols).slice(shard(rows, group, peer)));
    }
  }
  group.transport->exchange_on_host(transfers);
  return group.rank == 0 ? values : std::vector<T>();
}

// Gathers the row shards of a matrix on the hosts of all ranks.
template <class T, class Device, class AnyMatrix>
std::vector<T> rows_on_all(Device& dev, const Group& group, AnyMatrix mine) {
  std::vector<T> all;
  for (const auto& part : gather_on_host(group, to_host(dev, mine))) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace streambp
