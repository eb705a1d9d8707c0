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
//
// Several ranks can share a stream. Each has some of the rows (parallel/division.cuh), and rows depend on each other only
// through attention, so the walk hardly changes: a chunk has rows of every rank, and around attention the ranks exchange
// rows for heads (model.cuh).
#pragma once

#include <functional>

#include "memory/far_saved.cuh"
#include "memory/schedule.cuh"
#include "memory/sums.cuh"
#include "memory/weights.cuh"
#include "model.cuh"

namespace streambp {

// Where a gradient goes, and which micro-batch it is of.
template <class G>
struct GradientOf {
  Tensors<G>& gradient;
  MicroBatch micro_batch = {};
  Place place = Place::near;  // of the gradient's matrices of layers
};

// Tied models add the gradients of embedding and head. Over several micro-batches or lanes, they are summed apart, so
// that the order of additions does not depend on the number of ranks.
inline bool head_is_apart(const Config& c, const Ranks& ranks, MicroBatch micro_batch) {
  return !c.tied || micro_batch.count > 1 || ranks.lanes * ranks.sequence.size > 1;
}

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
        schedule(schedule),
        ranks(ranks) {
    for (const Index chunk : {schedule.chunk, schedule.head_chunk}) {
      require(schedule.keep == Keep::nothing || chunk % dev.tile == 0 || chunk >= stream.size(), "chunks of ", chunk,
              " rows are not a multiple of ", dev.tile, " rows, the tile by which this device sums weight gradients");
    }
  }

  // Adds the gradient of the loss to `gradient`, whose tensors are allocated and zeroed on first use, and writes logp.
  // w[t] is d loss / d logp[t]. If the weights depend on the log-probs of other tokens (DPO), `weigh` sets them once all
  // log-probs are known; the head then computes its logits twice.
  template <class G>
  void gradient(const GradientOf<G>& of, const TokenWeights<A>& w, Matrix<A> logp,
                const std::function<void()>& weigh = {}) {
    auto scope = dev.scope();
    const auto saved = make_saved<Device, T>(dev, c, division, schedule, lowest);
    const Matrix<T> output = forward(*saved);
    if (weigh) head_forward(output, logp), weigh();
    const Matrix<T> dx = head_backward(of, output, w, logp);
    for (Index l = c.layers - 1; l >= lowest; --l) {
      layer_backward(of, l, *saved, dx);
      saved->close();
    }
    embedding_backward(of, dx);
  }

  // For a rank without a micro-batch in the last round of a step: it leases the weights and adds what others compute.
  template <class G>
  void gradient_of_others(const GradientOf<G>& of, bool weighs) {
    forward_of_others();
    if (weighs) weights.take_head();
    weights.take_head(), head_sums(of).finish();
    for (Index l = c.layers - 1; l >= lowest; --l) weights.take(l, below(l)), layer_sums(of, l).finish();
    embedding_sums(of).finish();
  }

  // The log-probs of the targets, without a gradient.
  void evaluate(Matrix<A> logp) {
    auto scope = dev.scope();
    head_forward(forward(), logp);
  }

  void evaluation_of_others() { forward_of_others(), weights.take_head(); }

  // The output of the last layer; nothing is kept for backward.
  Matrix<T> forward() {
    ResidentSaved<Device, T> saved(dev, c, division, Keep::nothing, 0);
    return forward(saved);
  }

 private:
  Matrix<T> forward(Saved<T>& saved) {
    Matrix<T> x = saved.open();
    embedding(dev, x, stream.embedding_index(), weights.take_embedding().weights.embedding, c.embedding_scale);
    for (const DividedRows& chunk : chunks(schedule.chunk)) saved.finish(0, chunk.own);
    for (Index l = 0; l < c.layers; ++l) {
      const Matrix<T> y = l + 1 < c.layers ? saved.open() : saved.output();
      layer_forward(l, saved, y, x);
      x = y;
    }
    return x;
  }

  void forward_of_others() {
    weights.take_embedding();
    for (Index l = 0; l < c.layers; ++l) weights.take(l, l + 1);
  }

