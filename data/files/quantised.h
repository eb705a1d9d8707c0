// Quantised weights in the files of a model. bitsandbytes stores a weight NAME as U8 codes; in NAME.absmax the codes of
// their scales, with block scales in NAME.nested_absmax and 256 values in NAME.nested_quant_map, or without double
// quantisation the scales themselves; in NAME.quant_map the 16 values of weights; and in
// NAME.quant_state.bitsandbytes__nf4 JSON with shape, type, block sizes and offset. Other files hold plain weights,
// which are quantised while they are loaded.
#pragma once

#include "data/files/mxfp4.h"
#include "text/fields.h"

namespace streambp {

constexpr const char* kNf4State = ".quant_state.bitsandbytes__nf4";
constexpr const char* kNf4Parts[] = {".absmax", ".nested_absmax", ".nested_quant_map", ".quant_map", kNf4State};

// Embedding and head are never quantised, and the parts of a model that are not computed do not matter.
inline bool is_never_quantised(const std::string& module, const std::string& root) {
  const auto has = [&](const char* part) { return module.find(part) != module.npos; };
  if (module == "lm_head" || module == "embed_tokens" || module == "model.embed_tokens" || has("mtp")) return true;
  return !root.empty() && (has("vision") || has("visual") || has("projector") || has("connector") || has("lm_head"));
}

// Whether a model of this config.json is quantised by bitsandbytes in a way that can be loaded. root: of a multimodal
// model's text model.
inline void read_base(const Fields& config, Config& c, const std::string& root) {
  if (!config.has("quantization_config")) return;
  const Fields f = config.object("quantization_config");
  const auto method = f.get<std::string>("quant_method", f.has("load_in_4bit") ? "bitsandbytes" : "an unknown method");
  c.mxfp4 = method == "mxfp4" && c.family == std::string("gpt_oss");
  if (c.mxfp4) return;
  require(method == "bitsandbytes", f.file, ": weights quantised by ", quote(method), " are not supported; load the ",
          "model in transformers, dequantise it", method == "fp8" ? " (FineGrainedFP8Config(dequantize=True))" : "",
          method == "mxfp4" ? " (Mxfp4Config(dequantize=True))" : "", ", save it in bfloat16, and use that");
  const bool nf4 = f.get<bool>("load_in_4bit", false) && f.get<std::string>("bnb_4bit_quant_type", "fp4") == "nf4";
  require(nf4, f.file, ": of bitsandbytes' types only nf4 is supported; load the model in transformers, call ",
          "dequantize() on it, save it, and use that, if you like with --base nf4");
  f.only("bnb_4bit_quant_storage", "uint8");
  c.plain_scales = !f.get<bool>("bnb_4bit_use_double_quant", false);
  f.only("load_in_8bit", false);
  if (f.has("llm_int8_skip_modules")) {  // embedding and head are never quantised
    for (const Json& name : f.json.at("llm_int8_skip_modules"))
      require(name.is_string() && is_never_quantised(name.get<std::string>(), root), f.file,
              ": \"llm_int8_skip_modules\": ", shown(name), " is not supported; all linear layers must be in 4 bits");
  }
  f.refuse_others([](const std::string& name) {
    return name.starts_with("_") || name.starts_with("llm_int8_") || name == "bnb_4bit_compute_dtype";
  });
  c.base = Base::nf4;
}

template <class V>
std::vector<V> bytes_of(const Tensor& tensor, const char* dtype, Index count) {
  require(tensor.dtype == dtype && tensor.count == count, tensor.where, ": is ", tensor.dtype, " of shape ",
          shown(tensor.shape), "; expected ", count, " numbers of type ", dtype);
  std::vector<V> values(count);
  std::memcpy(values.data(), tensor.data, tensor.bytes);
  return values;
}

// Reads a weight that bitsandbytes has quantised.
template <class Files>
FourBitNumbers read_nf4(const Files& files, const Parameter& p) {
  const Tensor& codes = files.at(p.name);
  const Tensor& state = files.at(p.name + kNf4State);
  const std::string text(reinterpret_cast<const char*>(state.data), state.bytes);
  const Json json = parse_json(text, state.where);
  const Fields f(json, state.where);
  f.only("quant_type", "nf4");
  f.only("blocksize", kNf4Block);
  f.only("nested_blocksize", kNf4Blocks);
  require(f.has("shape") && json["shape"] == Json({p.rows, p.cols}), state.where, ": the shape ",
          shown(json.value("shape", Json())), " is not ", p.rows, " x ", p.cols, " as config.json says");
  const auto type = f.get<std::string>("dtype");
  require(type == "bfloat16" || type == "float16" || type == "float32", state.where, ": weights of type ", quote(type),
          " are not supported");
  const Index size = p.rows * p.cols, scales = ceil_div(size, kNf4Block), blocks = ceil_div(scales, kNf4Blocks);
  FourBitNumbers q;
  q.codes = bytes_of<std::uint8_t>(codes, "U8", ceil_div(size, 2));
  const Tensor& absmax = files.at(p.name + ".absmax");
  if (absmax.dtype == "F32") {
    q.block_scales = bytes_of<float>(absmax, "F32", scales);
    q.scale_values = dynamic_map(true);  // the last value is 1
    q.scale_codes.assign(static_cast<std::size_t>(scales), 255);
    q.scales = 1;
  } else {
    q.scale_codes = bytes_of<std::uint8_t>(absmax, "U8", scales);
    q.block_scales = bytes_of<float>(files.at(p.name + ".nested_absmax"), "F32", blocks);
    q.scale_values = bytes_of<float>(files.at(p.name + ".nested_quant_map"), "F32", 256);
    q.offset = static_cast<float>(f.get<double>("nested_offset"));
  }
  q.type = type == "bfloat16" ? OriginalType::bf16 : type == "float16" ? OriginalType::f16 : OriginalType::f32;
  const Tensor& values = files.at(p.name + ".quant_map");
  require(bytes_of<float>(values, "F32", 16) == nf4_values(), values.where, ": are not the values of nf4");
  auto largest = [](const std::vector<float>& v) {
    float most = 0;
    for (const float x : v) most = std::isfinite(x) ? std::max(most, std::abs(x)) : INFINITY;
    return most;
  };
  const float scale = largest(q.scale_values) * largest(q.block_scales) + std::abs(q.offset);
  require(std::isfinite(rounded_to(q.type, scale)), codes.where,
          ": its scales hold a NaN, an infinity or far too large numbers; the file is damaged");
  return q;
}

// Where the weights of a part are in its stored tensor.
inline std::vector<Rows> pieces_of(const Parameter& p, const std::vector<std::int64_t>& shape, Index before) {
  const Index run = p.turn > 0 ? p.turn : p.rows;
  std::vector<Rows> pieces;
  for (Index row = 0; row < p.rows; row += run) {
    const Index begin = stored_line(p, shape, before, row) * p.cols;
    pieces.push_back({begin, begin + run * p.cols});
  }
  return pieces;
}

// The 4-bit weights of a stored tensor's parts: as they are in the files, or quantised now.
template <class Files, class T>
std::vector<FourBitNumbers> four_bits_of(const Files& files, const Table<T>& parts) {
  const Tensor& tensor = files.at(parts.front().parameter.name);
  const FourBits* const memory = parts.front().quantised;
  if (memory && memory->mxfp4) return read_mxfp4(tensor, parts);
  const FourBits* const expected = memory && *memory ? memory : nullptr;
  if (files.find(parts.front().parameter.name + kNf4State)) {
    Parameter whole = parts.front().parameter;
    whole.rows = stored_shape(parts)[whole.transposed ? 1 : 0];
    require(parts.size() == 1 || !whole.transposed, tensor.where,
            ": quantised weights of several projections in one transposed tensor are not supported");
    const FourBitNumbers all = read_nf4(files, whole);
    require(!expected || expected->scales == all.scales, tensor.where,
            ": its scales are not as bnb_4bit_use_double_quant in config.json says");
    std::vector<FourBitNumbers> numbers;
    Index before = 0;
    for (const Entry<T>& e : parts) {
      const std::vector<Rows> pieces = pieces_of(e.parameter, stored_shape(parts), before);
      for (const Rows piece : pieces)
        require(piece.begin % (kNf4Block * all.scales) == 0, tensor.where, ": a block of ", kNf4Block * all.scales,
                " weights belongs to two projections, which is not supported");
      numbers.push_back(part_of(all, pieces));
      before += e.parameter.rows;
    }
    return numbers;
  }
  require(!expected || expected->scales == kNf4Blocks, tensor.where,
          ": is not in 4 bits, although config.json says so");
  std::list<std::vector<float>> values;
  std::vector<Matrix<float>> matrices(parts.size());
  Table<float> rows;
  for (const Entry<T>& e : parts) rows.push_back({e.parameter, &matrices[rows.size()]});
  allocate(values, rows);
  Cpu host(0);
  read_tensors(host, files, "", rows);
  std::vector<FourBitNumbers> numbers;
  const auto type = tensor.dtype == "BF16"  ? OriginalType::bf16
                    : tensor.dtype == "F16" ? OriginalType::f16
                                            : OriginalType::f32;
  for (const std::vector<float>& part : values) numbers.push_back(quantise(part, type));
  return numbers;
}

}  // namespace streambp
