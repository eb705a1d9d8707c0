// Sequence parallelism around attention. Ranks that share a stream each have some rows of a chunk, with all heads. Attention
// mixes rows and treats every head alone. So the ranks exchange rows for heads before it, and heads for rows after it:
//
//               head 0  head 1                   head 0  head 1
//   tile 0       r0      r0                       r0      r1
//   tile 1       r1      r1      -- to_heads ->   r0      r1
//   tile 2       r0      r0      <- to_rows  --   r0      r1
//   tile 3       r1      r1                       r0      r1
//
// A rank alone has all rows and all heads: the two views are the same matrix, and nothing is exchanged.
#pragma once

#include "parallel/division.h"
#include "parallel/exchange.h"

namespace streambp {

// Queries, keys, values, or outputs of attention for a chunk.
template <class T>
struct Exchanged {
  Matrix<T> rows;   // this rank's rows, all heads
  Matrix<T> heads;  // all rows, this rank's heads
};

template <class Device>
class HeadExchange {
 public:
  explicit HeadExchange(Device& dev, const Group& ranks = {}) : dev_(dev), ranks_(ranks) {}

  bool alone() const { return ranks_.size == 1; }

  // This rank's share of the model's heads, or of their columns.
  Index share(Index all) const { return all / ranks_.size; }
  template <class T>
  Matrix<T> share(Matrix<T> of_heads) const {
    return of_heads.columns(ranks_.rank * share(of_heads.cols), share(of_heads.cols));
  }

  // Memory for the other view of a matrix. `rows`: of that view.
  template <class T>
  Exchanged<T> with_heads(Matrix<T> own_rows, Index rows) {
    return {own_rows, alone() ? own_rows : allocate<T>(dev_, rows, share(own_rows.cols), Kind::chunk)};
  }
  template <class T>
  Exchanged<T> with_rows(Matrix<T> heads, Index rows) {
    return {alone() ? heads : allocate<T>(dev_, rows, heads.cols * ranks_.size, Kind::chunk), heads};
  }

  template <class T>
  void to_heads(const Exchanged<T>& m) {
    if (alone()) return;
    const Division chunk = division(m);
    auto scope = dev_.scope();
    Transfers transfers;
    for (Index peer = 0; peer < ranks_.size; ++peer) {
      const Matrix<T> part = heads_of(m, peer);
      if (peer == ranks_.rank) {
        for_each_tile(chunk, peer, [&](Rows own, Rows all) { convert(dev_, m.heads.slice(all), part.slice(own)); });
        continue;
      }
      const auto packed = allocate<T>(dev_, m.rows.rows, m.heads.cols, Kind::chunk);
      convert(dev_, packed, part);
      for_each_tile(chunk, ranks_.rank, [&](Rows own, Rows) { transfers.send(peer, packed.slice(own)); });
      for_each_tile(chunk, peer, [&](Rows, Rows all) { transfers.receive(peer, m.heads.slice(all)); });
    }
    exchange(dev_, "rows to heads", ranks_, transfers);
  }

  template <class T>
  void to_rows(const Exchanged<T>& m) {
    if (alone()) return;
    const Division chunk = division(m);
    auto scope = dev_.scope();
    Transfers transfers;
    std::vector<Matrix<T>> packed;
    for (Index peer = 0; peer < ranks_.size; ++peer) {
      packed.push_back(allocate<T>(dev_, peer == ranks_.rank ? 0 : m.rows.rows, m.heads.cols, Kind::chunk));
      if (peer == ranks_.rank) continue;
      for_each_tile(chunk, peer, [&](Rows, Rows all) { transfers.send(peer, m.heads.slice(all)); });
      for_each_tile(chunk, ranks_.rank, [&](Rows own, Rows) { transfers.receive(peer, packed.back().slice(own)); });
    }
    exchange(dev_, "heads to rows", ranks_, transfers);
    for (Index peer = 0; peer < ranks_.size; ++peer) {
      const Matrix<T> part = heads_of(m, peer);
      if (peer == ranks_.rank) {
        for_each_tile(chunk, peer, [&](Rows own, Rows all) { convert(dev_, part.slice(own), m.heads.slice(all)); });
      } else {
        convert(dev_, part, packed[peer]);
      }
    }
  }

 private:
  // Chunks begin with a tile of rank 0.
  template <class T>
  Division division(const Exchanged<T>& m) const {
    return {m.heads.rows, dev_.tile, ranks_.rank, ranks_.size};
  }

  // The columns of this rank's rows that belong to the heads of a rank.
  template <class T>
  static Matrix<T> heads_of(const Exchanged<T>& m, Index rank) {
    return m.rows.columns(rank * m.heads.cols, m.heads.cols);
  }

  // Calls f(tile, rows) for the tiles of a chunk that belong to a rank: their place among the rank's rows, and in the chunk.
  template <class F>
  static void for_each_tile(const Division& chunk, Index rank, F&& f) {
    for (Index begin = rank * chunk.tile, own = 0; begin < chunk.rows; begin += chunk.ranks * chunk.tile) {
      const Rows rows = {begin, std::min(begin + chunk.tile, chunk.rows)};
      f(Rows{own, own + rows.size()}, rows);
      own += rows.size();
    }
  }

  Device& dev_;
  const Group ranks_;
};

}  // namespace streambp
