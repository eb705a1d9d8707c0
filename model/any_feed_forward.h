// The feed-forward of a layer: dense, or a mixture of experts. A new one is a file with two classes like those of
// model/feed_forward.h (a description, and what computes), and a line in with_feed_forward, FeedForwardActivations and
// LayerFeedForward.
#pragma once

#include <variant>

#include "model/experts.h"
#include "model/feed_forward.h"

namespace streambp {

// Calls f with the description of a layer's feed-forward.
template <class F>
auto with_feed_forward(const Config& c, Index layer, F&& f) {
  return c.has_experts(layer) ? f(Experts()) : f(Dense());
}

// The activations of a layer's feed-forward; those of the other are empty.
template <class T>
struct FeedForwardActivations {
  DenseActivations<T> dense;
  ExpertActivations<T> experts;
};

template <class Device, class T>
class LayerFeedForward {
 public:
  using A = Accumulator<T>;
  using Activations = FeedForwardActivations<T>;

  LayerFeedForward(Device& dev, const Config& c, Index layer, const Layer<T>& weights)
      : any_(make(dev, c, layer, weights)) {}

  void forward(const Activations& a, Matrix<T> x, const KeptParts& kept = KeptParts::nothing()) {
    std::visit([&](auto& f) { f.forward(std::decay_t<decltype(f)>::Description::of(a), x, kept); }, any_);
  }
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) {
    std::visit([&](auto& f) { f.output(y, std::decay_t<decltype(f)>::Description::of(a), residual); }, any_);
  }
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Activations& a, Matrix<T> x) {
    return std::visit([&](auto& f) { return f.backward(g, dy, std::decay_t<decltype(f)>::Description::of(a), x); },
                      any_);
  }

 private:
  using Any = std::variant<FeedForward<Device, T>, ExpertFeedForward<Device, T>>;

  static Any make(Device& dev, const Config& c, Index layer, const Layer<T>& weights) {
    if (c.has_experts(layer)) return ExpertFeedForward<Device, T>(dev, c, weights);
    return FeedForward<Device, T>(dev, c, weights);
  }

  Any any_;
};

}  // namespace streambp
