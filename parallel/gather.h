// Collective operations on numbers in host memory.
#pragma once

#include "kernels/base/device.cuh"
#include "parallel/group.h"

namespace streambp {

// Every rank of the group gets the numbers of all of them, rank by rank.
template <class T>
std::vector<std::vector<T>> gather_on_host(const Group& group, std::vector<T> numbers) {
  std::vector<std::vector<T>> all(group.size);
  const std::vector<T>& mine = all[group.rank] = std::move(numbers);
  if (group.size == 1) return all;
  auto to_all = [&](auto&& of_peer, auto own) {
    Transfers transfers;
    for (Index peer = 0; peer < group.size; ++peer) {
      if (peer == group.rank) continue;
      transfers.send(peer, own);
      transfers.receive(peer, of_peer(peer));
    }
    group.transport->exchange_on_host(transfers);
  };
  std::vector<Index> counts(group.size);
  Index count = std::ssize(mine);
  to_all([&](Index peer) { return Matrix<Index>(&counts[peer], 1, 1); }, Matrix<Index>(&count, 1, 1));
  to_all(
      [&](Index peer) {
        all[peer].resize(counts[peer]);
        return Matrix<T>(all[peer].data(), 1, counts[peer]);
      },
      Matrix<const T>(mine.data(), 1, count));
  return all;
}

// Calls f(numbers) on rank 0 for the rows of a matrix, near or far, in order and a few thousand at a time. Each rank holds
// its shard of the rows, or every rank holds all of them.
template <class T, class Device, class AnyMatrix, class F>
void rows_on_first(Device& dev, const Group& group, AnyMatrix mine, Index rows, F&& f) {
  const Index holders = mine.rows == rows ? 1 : group.size;
  for (Index holder = 0; holder < holders; ++holder) {
    const Index held = holders == 1 ? rows : shard(rows, group, holder).size();
    for (Index begin = 0; begin < held; begin += kFarRows) {
      const Rows block = {begin, least(begin + kFarRows, held)};
      std::vector<T> numbers;
      if (group.rank == holder) numbers = to_host(dev, mine.slice(block));
      if (holder > 0) {
        Transfers transfers;
        if (group.rank == holder) transfers.send(0, Matrix<T>(numbers.data(), block.size(), mine.cols));
        if (group.rank == 0) {
          numbers.resize(block.size() * mine.cols);
          transfers.receive(holder, Matrix<T>(numbers.data(), block.size(), mine.cols));
        }
        group.transport->exchange_on_host(transfers);
      }
      if (group.rank == 0) f(numbers);
    }
  }
}

// Gathers the row shards of a matrix on the hosts of all ranks.
template <class T, class Device, class AnyMatrix>
std::vector<T> rows_on_all(Device& dev, const Group& group, AnyMatrix mine) {
  std::vector<T> all;
  for (const auto& part : gather_on_host(group, to_host(dev, mine))) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace streambp
