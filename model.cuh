// The model: a layer's forward and hand-written backward, and the head. Both work on any rows of a token stream; which
// rows, in what order, and what is kept in between, streambp.cuh decides.
//
//   x       = embedding(tokens), in some models with a norm
//   layer     middle = x + mixer(norm(x))             y = middle + feed_forward(norm(middle))
//   logits  = norm(x) headᵀ                           x: the output of the last layer
//
// Some models norm the outputs of both branches, before or instead of their inputs. In some, both branches start at x.
//
// A layer is two residual branches. The mixer is the only part that mixes rows: here softmax attention
// (model/softmax_attention.h). Everything else treats each row alone: norms, projections, and the feed-forward
// (model/feed_forward.h). What a layer and the walk need of a mixer:
//
//   a causal summary      what must exist of earlier rows before a chunk can be computed: K, V, made by keys_values
//   forward               of a chunk; it also writes the chunk's part of the summary
//   recompute, backward   of a chunk, once all later chunks of the layer are done
//   its gradient          what backward of a chunk hands to the chunks before it: dK, dV
//
// docs/contributing.md shows how other mixers and feed-forwards fit. Memory: activations are assigned, gradients of weights
// are added to, the gradient of the residual stream is updated in place, and backward may overwrite the chunk's activations
// and its dK, dV.
#pragma once

#include "kernels/head.cuh"
#include "model/activations.h"

namespace streambp {

// A chunk of rows on its way through a layer.
template <class T>
struct Chunk {
  StreamRows at;
  Matrix<T> x;       // the layer's input, for this rank's rows of the chunk
  KeysValues<T> kv;  // of the whole stream
  Activations<T> a;

  AttentionChunk<T> mixer() const { return {at, a.mixer_input, kv, a.mixer}; }
};

// The input of the first layer.
template <class Device, class T>
void embed(Device& dev, const Config& c, Matrix<T> x, const EmbeddingIndex& rows, const EmbeddingTables<T>& tables) {
  embedding(dev, x, rows, tables, c.embedding_scale);
  if (c.embedding_norm) norm(dev, x, {x, {}, c.norm_style()});
}

// dx is the gradient of that input; it becomes the gradient of the norm's input, which is computed again.
template <class Device, class T>
void embedding_norm_backward(Device& dev, const Config& c, Matrix<T> dx, const EmbeddingIndex& rows,
                             const EmbeddingTables<T>& tables) {
  auto scope = dev.scope();
  const auto x = allocate<T>(dev, dx.rows, dx.cols, Kind::chunk);
  embedding(dev, x, rows, tables, c.embedding_scale);
  norm_backward(dev, dx, NormWeights<Accumulator<T>>{}, dx, {x, {}, c.norm_style()}, Update::assign);
}

template <class Device, class T>
class TransformerLayer {
 public:
  using A = Accumulator<T>;

  TransformerLayer(Device& dev, const Config& c, const Frequencies& frequencies, Index number, const Layer<T>& weights,
                   const Group& sequence = {})
      : mixer(dev, c, frequencies, number, weights, sequence),
        feed_forward(dev, c, weights),
        dev(dev),
        c(c),
        w(weights) {}

  // y = layer(x) for the rows of a chunk. kv holds K and V of earlier rows and receives those of these rows. y may be x.
  void forward(Matrix<T> y, const Chunk<T>& chunk) {
    before_mixer(chunk.a, chunk.x);
    mixer.forward(chunk.mixer());
    after_mixer(y, chunk.a, chunk.x);
  }

  void before_mixer(const Activations<T>& a, Matrix<T> x) { begin_branch(a.mixer_input, x, w.attention_norm); }
  void after_mixer(Matrix<T> y, const Activations<T>& a, Matrix<T> x) {
    up_to_activated(a, x);
    end_branch(y, a.middle, a.feed_forward.activated, {w.down, w.post_mlp_norm}, a.feed_forward_output);
  }

  // K and V of some rows. kv: their slices of these rows.
  void keys_values(const Activations<T>& a, const KeysValues<T>& kv, Matrix<T> x,
                   Matrix<const std::int32_t> positions) {
    before_mixer(a, x);
    mixer.keys_values(a.mixer, kv, a.mixer_input, positions);
  }

