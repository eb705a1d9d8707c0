// How a gradient is computed: one walk over the layers of a model and the chunks of its token stream.
//
// Full-memory backpropagation, gradient checkpointing and StreamBP are this one walk with different settings:
//
//                  chunk           head chunk      kept between forward and backward
//   full           whole stream    whole stream    all activations of every layer
//   checkpoint     whole stream    whole stream    the input of every layer
//   stream         C rows          H rows          the input of every layer, and any of its parts (memory/schedule.h)
//
// A row of a layer's output depends on earlier rows only through their causal summary: in attention, their keys and values
// (model/mixer.h). So a layer's backward pass can go chunk by chunk, from the last to the first, and recompute only one
// chunk's activations at a time. In a layer of attention:
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
// Several ranks can share a stream. Every chunk has rows of each rank (parallel/division.h); `own` means the rows of this one.
// The walk does not see what ranks exchange: mixers get what they need of other ranks' rows (parallel/head_exchange.h,
// parallel/tile_exchange.h), gradient sums add up all ranks, in lanes (memory/sums.h), and sharded weights are gathered
// (memory/weights.h). A rank without a micro-batch walks an empty stream: it has no chunks, but takes part in every exchange.
//
// The order: a cell (layer, chunk) of backward needs the cell of the layer above, all later chunks of its own layer, and the
// layer's summary of earlier rows. Every order that respects this gives the same bits. The stream is cut into blocks of
// rows; backward goes through them from the last to the first, and through all layers of a block, layer by layer, in chunks:
//
//   one block         keeps layer inputs for all rows; the summary, its gradient and the gradient sums of one layer
//   several blocks    keep layer inputs for one block; summaries, their gradients and the gradient sums of all layers. So
//                     forward goes through all blocks for their summaries, and through each again before its backward
//                     (memory/summaries.h)
#pragma once

#include <functional>
#include <optional>

