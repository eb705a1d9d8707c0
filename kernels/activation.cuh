// The activation of the MLP. SiLU and GELU (its tanh form) share one formula, since (1 + tanh(z/2)) / 2 = σ(z):
//
//   a(x) = x σ(z(x))            SiLU: z = x            GELU: z = sqrt(8/π) (x + 0.044715 x³)
//   a'(x) = σ + x σ (1 - σ) z'(x)
//
// relu² is max(x, 0)², with the slope 2 max(x, 0). Clamped SwiGLU has z = 1.702 x, and with numbers beyond 7 cut off, which have
// no gradient, y = a(min(gate, 7)) * (1 + up), where up is between -7 and 7.
//
//   forward          y = a(gate) * up      (SwiGLU, GeGLU)          y = a(up)      (without a gate)
//                    y = σ(gate) * up      (the gate of attention)
//   backward         dup = dy * a(gate)    dgate = dy * up * a'(gate)          dup = dy * a'(up)
#pragma once

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

enum class Mlp { gelu, swiglu, geglu, relu2, sigmoid_gate, clamped_swiglu };

struct Silu {
  template <class T>
  STREAMBP_INLINE static T z(T x) {
    return x;
  }
  template <class T>
  STREAMBP_INLINE static T z_slope(T) {
    return T(1);
  }
};
struct Gelu {
  template <class T>
  static constexpr T c = T(1.5957691216057308);
  template <class T>
  static constexpr T k = T(0.044715);

  template <class T>
  STREAMBP_INLINE static T z(T x) {
    return c<T> * (x + k<T> * x * x * x);
  }
  template <class T>
  STREAMBP_INLINE static T z_slope(T x) {
    return c<T> * (T(1) + T(3) * k<T> * x * x);
  }
};

struct Relu2 {};
struct Sigmoid {};
struct ClampedSilu {
  template <class T>
  static constexpr T slope = T(1.702);
  template <class T>
  static constexpr T limit = T(7);

  template <class T>
  STREAMBP_INLINE static T z(T x) {
    return slope<T> * x;
  }
  template <class T>
  STREAMBP_INLINE static T z_slope(T) {
    return slope<T>;
  }
  // Not a number stays so.
  template <class T>
  STREAMBP_INLINE static T below(T x) {
    return x > limit<T> ? limit<T> : x;
  }
};

template <class A, class T>
STREAMBP_INLINE T activated(A, T x) {
  return x * sigmoid(A::z(x));
}
template <class T>
STREAMBP_INLINE T activated(Relu2, T x) {
  return x > T(0) ? x * x : T(0);
}

template <class T>
STREAMBP_INLINE T activated(Sigmoid, T x) {
  return sigmoid(x);
}
template <class T>
STREAMBP_INLINE T activated(ClampedSilu, T x) {
  const T below = ClampedSilu::below(x);
  return below * sigmoid(ClampedSilu::z(below));
}

// What a(gate) is multiplied by, and the gradient of up from that of this factor.
template <class A, class T>
STREAMBP_INLINE T factor(A, T up) {
  if constexpr (std::is_same_v<A, ClampedSilu>) return T(1) - ClampedSilu::below(-ClampedSilu::below(up));
  return up;
}
template <class A, class T>
STREAMBP_INLINE T factor_backward(A, T up, T dfactor) {
  if constexpr (std::is_same_v<A, ClampedSilu>)
    return up > ClampedSilu::limit<T> || up < -ClampedSilu::limit<T> ? T(0) : dfactor;
  return dfactor;
}

// Calls f with the activation of this kind.
template <class F>
void with_activation(Mlp kind, F&& f) {
  if (kind == Mlp::sigmoid_gate) return f(Sigmoid{});
  if (kind == Mlp::swiglu) return f(Silu{});
  if (kind == Mlp::clamped_swiglu) return f(ClampedSilu{});
  kind == Mlp::relu2 ? f(Relu2{}) : f(Gelu{});
}

// y = a(gate) * up; with an empty gate, y = a(up)
template <class Device, class T>
void activation(Device& dev, Mlp kind, Matrix<T> y, Input<T> gate, Input<T> up) {
  require_shape("activation", "up", up, y.rows, y.cols);
  if (gate) require_shape("activation", "gate", gate, y.rows, y.cols);
  auto op = dev.operation("activation", 8.0 * y.size(), sizeof(T) * (y.size() + up.size() + gate.size()));
  if constexpr (Device::computes) with_activation(kind, [&](auto a) { compute_activation(dev, a, y, gate, up); });
}

template <class T>
struct MlpGradient {
  Matrix<T> dgate, dup;
};

