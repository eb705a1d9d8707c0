// AdamW with decoupled weight decay:
//
//   m = β₁ m + (1 - β₁) g          v = β₂ v + (1 - β₂) g²
//   w = w - rate (m̂ / (sqrt(v̂) + eps) + decay w),          m̂ = m / (1 - β₁ᵗ),  v̂ = v / (1 - β₂ᵗ)
//
// g is the accumulated gradient times `gradient_scale`. bfloat16 weights are updated in one of two ways. With a float32
// master copy, the update goes to the copy and the weight is its rounded value. Without one, the weight is updated with
// stochastic rounding.
#pragma once

#include <cmath>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/optimizer_step.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

// M: type of the moments. The master copy is empty if the weight is updated directly.
template <class M>
struct AdamWState {
  Matrix<float> master;
  Matrix<M> m, v;
};

template <class Device, class T, class G, class M>
void adamw(Device& dev, Matrix<T> w, Matrix<G> g, const AdamWState<M>& state, const OptimizerStep& settings) {
  require_shape("adamw", "gradient", g, w.rows, w.cols);
  require_shape("adamw", "first moment", state.m, w.rows, w.cols);
  require_shape("adamw", "second moment", state.v, w.rows, w.cols);
  if (state.master) require_shape("adamw", "master copy", state.master, w.rows, w.cols);
  auto op = dev.operation("adamw", 14.0 * w.size(),
                          (2.0 * sizeof(T) + 8.0 * (state.master ? 1 : 0) + 4.0 * sizeof(M) + sizeof(G)) * w.size());
  if constexpr (Device::computes) compute_adamw(dev, w, g, state, settings);
}

// The constants of the formula, in the type of the arithmetic.
template <class T>
struct AdamWConstants {
  T beta1, beta2, scale, eps, rate, v_scale, decay;
  explicit AdamWConstants(const OptimizerStep& s)
      : beta1(static_cast<T>(s.beta1)),
        beta2(static_cast<T>(s.beta2)),
        scale(static_cast<T>(s.gradient_scale)),
        eps(static_cast<T>(s.eps)),
        rate(static_cast<T>(s.rate / (1 - power(s.beta1, static_cast<double>(s.updates()))))),
        v_scale(static_cast<T>(1 / (1 - power(s.beta2, static_cast<double>(s.updates()))))),
        decay(static_cast<T>(s.rate * s.decay)) {}

  constexpr void update(T& w, T& m, T& v, T g) const {
    g *= scale;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    w -= rate * m / (std::sqrt(v * v_scale) + eps) + decay * w;
  }
};

// --- CPU ---

template <class T, class G, class M>
void compute_adamw(Cpu&, Matrix<T> w, Matrix<G> g, const AdamWState<M>& state, const OptimizerStep& settings) {
  using A = Accumulator<T>;
  const AdamWConstants<A> constants(settings);
  const Random random = settings.random();
#pragma omp parallel for if (w.size() > kWorthThreads)
  for (Index i = 0; i < w.rows; ++i) {
    T* w_row = w.row(i);
    float* master = state.master ? state.master.row(i) : nullptr;
    M *m_row = state.m.row(i), *v_row = state.v.row(i);
    const G* g_row = g.row(i);
    const auto updated = [=](A weight, Index j, std::uint64_t bits) {
      A first = m_row[j], second = v_row[j];
      constants.update(weight, first, second, g_row[j]);
      m_row[j] = stochastic_round<M>(first, bits);
      v_row[j] = stochastic_round<M>(second, bits >> 16);
      return weight;
    };
    const auto bits = [=, first_row = settings.first_row](Index j) {
      return random.bits(static_cast<std::uint64_t>((first_row + i) * w.cols + j));
    };
    if (master) {
#pragma omp simd
      for (Index j = 0; j < w.cols; ++j) {
        master[j] = updated(master[j], j, bits(j));
        w_row[j] = A(master[j]);
      }
    } else {
#pragma omp simd
      for (Index j = 0; j < w.cols; ++j) {
        const std::uint64_t random_bits = bits(j);
        w_row[j] = stochastic_round<T>(updated(w_row[j], j, random_bits), random_bits >> 32);
      }
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

template <class T, class G, class M>
void compute_adamw(Cuda& dev, Matrix<T> w, Matrix<G> g, const AdamWState<M>& state, const OptimizerStep& settings) {
  const Matrix<float> master = state.master;
  const Matrix<M> m = state.m, v = state.v;
  const AdamWConstants<float> constants(settings);
  const Random random = settings.random();
  const Index before = settings.first_row * w.cols;
  auto f = [=] __device__(auto n, Index i, Index j) {
    auto weight = master ? cuda::load<n()>(master.row(i) + j) : cuda::load<n()>(w.row(i) + j);
    auto first = cuda::load<n()>(m.row(i) + j), second = cuda::load<n()>(v.row(i) + j);
    const auto gradient = cuda::load<n()>(g.row(i) + j);
    for (int k = 0; k < n(); ++k) {
      constants.update(weight.x[k], first.x[k], second.x[k], gradient.x[k]);
      const std::uint64_t bits = random.bits(static_cast<std::uint64_t>(before + i * w.stride + j + k));
      first.x[k] = stochastic_round<M>(first.x[k], bits);
      second.x[k] = stochastic_round<M>(second.x[k], bits >> 16);
      if (!master) weight.x[k] = stochastic_round<T>(weight.x[k], bits >> 32);
    }
    cuda::store(m.row(i) + j, first);
    cuda::store(v.row(i) + j, second);
    if (master) cuda::store(master.row(i) + j, weight);
    cuda::store(w.row(i) + j, weight);
  };
  cuda::for_each_element(dev, f, w, master, m, v, g);
}

#endif

}  // namespace streambp