#include "memory/kept.h"
#include "memory/routing.h"
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
        schedule(schedule.in_whole_tiles(stream.division)),
        ranks(ranks) {}

  // Adds the gradient of the loss to the step's gradient, which is allocated and zeroed on first use, and writes logp.
  // w[t] is d loss / d logp[t]; a loss that balances the use of experts needs `routed`. If the weights depend on the
  // log-probs of other tokens (DPO), `weigh` sets them once all log-probs are known; the head then computes its logits
  // twice.
  template <class G>
  RoutingCounts gradient(const StepGradient<G>& step, const TokenWeights<A>& w, Matrix<A> logp,
                         const RoutedRows<A>& routed = {}, const std::function<void()>& weigh = {}) {
    auto scope = dev.scope();
    const auto blocks = streambp::blocks(stream.division, schedule, stream.longest);
    GradientSums<Device, G> sums(dev, c, ranks, step, blocks.size() > 1 ? OpenSums::all : OpenSums::one, lowest);
    Summaries<Device, T> summaries(dev, c, stream, blocks, ranks.sequence, lowest);
    Routing<Device, T> routing(dev, c, routed);
    std::optional<Kept> kept;  // of the block that forward went through last
    const auto forward_of = [&](const Block& block, const KeptSets& sets, const Routing<Device, T>* counts = nullptr) {
      kept.reset();  // frees memory for the next one
      kept.emplace(dev, c, summaries, block, sets, ranks.sequence, lowest);
      forward(*kept, counts);
    };
    for (const Block& block : blocks) {
      forward_of(block, block.last ? schedule.kept : KeptParts::nothing(), &routing);
      if (weigh) head_forward(block, kept->output(), logp);
    }
    if (weigh) weigh();
    const RoutingCounts counts = routing.finish(ranks.sequence);
    for (const Block& block : last_to_first(blocks)) {
      if (!block.last) forward_of(block, schedule.kept);  // of the last block, everything is there
      const Matrix<T> dx = kept->output();                // the same memory
      head_backward(block, sums, dx, w, logp);
      for (Index l = c.layers - 1; l >= lowest; --l) {
        layer_backward(l, *kept, sums, routing, dx);
        kept->close(l);
      }
    }
    sums.finish();
    if (trains_embedding(c)) embedding_gradient(sums, summaries.residual());
    return counts;
  }

  // The log-probs of the targets, without a gradient.
  void evaluate(Matrix<A> logp) {
    auto scope = dev.scope();
    head_forward(one_block(), forward(), logp);
  }

  // The output of the last layer; nothing is kept for backward.
  Matrix<T> forward() {
    const Block all = one_block();
    Summaries<Device, T> summaries(dev, c, stream, {all}, ranks.sequence, c.layers);
    Kept nothing(dev, c, summaries, all, KeptParts::nothing(), ranks.sequence, c.layers);
    forward(nothing);
    return nothing.output();
  }

 private:
  Block one_block() const {
    return blocks(stream.division, {schedule.kept, schedule.chunk, schedule.head_chunk}, 0).front();
  }

  void forward(Kept& kept, const Routing<Device, T>* counts = nullptr) {
    Matrix<T> x = kept.open(0);
    embed(dev, c, x, stream.embedding_index(kept.block.rows.own), weights.take_embedding().weights.embedding);
    for (const DividedRows& chunk : kept.block.chunks) kept.finish_input(0, chunk);
    for (Index l = 0; l < c.layers; ++l) {
      const Matrix<T> y = l + 1 < c.layers ? kept.open(l + 1) : kept.output();
      layer_forward(l, kept, counts, y, x);
      x = y;
    }
  }

  void layer_forward(Index l, Kept& kept, const Routing<Device, T>* counts, Matrix<T> y, Matrix<T> x) {
    const auto leased = weights.take_layer(l, l + 1 < c.layers ? l + 1 : kNoLayer);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights, ranks.sequence);
    auto scope = dev.scope();
    const Summary<T> past = kept.summary(l);
    for (const DividedRows& chunk : kept.block.chunks) {
      auto cell = dev.scope({"forward", l, chunk.all});
      Activations<T> a = kept.begin_chunk(l, chunk);  // has waited until y may replace x
      if (counts) counts->count(a, l, kept.block.own(chunk));
      layer.forward(y.slice(chunk.own), {kept.rows(l, chunk), x.slice(chunk.own), past, a});
      kept.finish_chunk(l, chunk);
    }
    kept.pass_on(l, past);
  }

  // dx: the gradient of the layer's output, replaced by the gradient of its input.
  template <class G>
  void layer_backward(Index l, Kept& kept, GradientSums<Device, G>& sums, const Routing<Device, T>& routing,
                      Matrix<T> dx) {
    const auto leased = weights.take_layer(l, l > lowest ? l - 1 : kNoLayer);
    TransformerLayer<Device, T> layer(dev, c, frequencies, l, leased.weights, ranks.sequence);
    sums.layer(l, [&](const Layer<A>& g) {
      auto scope = dev.scope();
      const Summary<T> past = kept.summary(l);
      const Summary<A> dpast = kept.summary_gradient(l);
      if (!kept.have_summary(l)) {
        for (const DividedRows& chunk : kept.block.chunks) {
          auto cell = dev.scope({"summary", l, chunk.all});
          layer.summarise(kept.rows(l, chunk), kept.input(l, chunk), past);
        }
      }
      for (const DividedRows& chunk : last_to_first(kept.block.chunks)) {
        auto cell = dev.scope({"backward", l, chunk.all});
        Chunk<T> in = {kept.rows(l, chunk), kept.input(l, chunk), past, kept.take_chunk(l, chunk)};
        routing.balance(in.a, l, kept.block.own(chunk));
        layer.recompute(in, kept.parts(l));
        layer.backward(g, dx.slice(chunk.own), dpast, in);
      }
      kept.pass_back(l, dpast);
    });
  }

  // The head goes chunk by chunk too: logits exist for one chunk at a time. x: the output of the last layer for a block.
  void head_forward(const Block& block, Matrix<T> x, Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights);
    for (const DividedRows& chunk : block.head_chunks) {
      auto cell = dev.scope({"head forward", c.layers, chunk.all});
      const Rows own = block.own(chunk);
      head.forward(logp.columns(own), x.slice(chunk.own), stream.targets.columns(own));
    }
  }

  // Replaces x, this output, by its gradient.
  template <class G>
  void head_backward(const Block& block, GradientSums<Device, G>& sums, Matrix<T> x, const TokenWeights<A>& w,
                     Matrix<A> logp) {
    const auto leased = weights.take_head();
    Head<Device, T> head(dev, c, leased.weights);
    sums.head([&](const Tensors<A>& g) {
      for (const DividedRows& chunk : last_to_first(block.head_chunks)) {
        auto cell = dev.scope({"head backward", c.layers, chunk.all});
        const Rows own = block.own(chunk);
        head.backward(g, logp.columns(own), x.slice(chunk.own), stream.targets.columns(own), w.columns(own));
      }
    });
  }

  // dx: the gradient of the first layer's input, for all rows.
  template <class G>
  void embedding_gradient(GradientSums<Device, G>& sums, Matrix<T> dx) {
    const EmbeddingIndex rows = stream.embedding_index();
    sums.embedding([&](const Tensors<A>& g) {
      if (c.embedding_norm) embedding_norm_backward(dev, c, dx, rows, weights.take_embedding().weights.embedding);
      embedding_backward(dev, g.embedding, rows, dx, c.embedding_scale);
    });
  }

  Device& dev;
  const Config& c;
  const Index lowest;  // backward stops at this layer; above 0, all below it is frozen, the embedding too
  const Frequencies frequencies;
  Weights<Device, T> weights;
  const Stream& stream;
  const Schedule schedule;
  const Ranks ranks;
};

}  // namespace streambp
