// The gated delta rule, a recurrence: the mixer of some layers.
//
//   q, k, v     = silu(convolution(x (q|k|v)ᵀ))              kernels/short_convolution.cuh
//   β, g        = gates(x betaᵀ, x decayᵀ)                   kernels/delta_gates.cuh
//   mixed       = delta_rule(q, k, v, β, g)                  kernels/delta_rule.cuh
//   output      = (norm(mixed) * silu(x zᵀ)) oᵀ              a norm of each value head
//
// A row depends on the rows before it only through a state, a matrix for each value head, and through the last rows before it,
// which the convolution reads. So the causal summary is, for each tile, its edge (model/tile_edges.h) and the states after it.
// Where ranks share a stream, each computes the rule for its own heads, and all else for its own rows.
#pragma once

#include "kernels/activation.cuh"
#include "kernels/cached_convolution.cuh"
#include "kernels/delta_gates.cuh"
#include "kernels/delta_rule.cuh"
#include "kernels/norm.cuh"
#include "model/linear.h"
#include "model/parts.h"
#include "model/stream.h"
#include "model/summary.h"
#include "model/tensors.h"
#include "model/tile_edges.h"
#include "parallel/head_exchange.h"

namespace streambp {

// The activations of a chunk, in the order in which forward computes them.
template <class T>
struct DeltaActivations {
  Matrix<T> qkv, z, b, a;  // projections
  Matrix<T> convolved;     // q, k and v side by side
  Exchanged<T> q, k, v, beta;
  Exchanged<Accumulator<T>> decay;
  Exchanged<T> mixed;
  Matrix<T> normed, gated;
};

// What the rest of the program must know of a delta rule without computing it.
struct DeltaRule {
  static SummaryShape summary(const Config& c) {
    const Index state = c.delta_value_heads * c.delta_key_dim * c.delta_value_dim;
    return {.edge = c.convolution_width - 1, .columns = c.delta_width(), .state = state, .window = kTile};
  }
  // In generation, also the rows of a block that has begun: q, k, v, β and g of each.
  static Index cached_row(const Config& c) { return c.delta_width() + 2 * c.delta_value_heads; }
  static SummaryShape cache(const Config& c) {
    SummaryShape shape = summary(c);
    shape.state += (kDeltaBlock - 1) * cached_row(c);
    return shape;
  }
  static Index divisor(const Config& c) { return c.delta_key_heads; }
  // The columns of q, k and v, side by side.
  static std::array<Rows, 3> parts(const Config& c) {
    const Index keys = c.delta_key_width();
    return {Rows{0, keys}, Rows{keys, 2 * keys}, Rows{2 * keys, c.delta_width()}};
  }

  template <class T>
  static void parameters(Section<T>& rows, Layer<T>& w) {
    const Config& c = rows.c;
    const Modules& names = family_of(c).modules;
    const Index d = c.hidden, keys = c.delta_key_width(), values = c.delta_value_width(), heads = c.delta_value_heads,
                width = c.delta_width();
    rows.linear("attention", w.q, names.delta_q, {keys, d}, Init::normal, false);
    rows.linear("attention", w.k, names.delta_k, {keys, d}, Init::normal, false);
    rows.linear("attention", w.v, names.delta_v, {values, d}, Init::normal, false);
    rows.row(w.taps, names.convolution, ".weight", {width, c.convolution_width}, Init::normal).per_channel = true;
    rows.linear("attention", w.z, names.z, {values, d}, Init::normal, false);
    rows.linear("attention", w.beta, names.beta, {heads, d}, Init::normal, false);
    rows.linear("attention", w.decay, names.decay, {heads, d}, Init::normal, false);
    if (names.z == names.delta_q) {  // in files, all that belongs to a key head is together
      const Index group = heads / c.delta_key_heads, value = group * c.delta_value_dim;
      rows.take_turns(names.z, {c.delta_key_dim, c.delta_key_dim, value, value});
      rows.take_turns(names.beta, {group, group});
    }
    rows.row(w.a_log, names.a_log, "", {1, heads}, Init::log_uniform).wide = true;
    rows.row(w.dt_bias, names.dt_bias, "", {1, heads}, Init::ones);
    rows.row(w.output_norm.weight, names.output_norm, ".weight", {1, c.delta_value_dim}, Init::ones).wide = true;
    rows.linear("attention", w.o, names.delta_out, {d, values}, Init::residual, false);
  }

  // Its activations, of all that MixerActivations has.
  static auto& of(auto& all) { return all.delta; }

