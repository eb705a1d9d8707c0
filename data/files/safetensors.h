// Safetensors: named tensors in one file, the format of Hugging Face checkpoints.
//
//   8 bytes     n, the length of the header, little-endian
//   n bytes     JSON: {"wte.weight": {"dtype": "F32", "shape": [50257, 768], "data_offsets": [begin, end]}, ...,
//                      "__metadata__": {"any": "text"}}
//   the rest    the tensors, back to back; offsets count from here
//
// Reading validates the whole header before it touches the data. Writing is atomic: it goes to a temporary file, which
// is renamed once it is on disk.
#pragma once

#include <bit>
#include <cstring>
#include <filesystem>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "data/files/files.h"
#include "kernels/base/blocks.cuh"

namespace streambp {

// How a tensor of a GGUF file is stored, and what becomes of its values.
enum class ValueChange { none, minus_one, log_of_negative };
struct BlockLayout {
  BlockType type = BlockType::none;
  SwappedAxes rows = {}, columns = {};
  ValueChange change = ValueChange::none;
};

struct Tensor {
  std::string where;  // "file: tensor "name"", for messages
  std::string dtype;
  std::vector<Index> shape;
  Index count;            // of elements
  const std::byte* data;  // in the mapped file; not aligned
  std::size_t bytes;
  std::vector<Tensor> pieces = {};  // one after the other; then there is no data
  // Where pieces are something else: what number they have here.
  float (*number)(const Tensor&, Index) = nullptr;
  BlockLayout layout = {};
};

// Row i of a tensor in blocks. The numbers of a vector are rows.
inline const std::uint8_t* row_of_blocks(const Tensor& tensor, Index i) {
  const Index bytes = bytes_of_row(tensor.layout.type, tensor.shape.size() > 1 ? tensor.shape.back() : 1);
  return reinterpret_cast<const std::uint8_t*>(tensor.data) + tensor.layout.rows.stored(i) * bytes;
}

// Elements [first, first + count) of a tensor in blocks.
template <class T>
void read_blocks(const Tensor& tensor, Index first, Index count, T* out) {
  const BlockLayout& layout = tensor.layout;
  const Index width = tensor.shape.size() > 1 ? tensor.shape.back() : 1;
  std::vector<float> row(static_cast<std::size_t>(width));
  for (Index i = first / width; i * width < first + count; ++i) {
    decode_row(layout.type, row_of_blocks(tensor, i), width, layout.columns, row.data());
    for (Index j = std::max(first - i * width, Index{0}); j < std::min(first + count - i * width, width); ++j) {
      const float x = row[static_cast<std::size_t>(j)];
      *out++ = static_cast<T>(layout.change == ValueChange::none        ? x
                              : layout.change == ValueChange::minus_one ? x - 1
                                                                        : std::log(-x));
    }
  }
}

inline bool is_real(const Tensor& tensor) {
  return tensor.number || tensor.layout.type != BlockType::none || tensor.dtype == "F32" || tensor.dtype == "F64" ||
         tensor.dtype == "F16" || tensor.dtype == "BF16";
}

inline Index element_count(const std::string& where, const std::vector<Index>& shape) {
  require(shape.size() <= 8, where, ": has ", shape.size(), " dimensions; at most 8 are supported");
  Index bytes = 8;  // the size of the largest type, so that the byte count of no type overflows
  for (const Index n : shape) {
    if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes)) {
      fail(where, ": no tensor can have the shape ", shown(shape), "; is the file damaged?");
    }
  }
  return bytes / 8;
}

// Calls f with a value of the stored type, if it is one that can be read.
template <class F>
void with_stored_type(const std::string& dtype, F&& f) {
  if (dtype == "F32") return f(float());
  if (dtype == "F64") return f(double());
  if (dtype == "F16") return f(Float16());
  if (dtype == "BF16") return f(BFloat16());
  if (dtype == "I32") return f(std::int32_t());
  if (dtype == "I64") return f(std::int64_t());
  if (dtype == "U8") return f(std::uint8_t());
}

