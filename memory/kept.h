// What forward keeps of a block for its backward pass, by layer, chunk and part of the layer (memory/schedule.h). Any set of
// parts can be kept: everything in near memory is full-memory backpropagation; the inputs of layers alone are checkpointing
// and StreamBP.
//
// Layers below `lowest`, which backward does not reach, keep nothing. Where the input of a layer is not kept in near memory,
// the layer works in place, in one matrix; far memory gets a chunk as soon as it is computed.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "memory/kept_rows.h"
#include "memory/summaries.h"
#include "model/activations.h"

namespace streambp {

template <class Device, class T>
class KeptValues {
  using A = Accumulator<T>;

 public:
  // Frees what it has allocated when it ends.
  KeptValues(Device& dev, const Config& c, Summaries<Device, T>& summaries, const Block& block, const KeptSets& sets,
             const Group& ranks, Index lowest)
      : block(block),
        scope_(dev.scope()),
        dev_(dev),
        c_(c),
        summaries_(summaries),
        ranks_(ranks),
        lowest_(lowest),
        sets_(sets),
        residual_(summaries.residual(block)),
        inputs_(dev, shape(Part::input, c.hidden, View::own_rows)),
        leaving_(inputs_.any_far() ? block.chunks.size() : 0),
        layers_(static_cast<std::size_t>(c.layers)) {
    for (Index layer = 0; layer < c.layers; ++layer) {
      if (matrices_.contains(c.kind(layer))) continue;
      Activations<T> none;
      for_each_activation(c, layer, ranks.size, none, [&]<class M>(Part part, Matrix<M>&, Index columns, View view) {
        list<M>(layer).emplace_back(dev, shape(part, columns, view, c.kind(layer)));
      });
    }
  }

  // Allocates what a layer keeps. Returns the memory for its input.
  Matrix<T> open(Index layer) {
    Layer& opened = at(layer) = {dev_.arena.mark(), dev_.far.mark()};
    inputs_.open(layer);
    if (parts(layer).have(Part::keys_values)) opened.summary = summaries_.summary(layer, block);
    for_each(layer, [&](auto& kept) { kept.open(layer); });
    return inputs_.near(layer) ? inputs_.whole(layer) : residual_;
  }
  // Frees it, and all layers that were opened later.
  void close(Index layer) { dev_.arena.release(at(layer).mark), dev_.far.release(at(layer).far_mark); }

  // --- The residual stream ---

  Matrix<T> output() const { return residual_; }  // of the last layer
  // Call when these rows of a layer's input are computed, in the matrix of open(layer).
  void finish_input(Index layer, const DividedRows& chunk) {
    if (inputs_.far(layer)) leaving_[chunk.number] = inputs_.put(layer, chunk.number, residual_.slice(chunk.own));
  }
  // Backward reads them last to first; first to last before that, if it computes K and V again.
  Matrix<T> input(Index layer, const DividedRows& chunk) { return inputs_.take(layer, chunk.number); }

  // --- A layer's activations ---

  const KeptParts& parts(Index layer) const { return layer < lowest_ ? nothing_ : sets_.of(layer); }

  // Forward: memory for a chunk's activations. Call finish_chunk when they and the layer's output are computed.
  Activations<T> begin_chunk(Index layer, const DividedRows& chunk) {
    if (inputs_.any_far()) leaving_[chunk.number].wait();  // the output may replace the input's rows
    return with_memory(layer, chunk, [&](auto& kept) { return kept.begin(layer, chunk.number); });
  }
  void finish_chunk(Index layer, const DividedRows& chunk) {
    finish_input(layer + 1, chunk);
    for_each(layer, [&](auto& kept) { kept.finish(layer, chunk.number); });
  }
  // Backward: what is kept of them, and memory for the rest.
  Activations<T> take_chunk(Index layer, const DividedRows& chunk) {
    return with_memory(layer, chunk, [&](auto& kept) { return kept.take(layer, chunk.number); });
  }

