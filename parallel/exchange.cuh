// Collective operations on devices.
//
//   exchange      messages between the ranks of a group: started, and finished
//   shared_rows   the messages by which every rank gets the rows of a matrix that the others own
//   to_heads      sequence parallelism: a rank has some rows of a chunk and all heads; it gets all rows and some heads
//   to_rows       the way back
#pragma once

#include "kernels/elementwise.cuh"
#include "parallel/division.cuh"
#include "parallel/gather.cuh"

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

// Every rank has its shard of the rows of each matrix, and gets the others.
template <class T>
Transfers shared_rows(const Group& group, const std::vector<Matrix<T>>& matrices) {
  Transfers transfers;
  for (const Matrix<T>& m : matrices) {
    for (Index peer = 0; peer < group.size; ++peer) {
      if (peer == group.rank) continue;
      transfers.send(peer, m.slice(shard(m.rows, group)));
      transfers.receive(peer, m.slice(shard(m.rows, group, peer)));
    }
  }
  return transfers;
}

// Calls f(tile, rows) for the tiles of a chunk that belong to a rank: their place among the rank's rows, and in the chunk.
template <class F>
void for_each_tile(const Division& chunk, Index rank, F&& f) {
  for (Index begin = rank * chunk.tile, own = 0; begin < chunk.rows; begin += chunk.ranks * chunk.tile) {
    const Rows rows = {begin, std::min(begin + chunk.tile, chunk.rows)};
    f(Rows{own, own + rows.size()}, rows);
    own += rows.size();
  }
}

// The columns of `rows` that belong to the heads of a rank.
template <class T>
Matrix<T> heads_of(Matrix<T> rows, const Group& group, Index rank) {
  const Index width = rows.cols / group.size;
  return rows.columns(rank * width, width);
}

// rows: this rank's rows of a chunk, all heads. heads: all rows of the chunk, this rank's heads. In a group of one, both
// are the same matrix.
template <class Device, class T>
void to_heads(Device& dev, const Group& group, Matrix<T> heads, Matrix<T> rows, Index tile) {
  if (group.size == 1) return;
  const Division chunk = {heads.rows, tile, group.rank, group.size};
  auto scope = dev.scope();
  Transfers transfers;
  for (Index peer = 0; peer < group.size; ++peer) {
    const Matrix<T> part = heads_of(rows, group, peer);
    if (peer == group.rank) {
      for_each_tile(chunk, peer, [&](Rows own, Rows all) { convert(dev, heads.slice(all), part.slice(own)); });
      continue;
    }
    const auto packed = allocate<T>(dev, rows.rows, heads.cols, Kind::chunk);
    convert(dev, packed, part);
    for_each_tile(chunk, group.rank, [&](Rows own, Rows) { transfers.send(peer, packed.slice(own)); });
    for_each_tile(chunk, peer, [&](Rows, Rows all) { transfers.receive(peer, heads.slice(all)); });
  }
  exchange(dev, "rows to heads", group, transfers);
}

template <class Device, class T>
void to_rows(Device& dev, const Group& group, Matrix<T> rows, Matrix<T> heads, Index tile) {
  if (group.size == 1) return;
  const Division chunk = {heads.rows, tile, group.rank, group.size};
  auto scope = dev.scope();
  Transfers transfers;
  std::vector<Matrix<T>> packed;
  for (Index peer = 0; peer < group.size; ++peer) {
    packed.push_back(allocate<T>(dev, peer == group.rank ? 0 : rows.rows, heads.cols, Kind::chunk));
    if (peer == group.rank) continue;
    for_each_tile(chunk, peer, [&](Rows, Rows all) { transfers.send(peer, heads.slice(all)); });
    for_each_tile(chunk, group.rank, [&](Rows own, Rows) { transfers.receive(peer, packed.back().slice(own)); });
  }
  exchange(dev, "heads to rows", group, transfers);
  for (Index peer = 0; peer < group.size; ++peer) {
    const Matrix<T> part = heads_of(rows, group, peer);
    if (peer == group.rank) {
      for_each_tile(chunk, peer, [&](Rows own, Rows all) { convert(dev, part.slice(own), heads.slice(all)); });
    } else {
      convert(dev, part, packed[static_cast<std::size_t>(peer)]);
    }
  }
}

}  // namespace streambp
