// What forward saves for backward: the input of every layer that backward reaches, and in full mode all its activations.
// It is a stack: forward pushes the layers in order, backward pops them from last to first.
#pragma once

#include <memory>
#include <vector>

#include "memory/kept_attention.cuh"

namespace streambp {

// The walk sees only this. Rows are chunks of this rank's rows.
template <class T>
class Saved {
 public:
  explicit Saved(std::unique_ptr<KeptAttention<T>> attention) : attention_(std::move(attention)) {}
  virtual ~Saved() = default;

  // Forward: the matrix for the next layer's input. If it is kept elsewhere, or not at all, that is the output matrix,
  // in which every layer works in place.
  virtual Matrix<T> open() = 0;
  virtual Matrix<T> output() const = 0;          // of the last layer
  virtual void begin(Rows) {}                    // a layer is about to replace these rows of its input
  virtual void finish(Index /*layer*/, Rows) {}  // these rows of the layer's input are computed

  // Backward: it needs the input of each layer twice, chunk by chunk: first to last for K and V, then last to first.
  virtual Matrix<T> input(Index layer, Rows rows) = 0;
  virtual void close() = 0;  // frees the last open layer

  // Only with Keep::activations.
  virtual bool has_activations(Index /*layer*/) const { return false; }
  virtual KeysValues<T> keys_values(Index) const { return {}; }
  virtual Activations<T> activations(Index) const { return {}; }

  // Attention's outputs, where they are kept; the layers open and close together.
  KeptAttention<T>& attention() { return *attention_; }

 private:
  std::unique_ptr<KeptAttention<T>> attention_;
};

// Keeps everything in device memory, from layer `first` on.
template <class Device, class T>
class ResidentSaved : public Saved<T> {
 public:
  ResidentSaved(Device& dev, const Config& config, const Division& division, Keep keep, Index first = 0,
                std::unique_ptr<KeptAttention<T>> attention = std::make_unique<KeptAttention<T>>())
      : Saved<T>(std::move(attention)),
        dev_(dev),
        config_(config),
        rows_({0, division.rows}, {0, division.own()}),
        ranks_(division.ranks),
        keep_(keep),
        first_(first),
        output_(allocate<T>(dev, rows_.own.size(), config.hidden, Kind::saved)) {}

  Matrix<T> open() override {
    Layer saved{dev_.arena.mark(), output_, {}, {}};
    const auto layer = static_cast<Index>(layers_.size());
    if (keeps(layer)) saved.input = allocate<T>(dev_, rows_.own.size(), config_.hidden, Kind::saved);
    if (has_activations(layer)) {
      saved.keys_values = allocate_keys_values<T>(dev_, config_, rows_.all.size(), ranks_);
      saved.activations = allocate_activations<T>(dev_, config_, rows_, ranks_);
    }
    layers_.push_back(saved);
    this->attention().open();
    return saved.input;
  }
  Matrix<T> output() const override { return output_; }
  Matrix<T> input(Index layer, Rows rows) override { return at(layer).input.slice(rows); }
  void close() override {
    this->attention().close();
    dev_.arena.release(layers_.back().mark);
    layers_.pop_back();
  }

  bool has_activations(Index layer) const override { return keeps(layer) && keep_ == Keep::activations; }
  KeysValues<T> keys_values(Index layer) const override { return at(layer).keys_values; }
  Activations<T> activations(Index layer) const override { return at(layer).activations; }

 private:
  struct Layer {
    Arena::Mark mark;
    Matrix<T> input;             // N x hidden
    KeysValues<T> keys_values;   // only with Keep::activations
    Activations<T> activations;  // only with Keep::activations
  };
  bool keeps(Index layer) const { return keep_ != Keep::nothing && layer >= first_; }
  const Layer& at(Index layer) const { return layers_[static_cast<std::size_t>(layer)]; }

  Device& dev_;
  const Config& config_;
  const DividedRows rows_;
  const Index ranks_;
  const Keep keep_;
  const Index first_;
  const Matrix<T> output_;
  std::vector<Layer> layers_;
};

}  // namespace streambp
