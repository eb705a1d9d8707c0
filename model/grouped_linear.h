// The linear layers of experts, for rows that are sorted by expert. With one expert this is a linear layer like any other.
//
// Of an adapter, a and b have the thin matrices of all experts, one below the other.
#pragma once

#include "kernels/group_bias.cuh"
#include "kernels/grouped_matmul.cuh"
#include "model/linear.h"

namespace streambp {

// scale x a_eᵀ, in memory of the caller's scope
template <class Device, class T>
Matrix<T> grouped_low_rank(Device& dev, Matrix<T> x, const Adapter<T>& adapter, const Routes& routes) {
  const auto low = allocate<T>(dev, x.rows, adapter.a.rows / routes.experts(), Kind::chunk);
  grouped_matmul<Device, T>(dev, low, x, adapter.a, routes, Update::assign);
  scale(dev, low, adapter.scale);
  return low;
}
// y = x weight_eᵀ + bias_e
template <class Device, class T>
void grouped_linear(Device& dev, Matrix<T> y, Matrix<T> x, const Linear<T>& w, const Routes& routes) {
  if (routes.experts() == 1) return linear(dev, y, x, w);
  grouped_matmul<Device, T>(dev, y, x, w.weight, routes, Update::assign);
  if (w.bias) add_group_bias<Device, T>(dev, y, w.bias, routes);
  if (!w.adapter.b) return;
  auto scope = dev.scope();
  grouped_matmul<Device, T>(dev, y, grouped_low_rank(dev, x, w.adapter, routes), w.adapter.b, routes, Update::add);
}

// dx = dy weight_e, or dx += dy weight_e
template <class Device, class T>
void grouped_linear_backward_input(Device& dev, Matrix<T> dx, Matrix<T> dy, const Linear<T>& w, const Routes& routes,
                                   Update update) {
  using A = Accumulator<T>;
  if (routes.experts() == 1) return linear_backward(dev, dx, {}, {LinearBackward<T, A>{Linear<A>(), dy, w}}, update);
  grouped_matmul_backward_input<Device, T>(dev, dx, dy, w.weight, routes, update);
  if (!w.adapter.b) return;
  auto scope = dev.scope();
  const auto dlow = allocate<T>(dev, dy.rows, w.adapter.b.cols, Kind::chunk);
  grouped_matmul_backward_input<Device, T>(dev, dlow, dy, w.adapter.b, routes, Update::assign);
  scale(dev, dlow, w.adapter.scale);
  grouped_matmul_backward_input<Device, T>(dev, dx, dlow, w.adapter.a, routes, Update::add);
}

// For layers with the same input x, of which the adapters share the first one's a: adds to the gradients of the weights.
template <class Device, class T, class A>
void grouped_linear_backward_weight(Device& dev, std::initializer_list<LinearBackward<T, A>> layers, Matrix<T> x,
                                    const Routes& routes) {
  if (routes.experts() == 1) return linear_backward(dev, {}, x, layers, Update::add);
  for (const auto& [dw, dy, w] : layers) {
    grouped_matmul_backward_weight<Device, T, A>(dev, dw.weight, dy, x, routes);
    group_bias_backward<Device, T>(dev, dw.bias, dy, routes);
  }
  const auto& [dfirst, dy_of_first, first] = *layers.begin();
  if (!dfirst.adapter.b) return;
  auto scope = dev.scope();
  const Matrix<T> low = grouped_low_rank(dev, x, first.adapter, routes);
  const auto dlow = allocate<T>(dev, x.rows, low.cols, Kind::chunk);
  Update update = Update::assign;
  for (const auto& [dw, dy, w] : layers) {
    grouped_matmul_backward_weight<Device, T, A>(dev, dw.adapter.b, dy, low, routes);
    grouped_matmul_backward_input<Device, T>(dev, dlow, dy, w.adapter.b, routes, std::exchange(update, Update::add));
  }
  scale(dev, dlow, first.adapter.scale);
  grouped_matmul_backward_weight<Device, T, A>(dev, dfirst.adapter.a, dlow, x, routes);
}

}  // namespace streambp
