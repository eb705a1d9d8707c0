// The output of attention, and the log-sum-exp of its scores, kept from forward for backward: backward then recomputes all
// of a layer but attention itself. They take as much memory as saved inputs, or more, and are an option.
#pragma once

#include <memory>
#include <vector>

#include "memory/far_chunks.cuh"
#include "memory/schedule.cuh"
#include "model/activations.cuh"

namespace streambp {

// Keeps nothing. Rows are chunks of the whole stream: ranks that share it have all rows of their heads.
template <class T>
class KeptAttention {
 public:
  virtual ~KeptAttention() = default;
  virtual bool keeps(Index /*layer*/) const { return false; }
  virtual void open() {}   // the next layer, as in Saved
  virtual void close() {}  // the last open layer

  // Forward: memory for the outputs of a chunk, and when they are computed.
  virtual HeadActivations<T> begin(Index /*layer*/, Rows) { return {}; }
  virtual void finish(Index /*layer*/, Rows) {}
  // Backward, chunk by chunk from the last to the first.
  virtual HeadActivations<T> take(Index /*layer*/, Rows) { return {}; }
};

template <class Device, class T>
class NearAttention : public KeptAttention<T> {
 public:
  NearAttention(Device& dev, const Config& c, const Division& division, Index first)
      : dev_(dev), config_(c), rows_(division.rows), ranks_(division.ranks), first_(first) {}

  bool keeps(Index layer) const override { return layer >= first_; }
  void open() override {
    const bool kept = keeps(static_cast<Index>(layers_.size()));
    marks_.push_back(dev_.arena.mark());
    layers_.push_back(kept ? allocate_attention<T>(dev_, config_, rows_, ranks_, Kind::attention)
                           : HeadActivations<T>());
  }
  void close() override {
    dev_.arena.release(marks_.back());
    marks_.pop_back(), layers_.pop_back();
  }

  HeadActivations<T> begin(Index layer, Rows rows) override { return take(layer, rows); }
  HeadActivations<T> take(Index layer, Rows rows) override {
    if (!keeps(layer)) return {};
    const HeadActivations<T>& all = layers_[static_cast<std::size_t>(layer)];
    return {{}, all.attended.slice(rows), all.lse.slice(rows)};
  }

 private:
  Device& dev_;
  const Config& config_;
  const Index rows_, ranks_, first_;
  std::vector<HeadActivations<T>> layers_;
  std::vector<Arena::Mark> marks_;
};

template <class Device, class T>
class FarAttention : public KeptAttention<T> {
  using A = Accumulator<T>;

 public:
  FarAttention(Device& dev, const Config& c, const Division& division, Index chunk, Index first)
      : chunk_(chunk * division.ranks),
        attended_(dev, {rows_of(division), c.q_width() / division.ranks, c.layers, first, Kind::attention},
                  FarChunks<Device, T>::Reading::last_to_first),
        lse_(dev, {rows_of(division), c.heads / division.ranks, c.layers, first, Kind::attention},
             FarChunks<Device, A>::Reading::last_to_first) {}

  bool keeps(Index layer) const override { return attended_.keeps(layer); }
  void open() override { attended_.open(), lse_.open(); }
  void close() override { lse_.close(), attended_.close(); }

  HeadActivations<T> begin(Index layer, Rows rows) override {
    if (!keeps(layer)) return {};
    return {{}, attended_.begin(number(rows)), lse_.begin(number(rows))};
  }
  void finish(Index layer, Rows rows) override {
    if (keeps(layer)) attended_.finish(layer, number(rows)), lse_.finish(layer, number(rows));
  }
  HeadActivations<T> take(Index layer, Rows rows) override {
    return {{}, attended_.take(layer, number(rows)), lse_.take(layer, number(rows))};
  }

 private:
  std::vector<Index> rows_of(const Division& division) const {
    std::vector<Index> rows;
    for (Index i = 0; i < ceil_div(division.rows, chunk_); ++i) rows.push_back(piece(i, chunk_, division.rows).size());
    return rows;
  }
  std::size_t number(Rows rows) const { return static_cast<std::size_t>(rows.begin / chunk_); }

  const Index chunk_;  // rows of all ranks
  FarChunks<Device, T> attended_;
  FarChunks<Device, A> lse_;
};

template <class Device, class T>
std::unique_ptr<KeptAttention<T>> make_kept_attention(Device& dev, const Config& c, const Division& division,
                                                      const Schedule& schedule, Index first) {
  if (schedule.attention == Place::near) return std::make_unique<NearAttention<Device, T>>(dev, c, division, first);
  if (schedule.attention == Place::far)
    return std::make_unique<FarAttention<Device, T>>(dev, c, division, schedule.chunk, first);
  return std::make_unique<KeptAttention<T>>();
}

}  // namespace streambp
