// A mixture of experts: a feed-forward of which each row uses a few. x: the residual stream after its norm.
//
//   weights   = route(x routerᵀ)                                        kernels/router.cuh
//   activated = act(x gate_eᵀ) * (x up_eᵀ)                              for each row and each of its experts e
//   output    = Σ_e weight_e activated down_eᵀ
//
// The rows of a chunk are sorted by expert (kernels/routes.cuh); activations have a row for each row and expert of it. The
// weights of all experts are one matrix, one below the other.
#pragma once

#include "kernels/grouped_matmul.cuh"
#include "kernels/router.cuh"
#include "model/feed_forward.h"

namespace streambp {

template <class T>
struct ExpertActivations {
  Matrix<Accumulator<T>> logits, weights;  // of the router
  Matrix<std::int32_t> chosen, place, source, begin;
  Matrix<T> gate, up, activated;
};

// What the rest of the program must know of experts without computing them.
struct Experts {
  template <class T>
  static void parameters(Section<T>& rows, Layer<T>& w) {
    const Config& c = rows.c;
    const Modules& names = family_of(c).modules;
    const Index d = c.hidden, m = c.expert_mlp;
    rows.row(w.router.weight, names.router, ".weight", {c.experts, d}, Init::normal);
    rows.experts(w.gate, names.expert_gate, {m, d}, m, Init::normal);
    rows.experts(w.up, names.expert_up, {m, d}, m, Init::normal);
    rows.experts(w.down, names.expert_down, {d, m}, 0, Init::residual);
  }

  static auto& of(auto& all) { return all.experts; }

  // In the matrix `begin` only the first row is used.
  template <class T, class F>
  static void for_each_activation(const Config& c, ExpertActivations<T>& a, F&& f) {
    using enum Part;
    const auto own = [&](Part part, auto& matrix, Index columns) { f(part, matrix, columns, View::own_rows); };
    own(gate_up, a.logits, c.experts);
    own(gate_up, a.begin, c.experts + 1);
    for (auto* m : {&a.chosen, &a.place, &a.source}) own(gate_up, *m, c.experts_per_token);
    own(gate_up, a.weights, c.experts_per_token);
    for (auto* m : {&a.gate, &a.up}) own(gate_up, *m, c.experts_per_token * c.expert_mlp);
    own(activated, a.activated, c.experts_per_token * c.expert_mlp);
  }
};

template <class Device, class T>
class ExpertFeedForward {
 public:
  using A = Accumulator<T>;
  using Description = Experts;
  using Activations = ExpertActivations<T>;

  ExpertFeedForward(Device& dev, const Config& c, const Layer<T>& weights) : dev(dev), c(c), w(weights) {}

  // What is kept is not computed again.
  void forward(const Activations& a, Matrix<T> x, const KeptParts& kept = KeptParts::nothing()) {
    if (!kept.have(Part::gate_up)) {
      const Routes routes = routes_of(a);
      linear<Device, A, T>(dev, a.logits, x, w.router);
      route(dev, a.chosen, a.weights, router_of(a));
      sort_by_expert(dev, routes);
      auto scope = dev.scope();
      const Matrix<T> packed = gathered(x, routes);
      grouped_matmul<Device, T>(dev, packed_rows(a.gate), packed, w.gate.weight, routes);
      grouped_matmul<Device, T>(dev, packed_rows(a.up), packed, w.up.weight, routes);
    }
    if (!kept.have(Part::activated)) activation(dev, c.mlp_kind, a.activated, a.gate, a.up);
  }

  // y = residual + Σ_e weight_e activated down_eᵀ
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) {
    auto scope = dev.scope();
    const Routes routes = routes_of(a);
    const auto packed = allocate<T>(dev, routes.size(), y.cols, Kind::chunk);
    grouped_matmul<Device, T>(dev, packed, packed_rows(a.activated), w.down.weight, routes);
    combine_rows<Device, T>(dev, y, packed, a.weights, routes, residual);
  }

  // dy: of the output. Returns dx, and adds to the gradients of the weights.
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Activations& a, Matrix<T> x) {
    const auto dx = allocate<T>(dev, x.rows, x.cols, Kind::chunk);
    auto scope = dev.scope();
    const Routes routes = routes_of(a);
    const auto dweights = allocate<A>(dev, x.rows, c.experts_per_token, Kind::chunk);
    const auto dactivated = allocate<T>(dev, routes.size(), c.expert_mlp, Kind::chunk);
    const Matrix<T> packed_dy = gathered(dy, routes);
    grouped_matmul_backward_input<Device, T>(dev, dactivated, packed_dy, w.down.weight, routes, Update::assign);
    combine_rows_backward<Device, T>(dev, dweights, dactivated, packed_rows(a.activated), a.weights, routes);
    grouped_matmul_backward_weight<Device, T, A>(dev, g.down.weight, packed_dy, packed_rows(a.activated), routes);
    // From here on the memory of gate and up holds their gradients.
    const auto [dgate, dup] = activation_backward(dev, c.mlp_kind, packed_rows(a.gate), packed_rows(a.up), dactivated);
    const Matrix<T> packed = packed_dy;  // the same memory
    gather_rows<Device, T>(dev, packed, x, routes);
    grouped_matmul_backward_weight<Device, T, A>(dev, g.gate.weight, dgate, packed, routes);
    grouped_matmul_backward_weight<Device, T, A>(dev, g.up.weight, dup, packed, routes);
    grouped_matmul_backward_input<Device, T>(dev, packed, dgate, w.gate.weight, routes, Update::assign);
    grouped_matmul_backward_input<Device, T>(dev, packed, dup, w.up.weight, routes, Update::add);
    combine_rows<Device, T>(dev, dx, packed, {}, routes);
    router_backward(g, dx, dweights, a, x);
    return dx;
  }

 private:
  void router_backward(const Layer<A>& g, Matrix<T> dx, Matrix<A> dweights, const Activations& a, Matrix<T> x) {
    const auto exact = allocate<A>(dev, x.rows, c.experts, Kind::chunk);
    route_backward(dev, exact, a.chosen, dweights, router_of(a));
    const auto dlogits = allocate<T>(dev, x.rows, c.experts, Kind::chunk);
    convert(dev, dlogits, exact);
    linear_backward(dev, dx, x, {LinearBackward<T, A>{g.router, dlogits, w.router}}, Update::add);
  }

  RouterInput<A> router_of(const Activations& a) const { return {a.logits, {}, c.router_style()}; }
  Routes routes_of(const Activations& a) const {
    return {a.chosen, a.place, a.source.reshape(a.source.size()), a.begin.slice({0, 1})};
  }
  // A row for each row and expert.
  Matrix<T> packed_rows(Matrix<T> x) const { return x.reshape(c.expert_mlp); }
  Matrix<T> gathered(Matrix<T> x, const Routes& routes) {
    const auto packed = allocate<T>(dev, routes.size(), x.cols, Kind::chunk);
    gather_rows<Device, T>(dev, packed, x, routes);
    return packed;
  }

  Device& dev;
  const Config& c;
  const Layer<T>& w;
};

}  // namespace streambp
