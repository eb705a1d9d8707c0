// The model: the embedding, a layer's forward and hand-written backward, and the head. All of them work on any rows of a
// token stream; which rows, in what order, and what is kept in between is streambp.cuh's business.
//
//   x       = embedding(tokens)
//   layer     middle = x + attention(norm(x))             y = middle + mlp(norm(middle))
//   logits  = norm(x) headᵀ                               x: the output of the last layer
//
// Attention is the only operation that mixes rows. Where ranks share a stream, each computes everything else for its own
// rows, and attention for its own heads: before and after, they exchange rows for heads (parallel/exchange.cuh).
//
// One policy for memory: activations are assigned, gradients of weights are added to, and the gradient of the residual
// stream is updated in place.
#pragma once

#include <vector>

#include "kernels/activation.cuh"
#include "kernels/attention.cuh"
#include "kernels/embedding.cuh"
#include "kernels/head.cuh"
#include "kernels/norm.cuh"
#include "kernels/rope.cuh"
#include "model/activations.cuh"
#include "model/linear.cuh"
#include "model/parameters.cuh"
#include "model/stream.cuh"
#include "parallel/exchange.cuh"

namespace streambp {

// The RoPE frequencies of a model's global and local layers.
struct Frequencies {
  RopeFrequencies global, local;

  explicit Frequencies(const Config& c) {
    if (c.positions == Positions::learned) return;
    global = local = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling);
    if (c.local_rope_theta > 0) local = rope_frequencies(c.head_dim, c.local_rope_theta, {});
  }
};

// A chunk of rows on its way through a layer.
template <class T>
struct Chunk {
  StreamRows at;
  Matrix<T> x;       // the layer's input for this rank's rows of the chunk
  KeysValues<T> kv;  // of the whole stream
  Activations<T> a;  // of these rows
};

// Whether attention's outputs are computed, or kept since forward.
enum class Attention { computed, kept };

// Where a chunk's backward pass adds weight gradients.
template <class A>
struct LayerSums {
  std::span<const Layer<A>> lanes;
  std::vector<LanePart> parts;
};

template <class Device, class T>
class TransformerLayer {
 public:
  using A = Accumulator<T>;
  using Back = LinearBackward<T, A>;

  TransformerLayer(Device& dev, const Config& c, const Frequencies& frequencies, Index number, const Layer<T>& weights,
                   const Group& sequence = {})
      : dev(dev),
        c(c),
        w(weights),
        sequence(sequence),
        shape(c.attention(number)),
        frequencies(c.is_local(number) ? frequencies.local : frequencies.global) {
    shape.heads /= sequence.size, shape.kv_heads /= sequence.size;
  }

  // y = layer(x) for the rows of a chunk. kv holds K and V of earlier rows and receives those of these rows. y may be x.
  void forward(Matrix<T> y, const Chunk<T>& chunk) {
    project(chunk.a, chunk.kv.slice(chunk.at.rows), chunk.x, chunk.at.positions);
    attend(chunk.a, chunk.kv, chunk.at);
    finish(y, chunk.a, chunk.x);
  }

  // The three parts of forward. First Q, K and V of some rows ...
  void project(const Activations<T>& a, const KeysValues<T>& kv, Matrix<T> x, Matrix<const std::int32_t> positions) {
    attention_norm(a, x);
    project_keys_values(a, kv, positions);
    project_queries(a, positions);
  }
  // ... then attention to the K and V of the whole stream ...
  void attend(const Activations<T>& a, const KeysValues<T>& kv, const StreamRows& at,
              Attention outputs = Attention::computed) {
    if (outputs == Attention::computed) attention(dev, output_of(a), input_of(a, kv), span(at));
    to_rows(dev, sequence, a.attended, a.heads.attended, dev.tile);
  }
  // ... and the rest of the layer.
  void finish(Matrix<T> y, const Activations<T>& a, Matrix<T> x) {
    add_attention(a, x);
    feed_forward(a);
    linear_to_residual(y, a.activated, w.down, a.middle, w.post_mlp_norm, a.mlp_output);
  }

  // K and V of some rows. kv: their slices of these rows.
  void keys_values(const Activations<T>& a, const KeysValues<T>& kv, Matrix<T> x,
                   Matrix<const std::int32_t> positions) {
    attention_norm(a, x);
    project_keys_values(a, kv, positions);
  }

