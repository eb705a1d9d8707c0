// How a gradient is computed: one walk over the layers of a model and the chunks of its token stream.
//
// Full-memory backpropagation, gradient checkpointing and StreamBP are this one walk with two settings:
//
//                  chunk           kept between forward and backward
//   full           whole stream    all activations of every layer
//   checkpoint     whole stream    the input of every layer
//   stream         C rows          the input of every layer
//
// A row of a layer's output depends on other rows only through their keys and values. So a layer's backward pass can go
// chunk by chunk, from the last to the first, and recompute only one chunk's activations at a time:
//
//   recompute K, V of the layer for all rows               K, V, dK, dV: the only full-length matrices of a layer
//   for each chunk, last to first:
//     recompute the chunk's activations from the saved layer input
//     go back through MLP, output projection, attention    adds to dK, dV of all rows up to the chunk's end
//     dK, dV of the chunk's own rows are now complete      only later rows attend to them, and those are done
//     go back through the Q, K, V projections              the gradient of the layer's input replaces that of its output
//
// All modes give the same bits: every operation works in tiles of kTile rows and adds up tiles from the last to the
// first, and chunks are whole tiles, visited from the last to the first.
#pragma once

#include <functional>

#include "memory/saved.cuh"
#include "memory/schedule.cuh"
#include "memory/sums.cuh"
#include "memory/weights.cuh"
#include "model.cuh"

namespace streambp {

template <class Device, class T>
class Walk {
 public:
  using A = Accumulator<T>;

  Walk(Device& dev, const Model<T>& model, const Stream& stream, Schedule schedule)
      : dev(dev), c(model.config), frequencies(c), weights(model), stream(stream), schedule(schedule) {
    for (const Index chunk : {schedule.chunk, schedule.head_chunk}) {
      require(schedule.keep == Keep::nothing || chunk % dev.tile == 0 || chunk >= stream.size(), "chunks of ", chunk,
              " rows are not a multiple of ", dev.tile, " rows, the tile by which this device sums weight gradients");
    }
  }

  // Adds the gradient of the loss to `gradient`, whose tensors are allocated and zeroed on first use, and writes logp.
  // w[t] is d loss / d logp[t]. If the weights depend on the log-probs of other tokens (DPO), `weigh` sets them once all
  // log-probs are known; the head then computes its logits twice.
  template <class G>
  void gradient(Tensors<G>& gradient, const TokenWeights<A>& w, Matrix<A> logp,
                const std::function<void()>& weigh = {}) {
    auto scope = dev.scope();
    Saved saved(dev, c, stream.size(), schedule.keep);
    const Matrix<T> output = forward(saved);
    if (weigh) head_forward(output, logp), weigh();
    const Matrix<T> dx = head_backward(gradient, output, w, logp);
    for (Index l = c.layers - 1; l >= 0; --l) {
      layer_backward(gradient, l, saved, dx);
      saved.close();
    }
    Sums sums(dev, gradient, Tensors<A>(c), [&](auto& t) { return embedding_table(c, t); });
    embedding_backward(dev, sums->embedding, stream.embedding_index(), dx, c.embedding_scale);
    sums.finish();
  }

  // The log-probs of the targets, without a gradient.
  void evaluate(Matrix<A> logp) {
    auto scope = dev.scope();
    head_forward(forward(), logp);
  }

  // The output of the last layer; nothing is kept for backward.
  Matrix<T> forward() {
    Saved saved(dev, c, stream.size(), Keep::nothing);
    return forward(saved);
  }

 private:
  using Saved = ResidentSaved<Device, T>;

  Matrix<T> forward(Saved& saved) {
    Matrix<T> x = saved.open();
    embedding(dev, x, stream.embedding_index(), weights.take_embedding(), c.embedding_scale);
    for (Index l = 0; l < c.layers; ++l) {
      const Matrix<T> y = l + 1 < c.layers ? saved.open() : saved.output();
      layer_forward(l, saved, y, x);
      x = y;
    }
    return x;
  }

