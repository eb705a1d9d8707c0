// A matrix per layer in far memory, in chunks of rows. Near memory has two slots: one chunk is in use, while the next one
// arrives or the one before leaves.
#pragma once

#include <vector>

#include "kernels/base/device.cuh"

namespace streambp {

template <class Device, class T>
class FarChunks {
 public:
  // How backward reads the chunks of a layer. Where the order turns around, both chunks are still in their slots.
  enum class Reading { last_to_first, first_to_last_and_back };

  struct Shape {
    std::vector<Index> rows;  // of each chunk
    Index cols, layers;
    Index first = 0;  // layers below keep nothing
    Kind kind;
  };

  FarChunks(Device& dev, Shape shape, Reading reading) : dev_(dev), shape_(std::move(shape)), reading_(reading) {
    Index rows = 0;
    for (Index n : shape_.rows) rows = most(rows, n);
    for (Slot& slot : slots_) slot.memory = allocate<T>(dev, rows, shape_.cols, shape_.kind);
  }

  bool keeps(Index layer) const { return shape_.first <= layer && layer < shape_.layers; }

  // The layers are a stack, as in Saved.
  void open() {
    Layer layer{dev_.far.mark(), {}};
    if (keeps(static_cast<Index>(layers_.size())))
      for (Index rows : shape_.rows) layer.chunks.push_back(allocate_far<T>(dev_, rows, shape_.cols, shape_.kind));
    layers_.push_back(layer);
  }
  void close() {
    dev_.far.release(layers_.back().mark);
    layers_.pop_back();
  }

  // Forward: copies a chunk to far memory.
  PendingCopy put(Index layer, std::size_t chunk, Matrix<T> near) { return dev_.put(far({layer, chunk}), near); }
  // The same for a chunk that is computed in a slot, between these two calls.
  Matrix<T> begin(std::size_t chunk) {
    in_use_ = in_use_ == &slots_[0] ? &slots_[1] : &slots_[0];
    in_use_->copy.wait();
    return in_use_->memory.slice({0, shape_.rows[chunk]});
  }
  void finish(Index layer, std::size_t chunk) {
    in_use_->copy = put(layer, chunk, in_use_->memory.slice({0, shape_.rows[chunk]}));
  }

  // Backward: a chunk, which began to arrive when the one before it was taken.
  Matrix<T> take(Index layer, std::size_t chunk) {
    const Key key = {layer, chunk};
    require(key == key_of(taken_), "far memory is not read in the expected order; please report this");
    if (taken_ == 0)
      for (Slot& slot : slots_) slot.copy.wait();  // the last chunks of forward are still leaving
    Slot& slot = slot_with(key);
    slot.copy.wait();
    in_use_ = &slot;
    if (const Key next = key_of(++taken_); keeps(next.layer)) slot_with(next);
    return slot.memory.slice({0, shape_.rows[chunk]});
  }

 private:
  struct Layer {
    Arena::Mark mark;
    std::vector<FarMatrix<T>> chunks;
  };
  struct Key {
    Index layer;
    std::size_t chunk;
    bool operator==(const Key&) const = default;
  };
  struct Slot {
    Key key = {-1, 0};
    Matrix<T> memory;
    PendingCopy copy;
  };

  FarMatrix<T> far(Key key) const { return layers_[static_cast<std::size_t>(key.layer)].chunks[key.chunk]; }

  // What backward takes, in order.
  Key key_of(std::size_t number) const {
    const std::size_t n = shape_.rows.size(), of_layer = reading_ == Reading::last_to_first ? n : 2 * n,
                      i = of_layer - 1 - number % of_layer;  // counts down to the layer's last one, chunk 0
    return {shape_.layers - 1 - static_cast<Index>(number / of_layer), i < n ? i : 2 * n - 1 - i};
  }

  // The slot with this chunk. If there is none, the chunk begins to arrive in the slot that is not in use.
  Slot& slot_with(Key key) {
    for (Slot& slot : slots_)
      if (slot.key == key) return slot;
    Slot& slot = in_use_ == &slots_[0] ? slots_[1] : slots_[0];
    slot.key = key;
    slot.copy.wait();
    slot.copy = dev_.get(slot.memory.slice({0, far(key).rows}), far(key));
    return slot;
  }

  Device& dev_;
  const Shape shape_;
  const Reading reading_;
  std::vector<Layer> layers_;
  Slot slots_[2];
  Slot* in_use_ = nullptr;
  std::size_t taken_ = 0;
};

}  // namespace streambp