  // Repeats forward for a chunk as far as backward needs it; K and V exist already, and kept outputs of attention too.
  void recompute(const Chunk<T>& chunk, Attention outputs) {
    const Activations<T>& a = chunk.a;
    attention_norm(a, chunk.x);
    if (c.qk_norm) linear(dev, a.k_projected, a.attention_input, w.keys());
    project_queries(a, chunk.at.positions);
    attend(a, chunk.kv, chunk.at, outputs);
    add_attention(a, chunk.x);
    feed_forward(a);
    if (c.post_norms) linear(dev, a.mlp_output, a.activated, w.down);
  }

  // dx is the gradient of the layer's output for the rows of a chunk; it becomes the gradient of the layer's input. Adds
  // to the gradients of the weights, and to dK, dV of all rows up to the chunk's end. Later chunks must be done: only
  // then are dK, dV of the chunk's own rows complete after its attention.
  void backward(const LayerSums<A>& sums, Matrix<T> dx, const KeysValues<A>& dkv, const Chunk<T>& chunk) {
    auto for_each_part = [&](auto&& f) {
      for (const auto& [rows, lane] : sums.parts) f(sums.lanes[static_cast<std::size_t>(lane)], rows);
    };
    for_each_part([&](const Layer<A>& g, Rows rows) { backward_mlp(g, dx.slice(rows), chunk.a.slice(rows)); });
    auto scope = dev.scope();
    const auto dattended = matrix(dx.rows, c.q_width()), dq = matrix(dx.rows, c.q_width());
    for_each_part([&](const Layer<A>& g, Rows rows) {
      backward_output(g, dattended.slice(rows), dx.slice(rows), chunk.a.slice(rows));
    });
    backward_attention(dq, dattended, dkv, chunk);
    const KeysValues<T> dkv_own = own_rows(dkv.slice(chunk.at.rows), dx.rows);
    for_each_part([&](const Layer<A>& g, Rows rows) {
      const StreamRows at = {rows, chunk.at.positions.columns(rows.begin, rows.size()), {}};
      const Chunk<T> part = {at, chunk.x.slice(rows), {}, chunk.a.slice(rows)};
      backward_projections(g, dx.slice(rows), dq.slice(rows), dkv_own.slice(rows), part);
    });
  }

 private:
  // --- Forward ---

  void attention_norm(const Activations<T>& a, Matrix<T> x) {
    norm(dev, a.attention_input, {x, w.attention_norm, c.norm_style()});
  }

  // kv: of all rows of the chunk, for this rank's heads
  void project_keys_values(const Activations<T>& a, const KeysValues<T>& kv, Matrix<const std::int32_t> positions) {
    const KeysValues<T> own = sequence.size == 1 ? kv : a.keys_values;
    linear(dev, c.qk_norm ? a.k_projected : own.k, a.attention_input, w.keys());
    if (c.qk_norm) norm_heads(own.k, a.k_projected, w.k_norm);
    apply_rope(own.k, positions, Direction::forward);
    linear(dev, own.v, a.attention_input, w.values());
    to_heads(dev, sequence, kv.k, own.k, dev.tile);
    to_heads(dev, sequence, kv.v, own.v, dev.tile);
  }

  void project_queries(const Activations<T>& a, Matrix<const std::int32_t> positions) {
    linear(dev, c.qk_norm ? a.q_projected : a.q, a.attention_input, w.q);
    if (c.qk_norm) norm_heads(a.q, a.q_projected, w.q_norm);
    apply_rope(a.q, positions, Direction::forward);
    to_heads(dev, sequence, a.heads.q, a.q, dev.tile);
  }

  void norm_heads(Matrix<T> y, Matrix<T> x, const NormWeights<T>& weights) {
    norm(dev, y.reshape(c.head_dim), {x.reshape(c.head_dim), weights, c.head_norm_style()});
  }

  void apply_rope(Matrix<T> x, Matrix<const std::int32_t> positions, Direction direction) {
    if (c.positions == Positions::rope) rope(dev, x, positions, frequencies, direction);
  }

  // middle = x + attended oᵀ
  void add_attention(const Activations<T>& a, Matrix<T> x) {
    linear_to_residual(a.middle, a.attended, w.o, x, w.post_attention_norm, a.attention_output);
  }

  // activated = act(gate(norm(middle))) * up(norm(middle))
  void feed_forward(const Activations<T>& a) {
    norm(dev, a.mlp_input, {a.middle, w.mlp_norm, c.norm_style()});
    if (c.gated()) linear(dev, a.gate, a.mlp_input, w.gate);
    linear(dev, a.up, a.mlp_input, w.up);
    activation(dev, c.mlp_kind, a.activated, a.gate, a.up);
  }

