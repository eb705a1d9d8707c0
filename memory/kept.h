// What forward keeps for backward, by layer, chunk and kind:
//
//   input          of a layer: its rows of the residual stream
//   attention      outputs of attention and the log-sum-exp of its scores, so that backward need not repeat it
//   activations    everything, with K and V of the layer: full mode, where the whole stream is one chunk
//
// Layers below `first`, which backward does not reach, keep nothing. Where the inputs of layers are not kept in near memory,
// all layers work in place, in one matrix; far memory gets a chunk as soon as it is computed.
#pragma once

#include <vector>

#include "memory/kept_rows.h"
#include "memory/schedule.h"
#include "model/activations.h"

namespace streambp {

template <class Device, class T>
class KeptValues {
  using A = Accumulator<T>;

 public:
  KeptValues(Device& dev, const Config& c, const Division& division, const Schedule& schedule, const Group& ranks,
             Index first)
      : dev_(dev),
        c_(c),
        rows_({0, division.rows}, {0, division.own()}),
        ranks_(ranks),
        first_(first),
        everything_(schedule.keep == Keep::activations),
        residual_(allocate<T>(dev, division.own(), c.hidden, Kind::saved)),
        inputs_(dev, input_shape(division, schedule), KeptRows<Device, T>::Reading::first_to_last_and_back),
        attended_(dev, attention_shape(division, schedule, c.q_width())),
        lse_(dev, attention_shape(division, schedule, c.heads)),
        leaving_(inputs_.far() ? chunks(division, schedule.chunk).size() : 0),
        layers_(static_cast<std::size_t>(c.layers)) {
    require(!everything_ || (schedule.inputs == Place::near && schedule.attention == Place::nowhere),
            "full mode keeps all activations in near memory; use stream mode");
  }

  // Allocates what a layer keeps. Returns the memory for its input.
  Matrix<T> open(Index layer) {
    Layer& opened = at(layer) = {dev_.arena.mark(), dev_.far.mark(), {}, {}};
    inputs_.open(layer);
    if (has_activations(layer)) {
      opened.keys_values = allocate_keys_values<T>(dev_, c_, rows_.all.size(), ranks_.size);
      opened.activations = allocate_activations<T>(dev_, c_, rows_, ranks_);
    }
    attended_.open(layer), lse_.open(layer);
    return inputs_.keeps(layer) && !inputs_.far() ? inputs_.whole(layer) : residual_;
  }
  // Frees it, and all layers that were opened later.
  void close(Index layer) { dev_.arena.release(at(layer).mark), dev_.far.release(at(layer).far_mark); }

  // --- The residual stream ---

  Matrix<T> output() const { return residual_; }  // of the last layer
  // Call when these rows of a layer's input are computed, in the matrix of open(layer).
  void finish_input(Index layer, const DividedRows& chunk) {
    if (inputs_.far() && inputs_.keeps(layer))
      leaving_[chunk.number] = inputs_.put(layer, chunk.number, residual_.slice(chunk.own));
  }
  // Backward reads them twice: first to last for K and V, then last to first.
  Matrix<T> input(Index layer, const DividedRows& chunk) { return inputs_.take(layer, chunk.number); }

  // --- A layer's activations, kept or in the caller's scope ---

  bool has_activations(Index layer) const { return everything_ && layer >= first_; }
  bool has_attention(Index layer) const { return attended_.keeps(layer); }

  KeysValues<T> memory_of_keys_values(Index layer) {
    return has_activations(layer) ? at(layer).keys_values
                                  : allocate_keys_values<T>(dev_, c_, rows_.all.size(), ranks_.size);
  }
  // Forward: memory for a chunk's activations. Call finish_chunk when they and the layer's output are computed.
  Activations<T> begin_chunk(Index layer, const DividedRows& chunk) {
    if (inputs_.far()) leaving_[chunk.number].wait();  // the output may replace the input's rows
    return activations(layer, chunk, {attended_.begin(layer, chunk.number), lse_.begin(layer, chunk.number)});
  }
  void finish_chunk(Index layer, const DividedRows& chunk) {
    finish_input(layer + 1, chunk);
    attended_.finish(layer, chunk.number), lse_.finish(layer, chunk.number);
  }
  // Backward: what is kept of them, and memory for the rest.
  Activations<T> take_chunk(Index layer, const DividedRows& chunk) {
    return activations(layer, chunk, {attended_.take(layer, chunk.number), lse_.take(layer, chunk.number)});
  }

 private:
  struct Layer {
    Arena::Mark mark, far_mark;
    KeysValues<T> keys_values;
    Activations<T> activations;
  };
  Activations<T> activations(Index layer, const DividedRows& chunk, const AttentionOutput<T>& attention) {
    return has_activations(layer) ? at(layer).activations : allocate_activations<T>(dev_, c_, chunk, ranks_, attention);
  }
  Layer& at(Index layer) { return layers_[static_cast<std::size_t>(layer)]; }

  KeptShape input_shape(const Division& division, const Schedule& schedule) const {
    std::vector<Rows> rows;
    for (const DividedRows& chunk : chunks(division, schedule.chunk)) rows.push_back(chunk.own);
    const Place place = schedule.keep == Keep::nothing ? Place::nowhere : schedule.inputs;
    return {std::move(rows), c_.hidden, c_.layers, first_, Kind::saved, place};
  }
  // Ranks that share a stream have all rows of their heads.
  KeptShape attention_shape(const Division& division, const Schedule& schedule, Index width) const {
    std::vector<Rows> rows;
    for (const DividedRows& chunk : chunks(division, schedule.chunk)) rows.push_back(chunk.all);
    return {std::move(rows), width / ranks_.size, c_.layers, first_, Kind::attention, schedule.attention};
  }

  Device& dev_;
  const Config& c_;
  const DividedRows rows_;
  const Group ranks_;
  const Index first_;
  const bool everything_;
  const Matrix<T> residual_;
  KeptRows<Device, T> inputs_, attended_;
  KeptRows<Device, A> lse_;
  std::vector<PendingCopy> leaving_;  // of each chunk of inputs
  std::vector<Layer> layers_;
};

}  // namespace streambp
