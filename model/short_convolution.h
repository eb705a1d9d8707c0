// A gated short convolution, the mixer of some layers.
//
//   b, c, x   = projections of the input
//   convolved = c * convolution(b * x)          kernels/short_convolution.cuh
//   output    = convolved oᵀ
//
// A row reads only a few rows before it. So the causal summary is the edge of each tile: b * x of the tile's last rows.
// model/tile_edges.h says how ranks share it.
#pragma once

#include "kernels/cached_convolution.cuh"
#include "model/linear.h"
#include "model/parts.h"
#include "model/stream.h"
#include "model/summary.h"
#include "model/tensors.h"
#include "model/tile_edges.h"

namespace streambp {

// The activations of a chunk. Among the parts of a layer, b, c and x are its `queries` and `convolved` is its `attention`.
template <class T>
struct ConvolutionActivations {
  Matrix<T> b, c, x;
  Matrix<T> convolved;
};

// What the rest of the program must know of a short convolution without computing it.
struct Convolution {
  static SummaryShape summary(const Config& c) {
    return {.edge = c.convolution_width - 1, .columns = c.hidden, .window = kTile};
  }
  static SummaryShape cache(const Config& c) { return summary(c); }
  static Index divisor(const Config&) { return 0; }  // any number of ranks

  template <class T>
  static void parameters(Section<T>& rows, Layer<T>& w) {
    const Config& c = rows.c;
    const Modules& names = family_of(c).modules;
    const TensorShape square = {c.hidden, c.hidden};
    for (Linear<T>* part : {&w.b, &w.c, &w.x})
      rows.linear("attention", *part, names.convolution_in, square, Init::normal, false);
    rows.row(w.taps, names.convolution, ".weight", {c.hidden, c.convolution_width}, Init::normal).per_channel = true;
    rows.linear("attention", w.o, names.convolution_out, square, Init::residual, false);
  }

  // Its activations, of all that MixerActivations has.
  static auto& of(auto& all) { return all.convolution; }

  template <class T, class F>
  static void for_each_activation(const Config& c, Index, ConvolutionActivations<T>& a, F&& f) {
    for (Matrix<T>* m : {&a.b, &a.c, &a.x}) f(Part::queries, *m, c.hidden, View::own_rows);
    f(Part::attention, a.convolved, c.hidden, View::own_rows);
  }
  template <class Device, class T>
  static void complete(Device&, const Group&, ConvolutionActivations<T>&, const Config&, Index) {}
};

template <class Device, class T>
class ShortConvolution {
 public:
  using A = Accumulator<T>;
  using Back = LinearBackward<T, A>;
  using Description = Convolution;
  using Activations = ConvolutionActivations<T>;
  using Chunk = MixerChunk<T, Activations>;

  ShortConvolution(Device& dev, const Config& c, const Layer<T>& weights, const Group& sequence)
      : dev(dev), c(c), w(weights), edges(dev, sequence, c.convolution_width - 1) {}

  // Writes the edges of some rows. Only the last rows of each tile are needed.
  void summarise(const StreamRows& at, Matrix<T> x, const Summary<T>& past) {
    auto scope = dev.scope();
    const Matrix<T> last = edges.last_rows(x);
    const auto b = matrix(last.rows), projected = matrix(last.rows);
    linear(dev, b, last, w.b);
    linear(dev, projected, last, w.x_part());
    edges.write(at.rows, past.slice(at.rows).edges, [&](Matrix<T> u) { convolution_inputs(dev, u, b, projected); });
  }

  // Reads the edges of earlier tiles and writes those of the chunk's tiles.
  void forward(const Chunk& chunk) {
    project(chunk.a, chunk.x);
    edges.write(chunk.at.rows, chunk.past.slice(chunk.at.rows).edges, [&](Matrix<T> u) {
      convolution_inputs(dev, u, edges.last_rows(chunk.a.b), edges.last_rows(chunk.a.x));
    });
    convolution(dev, chunk.a.convolved, rows_of(chunk));
  }

  // y = residual + convolved oᵀ
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) { linear(dev, y, a.convolved, w.o, residual); }

  // In generation, where the cache has the last rows of each sequence.
  void decode(const Activations& a, Matrix<T> x, const Summary<T>& cache, const SequenceRows& rows) {
    project(a, x);
    cached_convolution(dev, a.convolved, {a.b, a.c, a.x, w.taps}, cache.edges, rows);
  }

  // Repeats forward as far as backward needs it, and as far as it is not kept. The edges exist already.
  void recompute(const Chunk& chunk, const KeptParts& kept) {
    if (!kept.have(Part::queries)) project(chunk.a, chunk.x);
    if (!kept.have(Part::attention)) convolution(dev, chunk.a.convolved, rows_of(chunk));
  }

  // dy: of the output. Returns the gradient of the input. Adds to the gradients of the weights, and writes those of the edges
  // before each of its tiles: no other tile contributes to them. Later chunks must be done: they complete those of its own.
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Summary<A>& dpast, const Chunk& chunk) {
    const Activations& a = chunk.a;
    const auto dconvolved = matrix(dy.rows);
    linear_backward(dev, dconvolved, a.convolved, {Back{g.o, dy, w.o}}, Update::assign);
    edges.backward(dpast.edges, chunk.at.rows, rows_of(chunk), dconvolved);
    convolution_backward<Device, T>(dev, g.taps, rows_of(chunk), dconvolved, dpast.edges);
    const Matrix<T> db = a.b, dc = a.c, dx = a.x;  // the same memory
    const auto dinput = matrix(dy.rows);
    linear_backward(dev, dinput, chunk.x, {Back{g.b, db, w.b}, Back{g.c, dc, w.c}, Back{g.x, dx, w.x}}, Update::assign);
    return dinput;
  }

 private:
  void project(const Activations& a, Matrix<T> x) {
    linear(dev, a.b, x, w.b);
    linear(dev, a.c, x, w.c_part());
    linear(dev, a.x, x, w.x_part());
  }

  ConvolutionChunk<T> rows_of(const Chunk& chunk) const {
    return edges.chunk(chunk.a.b, chunk.a.c, chunk.a.x, w.taps, chunk.past.edges, chunk.at);
  }
  Matrix<T> matrix(Index rows) { return allocate<T>(dev, rows, c.hidden, Kind::chunk); }

  Device& dev;
  const Config& c;
  const Layer<T>& w;
  TileEdges<Device, T> edges;
};

}  // namespace streambp
