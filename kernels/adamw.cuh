// AdamW with decoupled weight decay:
//
//   m = β₁ m + (1 - β₁) g          v = β₂ v + (1 - β₂) g²
//   w = w - rate (m̂ / (sqrt(v̂) + eps) + decay w),          m̂ = m / (1 - β₁ᵗ),  v̂ = v / (1 - β₂ᵗ)
//
// g is the accumulated gradient times `gradient_scale` (clipping). Where the weights are kept in a narrow type, a
// float32 master copy is to take the update, the weight being its rounding: so far only Plan counts it.
#pragma once

#include <cmath>

#include "device.cuh"
#include "matrix.cuh"

namespace streambp {

struct AdamW {
  double rate, beta1, beta2, eps, decay;
  double gradient_scale = 1;
  Index step = 1;  // t, counted from one
};

// M: the type of the moments; an empty master means that w is its own.
template <class Device, class T, class G, class M>
void adamw(Device& dev, Matrix<T> w, Matrix<float> master, Matrix<M> m, Matrix<M> v, Matrix<G> g,
           const AdamW& settings) {
  require_shape("adamw", "gradient", g, w.rows, w.cols);
  require_shape("adamw", "first moment", m, w.rows, w.cols);
  require_shape("adamw", "second moment", v, w.rows, w.cols);
  auto op = dev.operation("adamw", 14.0 * w.size(),
                          (2.0 * sizeof(T) + 8.0 * (master ? 1 : 0) + 4.0 * sizeof(M) + sizeof(G)) * w.size());
  if constexpr (Device::computes) {
    static_assert(std::is_same_v<T, M> && std::is_same_v<T, G>, "the CPU computes in one type");
    const auto t = static_cast<double>(settings.step);
    const T beta1 = static_cast<T>(settings.beta1), beta2 = static_cast<T>(settings.beta2);
    const T scale = static_cast<T>(settings.gradient_scale), eps = static_cast<T>(settings.eps);
    const T rate = static_cast<T>(settings.rate / (1 - std::pow(settings.beta1, t)));
    const T v_scale = static_cast<T>(1 / (1 - std::pow(settings.beta2, t)));
    const T decay = static_cast<T>(settings.rate * settings.decay);
#pragma omp parallel for
    for (Index i = 0; i < w.rows; ++i) {
      T *w_row = w.row(i), *m_row = m.row(i), *v_row = v.row(i);
      const T* g_row = g.row(i);
#pragma omp simd
      for (Index j = 0; j < w.cols; ++j) {
        const T gradient = g_row[j] * scale;
        m_row[j] = beta1 * m_row[j] + (1 - beta1) * gradient;
        v_row[j] = beta2 * v_row[j] + (1 - beta2) * gradient * gradient;
        w_row[j] -= rate * m_row[j] / (std::sqrt(v_row[j] * v_scale) + eps) + decay * w_row[j];
      }
    }
  }
}

}  // namespace streambp
