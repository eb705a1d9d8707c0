// AdamW (adamw.cuh) with moments in 8 bits. Every 256 neighbours in a row share a scale, which is their largest magnitude:
//
//   m[j] = signed map[code] * scale,   v[j] = unsigned map[code] * scale                      (dynamic_map.h)
//
// The update itself is in float32; afterwards the moments are rounded to the nearest code. A second moment that is not
// zero does not become zero: AdamW divides by its root. There are no master weights; bfloat16 weights are rounded
// stochastically.
#pragma once

#include "kernels/adamw.cuh"
#include "kernels/dynamic_map.h"

namespace streambp {

constexpr Index kMomentBlock = 256;

struct QuantisedMoment {
  Matrix<std::uint8_t> codes;  // the shape of the weight
  Matrix<float> scales;        // a column for each block of columns
};
struct QuantisedMoments {
  QuantisedMoment m, v;
};

template <class T>
void require_shape(const QuantisedMoment& moment, const Matrix<T>& w) {
  require_shape("adamw 8-bit", "codes", moment.codes, w.rows, w.cols);
  require_shape("adamw 8-bit", "scales", moment.scales, w.rows, ceil_div(w.cols, kMomentBlock));
}

template <class T, class G>
using AdamW8bit = AdamWUpdate<T, G, QuantisedMoments>;

template <class Device, class T, class G>
void adamw_8bit(Device& dev, const std::vector<AdamW8bit<T, G>>& all) {
  double size = 0;
  for (const auto& [w, g, state, constants] : all) {
    require_shape("adamw 8-bit", "gradient", g, w.rows, w.cols);
    require_shape(state.m, w), require_shape(state.v, w);
    size += static_cast<double>(w.size());
  }
  auto op = dev.operation("adamw 8-bit", 14.0 * size, (2.0 * sizeof(T) + 4.0 + sizeof(G)) * size);
  if constexpr (Device::computes) compute_adamw_8bit(dev, all);
}

// From the largest magnitude of a block. The second moment overflows if gradients are huge; then it stays huge.
constexpr float moment_scale(float largest) { return largest < 3.4e38f ? largest : 3.4e38f; }
constexpr float moment_divisor(float scale) { return scale > 0 ? scale : 1; }

constexpr std::uint8_t second_moment_code(float ratio) {
  const std::uint8_t code = DynamicMap<Sign::none>::encode(ratio);
  return static_cast<std::uint8_t>(code + ((code == 0) & (ratio > 0)));  // without a branch: loops vectorise
}

// --- CPU ---

// One block of a row.
template <class T, class G>
void adamw_8bit_block(const AdamW8bit<T, G>& update, Index i, Index block) {
  using A = Accumulator<T>;
  const Matrix<T> w = update.w;
  const QuantisedMoments& state = update.state;
  const Rows part = piece(block, kMomentBlock, w.cols);
  const Index n = part.size();
  T* weights = w.row(i) + part.begin;
  const G* gradients = update.g.row(i) + part.begin;
  std::uint8_t *m_codes = state.m.codes.row(i) + part.begin, *v_codes = state.v.codes.row(i) + part.begin;
  const float m_scale = state.m.scales(i, block), v_scale = state.v.scales(i, block);
  float m[kMomentBlock], v[kMomentBlock], most_m = 0, most_v = 0;
#pragma omp simd reduction(max : most_m, most_v)
  for (Index j = 0; j < n; ++j) {
    A weight = weights[j], first = DynamicMap<Sign::both>::decode(m_codes[j]) * m_scale,
      second = DynamicMap<Sign::none>::decode(v_codes[j]) * v_scale;
    update.constants.update(weight, first, second, gradients[j]);
    weights[j] = stochastic_round<T>(weight, update.constants.random_bits(i, part.begin + j, w.cols));
    m[j] = static_cast<float>(first), v[j] = static_cast<float>(second);
    const float size = m[j] < 0 ? -m[j] : m[j];
    most_m = size > most_m ? size : most_m, most_v = v[j] > most_v ? v[j] : most_v;
  }
  most_m = moment_scale(most_m), most_v = moment_scale(most_v);
  state.m.scales(i, block) = most_m, state.v.scales(i, block) = most_v;
  const float m_divisor = moment_divisor(most_m), v_divisor = moment_divisor(most_v);
#pragma omp simd
  for (Index j = 0; j < n; ++j) m_codes[j] = DynamicMap<Sign::both>::encode(m[j] / m_divisor);
#pragma omp simd
  for (Index j = 0; j < n; ++j) v_codes[j] = second_moment_code(v[j] / v_divisor);
}

template <class T, class G>
void compute_adamw_8bit(Cpu&, const std::vector<AdamW8bit<T, G>>& all) {
  for (const auto& update : all) {
    const Index rows = update.w.rows, blocks = update.state.m.scales.cols;
#pragma omp parallel for collapse(2) if (update.w.size() > kWorthThreads)
    for (Index i = 0; i < rows; ++i) {
      for (Index b = 0; b < blocks; ++b) adamw_8bit_block(update, i, b);
    }
  }
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// A warp updates a block of 256 columns; every lane has 8 of its elements, in packs of N.
template <int N, class T, class G>
__device__ void adamw_8bit_blocks(const AdamW8bit<T, G>& update, Index thread_block) {
  const auto& [w, g, state, constants] = update;
  constexpr int kPacks = static_cast<int>(kMomentBlock) / kWarp / N;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Index blocks = state.m.scales.cols, number = thread_block * (kThreads / kWarp) + warp;
  const Index i = number / blocks, block = number % blocks;
  if (i >= w.rows) return;
  const float m_scale = state.m.scales(i, block), v_scale = state.v.scales(i, block);
  Floats<N> m[kPacks], v[kPacks];
  float most_m = 0, most_v = 0;
  for (int p = 0; p < kPacks; ++p) {
    const Index j = block * kMomentBlock + (p * kWarp + lane) * N;
    if (j >= w.cols) continue;
    auto weight = load<N>(w.row(i) + j);
    const auto gradient = load<N>(g.row(i) + j);
    const auto m_code = load<N>(state.m.codes.row(i) + j), v_code = load<N>(state.v.codes.row(i) + j);
    for (int k = 0; k < N; ++k) {
      m[p].x[k] = DynamicMap<Sign::both>::decode(static_cast<std::uint8_t>(m_code.x[k])) * m_scale;
      v[p].x[k] = DynamicMap<Sign::none>::decode(static_cast<std::uint8_t>(v_code.x[k])) * v_scale;
      constants.update(weight.x[k], m[p].x[k], v[p].x[k], gradient.x[k]);
      weight.x[k] = stochastic_round<T>(weight.x[k], constants.random_bits(i, j + k, w.cols));
      most_m = fmaxf(most_m, fabsf(m[p].x[k])), most_v = fmaxf(most_v, v[p].x[k]);
    }
    store(w.row(i) + j, weight);
  }
  most_m = moment_scale(warp_max(most_m)), most_v = moment_scale(warp_max(most_v));
  const float m_divisor = moment_divisor(most_m), v_divisor = moment_divisor(most_v);
  for (int p = 0; p < kPacks; ++p) {
    const Index j = block * kMomentBlock + (p * kWarp + lane) * N;
    if (j >= w.cols) continue;
    for (int k = 0; k < N; ++k) {
      m[p].x[k] = DynamicMap<Sign::both>::encode(m[p].x[k] / m_divisor);
      v[p].x[k] = second_moment_code(v[p].x[k] / v_divisor);
    }
    store(state.m.codes.row(i) + j, m[p]);
    store(state.v.codes.row(i) + j, v[p]);
  }
  __syncwarp();  // all lanes have read the scales
  if (lane == 0) state.m.scales(i, block) = most_m, state.v.scales(i, block) = most_v;
}

// A job.
template <class T, class G>
struct AdamW8bitBlocks {
  AdamW8bit<T, G> update;
  bool packed;

  Index blocks() const { return ceil_div(update.w.rows * update.state.m.scales.cols, kThreads / kWarp); }
  __device__ void operator()(Index block) const {
    packed ? adamw_8bit_blocks<kPack>(update, block) : adamw_8bit_blocks<1>(update, block);
  }
};

}  // namespace cuda

template <class T, class G>
void compute_adamw_8bit(Cuda& dev, const std::vector<AdamW8bit<T, G>>& all) {
  std::vector<cuda::AdamW8bitBlocks<T, G>> jobs;
  for (const auto& u : all) jobs.push_back({u, cuda::packable(u.w, u.g, u.state.m.codes, u.state.v.codes)});
  cuda::run(dev, jobs);
}

#endif

}  // namespace streambp