  // y = residual + x wᵀ + bias; with post-norms y = residual + norm(x wᵀ + bias), and `projected` keeps the norm's input
  void linear_to_residual(Matrix<T> y, Matrix<T> x, const Linear<T>& weights, Matrix<T> residual,
                          const NormWeights<T>& post_norm, Matrix<T> projected) {
    if (!c.post_norms) return linear(dev, y, x, weights, residual);
    linear(dev, projected, x, weights);
    norm(dev, y, {projected, post_norm, c.norm_style()});
    add(dev, y, residual);
  }

  // --- Backward ---

  // y = middle + activated downᵀ
  void backward_mlp(const Layer<A>& g, Matrix<T> dx, const Activations<T>& a) {
    auto scope = dev.scope();
    const auto dnormed = matrix(dx.rows, c.hidden), dactivated = matrix(dx.rows, c.mlp);
    const auto dprojected = backward_post_norm(g.post_mlp_norm, dx, a.mlp_output, w.post_mlp_norm);
    linear_backward(dev, dactivated, a.activated, {Back{g.down, dprojected, w.down}}, Update::assign);
    // From here on the memory of gate and up holds their gradients.
    const auto [dgate, dup] = activation_backward(dev, c.mlp_kind, a.gate, a.up, dactivated);
    linear_backward(dev, dnormed, a.mlp_input, {Back{g.up, dup, w.up}}, Update::assign);
    if (c.gated()) linear_backward(dev, dnormed, a.mlp_input, {Back{g.gate, dgate, w.gate}}, Update::add);
    norm_backward(dev, dx, g.mlp_norm, dnormed, {a.middle, w.mlp_norm, c.norm_style()}, Update::add);
  }

  // middle = x + attended oᵀ
  void backward_output(const Layer<A>& g, Matrix<T> dattended, Matrix<T> dx, const Activations<T>& a) {
    auto scope = dev.scope();
    const auto dprojected = backward_post_norm(g.post_attention_norm, dx, a.attention_output, w.post_attention_norm);
    linear_backward(dev, dattended, a.attended, {Back{g.o, dprojected, w.o}}, Update::assign);
  }

  // From dattended to dq, and to dK, dV of all rows that the chunk attends to.
  void backward_attention(Matrix<T> dq, Matrix<T> dattended, const KeysValues<A>& dkv, const Chunk<T>& chunk) {
    auto scope = dev.scope();
    const bool alone = sequence.size == 1;
    const Matrix<T> q = chunk.a.heads.q;
    const auto dattended_heads = alone ? dattended : matrix(q.rows, q.cols),
               dq_heads = alone ? dq : matrix(q.rows, q.cols);
    to_heads(dev, sequence, dattended_heads, dattended, dev.tile);
    attention_backward(dev, AttentionGradient<T>{dq_heads, dkv.k, dkv.v}, dattended_heads, input_of(chunk.a, chunk.kv),
                       output_of(chunk.a), span(chunk.at));
    to_rows(dev, sequence, dq, dq_heads, dev.tile);
  }

  // dK, dV of a chunk, in the type of activations and for this rank's rows.
  KeysValues<T> own_rows(const KeysValues<A>& dkv, Index rows) {
    const KeysValues<T> of_heads = {in_type_of_activations(dkv.k), in_type_of_activations(dkv.v)};
    if (sequence.size == 1) return of_heads;
    const KeysValues<T> own = {matrix(rows, c.kv_width()), matrix(rows, c.kv_width())};
    to_rows(dev, sequence, own.k, of_heads.k, dev.tile);
    to_rows(dev, sequence, own.v, of_heads.v, dev.tile);
    return own;
  }

  // Q, K and V are projections of norm(x).
  void backward_projections(const Layer<A>& g, Matrix<T> dx, Matrix<T> dq, const KeysValues<T>& dkv,
                            const Chunk<T>& chunk) {
    auto scope = dev.scope();
    const Activations<T>& a = chunk.a;
    const auto dnormed = matrix(dx.rows, c.hidden);
    apply_rope(dq, chunk.at.positions, Direction::backward);
    apply_rope(dkv.k, chunk.at.positions, Direction::backward);
    if (c.qk_norm) {
      norm_heads_backward(dq, g.q_norm, a.q_projected, w.q_norm);
      norm_heads_backward(dkv.k, g.k_norm, a.k_projected, w.k_norm);
    }
    linear_backward(dev, dnormed, a.attention_input, {Back{g.q, dq, w.q}, Back{g.k, dkv.k, w.k}, Back{g.v, dkv.v, w.v}},
                    Update::assign);
    norm_backward(dev, dx, g.attention_norm, dnormed, {chunk.x, w.attention_norm, c.norm_style()}, Update::add);
  }

