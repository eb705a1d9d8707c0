// Weights are leased: the walk takes a layer's weights just before it computes the layer and uses them only for that
// layer. It does not know where they are stored: here, completely on this device, in 4 bits, in far memory, or in shards
// on all ranks.
#pragma once

#include <optional>
#include <utility>

#include "model/parameters.h"
#include "parallel/exchange.h"

namespace streambp {

// Some weights, valid until the end of the lease. `scope` frees the memory that was allocated for it.
template <class Device, class Section>
struct Lease {
  decltype(std::declval<Device&>().scope()) scope;
  Section weights;
};

constexpr Index kNoLayer = -1;

// The weights must not change while this object lives. If a model is in shards or in far memory, a lease has memory for the whole weights. All ranks take the same leases in
// the same order. For layers there is memory for two: one in use, and the next one, which arrives meanwhile. If both apply,
// a rank waits for its shard to come from far memory before it sends it to the others.
template <class Device, class T>
class Weights {
 public:
  Weights(Device& dev, const Model<T>& model) : dev_(dev), model_(model) {
    if (model.config.base == Base::nf4) {
      require(model.shards.size == 1, "--shard weights: weights in 4 bits cannot be sharded; leave it out");
      scope_.emplace(dev.scope());
      for (const Entry<T>& e : layer_table(model.config, 0, dequantised_))
        if (e.quantised) *e.matrix = allocate<T>(dev, e.parameter.rows, e.parameter.cols, Kind::weights);
    }
    if (!fetches()) return;
    scope_.emplace(dev.scope());
    Layer<T> first = model.weights.layers[0];
    const Table<T> stored = layer_table(model.config, 0, first);
    for (Gathered& g : gathered_) {
      const Table<T> whole = layer_table(model.config, 0, g.weights);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        const Parameter& p = whole[i].parameter;
        if (stored[i].is_far() || model.in_shards(p))
          *whole[i].matrix = allocate<T>(dev, p.rows, p.cols, Kind::weights);
      }
    }
  }

  // Whether the weights of a lease are always in the same memory.
  bool have_fixed_addresses() const { return model_.shards.size == 1 && !fetches(); }

  // `next`: the layer that is taken next, or kNoLayer. One layer is on lease at a time.
  Lease<Device, Layer<T>> take_layer(Index layer, Index next) { return {dev_.scope(), weights_of(layer, next)}; }
  // Only the embedding is valid.
  Lease<Device, Tensors<T>> take_embedding() const {
    return lease(model_.weights, [&](auto& w) { return embedding_table(model_.config, w); });
  }
  // Only the norm and the head are valid; a tied head is the embedding.
  Lease<Device, Tensors<T>> take_head() const {
    return lease(model_.weights, [&](auto& w) {
      Table<T> table = head_table(model_.config, w);
      if (model_.config.tied) table.push_back(embedding_table(model_.config, w).front());
      return table;
    });
  }

 private:
  struct Gathered {
    Index layer = -1;
    Layer<T> weights;
    std::vector<PendingCopy> copies;  // from far memory
  };

  // Whether layers are fetched from other ranks or from far memory.
  bool fetches() const {
    return model_.config.base != Base::nf4 && (model_.shards.size > 1 || model_.place == Place::far);
  }

  const Layer<T>& weights_of(Index layer, Index next) {
    if (model_.config.base == Base::nf4) return dequantise(layer);
    if (!fetches()) return model_.weights.layers[static_cast<std::size_t>(layer)];
    gather(layer);
    wait_for(gathered_[layer % 2].copies);
    if (arriving_) finish_exchange(dev_, "gather weights", model_.shards);
    arriving_ = false;
    if (next != kNoLayer) gather(next);
    return gathered_[layer % 2].weights;
  }

  // Quantised weights have memory for one layer.
  const Layer<T>& dequantise(Index number) {
    Layer<T> layer = model_.weights.layers[static_cast<std::size_t>(number)];
    const Table<T> stored = layer_table(model_.config, number, layer),
                   memory = layer_table(model_.config, number, dequantised_);
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (!stored[i].quantised) continue;
      *stored[i].matrix = *memory[i].matrix;
      streambp::dequantise(dev_, *stored[i].matrix, *stored[i].quantised);
    }
    return dequantised_ = layer;
  }

  void gather(Index layer) {
    Gathered& g = gathered_[layer % 2];
    if (g.layer == layer) return;
    g.layer = layer;
    auto stored = model_.weights.layers[static_cast<std::size_t>(layer)];
    const Table<T> whole = layer_table(model_.config, layer, g.weights),
                   mine = layer_table(model_.config, layer, stored);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const Parameter& p = whole[i].parameter;
      if (mine[i].is_far()) {
        const Matrix<T> m = *whole[i].matrix;
        g.copies.push_back(dev_.get(model_.in_shards(p) ? m.slice(shard(p.rows, model_.shards)) : m, *mine[i].far));
      } else if (!model_.in_shards(p)) {
        *whole[i].matrix = *mine[i].matrix;
      }
    }
    if (model_.shards.size == 1) return;
    wait_for(g.copies);
    start_exchange(dev_, "gather weights", model_.shards, gathering(without_adapters(whole), without_adapters(mine)));
    arriving_ = true;
  }

  template <class Section, class TableOf>
  Lease<Device, Section> lease(const Section& stored, TableOf&& table_of) const {
    Lease<Device, Section> leased{dev_.scope(), stored};
    if (model_.shards.size == 1) return leased;
    Section mine = stored;
    const Table<T> whole = table_of(leased.weights);
    for (const Entry<T>& e : whole) *e.matrix = allocate<T>(dev_, e.parameter.rows, e.parameter.cols, Kind::weights);
    exchange(dev_, "gather weights", model_.shards, gathering(whole, table_of(mine)));
    return leased;
  }

  // Puts this rank's rows in their place among all rows. Returns the messages that complete them.
  Transfers gathering(const Table<T>& whole, const Table<T>& mine) const {
    std::vector<Matrix<T>> matrices;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const Matrix<T> m = *whole[i].matrix;
      if (*mine[i].matrix) dev_.copy(m.slice(shard(m.rows, model_.shards)), *mine[i].matrix);
      matrices.push_back(m);
    }
    return shared_rows(model_.shards, matrices);
  }

  Device& dev_;
  const Model<T>& model_;
  std::optional<decltype(std::declval<Device&>().scope())> scope_;
  Layer<T> dequantised_;
  Gathered gathered_[2];   // layers with even and with odd numbers
  bool arriving_ = false;  // exchanges of layers were started
};

}  // namespace streambp
