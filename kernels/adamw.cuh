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
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/optimizer_step.h"
#ifdef STREAMBP_CUDA
#include "kernels/base/jobs.cuh"
#endif

namespace streambp {

// M: type of the moments. The master copy is empty if the weight is updated directly.
template <class M>
struct AdamWState {
  Matrix<float> master;
  Matrix<M> m, v;
};

// The constants of the formula, in the type of the arithmetic.
template <class T>
struct AdamWConstants {
  T beta1, beta2, scale, eps, rate, v_scale, decay;
  Random random;
  Index first_row;  // where w begins in its parameter

  AdamWConstants(const OptimizerStep& s)
      : beta1(static_cast<T>(s.beta1)),
        beta2(static_cast<T>(s.beta2)),
        scale(static_cast<T>(s.gradient_scale)),
        eps(static_cast<T>(s.eps)),
        rate(static_cast<T>(s.rate / (1 - power(s.beta1, static_cast<double>(s.updates()))))),
        v_scale(static_cast<T>(1 / (1 - power(s.beta2, static_cast<double>(s.updates()))))),
        decay(static_cast<T>(s.rate * s.decay)),
        random(s.random()),
        first_row(s.first_row) {}

  constexpr void update(T& w, T& m, T& v, T g) const {
    g *= scale;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    w -= rate * m / (std::sqrt(v * v_scale) + eps) + decay * w;
  }

  // For w[i][j] of so many columns.
  constexpr std::uint64_t random_bits(Index i, Index j, Index cols) const {
    return random.bits(static_cast<std::uint64_t>((first_row + i) * cols + j));
  }
};

// The update of one weight.
template <class T, class G, class State>
struct AdamWUpdate {
  Matrix<T> w;
  Matrix<G> g;
  State state;
  AdamWConstants<Accumulator<T>> constants;
};

template <class Device, class T, class G, class M>
void adamw(Device& dev, const std::vector<AdamWUpdate<T, G, AdamWState<M>>>& all) {
  double size = 0, bytes = 0;
  for (const auto& [w, g, state, constants] : all) {
    require_shape("adamw", "gradient", g, w.rows, w.cols);
    require_shape("adamw", "first moment", state.m, w.rows, w.cols);
    require_shape("adamw", "second moment", state.v, w.rows, w.cols);
    if (state.master) require_shape("adamw", "master copy", state.master, w.rows, w.cols);
    size += static_cast<double>(w.size());
    bytes += (2.0 * sizeof(T) + 8.0 * (state.master ? 1 : 0) + 4.0 * sizeof(M) + sizeof(G)) * w.size();
  }
  auto op = dev.operation("adamw", 14.0 * size, bytes);
  if constexpr (Device::computes) compute_adamw(dev, all);
}

// --- CPU ---

template <class T, class G, class M>
void compute_adamw(Cpu& dev, const std::vector<AdamWUpdate<T, G, AdamWState<M>>>& all) {
  for (const auto& update : all) compute_adamw(dev, update);
}

template <class T, class G, class M>
void compute_adamw(Cpu&, const AdamWUpdate<T, G, AdamWState<M>>& update) {
  using A = Accumulator<T>;
  const Matrix<T> w = update.w;
  const AdamWConstants<A> constants = update.constants;
  const AdamWState<M>& state = update.state;
#pragma omp parallel for if (w.size() > kWorthThreads)
  for (Index i = 0; i < w.rows; ++i) {
    T* w_row = w.row(i);
    float* master = state.master ? state.master.row(i) : nullptr;
    M *m_row = state.m.row(i), *v_row = state.v.row(i);
    const G* g_row = update.g.row(i);
    const auto updated = [=](A weight, Index j, std::uint64_t bits) {
      A first = m_row[j], second = v_row[j];
      constants.update(weight, first, second, g_row[j]);
      m_row[j] = stochastic_round<M>(first, bits);
      v_row[j] = stochastic_round<M>(second, bits >> 16);
      return weight;
    };
    const auto bits = [=](Index j) { return constants.random_bits(i, j, w.cols); };
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

namespace cuda {

template <class T, class G, class M>
struct AdamWElements {
  AdamWUpdate<T, G, AdamWState<M>> of;

  __device__ void operator()(auto n, Index i, Index j) const {
    const auto& [w, g, state, constants] = of;
    const auto& [master, m, v] = state;
    auto weight = master ? load<n()>(master.row(i) + j) : load<n()>(w.row(i) + j);
    auto first = load<n()>(m.row(i) + j), second = load<n()>(v.row(i) + j);
    const auto gradient = load<n()>(g.row(i) + j);
    for (int k = 0; k < n(); ++k) {
      constants.update(weight.x[k], first.x[k], second.x[k], gradient.x[k]);
      const std::uint64_t bits = constants.random_bits(i, j + k, w.cols);
      first.x[k] = stochastic_round<M>(first.x[k], bits);
      second.x[k] = stochastic_round<M>(second.x[k], bits >> 16);
      if (!master) weight.x[k] = stochastic_round<T>(weight.x[k], bits >> 32);
    }
    store(m.row(i) + j, first);
    store(v.row(i) + j, second);
    if (master) store(master.row(i) + j, weight);
    store(w.row(i) + j, weight);
  }
};

}  // namespace cuda

template <class T, class G, class M>
void compute_adamw(Cuda& dev, const std::vector<AdamWUpdate<T, G, AdamWState<M>>>& all) {
  using Update = cuda::AdamWElements<T, G, M>;
  std::vector<cuda::Elements<Update>> jobs;
  for (const auto& u : all) jobs.push_back(cuda::elements(Update{u}, u.w, u.g, u.state.master, u.state.m, u.state.v));
  cuda::run(dev, jobs);
}

#endif

}  // namespace streambp