  template <class T, class F>
  static void for_each_activation(const Config& c, Index ranks, DeltaActivations<T>& a, F&& f) {
    using enum Part;
    const Index values = c.delta_value_width(), keys = c.delta_key_width(), heads = c.delta_value_heads;
    f(queries, a.qkv, c.delta_width(), View::own_rows);
    f(queries, a.z, values, View::own_rows);
    f(queries, a.b, heads, View::own_rows);
    f(queries, a.a, heads, View::own_rows);
    f(normed, a.convolved, c.delta_width(), View::own_rows);
    f(normed, a.beta.rows, heads, View::own_rows);
    f(normed, a.decay.rows, heads, View::own_rows);
    if (ranks > 1) {
      f(normed, a.q.heads, keys / ranks, View::all_rows);
      f(normed, a.k.heads, keys / ranks, View::all_rows);
      f(normed, a.v.heads, values / ranks, View::all_rows);
      f(normed, a.beta.heads, heads / ranks, View::all_rows);
      f(normed, a.decay.heads, heads / ranks, View::all_rows);
    }
    f(attention, a.mixed.heads, values / ranks, View::all_rows);
    f(attention, a.normed, values, View::own_rows);
    f(attention, a.gated, values, View::own_rows);
  }

  // Call when these matrices have memory.
  template <class Device, class T>
  static void complete(Device& dev, const Group& ranks, DeltaActivations<T>& a, const Config& c, Index own_rows) {
    HeadExchange exchange(dev, ranks);
    const auto [q, k, v] = parts(c);
    a.q.rows = a.convolved.columns(q), a.k.rows = a.convolved.columns(k), a.v.rows = a.convolved.columns(v);
    if (exchange.alone()) {
      for (Exchanged<T>* m : {&a.q, &a.k, &a.v, &a.beta}) m->heads = m->rows;
      a.decay.heads = a.decay.rows;
    }
    a.mixed = exchange.with_rows(a.mixed.heads, own_rows);
  }
};

template <class Device, class T>
class GatedDeltaRule {
 public:
  using A = Accumulator<T>;
  using Back = LinearBackward<T, A>;
  using Description = DeltaRule;
  using Activations = DeltaActivations<T>;
  using Chunk = MixerChunk<T, Activations>;

  GatedDeltaRule(Device& dev, const Config& c, const Layer<T>& weights, const Group& sequence)
      : dev(dev),
        c(c),
        w(weights),
        group(sequence),
        edges(dev, sequence, c.convolution_width - 1),
        exchange(dev, sequence),
        shape{exchange.share(c.delta_key_heads), exchange.share(c.delta_value_heads), c.delta_key_dim,
              c.delta_value_dim} {}

  // Writes the edges and the states of some rows.
  void summarise(const StreamRows& at, Matrix<T> x, const Summary<T>& past) {
    auto scope = dev.scope();
    Activations a;
    const auto part = [&]<class M>(Part part, Matrix<M>& matrix, Index columns, View view) {
      if (part == Part::attention) return;
      matrix = allocate<M>(dev, view == View::own_rows ? x.rows : at.rows.size(), columns, Kind::chunk);
    };
    Description::for_each_activation(c, group.size, a, part);
    Description::complete(dev, group, a, c, x.rows);
    project_inputs(a, x);
    write_edges(a, at, past);
    prepare(a, at, past);
    delta_rule<Device, T>(dev, {}, input_of(a), span(at, past));
  }

  // Reads the summary of earlier tiles and writes that of the chunk's tiles.
  void forward(const Chunk& chunk) {
    project(chunk.a, chunk.x);
    write_edges(chunk.a, chunk.at, chunk.past);
    prepare(chunk.a, chunk.at, chunk.past);
    mix(chunk);
  }

  // Repeats forward as far as backward needs it, and as far as it is not kept. The summary exists already.
  void recompute(const Chunk& chunk, const KeptParts& kept) {
    if (!kept.have(Part::queries)) project(chunk.a, chunk.x);
    if (!kept.have(Part::normed)) prepare(chunk.a, chunk.at, chunk.past);
    if (!kept.have(Part::attention)) mix(chunk);
    if (kept.have(Part::attention)) exchange.to_rows(chunk.a.mixed);
  }

  // y = residual + gated oᵀ
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) { linear(dev, y, a.gated, w.o, residual); }

  // In generation. The cache has the state before the last block of each sequence, and the rows of this block. They are
  // computed again with the new rows, so the results are those of training.
  void decode(const Activations& a, Matrix<T> x, const Summary<T>& cache, const SequenceRows& rows) {
    project(a, x);
    cached_convolution(dev, a.convolved, {{}, {}, a.qkv, w.taps}, cache.edges, rows);
    delta_gates(dev, a.beta.rows, a.decay.rows, gates_of(a));
    auto scope = dev.scope();
    const Index most = x.rows + kDeltaBlock - 1;  // of the rows of a sequence with those of its block
    const Started block = {matrix(most, a.convolved.cols), matrix(most, a.beta.rows.cols), matrix(most, a.normed.cols),
                           allocate<A>(dev, most, a.beta.rows.cols, Kind::chunk)};
    for (const SequencePiece& piece : rows.pieces) decode(a, block, cache.states.row(piece.sequence), piece, rows.mask);
    norm_and_gate(a);
  }