// Bytes of an element; 0 for types that cannot be read.
inline Index dtype_size(const std::string& dtype) {
  static const std::map<std::string, Index> others = {{"BOOL", 1},    {"I8", 1},  {"F8_E4M3", 1},
                                                      {"F8_E5M2", 1}, {"I16", 2}, {"U16", 2},
                                                      {"U32", 4},     {"I64", 8}, {"U64", 8}};
  const auto found = others.find(dtype);
  Index size = found == others.end() ? 0 : found->second;
  with_stored_type(dtype, [&](auto value) { size = sizeof value; });
  return size;
}

// Elements [first, first + count) as T. Real types convert to real types, integers to integer types that can hold them.
template <class T>
void read(const Tensor& tensor, Index first, Index count, T* out) {
  require(0 <= first && 0 <= count && first + count <= tensor.count, tensor.where, ": has ", tensor.count, " elements");
  if constexpr (!std::is_integral_v<T>) {
    for (Index i = 0; tensor.number && i < count; ++i) out[i] = static_cast<T>(tensor.number(tensor, first + i));
    if (tensor.number) return;
    if (tensor.layout.type != BlockType::none && tensor.pieces.empty()) return read_blocks(tensor, first, count, out);
  }
  for (const Tensor& piece : tensor.pieces) {
    const Index part = std::clamp<Index>(piece.count - first, 0, count);
    if (part > 0) read(piece, first, part, out);
    first = std::max<Index>(first - piece.count, 0), count -= part, out += part;
  }
  if (!tensor.pieces.empty()) return;
  bool fits = false;
  with_stored_type(tensor.dtype, [&](auto stored) {
    using Stored = decltype(stored);
    const std::byte* data = tensor.data + first * static_cast<Index>(sizeof stored);
    if constexpr (std::is_same_v<Stored, T>) {
      fits = true;
      if (count > 0) std::memcpy(out, data, static_cast<std::size_t>(count) * sizeof stored);
    } else if constexpr (std::is_integral_v<Stored> == std::is_integral_v<T>) {
      fits = true;
      for (Index i = 0; i < count; ++i) {
        std::memcpy(&stored, data + i * static_cast<Index>(sizeof stored), sizeof stored);
        if constexpr (std::is_integral_v<T>) {
          require(std::in_range<T>(stored), tensor.where, ": ", +stored, " is out of range");
        }
        out[i] = static_cast<T>(stored);
      }
    }
  });
  const char* kind = std::is_integral_v<T> ? "integers" : "real numbers";
  require(fits, tensor.where, ": cannot read type ", tensor.dtype, " as ", kind, "; convert the file");
}

template <class T>
void read(const Tensor& tensor, T* out) {
  read(tensor, 0, tensor.count, out);
}

// Returns the pages of a mapped tensor to the system. Later reads load them again.
inline void forget(const Tensor& tensor) {
  for (const Tensor& piece : tensor.pieces) forget(piece);
  if (tensor.data) forget_pages(tensor.data, tensor.bytes);
}

// The tensor with the rows of these, one after the other. Those of experts have one dimension more.
inline Tensor join(const std::vector<const Tensor*>& parts, Index experts = 0) {
  Tensor all = *parts.front();
  if (parts.size() == 1 && experts == 0) return all;
  Index length = 0;
  for (const Tensor* part : parts) {
    std::vector<Index> shape = part->shape;
    if (!shape.empty() && !all.shape.empty()) {
      length += shape[0];
      if (experts == 0) shape[0] = all.shape[0];  // experts are all alike
    }
    require(part->dtype == all.dtype && shape == all.shape && !shape.empty(), part->where, ": is ", part->dtype,
            " of shape ", shown(part->shape), ", which cannot be joined to ", all.where, ", which is ", all.dtype,
            " of shape ", shown(all.shape), "; download the file again");
    all.pieces.push_back(*part);
  }
  all.count = all.count / most(all.shape[0], 1) * length, all.shape[0] = length;
  if (experts > 0) all.shape[0] = length / experts, all.shape.insert(all.shape.begin(), experts);
  all.where += " with its other pieces";
  all.data = nullptr, all.bytes = static_cast<std::size_t>(all.count * dtype_size(all.dtype));
  return all;
}