  void layer_forward(Index l, const Saved& saved, Matrix<T> y, Matrix<T> x) {
    const auto& leased = weights.take(l);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased);
    auto scope = dev.scope();
    const bool kept = saved.has_activations();
    const KeysValues<T> kv = kept ? saved.keys_values(l) : allocate_keys_values<T>(dev, c, stream.size());
    for (Rows rows : chunks(stream.size(), schedule.chunk)) {
      auto chunk_scope = dev.scope();
      const Activations<T> a = kept ? saved.activations(l) : allocate_activations<T>(dev, c, rows.size());
      layer.forward(y.slice(rows), {stream.at(rows), x.slice(rows), kv, a});
    }
  }

  // dx: the gradient of the layer's output, replaced by the gradient of its input.
  template <class G>
  void layer_backward(Tensors<G>& gradient, Index l, const Saved& saved, Matrix<T> dx) {
    const auto& leased = weights.take(l);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased);
    Sums sums(dev, gradient.layers[static_cast<std::size_t>(l)], Layer<A>{},
              [&](auto& t) { return layer_table(c, l, t); });
    {
      auto scope = dev.scope();
      const bool kept = saved.has_activations();
      const Matrix<T> x = saved.input(l);
      const KeysValues<T> kv = kept ? saved.keys_values(l) : recompute_keys_values(layer, x);
      const KeysValues<A> dkv = allocate_keys_values<A>(dev, c, stream.size());
      zero(dev, dkv.k), zero(dev, dkv.v);
      for (Rows rows : last_to_first(chunks(stream.size(), schedule.chunk))) {
        auto chunk_scope = dev.scope();
        const Activations<T> a = kept ? saved.activations(l) : allocate_activations<T>(dev, c, rows.size());
        const Chunk<T> chunk = {stream.at(rows), x.slice(rows), kv, a};
        if (!kept) layer.recompute(chunk);
        layer.backward(*sums, dx.slice(rows), dkv, chunk);
      }
    }
    sums.finish();
  }

  KeysValues<T> recompute_keys_values(TransformerLayer<Device, T>& layer, Matrix<T> x) {
    const KeysValues<T> kv = allocate_keys_values<T>(dev, c, stream.size());
    for (Rows rows : chunks(stream.size(), schedule.chunk)) {
      auto scope = dev.scope();
      const auto a = allocate_key_value_activations<T>(dev, c, rows.size());
      layer.keys_values(a, kv.slice(rows), x.slice(rows), stream.at(rows).positions);
    }
    return kv;
  }

  // The head goes chunk by chunk too: logits exist for one chunk at a time.
  void head_forward(Matrix<T> x, Matrix<A> logp) {
    Head<Device, T> head(dev, c, weights.take_norm(), weights.take_head());
    for (Rows rows : chunks(stream.size(), schedule.head_chunk)) {
      head.forward(logp.columns(rows.begin, rows.size()), x.slice(rows), targets(rows));
    }
  }

  // Returns the gradient of the last layer's output, in the memory of that output.
  template <class G>
  Matrix<T> head_backward(Tensors<G>& gradient, Matrix<T> output, const TokenWeights<A>& w, Matrix<A> logp) {
    Head<Device, T> head(dev, c, weights.take_norm(), weights.take_head());
    Sums sums(dev, gradient, Tensors<A>(c), [&](auto& t) {
      auto rows = head_table(c, t);
      if (c.tied) rows.push_back(embedding_table(c, t).front());
      return rows;
    });
    const Linear<A> g = c.tied ? Linear<A>{sums->embedding.tokens, {}} : sums->head;
    for (Rows rows : last_to_first(chunks(stream.size(), schedule.head_chunk))) {
      head.backward(sums->norm, g, logp.columns(rows.begin, rows.size()), output.slice(rows), targets(rows),
                    w.columns(rows));
    }
    sums.finish();
    const Matrix<T> dx = output;
    return dx;
  }

  Matrix<std::int32_t> targets(Rows rows) const { return stream.targets.columns(rows.begin, rows.size()); }

  Device& dev;
  const Config& c;
  const Frequencies frequencies;
  const ResidentWeights<T> weights;
  const Stream& stream;
  const Schedule schedule;
};

}  // namespace streambp
