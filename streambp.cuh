// How a gradient is computed: one walk over the layers of a model and the chunks of its token stream.
//
// Full-memory backpropagation, gradient checkpointing and StreamBP are this one walk with different settings:
//
//                  chunk           head chunk      kept between forward and backward
//   full           whole stream    whole stream    all activations of every layer
//   checkpoint     whole stream    whole stream    the input of every layer
//   stream         C rows          H rows          the input of every layer; optionally attention's outputs
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
// All modes give the same bits: a row's numbers do not depend on the chunk, and sums over rows add tiles (256 rows; 2048
// on a GPU) from the last to the first. Chunks are whole tiles, visited from the last to the first.
//
// Several ranks can share a stream; every chunk has rows of each of them (parallel/division.h). Three places notice:
// attention exchanges rows for heads (parallel/head_exchange.h), gradient sums add those of all ranks, in lanes
// (memory/sums.h), and weights in shards come from all ranks (memory/weights.h). A rank without a micro-batch walks an
// empty stream: it has no chunks, but takes part in every exchange.
//
// Other orders are possible. A step of backward, a cell (layer, chunk), needs the cell of the layer above, all later chunks
// of its own layer, and the layer's K and V of earlier rows; every order that respects this gives the same bits. Layer by
// layer keeps the inputs of all layers and K, V, dK, dV of one. Chunk by chunk through all layers would keep K, V, dK, dV
// and the gradient sums of all layers, and layer inputs of one chunk.
#pragma once

#include <functional>

#include "memory/kept.h"
#include "memory/sums.h"
#include "memory/weights.h"
#include "model.cuh"

namespace streambp {

template <class Device, class T>
class Walk {
 public:
  using A = Accumulator<T>;
  using Kept = KeptValues<Device, T>;

  Walk(Device& dev, const Model<T>& model, const Stream& stream, Schedule schedule, const Ranks& ranks)
      : dev(dev),
        c(model.config),
        lowest(lowest_trained_layer(c)),
        frequencies(c),
        weights(dev, model),
        stream(stream),
        division(stream.division),
        schedule(schedule.in_whole_tiles(division)),
        chunks(streambp::chunks(division, this->schedule.chunk)),
        head_chunks(streambp::chunks(division, this->schedule.head_chunk)),
        ranks(ranks) {}

  // Adds the gradient of the loss to the step's gradient, which is allocated and zeroed on first use, and writes logp.
  // w[t] is d loss / d logp[t]. If the weights depend on the log-probs of other tokens (DPO), `weigh` sets them once
  // all log-probs are known; the head then computes its logits twice.
  template <class G>
  void gradient(const StepGradient<G>& step, const TokenWeights<A>& w, Matrix<A> logp,
                const std::function<void()>& weigh = {}) {
    auto scope = dev.scope();
    const GradientSums<Device, G> sums(dev, c, ranks, step);
    const EmbeddingIndex rows = stream.embedding_index();
    Kept kept(dev, c, division, schedule, ranks.sequence, lowest);
    const Matrix<T> output = forward(kept);
    if (weigh) {
      head_forward(output, logp);
      weigh();
    }
    const Matrix<T> dx = head_backward(sums, output, w, logp);
    for (Index l = c.layers - 1; l >= lowest; --l) {
      layer_backward(l, kept, sums, dx);
      kept.close(l);
    }
    auto sum = sums.embedding();
    if (c.embedding_norm && sum.section.embedding.tokens)
      embedding_norm_backward(dev, c, dx, rows, weights.take_embedding().weights.embedding);
    embedding_backward(dev, sum.section.embedding, rows, dx, c.embedding_scale);
    sum.finish();
  }

  // The log-probs of the targets, without a gradient.
  void evaluate(Matrix<A> logp) {
    auto scope = dev.scope();
    head_forward(forward(), logp);
  }

  // The output of the last layer; nothing is kept for backward.
  Matrix<T> forward() {
    Kept nothing(dev, c, division, {KeptParts::nothing(), schedule.chunk, schedule.head_chunk}, ranks.sequence, 0);
    return forward(nothing);
  }