  void layer_forward(Index l, Saved<T>& saved, Matrix<T> y, Matrix<T> x) {
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, weights.take(l, l + 1), ranks.sequence);
    auto scope = dev.scope();
    const bool kept = saved.has_activations(l);
    const KeysValues<T> kv = kept ? saved.keys_values(l) : keys_values_of_stream<T>();
    for (const DividedRows& chunk : chunks(schedule.chunk)) {
      auto chunk_scope = dev.scope();
      const Activations<T> a = kept ? saved.activations(l) : activations(chunk, saved.attention().begin(l, chunk.all));
      saved.begin(chunk.own);
      layer.forward(y.slice(chunk.own), {stream.at(chunk), x.slice(chunk.own), kv, a});
      saved.finish(l + 1, chunk.own);
      saved.attention().finish(l, chunk.all);
    }
  }

  // dx: the gradient of the layer's output, replaced by the gradient of its input.
  template <class G>
  void layer_backward(const GradientOf<G>& of, Index l, Saved<T>& saved, Matrix<T> dx) {
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, weights.take(l, below(l)), ranks.sequence);
    auto sums = layer_sums(of, l);
    {
      auto scope = dev.scope();
      const bool kept = saved.has_activations(l);
      const KeysValues<T> kv = kept ? saved.keys_values(l) : recompute_keys_values(layer, l, saved);
      const KeysValues<A> dkv = keys_values_of_stream<A>();
      zero(dev, dkv.k), zero(dev, dkv.v);
      for (const DividedRows& chunk : last_to_first(chunks(schedule.chunk))) {
        auto chunk_scope = dev.scope();
        const Activations<T> a = kept ? saved.activations(l) : activations(chunk, saved.attention().take(l, chunk.all));
        const Chunk<T> in = {stream.at(chunk), saved.input(l, chunk.own), kv, a};
        if (!kept) layer.recompute(in, saved.attention().keeps(l) ? Attention::kept : Attention::computed);
        layer.backward({sums.of_lanes(), lane_parts(division, chunk.own)}, dx.slice(chunk.own), dkv, in);
      }
    }
    sums.finish();
  }

  KeysValues<T> recompute_keys_values(TransformerLayer<Device, T>& layer, Index l, Saved<T>& saved) {
    const KeysValues<T> kv = keys_values_of_stream<T>();
    for (const DividedRows& chunk : chunks(schedule.chunk)) {
      auto scope = dev.scope();
      const auto a = allocate_key_value_activations<T>(dev, c, chunk.own.size(), division.ranks);
      layer.keys_values(a, kv.slice(chunk.all), saved.input(l, chunk.own), stream.at(chunk).positions);
    }
    return kv;
  }

  // The head goes chunk by chunk too: logits exist for one chunk at a time.
  void head_forward(Matrix<T> x, Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights.norm, leased.weights.head);
    for (const DividedRows& chunk : chunks(schedule.head_chunk)) {
      const Rows own = chunk.own;
      head.forward(logp.columns(own.begin, own.size()), x.slice(own), targets(own));
    }
  }

  // Returns the gradient of the last layer's output, in the memory of that output.
  template <class G>
  Matrix<T> head_backward(const GradientOf<G>& of, Matrix<T> output, const TokenWeights<A>& w, Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights.norm, leased.weights.head);
    auto sums = head_sums(of);
    for (const DividedRows& chunk : last_to_first(chunks(schedule.head_chunk))) {
      for (const LanePart& part : lane_parts(division, chunk.own)) {
        const Rows own = {chunk.own.begin + part.rows.begin, chunk.own.begin + part.rows.end};
        Tensors<A>& sum = sums.of_lane(part.lane);
        const Linear<A> weight = head_is_apart(of.micro_batch) ? sum.head : Linear<A>{sum.embedding.tokens, {}};
        head.backward(sum.norm, weight, logp.columns(own.begin, own.size()), output.slice(own), targets(own),
                      w.columns(own));
      }
    }
    sums.finish();
    const Matrix<T> dx = output;
    return dx;
  }

  template <class G>
  void embedding_backward(const GradientOf<G>& of, Matrix<T> dx) {
    auto sums = embedding_sums(of);
    for (Index lane = 0; lane < ranks.lanes; ++lane) {
      streambp::embedding_backward(dev, sums.of_lane(lane).embedding, stream.embedding_index(lane), dx,
                                   c.embedding_scale);
    }
    sums.finish();
  }

  // --- The gradient's three sections ---

  template <class G>
  auto layer_sums(const GradientOf<G>& of, Index l) {
    return Sums(dev, ranks, of.micro_batch, of.gradient.layers[static_cast<std::size_t>(l)], of.place, Layer<A>{},
                [&c = c, l](auto& t) { return layer_table(c, l, t); });
  }
  template <class G>
  auto head_sums(const GradientOf<G>& of) {
    return Sums(dev, ranks, of.micro_batch, of.gradient, Place::near, Tensors<A>(c),
                [&c = c, apart = head_is_apart(of.micro_batch)](auto& t) {
                  Config separate = c;
                  separate.tied = !apart;
                  auto table = head_table(separate, t);
                  const auto embedding = embedding_table(c, t).front();
                  if (!apart) table.push_back(embedding);
                  if (apart && c.tied) table.back().parameter.trained = embedding.parameter.trained;
                  return table;
                });
  }
  template <class G>
  auto embedding_sums(const GradientOf<G>& of) {
    return Sums(dev, ranks, of.micro_batch, of.gradient, Place::near, Tensors<A>(c),
                [&c = c](auto& t) { return embedding_table(c, t); });
  }
  bool head_is_apart(MicroBatch micro_batch) const { return streambp::head_is_apart(c, ranks, micro_batch); }

  // --- Helpers ---

  // The layer that backward takes after layer l; -1: none.
  Index below(Index l) const { return l > lowest ? l - 1 : -1; }
  std::vector<DividedRows> chunks(Index size) const { return streambp::chunks(division, size); }
  template <class U>
  KeysValues<U> keys_values_of_stream() {
    return allocate_keys_values<U>(dev, c, division.rows, division.ranks);
  }
  Activations<T> activations(const DividedRows& chunk, const HeadActivations<T>& kept) {
    return allocate_activations<T>(dev, c, chunk, division.ranks, kept);
  }
  Matrix<std::int32_t> targets(Rows rows) const { return stream.targets.columns(rows.begin, rows.size()); }

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
