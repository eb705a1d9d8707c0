// Saved layer inputs in far memory. Near memory holds one matrix, in which every layer works in place, and two chunks:
// one in use, and the next one, which arrives meanwhile.
//
//   forward    a chunk of a layer's input is copied to far memory as soon as it is computed, and replaced by the layer's
//              output when its turn comes
//   backward   reads chunks 0 1 ... n-1 of a layer for K and V, then n-1 ... 1 0 to recompute activations; where the
//              order turns around, both chunks are still there
#pragma once

#include "memory/saved.cuh"

namespace streambp {

template <class Device, class T>
class FarSaved : public Saved<T> {
 public:
  // Keeps the inputs of layers from `first` on.
  FarSaved(Device& dev, const Config& config, const Division& division, Index chunk, Index first)
      : dev_(dev),
        config_(config),
        chunk_(chunk),
        first_(first),
        chunks_(chunks(division, chunk)),
        output_(allocate<T>(dev, division.own(), config.hidden, Kind::saved)),
        leaving_(chunks_.size()) {
    for (Slot& slot : slots_)
      slot.memory = allocate<T>(dev, std::min(chunk, division.own()), config.hidden, Kind::saved);
  }

  Matrix<T> open() override {
    Layer layer{dev_.far.mark(), {}};
    if (static_cast<Index>(layers_.size()) >= first_) {
      for (const DividedRows& rows : chunks_)
        layer.chunks.push_back(allocate_far<T>(dev_, rows.own.size(), config_.hidden, Kind::saved));
    }
    layers_.push_back(layer);
    return output_;
  }
  Matrix<T> output() const override { return output_; }
  void begin(Rows rows) override { leaving_[number(rows)].wait(); }
  void finish(Index layer, Rows rows) override {
    if (first_ <= layer && layer < config_.layers)
      leaving_[number(rows)] = dev_.put(far({layer, number(rows)}), output_.slice(rows));
  }

  Matrix<T> input(Index layer, Rows rows) override {
    const Key key = {layer, number(rows)};
    require(key == key_of(reads_), "saved inputs are not read in the expected order; please report this");
    Slot& slot = slot_with(key);
    slot.arriving.wait();
    in_use_ = &slot;
    if (const Key next = key_of(++reads_); next.layer >= first_) slot_with(next);
    return slot.memory.slice({0, rows.size()});
  }
  void close() override {
    dev_.far.release(layers_.back().mark);
    layers_.pop_back();
  }

 private:
  struct Layer {
    Arena::Mark mark;
    std::vector<FarMatrix<T>> chunks;  // of its input
  };
  struct Key {
    Index layer;
    std::size_t chunk;
    bool operator==(const Key&) const = default;
  };
  struct Slot {
    Key key = {-1, 0};
    Matrix<T> memory;
    PendingCopy arriving;
  };

  std::size_t number(Rows rows) const { return static_cast<std::size_t>(rows.begin / chunk_); }
  FarMatrix<T> far(Key key) const { return layers_[static_cast<std::size_t>(key.layer)].chunks[key.chunk]; }

  // What backward reads, in order.
  Key key_of(std::size_t read) const {
    const std::size_t n = chunks_.size(), i = read % (2 * n);
    return {config_.layers - 1 - static_cast<Index>(read / (2 * n)), i < n ? i : 2 * n - 1 - i};
  }

  // The slot with this chunk. If there is none, the chunk begins to arrive in the slot that is not in use.
  Slot& slot_with(Key key) {
    for (Slot& slot : slots_)
      if (slot.key == key) return slot;
    Slot& slot = in_use_ == &slots_[0] ? slots_[1] : slots_[0];
    slot.key = key;
    slot.arriving = dev_.get(slot.memory.slice({0, far(key).rows}), far(key));
    return slot;
  }

  Device& dev_;
  const Config& config_;
  const Index chunk_, first_;
  const std::vector<DividedRows> chunks_;
  const Matrix<T> output_;
  std::vector<Layer> layers_;
  std::vector<PendingCopy> leaving_;  // of each chunk
  Slot slots_[2];
  const Slot* in_use_ = nullptr;
  std::size_t reads_ = 0;
};

// Saved inputs where the schedule wants them, of layers from `first` on.
template <class Device, class T>
std::unique_ptr<Saved<T>> make_saved(Device& dev, const Config& c, const Division& division, const Schedule& schedule,
                                     Index first) {
  if (schedule.inputs == Place::near)
    return std::make_unique<ResidentSaved<Device, T>>(dev, c, division, schedule.keep, first);
  require(schedule.keep == Keep::inputs, "full mode keeps all activations in near memory; use stream mode");
  return std::make_unique<FarSaved<Device, T>>(dev, c, division, schedule.chunk, first);
}

}  // namespace streambp
