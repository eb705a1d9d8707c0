// A mixture of experts: a feed-forward of which each row uses a few. x: the residual stream after its norm.
//
//   weights   = route(x routerᵀ)                                        kernels/router.cuh
//   activated = act(x gate_eᵀ) * (x up_eᵀ)                              for each row and each of its experts e
//   output    = Σ_e weight_e activated down_eᵀ
//
// In some models router, gate, up and down have biases. The rows of a chunk are sorted by expert (kernels/routes.cuh);
// activations have a row for each row and expert of it. The weights of all experts are one matrix, one below the other.
//
// A shared expert, which all rows use, is a second mixture, of one expert: its weight is the sigmoid of its only logit.
#pragma once

#include "kernels/chosen_experts.cuh"
#include "kernels/expert_use.cuh"
#include "kernels/router.cuh"
#include "model/feed_forward.h"
#include "model/grouped_linear.h"

namespace streambp {

template <class T>
struct MixtureActivations {
  Matrix<Accumulator<T>> logits;  // of the router
  Matrix<T> gate, up, activated;
  // What follows from the logits at little cost, and is never kept.
  Matrix<Accumulator<T>> weights = {};
  Routes routes = {};
  ExpertUse<Accumulator<T>> use = {};
};

template <class T>
struct ExpertActivations {
  MixtureActivations<T> routed, shared;
};

// What the rest of the program must know of experts without computing them.
struct Experts {
  template <class T>
  static void parameters(Section<T>& rows, Layer<T>& w) {
    const Config& c = rows.c;
    const Modules& names = family_of(c).modules;
    const Index d = c.hidden, m = c.expert_mlp, shared = c.shared_mlp;
    rows.router(w.routed.router, names.router, {c.experts, d}, c.mlp_bias);
    if (c.router_bias) {
      Parameter& bias = rows.row(w.routed.bias, names.router_bias, "", {1, c.experts}, Init::zeros);
      bias.wide = true, bias.trained = false;
    }
    const Index turn = names.experts_interleaved ? 1 : m;
    rows.experts(w.routed.gate, names.experts_in, {m, d}, turn, Init::normal);
    rows.experts(w.routed.up, names.experts_in, {m, d}, turn, Init::normal);
    rows.experts(w.routed.down, names.experts_out, {d, m}, 0, Init::residual);
    if (shared == 0) return;
    rows.linear("mlp", w.shared.router, names.shared_router, {1, d}, Init::normal, false);
    rows.linear("mlp", w.shared.gate, names.shared_gate, {shared, d}, Init::normal, false);
    rows.linear("mlp", w.shared.up, names.shared_up, {shared, d}, Init::normal, false);
    rows.linear("mlp", w.shared.down, names.shared_down, {d, shared}, Init::residual, false);
  }

  // Of all that FeedForwardActivations has.
  static auto& of(auto& all) { return all.experts; }

  template <class T, class F>
  static void for_each_activation(const Config& c, ExpertActivations<T>& a, F&& f) {
    for_each_activation(c.routed(), a.routed, f);
    if (c.shared_mlp > 0) for_each_activation(c.shared(), a.shared, f);
  }
  // Call when these matrices have memory.
  template <class Device, class T>
  static void complete(Device& dev, ExpertActivations<T>& a, const Config& c, Index rows) {
    complete(dev, a.routed, c.routed(), rows);
    if (c.shared_mlp > 0) complete(dev, a.shared, c.shared(), rows);
  }

 private:
  template <class T, class F>
  static void for_each_activation(const MixtureShape& m, MixtureActivations<T>& a, F&& f) {
    using enum Part;
    f(gate_up, a.logits, m.experts, View::own_rows);
    f(gate_up, a.gate, m.chosen * m.width, View::own_rows);
    f(gate_up, a.up, m.chosen * m.width, View::own_rows);
    f(activated, a.activated, m.chosen * m.width, View::own_rows);
  }
  template <class Device, class T>
  static void complete(Device& dev, MixtureActivations<T>& a, const MixtureShape& m, Index rows) {
    a.weights = allocate<Accumulator<T>>(dev, rows, m.chosen, Kind::chunk);
    a.routes = allocate_routes(dev, rows, m.chosen, m.experts);
    for (Matrix<T>* packed : {&a.gate, &a.up, &a.activated}) *packed = packed->reshape(m.width);
  }
};

// A mixture, routed or shared.
template <class Device, class T>
class ExpertMixture {
 public:
  using A = Accumulator<T>;
  using Activations = MixtureActivations<T>;
  using Back = LinearBackward<T, A>;

  ExpertMixture(Device& dev, const MixtureShape& m, Mlp kind, const MixtureWeights<T>& weights)
      : dev(dev), m(m), kind(kind), w(weights) {}

  // What is kept is not computed again.
  void forward(const Activations& a, Matrix<T> x, const KeptParts& kept) {
    if (!kept.have(Part::gate_up)) linear<Device, A, T>(dev, a.logits, x, w.router);
    route(dev, a.routes.chosen, a.weights, router(a));
    sort_by_expert(dev, a.routes);
    if (w.ready)
      dequantise_chosen<Device, T>(dev, {in_4_bits(w.gate), in_4_bits(w.up), in_4_bits(w.down)}, a.routes, w.ready);
    if (a.use.sums) count_use(dev, a.use, a.routes, a.logits);
    if (!kept.have(Part::gate_up)) {
      auto scope = dev.scope();
      const Matrix<T> packed = gathered(x, a.routes);
      grouped_linear(dev, a.gate, packed, w.gate, a.routes);
      grouped_linear(dev, a.up, packed, w.ups(), a.routes);
    }
    if (!kept.have(Part::activated)) activation(dev, kind, a.activated, a.gate, a.up);
  }