// A file, mapped into memory and checked. Its tensors live as long as the object or a copy of it.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const fs::path& path) : path_(path) {
    const std::size_t size = regular_file_size(path);
    require(size >= 8, path.string(), ": ", size, " bytes are too few", kRemedy);
    mapping_ = std::make_shared<MappedFile>(path, size);
    std::uint64_t length;
    std::memcpy(&length, mapping_->data(), 8);
    require(length <= size - 8 && length <= kLongestHeader, path.string(), ": claims a header of ", length,
            " bytes and has ", size, kRemedy);
    data_ = mapping_->data() + 8 + length;
    data_bytes_ = static_cast<Index>(size - 8 - length);
    parse(std::string(reinterpret_cast<const char*>(mapping_->data()) + 8, length));
    check_layout();
  }

  const fs::path& path() const { return path_; }
  MappedFile& mapping() const { return *mapping_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // "": there is none of this name.
  std::string metadata(const std::string& name) const {
    const auto found = metadata_.find(name);
    return found == metadata_.end() ? "" : found->second;
  }
  const Tensor* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  const Tensor& at(const std::string& name) const {
    if (const Tensor* tensor = find(name)) return *tensor;
    std::string near;
    auto neighbour = tensors_.lower_bound(name);
    if (neighbour != tensors_.begin()) --neighbour;
    for (int i = 0; i < 3 && neighbour != tensors_.end(); ++i) near += " " + quote(neighbour++->first);
    fail(path_.string(), ": no tensor ", quote(name), " among its ", tensors_.size(),
         near.empty() ? "" : "; similar names:", near, "; is it a file of this model?");
  }

 private:
  static constexpr std::uint64_t kLongestHeader = 100'000'000;  // as in the reference implementation
  static constexpr const char* kRemedy = "; the file is damaged or not a safetensors file; download it again";

  // The header nests three deep: tensors, their fields, lists of sizes.
  static constexpr JsonLimits kHeaderLimits = {.values = 1'000'000, .depth = 3};

  void parse(std::string_view text) {
    std::string where = path_.string() + ": header";
    try {
      const Json header = parse_json(text, kHeaderLimits);
      require(header.is_object(), where, ": is not a JSON object", kRemedy);
      for (const auto& [name, entry] : header.items()) {
        where = path_.string() + ": tensor " + quote(name);
        if (name == "__metadata__") {
          metadata_ = entry.get<std::map<std::string, std::string>>();
        } else {
          tensors_[name] = describe(where, entry);
        }
      }
    } catch (const BadJson& error) {
      fail(where, ": ", error.what(), kRemedy);
    } catch (const Json::exception& error) {  // a field is missing or has the wrong type
      fail(where, ": ", excerpt(error.what()), kRemedy);
    }
  }

  Tensor describe(const std::string& where, const Json& entry) const {
    const std::string dtype = entry.at("dtype");
    require(dtype.size() <= 32, where, ": ", quote(dtype), " is not a type", kRemedy);
    const std::vector<Index> shape = sizes(where, entry.at("shape")), span = sizes(where, entry.at("data_offsets"));
    require(span.size() == 2 && span[0] <= span[1], where, ": data_offsets are not a begin and an end", kRemedy);
    require(span[1] <= data_bytes_, where, ": ends at byte ", span[1], " of ", data_bytes_, ", so the file is ",
            "truncated; download it again");
    const Index count = element_count(where, shape), bytes = span[1] - span[0], size = dtype_size(dtype);
    require(size == 0 || bytes == count * size, where, ": ", dtype, " of shape ", shown(shape), " takes ", count * size,
            " bytes, not ", bytes, kRemedy);
    return {where, dtype, shape, count, data_ + span[0], static_cast<std::size_t>(bytes)};
  }

  static std::vector<Index> sizes(const std::string& where, const Json& list) {
    const auto is_size = [](const Json& n) {
      return n.is_number_unsigned() && std::in_range<Index>(n.get<std::uint64_t>());
    };
    require(list.is_array() && std::all_of(list.begin(), list.end(), is_size), where,
            ": shape and data_offsets must be lists of numbers from 0 to 2^63-1", kRemedy);
    return list;
  }

  // The tensors cover the data without gaps or overlaps.
  void check_layout() const {
    std::vector<std::tuple<const std::byte*, std::size_t, const Tensor*>> spans;
    for (const auto& [name, tensor] : tensors_) spans.emplace_back(tensor.data, tensor.bytes, &tensor);
    std::sort(spans.begin(), spans.end());
    const std::byte* end = data_;
    for (const auto& [begin, bytes, tensor] : spans) {
      require(begin == end, tensor->where, ": does not begin where the previous tensor ends", kRemedy);
      end += bytes;
    }
    require(end == data_ + data_bytes_, path_.string(), ": has bytes that belong to no tensor", kRemedy);
  }

  fs::path path_;
  std::shared_ptr<MappedFile> mapping_;
  const std::byte* data_ = nullptr;
  Index data_bytes_ = 0;
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Tensors that files have in pieces, one after the other: the name and the shape of each.
using TensorPieces = std::map<std::string, std::vector<std::pair<std::string, std::vector<Index>>>>;

// Collects descriptions of tensors; finish() writes the file. The data must stay valid until then. With an empty path,
// finish() produces the data and writes nothing: so ranks other than the first take part in producing it.
class SafetensorsWriter {
 public:
  using Produce = std::function<void(std::ostream&)>;  // writes the bytes of a tensor

  SafetensorsWriter(const fs::path& path, const std::map<std::string, std::string>& metadata, TensorPieces pieces = {})
      : path_(path), pieces_(std::move(pieces)) {
    header_["__metadata__"] = metadata;
  }

  void add(const std::string& name, const std::string& dtype, const std::vector<Index>& shape, Produce produce) {
    const auto found = pieces_.find(name);
    if (found == pieces_.end()) {
      describe(name, dtype, shape);
    } else {
      for (const auto& [piece, shape] : found->second) describe(piece, dtype, shape);
    }
    parts_.push_back({path_.string() + ": tensor " + quote(name), end_, std::move(produce)});
  }
  void add(const std::string& name, const std::string& dtype, const std::vector<Index>& shape, const void* data,
           std::size_t bytes) {
    add(name, dtype, shape,
        [=](std::ostream& out) { out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes)); });
  }

  const nlohmann::ordered_json& header() const { return header_; }

  void finish() const {
    if (path_.empty()) {
      std::ostream nowhere(nullptr);
      for (const Part& part : parts_) part.produce(nowhere);
      return;
    }
    write_file_atomically(path_, [&](std::ostream& out) {
      std::string header = text_of(header_);
      header.resize(round_up(std::ssize(header), 8), ' ');  // so that the data is aligned
      const std::uint64_t length = header.size();
      out.write(reinterpret_cast<const char*>(&length), 8);
      out << header;
      const Index data = out.tellp();
      for (const Part& part : parts_) {
        part.produce(out);
        require(out.tellp() - data == part.end, part.where, ": ", out.tellp() - data,
                " bytes of data, but it should end after ", part.end);
      }
    });
  }

 private:
  void describe(const std::string& name, const std::string& dtype, const std::vector<Index>& shape) {
    const std::string where = path_.string() + ": tensor " + quote(name);
    require(dtype_size(dtype) > 0, where, ": ", dtype, " is not a type that can be written");
    require(!header_.contains(name), where, ": is a duplicate");
    const Index begin = end_;
    end_ += element_count(where, shape) * dtype_size(dtype);
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, end_}}};
  }

  struct Part {
    std::string where;
    Index end;
    Produce produce;
  };

  fs::path path_;
  TensorPieces pieces_;
  nlohmann::ordered_json header_;
  std::vector<Part> parts_;
  Index end_ = 0;  // of the data so far
};

}  // namespace streambp
