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

// The weights must not change while this object lives. If a model is in 4 bits, in shards or in far memory, a lease has memory
// for the whole weights. All ranks take the same leases in the same order. What is fetched has memory for two layers: one in
// use, and the next one, which arrives meanwhile. A shard in far memory arrives before it is sent to the others.
template <class Device, class T>
class Weights {
 public:
  Weights(Device& dev, const Model<T>& model) : dev_(dev), model_(model) {
    const bool quantised = model.config.in_4_bits();
    require(!quantised || model.shards.size == 1, "--shard weights: weights in 4 bits cannot be sharded; leave it out",
            model.config.keeps_mxfp4() ? ", or unpack experts with --base unpacked" : "");
    if (!quantised && !fetches()) return;
    scope_.emplace(dev.scope());
    Index largest = 0;
    for (Index layer = 0; layer < model.config.layers; ++layer) {
      Layer<T> any = stored(layer);
      largest = std::max(largest, place(layer_table(model.config, layer, any), {}));
    }
    if (quantised && model.config.experts > 0)
      ready_ = allocate<std::int32_t>(dev, 1, model.config.experts, Kind::weights);
    for (Index i = 0; i < (quantised ? 1 : 2); ++i) slots_[i].memory = allocate<T>(dev, 1, largest, Kind::weights);
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
  // Memory for a layer that is in use or arrives.
  struct Slot {
    Index layer = -1;
    Matrix<T> memory;
    Layer<T> weights;
    std::vector<PendingCopy> copies;  // from far memory
  };

  // Whether layers are fetched from other ranks or from far memory.
  bool fetches() const { return !model_.config.in_4_bits() && (model_.shards.size > 1 || model_.place == Place::far); }

  const Layer<T>& stored(Index layer) const { return model_.weights.layers[static_cast<std::size_t>(layer)]; }

  const Layer<T>& weights_of(Index layer, Index next) {
    if (model_.config.in_4_bits()) return dequantise(layer);
    if (!fetches()) return stored(layer);
    Slot& slot = gather(layer);
    wait_for(slot.copies);
    if (arriving_) finish_exchange(dev_, "gather weights", model_.shards);
    arriving_ = false;
    if (next != kNoLayer) gather(next);
    return slot.weights;
  }

  // On a CPU, products dequantise blocks themselves, some rows at a time (model/linear.h): that needs less memory. For a GPU's
  // products it would take too long. Experts are dequantised whole.
  bool is_dequantised(const Entry<T>& e) const {
    const bool in_tiles = dev_.kind == DeviceKind::cpu && e.parameter.experts == 0;
    return e.quantised && !(e.quantised->blocks.type != BlockType::none && in_tiles);
  }

  // Experts follow when rows choose them (kernels/chosen_experts.cuh). The plan takes the worst: all of them.
  const Layer<T>& dequantise(Index layer) {
    for (const Entry<T>& e : open(slots_[0], layer))
      if (is_dequantised(e)) streambp::dequantise(dev_, *e.matrix, *e.quantised, e.parameter.experts > 0);
    if (slots_[0].weights.routed.ready = ready_; ready_) zero(dev_, ready_);
    return slots_[0].weights;
  }

  Slot& gather(Index layer) {
    Slot& slot = slots_[layer % 2];
    if (slot.layer == layer) return slot;
    const Table<T> whole = open(slot, layer);
    Layer<T> stored = this->stored(layer);
    const Table<T> mine = layer_table(model_.config, layer, stored);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const Parameter& p = whole[i].parameter;
      if (!mine[i].is_far()) continue;
      const Matrix<T> m = *whole[i].matrix;
      slot.copies.push_back(dev_.get(model_.in_shards(p) ? m.slice(shard(p.rows, model_.shards)) : m, *mine[i].far));
    }
    if (model_.shards.size == 1) return slot;
    wait_for(slot.copies);
    start_exchange(dev_, "gather weights", model_.shards, gathering(whole, mine));
    arriving_ = true;
    return slot;
  }

  // Gives a slot to a layer.
  Table<T> open(Slot& slot, Index layer) {
    slot.layer = layer, slot.weights = stored(layer);
    const Table<T> table = layer_table(model_.config, layer, slot.weights);
    place(table, slot.memory);
    return table;
  }
  // Places the tensors of a layer that are not stored whole in the memory, one after the other. Returns how many numbers
  // they take.
  Index place(const Table<T>& table, Matrix<T> memory) const {
    Index used = 0;
    for (const Entry<T>& e : table) {
      const Parameter& p = e.parameter;
      if (!is_dequantised(e) && !model_.in_shards(p) && !e.is_far()) continue;
      if (memory) *e.matrix = memory.columns(used, p.rows * p.cols).reshape(p.cols);
      used += round_up(p.rows * p.cols, static_cast<Index>(Arena::kAlignment / sizeof(T)));
    }
    return used;
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
    Transfers transfers;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      if (!model_.in_shards(whole[i].parameter)) continue;
      const Matrix<T> m = *whole[i].matrix;
      if (*mine[i].matrix) dev_.copy(m.slice(shard(m.rows, model_.shards)), *mine[i].matrix);
      transfers = shared_rows(model_.shards, m, std::move(transfers));
    }
    return transfers;
  }

  Device& dev_;
  const Model<T>& model_;
  std::optional<decltype(std::declval<Device&>().scope())> scope_;
  Slot slots_[2];               // of layers with even and with odd numbers; of weights in 4 bits, the first
  Matrix<std::int32_t> ready_;  // of experts in 4 bits: which of the layer's are dequantised
  bool arriving_ = false;       // exchanges of layers were started
};

}  // namespace streambp
