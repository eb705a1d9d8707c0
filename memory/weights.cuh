// Weights are leased: the walk takes a layer's weights just before it computes the layer and uses them only for that
// layer. It does not know where they are stored: here, completely on this device, or in shards on all ranks.
#pragma once

#include <utility>

#include "model/parameters.cuh"
#include "parallel/exchange.cuh"

namespace streambp {

// The weights of a layer, or of embedding and head, until the end of the lease.
template <class Device, class Section>
struct Lease {
  decltype(std::declval<Device&>().scope()) scope;
  Section weights;
};

// Of a model in shards, a lease holds the rows of all ranks in memory of its own. All ranks take the same leases in the
// same order.
template <class Device, class T>
class Weights {
 public:
  Weights(Device& dev, const Model<T>& model) : dev_(dev), model_(model) {}

  Lease<Device, Layer<T>> take(Index layer) const {
    return lease(model_.weights.layers[static_cast<std::size_t>(layer)],
                 [&](auto& w) { return layer_table(model_.config, layer, w); });
  }
  // Only the embedding is valid.
  Lease<Device, Tensors<T>> take_embedding() const {
    return lease(model_.weights, [&](auto& w) { return embedding_table(model_.config, w); });
  }
  // Only the norm and the head are valid.
  Lease<Device, Tensors<T>> take_head() const {
    auto leased = lease(model_.weights, [&](auto& w) {
      Table<T> table = head_table(model_.config, w);
      if (model_.config.tied) table.push_back(embedding_table(model_.config, w).front());
      return table;
    });
    if (model_.config.tied) leased.weights.head = {leased.weights.embedding.tokens, {}};
    return leased;
  }

 private:
  template <class Section, class TableOf>
  Lease<Device, Section> lease(const Section& stored, TableOf&& table_of) const {
    Lease<Device, Section> leased{dev_.scope(), stored};
    if (model_.shards.size == 1) return leased;
    std::vector<Matrix<T>> whole;
    for (const Entry<T>& e : table_of(leased.weights)) {
      const Parameter& p = e.parameter;
      const Matrix<T> mine = *e.matrix;
      *e.matrix = allocate<T>(dev_, p.rows, p.cols, Kind::weights);
      if (mine) dev_.copy(e.matrix->slice(shard(p.rows, model_.shards)), mine);
      whole.push_back(*e.matrix);
    }
    share_rows(dev_, "gather weights", model_.shards, whole);
    return leased;
  }

  Device& dev_;
  const Model<T>& model_;
};

}  // namespace streambp
