// A matrix that layers keep from forward to backward, addressed by layer and chunk.
//
//   near       the layer's whole matrix is in the device's memory
//   far        the layer's chunks are in far memory. Near memory has two slots: one chunk is in use, while the next one
//              arrives or the one before leaves
//   nowhere    the layer does not keep it
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/base/device.cuh"

namespace streambp {

struct KeptShape {
  std::vector<Rows> chunks;
  Index cols;
  Kind kind;
  std::vector<Place> places;  // of each layer

  // Backward reads a layer's chunks last to first; in these layers first to last before that. Chunks of far memory are
  // fetched ahead in this order. Another order only costs time.
  std::vector<bool> read_twice = {};
};

template <class Device, class T>
class KeptRows {
 public:
  KeptRows(Device& dev, KeptShape shape) : dev_(dev), shape_(std::move(shape)), layers_(shape_.places.size()) {
    const std::size_t chunks = shape_.chunks.size();
    for (Index layer = static_cast<Index>(layers_.size()); layer-- > 0;) {
      if (!far(layer)) continue;
      const bool twice = !shape_.read_twice.empty() && shape_.read_twice[static_cast<std::size_t>(layer)];
      for (std::size_t i = 0; twice && i < chunks; ++i) reading_.push_back({layer, i});
      for (std::size_t i = chunks; i-- > 0;) reading_.push_back({layer, i});
    }
    if (!any_far()) return;
    Index rows = 0;
    for (const Rows& chunk : shape_.chunks) rows = most(rows, chunk.size());
    for (Slot& slot : slots_) slot.memory = allocate<T>(dev, rows, shape_.cols, shape_.kind);
  }

  bool any_far() const { return std::ranges::count(shape_.places, Place::far) > 0; }
  bool far(Index layer) const { return place(layer) == Place::far; }
  bool near(Index layer) const { return place(layer) == Place::near; }

  // Allocates a layer's memory. The caller releases it.
  void open(Index layer) {
    if (place(layer) == Place::nowhere) return;
    Layer& opened = at(layer) = {};
    if (near(layer)) {
      opened.near = allocate<T>(dev_, shape_.chunks.empty() ? 0 : shape_.chunks.back().end, shape_.cols, shape_.kind);
      return;
    }
    for (const Rows& chunk : shape_.chunks)
      opened.chunks.push_back(allocate_far<T>(dev_, chunk.size(), shape_.cols, shape_.kind));
  }
  Matrix<T> whole(Index layer) const { return layers_[static_cast<std::size_t>(layer)].near; }

  // Forward: a chunk is computed in the memory that begin returns, until finish.
  Matrix<T> begin(Index layer, std::size_t chunk) {
    if (!far(layer)) return near(layer) ? whole(layer).slice(shape_.chunks[chunk]) : Matrix<T>();
    in_use_ = in_use_ == &slots_[0] ? &slots_[1] : &slots_[0];
    in_use_->copy.wait();
    return rows(*in_use_, chunk);
  }
  void finish(Index layer, std::size_t chunk) {
    if (far(layer)) in_use_->copy = put(layer, chunk, rows(*in_use_, chunk));
  }
  // Or it is computed elsewhere, and copied to far memory.
  PendingCopy put(Index layer, std::size_t chunk, Matrix<T> near) { return dev_.put(at(layer).chunks[chunk], near); }

  // Backward.
  Matrix<T> take(Index layer, std::size_t chunk) {
    if (!far(layer)) return near(layer) ? whole(layer).slice(shape_.chunks[chunk]) : Matrix<T>();
    if (taken_ == 0)
      for (Slot& slot : slots_) slot.copy.wait();  // the last chunks of forward are still leaving
    const Key key = {layer, chunk};
    Slot& slot = slot_with(key);
    slot.copy.wait();
    in_use_ = &slot;
    const bool expected = taken_ < reading_.size() && key == reading_[taken_];
    if (++taken_ < reading_.size() && expected) slot_with(reading_[taken_]);
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

  Place place(Index layer) const {
    return layer < static_cast<Index>(shape_.places.size()) ? shape_.places[static_cast<std::size_t>(layer)]
                                                            : Place::nowhere;
  }
  Layer& at(Index layer) { return layers_[static_cast<std::size_t>(layer)]; }
  Matrix<T> rows(const Slot& slot, std::size_t chunk) const {
    return slot.memory.slice({0, shape_.chunks[chunk].size()});
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
  std::vector<Layer> layers_;
  std::vector<Key> reading_;  // all that backward takes from far memory, in the expected order
  Slot slots_[2];
  Slot* in_use_ = nullptr;
  std::size_t taken_ = 0;
};

}  // namespace streambp
