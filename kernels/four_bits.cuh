// Weights in 4 bits. NF4, as QLoRA and bitsandbytes store them:
//
//   w[i] = value[code[i]] * scale[i / 64]                                       16 values, code: 4 bits
//   scale[b] = scale_value[scale_code[b]] * block_scale[b / 256] + offset       256 values, scale_code: 8 bits
//
// Without double quantisation every scale is a block scale, with a value of 1 and no offset.
//
// Elements count through all rows. A byte holds two codes, the first one in its upper half. Every operation is rounded
// to float32, then w to the type that the weights had before. So w has the bits that bitsandbytes computes.
//
// MXFP4, as gpt-oss is published, has numbers of 4 bits as values, a scale for 32 weights, and powers of two as values of
// scales. Its block scales are 1. The first code is in the lower half of a byte.
#pragma once

#include "kernels/blocks.cuh"

namespace streambp {

// The quantiles of a normal distribution, scaled to [-1, 1], published with QLoRA.
constexpr float nf4_value(unsigned code) {
  constexpr float values[] = {-1.0f,          -0.6961928010f, -0.5250730515f, -0.3949174881f,
                              -0.2844413817f, -0.1847734302f, -0.0910500363f, 0.0f,
                              0.0795802996f,  0.1609302014f,  0.2461123019f,  0.3379152417f,
                              0.4407098293f,  0.5626170039f,  0.7229568362f,  1.0f};
  return values[code];
}

constexpr Index kNf4Block = 64, kMxfp4Block = 32;  // weights of a scale
constexpr Index kNf4Blocks = 256;                  // scales of a block scale

// The type that the weights had before.
enum class OriginalType { f32, bf16, f16 };

struct FourBits {
  Matrix<std::uint8_t> codes, scale_codes;   // a row each
  Matrix<float> block_scales, scale_values;  // a row each
  float offset = 0;
  OriginalType type = OriginalType::f32;
  Index scales = kNf4Blocks;  // of a block scale: 256, or 1
  bool mxfp4 = false;
  Blocks blocks = {};  // instead of all that

  explicit operator bool() const { return codes || blocks; }
  double bytes_of_weight() const {
    const BlockSize size = size_of_block(blocks.type);
    return size.bytes > 0 ? 1.0 * size.bytes / size.weights() : 0.5 + 1.0 / static_cast<double>(block());
  }
  constexpr Index block() const { return mxfp4 ? kMxfp4Block : kNf4Block; }
  constexpr float value(unsigned code) const { return mxfp4 ? mxfp4_value(code) : nf4_value(code); }
  STREAMBP_INLINE unsigned code(Index i) const { return codes(0, i / 2) >> ((i % 2 == 0) != mxfp4 ? 4 : 0) & 15; }
};

// w = the weights in the type of w. `later`: counts the work, which is done when experts are chosen.
template <class Device, class T>
void dequantise(Device& dev, Matrix<T> w, const FourBits& q, bool later = false) {
  if (q.blocks) return dequantise(dev, w, q.blocks, {}, later);
  require_shape("4 bits", "codes", q.codes, 1, ceil_div(w.size(), 2));
  require_shape("4 bits", "scales", q.scale_codes, 1, ceil_div(w.size(), q.block()));
  require_shape("4 bits", "block scales", q.block_scales, 1, ceil_div(q.scale_codes.cols, q.scales));
  require_shape("4 bits", "values of scales", q.scale_values, 1, 256);
  auto op = dev.operation("dequantise", 2.0 * w.size(), (0.5 + sizeof(T)) * w.size());
  if constexpr (Device::computes)
    if (!later) compute_dequantise(dev, w, q);
}

constexpr float rounded_to(OriginalType type, float x) {
  return type == OriginalType::bf16 ? BFloat16(x) : type == OriginalType::f16 ? Float16(x) : x;
}

constexpr float scale_of_block(const FourBits& q, Index block) {
  const float value = q.scale_values(0, q.scale_codes(0, block));
  const Index of_block =
      q.scales == 1 ? block : block / kNf4Blocks;  // dividing by a variable would make a kernel spill
  return rounded_sum(rounded_product(value, q.block_scales(0, of_block)), q.offset);
}

// --- CPU ---

template <class T>
void compute_dequantise(Cpu&, Matrix<T> w, const FourBits& q, Rows weights) {
#pragma omp parallel for
  for (Index b = weights.begin / q.block(); b < ceil_div(weights.end, q.block()); ++b) {
    T values[16];
    const float scale = scale_of_block(q, b);
    for (unsigned code = 0; code < 16; ++code)
      values[code] = T(rounded_to(q.type, rounded_product(q.value(code), scale)));
    const Rows part = piece(b, q.block(), weights.end);
    for (Index i = std::max(part.begin, weights.begin); i < part.end; ++i) w.data[i] = values[q.code(i)];
  }
}
template <class T>
void compute_dequantise(Cpu& dev, Matrix<T> w, const FourBits& q) {
  compute_dequantise(dev, w, q, {0, w.size()});
}

// --- CUDA ---

#ifdef STREAMBP_CUDA

namespace cuda {

// Weights j .. j + N, which have one scale.
template <int N>
__device__ Floats<N> dequantised(const FourBits& q, Index j) {
  const float scale = scale_of_block(q, q.mxfp4 ? j / kMxfp4Block : j / kNf4Block);
  Floats<N> values;
  for (int k = 0; k < N; ++k) values.x[k] = rounded_to(q.type, rounded_product(q.value(q.code(j + k)), scale));
  return values;
}

}  // namespace cuda

template <class T>
void compute_dequantise(Cuda& dev, Matrix<T> w, const FourBits& q) {
  const Matrix<T> flat = w.reshape(w.size());
  auto f = [=] __device__(auto n, Index, Index j) { cuda::store(flat.row(0) + j, cuda::dequantised<n()>(q, j)); };
  cuda::for_each_pack(dev, 1, flat.cols, f, flat);
}

#endif

}  // namespace streambp
