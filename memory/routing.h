// What the walk learns of the routing of a micro-batch: its first forward pass counts how the rows of each layer use the
// experts, and backward then knows the slopes of the loss that balances this use (kernels/expert_use.cuh).
#pragma once

#include "kernels/routing_counts.h"
#include "model/activations.h"
#include "parallel/gather.h"

namespace streambp {

// The rows of a micro-batch that count, of this rank; empty: all.
template <class A>
struct RoutedRows {
  Matrix<const A> counted = {};
  Index rows = 0;     // of all ranks
  double weight = 1;  // of the balance loss
};

template <class Device, class T>
class Routing {
 public:
  using A = Accumulator<T>;

  // In the caller's scope.
  Routing(Device& dev, const Config& c, const RoutedRows<A>& in) : dev_(dev), c_(c), in_(in) {
    if (c.experts == 0) return;
    sums_ = allocate<std::int64_t>(dev, c.layers - c.dense_layers, 2 * c.experts, Kind::stream);
    slopes_ = allocate<A>(dev, 1, c.balance() > 0 ? c.experts : 0, Kind::stream);
    zero(dev, sums_);
  }

  // The first time that forward computes a chunk.
  void count(Activations<T>& a, Index layer, Rows own) const {
    if (c_.has_experts(layer)) use_of(a) = {sums_.slice(piece(layer - c_.dense_layers, 1, sums_.rows)), counted(own)};
  }
  // Backward of a chunk.
  void balance(Activations<T>& a, Index layer, Rows own) const {
    if (c_.has_experts(layer)) use_of(a) = {{}, counted(own), slopes_};
  }
  // All rows of all layers are counted.
  RoutingCounts finish(const Group& sequence) {
    RoutingCounts result{c_.experts, in_.rows};
    if (!Device::computes || c_.experts == 0) return result;
    for (std::vector<std::int64_t>& of_rank : gather_on_host(sequence, to_host(dev_, sums_)))
      result += {c_.experts, 0, std::move(of_rank)};
    std::vector<A> slopes;
    const double terms = static_cast<double>(in_.rows * result.layers());
    for (Index e = 0; e < c_.experts; ++e) {
      const double slope = c_.balance() * static_cast<double>(c_.experts) * result.mean_chosen(e);
      slopes.push_back(static_cast<A>(terms > 0 ? in_.weight * slope / terms : 0));
    }
    if (slopes_) dev_.upload(slopes_, slopes.data());
    return result;
  }

 private:
  static ExpertUse<A>& use_of(Activations<T>& a) { return a.feed_forward.experts.routed.use; }
  Matrix<const A> counted(Rows own) const { return in_.counted ? in_.counted.columns(own) : in_.counted; }

  Device& dev_;
  const Config& c_;
  const RoutedRows<A> in_;
  Matrix<std::int64_t> sums_;
  Matrix<A> slopes_;
};

}  // namespace streambp
