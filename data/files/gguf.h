// GGUF: llama.cpp's files, one for a whole model. Version 3, little-endian:
//
//   "GGUF"  version u32  tensors u64  keys u64
//   keys      name, type u32, value                             a string is a length u64 and its bytes
//   tensors   name, dimensions u32, sizes u64 (columns first), type u32, offset u64
//   the data, from the next multiple of "general.alignment" (32): tensors in this order, each padded to such a multiple
//
// Everything is checked before it is used: lengths against what is left of the file, offsets against each other.
#pragma once

#include "data/files/safetensors.h"
#include "kernels/base/blocks.cuh"
#include "text/fields.h"
#include "text/utf8.h"

namespace streambp {

// The types of tensors. Those without a block type are known by name only.
struct GgufType {
  std::uint32_t number;
  const char* name;
  BlockType type = BlockType::none;
};
// clang-format off
constexpr GgufType kGgufTypes[] = {
    {0, "F32", BlockType::f32}, {1, "F16", BlockType::f16}, {30, "BF16", BlockType::bf16}, {8, "Q8_0", BlockType::q8_0},
    {2, "Q4_0", BlockType::q4_0}, {3, "Q4_1", BlockType::q4_1}, {6, "Q5_0", BlockType::q5_0}, {7, "Q5_1", BlockType::q5_1},
    {12, "Q4_K", BlockType::q4_k}, {13, "Q5_K", BlockType::q5_k}, {14, "Q6_K", BlockType::q6_k}, {39, "MXFP4", BlockType::mxfp4},
    {10, "Q2_K"}, {11, "Q3_K"}, {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},
    {22, "IQ2_S"}, {23, "IQ4_XS"}, {29, "IQ1_M"}, {34, "TQ1_0"}, {35, "TQ2_0"}, {40, "NVFP4"}};
// clang-format on

inline bool is_gguf(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return false;
  char magic[4] = {};
  return extension_of(path) == ".gguf" || (std::ifstream(path).read(magic, 4) && std::string_view(magic, 4) == "GGUF");
}

class GgufFile {
 public:
  explicit GgufFile(const fs::path& path) : path_(path), size_(regular_file_size(path)) {
    require(size_ >= 24, path_.string(), ": ", size_, " bytes are too few", kRemedy);
    mapping_ = std::make_shared<MappedFile>(path, size_);
    require(take(4) == "GGUF", path_.string(), ": does not begin with GGUF", kRemedy);
    const auto version = number<std::uint32_t>();
    require(version == 3 || version == 2, path_.string(), ": is of version ", version, "; 2 and 3 are supported");
    const auto tensors = number<std::uint64_t>(), keys = number<std::uint64_t>();
    require(keys <= kMost && tensors <= kMost, path_.string(), ": claims ", keys, " keys and ", tensors,
            " tensors; at most ", kMost, " are supported", kRemedy);
    for (std::uint64_t i = 0; i < keys; ++i) {
      const std::size_t begin = at_;
      keys_.emplace_back(read_key(), std::string_view());
      keys_.back().second = {reinterpret_cast<const char*>(mapping_->data()) + begin, at_ - begin};
    }
    const Fields f(metadata_, path_.string());
    require(f.get<Index>("split.count", 1) <= 1, path_.string(),
            ": is one of several files of a model; join them with ", "llama-gguf-split --merge");
    const auto alignment = f.get<Index>("general.alignment", 32);
    require(alignment > 0 && alignment <= 1 << 20 && alignment % 8 == 0, path_.string(), ": an alignment of ",
            alignment, " is not supported", kRemedy);
    std::vector<std::pair<Tensor*, std::uint64_t>> offsets;
    for (std::uint64_t i = 0; i < tensors; ++i) offsets.push_back(read_tensor());
    place(offsets, alignment);
  }

