// Rotary position embedding (RoPE): a head's vector is dim/2 pairs (x[i], x[i + dim/2]), each rotated by an angle that
// grows with the position:
//
//   angle(p, i) = p * frequency[i]          frequency[i] = theta^(-2i / dim)
//
//   forward          (a, b) -> (a cos - b sin, b cos + a sin)
//   backward         a rotation is orthogonal, so the gradient is rotated by the negative angle
//
// Llama 3 divides low frequencies by `factor`. With λ = 2π / frequency, and L the context length of pretraining:
//
//   λ > L / low_freq_factor           frequency / factor
//   λ < L / high_freq_factor          frequency
//   between                           s * frequency + (1 - s) * frequency / factor,   s = (L/λ - low) / (high - low)
#pragma once

#include <cmath>
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

// A factor of 1 does not scale. With original_length = 0, all frequencies are divided ("linear" scaling).
struct RopeScaling {
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4, original_length = 8192;
};

enum class Direction { forward, backward };

// Rotates x (rows x heads * dim) in place.
template <class Device, class T>
void rope(Device& dev, Matrix<T> x, Matrix<const std::int32_t> positions, const std::vector<double>& frequencies,
          Direction direction) {
  const auto half = static_cast<Index>(frequencies.size());
  require(x.cols % (2 * half) == 0, "rope: rows of ", x.cols, " cannot be split into heads of ", 2 * half);
  require_shape("rope", "positions", positions, 1, x.rows);
  auto op = dev.operation("rope", 3.0 * x.size(), 2.0 * sizeof(T) * x.size());
  if constexpr (Device::computes) compute_rope(dev, x, positions, frequencies, direction);
}

inline std::vector<double> rope_frequencies(Index dim, double theta, const RopeScaling& s) {
  std::vector<double> frequencies;
  for (Index i = 0; i < dim / 2; ++i) {
    double f = power(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    const double rotations = s.original_length * f / 6.283185307179586;  // L / λ
    if (s.factor != 1) {
      const double keep =
          std::clamp((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
      f = keep * f + (1 - keep) * f / s.factor;
    }
    frequencies.push_back(f);
  }
  return frequencies;
}

// --- CPU ---

template <class T>
void compute_rope(Cpu&, Matrix<T> x, Matrix<const std::int32_t> positions, const std::vector<double>& frequencies,
                  Direction direction) {
  using A = Accumulator<T>;
  const double sign = direction == Direction::forward ? 1 : -1;
  const auto half = static_cast<Index>(frequencies.size());
#pragma omp parallel if (x.size() > kWorthThreads)
  {
    std::vector<A> cosine(frequencies.size()), sine(frequencies.size());
#pragma omp for
    for (Index i = 0; i < x.rows; ++i) {
      A *c = cosine.data(), *s = sine.data();
      const double *frequency = frequencies.data(), position = positions(0, i);
#pragma omp simd
      for (Index j = 0; j < half; ++j) {
        const SineCosine turn = sine_cosine(position * frequency[j]);
        c[j] = static_cast<A>(turn.cosine);
        s[j] = static_cast<A>(sign * turn.sine);
      }
      for (T* head = x.row(i); head < x.row(i) + x.cols; head += 2 * half) {
        for (Index j = 0; j < half; ++j) {
          const A a = head[j], b = head[j + half];
          head[j] = a * c[j] - b * s[j];
          head[j + half] = b * c[j] + a * s[j];
        }
      }
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

constexpr Index kMostPairs = 256;
struct Frequencies {
  double values[kMostPairs];
};

// One block per row. It computes the row's angles once for all heads, in float64 because positions are large.
template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(Matrix<T> x, Matrix<const std::int32_t> positions, Frequencies frequencies, Index half, float sign) {
  const Index i = blockIdx.x;
  auto* cosine = shared_memory<float>();
  auto* sine = cosine + half;
  for (Index f = threadIdx.x; f < half; f += kThreads) {
    const double angle = positions(0, i) * frequencies.values[f];
    cosine[f] = static_cast<float>(std::cos(angle));
    sine[f] = sign * static_cast<float>(std::sin(angle));
  }
  __syncthreads();
  for (Index pair = static_cast<Index>(threadIdx.x) * N; pair < x.cols / 2; pair += kThreads * N) {
    const Index head = pair / half, j = pair % half;
    T* at = x.row(i) + head * 2 * half + j;
    const auto a = load<N>(at), b = load<N>(at + half);
    const auto c = load<N>(cosine + j), s = load<N>(sine + j);
    Floats<N> rotated_a, rotated_b;
    for (int k = 0; k < N; ++k) {
      rotated_a.x[k] = a.x[k] * c.x[k] - b.x[k] * s.x[k];
      rotated_b.x[k] = b.x[k] * c.x[k] + a.x[k] * s.x[k];
    }
    store(at, rotated_a);
    store(at + half, rotated_b);
  }
}

}  // namespace cuda

template <class T>
void compute_rope(Cuda& dev, Matrix<T> x, Matrix<const std::int32_t> positions, const std::vector<double>& frequencies,
                  Direction direction) {
  const auto half = static_cast<Index>(frequencies.size());
  require(half <= cuda::kMostPairs, "rope: heads of ", 2 * half, " are wider than the ", 2 * cuda::kMostPairs,
          " supported on a GPU");
  cuda::Frequencies f{};
  std::copy(frequencies.begin(), frequencies.end(), f.values);
  const bool packed = cuda::packable(x) && half % cuda::kPack == 0;
  const auto kernel = packed ? cuda::rope_kernel<cuda::kPack, T> : cuda::rope_kernel<1, T>;
  cuda::launch(dev, kernel, cuda::grid_of(x.rows), cuda::kThreads, 2 * frequencies.size() * sizeof(float), x, positions,
               f, half, direction == Direction::forward ? 1.0f : -1.0f);
}

#endif

}  // namespace streambp
