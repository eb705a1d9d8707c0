// Sequence parallelism around operations that need a few numbers of other tiles. Every rank computes some rows for each of its
// tiles of a chunk, and gets those of all tiles.
#pragma once

#include "parallel/division.h"
#include "parallel/exchange.h"

namespace streambp {

template <class Device>
class TileExchange {
 public:
  explicit TileExchange(Device& dev, const Group& ranks = {}) : dev_(dev), ranks_(ranks) {}

  Index rank() const { return ranks_.rank; }
  Index ranks() const { return ranks_.size; }

  // Memory for the rows of this rank's tiles, where all tiles have so many rows. A rank alone has all.
  template <class T>
  Matrix<T> own(Matrix<T> all, Index rows) {
    return ranks_.size == 1 ? all : allocate<T>(dev_, rows, all.cols, Kind::chunk);
  }

  // per_tile: rows for each kTile rows of the stream. Ranks take turns with tiles of dev.tile rows.
  template <class T>
  void share(Matrix<T> all, Matrix<T> own, Index per_tile) {
    if (ranks_.size == 1) return;
    const Index size = dev_.tile / kTile * per_tile;
    Transfers transfers;
    Index mine = 0;
    for (Index tile = 0; tile * size < all.rows; ++tile) {
      const Matrix<T> rows = all.slice(piece(tile, size, all.rows));
      const Index owner = tile % ranks_.size;
      for (Index peer = 0; peer < ranks_.size; ++peer) {
        if (owner == ranks_.rank && peer != owner) transfers.send(peer, own.slice({mine, mine + rows.rows}));
        if (owner != ranks_.rank && peer == owner) transfers.receive(peer, rows);
      }
      if (owner != ranks_.rank) continue;
      dev_.copy(rows, own.slice({mine, mine + rows.rows}));
      mine += rows.rows;
    }
    exchange(dev_, "share edges of tiles", ranks_, transfers);
  }

 private:
  Device& dev_;
  const Group ranks_;
};

}  // namespace streambp
