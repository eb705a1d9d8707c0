// The nonlinearity of the MLP. SiLU and GELU (its tanh form) are one formula, since (1 + tanh(z/2)) / 2 = σ(z):
//
//   a(x) = x σ(z(x))            SiLU: z = x            GELU: z = sqrt(8/π) (x + 0.044715 x³)
//   a'(x) = σ + x σ (1 - σ) z'(x)
//
//   forward          y = a(gate) * up      (SwiGLU, GeGLU)          y = a(up)      (GELU without a gate)
//   backward         dup = dy * a(gate)    dgate = dy * up * a'(gate)          dup = dy * a'(up)
#pragma once

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

enum class Mlp { gelu, swiglu, geglu };

template <class T>
struct MlpGradient {
  Matrix<T> dgate, dup;
};

namespace run {

template <class T>
struct Silu {
  static constexpr T z(T x) { return x; }
  static constexpr T slope(T) { return T(1); }
};
template <class T>
struct Gelu {
  static constexpr T c = T(1.5957691216057308), k = T(0.044715);
  static constexpr T z(T x) { return c * (x + k * x * x * x); }
  static constexpr T slope(T x) { return c * (T(1) + T(3) * k * x * x); }
};

template <template <class> class A, class T>
struct ValueAndSlope {
  T value, slope;
  constexpr explicit ValueAndSlope(T x) {
    const T s = sigmoid(A<T>::z(x));
    value = x * s;
    slope = s + x * s * (T(1) - s) * A<T>::slope(x);
  }
};

template <template <class> class A, class T>
void activation(Cpu&, Matrix<T> y, Input<T> gate, Input<T> up) {
#pragma omp parallel for if (y.size() > kWorthThreads)
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
void activation_backward(Cpu&, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
#pragma omp parallel for
  for (Index i = 0; i < dy.rows; ++i) {
    T *g = gate ? gate.row(i) : up.row(i), *u = up.row(i);
    const T* d = dy.row(i);
    if (gate) {
#pragma omp simd
      for (Index j = 0; j < dy.cols; ++j) {
        const ValueAndSlope<A, T> a(g[j]);
        g[j] = d[j] * u[j] * a.slope;
        u[j] = d[j] * a.value;
      }
    } else {
#pragma omp simd
      for (Index j = 0; j < dy.cols; ++j) u[j] = d[j] * ValueAndSlope<A, T>(u[j]).slope;
    }
  }
}

#ifdef STREAMBP_CUDA

template <template <class> class A, class T>
void activation(Cuda& dev, Matrix<T> y, Input<T> gate, Input<T> up) {
  const bool gated = static_cast<bool>(gate);
  auto f = [=] __device__(auto n, Index i, Index j) {
    auto u = cuda::load<n()>(up.row(i) + j);
    const auto x = gated ? cuda::load<n()>(gate.row(i) + j) : u;
    for (int k = 0; k < n(); ++k) u.x[k] = x.x[k] * sigmoid(A<float>::z(x.x[k])) * (gated ? u.x[k] : 1);
    cuda::store(y.row(i) + j, u);
  };
  cuda::for_each_element(dev, f, y, gate, up);
}

template <template <class> class A, class T>
void activation_backward(Cuda& dev, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
  const bool gated = static_cast<bool>(gate);
  auto f = [=] __device__(auto n, Index i, Index j) {
    const auto d = cuda::load<n()>(dy.row(i) + j);
    auto u = cuda::load<n()>(up.row(i) + j);
    auto g = gated ? cuda::load<n()>(gate.row(i) + j) : u;
    for (int k = 0; k < n(); ++k) {
      const ValueAndSlope<A, float> a(g.x[k]);
      g.x[k] = d.x[k] * u.x[k] * a.slope;
      u.x[k] = d.x[k] * (gated ? a.value : a.slope);
    }
    if (gated) cuda::store(gate.row(i) + j, g);
    cuda::store(up.row(i) + j, u);
  };
  cuda::for_each_element(dev, f, up, gate, dy);
}

#endif

}  // namespace run

template <class Device, class T>
void activation(Device& dev, Mlp kind, Matrix<T> y, Input<T> gate, Input<T> up) {
  require_shape("activation", "up", up, y.rows, y.cols);
  if (gate) require_shape("activation", "gate", gate, y.rows, y.cols);
  auto op = dev.operation("activation", 8.0 * y.size(), sizeof(T) * (y.size() + up.size() + gate.size()));
  if constexpr (Device::computes) {
    kind == Mlp::swiglu ? run::activation<run::Silu>(dev, y, gate, up) : run::activation<run::Gelu>(dev, y, gate, up);
  }
}

// The gradients reuse the memory of gate and up.
template <class Device, class T>
MlpGradient<T> activation_backward(Device& dev, Mlp kind, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
  require_shape("activation backward", "dy", dy, up.rows, up.cols);
  auto op =
      dev.operation("activation backward", 14.0 * dy.size(), sizeof(T) * (dy.size() + 2.0 * (up.size() + gate.size())));
  if constexpr (Device::computes) {
    kind == Mlp::swiglu ? run::activation_backward<run::Silu>(dev, gate, up, dy)
                        : run::activation_backward<run::Gelu>(dev, gate, up, dy);
  }
  return {gate, up};
}

}  // namespace streambp
