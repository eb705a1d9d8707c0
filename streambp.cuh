// How a gradient is computed: one walk over the layers of a model and the chunks of its token stream.
//
// Full-memory backpropagation, gradient checkpointing and StreamBP are this one walk with different settings:
//
//                  chunk           head chunk      kept between forward and backward
//   full           whole stream    whole stream    all activations of every layer
//   checkpoint     whole stream    whole stream    the input of every layer
//   stream         C rows          H rows          the input of every layer, and attention's outputs if they are wanted
//
// A row of a layer's output depends on other rows only through their keys and values. So a layer's backward pass can go
// chunk by chunk, from the last to the first, and recompute only one chunk's activations at a time:
//
//   recompute K, V of the layer for all rows               K, V, dK, dV: the only full-length matrices of a layer
//   for each chunk, last to first:
//     recompute the chunk's activations from the kept layer input
//     go back through MLP, output projection, attention    adds to dK, dV of all rows up to the chunk's end
//     dK, dV of the chunk's own rows are now complete      only later rows attend to them, and those are done
//     go back through the Q, K, V projections              the gradient of the layer's input replaces that of its output
//
// All modes give the same bits: every operation works in tiles of kTile rows and adds up tiles from the last to the
// first, and chunks are whole tiles, visited from the last to the first.
//
// A step of backward is a cell (layer, chunk). It needs the cell of the layer above, all later chunks of its own layer, and
// the layer's K and V of earlier rows. Every order of cells that respects this gives the same bits. This walk goes layer
// by layer, which keeps the inputs of all layers and K, V, dK, dV of one; going chunk by chunk through all layers would
// keep K, V, dK, dV and the gradient sums of all layers, and layer inputs of one chunk.
//
// Several ranks can share a stream. Each has some of its rows (parallel/division.cuh), and a chunk has rows of every rank.
// Only two places notice: attention exchanges rows for heads, and gradient sums add those of all ranks. A rank without a
// micro-batch walks an empty stream: it has no chunks, but lends weights and adds sums like the others.
#pragma once

#include <functional>

#include "memory/kept.cuh"
#include "memory/sums.cuh"
#include "memory/weights.cuh"
#include "model.cuh"

namespace streambp {

template <class Device, class T>
class Walk {
 public:
  using A = Accumulator<T>;

  Walk(Device& dev, const Model<T>& model, const Stream& stream, Schedule schedule, const Ranks& ranks)
      : dev(dev),
        c(model.config),
        lowest(lowest_trained_layer(c)),
        frequencies(c),
        weights(dev, model),
        stream(stream),
        division(stream.division),
        schedule(schedule.in_whole_blocks(division)),
        ranks(ranks) {}

  // Adds the gradient of the loss to that of the step, whose tensors are allocated and zeroed on first use, and writes
  // logp. w[t] is d loss / d logp[t]. If the weights depend on the log-probs of other tokens (DPO), `weigh` sets them once
  // all log-probs are known; the head then computes its logits twice.
  template <class G>
  void gradient(const StepGradient<G>& step, const TokenWeights<A>& w, Matrix<A> logp,
                const std::function<void()>& weigh = {}) {
    auto scope = dev.scope();
    const GradientSums<Device, G> sums(dev, c, ranks, step);
    KeptValues<Device, T> kept(dev, c, division, schedule, ranks.sequence, lowest);
    const Matrix<T> output = forward(kept);
    if (weigh) head_forward(output, logp), weigh();
    const Matrix<T> dx = head_backward(sums, output, w, logp);
    for (Index l = c.layers - 1; l >= lowest; --l) {
      layer_backward(sums, l, kept, dx);
      kept.close(l);
    }
    embedding_backward(sums, dx);
  }

  // The log-probs of the targets, without a gradient.
  void evaluate(Matrix<A> logp) {
    auto scope = dev.scope();
    head_forward(forward(), logp);
  }

  // The output of the last layer; nothing is kept for backward.
  Matrix<T> forward() {
    KeptValues<Device, T> nothing(dev, c, division, {Keep::nothing, schedule.chunk, schedule.head_chunk},
                                  ranks.sequence, 0);
    return forward(nothing);
  }

 private:
  Matrix<T> forward(KeptValues<Device, T>& kept) {
    Matrix<T> x = kept.open(0);
    embedding(dev, x, stream.embedding_index(), weights.take_embedding().weights.embedding, c.embedding_scale);
    for (const DividedRows& chunk : chunks()) kept.finish_input(0, chunk);
    for (Index l = 0; l < c.layers; ++l) {
      const Matrix<T> y = l + 1 < c.layers ? kept.open(l + 1) : kept.output();
      layer_forward(l, kept, y, x);
      x = y;
    }
    return x;
  }

