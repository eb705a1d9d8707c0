// The nonlinearity of the MLP. SiLU and GELU (its tanh form) are one formula, since (1 + tanh(z/2)) / 2 = σ(z):
//
//   a(x) = x σ(z(x))            SiLU: z = x            GELU: z = sqrt(8/π) (x + 0.044715 x³)
//   a'(x) = σ + x σ (1 - σ) z'(x)
//
//   forward          y = a(gate) * up      (SwiGLU, GeGLU)          y = a(up)      (GELU without a gate)
//   backward         dup = dy * a(gate)    dgate = dy * up * a'(gate)          dup = dy * a'(up)
#pragma once

#include <utility>

#include "device.cuh"
#include "math.cuh"
#include "matrix.cuh"

namespace streambp {

enum class Mlp { gelu, swiglu, geglu };

namespace cpu {

template <class T>
struct Silu {
  static T z(T x) { return x; }
  static T slope(T) { return T(1); }
};
template <class T>
struct Gelu {
  static constexpr T c = T(1.5957691216057308), k = T(0.044715);
  static T z(T x) { return c * (x + k * x * x * x); }
  static T slope(T x) { return c * (T(1) + T(3) * k * x * x); }
};

template <template <class> class A, class T>
void activation(Matrix<T> y, Input<T> gate, Input<T> up) {
#pragma omp parallel for
  for (Index i = 0; i < y.rows; ++i) {
    const T *x = gate ? gate.row(i) : up.row(i), *u = up.row(i);
    T* out = y.row(i);
#pragma omp simd
    for (Index j = 0; j < y.cols; ++j) out[j] = x[j] * sigmoid(A<T>::z(x[j]));
    if (!gate) continue;
#pragma omp simd
    for (Index j = 0; j < y.cols; ++j) out[j] *= u[j];
  }
}

template <template <class> class A, class T>
void activation_backward(Matrix<T> gate, Matrix<T> up, Input<T> dy) {
#pragma omp parallel for
  for (Index i = 0; i < dy.rows; ++i) {
    T *g = gate ? gate.row(i) : up.row(i), *u = up.row(i);
    const T* d = dy.row(i);
    auto value_and_slope = [](T x) {
      const T s = sigmoid(A<T>::z(x));
      return std::pair{x * s, s + x * s * (T(1) - s) * A<T>::slope(x)};
    };
    if (gate) {
#pragma omp simd
      for (Index j = 0; j < dy.cols; ++j) {
        const auto [value, slope] = value_and_slope(g[j]);
        g[j] = d[j] * u[j] * slope;
        u[j] = d[j] * value;
      }
    } else {
#pragma omp simd
      for (Index j = 0; j < dy.cols; ++j) u[j] = d[j] * value_and_slope(u[j]).second;
    }
  }
}

}  // namespace cpu

template <class Device, class T>
void activation(Device& dev, Mlp kind, Matrix<T> y, Input<T> gate, Input<T> up) {
  require_shape("activation", "up", up, y.rows, y.cols);
  if (gate) require_shape("activation", "gate", gate, y.rows, y.cols);
  auto op = dev.operation("activation", 8.0 * y.size(), sizeof(T) * (y.size() + up.size() + gate.size()));
  if constexpr (Device::computes) {
    kind == Mlp::swiglu ? cpu::activation<cpu::Silu>(y, gate, up) : cpu::activation<cpu::Gelu>(y, gate, up);
  }
}

// The gradients take the places of gate and up.
template <class Device, class T>
void activation_backward(Device& dev, Mlp kind, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
  require_shape("activation backward", "dy", dy, up.rows, up.cols);
  auto op =
      dev.operation("activation backward", 14.0 * dy.size(), sizeof(T) * (dy.size() + 2.0 * (up.size() + gate.size())));
  if constexpr (Device::computes) {
    kind == Mlp::swiglu ? cpu::activation_backward<cpu::Silu>(gate, up, dy)
                        : cpu::activation_backward<cpu::Gelu>(gate, up, dy);
  }
}

}  // namespace streambp