  // Repeats forward for a chunk as far as backward needs it, and as far as it is not kept. K and V exist already.
  void recompute(const Chunk<T>& chunk, const KeptParts& kept) {
    const Activations<T>& a = chunk.a;
    if (!kept.have(Part::normed)) before_mixer(a, chunk.x);
    mixer.recompute(chunk.mixer(), kept);
    up_to_activated(a, chunk.x, kept);
    if (c.post_norms && !kept.have(Part::feed_forward_output))
      linear(dev, a.feed_forward_output, a.feed_forward.activated, w.down);
  }

  // dx is the gradient of the layer's output for the rows of a chunk; it becomes the gradient of the layer's input. Adds
  // to the gradients of the weights, and to dK, dV of all rows up to the chunk's end. Later chunks must be done.
  void backward(const Layer<A>& g, Matrix<T> dx, const KeysValues<A>& dkv, const Chunk<T>& chunk) {
    const Activations<T>& a = chunk.a;
    auto scope = dev.scope();
    Matrix<T> dnormed_of_both;  // only in parallel branches
    {                           // y = middle + feed_forward(norm(middle))
      if (c.parallel) dnormed_of_both = allocate<T>(dev, dx.rows, dx.cols, Kind::chunk);
      auto scope = dev.scope();
      const auto dactivated = end_branch_backward({g.down, g.post_mlp_norm}, dx, a.feed_forward.activated,
                                                  {w.down, w.post_mlp_norm}, a.feed_forward_output);
      const auto dnormed = feed_forward.backward(g, dactivated, a.feed_forward, a.feed_forward_input);
      c.parallel ? dev.copy(dnormed_of_both, dnormed)
                 : begin_branch_backward(dx, g.mlp_norm, dnormed, a.middle, w.mlp_norm);
    }
    {  // middle = x + mixer(norm(x))
      auto scope = dev.scope();
      const auto dattended = end_branch_backward({g.o, g.post_attention_norm}, dx, a.mixer.attended.rows,
                                                 {w.o, w.post_attention_norm}, a.mixer_output);
      const auto dnormed = mixer.backward(g, dattended, dkv, chunk.mixer());
      if (c.parallel) add(dev, dnormed, dnormed_of_both);
      begin_branch_backward(dx, g.attention_norm, dnormed, chunk.x, w.attention_norm);
    }
  }

  SoftmaxAttention<Device, T> mixer;
  FeedForward<Device, T> feed_forward;

 private:
  // The end of a branch: a projection back to the residual stream, in some models with a norm.
  template <class U>
  struct BranchEnd {
    const Linear<U>& projection;
    const NormWeights<U>& post_norm;
  };

  NormInput<T> normed(Matrix<T> x, const NormWeights<T>& weights) const { return {x, weights, c.norm_style()}; }

  // middle = x + mixer, and the feed-forward of its norm. What is kept is not computed again.
  void up_to_activated(const Activations<T>& a, Matrix<T> x, const KeptParts& kept = KeptParts::nothing()) {
    const BranchEnd<T> end = {w.o, w.post_attention_norm};
    if (!kept.have(Part::mixer_output))
      project(c.post_norms ? a.mixer_output : a.middle, x, a.mixer.attended.rows, end);
    if (!kept.have(Part::normed)) {
      if (c.post_norms) add_normed(a.middle, x, a.mixer_output, end);
      c.parallel ? begin_branch(a.feed_forward_input, x, w.attention_norm)
                 : begin_branch(a.feed_forward_input, a.middle, w.mlp_norm);
    }
    feed_forward.forward(a.feed_forward, a.feed_forward_input, kept);
  }

  // y = norm(x), or x in models without these norms
  void begin_branch(Matrix<T> y, Matrix<T> x, const NormWeights<T>& weights) {
    c.pre_norms ? norm(dev, y, normed(x, weights)) : dev.copy(y, x);
  }
  void begin_branch_backward(Matrix<T> dx, const NormWeights<A>& g, Matrix<T> dy, Matrix<T> x,
                             const NormWeights<T>& weights) {
    c.pre_norms ? norm_backward(dev, dx, g, dy, normed(x, weights), Update::add) : add(dev, dx, dy);
  }

