// Weights are leased: the walk takes a layer's weights just before it computes the layer and uses them only for that
// layer. It does not know where they are stored.
#pragma once

#include "model/parameters.cuh"

namespace streambp {

// All weights stay in device memory; a lease is a reference.
template <class T>
class ResidentWeights {
 public:
  explicit ResidentWeights(const Model<T>& model) : model_(model) {}

  const Layer<T>& take(Index layer) const { return model_.weights.layers[static_cast<std::size_t>(layer)]; }
  const EmbeddingTables<T>& take_embedding() const { return model_.weights.embedding; }
  const NormWeights<T>& take_norm() const { return model_.weights.norm; }
  Linear<T> take_head() const { return model_.head(); }

 private:
  const Model<T>& model_;
};

}  // namespace streambp
