// Merges adapters into the weights of their base: weight + scale b a, in float32, one tensor at a time.
#pragma once

#include <list>

#include "data/files/adapters.h"
#include "data/files/gguf_writer.h"

namespace streambp {

class Merge {
 public:
  Merge(const fs::path& base, const fs::path& directory, const Config& config)
      : files_(base, config.root), model_{config, Tensors<float>(config)} {
    const Table<float> all = table(config, model_.weights);
    files_.check_all_used(files_.stored(without_adapters(all)), config);
    allocate(memory_, trained(all));
    AdapterDirectory(directory).load(host_, model_);
    for (const Table<float>& parts : by_stored_tensor(adapters(table(config, model_.weights))))
      adapters_[parts.front().parameter.name] = parts;
  }

  // Writes a model directory like that of the base, with the types of `layout`.
  void save(const fs::path& dir, const ModelLayout& layout) {
    save_tensors(dir, without_adapters(table(model_.config, model_.weights)), layout, kLargestShard,
                 [&](SafetensorsWriter& writer, const std::string& name, const StoredTensor<float>& stored) {
                   writer.add(name, stored.dtype, stored_shape(stored.parts),
                              [=, this](std::ostream& out) { write_merged(out, name, stored); });
                 });
  }

  // Writes a GGUF file like that of the base, with the merged weights in this type.
  void save_gguf(const fs::path& out, const fs::path& base, BlockType type) {
    std::map<std::string, Table<float>> all;
    for (const Table<float>& parts : by_stored_tensor(without_adapters(table(model_.config, model_.weights))))
      all[parts.front().parameter.name] = parts;
    write_merged_gguf(out, base, model_.config, type, [&](const std::string& name, const std::string& part) {
      const StoredTensor<float> stored = {all.at(name), name, "F32"};
      Memory memory;
      merge(memory, stored);
      Table<float> wanted = as_in_gguf(model_.config, stored.parts);
      std::erase_if(wanted, [&](const Entry<float>& e) { return e.parameter.name != part; });
      std::vector<float> values;
      stored_blocks(host_, wanted, {},
                    [&](const std::vector<float>& block) { values.insert(values.end(), block.begin(), block.end()); });
      return values;
    });
  }

 private:
  using Memory = std::list<std::vector<float>>;

  void write_merged(std::ostream& out, const std::string& name, const StoredTensor<float>& stored) {
    Memory memory;
    merge(memory, stored);
    write_values(host_, out, name, stored.parts, stored.dtype);
  }

  // The values of what is trained are in memory already.
  void merge(Memory& memory, const StoredTensor<float>& stored) {
    if (!stored.parts.front().parameter.trained) allocate(memory, stored.parts), read(stored.parts);
    add_adapters(stored);
  }
  void read(const Table<float>& parts) {
    if (!parts.front().quantised || parts.front().quantised->blocks.type != BlockType::none)
      return read_tensors(host_, files_, "", files_.stored(parts));
    const std::vector<FourBitNumbers> numbers = four_bits_of(files_, parts);
    for (std::size_t i = 0; i < parts.size(); ++i)
      dequantise(numbers[i], parts[i].matrix->reshape(parts[i].matrix->size()));
  }

  // weight += scale b a
  void add_adapters(const StoredTensor<float>& stored) {
    const std::string layer = stored.parts.front().parameter.module();
    const auto size = model_.config.adapters.find(layer);
    if (size == model_.config.adapters.end() || *stored.parts.front().parameter.group == 0) return;
    const Matrix<float> a = *adapters_.at(layer + ".lora_A.weight").front().matrix;
    const Table<float>& bs = adapters_.at(layer + ".lora_B.weight");
    for (std::size_t i = 0; i < bs.size(); ++i) {
      const Matrix<float> b = *bs[i].matrix;
      std::vector<float> memory(b.data, b.data + b.size());
      const Matrix<float> scaled(memory.data(), b.rows, b.cols);
      scale(host_, scaled, size->second.scale);
      const Matrix<float> weight = *stored.parts[i].matrix;
      const Index experts = most(stored.parts[i].parameter.experts, 1);
      for (Index e = 0; e < experts; ++e)
        matmul_backward_input(host_, weight.lane(e, weight.rows / experts), scaled.lane(e, b.rows / experts),
                              a.lane(e, a.rows / experts), Update::add);
    }
  }

  ModelFiles files_;
  Model<float> model_;
  Cpu host_{0};
  Memory memory_;  // of what is trained
  std::map<std::string, Table<float>> adapters_;
};

}  // namespace streambp