  // y = residual + x wᵀ + bias; with post-norms y = residual + norm(x wᵀ + bias), and `projected` keeps the norm's input.
  // Some models scale what they add to the residual.
  void end_branch(Matrix<T> y, Matrix<T> residual, Matrix<T> x, const BranchEnd<T>& end, Matrix<T> projected) {
    project(c.post_norms ? projected : y, residual, x, end);
    if (c.post_norms) add_normed(y, residual, projected, end);
  }
  void project(Matrix<T> y, Matrix<T> residual, Matrix<T> x, const BranchEnd<T>& end) {
    if (!c.post_norms && c.residual_scale == 1) return linear(dev, y, x, end.projection, residual);
    linear(dev, y, x, end.projection);
    if (!c.post_norms) add_scaled(y, residual);
  }
  void add_normed(Matrix<T> y, Matrix<T> residual, Matrix<T> projected, const BranchEnd<T>& end) {
    norm(dev, y, normed(projected, end.post_norm));
    add_scaled(y, residual);
  }
  void add_scaled(Matrix<T> y, Matrix<T> residual) {
    if (c.residual_scale != 1) scale(dev, y, c.residual_scale);
    add(dev, y, residual);
  }

  // Returns dx; the gradient of the residual is dy itself.
  Matrix<T> end_branch_backward(const BranchEnd<A>& g, Matrix<T> dy, Matrix<T> x, const BranchEnd<T>& end,
                                Matrix<T> projected) {
    const auto dx = allocate<T>(dev, x.rows, x.cols, Kind::chunk);
    auto scope = dev.scope();
    Matrix<T> dprojected = dy;
    if (c.post_norms || c.residual_scale != 1) dprojected = allocate<T>(dev, dy.rows, dy.cols, Kind::chunk);
    if (c.residual_scale != 1) {
      dev.copy(dprojected, dy);
      scale(dev, dprojected, c.residual_scale);
      dy = dprojected;
    }
    if (c.post_norms) norm_backward(dev, dprojected, g.post_norm, dy, normed(projected, end.post_norm), Update::assign);
    linear_backward(dev, dx, x, {LinearBackward<T, A>{g.projection, dprojected, end.projection}}, Update::assign);
    return dx;
  }

  Device& dev;
  const Config& c;
  const Layer<T>& w;
};

// From the output of the last layer to logits and log-probs, and back. Logits have the type of the sums: rounded to
// bfloat16, log-probs would be off by up to 0.06.
template <class Device, class T>
class Head {
 public:
  using A = Accumulator<T>;

  Head(Device& dev, const Config& c, const Tensors<T>& weights)
      : dev(dev), c(c), norm_weights(weights.norm), w(weights.output()) {}

  Matrix<A> logits(Matrix<T> x) { return logits_of_normed(normed(x)); }

  void forward(Matrix<A> logp, Matrix<T> x, Matrix<const std::int32_t> targets) {
    auto scope = dev.scope();
    log_probabilities(dev, logp, logits(x), targets);
  }

  // Writes logp and replaces x by its gradient. Adds to the gradients of the norm and of the head's weight.
  void backward(const Tensors<A>& g, Matrix<A> logp, Matrix<T> x, Matrix<const std::int32_t> targets,
                const TokenWeights<A>& token_weights) {
    auto scope = dev.scope();
    const Matrix<T> y = normed(x);
    const Matrix<T> dlogits =
        log_probabilities_backward<T>(dev, logp, logits_of_normed(y), targets, token_weights, c.logit_cap);
    const auto dy = allocate<T>(dev, x.rows, c.hidden, Kind::chunk);
    linear_backward(dev, dy, y, {LinearBackward<T, A>{g.output(), dlogits, w}}, Update::assign);
    if (c.logit_scale != 1) scale(dev, dy, c.logit_scale);
    const Matrix<T> dx = x;  // the same memory
    norm_backward(dev, dx, g.norm, dy, {x, norm_weights, c.norm_style()}, Update::assign);
  }

 private:
  Matrix<T> normed(Matrix<T> x) {
    const auto y = allocate<T>(dev, x.rows, c.hidden, Kind::chunk);
    norm(dev, y, {x, norm_weights, c.norm_style()});
    if (c.logit_scale != 1) scale(dev, y, c.logit_scale);
    return y;
  }
  Matrix<A> logits_of_normed(Matrix<T> y) {
    const auto logits = allocate_aligned<A>(dev, y.rows, c.vocab, Kind::logits);
    linear(dev, logits, y, w);
    if (c.logit_cap > 0) soft_cap(dev, logits, c.logit_cap);
    return logits;
  }

  Device& dev;
  const Config& c;
  const NormWeights<T> norm_weights;
  const Linear<T> w;
};

}  // namespace streambp
