// Causal softmax attention, the mixer of a transformer layer. x: the layer's input after its norm.
//
//   q, k, v  = x qᵀ, x kᵀ, x vᵀ            q and k with a norm where the model has one, and with RoPE
//   attended = attention(q, K, V)          the layer projects it and adds it to the residual stream (model.cuh)
//
// Row i attends to rows before it only through K and V, so these are what a chunk needs of the stream (its causal summary),
// and dK, dV are what a chunk hands to the chunks before it. Where ranks share a stream, each computes everything else
// for its own rows, and attention for its own heads.
#pragma once

#include "kernels/activation.cuh"
#include "kernels/attention.cuh"
#include "kernels/cached_attention.cuh"
#include "kernels/head_gates.cuh"
#include "kernels/norm.cuh"
#include "kernels/rope.cuh"
#include "kernels/sinks.cuh"
#include "model/parts.h"
#include "model/stream.h"
#include "model/summary.h"
#include "model/tensors.h"
#include "parallel/head_exchange.h"

namespace streambp {

// The RoPE frequencies of a layer's keys and queries.
struct LayerFrequencies {
  RopeFrequencies keys, queries;

  LayerFrequencies(const Config& c, double theta, const RopeScaling& scaling, Index head_dim = 0)
      : keys(rope_frequencies(head_dim > 0 ? head_dim : c.rotary_dim(), theta, scaling)) {
    keys.dim = head_dim > 0 ? head_dim : c.head_dim, keys.pairs = c.rope_pairs;
    for (double& frequency : keys.values) frequency = c.rope_reversed ? -frequency : frequency;
    queries = keys;
    queries.beta = scaling.query_beta, queries.length = scaling.original_length;
  }
};
// Those of a model's global and local layers.
struct Frequencies {
  LayerFrequencies global, local;

  explicit Frequencies(const Config& c)
      : global(c, c.rope_theta, c.rope_scaling, c.global_head_dim),
        local(c.local_rope_theta > 0 ? LayerFrequencies(c, c.local_rope_theta, {})
                                     : LayerFrequencies(c, c.rope_theta, c.rope_scaling)) {}
};

// The activations of a chunk, in the order in which forward computes them.
template <class T>
struct AttentionActivations {
  Matrix<T> k_projected, q_projected, v_projected;  // before their norms, only where they have one
  Exchanged<T> q;                                   // after RoPE
  Exchanged<T> attended;
  Matrix<Accumulator<T>> lse;  // log Σ exp of the attention scores, a column for each of this rank's heads
  Matrix<T> gate, gated;       // only where the model has a gate: attended * σ(gate)
};

// What the rest of the program must know of softmax attention without computing it.
struct Attention {
  AttentionShape shape;
  bool has_values = true;  // of their own

  // In a layer with a window, a block needs K and V of the window before it, and of the tile that holds its first key.
  SummaryShape summary(const Config&) const {
    constexpr Index tile_of_keys = 128;
    if (shape.window == 0) return {.columns = shape.kv_width()};
    return {.columns = shape.kv_width(), .window = round_up(shape.window + tile_of_keys, kTile)};
  }

  SummaryShape cache(const Config& c) const { return summary(c); }
  Index gates(const Config& c) const { return c.gates_heads ? c.heads : shape.q_width(); }
  // Numbers of ranks that divide it can share a stream.
  Index divisor(const Config&) const { return shape.kv_heads; }

  template <class T>
  void parameters(Section<T>& rows, Layer<T>& w) const {
    const Config& c = rows.c;
    const Modules& names = family_of(c).modules;
    const Index d = c.hidden, dim = shape.head_dim, q = shape.q_width(), kv = shape.kv_width();
    rows.linear("attention", w.q, names.q, {q, d}, Init::normal, c.qkv_bias);
    const bool own_gate = *names.attention_gate;
    if (c.attention_gate)
      rows.linear("attention", w.attention_gate, own_gate ? names.attention_gate : names.q, {gates(c), d}, Init::normal,
                  c.qkv_bias);
    if (c.attention_gate && !own_gate)  // in files, the queries and the gate of each head follow each other
      rows.take_turns(names.q, {dim, dim});
    rows.linear("attention", w.k, names.k, {kv, d}, Init::normal, c.qkv_bias);
    if (has_values) rows.linear("attention", w.v, names.v, {kv, d}, Init::normal, c.qkv_bias);
    if (c.has_qk_norm()) {
      const bool own = c.qk_norm == QkNorm::own_weights, all = own || c.qk_norm == QkNorm::all;
      // Where scores are not scaled, this norm does it.
      const Init init = c.score_scale == 1 ? Init::inverse_root : Init::ones;
      rows.norm(w.q_norm, names.q_norm, all ? q : dim, Norm::rms, init, own ? c.heads : 0);
      rows.norm(w.k_norm, names.k_norm, all ? kv : dim, Norm::rms, Init::ones, own ? shape.kv_heads : 0);
    }
    if (c.sinks) rows.row(w.sinks, names.sinks, "", {1, c.heads}, Init::zeros);
    rows.linear("attention", w.o, names.o, {d, q}, Init::residual, c.output_bias);
  }

