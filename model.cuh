// The model: a layer's forward and hand-written backward, and the head. Both work on any rows of a token stream; which
// rows, in what order, and what is kept in between, streambp.cuh decides.
//
//   x       = embedding(tokens), in some models with a norm
//   layer     middle = x + mixer(norm(x))             y = middle + feed_forward(norm(middle))
//   logits  = norm(x) headᵀ                           x: the output of the last layer
//
// Some models norm the outputs of both branches, before or instead of their inputs. In some, both branches start at x. Gemma 4
// multiplies y by a number.
//
// A layer is two residual branches (model/residual_branch.h): a mixer, the only one that mixes rows (model/mixer.h), and a
// feed-forward (model/feed_forward.h), which treats each row alone, as norms and projections do.
//
// docs/contributing.md shows how other mixers and feed-forwards fit. Memory: activations are assigned, gradients of weights
// are added to, the gradient of the residual stream is updated in place, and backward may overwrite the chunk's activations
// and the gradient of its summary.
#pragma once

#include "kernels/head.cuh"
#include "model/activations.h"
#include "model/residual_branch.h"

namespace streambp {

// A chunk of rows on its way through a layer.
template <class T>
struct Chunk {
  StreamRows at;
  Matrix<T> x;      // the layer's input, for this rank's rows of the chunk
  Summary<T> past;  // of the whole stream
  Activations<T> a;

  MixerChunk<T, MixerActivations<T>> mixer() const { return {at, a.mixer_input, past, a.mixer}; }
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

  TransformerLayer(Device& dev, const Config& c, const Frequencies& frequencies, Index number, const Layer<T>& w,
                   const Group& sequence = {})
      : dev(dev),
        c(c),
        output_scale(w.scale),
        mixer(dev, c, frequencies, number, w, sequence),
        feed_forward(dev, c, number, w),
        mixer_branch(dev, c, number, w.attention_norm, w.post_attention_norm),
        feed_forward_branch(dev, c, number, c.parallel ? w.attention_norm : w.mlp_norm, w.post_mlp_norm) {}

  // y = layer(x) for the rows of a chunk. Reads the summary of earlier rows and writes that of these rows. y may be x.
  void forward(Matrix<T> y, const Chunk<T>& chunk) {
    forward(y, chunk.x, chunk.a, [&] { mixer.forward(chunk.mixer()); });
  }
  // The same in generation, where a cache has the summaries of all sequences.
  void decode(Matrix<T> y, Matrix<T> x, const Activations<T>& a, const Summary<T>& cache, const SequenceRows& rows) {
    forward(y, x, a, [&] { mixer.decode(a.mixer, a.mixer_input, cache, rows); });
  }

  // Writes the summary of some rows. x: of this rank's.
  void summarise(const StreamRows& at, Matrix<T> x, const Summary<T>& past) {
    auto scope = dev.scope();
    const auto input = allocate<T>(dev, x.rows, x.cols, Kind::chunk);
    mixer_branch.begin(input, x);
    mixer.summarise(at, input, past);
  }

  // Repeats forward for a chunk as far as backward needs it, and as far as it is not kept. The summary exists already.
  void recompute(const Chunk<T>& chunk, const KeptParts& kept) {
    const Activations<T>& a = chunk.a;
    const Matrix<T> x = chunk.x;
    if (!kept.have(Part::normed)) mixer_branch.begin(a.mixer_input, x);
    mixer.recompute(chunk.mixer(), kept);
    if (!kept.have(Part::mixer_output)) mixer_branch.compute_output(a.middle, a.mixer_output, x, mixer, a.mixer);
    if (!kept.have(Part::normed)) {
      mixer_branch.end(a.middle, a.mixer_output, x);
      feed_forward_branch.begin(a.feed_forward_input, second_input(x, a));
    }
    feed_forward.forward(a.feed_forward, a.feed_forward_input, kept);
    if (!kept.have(Part::feed_forward_output))
      feed_forward_branch.recompute_output(a.feed_forward_output, feed_forward, a.feed_forward);
  }

  // dx is the gradient of the layer's output for the rows of a chunk; it becomes the gradient of the layer's input. Adds
  // to the gradients of the weights, and to those of the summaries of all rows up to the chunk's end. Later chunks must be
  // done.
  void backward(const Layer<A>& g, Matrix<T> dx, const Summary<A>& dpast, const Chunk<T>& chunk) {
    const Activations<T>& a = chunk.a;
    auto scope = dev.scope();
    if (output_scale) scale(dev, dx, output_scale);
    const auto dshared = allocate_shared_gradient<T>(dev, c, dx);
    {  // y = middle + feed_forward(norm(middle))
      auto scope = dev.scope();
      const auto doutput = feed_forward_branch.end_backward(g.post_mlp_norm, dx, a.feed_forward_output);
      const auto dinput = feed_forward.backward(g, doutput, a.feed_forward, a.feed_forward_input);
      dshared ? dev.copy(dshared, dinput) : feed_forward_branch.begin_backward(dx, g.mlp_norm, dinput, a.middle);
    }
    {  // middle = x + mixer(norm(x))
      auto scope = dev.scope();
      const auto doutput = mixer_branch.end_backward(g.post_attention_norm, dx, a.mixer_output);
      const auto dinput = mixer.backward(g, doutput, dpast, chunk.mixer());
      if (dshared) add(dev, dinput, dshared);
      mixer_branch.begin_backward(dx, g.attention_norm, dinput, chunk.x);
    }
  }

 private:
  template <class Mix>
  void forward(Matrix<T> y, Matrix<T> x, const Activations<T>& a, Mix&& mix) {
    mixer_branch.begin(a.mixer_input, x);
    mix();
    mixer_branch.compute_output(a.middle, a.mixer_output, x, mixer, a.mixer);
    mixer_branch.end(a.middle, a.mixer_output, x);
    feed_forward_branch.begin(a.feed_forward_input, second_input(x, a));
    feed_forward.forward(a.feed_forward, a.feed_forward_input);
    feed_forward_branch.compute_output(y, a.feed_forward_output, a.middle, feed_forward, a.feed_forward);
    feed_forward_branch.end(y, a.feed_forward_output, a.middle);
    if (output_scale) scale(dev, y, output_scale);
  }
  // Where the second branch begins.
  Matrix<T> second_input(Matrix<T> x, const Activations<T>& a) const { return c.parallel ? x : a.middle; }

  Device& dev;
  const Config& c;
  const Matrix<T> output_scale;
  LayerMixer<Device, T> mixer;
  LayerFeedForward<Device, T> feed_forward;
  ResidualBranch<Device, T> mixer_branch, feed_forward_branch;
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
