// Gates of attention's heads: all numbers of a head are multiplied by the sigmoid of one number.
//
//   forward          y = σ(gate) x
//   backward         dx = σ(gate) dy          dgate = (1 - σ(gate)) rowsum(dy * y)
#pragma once

#include "kernels/attention.cuh"
#include "kernels/elementwise.cuh"

namespace streambp {

// Row i of head h
template <class T>
struct GatedHead {
  using A = Accumulator<T>;
  Matrix<T> y;
  Matrix<const T> gate, x;
  STREAMBP_INLINE void operator()(Index i, Index h) const {
    const Index dim = y.cols / gate.cols;
    const A share = sigmoid(A(gate(i, h)));
    for (Index j = h * dim; j < (h + 1) * dim; ++j) y(i, j) = share * A(x(i, j));
  }
};
template <class T>
struct HeadGateGradient {
  using A = Accumulator<T>;
  Matrix<T> gate;
  Matrix<const A> sums;
  STREAMBP_INLINE void operator()(Index i, Index h) const { gate(i, h) = (1 - sigmoid(A(gate(i, h)))) * sums(i, h); }
};

// gate: a column for each head
template <class Device, class T>
void gate_heads(Device& dev, Matrix<T> y, std::type_identity_t<Input<T>> gate, std::type_identity_t<Input<T>> x) {
  require_shape("head gates", "input", x, y.rows, y.cols);
  require(gate.rows == y.rows && gate.cols > 0 && y.cols % gate.cols == 0,
          "head gates: there is not one for each head");
  auto op = dev.operation("head gates", 1.0 * y.size() + 20.0 * gate.size(), 2.0 * sizeof(T) * y.size());
  if constexpr (Device::computes) compute_elements(dev, gate.rows, gate.cols, GatedHead<T>{y, gate, x});
}

// dy becomes the gradient of x, and gate its own.
template <class Device, class T>
void gate_heads_backward(Device& dev, Matrix<T> gate, Matrix<T> dy, std::type_identity_t<Input<T>> y) {
  require_shape("head gates backward", "output", y, dy.rows, dy.cols);
  auto scope = dev.scope();
  const auto sums = allocate<Accumulator<T>>(dev, gate.rows, gate.cols, Kind::chunk);
  auto op = dev.operation("head gates backward", 3.0 * y.size() + 40.0 * gate.size(), 3.0 * sizeof(T) * y.size());
  if constexpr (Device::computes) {
    compute_attention_delta<T>(dev, sums, dy, y);
    compute_elements(dev, gate.rows, gate.cols, GatedHead<T>{dy, gate, dy});
    compute_elements(dev, gate.rows, gate.cols, HeadGateGradient<T>{gate, sums});
  }
}

}  // namespace streambp