  // Its activations, of all that MixerActivations has.
  static auto& of(auto& all) { return all.attention; }

  // By part. Calls f(part, matrix, columns, view).
  template <class T, class F>
  void for_each_activation(const Config& c, Index ranks, AttentionActivations<T>& a, F&& f) const {
    using enum Part;
    const Index width = shape.q_width();
    if (c.has_qk_norm()) {
      f(queries, a.k_projected, shape.kv_width(), View::own_rows);
      f(queries, a.q_projected, width, View::own_rows);
    }
    if (c.value_norm && has_values) f(queries, a.v_projected, shape.kv_width(), View::own_rows);
    f(c.has_qk_norm() ? normed : queries, a.q.heads, width / ranks, View::all_rows);
    f(attention, a.attended.heads, width / ranks, View::all_rows);
    f(attention, a.lse, c.heads / ranks, View::all_rows);
    if (!c.attention_gate) return;
    f(queries, a.gate, gates(c), View::own_rows);
    f(attention, a.gated, width, View::own_rows);
  }

  // Call when these matrices have memory.
  template <class Device, class T>
  static void complete(Device& dev, const Group& ranks, AttentionActivations<T>& a, const Config&, Index own_rows) {
    HeadExchange exchange(dev, ranks);
    for (Exchanged<T>* m : {&a.q, &a.attended}) *m = exchange.with_rows(m->heads, own_rows);
  }
};

template <class Device, class T>
class SoftmaxAttention {
 public:
  using A = Accumulator<T>;
  using Back = LinearBackward<T, A>;
  using Description = Attention;
  using Activations = AttentionActivations<T>;
  using Chunk = MixerChunk<T, Activations>;

  SoftmaxAttention(Device& dev, const Config& c, const Frequencies& frequencies, Index layer, const Layer<T>& weights,
                   const Group& sequence)
      : dev(dev),
        c(c),
        w(weights),
        exchange(dev, sequence),
        shape(c.attention(layer)),
        has_values(c.has_values(layer)),
        rotates(c.has_rope(layer)),
        norm_after_rope(c.qk_norm == QkNorm::heads_after_rope),
        frequencies(c.has_local_rope(layer) ? frequencies.local : frequencies.global) {
    shape.heads = exchange.share(shape.heads), shape.kv_heads = exchange.share(shape.kv_heads);
  }

  // --- Forward ---

  // Reads K and V of earlier rows and writes those of the chunk's rows.
  void forward(const Chunk& chunk) {
    keys_values(chunk.a, chunk.past.slice(chunk.at.rows), chunk.x, chunk.at.positions);
    queries(chunk.a, chunk.x, chunk.at.positions);
    attend(chunk);
  }

  // Writes K and V of some rows.
  void summarise(const StreamRows& at, Matrix<T> x, const Summary<T>& past) {
    Activations a;
    const Index width = w.k.outputs();
    if (c.has_qk_norm()) a.k_projected = matrix(x.rows, width);
    if (c.value_norm && has_values) a.v_projected = matrix(x.rows, width);
    keys_values(a, past.slice(at.rows), x, at.positions);
  }

  // y = residual + attended oᵀ
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) {
    linear(dev, y, c.attention_gate ? a.gated : a.attended.rows, w.o, residual);
  }

