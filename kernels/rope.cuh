// Rotary position embedding (RoPE): a head's vector is dim/2 pairs (x[i], x[i + dim/2]), in some models interleaved,
// (x[2i], x[2i + 1]), each rotated by an angle that grows with the position. Some models rotate only the first dim numbers
// of a head.
//
//   angle(p, i) = p * frequency[i]          frequency[i] = theta^(-2i / dim)
//
//   forward          (a, b) -> (a cos - b sin, b cos + a sin)
//   backward         a rotation is orthogonal, so the gradient is rotated by the negative angle
//
// Some models norm each head before they rotate it; both are one pass over memory.
//
// Models are extended to longer contexts by scaling the frequencies. With L the context length of pretraining, a pair
// makes r = L frequency / 2π rotations in it:
//
//   frequency = keep * frequency + (1 - keep) * frequency / factor
//
//   linear           keep = 0
//   llama3           keep = (r - low_freq_factor) / (high_freq_factor - low_freq_factor), clamped to 0 .. 1
//   proportional     frequencies are 0 from a share of the pairs on
//   yarn             keep falls from 1 to 0 with i, between the pairs that make beta_fast and beta_slow rotations. Cosines
//                    and sines are multiplied by attention_factor, which sharpens attention over more tokens; in some
//                    models those of queries also by 1 + query_beta log(1 + floor(position / L)).
//
// Two kinds also depend on the length n of the longest document of a run:
//
//   dynamic          dynamic NTK; for n > L, theta becomes theta (factor n / L - (factor - 1))^(dim / (dim - 2))
//   longrope         every pair has its own factor, from long_factors for n > L, else from short_factors; keep = 0.
//                    attention_factor as in yarn
#pragma once

#include <cmath>
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/math.cuh"
#include "kernels/base/matrix.cuh"
#include "kernels/norm.cuh"
#ifdef STREAMBP_CUDA
#include "kernels/base/packs.cuh"
#endif

namespace streambp {

enum class RopeType { plain, linear, dynamic, llama3, yarn, longrope, proportional };

struct RopeScaling {
  RopeType type = RopeType::plain;
  double factor = 1;
  double original_length = 0;                           // L, except of linear
  double low_freq_factor = 1, high_freq_factor = 4;     // llama3
  double beta_fast = 32, beta_slow = 1;                 // yarn
  double attention_factor = 1;                          // yarn and longrope
  double query_beta = 0;                                // yarn
  double share = 1;                                     // proportional
  enum class Ends { whole, exact } ends = Ends::whole;  // yarn: keep falls between whole pairs
  std::vector<double> short_factors = {}, long_factors = {};
  Index longest = 0;  // n

  bool operator==(const RopeScaling&) const = default;

  bool depends_on_length() const { return type == RopeType::dynamic || type == RopeType::longrope; }
  // Whether positions of documents of this length were scaled as they should be.
  bool covers(Index length) const {
    return !depends_on_length() || static_cast<double>(length) <= original_length || length <= longest;
  }
};

// Which numbers are rotated together: x[i] and x[i + dim/2], or x[2i] and x[2i + 1].
enum class RopePairs { halves, interleaved };

struct RopeFrequencies {
  std::vector<double> values;  // for each pair
  double scale = 1;            // of cosines and sines
  Index dim = 0;               // of a head; numbers after the pairs are not rotated
  RopePairs pairs = RopePairs::halves;
  double beta = 0, length = 1;  // of queries: scaled by a factor that grows with the position

