// Weights of experts in MXFP4, as GPT-OSS is published. NAME_blocks (experts x outputs x blocks x 16 bytes) has 32 numbers of 4
// bits in each block, the lower half of a byte first; NAME_scales (experts x outputs x blocks) has the exponents of two by which
// blocks are multiplied, plus 127. They are read as one tensor NAME (experts x inputs x outputs), like those in other types, or
// as they are.
#pragma once

#include <array>
#include <cmath>

#include "data/files/tensors.h"
#include "model/quantised.h"

namespace streambp {

constexpr const char* kMxfp4 = "MXFP4";  // no type of safetensors
constexpr const char* kMxfp4Parts[] = {"_blocks", "_scales"};
constexpr std::uint8_t kMostScale = 252;  // 2^125, 6 times which is finite

inline float mxfp4_number(const Tensor& tensor, Index at) {
  static const std::vector<float> scales = mxfp4_numbers(0).scale_values;
  const Index inputs = tensor.shape[1], outputs = tensor.shape[2], row = at / outputs;
  const Index number = (row / inputs * outputs + at % outputs) * inputs + row % inputs;
  const auto byte_at = [&](std::size_t piece, Index i) {
    return std::to_integer<unsigned>(tensor.pieces[piece].data[i]);
  };
  return mxfp4_value(byte_at(0, number / 2) >> number % 2 * 4 & 15) * scales[byte_at(1, number / kMxfp4Block)];
}

// The weights of a tensor's parts, as they are in it.
template <class T>
std::vector<FourBitNumbers> read_mxfp4(const Tensor& tensor, const Table<T>& parts) {
  require(tensor.dtype == kMxfp4, tensor.where, ": is ", tensor.dtype, ", but config.json says that experts are in ",
          kMxfp4, "; remove its \"quantization_config\" if they are not");
  const std::vector<std::int64_t> shape = stored_shape(parts);
  require(tensor.shape == shape, tensor.where, " has shape ", shown(tensor.shape), ", but the configuration needs ",
          shown(shape));
  std::vector<FourBitNumbers> all;
  Index before = 0;
  for (const Entry<T>& e : parts) {
    const Parameter& p = e.parameter;
    FourBitNumbers& q = all.emplace_back(mxfp4_numbers(p.rows * p.cols));
    const auto copy = [&](std::vector<std::uint8_t>& to, const Tensor& from, Index width, Index line) {
      std::memcpy(to.data() + line * width, from.data + stored_line(p, shape, before, line) * width, width);
    };
    for (Index line = 0; line < p.rows; ++line) {
      copy(q.codes, tensor.pieces[0], p.cols / 2, line);
      copy(q.scale_codes, tensor.pieces[1], p.cols / kMxfp4Block, line);
    }
    require(std::ranges::max(q.scale_codes) <= kMostScale, tensor.where,
            ": there is a NaN among its scales, or a far too large number; the file is damaged");
    before += p.length();
  }
  return all;
}

// Gives pairs of such tensors the name of one. `joined` keeps them.
inline void find_mxfp4(std::map<std::string, const Tensor*>& tensors, std::map<std::string, Tensor>& joined) {
  for (const auto& [name, blocks] : std::map(tensors)) {
    const auto& [blocks_end, scales_end] = kMxfp4Parts;
    if (name.find(".experts.") == name.npos || !tensors.contains(name)) continue;  // or found already
    require(!name.ends_with(scales_end), blocks->where, ": has no blocks beside it; download what is missing");
    if (!name.ends_with(blocks_end)) continue;
    const std::string usual = name.substr(0, name.size() - std::strlen(blocks_end));
    const auto found = tensors.find(usual + scales_end);
    require(found != tensors.end(), blocks->where, ": has no scales ", quote(usual + scales_end),
            "; download what is missing");
    require(!tensors.contains(usual), blocks->where, ": is there twice, also as ", quote(usual),
            "; remove one of them");
    const Tensor& scales = *found->second;
    const std::vector<Index>&shape = blocks->shape, &groups = scales.shape;
    require(blocks->dtype == "U8" && scales.dtype == "U8" && groups.size() == 3 && shape.size() >= 3 &&
                shape[0] == groups[0] && shape[1] == groups[1] && blocks->count == scales.count * kMxfp4Block / 2,
            blocks->where, ": is ", blocks->dtype, " of shape ", shown(shape), ", and its scales are ", scales.dtype,
            " of shape ", shown(groups), "; expected 16 bytes for each scale");
    const std::vector<Index> both = {groups[0], groups[2] * kMxfp4Block, groups[1]};
    joined[usual] = {blocks->where + " with its scales",
                     kMxfp4,
                     both,
                     2 * blocks->count,
                     nullptr,
                     blocks->bytes + scales.bytes,
                     {*blocks, scales},
                     mxfp4_number};
    tensors.erase(found), tensors.erase(name), tensors[usual] = &joined[usual];
  }
}

}  // namespace streambp
