// Merges adapters into the weights of their base: weight + scale b a, in float32, one tensor at a time.
#pragma once

#include <list>

#include "data/files/adapters.cuh"

namespace streambp {

class Merge {
 public:
  Merge(const fs::path& base, const fs::path& adapters, const Config& config)
      : files_(base), model_{config, Tensors<float>(config)} {
    const Table<float> all = table(config, model_.weights);
    files_.check_all_used(without_adapters(all), config);
    for (const Entry<float>& e : trained(all)) allocate(e, of_adapters_.emplace_back());
    AdapterDirectory(adapters).load(host_, model_);
    for (Layer<float>& l : model_.weights.layers) {
      for (auto* w : {&l.q, &l.o, &l.gate, &l.up, &l.down}) linear_[&w->weight] = *w;
      linear_[&l.k.weight] = l.keys(), linear_[&l.v.weight] = l.values();
    }
  }

  // Writes a model directory like that of the base, with the types of `layout`.
  void save(const fs::path& dir, const ModelLayout& layout) {
    save_tensors(dir, without_adapters(table(model_.config, model_.weights)), layout, kLargestShard,
                 [&](SafetensorsWriter& writer, const std::string& prefix, const StoredTensor<float>& stored) {
                   const std::string name = prefix + stored.name;
                   writer.add(name, stored.dtype, stored_shape(stored.parts.front().parameter),
                              [=, this](std::ostream& out) { write_merged(out, name, stored); });
                 });
  }

 private:
  using Memory = std::vector<float>;

  static void allocate(const Entry<float>& e, Memory& memory) {
    memory.resize(static_cast<std::size_t>(e.parameter.rows * e.parameter.cols));
    *e.matrix = {memory.data(), e.parameter.rows, e.parameter.cols};
  }

  void write_merged(std::ostream& out, const std::string& name, const StoredTensor<float>& stored) {
    const bool replaced = stored.parts.front().parameter.trained;
    std::vector<Memory> memory(stored.parts.size());
    for (std::size_t i = 0; i < memory.size() && !replaced; ++i) allocate(stored.parts[i], memory[i]);
    if (!replaced) read_tensors(host_, files_, "", plain(stored.parts));
    for (std::size_t i = 0; i < memory.size(); ++i) {
      const Entry<float>& e = stored.parts[i];
      if (e.quantised) dequantise(nf4_of(files_, e.parameter), e.matrix->reshape(e.matrix->size()));
    }
    for (const Entry<float>& e : stored.parts) add_adapter(e);
    write_values(host_, out, name, stored.parts, stored.dtype);
  }

  // weight += scale b a
  void add_adapter(const Entry<float>& e) {
    const auto found = linear_.find(e.matrix);
    if (found == linear_.end() || !found->second.adapter.b) return;
    const Adapter<float>& adapter = found->second.adapter;
    Memory memory;
    Matrix<float> b = adapter.b;
    allocate({{.name = "b", .rows = b.rows, .cols = b.cols, .init = Init::zeros}, &b}, memory);
    convert(host_, b, adapter.b);
    scale(host_, b, adapter.scale);
    matmul_backward_input(host_, *e.matrix, b, adapter.a, Update::add);
  }

  ModelFiles files_;
  Model<float> model_;
  Cpu host_{0};
  std::list<Memory> of_adapters_;
  std::map<const Matrix<float>*, Linear<float>> linear_;  // by its weight
};

}  // namespace streambp