  // The gradient of a post-norm's input. Without post-norms it is dy.
  Matrix<T> backward_post_norm(const NormWeights<A>& g, Matrix<T> dy, Matrix<T> x, const NormWeights<T>& weights) {
    if (!c.post_norms) return dy;
    const auto dx = matrix(dy.rows, dy.cols);
    norm_backward(dev, dx, g, dy, {x, weights, c.norm_style()}, Update::assign);
    return dx;
  }

  void norm_heads_backward(Matrix<T> dx, const NormWeights<A>& g, Matrix<T> x, const NormWeights<T>& weights) {
    const Matrix<T> heads = dx.reshape(c.head_dim);
    norm_backward(dev, heads, g, heads, {x.reshape(c.head_dim), weights, c.head_norm_style()}, Update::assign);
  }

  Matrix<T> in_type_of_activations(Matrix<A> m) {
    if constexpr (std::is_same_v<T, A>) {
      return m;
    } else {
      const auto converted = matrix(m.rows, m.cols);
      convert(dev, converted, m);
      return converted;
    }
  }

  AttentionInput<T> input_of(const Activations<T>& a, const KeysValues<T>& kv) const { return {a.heads.q, kv.k, kv.v}; }
  AttentionOutput<T> output_of(const Activations<T>& a) const { return {a.heads.attended, a.heads.lse}; }
  AttentionSpan span(const StreamRows& at) const { return {at.mask, at.rows, shape}; }
  Matrix<T> matrix(Index rows, Index cols) { return allocate<T>(dev, rows, cols, Kind::chunk); }

  Device& dev;
  const Config& c;
  const Layer<T>& w;
  const Group sequence;
  AttentionShape shape;  // of this rank's heads
  const RopeFrequencies& frequencies;
};

// From the output of the last layer to logits and log-probs, and back.
template <class Device, class T>
class Head {
 public:
  using A = Accumulator<T>;
  using Back = LinearBackward<T, A>;

  Head(Device& dev, const Config& c, const NormWeights<T>& norm_weights, const Linear<T>& weights)
      : dev(dev), c(c), norm_weights(norm_weights), w(weights) {}

  Matrix<T> logits(Matrix<T> x) { return logits_of_normed(normed(x)); }

  void forward(Matrix<A> logp, Matrix<T> x, Matrix<const std::int32_t> targets) {
    auto scope = dev.scope();
    log_probabilities(dev, logp, logits(x), targets);
  }

  // Writes logp and replaces x by its gradient. Adds to the gradients of the norm and of the head's weight.
  void backward(const NormWeights<A>& gnorm, const Linear<A>& g, Matrix<A> logp, Matrix<T> x,
                Matrix<const std::int32_t> targets, const TokenWeights<A>& token_weights) {
    auto scope = dev.scope();
    const Matrix<T> y = normed(x);
    const Matrix<T> dlogits = log_probabilities_backward(dev, logp, logits_of_normed(y), targets, token_weights);
    const auto dy = allocate<T>(dev, x.rows, c.hidden, Kind::chunk);
    linear_backward(dev, dy, y, {Back{g, dlogits, w}}, Update::assign);
    const Matrix<T> dx = x;  // the same memory
    norm_backward(dev, dx, gnorm, dy, {x, norm_weights, c.norm_style()}, Update::assign);
  }

 private:
  Matrix<T> normed(Matrix<T> x) {
    const auto y = allocate<T>(dev, x.rows, c.hidden, Kind::chunk);
    norm(dev, y, {x, norm_weights, c.norm_style()});
    return y;
  }
  Matrix<T> logits_of_normed(Matrix<T> y) {
    const auto logits = allocate_aligned<T>(dev, y.rows, c.vocab, Kind::logits);
    linear(dev, logits, y, w);
    return logits;
  }

  Device& dev;
  const Config& c;
  const NormWeights<T> norm_weights;
  const Linear<T> w;
};

}  // namespace streambp