  double scale_at(double position) const {
    return beta == 0 ? scale : scale * (1 + beta * logarithm(1 + std::floor(position / length)));
  }
};

enum class Direction { forward, backward };

// A norm of each head before RoPE. All heads share its weights. Without weights, there is no norm.
template <class T>
struct HeadNorm {
  NormWeights<T> weights;
  NormStyle style;
};

// y = x (rows x heads * dim), normed if there is a norm, rounded to the type of y, and rotated. y may be x.
template <class Device, class T, class U>
void rope(Device& dev, Matrix<T> y, Matrix<U> x, Matrix<const std::int32_t> positions,
          const RopeFrequencies& frequencies, Direction direction, const std::type_identity_t<HeadNorm<T>>& norm = {}) {
  const Index dim = frequencies.dim;
  const bool normed = static_cast<bool>(norm.weights.weight);
  require(dim >= 2 * static_cast<Index>(frequencies.values.size()) && x.cols % dim == 0, "rope: rows of ", x.cols,
          " cannot be split into heads of ", dim);
  require_shape("rope", "output", y, x.rows, x.cols);
  require_shape("rope", "positions", positions, 1, x.rows);
  if (normed) require_shape("rope", "norm's weight", norm.weights.weight, 1, dim);
  if (norm.weights.bias) require_shape("rope", "norm's bias", norm.weights.bias, 1, dim);
  auto op = dev.operation(normed ? "norm and rope" : "rope",
                          (normed ? norm_flops(norm.style) + 3 : 3) * static_cast<double>(x.size()),
                          (1.0 * sizeof(T) + sizeof(U)) * x.size());
  if constexpr (Device::computes) compute_rope(dev, y, x, positions, frequencies, direction, norm);
}

// The share of pair i that YaRN does not scale.
inline double yarn_keep(Index dim, Index i, double theta, const RopeScaling& s) {
  // The pair, as a real number, that makes this many rotations in L tokens.
  const auto pair_with = [&](double rotations) {
    return static_cast<double>(dim) * logarithm(s.original_length / (rotations * 6.283185307179586)) /
           (2 * logarithm(theta));
  };
  const bool whole = s.ends == RopeScaling::Ends::whole;
  double first = pair_with(s.beta_fast), last = pair_with(s.beta_slow);
  first = std::max(whole ? std::floor(first) : first, 0.0);
  last = std::min(whole ? std::ceil(last) : last, static_cast<double>(dim - 1));
  if (first == last) last += 0.001;
  return 1 - std::clamp((static_cast<double>(i) - first) / (last - first), 0.0, 1.0);
}

inline RopeFrequencies rope_frequencies(Index dim, double theta, const RopeScaling& s) {
  RopeFrequencies frequencies{{}, s.attention_factor, dim};
  const auto n = static_cast<double>(s.longest), d = static_cast<double>(dim);
  const bool stretched = n > s.original_length;
  if (s.type == RopeType::dynamic && stretched)
    theta *= power(s.factor * n / s.original_length - (s.factor - 1), d / (d - 2));
  for (Index i = 0; i < dim / 2; ++i) {
    const double f = power(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    const double rotations = s.original_length * f / 6.283185307179586;
    double keep = 1, factor = s.factor;
    if (s.type == RopeType::linear) keep = 0;
    if (s.type == RopeType::longrope) keep = 0, factor = (stretched ? s.long_factors : s.short_factors)[i];
    if (s.type == RopeType::llama3)
      keep = std::clamp((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
    if (s.type == RopeType::yarn) keep = yarn_keep(dim, i, theta, s);
    const bool turns = s.type != RopeType::proportional || 2 * i + 2 <= static_cast<Index>(s.share * d);
    frequencies.values.push_back(!turns ? 0 : keep == 1 ? f : keep * f + (1 - keep) * f / factor);
    require(std::isfinite(frequencies.values.back()), "model: the RoPE frequency of pair ", i,
            " is not finite; check theta and its scaling in config.json");
  }
  return frequencies;
}

// --- CPU ---

namespace cpu {

// The numbers x[Step * i] and x[Step * i + distance] of pair i.
template <Index Step, class T, class A>
void rotate_pairs(T* x, Index pairs, Index distance, const A* cosine, const A* sine) {
  for (Index i = 0; i < pairs; ++i) {
    const A a = x[Step * i], b = x[Step * i + distance];
    x[Step * i] = a * cosine[i] - b * sine[i];
    x[Step * i + distance] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace cpu

template <class T, class U>
void compute_rope(Cpu&, Matrix<T> y, Matrix<U> x, Matrix<const std::int32_t> positions,
                  const RopeFrequencies& frequencies, Direction direction, const HeadNorm<T>& norm) {
  using A = Accumulator<T>;
  const auto half = static_cast<Index>(frequencies.values.size()), dim = frequencies.dim;
#pragma omp parallel if (x.size() > kWorthThreads)
  {
    std::vector<A> cosine(frequencies.values.size()), sine(frequencies.values.size());
#pragma omp for
    for (Index i = 0; i < x.rows; ++i) {
      A *c = cosine.data(), *s = sine.data();
      const double *frequency = frequencies.values.data(), position = positions(0, i);
      const double scale = frequencies.scale_at(position);
      const double signed_scale = direction == Direction::forward ? scale : -scale;
#pragma omp simd
      for (Index j = 0; j < half; ++j) {
        const SineCosine turn = sine_cosine(position * frequency[j]);
        c[j] = static_cast<A>(scale * turn.cosine);
        s[j] = static_cast<A>(signed_scale * turn.sine);
      }
      for (Index begin = 0; begin < x.cols; begin += dim) {
        const U* from = x.row(i) + begin;
        T* head = y.row(i) + begin;
        if (norm.weights.weight) {
          cpu::norm_row(head, from, dim, norm.weights, norm.style);
        } else {
#pragma omp simd
          for (Index j = 0; j < dim; ++j) head[j] = from[j];
        }
        frequencies.pairs == RopePairs::halves ? cpu::rotate_pairs<1>(head, half, half, c, s)
                                               : cpu::rotate_pairs<2>(head, half, 1, c, s);
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
  double scale, signed_scale;
  double beta, length;
  Index rotated;  // pairs
  RopePairs pairs;
};

// One thread block per row. It computes the row's angles once for all heads, in float64: positions are large. If heads have
// a norm, `lanes` neighbouring threads first sum up a head in packs of S. Numbers that are not rotated are pairs too, with
// an angle of 0. half: pairs of a head.
template <int S, int N, class T, class U>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(Matrix<T> y, Matrix<U> x, Matrix<const std::int32_t> positions, Frequencies frequencies, Index half,
                HeadNorm<T> norm, int lanes) {
  const Index i = blockIdx.x, dim = 2 * half, heads = x.cols / dim;
  const bool with_norm = static_cast<bool>(norm.weights.weight);
  auto* cosine = shared_memory<float>();
  auto* sine = cosine + half;
  auto* statistics = reinterpret_cast<NormStatistics<float>*>(sine + half);  // of each head
  for (Index first = 0; first < heads && with_norm; first += kThreads / lanes) {
    const Index head = first + threadIdx.x / lanes;  // those without a head sum up the last one
    const auto sums = norm_statistics<S>(x.row(i) + least(head, heads - 1) * dim, dim, norm.style, lanes);
    if (head < heads && threadIdx.x % lanes == 0) statistics[head] = sums;
  }
  const Index rotated = frequencies.rotated;
  const double grown =
      frequencies.beta == 0 ? 1 : 1 + frequencies.beta * std::log(1 + std::floor(positions(0, i) / frequencies.length));
  for (Index f = threadIdx.x; f < half; f += kThreads) {
    const double angle = f < rotated ? positions(0, i) * frequencies.values[f] : 0;
    cosine[f] = f < rotated ? static_cast<float>(grown * frequencies.scale * std::cos(angle)) : 1;
    sine[f] = static_cast<float>(grown * frequencies.signed_scale * std::sin(angle));
  }
  __syncthreads();
  for (Index pair = static_cast<Index>(threadIdx.x) * N; pair < x.cols / 2; pair += kThreads * N) {
    const Index head = pair / half, j = pair % half;
    // the numbers of this pair
    const bool interleaved = frequencies.pairs == RopePairs::interleaved;
    const Index first = j >= rotated ? j + rotated : interleaved ? 2 * j : j;
    const Index second = j >= rotated ? j + half : interleaved ? first + 1 : j + rotated;
    const U* from = x.row(i) + head * dim;
    T* to = y.row(i) + head * dim;
    auto a = load<N>(from + first), b = load<N>(from + second);
    if (with_norm) {
      a = normed(a, first, statistics[head], norm.weights, norm.style);
      b = normed(b, second, statistics[head], norm.weights, norm.style);
    }
    a = rounded<T>(a), b = rounded<T>(b);
    const auto c = load<N>(cosine + j), s = load<N>(sine + j);
    Floats<N> rotated_a, rotated_b;
    for (int k = 0; k < N; ++k) {
      rotated_a.x[k] = multiply_add(a.x[k], c.x[k], -(b.x[k] * s.x[k]));
      rotated_b.x[k] = multiply_add(b.x[k], c.x[k], a.x[k] * s.x[k]);
    }
    store(to + first, rotated_a);
    store(to + second, rotated_b);
  }
}

}  // namespace cuda

template <class T, class U>
void compute_rope(Cuda& dev, Matrix<T> y, Matrix<U> x, Matrix<const std::int32_t> positions,
                  const RopeFrequencies& frequencies, Direction direction, const HeadNorm<T>& norm) {
  const auto rotated = static_cast<Index>(frequencies.values.size()), half = frequencies.dim / 2;
  require(half <= cuda::kMostPairs, "rope: heads of ", 2 * half, " are wider than the ", 2 * cuda::kMostPairs,
          " supported on a GPU");
  cuda::Frequencies f{};
  std::copy(frequencies.values.begin(), frequencies.values.end(), f.values);
  f.scale = frequencies.scale, f.signed_scale = direction == Direction::forward ? f.scale : -f.scale;
  f.beta = frequencies.beta, f.length = frequencies.length;
  f.rotated = rotated, f.pairs = frequencies.pairs;
  constexpr int N = cuda::kPack;
  const bool packed = cuda::packable(y, x, norm.weights.weight, norm.weights.bias);
  const bool adjacent = half % N == 0 && rotated % N == 0 && f.pairs == RopePairs::halves;
  const auto kernel = packed && adjacent ? cuda::rope_kernel<N, N, T, U>
                      : packed           ? cuda::rope_kernel<N, 1, T, U>
                                         : cuda::rope_kernel<1, 1, T, U>;
  int lanes = cuda::kWarp;  // no more than a head needs
  while (lanes / 2 * (packed ? N : 1) >= 2 * half) lanes /= 2;
  const Index floats = 2 * half + 2 * (norm.weights.weight ? x.cols / (2 * half) : 0);
  cuda::launch(dev, kernel, cuda::grid_of(x.rows), cuda::kThreads, static_cast<std::size_t>(floats) * sizeof(float), y,
               x, positions, f, half, norm, lanes);
}

#endif

}  // namespace streambp
