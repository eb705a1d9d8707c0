// The edges of tiles: a short convolution reads the last rows of the tile before a row's own. They are a part of the causal
// summary of layers with convolutions. Where ranks share a stream, each has all channels of its own rows, and edges of all
// tiles.
#pragma once

#include "kernels/short_convolution.cuh"
#include "model/stream.h"
#include "parallel/tile_exchange.h"

namespace streambp {

template <class Device, class T>
class TileEdges {
 public:
  using A = Accumulator<T>;

  TileEdges(Device& dev, const Group& sequence, Index size) : dev_(dev), exchange_(dev, sequence), size_(size) {}

  // A copy of the last rows of each whole tile.
  Matrix<T> last_rows(Matrix<T> x) {
    const Index tiles = x.rows / kTile, tile = kTile * x.cols, last = size_ * x.cols;
    const auto copy = allocate<T>(dev_, tiles * size_, x.cols, Kind::chunk);
    convert(dev_, copy.reshape(last), x.slice({0, tiles * kTile}).reshape(tile).columns(tile - last, last));
    return copy;
  }

  // Calls write(edges) with memory for the edges of this rank's tiles, and shares them. of_chunk: those of all its tiles.
  template <class F>
  void write(Rows rows, Matrix<T> of_chunk, F&& write) {
    auto scope = dev_.scope();
    const Index tiles = rows.size() / kTile;  // whole ones
    const Matrix<T> all = of_chunk.slice({0, tiles * size_});
    const Index own = Division{tiles * kTile, dev_.tile, exchange_.rank(), exchange_.ranks()}.own() / kTile;
    const Matrix<T> mine = exchange_.own(all, own * size_);
    write(mine);
    exchange_.share(all, mine, size_);
  }

  // Writes the gradients of the edges before each tile of a chunk, and shares them: no other tile contributes to them.
  void backward(Matrix<A> dedges, Rows rows, const ConvolutionChunk<T>& in, Matrix<T> dy) {
    auto scope = dev_.scope();
    const Index first = rows.begin / kTile, tiles = ceil_div(rows.size(), kTile);
    const auto all = allocate<A>(dev_, tiles * size_, dy.cols, Kind::chunk);
    const Matrix<A> mine = exchange_.own(all, ceil_div(dy.rows, kTile) * size_);
    convolution_edges_backward<Device, T>(dev_, mine, in, dy);
    exchange_.share(all, mine, size_);
    const Index none = first == 0 ? size_ : 0;  // the stream's first tile has no tile before it
    if (all.rows > none)
      dev_.copy(dedges.slice({(first - 1) * size_ + none, (first + tiles - 1) * size_}), all.slice({none, all.rows}));
  }

  // b, c: empty, or the gates
  ConvolutionChunk<T> chunk(Matrix<T> b, Matrix<T> c, Matrix<T> x, Matrix<T> taps, Matrix<T> edges,
                            const StreamRows& at) const {
    return {b, c, x, taps, edges, at.mask.key_begin, at.rows.begin, dev_.tile, exchange_.rank(), exchange_.ranks()};
  }

 private:
  Device& dev_;
  TileExchange<Device> exchange_;
  const Index size_;  // rows of an edge
};

}  // namespace streambp