  // In generation: appends the K and V of a chunk to the cache of its sequences, and attends to it.
  void decode(const Activations& a, Matrix<T> x, const Summary<T>& cache, const SequenceRows& rows) {
    const Matrix<const std::int32_t> positions = rows.index.positions;
    const Summary<T> kv = {matrix(x.rows, cache.k.cols), matrix(x.rows, cache.v.cols)};
    keys_values(a, kv, x, positions);
    queries(a, x, positions);
    append_to_cache(dev, KeysValues<T>{cache.k, cache.v}, {kv.k, kv.v}, rows);
    const AttentionOutput<T> out = {a.attended.rows, a.lse};
    cached_attention(dev, out, {a.q.rows, cache.k, cache.v}, rows, shape);
    if (c.sinks) add_sinks(dev, out, w.sinks);
    gate(a);
  }

  // Repeats forward as far as backward needs it, and as far as it is not kept. K and V exist already.
  void recompute(const Chunk& chunk, const KeptParts& kept) {
    if (c.has_qk_norm() && !kept.have(Part::queries)) {
      project_one(chunk.a.k_projected, chunk.x, w.keys(), chunk.at.positions, frequencies.keys);
      if (chunk.a.v_projected) linear(dev, chunk.a.v_projected, chunk.x, w.values());
    }
    queries(chunk.a, chunk.x, chunk.at.positions, kept);
    attend(chunk, kept);
  }

  // --- Backward ---

