// The linear layers of experts, for rows that are sorted by expert. With one expert this is a linear layer like any other.
#pragma once

#include "kernels/grouped_matmul.cuh"
#include "model/linear.h"

namespace streambp {

// y = x weight_eᵀ
template <class Device, class T>
void grouped_linear(Device& dev, Matrix<T> y, Matrix<T> x, const Linear<T>& w, const Routes& routes) {
  if (routes.experts() == 1) return linear(dev, y, x, w);
  grouped_matmul<Device, T>(dev, y, x, w.weight, routes);
}

// dx = dy weight_e, or dx += dy weight_e
template <class Device, class T>
void grouped_linear_backward_input(Device& dev, Matrix<T> dx, Matrix<T> dy, const Linear<T>& w, const Routes& routes,
                                   Update update) {
  using A = Accumulator<T>;
  if (routes.experts() == 1) return linear_backward(dev, dx, {}, {LinearBackward<T, A>{Linear<A>(), dy, w}}, update);
  grouped_matmul_backward_input<Device, T>(dev, dx, dy, w.weight, routes, update);
}

// Adds to the gradients of the weights.
template <class Device, class T, class A>
void grouped_linear_backward_weight(Device& dev, const LinearBackward<T, A>& layer, Matrix<T> x, const Routes& routes) {
  if (routes.experts() == 1) return linear_backward(dev, {}, x, {layer}, Update::add);
  grouped_matmul_backward_weight<Device, T, A>(dev, layer.dw.weight, layer.dy, x, routes);
}

}  // namespace streambp
