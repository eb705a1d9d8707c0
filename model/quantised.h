// Quantised weights on the host: how they are made, and their way to a device and back.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/four_bits.cuh"

namespace streambp {

// The numbers of a FourBits, in its order.
struct FourBitNumbers {
  std::vector<std::uint8_t> codes, scale_codes;
  std::vector<float> block_scales, scale_values;
  float offset = 0;
  OriginalType type = OriginalType::f32;
  Index scales = kNf4Blocks;
  bool mxfp4 = false;
};

// Some of the weights, in pieces that begin with a block scale.
inline FourBitNumbers part_of(const FourBitNumbers& q, const std::vector<Rows>& pieces) {
  FourBitNumbers p = q;
  const auto take = [&](auto& part, Index weights_of_one) {
    const auto all = std::exchange(part, {});
    for (const Rows weights : pieces)
      part.insert(part.end(), all.begin() + weights.begin / weights_of_one,
                  all.begin() + ceil_div(weights.end, weights_of_one));
  };
  take(p.codes, 2), take(p.scale_codes, kNf4Block), take(p.block_scales, kNf4Block * q.scales);
  return p;
}

template <class Device>
FourBits allocate_four_bits(Device& dev, Index size, Index scales_of_block = kNf4Blocks, bool mxfp4 = false) {
  FourBits q;
  q.scales = scales_of_block, q.mxfp4 = mxfp4;
  const Index scales = ceil_div(size, q.block());
  q.codes = allocate<std::uint8_t>(dev, 1, ceil_div(size, 2), Kind::weights);
  q.scale_codes = allocate<std::uint8_t>(dev, 1, scales, Kind::weights);
  q.block_scales = allocate<float>(dev, 1, ceil_div(scales, scales_of_block), Kind::weights);
  q.scale_values = allocate<float>(dev, 1, 256, Kind::weights);
  return q;
}

template <class Device>
void upload(Device& dev, FourBits& q, const FourBitNumbers& numbers) {
  auto copy = [&](auto to, const auto& from) {
    require(to.size() == static_cast<Index>(from.size()), "quantised weights: ", from.size(), " numbers, not ",
            to.size());
    dev.upload(to, from.data());
  };
  copy(q.codes, numbers.codes), copy(q.scale_codes, numbers.scale_codes);
  copy(q.block_scales, numbers.block_scales), copy(q.scale_values, numbers.scale_values);
  q.offset = numbers.offset, q.type = numbers.type;
}

// The weights, on the host: in a matrix of one row.
template <class T>
void dequantise(const FourBitNumbers& n, Matrix<T> weights) {
  auto view = [](const auto& v) {
    using Number = typename std::decay_t<decltype(v)>::value_type;
    return Matrix<Number>(const_cast<Number*>(v.data()), 1, static_cast<Index>(v.size()));  // only read
  };
  Cpu host(0);
  dequantise(host, weights,
             {view(n.codes), view(n.scale_codes), view(n.block_scales), view(n.scale_values), n.offset, n.type,
              n.scales, n.mxfp4});
}
template <class T, class Device>
std::vector<T> dequantised_on_host(Device& dev, const FourBits& q, Index size) {
  std::vector<T> values(static_cast<std::size_t>(size));
  if (const Index rows = q.blocks.bytes.rows) {
    std::vector<std::uint8_t> bytes = to_host(dev, q.blocks.bytes);
    Cpu host(0);
    dequantise(host, Matrix<T>(values.data(), rows, size / rows),
               {q.blocks.type, {bytes.data(), rows, q.blocks.bytes.cols}, q.blocks.columns});
    return values;
  }
  dequantise(FourBitNumbers{to_host(dev, q.codes), to_host(dev, q.scale_codes), to_host(dev, q.block_scales),
                            to_host(dev, q.scale_values), q.offset, q.type, q.scales, q.mxfp4},
             Matrix<T>(values.data(), 1, size));
  return values;
}

// The 8-bit numbers of block-wise quantisation ("dynamic map"): seven decades, each with twice as many numbers as the one
// below, in equal steps; and 0 and 1. In ascending order.
inline std::vector<float> dynamic_map(bool with_sign) {
  std::vector<float> map = {0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int count = (with_sign ? 1 : 2) << decade;
    for (int i = 0; i < count; ++i) {
      const double fraction = 0.1 + 0.9 * (i + 0.5) / count;
      const auto x = static_cast<float>(fraction * std::pow(10, decade - 6));
      map.push_back(x);
      if (with_sign) map.push_back(-x);
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}

// The index of the number that is nearest to x in an ascending list.
template <class List>
std::uint8_t nearest(const List& list, float x) {
  const auto above = std::lower_bound(list.begin(), list.end(), x);
  if (above == list.begin()) return 0;
  const auto below = above - 1;
  const bool up = above != list.end() && *above - x < x - *below;
  return static_cast<std::uint8_t>((up ? above : below) - list.begin());
}

// The largest absolute value of each block.
inline std::vector<float> largest_of_blocks(const std::vector<float>& values, Index block) {
  const auto n = static_cast<Index>(values.size());
  std::vector<float> largest(static_cast<std::size_t>(ceil_div(n, block)));
#pragma omp parallel for
  for (Index b = 0; b < static_cast<Index>(largest.size()); ++b) {
    const Rows part = piece(b, block, n);
    float most = 0;
    for (Index i = part.begin; i < part.end; ++i) most = std::max(most, std::abs(values[static_cast<std::size_t>(i)]));
    largest[static_cast<std::size_t>(b)] = most;
  }
  return largest;
}

// The 16 values of weights.
inline std::vector<float> nf4_values() {
  std::vector<float> values;
  for (unsigned code = 0; code < 16; ++code) values.push_back(nf4_value(code));
  return values;
}

// Quantises weights, as bitsandbytes does: a scale is the largest value of its block, less the mean of all scales, in 8
// bits of the largest scale of 256.
inline FourBitNumbers quantise(const std::vector<float>& weights, OriginalType type = OriginalType::f32) {
  FourBitNumbers q;
  q.scale_values = dynamic_map(true), q.type = type;
  const auto n = static_cast<Index>(weights.size());
  std::vector<float> scales = largest_of_blocks(weights, kNf4Block);
  const double mean = std::accumulate(scales.begin(), scales.end(), 0.0) / static_cast<double>(scales.size());
  q.offset = static_cast<float>(mean);
  std::vector<float> centred = scales;
  for (float& x : centred) x -= q.offset;
  q.block_scales = largest_of_blocks(centred, kNf4Blocks);
  for (std::size_t i = 0; i < centred.size(); ++i) {
    const float most = q.block_scales[i / kNf4Blocks];
    q.scale_codes.push_back(nearest(q.scale_values, most > 0 ? centred[i] / most : 0));
  }
  q.codes.resize(static_cast<std::size_t>(ceil_div(n, 2)));
  const std::vector<float> values = nf4_values();
#pragma omp parallel for
  for (Index i = 0; i < n; i += 2) {
    auto code = [&](Index j) -> unsigned {
      const float scale = scales[static_cast<std::size_t>(j / kNf4Block)];
      return j < n && scale > 0 ? nearest(values, weights[static_cast<std::size_t>(j)] / scale) : 7;  // 7: zero
    };
    q.codes[static_cast<std::size_t>(i / 2)] = static_cast<std::uint8_t>(code(i) << 4 | code(i + 1));
  }
  return q;
}

// Room for so many weights in MXFP4.
inline FourBitNumbers mxfp4_numbers(Index size) {
  FourBitNumbers q;
  q.mxfp4 = true;
  const Index scales = ceil_div(size, kMxfp4Block);
  q.codes.resize(static_cast<std::size_t>(ceil_div(size, 2)));
  q.scale_codes.resize(static_cast<std::size_t>(scales));
  q.block_scales.assign(static_cast<std::size_t>(ceil_div(scales, kNf4Blocks)), 1);
  for (int code = 0; code < 255; ++code) q.scale_values.push_back(std::ldexp(1.0f, code - 127));
  q.scale_values.push_back(NAN);
  return q;
}

// Quantises weights to MXFP4: the largest of a block is 4 to 8 times its scale, and above 6 it is cut to 6.
inline FourBitNumbers quantise_mxfp4(const std::vector<float>& weights) {
  const auto n = static_cast<Index>(weights.size());
  FourBitNumbers q = mxfp4_numbers(n);
  const std::vector<float> largest = largest_of_blocks(weights, kMxfp4Block);
  for (std::size_t b = 0; b < largest.size(); ++b)
    q.scale_codes[b] = static_cast<std::uint8_t>(std::clamp(std::ilogb(std::max(largest[b], 0x1p-125f)) + 125, 0, 252));
  std::vector<float> values;
  for (unsigned code = 0; code < 8; ++code) values.push_back(mxfp4_value(code));
  const auto code = [&](std::size_t i) {
    if (i >= weights.size()) return 0;
    const float scale = q.scale_values[q.scale_codes[i / kMxfp4Block]];
    return nearest(values, std::abs(weights[i]) / scale) + (weights[i] < 0 ? 8 : 0);
  };
#pragma omp parallel for
  for (std::size_t b = 0; b < q.codes.size(); ++b)
    q.codes[b] = static_cast<std::uint8_t>(code(2 * b) | code(2 * b + 1) << 4);
  return q;
}

}  // namespace streambp
