#include "data/files/gguf_writer.h"

#include "data/files/adapters.h"

namespace streambp {

namespace {

constexpr Index kAlignment = 32;

void pad(std::ostream& out, Index bytes) {
  for (Index i = bytes; i < round_up(bytes, kAlignment); ++i) out.put('\0');
}

}  // namespace

void GgufWriter::add(const std::string& name, BlockType type, const std::vector<Index>& shape, Produce produce) {
  const Index begin = parts_.empty() ? 0 : round_up(parts_.back().end, kAlignment);
  text(tensors_, name), number(tensors_, static_cast<std::uint32_t>(shape.size()));
  Index count = 1;
  for (auto n = shape.rbegin(); n != shape.rend(); ++n) number(tensors_, static_cast<std::uint64_t>(*n)), count *= *n;
  number(tensors_, std::ranges::find(kGgufTypes, type, &GgufType::type)->number);
  number(tensors_, static_cast<std::uint64_t>(begin));
  parts_.push_back({name, begin + bytes_of_row(type, count), std::move(produce)});
}

void GgufWriter::write(const fs::path& path) const {
  write_file_atomically(path, [&](std::ostream& out) {
    std::string header = "GGUF";
    number(header, std::uint32_t{3}), number(header, std::uint64_t{parts_.size()}), number(header, count_);
    header += keys_ + tensors_;
    out << header;
    pad(out, std::ssize(header));
    const Index data = out.tellp();
    for (const Part& part : parts_) {
      part.produce(out);
      require(out.tellp() - data == part.end, path.string(), ": tensor ", quote(part.name), ": ", out.tellp() - data,
              " bytes of data, but it should end after ", part.end);
      pad(out, part.end);
    }
  });
}

void write_row(std::ostream& out, BlockType type, const std::vector<float>& row) {
  const auto put = [&](auto x) { out.write(reinterpret_cast<const char*>(&x), sizeof x); };
  if (type == BlockType::f32) return void(out.write(reinterpret_cast<const char*>(row.data()), 4 * std::ssize(row)));
  if (type == BlockType::f16 || type == BlockType::bf16) {
    for (const float x : row) type == BlockType::f16 ? put(Float16(x)) : put(BFloat16(x));
    return;
  }
  require(type == BlockType::q8_0 || type == BlockType::q4_0, "blocks of this type cannot be written");
  for (auto x = row.begin(); x != row.end(); x += 32) {
    const float most = *std::max_element(x, x + 32, [](float a, float b) { return std::abs(a) < std::abs(b); });
    const float scale = type == BlockType::q8_0 ? std::abs(most) / 127 : most / -8,
                inverse = scale == 0 ? 0 : 1 / scale;
    put(Float16(scale));
    if (type == BlockType::q8_0) {
      for (int i = 0; i < 32; ++i) put(static_cast<std::int8_t>(std::round(x[i] * inverse)));
    } else {
      const auto code = [&](int i) { return std::min(15, static_cast<int>(x[i] * inverse + 8.5f)); };
      for (int i = 0; i < 16; ++i) put(static_cast<std::uint8_t>(code(i) | code(i + 16) << 4));
    }
  }
}

namespace {

// Writes a matrix with llama.cpp's changes: of its values, and of the order of its rows and columns.
void write_matrix(std::ostream& out, BlockType type, const std::vector<float>& values, Index rows,
                  const GgufName& order) {
  const Index cols = std::ssize(values) / rows;
  std::vector<float> row(static_cast<std::size_t>(cols));
  for (Index i = 0; i < rows; ++i) {
    const float* from = values.data() + order.rows.original(i) * cols;
    for (Index j = 0; j < cols; ++j) {
      const float x = from[order.columns.original(j)];
      row[static_cast<std::size_t>(j)] = order.change == ValueChange::none        ? x
                                         : order.change == ValueChange::minus_one ? x + 1
                                                                                  : -std::exp(x);
    }
    write_row(out, type, row);
  }
}

std::vector<float> numbers_of(const Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count));
  read(tensor, values.data());
  return values;
}

// Some parts of a tensor, one after the other.
std::vector<float> lines_of(const Tensor& tensor, const Table<float>& all, const std::vector<Index>& parts) {
  std::vector<float> values;
  Index before = 0;
  for (const Entry<float>& e : all) {
    const Parameter& p = e.parameter;
    if (std::ranges::find(parts, p.part) != parts.end()) {
      const std::size_t begin = values.size();
      values.resize(begin + static_cast<std::size_t>(p.rows * p.cols));
      read_lines(tensor, p, before, {0, p.rows}, values.data() + begin);
    }
    before += p.length();
  }
  return values;
}

std::string architecture_of(const GgufFile& file) { return file.metadata().at("general.architecture"); }

}  // namespace

