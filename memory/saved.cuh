// What forward saves for backward: the input of every layer that backward reaches, and in full mode all its activations.
// It is a stack: forward pushes the layers in order, backward pops them from last to first.
#pragma once

#include <vector>

#include "memory/schedule.cuh"
#include "model/activations.cuh"

namespace streambp {

// Keeps everything in device memory, from layer `first` on.
template <class Device, class T>
class ResidentSaved {
 public:
  ResidentSaved(Device& dev, const Config& config, const Division& division, Keep keep, Index first = 0)
      : dev_(dev),
        config_(config),
        rows_({0, division.rows}, {0, division.own()}),
        ranks_(division.ranks),
        keep_(keep),
        first_(first),
        output_(allocate<T>(dev, rows_.own.size(), config.hidden, Kind::saved)) {}

  // Allocates what is saved of the next layer and returns the matrix for its input. If nothing is saved, the layer works
  // in place on the output matrix.
  Matrix<T> open() {
    Saved saved{dev_.arena.mark(), output_, {}, {}};
    const auto layer = static_cast<Index>(layers_.size());
    if (keeps(layer)) saved.input = allocate<T>(dev_, rows_.own.size(), config_.hidden, Kind::saved);
    if (has_activations(layer)) {
      saved.keys_values = allocate_keys_values<T>(dev_, config_, rows_.all.size(), ranks_);
      saved.activations = allocate_activations<T>(dev_, config_, rows_, ranks_);
    }
    layers_.push_back(saved);
    return saved.input;
  }
  // Frees the last open layer.
  void close() {
    dev_.arena.release(layers_.back().mark);
    layers_.pop_back();
  }

  bool has_activations(Index layer) const { return keeps(layer) && keep_ == Keep::activations; }
  Matrix<T> output() const { return output_; }  // of the last layer
  Matrix<T> input(Index layer) const { return at(layer).input; }
  const KeysValues<T>& keys_values(Index layer) const { return at(layer).keys_values; }
  const Activations<T>& activations(Index layer) const { return at(layer).activations; }

 private:
  struct Saved {
    Arena::Mark mark;
    Matrix<T> input;             // N x hidden
    KeysValues<T> keys_values;   // only with Keep::activations
    Activations<T> activations;  // only with Keep::activations
  };
  bool keeps(Index layer) const { return keep_ != Keep::nothing && layer >= first_; }
  const Saved& at(Index layer) const { return layers_[static_cast<std::size_t>(layer)]; }

  Device& dev_;
  const Config& config_;
  const DividedRows rows_;
  const Index ranks_;
  const Keep keep_;
  const Index first_;
  const Matrix<T> output_;
  std::vector<Saved> layers_;
};

}  // namespace streambp
