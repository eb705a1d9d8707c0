// Weights of experts in MXFP4, as GPT-OSS is published. NAME_blocks (experts x outputs x blocks x 16 bytes) has 32 numbers of 4
// bits in each block, the lower half of a byte first; NAME_scales (experts x outputs x blocks) has the exponents of two by which
// blocks are multiplied, plus 127. They are read as one tensor NAME (experts x inputs x outputs), like those in other types.
#pragma once

#include <array>
#include <cmath>

#include "data/files/safetensors.h"

namespace streambp {

constexpr const char* kMxfp4 = "MXFP4";  // no type of safetensors
constexpr std::string_view kMxfp4Blocks = "_blocks";
constexpr Index kMxfp4Block = 32;

inline float mxfp4_number(const Tensor& tensor, Index at) {
  static const std::array<float, 256> scales = [] {
    std::array<float, 256> all = {};
    for (int i = 0; i < 255; ++i) all[static_cast<std::size_t>(i)] = std::ldexp(1.0f, i - 127);
    all[255] = NAN;
    return all;
  }();
  static constexpr float values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  const Index inputs = tensor.shape[1], outputs = tensor.shape[2], row = at / outputs;
  const Index number = (row / inputs * outputs + at % outputs) * inputs + row % inputs;
  const auto byte_at = [&](std::size_t piece, Index i) {
    return std::to_integer<unsigned>(tensor.pieces[piece].data[i]);
  };
  return values[byte_at(0, number / 2) >> number % 2 * 4 & 15] * scales[byte_at(1, number / kMxfp4Block)];
}

// Gives pairs of such tensors the name of one. `joined` keeps them.
inline void find_mxfp4(std::map<std::string, const Tensor*>& tensors, std::map<std::string, Tensor>& joined) {
  for (const auto& [name, blocks] : std::map(tensors)) {
    if (!name.ends_with(kMxfp4Blocks) || name.find(".experts.") == name.npos) continue;
    const std::string usual = name.substr(0, name.size() - kMxfp4Blocks.size());
    const auto found = tensors.find(usual + "_scales");
    require(found != tensors.end(), blocks->where, ": has no scales ", quote(usual + "_scales"),
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