void write_gguf_adapter(const fs::path& dir, const Config& c, const fs::path& base) {
  if (c.trained && !c.trained->empty()) return;
  const SafetensorsFile file(dir / "adapter_model.safetensors");
  // A file has one alpha, and a tensor the scale alpha / rank.
  const AdapterSize& first = c.adapters.begin()->second;
  const double alpha = first.scale * static_cast<double>(first.rank);
  GgufWriter writer;
  writer.add("general.architecture", architecture_of(gguf_model(base).file));
  writer.add("general.type", std::string("adapter"));
  writer.add("adapter.type", std::string("lora"));
  writer.add("adapter.lora.alpha", static_cast<float>(alpha));
  writer.add("general.file_type", std::uint32_t{0});
  writer.add("general.quantization_version", std::uint32_t{2});
  const auto add = [&](const std::string& name, std::vector<Index> shape, Index rows, const GgufName& order,
                       auto&& values) {
    writer.add(name, BlockType::f32, shape,
               [rows, order, values](std::ostream& out) { write_matrix(out, BlockType::f32, values(), rows, order); });
  };
  Tensors<float> none(c);
  for (const Table<float>& parts : by_stored_tensor(adapters(table(c, none)))) {
    const Parameter& first = parts.front().parameter;
    if (first.init != Init::adapter_b) continue;
    const std::string layer = first.name.substr(0, first.name.rfind(".lora_B"));
    const Tensor &a = file.at(name_in_adapter(c, layer + ".lora_A.weight")),
                 &b = file.at(name_in_adapter(c, first.name));
    const AdapterSize& size = c.adapters.at(layer);
    const double factor = size.scale * static_cast<double>(size.rank) / alpha;
    const auto scaled = [factor](std::vector<float> values) {
      for (float& x : values) x = factor == 1 ? x : static_cast<float>(factor * x);
      return values;
    };
    const auto stored = [=, &c](Index part) {  // the weight in the file
      Parameter weight = {first.experts > 0 ? layer : layer + ".weight", 0, 0, Init::normal};
      weight.part = part;
      return gguf_name(c, weight);
    };
    std::map<std::string, std::vector<Index>> tensors;  // of the file, which share an a: the layer's parts in each
    for (const Entry<float>& e : parts) tensors[stored(e.parameter.part).name].push_back(e.parameter.part);
    const Index experts = first.experts;
    for (const auto& [name, its_parts] : tensors) {
      const GgufName order = stored(its_parts.front());
      const bool whole = tensors.size() == 1 && experts == 0;
      Index rows = 0;
      for (const Index part : its_parts) rows += parts.at(static_cast<std::size_t>(part)).parameter.rows;
      add(name + ".lora_a", experts > 0 ? std::vector{experts, size.rank, a.shape.back()} : a.shape, a.shape[0],
          {"", {}, order.columns}, [&a] { return numbers_of(a); });
      add(name + ".lora_b",
          experts > 0 ? std::vector{experts, rows / experts, first.cols} : std::vector{rows, first.cols}, rows,
          {"", order.rows, {}}, [=, &b] { return scaled(whole ? numbers_of(b) : lines_of(b, parts, its_parts)); });
    }
  }
  writer.write(dir / "adapter.gguf");
}

void write_merged_gguf(const fs::path& out, const fs::path& base, const Config& c, BlockType type,
                       const MergedTensor& merged) {
  const GgufModel& model = gguf_model(base);
  std::map<std::string, Parameter> merged_weights;  // by llama.cpp's names
  for (const Parameter& p : parameters_of(c, [](const Parameter& p) { return !p.adapter(); }))
    if (p.trained || (*p.group != 0 && c.adapters.contains(p.module())))
      merged_weights.emplace(gguf_name(c, p).name, p);
  GgufWriter writer;
  for (const auto& [key, bytes] : model.file.keys())
    if (key != "general.file_type" && key != "general.alignment") writer.add(bytes);
  constexpr std::pair<BlockType, std::uint32_t> kinds[] = {
      {BlockType::f32, 0}, {BlockType::f16, 1}, {BlockType::q4_0, 2}, {BlockType::q8_0, 7}, {BlockType::bf16, 32}};
  for (const auto& [kind, number] : kinds)
    if (kind == type) writer.add("general.file_type", number);
  for (const auto& [name, tensor] : model.file.in_order()) {
    const auto found = merged_weights.find(name);
    if (found == merged_weights.end()) {
      writer.add(name, tensor->layout.type, tensor->shape, [tensor](std::ostream& out) {
        out.write(reinterpret_cast<const char*>(tensor->data), static_cast<std::streamsize>(tensor->bytes));
      });
      continue;
    }
    const bool whole = tensor->shape.back() % size_of_block(type).weights() == 0;
    const Parameter& p = found->second;
    const bool large = *p.group != 0 || name == "token_embd.weight" || name == "output.weight",
               router = name.find(".ffn_gate_inp") != name.npos;
    const BlockType stored = !large || router ? BlockType::f32 : whole ? type : BlockType::f16;
    writer.add(name, stored, tensor->shape, [&, stored, name, tensor](std::ostream& out) {
      const Index cols = tensor->shape.size() > 1 ? tensor->shape.back() : 1;
      write_matrix(out, stored, merged(p.name, name), tensor->count / cols, gguf_name(c, p));
    });
  }
  writer.write(out);
}

}  // namespace streambp