  const fs::path& path() const { return path_; }
  const Json& metadata() const { return metadata_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  // As they are in the file: keys with their values, and tensors.
  const std::vector<std::pair<std::string, std::string_view>>& keys() const { return keys_; }
  const std::vector<std::pair<std::string, const Tensor*>>& in_order() const { return in_order_; }

 private:
  static constexpr std::uint64_t kMost = 1 << 16;
  static constexpr std::size_t kLongestName = 1 << 10;
  static constexpr const char* kRemedy = "; the file is damaged or not a GGUF file; download it again";

  std::string_view take(std::uint64_t bytes) {
    require(bytes <= size_ - at_, path_.string(), ": ends in the middle of its header, at byte ", at_, kRemedy);
    const auto* from = reinterpret_cast<const char*>(mapping_->data()) + at_;
    at_ += bytes;
    return {from, bytes};
  }
  template <class V>
  V number() {
    V value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() { return take(number<std::uint64_t>()); }
  std::string name() {
    const std::string_view found = text();
    require(!found.empty() && found.size() <= kLongestName && is_utf8(found), path_.string(), ": a name of ",
            found.size(), " bytes, before byte ", at_, ", is not supported", kRemedy);
    return std::string(found);
  }

  // Calls f with a value of a type that is a number. Strings (8) and lists (9) are none.
  template <class F>
  static bool with_number(std::uint32_t type, F&& f) {
    const auto is = [&](std::uint32_t number, auto zero) { return type == number && (f(zero), true); };
    return is(0, std::uint8_t()) || is(1, std::int8_t()) || is(2, std::uint16_t()) || is(3, std::int16_t()) ||
           is(4, std::uint32_t()) || is(5, std::int32_t()) || is(6, float()) || is(7, bool()) ||
           is(10, std::uint64_t()) || is(11, std::int64_t()) || is(12, double());
  }

  Json value(const std::string& key, std::uint32_t type) {
    Json result;
    const auto read = [&]<class V>(V) {
      if constexpr (std::is_same_v<V, bool>) {
        result = number<std::uint8_t>() != 0;
      } else {
        result = number<V>();
      }
    };
    if (with_number(type, read)) return result;
    require(type == 8, path_.string(), ": ", quote(key), " has values of type ", type, ", which is not supported",
            kRemedy);
    const std::string_view found = text();
    require(is_utf8(found), path_.string(), ": ", quote(key), " is not text in UTF-8", kRemedy);
    return found;
  }

  std::string read_key() {
    const std::string key = name();
    require(!metadata_.contains(key), path_.string(), ": has the key ", quote(key), " twice", kRemedy);
    const auto type = number<std::uint32_t>();
    if (type != 9) {
      metadata_[key] = value(key, type);
      return key;
    }
    const auto of = number<std::uint32_t>();
    const auto count = number<std::uint64_t>();
    std::size_t least_bytes = 8;  // of a value
    const bool numbers = with_number(of, [&](auto zero) { least_bytes = sizeof zero; });
    require(numbers || of == 8, path_.string(), ": ", quote(key), " is a list of type ", of, ", which is not supported",
            kRemedy);
    require(count <= kMostListed - listed_ && count <= (size_ - at_) / least_bytes, path_.string(), ": ", quote(key),
            " claims ", count, " values", kRemedy);
    listed_ += count;
    Json::array_t list;
    list.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) list.push_back(value(key, of));
    metadata_[key] = std::move(list);
    return key;
  }

  // Where its data is follows in place().
  std::pair<Tensor*, std::uint64_t> read_tensor() {
    const std::string called = name(), where = path_.string() + ": tensor " + quote(called);
    const auto dimensions = number<std::uint32_t>();
    require(dimensions <= 4, where, ": has ", dimensions, " dimensions; at most 4 are supported", kRemedy);
    std::vector<Index> shape;
    for (std::uint32_t i = 0; i < dimensions; ++i) {
      const auto n = number<std::uint64_t>();
      require(std::in_range<Index>(n), where, ": has a size of ", n, kRemedy);
      shape.insert(shape.begin(), static_cast<Index>(n));
    }
    const auto type = number<std::uint32_t>();
    const auto* known = std::ranges::find(kGgufTypes, type, &GgufType::number);
    require(known != std::end(kGgufTypes), where, ": has the type ", type, ", which is not known");
    require(known->type != BlockType::none, where, ": is ", known->name,
            ", which is not supported; quantise the model "
            "to Q4_K_M, Q5_K_M, Q6_K or Q8_0");
    const Index count = element_count(where, shape), columns = shape.empty() ? 1 : shape.back();
    require(columns % size_of_block(known->type).weights() == 0, where, ": rows of ", columns,
            " are not whole blocks of ", known->name, kRemedy);
    Tensor tensor = {where, known->name, shape,
                     count, nullptr,     static_cast<std::size_t>(bytes_of_row(known->type, count))};
    tensor.layout.type = known->type;
    const auto [found, is_new] = tensors_.emplace(called, std::move(tensor));
    require(is_new, where, ": is there twice", kRemedy);
    in_order_.emplace_back(called, &found->second);
    return {&found->second, number<std::uint64_t>()};
  }

  void place(const std::vector<std::pair<Tensor*, std::uint64_t>>& offsets, Index alignment) {
    const auto padded = [&](std::size_t bytes) {
      return static_cast<std::size_t>(round_up(static_cast<Index>(bytes), alignment));
    };
    const std::size_t data = padded(at_);
    std::size_t end = 0;
    for (const auto& [tensor, offset] : offsets) {
      require(offset == end, tensor->where, ": begins at byte ", offset,
              " of the data, not where the one before ends, at ", end, kRemedy);
      require(data <= size_ && end <= size_ - data && tensor->bytes <= size_ - data - end, tensor->where,
              ": ends after the ", "file, which has ", size_, " bytes; it is truncated; download it again");
      tensor->data = mapping_->data() + data + end;
      end += padded(tensor->bytes);
    }
  }

  static constexpr std::uint64_t kMostListed = 1 << 22;  // values in all lists

  const fs::path path_;
  const std::size_t size_;
  std::shared_ptr<MappedFile> mapping_;
  std::size_t at_ = 0;
  std::uint64_t listed_ = 0;
  Json metadata_ = Json::object();
  std::map<std::string, Tensor> tensors_;
  std::vector<std::pair<std::string, std::string_view>> keys_;
  std::vector<std::pair<std::string, const Tensor*>> in_order_;
};

}  // namespace streambp