  // y = residual + Σ_e weight_e activated down_eᵀ
  void output(Matrix<T> y, const Activations& a, Input<T> residual) {
    auto scope = dev.scope();
    const auto packed = allocate<T>(dev, a.routes.size(), y.cols, Kind::chunk);
    grouped_linear(dev, packed, a.activated, w.down, a.routes);
    combine_rows<Device, T>(dev, y, packed, a.weights, a.routes, residual);
  }

  // dy: of the output. dx = ..., or dx += ..., and adds to the gradients of the weights.
  void backward(const MixtureWeights<A>& g, Matrix<T> dx, Matrix<T> dy, const Activations& a, Matrix<T> x,
                Update update) {
    auto scope = dev.scope();
    const auto dweights = allocate<A>(dev, x.rows, m.chosen, Kind::chunk);
    const auto dactivated = allocate<T>(dev, a.routes.size(), m.width, Kind::chunk);
    const Matrix<T> packed_dy = gathered(dy, a.routes);
    grouped_linear_backward_input(dev, dactivated, packed_dy, w.down, a.routes, Update::assign);
    combine_rows_backward<Device, T>(dev, dweights, dactivated, a.activated, a.weights, a.routes);
    grouped_linear_backward_weight(dev, {Back{without_bias(g.down), packed_dy, w.down}}, a.activated, a.routes);
    if (w.down.bias) {
      weighted_bias_backward<Device, T>(dev, dweights, packed_dy, w.down.bias, a.weights, a.routes);
      group_bias_backward<Device, T>(dev, g.down.bias, packed_dy, a.routes);
    }
    // From here on the memory of gate and up holds their gradients.
    const auto [dgate, dup] = activation_backward(dev, kind, a.gate, a.up, dactivated);
    const Matrix<T> packed = packed_dy;  // the same memory
    gather_rows<Device, T>(dev, packed, x, a.routes);
    grouped_linear_backward_weight(dev, {Back{g.gate, dgate, w.gate}, Back{g.up, dup, w.up}}, packed, a.routes);
    grouped_linear_backward_input(dev, packed, dgate, w.gate, a.routes, Update::assign);
    grouped_linear_backward_input(dev, packed, dup, w.ups(), a.routes, Update::add);
    combine_rows<Device, T>(dev, dx, packed, {}, a.routes, update == Update::add ? Input<T>(dx) : Input<T>());

    const auto exact = allocate<A>(dev, x.rows, m.experts, Kind::chunk);
    route_backward(dev, exact, a.routes.chosen, dweights, router(a));
    if (a.use.slopes) balance_backward(dev, exact, a.logits, a.use);
    const auto dlogits = allocate<T>(dev, x.rows, m.experts, Kind::chunk);
    convert(dev, dlogits, exact);
    linear_backward(dev, dx, x, {Back{g.router, dlogits, w.router}}, Update::add);
  }

 private:
  static ExpertsIn4Bits<T> in_4_bits(const Linear<T>& w) { return {w.weight, w.quantised}; }
  static Linear<A> without_bias(Linear<A> w) {
    w.bias = {};
    return w;
  }
  RouterInput<A> router(const Activations& a) const { return {a.logits, w.bias, m.style}; }
  Matrix<T> gathered(Matrix<T> x, const Routes& routes) {
    const auto packed = allocate<T>(dev, routes.size(), x.cols, Kind::chunk);
    gather_rows<Device, T>(dev, packed, x, routes);
    return packed;
  }

  Device& dev;
  const MixtureShape m;
  const Mlp kind;
  const MixtureWeights<T>& w;
};

template <class Device, class T>
class ExpertFeedForward {
 public:
  using A = Accumulator<T>;
  using Description = Experts;
  using Activations = ExpertActivations<T>;

  ExpertFeedForward(Device& dev, const Config& c, const Layer<T>& weights)
      : dev(dev),
        has_shared(c.shared_mlp > 0),
        routed(dev, c.routed(), c.mlp_kind, weights.routed),
        shared(dev, c.shared(), c.mlp_kind, weights.shared) {}

  void forward(const Activations& a, Matrix<T> x, const KeptParts& kept = KeptParts::nothing()) {
    routed.forward(a.routed, x, kept);
    if (has_shared) shared.forward(a.shared, x, kept);
  }
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) {
    routed.output(y, a.routed, residual);
    if (has_shared) shared.output(y, a.shared, y);
  }
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Activations& a, Matrix<T> x) {
    const auto dx = allocate<T>(dev, x.rows, x.cols, Kind::chunk);
    routed.backward(g.routed, dx, dy, a.routed, x, Update::assign);
    if (has_shared) shared.backward(g.shared, dx, dy, a.shared, x, Update::add);
    return dx;
  }

 private:
  Device& dev;
  const bool has_shared;
  ExpertMixture<Device, T> routed, shared;
};

}  // namespace streambp
