// The feed-forward of a transformer layer, row by row. x: the residual stream after its norm.
//
//   activated = act(x gateᵀ) * (x upᵀ)        or act(x upᵀ) without a gate
//   output    = activated downᵀ
#pragma once

#include "kernels/activation.cuh"
#include "model/linear.h"
#include "model/parts.h"
#include "model/tensors.h"

namespace streambp {

template <class T>
struct DenseActivations {
  Matrix<T> gate, up;   // gate only where the model has one
  Matrix<T> activated;  // the input of the down projection
};

// What the rest of the program must know of it without computing it.
struct Dense {
  template <class T>
  static void parameters(Section<T>& rows, Layer<T>& w) {
    const Config& c = rows.c;
    const Modules& names = family_of(c).modules;
    const Index d = c.hidden, m = c.mlp;
    if (c.gated()) rows.linear("mlp", w.gate, names.gate, {m, d}, Init::normal, c.mlp_bias);
    rows.linear("mlp", w.up, names.up, {m, d}, Init::normal, c.mlp_bias);
    rows.linear("mlp", w.down, names.down, {d, m}, Init::residual, c.mlp_bias);
  }

  static auto& of(auto& all) { return all.dense; }

  template <class T, class F>
  static void for_each_activation(const Config& c, DenseActivations<T>& a, F&& f) {
    if (c.gated()) f(Part::gate_up, a.gate, c.mlp, View::own_rows);
    f(Part::gate_up, a.up, c.mlp, View::own_rows);
    f(Part::activated, a.activated, c.mlp, View::own_rows);
  }
  template <class Device, class T>
  static void complete(Device&, DenseActivations<T>&, const Config&, Index) {}
};

template <class Device, class T>
class FeedForward {
 public:
  using A = Accumulator<T>;
  using Back = LinearBackward<T, A>;
  using Description = Dense;

  FeedForward(Device& dev, const Config& c, const Layer<T>& weights) : dev(dev), c(c), w(weights) {}

  // What is kept is not computed again.
  void forward(const DenseActivations<T>& a, Matrix<T> x, const KeptParts& kept = KeptParts::nothing()) {
    if (!kept.have(Part::gate_up)) {
      if (c.gated()) linear(dev, a.gate, x, w.gate);
      linear(dev, a.up, x, w.ups());
    }
    if (!kept.have(Part::activated)) activation(dev, c.mlp_kind, a.activated, a.gate, a.up);
  }

  // y = residual + activated downᵀ
  void output(Matrix<T> y, const DenseActivations<T>& a, Input<T> residual = {}) {
    linear(dev, y, a.activated, w.down, residual);
  }

  // dy: of the output. Returns dx, and adds to the gradients of the weights.
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const DenseActivations<T>& a, Matrix<T> x) {
    const auto dactivated = allocate<T>(dev, x.rows, a.activated.cols, Kind::chunk);
    linear_backward(dev, dactivated, a.activated, {Back{g.down, dy, w.down}}, Update::assign);
    // From here on the memory of gate and up holds their gradients.
    const auto [dgate, dup] = activation_backward(dev, c.mlp_kind, a.gate, a.up, dactivated);
    const auto dx = allocate<T>(dev, x.rows, x.cols, Kind::chunk);
    if (w.up.adapter.b && !w.up.adapter.a) {  // shares gate's a
      linear_backward(dev, dx, x, {Back{g.gate, dgate, w.gate}, Back{g.up, dup, w.up}}, Update::assign);
      return dx;
    }
    linear_backward(dev, dx, x, {Back{g.up, dup, w.up}}, Update::assign);
    if (c.gated()) linear_backward(dev, dx, x, {Back{g.gate, dgate, w.gate}}, Update::add);
    return dx;
  }

 private:
  Device& dev;
  const Config& c;
  const Layer<T>& w;
};

}  // namespace streambp
