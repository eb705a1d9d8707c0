// Saved layer inputs in far memory. Near memory holds one matrix, in which every layer works in place, and two chunks.
//
//   forward    a chunk of a layer's input is copied to far memory as soon as it is computed, and replaced by the layer's
//              output when its turn comes
//   backward   reads chunks 0 1 ... n-1 of a layer for K and V, then n-1 ... 1 0 to recompute activations
#pragma once

#include "memory/far_chunks.cuh"
#include "memory/saved.cuh"

namespace streambp {

template <class Device, class T>
class FarSaved : public Saved<T> {
 public:
  // Keeps the inputs of layers from `first` on.
  FarSaved(Device& dev, const Config& config, const Division& division, Index chunk, Index first,
           std::unique_ptr<KeptAttention<T>> attention)
      : Saved<T>(std::move(attention)),
        chunk_(chunk),
        output_(allocate<T>(dev, division.own(), config.hidden, Kind::saved)),
        inputs_(dev, {rows_of(chunks(division, chunk)), config.hidden, config.layers, first, Kind::saved},
                FarChunks<Device, T>::Reading::first_to_last_and_back),
        leaving_(chunks(division, chunk).size()) {}

  Matrix<T> open() override {
    inputs_.open();
    this->attention().open();
    return output_;
  }
  Matrix<T> output() const override { return output_; }
  void begin(Rows rows) override { leaving_[number(rows)].wait(); }
  void finish(Index layer, Rows rows) override {
    if (inputs_.keeps(layer)) leaving_[number(rows)] = inputs_.put(layer, number(rows), output_.slice(rows));
  }

  Matrix<T> input(Index layer, Rows rows) override { return inputs_.take(layer, number(rows)); }
  void close() override {
    this->attention().close();
    inputs_.close();
  }

 private:
  static std::vector<Index> rows_of(const std::vector<DividedRows>& chunks) {
    std::vector<Index> rows;
    for (const DividedRows& chunk : chunks) rows.push_back(chunk.own.size());
    return rows;
  }
  std::size_t number(Rows rows) const { return static_cast<std::size_t>(rows.begin / chunk_); }

  const Index chunk_;
  const Matrix<T> output_;
  FarChunks<Device, T> inputs_;
  std::vector<PendingCopy> leaving_;  // of each chunk
};

// What the schedule keeps, of layers from `first` on.
template <class Device, class T>
std::unique_ptr<Saved<T>> make_saved(Device& dev, const Config& c, const Division& division, const Schedule& schedule,
                                     Index first) {
  auto attention = make_kept_attention<Device, T>(dev, c, division, schedule, first);
  if (schedule.inputs == Place::near)
    return std::make_unique<ResidentSaved<Device, T>>(dev, c, division, schedule.keep, first, std::move(attention));
  require(schedule.keep == Keep::inputs, "full mode keeps all activations in near memory; use stream mode");
  return std::make_unique<FarSaved<Device, T>>(dev, c, division, schedule.chunk, first, std::move(attention));
}

}  // namespace streambp