// The gradients overwrite gate and up. They are returned under new names.
template <class Device, class T>
MlpGradient<T> activation_backward(Device& dev, Mlp kind, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
  require_shape("activation backward", "dy", dy, up.rows, up.cols);
  auto op =
      dev.operation("activation backward", 14.0 * dy.size(), sizeof(T) * (dy.size() + 2.0 * (up.size() + gate.size())));
  if constexpr (Device::computes)
    with_activation(kind, [&](auto a) { compute_activation_backward(dev, a, gate, up, dy); });
  return {gate, up};
}

// --- CPU ---

template <class A, class T>
struct ValueAndSlope {
  T value, slope;
  STREAMBP_INLINE explicit ValueAndSlope(T x) {
    if constexpr (std::is_same_v<A, Relu2>) {
      value = activated(A{}, x);
      slope = x > T(0) ? T(2) * x : T(0);
    } else if constexpr (std::is_same_v<A, Sigmoid>) {
      value = activated(A{}, x);
      slope = value * (T(1) - value);
    } else {
      [[maybe_unused]] const T given = x;
      if constexpr (std::is_same_v<A, ClampedSilu>) x = ClampedSilu::below(x);
      const T s = sigmoid(A::z(x));
      value = x * s;
      slope = s + x * s * (T(1) - s) * A::z_slope(x);
      if constexpr (std::is_same_v<A, ClampedSilu>) slope = given > x ? T(0) : slope;
    }
  }
};

template <class A, class T>
void compute_activation(Cpu&, A, Matrix<T> y, Input<T> gate, Input<T> up) {
  const auto a = [](Accumulator<T> x) { return activated(A{}, x); };
#pragma omp parallel for if (y.size() > kWorthThreads)
  for (Index i = 0; i < y.rows; ++i) {
    const T *g = gate ? gate.row(i) : nullptr, *u = up.row(i);
    T* out = y.row(i);
    if (gate) {
#pragma omp simd
      for (Index j = 0; j < y.cols; ++j) out[j] = a(g[j]) * factor(A{}, Accumulator<T>(u[j]));
    } else {
#pragma omp simd
      for (Index j = 0; j < y.cols; ++j) out[j] = a(u[j]);
    }
  }
}

template <class A, class T>
void compute_activation_backward(Cpu&, A, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
#pragma omp parallel for
  for (Index i = 0; i < dy.rows; ++i) {
    T *g = gate ? gate.row(i) : up.row(i), *u = up.row(i);
    const T* d = dy.row(i);
    if (gate) {
#pragma omp simd
      for (Index j = 0; j < dy.cols; ++j) {
        const ValueAndSlope<A, Accumulator<T>> a(g[j]);
        const Accumulator<T> up = u[j], dy = d[j];
        g[j] = dy * factor(A{}, up) * a.slope;
        u[j] = factor_backward(A{}, up, dy * a.value);
      }
    } else {
#pragma omp simd
      for (Index j = 0; j < dy.cols; ++j) u[j] = d[j] * ValueAndSlope<A, Accumulator<T>>(u[j]).slope;
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class A, class T>
void compute_activation(Cuda& dev, A, Matrix<T> y, Input<T> gate, Input<T> up) {
  const bool gated = static_cast<bool>(gate);
  auto f = [=] __device__(auto n, Index i, Index j) {
    auto u = cuda::load<n()>(up.row(i) + j);
    const auto x = gated ? cuda::load<n()>(gate.row(i) + j) : u;
    for (int k = 0; k < n(); ++k) u.x[k] = activated(A{}, x.x[k]) * (gated ? factor(A{}, u.x[k]) : 1);
    cuda::store(y.row(i) + j, u);
  };
  cuda::for_each_element(dev, f, y, gate, up);
}

template <class A, class T>
void compute_activation_backward(Cuda& dev, A, Matrix<T> gate, Matrix<T> up, Input<T> dy) {
  const bool gated = static_cast<bool>(gate);
  auto f = [=] __device__(auto n, Index i, Index j) {
    const auto d = cuda::load<n()>(dy.row(i) + j);
    auto u = cuda::load<n()>(up.row(i) + j);
    auto g = gated ? cuda::load<n()>(gate.row(i) + j) : u;
    for (int k = 0; k < n(); ++k) {
      const ValueAndSlope<A, float> a(g.x[k]);
      const float up = u.x[k];
      g.x[k] = d.x[k] * factor(A{}, up) * a.slope;
      u.x[k] = gated ? factor_backward(A{}, up, d.x[k] * a.value) : d.x[k] * a.slope;
    }
    if (gated) cuda::store(gate.row(i) + j, g);
    cuda::store(up.row(i) + j, u);
  };
  cuda::for_each_element(dev, f, up, gate, dy);
}

#endif

}  // namespace streambp
