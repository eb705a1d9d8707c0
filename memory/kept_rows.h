// A matrix of every layer that is kept from forward to backward, addressed by layer and chunk.
//
//   near    the layer's whole matrix is in the device's memory
//   far     the layer's chunks are in far memory. Near memory has two slots: one chunk is in use, while the next one arrives
//           or the one before leaves
#pragma once

#include <vector>

#include "kernels/base/device.cuh"

namespace streambp {

struct KeptShape {
  std::vector<Rows> chunks;
  Index cols, layers;
  Index first;  // layers below keep nothing
  Kind kind;
  Place place;
};

template <class Device, class T>
class KeptRows {
 public:
  // How backward reads the chunks of a layer, layers from last to first. Chunks of far memory are fetched ahead in this
  // order. Another order only costs time. At the turn, the last two chunks are still in the slots.
  enum class Reading { last_to_first, first_to_last_and_back };

  KeptRows(Device& dev, KeptShape shape, Reading reading = Reading::last_to_first)
      : dev_(dev), shape_(std::move(shape)), reading_(reading), layers_(static_cast<std::size_t>(shape_.layers)) {
    if (!far()) return;
    Index rows = 0;
    for (const Rows& chunk : shape_.chunks) rows = most(rows, chunk.size());
    for (Slot& slot : slots_) slot.memory = allocate<T>(dev, rows, shape_.cols, shape_.kind);
  }

  bool far() const { return shape_.place == Place::far; }
  bool keeps(Index layer) const {
    return shape_.place != Place::nowhere && shape_.first <= layer && layer < shape_.layers;
  }

  // Allocates a layer's memory. The caller releases it.
  void open(Index layer) {
    if (!keeps(layer)) return;
    Layer& opened = at(layer) = {};
    if (!far()) {
      opened.near = allocate<T>(dev_, shape_.chunks.empty() ? 0 : shape_.chunks.back().end, shape_.cols, shape_.kind);
      return;
    }
    for (const Rows& chunk : shape_.chunks)
      opened.chunks.push_back(allocate_far<T>(dev_, chunk.size(), shape_.cols, shape_.kind));
  }
  Matrix<T> whole(Index layer) const { return layers_[static_cast<std::size_t>(layer)].near; }

  // Forward: a chunk is computed in the memory that begin returns, until finish.
  Matrix<T> begin(Index layer, std::size_t chunk) {
    if (!keeps(layer)) return {};
    if (!far()) return whole(layer).slice(shape_.chunks[chunk]);
    in_use_ = in_use_ == &slots_[0] ? &slots_[1] : &slots_[0];
    in_use_->copy.wait();
    return rows(*in_use_, chunk);
  }
  void finish(Index layer, std::size_t chunk) {
    if (far() && keeps(layer)) in_use_->copy = put(layer, chunk, rows(*in_use_, chunk));
  }
  // Or it is computed elsewhere, and copied to far memory.
  PendingCopy put(Index layer, std::size_t chunk, Matrix<T> near) { return dev_.put(at(layer).chunks[chunk], near); }

  // Backward.
  Matrix<T> take(Index layer, std::size_t chunk) {
    if (!keeps(layer)) return {};
    if (!far()) return whole(layer).slice(shape_.chunks[chunk]);
    if (taken_ == 0)
      for (Slot& slot : slots_) slot.copy.wait();  // the last chunks of forward are still leaving
    const Key key = {layer, chunk};
    Slot& slot = slot_with(key);
    slot.copy.wait();
    in_use_ = &slot;
    const bool expected = key == key_of(taken_);
    if (const Key next = key_of(++taken_); expected && keeps(next.layer)) slot_with(next);
    return rows(slot, chunk);
  }

 private:
  struct Layer {
    Matrix<T> near;
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

  Layer& at(Index layer) { return layers_[static_cast<std::size_t>(layer)]; }
  Matrix<T> rows(const Slot& slot, std::size_t chunk) const {
    return slot.memory.slice({0, shape_.chunks[chunk].size()});
  }

  // What backward takes, in the expected order.
  Key key_of(std::size_t number) const {
    const std::size_t n = shape_.chunks.size(), of_layer = reading_ == Reading::last_to_first ? n : 2 * n;
    const Index layer = shape_.layers - 1 - static_cast<Index>(number / of_layer);
    const std::size_t left = of_layer - 1 - number % of_layer;  // of this layer, after this one
    return {layer, left < n ? left : 2 * n - 1 - left};         // n-1 ... 0, perhaps after 0 ... n-1
  }

  // The slot that holds this chunk. If none does, starts to fetch it into the free slot.
  Slot& slot_with(Key key) {
    for (Slot& slot : slots_)
      if (slot.key == key) return slot;
    Slot& slot = in_use_ == &slots_[0] ? slots_[1] : slots_[0];
    slot.key = key;
    slot.copy.wait();
    slot.copy = dev_.get(rows(slot, key.chunk), at(key.layer).chunks[key.chunk]);
    return slot;
  }

  Device& dev_;
  const KeptShape shape_;
  const Reading reading_;
  std::vector<Layer> layers_;
  Slot slots_[2];
  Slot* in_use_ = nullptr;
  std::size_t taken_ = 0;
};

}  // namespace streambp