 private:
  Matrix<T> forward(Kept& kept) {
    Matrix<T> x = kept.open(0);
    embed(dev, c, x, stream.embedding_index(), weights.take_embedding().weights.embedding);
    for (const DividedRows& chunk : chunks) kept.finish_input(0, chunk);
    for (Index l = 0; l < c.layers; ++l) {
      const Matrix<T> y = l + 1 < c.layers ? kept.open(l + 1) : kept.output();
      layer_forward(l, kept, y, x);
      x = y;
    }
    return x;
  }

  void layer_forward(Index l, Kept& kept, Matrix<T> y, Matrix<T> x) {
    const auto leased = weights.take_layer(l, l + 1 < c.layers ? l + 1 : kNoLayer);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights, ranks.sequence);
    auto scope = dev.scope();
    const KeysValues<T> kv = kept.memory_of_keys_values(l);
    for (const DividedRows& chunk : chunks) {
      auto chunk_scope = dev.scope();
      const Activations<T> a = kept.begin_chunk(l, chunk);  // from here on y may replace x
      layer.forward(y.slice(chunk.own), {stream.at(chunk), x.slice(chunk.own), kv, a});
      kept.finish_chunk(l, chunk);
    }
  }

  // dx: the gradient of the layer's output, replaced by the gradient of its input.
  template <class G>
  void layer_backward(Index l, Kept& kept, const GradientSums<Device, G>& sums, Matrix<T> dx) {
    const auto leased = weights.take_layer(l, l > lowest ? l - 1 : kNoLayer);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights, ranks.sequence);
    auto sum = sums.layer(l);
    {
      auto scope = dev.scope();
      const KeptParts& parts = kept.parts(l);
      const KeysValues<T> kv = kept.memory_of_keys_values(l);
      const KeysValues<A> dkv = allocate_keys_values<A>(dev, c, division.rows, ranks.sequence.size);
      if (!parts.have(Part::keys_values)) recompute_keys_values(l, kept, layer, kv);
      zero(dev, dkv);
      for (const DividedRows& chunk : last_to_first(chunks)) {
        auto chunk_scope = dev.scope();
        const Chunk<T> in = {stream.at(chunk), kept.input(l, chunk), kv, kept.take_chunk(l, chunk)};
        layer.recompute(in, parts);
        layer.backward(sum.section, dx.slice(chunk.own), dkv, in);
      }
    }
    sum.finish();
  }

  void recompute_keys_values(Index l, Kept& kept, TransformerLayer<Device, T>& layer, const KeysValues<T>& kv) {
    for (const DividedRows& chunk : chunks) {
      auto scope = dev.scope();
      const auto a = allocate_key_value_activations<T>(dev, c, chunk.own.size());
      layer.keys_values(a, kv.slice(chunk.all), kept.input(l, chunk), stream.at(chunk).positions);
    }
  }

  // The head goes chunk by chunk too: logits exist for one chunk at a time.
  void head_forward(Matrix<T> x, Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights);
    for (const DividedRows& chunk : head_chunks)
      head.forward(logp.columns(chunk.own), x.slice(chunk.own), stream.targets.columns(chunk.own));
  }

  // Returns the gradient of the last layer's output, in the memory of that output.
  template <class G>
  Matrix<T> head_backward(const GradientSums<Device, G>& sums, Matrix<T> output, const TokenWeights<A>& w,
                          Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights);
    auto sum = sums.head();
    for (const DividedRows& chunk : last_to_first(head_chunks))
      head.backward(sum.section, logp.columns(chunk.own), output.slice(chunk.own), stream.targets.columns(chunk.own),
                    w.columns(chunk.own));
    sum.finish();
    return output;  // its memory holds the gradient now
  }

  Device& dev;
  const Config& c;
  const Index lowest;  // backward stops at this layer; above 0, all below it is frozen, the embedding too
  const Frequencies frequencies;
  Weights<Device, T> weights;
  const Stream& stream;
  const Division& division;
  const Schedule schedule;
  const std::vector<DividedRows> chunks, head_chunks;
  const Ranks ranks;
};

}  // namespace streambp