  // dy: of the output. Returns the gradient of the input. Adds to the gradients of the weights, and writes those of the edges
  // before each of its tiles and of the states before its first one. Later chunks must be done.
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Summary<A>& dpast, const Chunk& chunk) {
    const Activations& a = chunk.a;
    const auto dgated = matrix(dy.rows, a.gated.cols), dqkv = matrix(dy.rows, a.qkv.cols);
    linear_backward(dev, dgated, a.gated, {Back{g.o, dy, w.o}}, Update::assign);
    const auto [dz, dnormed] = activation_backward(dev, Mlp::swiglu, a.z, a.normed, dgated);
    const Matrix<T> dmixed = dgated;  // the same memory
    norm_backward<Device, T, A>(dev, heads_of(dmixed), g.output_norm, heads_of(dnormed), norm_input(a), Update::assign);
    const Matrix<T> da = a.a, db = a.b;  // the same memory
    rule_backward(g, da, db, dqkv, dmixed, dpast, chunk);
    const auto in = convolution_of(a, chunk.at, chunk.past);
    edges.backward(dpast.edges, chunk.at.rows, in, dqkv);
    convolution_backward<Device, T>(dev, g.taps, in, dqkv, dpast.edges);
    const auto dx = matrix(dy.rows, chunk.x.cols);
    const auto [q, k, v] = Description::parts(c);
    linear_backward(
        dev, dx, chunk.x,
        {Back{g.q, a.qkv.columns(q), w.q}, Back{g.k, a.qkv.columns(k), w.k}, Back{g.v, a.qkv.columns(v), w.v},
         Back{g.z, dz, w.z}, Back{g.beta, db, w.beta}, Back{g.decay, da, w.decay}},
        Update::assign);
    return dx;
  }

 private:
  void project_inputs(const Activations& a, Matrix<T> x) {
    const auto [q, k, v] = Description::parts(c);
    linear(dev, a.qkv.columns(q), x, w.q);
    linear(dev, a.qkv.columns(k), x, w.keys());
    linear(dev, a.qkv.columns(v), x, w.values());
    linear(dev, a.b, x, w.beta);
    linear(dev, a.a, x, w.decay_part());
  }
  void project(const Activations& a, Matrix<T> x) {
    project_inputs(a, x);
    linear(dev, a.z, x, w.z_part());
  }
  void write_edges(const Activations& a, const StreamRows& at, const Summary<T>& past) {
    edges.write(at.rows, past.slice(at.rows).edges, [&](Matrix<T> u) { convert(dev, u, edges.last_rows(a.qkv)); });
  }

  // What the rule reads.
  void prepare(const Activations& a, const StreamRows& at, const Summary<T>& past) {
    convolution(dev, a.convolved, convolution_of(a, at, past));
    delta_gates(dev, a.beta.rows, a.decay.rows, gates_of(a));
    for (const Exchanged<T>* m : {&a.q, &a.k, &a.v, &a.beta}) exchange.to_heads(*m);
    exchange.to_heads(a.decay);
  }
  void mix(const Chunk& chunk) {
    const Activations& a = chunk.a;
    delta_rule<Device, T>(dev, a.mixed.heads, input_of(a), span(chunk.at, chunk.past));
    exchange.to_rows(a.mixed);
    norm_and_gate(a);
  }
  void norm_and_gate(const Activations& a) {
    norm<Device, T, A>(dev, heads_of(a.normed), norm_input(a));
    activation(dev, Mlp::swiglu, a.gated, a.z, a.normed);
  }

  // The rows of a block that has begun, and new ones.
  struct Started {
    Matrix<T> qkv, beta, out;
    Matrix<A> decay;
    Started slice(Rows rows) const { return {qkv.slice(rows), beta.slice(rows), out.slice(rows), decay.slice(rows)}; }
  };
  // The new rows of a sequence. cached: its state, and the rows after it.
  void decode(const Activations& a, const Started& memory, A* cached, const SequencePiece& piece,
              const DocumentMask& mask) {
    const Index state = c.delta_value_heads * c.delta_key_dim * c.delta_value_dim, heads = c.delta_value_heads;
    const Matrix<A> states(cached, 1, state), started(cached + state, kDeltaBlock - 1, Description::cached_row(c));
    const Index end = piece.tokens.end, begin = piece.tokens.begin / kDeltaBlock * kDeltaBlock,
                old = piece.tokens.begin - begin, last = end / kDeltaBlock * kDeltaBlock;
    const auto [qkv, beta, out, decay] = memory.slice({0, end - begin});
    const auto join = [&]<class M>(Matrix<M> all, Index column, Matrix<M> added) {
      convert(dev, all.slice({0, old}), started.slice({0, old}).columns(column, all.cols));
      convert(dev, all.slice({old, all.rows}), added.slice(piece.rows()));
      if (const Rows rest = {std::max(last, begin) - begin, all.rows}; rest.size() > 0)
        convert(dev, started.slice({0, rest.size()}).columns(column, all.cols), all.slice(rest));
    };
    join(qkv, 0, a.convolved), join(beta, qkv.cols, a.beta.rows), join(decay, qkv.cols + heads, a.decay.rows);
    const auto [q, k, v] = Description::parts(c);
    for (const Rows rows : {Rows{begin, last}, Rows{std::max(begin, last), end}}) {  // whole blocks, and the rest
      if (rows.size() <= 0) continue;
      const auto part = [&](auto m) { return m.slice({rows.begin - begin, rows.end - begin}); };
      const Matrix<T> all = part(qkv);
      delta_rule<Device, T>(dev, part(out), {all.columns(q), all.columns(k), all.columns(v), part(beta), part(decay)},
                            {rows, mask.key_begin, shape, states, true});
    }
    convert(dev, a.mixed.rows.slice(piece.rows()), out.slice({old, out.rows}));
  }

  // From the gradient of the rule's output to those of what the convolution and the gates read.
  void rule_backward(const Layer<A>& g, Matrix<T> da, Matrix<T> db, Matrix<T> dconvolved, Matrix<T> dmixed,
                     const Summary<A>& dpast, const Chunk& chunk) {
    auto scope = dev.scope();
    const Activations& a = chunk.a;
    const Index rows = chunk.at.rows.size(), heads = c.delta_value_heads;
    const auto [q, k, v] = Description::parts(c);
    const Exchanged<T> dout = exchange.with_heads(dmixed, rows), dq = exchange.with_heads(dconvolved.columns(q), rows),
                       dk = exchange.with_heads(dconvolved.columns(k), rows),
                       dv = exchange.with_heads(dconvolved.columns(v), rows);
    const Exchanged<A> dbeta = exchange.with_heads(allocate<A>(dev, dmixed.rows, heads, Kind::chunk), rows),
                       ddecay = exchange.with_heads(allocate<A>(dev, dmixed.rows, heads, Kind::chunk), rows);
    exchange.to_heads(dout);
    delta_rule_backward<Device, T>(dev, {dq.heads, dk.heads, dv.heads, dbeta.heads, ddecay.heads}, dpast.states,
                                   dout.heads, input_of(a), span(chunk.at, chunk.past));
    for (const Exchanged<T>* m : {&dq, &dk, &dv}) exchange.to_rows(*m);
    exchange.to_rows(dbeta), exchange.to_rows(ddecay);
    delta_gates_backward(dev, da, db, g.a_log, g.dt_bias, dbeta.rows, ddecay.rows, gates_of(a));
  }

  DeltaInput<T> input_of(const Activations& a) const {
    return {a.q.heads, a.k.heads, a.v.heads, a.beta.heads, a.decay.heads};
  }
  DeltaSpan<A> span(const StreamRows& at, const Summary<T>& past) const {
    return {at.rows, at.mask.key_begin, shape, past.states};
  }
  DeltaGates<T> gates_of(const Activations& a) const {
    return {a.a, a.b, w.a_log, w.dt_bias, A(c.doubles_beta ? 2 : 1)};
  }
  ConvolutionChunk<T> convolution_of(const Activations& a, const StreamRows& at, const Summary<T>& past) const {
    return edges.chunk({}, {}, a.qkv, w.taps, past.edges, at);
  }
  // A row for each value head.
  Matrix<T> heads_of(Matrix<T> x) const { return x.reshape(c.delta_value_dim); }
  NormInput<T, A> norm_input(const Activations& a) const {
    const double eps = c.output_norm_eps > 0 ? c.output_norm_eps : c.norm_eps;
    return {heads_of(a.mixed.rows), w.output_norm, {.eps = eps}, c.delta_value_heads};
  }
  Matrix<T> matrix(Index rows, Index cols) { return allocate<T>(dev, rows, cols, Kind::chunk); }

  Device& dev;
  const Config& c;
  const Layer<T>& w;
  const Group group;
  TileEdges<Device, T> edges;
  HeadExchange<Device> exchange;
  const DeltaShape shape;  // of this rank's heads
};

}  // namespace streambp