  // dy: of the output. Returns dx. Adds to the gradients of the weights, and to dK, dV of all rows up to the chunk's end.
  // Later chunks must be done: only then are dK, dV of the chunk's own rows complete.
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Summary<A>& dkv, const Chunk& chunk) {
    const Activations& a = chunk.a;
    Matrix<T> dattended = matrix(dy.rows, a.attended.rows.cols);
    linear_backward(dev, dattended, c.attention_gate ? a.gated : a.attended.rows, {Back{g.o, dy, w.o}}, Update::assign);
    if (c.attention_gate) dattended = gate_backward(a, dattended);
    const Matrix<T> dq = matrix(dattended.rows, dattended.cols);
    attention_gradient(dq, dattended, dkv, g.sinks, chunk);
    const Summary<A> dkv_of_chunk = dkv.slice(chunk.at.rows);  // complete now
    const Matrix<T> dk = keys_gradient(dkv_of_chunk.k, chunk), dv = own_rows(dkv_of_chunk.v, chunk.x.rows);
    const auto rotate_queries_back = [&] { rope_backward(dq, dq, chunk.at.positions, frequencies.queries); };
    if (!norm_after_rope) rotate_queries_back();
    if (c.has_qk_norm()) {
      qk_norm_backward(dq, g.q_norm, a.q_projected, w.q_norm);
      qk_norm_backward(dk, g.k_norm, a.k_projected, w.k_norm);
    }
    if (c.value_norm) qk_norm_backward(dv, {}, values_of(a), {});
    if (!has_values) add(dev, dk, dv);
    if (norm_after_rope) rotate_queries_back(), rope_backward(dk, dk, chunk.at.positions, frequencies.keys);
    const Matrix<T> dx = matrix(chunk.x.rows, chunk.x.cols);
    if (c.attention_gate) {
      linear_backward(dev, dx, chunk.x, {Back{g.q, dq, w.q}, Back{g.attention_gate, a.gate, w.attention_gate}},
                      Update::assign);
      linear_backward(dev, dx, chunk.x, {Back{g.k, dk, w.k}, Back{g.v, dv, w.v}}, Update::add);
    } else if (has_values) {
      linear_backward(dev, dx, chunk.x, {Back{g.q, dq, w.q}, Back{g.k, dk, w.k}, Back{g.v, dv, w.v}}, Update::assign);
    } else {
      linear_backward(dev, dx, chunk.x, {Back{g.q, dq, w.q}, Back{g.k, dk, w.k}}, Update::assign);
    }
    return dx;
  }

 private:
  void keys_values(const Activations& a, const Summary<T>& kv, Matrix<T> x, Matrix<const std::int32_t> positions) {
    auto scope = dev.scope();
    const Exchanged<T> k = exchange.with_rows(kv.k, x.rows), v = exchange.with_rows(kv.v, x.rows);
    const Matrix<T> projected = c.has_qk_norm() ? a.k_projected : k.rows;
    project_one(projected, x, w.keys(), positions, frequencies.keys);
    norm_and_rope(k.rows, projected, w.k_norm, positions, frequencies.keys);
    if (has_values) linear(dev, c.value_norm ? a.v_projected : v.rows, x, w.values());
    if (c.value_norm) qk_norm(v.rows, values_of(a), {});
    exchange.to_heads(k), exchange.to_heads(v);
  }
  void queries(const Activations& a, Matrix<T> x, Matrix<const std::int32_t> positions,
               const KeptParts& kept = KeptParts::nothing()) {
    const Matrix<T> projected = c.has_qk_norm() ? a.q_projected : a.q.rows;
    if (!kept.have(Part::queries)) {
      project_one(projected, x, w.q, positions, frequencies.queries);
      if (c.attention_gate) linear(dev, a.gate, x, w.gate_of_attention());
    }
    if (kept.have(c.has_qk_norm() ? Part::normed : Part::queries)) return;
    norm_and_rope(a.q.rows, projected, w.q_norm, positions, frequencies.queries);
    exchange.to_heads(a.q);
  }

  void attend(const Chunk& chunk, const KeptParts& kept = KeptParts::nothing()) {
    if (!kept.have(Part::attention)) {
      attention(dev, output_of(chunk), input_of(chunk), span(chunk));
      if (c.sinks) add_sinks(dev, output_of(chunk), sinks());
    }
    exchange.to_rows(chunk.a.attended);
    gate(chunk.a);
  }
  void gate(const Activations& a) {
    if (c.gates_heads) return gate_heads(dev, a.gated, a.gate, a.attended.rows);
    if (c.attention_gate) activation(dev, Mlp::sigmoid_gate, a.gated, a.gate, a.attended.rows);
  }
  // From here on, the memory of the gate holds its gradient.
  Matrix<T> gate_backward(const Activations& a, Matrix<T> dgated) {
    if (c.gates_heads) return gate_heads_backward(dev, a.gate, dgated, a.gated), dgated;
    convert(dev, a.gated, a.attended.rows);
    return activation_backward(dev, Mlp::sigmoid_gate, a.gate, a.gated, dgated).dup;
  }

  // From dattended to dq, and to dK, dV of all rows that the chunk attends to. Adds to dsinks.
  void attention_gradient(Matrix<T> dq, Matrix<T> dattended, const Summary<A>& dkv, Matrix<A> dsinks,
                          const Chunk& chunk) {
    auto scope = dev.scope();
    const Index rows = chunk.at.rows.size();
    const Exchanged<T> dout = exchange.with_heads(dattended, rows), dqueries = exchange.with_heads(dq, rows);
    exchange.to_heads(dout);
    attention_backward(dev, AttentionGradient<T>{dqueries.heads, dkv.k, dkv.v}, dout.heads, input_of(chunk),
                       output_of(chunk), span(chunk));
    exchange.to_rows(dqueries);
    if (!dsinks) return;
    const Exchanged<A> terms = exchange.with_rows(allocate<A>(dev, rows, shape.heads, Kind::chunk), dq.rows);
    sinks_backward<Device, T>(dev, terms.heads, dout.heads, output_of(chunk), sinks());
    exchange.to_rows(terms);
    add_column_sums(dev, dsinks, terms.rows);
  }
  // Of this rank's heads.
  Matrix<T> sinks() const { return exchange.share(w.sinks); }

  // dK of this rank's rows, before RoPE unless a norm follows it. A rank alone converts and rotates in one pass.
  Matrix<T> keys_gradient(Matrix<A> heads, const Chunk& chunk) {
    if (norm_after_rope) return own_rows(heads, chunk.x.rows);
    if (exchange.alone() && rotates) {
      const Matrix<T> dk = memory_for(heads);
      rope_backward(dk, heads, chunk.at.positions, frequencies.keys);
      return dk;
    }
    const Matrix<T> dk = own_rows(heads, chunk.x.rows);
    rope_backward(dk, dk, chunk.at.positions, frequencies.keys);
    return dk;
  }

  // A gradient of this rank's heads, in the type of activations, for this rank's rows.
  Matrix<T> own_rows(Matrix<A> heads, Index rows) {
    const Exchanged<T> m = exchange.with_rows(memory_for(heads), rows);
    if constexpr (!std::is_same_v<T, A>) convert(dev, m.heads, heads);
    exchange.to_rows(m);
    return m.rows;
  }

  // Memory for m in the type of activations: its own, if it has that type.
  Matrix<T> memory_for(Matrix<A> m) {
    if constexpr (std::is_same_v<T, A>) {
      return m;
    } else {
      return matrix(m.rows, m.cols);
    }
  }

  // Queries or keys, from their projection to what attention reads: y = rope(norm(x)) where the model has these, for each
  // head in one pass; or y = norm(rope(x)), and project_one has rotated x. Without a norm, y is x.
  void norm_and_rope(Matrix<T> y, Matrix<T> x, const NormWeights<T>& weights, Matrix<const std::int32_t> positions,
                     const RopeFrequencies& f) {
    if (c.qk_norm == QkNorm::heads && rotates) {
      return rope(dev, y, x, positions, f, Direction::forward, {weights, c.head_norm_style()});
    }
    qk_norm(y, x, weights);
    if (rotates && !norm_after_rope) rope(dev, y, y, positions, f, Direction::forward);
  }
  void project_one(Matrix<T> y, Matrix<T> x, const Linear<T>& w, Matrix<const std::int32_t> positions,
                   const RopeFrequencies& f) {
    linear(dev, y, x, w);
    if (rotates && norm_after_rope) rope(dev, y, y, positions, f, Direction::forward);
  }

  void qk_norm(Matrix<T> y, Matrix<T> x, const NormWeights<T>& weights) {
    for_each_norm(x.cols, [&](Rows of) { norm(dev, normed_rows(y, of), qk_norm_input(x, weights, of)); });
  }
  void qk_norm_backward(Matrix<T> dx, const NormWeights<A>& g, Matrix<T> x, const NormWeights<T>& weights) {
    for_each_norm(x.cols, [&](Rows of) {
      const Matrix<T> rows = normed_rows(dx, of);
      norm_backward(dev, rows, columns_of(g, of), rows, qk_norm_input(x, weights, of), Update::assign);
    });
  }
  // Calls f with the columns of the heads that share weights, if there are norms.
  template <class F>
  void for_each_norm(Index columns, F&& f) const {
    const Index width = c.qk_norm == QkNorm::own_weights ? shape.head_dim : columns;
    for (Index begin = 0; begin < columns && c.has_qk_norm(); begin += width) f(Rows{begin, begin + width});
  }
  NormInput<T> qk_norm_input(Matrix<T> x, const NormWeights<T>& weights, Rows of) const {
    const Matrix<T> rows = normed_rows(x, of);
    return {rows, columns_of(weights, of), c.head_norm_style(), of.size() / rows.cols};
  }
  // A row for each norm: for each head, or for all heads together.
  Matrix<T> normed_rows(Matrix<T> x, Rows of) const {
    const bool own = c.qk_norm == QkNorm::own_weights;
    return own ? x.columns(of) : c.qk_norm == QkNorm::all ? x : x.reshape(shape.head_dim);
  }
  template <class U>
  NormWeights<U> columns_of(const NormWeights<U>& weights, Rows of) const {
    if (c.qk_norm != QkNorm::own_weights) return weights;
    return {weights.weight ? weights.weight.columns(of) : weights.weight, {}};
  }
  // Values before their norm.
  Matrix<T> values_of(const Activations& a) const { return has_values ? a.v_projected : a.k_projected; }

  template <class U>
  void rope_backward(Matrix<T> y, Matrix<U> x, Matrix<const std::int32_t> positions, const RopeFrequencies& f) {
    if (rotates) rope(dev, y, x, positions, f, Direction::backward);
  }

  AttentionInput<T> input_of(const Chunk& chunk) const { return {chunk.a.q.heads, chunk.past.k, chunk.past.v}; }
  AttentionOutput<T> output_of(const Chunk& chunk) const { return {chunk.a.attended.heads, chunk.a.lse}; }
  AttentionSpan span(const Chunk& chunk) const { return {chunk.at.mask, chunk.at.rows, shape}; }
  Matrix<T> matrix(Index rows, Index cols) { return allocate<T>(dev, rows, cols, Kind::chunk); }

  Device& dev;
  const Config& c;
  const Layer<T>& w;
  HeadExchange<Device> exchange;
  AttentionShape shape;   // of this rank's heads
  const bool has_values;  // of their own
  const bool rotates;     // by RoPE
  const bool norm_after_rope;
  const LayerFrequencies& frequencies;
};

}  // namespace streambp