  void layer_forward(Index l, KeptValues<Device, T>& kept, Matrix<T> y, Matrix<T> x) {
    const auto leased = weights.take_layer(l, l + 1 < c.layers ? l + 1 : kNoLayer);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights, ranks.sequence);
    auto scope = dev.scope();
    const KeysValues<T> kv = kept.keys_values(l);
    for (const DividedRows& chunk : chunks()) {
      auto chunk_scope = dev.scope();
      layer.forward(y.slice(chunk.own), {stream.at(chunk), x.slice(chunk.own), kv, kept.begin(l, chunk)});
      kept.finish(l, chunk);
    }
  }

  // dx: the gradient of the layer's output, replaced by the gradient of its input.
  template <class G>
  void layer_backward(const GradientSums<Device, G>& sums, Index l, KeptValues<Device, T>& kept, Matrix<T> dx) {
    const auto leased = weights.take_layer(l, l > lowest ? l - 1 : kNoLayer);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights, ranks.sequence);
    auto sum = sums.layer(l);
    {
      auto scope = dev.scope();
      const KeysValues<T> kv = kept.keys_values(l);
      const KeysValues<A> dkv = allocate_keys_values<A>(dev, c, division.rows, division.ranks);
      if (!kept.has_activations(l)) recompute_keys_values(layer, kv, l, kept);
      zero(dev, dkv.k), zero(dev, dkv.v);
      for (const DividedRows& chunk : last_to_first(chunks())) {
        auto chunk_scope = dev.scope();
        const Chunk<T> in = {stream.at(chunk), kept.input(l, chunk), kv, kept.take(l, chunk)};
        if (!kept.has_activations(l))
          layer.recompute(in, kept.has_attention(l) ? AttentionOutputs::kept : AttentionOutputs::computed);
        layer.backward(sum.section, dx.slice(chunk.own), dkv, in);
      }
    }
    sum.finish();
  }

  void recompute_keys_values(TransformerLayer<Device, T>& layer, const KeysValues<T>& kv, Index l,
                             KeptValues<Device, T>& kept) {
    for (const DividedRows& chunk : chunks()) {
      auto scope = dev.scope();
      const auto a = allocate_key_value_activations<T>(dev, c, chunk.own.size());
      layer.keys_values(a, kv.slice(chunk.all), kept.input(l, chunk), stream.at(chunk).positions);
    }
  }

  // The head goes chunk by chunk too: logits exist for one chunk at a time.
  void head_forward(Matrix<T> x, Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights);
    for (const DividedRows& chunk : head_chunks()) head.forward(of(logp, chunk), x.slice(chunk.own), targets(chunk));
  }

  // Returns the gradient of the last layer's output, in the memory of that output.
  template <class G>
  Matrix<T> head_backward(const GradientSums<Device, G>& sums, Matrix<T> output, const TokenWeights<A>& w,
                          Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights);
    auto sum = sums.head();
    for (const DividedRows& chunk : last_to_first(head_chunks()))
      head.backward(sum.section, of(logp, chunk), output.slice(chunk.own), targets(chunk), w.columns(chunk.own));
    sum.finish();
    const Matrix<T> dx = output;
    return dx;
  }

  template <class G>
  void embedding_backward(const GradientSums<Device, G>& sums, Matrix<T> dx) {
    auto sum = sums.embedding();
    streambp::embedding_backward(dev, sum.section.embedding, stream.embedding_index(), dx, c.embedding_scale);
    sum.finish();
  }

  // --- Helpers ---

  std::vector<DividedRows> chunks() const { return streambp::chunks(division, schedule.chunk); }
  std::vector<DividedRows> head_chunks() const { return streambp::chunks(division, schedule.head_chunk); }
  template <class U>
  static Matrix<U> of(Matrix<U> numbers, const DividedRows& chunk) {
    return numbers.columns(chunk.own.begin, chunk.own.size());
  }
  Matrix<std::int32_t> targets(const DividedRows& chunk) const { return of(stream.targets, chunk); }

  Device& dev;
  const Config& c;
  const Index lowest;  // backward stops here: all layers below are frozen, and so is the embedding if it is not 0
  const Frequencies frequencies;
  Weights<Device, T> weights;
  const Stream& stream;
  const Division& division;
  const Schedule schedule;
  const Ranks ranks;
};

}  // namespace streambp