  // --- The layer's causal summary and its gradient, for all rows that the block sees (memory/summaries.h) ---

  bool have_summary(Index layer) const { return parts(layer).have(Part::keys_values) || summaries_.stays(layer); }
  // Kept, or in the caller's scope.
  Summary<T> summary(Index layer) {
    return parts(layer).have(Part::keys_values) ? at(layer).summary : summaries_.summary(layer, block);
  }
  Summary<A> summary_gradient(Index layer) { return summaries_.gradient(layer, block); }
  StreamRows rows(Index layer, const DividedRows& chunk) const { return summaries_.rows(layer, block, chunk); }
  // Call when a pass through the layer is done: later blocks need its summary, earlier ones add to the gradient of it.
  void pass_on(Index layer, const Summary<T>& summary) { summaries_.pass_on(layer, block, summary); }
  void pass_back(Index layer, const Summary<A>& gradient) { summaries_.pass_back(layer, block, gradient); }

  const Block& block;

 private:
  struct Layer {
    Arena::Mark mark, far_mark;
    Summary<T> summary = {};
  };
  Layer& at(Index layer) { return layers_[static_cast<std::size_t>(layer)]; }

  // The matrices of activations of all layers of one kind, by place in for_each_activation.
  struct Matrices {
    std::deque<KeptRows<Device, T>> values;
    std::deque<KeptRows<Device, A>> sums;  // those in the type of sums
  };

  // Activations with the matrices that matrix_of(kept) returns, and memory for the others.
  template <class F>
  Activations<T> with_memory(Index layer, const DividedRows& chunk, F&& matrix_of) {
    Activations<T> a;
    std::size_t value = 0, sum = 0;
    for_each_activation(c_, layer, ranks_.size, a, [&]<class M>(Part, Matrix<M>& matrix, Index, View) {
      matrix = matrix_of(list<M>(layer)[std::is_same_v<M, T> ? value++ : sum++]);
    });
    return allocate_activations<T>(dev_, c_, layer, chunk, ranks_, a);
  }
  template <class F>
  void for_each(Index layer, F&& f) {
    Matrices& all = matrices_[c_.kind(layer)];
    for (auto& kept : all.values) f(kept);
    for (auto& kept : all.sums) f(kept);
  }
  // The kept matrices of this type.
  template <class M>
  auto& list(Index layer) {
    Matrices& all = matrices_[c_.kind(layer)];
    if constexpr (std::is_same_v<M, T>) {
      return all.values;
    } else {
      return all.sums;
    }
  }

  // Of a part of the layers of this kind, or of all.
  KeptShape shape(Part part, Index columns, View view, std::optional<LayerKind> kind = {}) const {
    KeptShape result = {{}, columns, part == Part::input ? Kind::saved : Kind::kept, {}, {}};
    const Index first = block.rows.all.begin;
    for (const auto& [all, own, number] : block.chunks)
      result.chunks.push_back(view == View::own_rows ? own : Rows{all.begin - first, all.end - first});
    for (Index layer = 0; layer < c_.layers; ++layer) {
      const bool has = !kind || c_.kind(layer) == *kind;
      result.places.push_back(has ? parts(layer).place(part) : Place::nowhere);
      result.read_twice.push_back(part == Part::input && !have_summary(layer));
    }
    return result;
  }

  decltype(std::declval<Device&>().scope()) scope_;
  Device& dev_;
  const Config& c_;
  Summaries<Device, T>& summaries_;
  const Group ranks_;
  const Index lowest_;
  const KeptParts nothing_ = KeptParts::nothing();
  const KeptSets sets_;
  const Matrix<T> residual_;
  KeptRows<Device, T> inputs_;
  std::map<LayerKind, Matrices> matrices_;
  std::vector<PendingCopy> leaving_;  // of each chunk of inputs
  std::vector<Layer> layers_;
};

}  // namespace streambp
