// One table of named tensors for all model families. Weights, gradients and moments are sets of the same tensors;
// allocating, initialising, loading, saving, updating and comparing them are loops over this table.
#pragma once

#include <algorithm>
#include <cmath>
#include <list>
#include <string>
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/random.h"
#include "kernels/embedding.cuh"
#include "kernels/initial.cuh"
#include "model/families.h"
#include "model/linear.h"
#include "model/quantised.h"
#include "parallel/group.h"

namespace streambp {

// Initial values: matrices are normal (with a smaller standard deviation if they write to the residual stream), norm
// weights are one, biases are zero. Of an adapter, a is uniform and b is zero, so that it changes nothing at first.
enum class Init { normal, residual, ones, zeros, adapter_a, adapter_b };

// A row of the table.
struct Parameter {
  std::string name;  // in the Hugging Face checkpoint
  Index rows, cols;  // a vector has one row
  Init init;
  const char* group = "";   // of a linear layer's weight: attention or mlp
  bool transposed = false;  // in files
  Index part = 0;           // in files, parameters of one name are the parts of one tensor, side by side
  bool trained = true;
  bool in_layer = false;  // else of the embedding, the last norm or the head

  bool vector() const { return init == Init::ones || init == Init::zeros; }
  Index length() const { return vector() ? cols : rows; }
  bool adapter() const { return init == Init::adapter_a || init == Init::adapter_b; }
};

// The tensors of a layer. Tensors that the model does not have stay empty.
template <class T>
struct Layer {
  NormWeights<T> attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  Linear<T> q, k, v, o, gate, up, down;

  // Where q, k and v are one tensor in files, as in GPT-2, their adapters share q's a; so do gate and up in Phi-3.
  Linear<T> keys() const { return with_shared_a(k, q); }
  Linear<T> values() const { return with_shared_a(v, q); }
  Linear<T> ups() const { return with_shared_a(up, gate); }

 private:
  static Linear<T> with_shared_a(Linear<T> w, const Linear<T>& first) {
    if (!w.adapter.a) w.adapter.a = first.adapter.a;
    return w;
  }
};

// A full set of tensors: the weights, their gradient, or a moment of the optimizer.
template <class T>
struct Tensors {
  EmbeddingTables<T> embedding;
  std::vector<Layer<T>> layers;
  NormWeights<T> norm;
  Linear<T> head;

  explicit Tensors(const Config& c) : layers(static_cast<std::size_t>(c.layers)) {}

  // The head's linear layer. A tied head has no tensor: it is the embedding's table.
  Linear<T> output() const { return head.weight ? head : Linear<T>{embedding.tokens, {}}; }
};

// A row of the table and its tensor. If that is quantised or in far memory, the matrix is empty.
template <class T>
struct Entry {
  Parameter parameter;
  Matrix<T>* matrix;
  Nf4* quantised = nullptr;
  FarMatrix<T>* far = nullptr;  // where it can be far

  bool is_far() const { return far && far->cols > 0; }
  // Calls f with the matrix, near or far.
  template <class F>
  auto with_matrix(F&& f) const {
    return is_far() ? f(*far) : f(*matrix);
  }
};
template <class T>
using Table = std::vector<Entry<T>>;

template <class T, class F>
Table<T> rows_where(Table<T> table, F&& holds) {
  std::erase_if(table, [&](const Entry<T>& e) { return !holds(e.parameter); });
  return table;
}
template <class T>
Table<T> trained(const Table<T>& table) {
  return rows_where(table, [](const Parameter& p) { return p.trained; });
}
template <class T>
Table<T> plain(Table<T> table) {
  std::erase_if(table, [](const Entry<T>& e) { return e.quantised; });
  return table;
}
template <class T>
Table<T> adapters(const Table<T>& table) {
  return rows_where(table, [](const Parameter& p) { return p.adapter(); });
}
template <class T>
Table<T> without_adapters(const Table<T>& table) {
  return rows_where(table, [](const Parameter& p) { return !p.adapter(); });
}

struct TensorShape {
  Index rows, cols;
};

// Builds a section of the table from the tensors of modules. `prefix`: of the names, in a layer.
template <class T>
struct Section {
  const Config& c;
  const std::string prefix = "";
  Table<T> table = {};

  Parameter& row(Matrix<T>& w, const std::string& module, const char* tensor, TensorShape shape, Init init) {
    Parameter p = {prefix + module + tensor, shape.rows, shape.cols, init};
    p.in_layer = !prefix.empty();
    for (const Entry<T>& e : table) p.part += e.parameter.name == p.name;
    p.trained = p.adapter() || !c.trained || c.trained->contains(p.name);
    return table.emplace_back(Entry<T>{p, &w}).parameter;
  }
  void norm(NormWeights<T>& w, const std::string& module, Index width, Norm kind) {
    if (!c.norm_weight) return;
    row(w.weight, module, ".weight", {1, width}, c.norm_offset == 1 ? Init::zeros : Init::ones);
    if (kind == Norm::layer && c.norm_bias) row(w.bias, module, ".bias", {1, width}, Init::zeros);
  }
  void linear(const char* group, Linear<T>& w, const char* module, TensorShape shape, Init init, bool bias) {
    Parameter& weight = row(w.weight, module, ".weight", shape, init);
    const Index part = weight.part;
    weight.group = group, weight.transposed = family_of(c).modules.transposed;
    table.back().far = &w.far;
    if (c.base == Base::nf4) table.back().quantised = &w.quantised;
    if (bias) row(w.bias, module, ".bias", {1, shape.rows}, Init::zeros);
    const auto adapter = c.adapters.find(prefix + module);
    if (adapter == c.adapters.end()) return;
    const auto [rank, scale] = adapter->second;
    w.adapter.scale = scale;  // not a tensor, but set with them
    if (part == 0) row(w.adapter.a, module, ".lora_A.weight", {rank, shape.cols}, Init::adapter_a);
    row(w.adapter.b, module, ".lora_B.weight", {shape.rows, rank}, Init::adapter_b);
  }
};

// The table has three sections: embedding, layers, head.
template <class T>
Table<T> layer_table(const Config& c, Index l, Layer<T>& w) {
  const Modules& names = family_of(c).modules;
  const Index d = c.hidden, q = c.q_width(), kv = c.kv_width(), m = c.mlp;
  Section<T> rows = {c, module_name(c, names.layers) + std::to_string(l) + "."};
  if (c.pre_norms) rows.norm(w.attention_norm, names.attention_norm, d, c.norm);
  rows.linear("attention", w.q, names.q, {q, d}, Init::normal, c.qkv_bias);
  rows.linear("attention", w.k, names.k, {kv, d}, Init::normal, c.qkv_bias);
  rows.linear("attention", w.v, names.v, {kv, d}, Init::normal, c.qkv_bias);
  if (c.has_qk_norm()) {
    const bool all = c.qk_norm == QkNorm::all;
    rows.norm(w.q_norm, names.q_norm, all ? q : c.head_dim, Norm::rms);
    rows.norm(w.k_norm, names.k_norm, all ? kv : c.head_dim, Norm::rms);
  }
  rows.linear("attention", w.o, names.o, {d, q}, Init::residual, c.output_bias);
  if (c.post_norms) rows.norm(w.post_attention_norm, names.post_attention_norm, d, Norm::rms);
  if (c.pre_norms && !c.parallel) rows.norm(w.mlp_norm, names.mlp_norm, d, c.norm);
  if (c.gated()) rows.linear("mlp", w.gate, names.gate, {m, d}, Init::normal, c.mlp_bias);
  rows.linear("mlp", w.up, names.up, {m, d}, Init::normal, c.mlp_bias);
  rows.linear("mlp", w.down, names.down, {d, m}, Init::residual, c.mlp_bias);
  if (c.post_norms) rows.norm(w.post_mlp_norm, names.post_mlp_norm, d, Norm::rms);
  return std::move(rows.table);
}

template <class T>
Table<T> embedding_table(const Config& c, Tensors<T>& w) {
  const Modules& names = family_of(c).modules;
  Section<T> rows = {c};
  rows.row(w.embedding.tokens, module_name(c, names.tokens), ".weight", {c.vocab, c.hidden}, Init::normal);
  if (c.positions == Positions::learned)
    rows.row(w.embedding.positions, names.positions, ".weight", {c.max_length, c.hidden}, Init::normal);
  return std::move(rows.table);
}

template <class T>
Table<T> head_table(const Config& c, Tensors<T>& w) {
  Section<T> rows = {c};
  rows.norm(w.norm, module_name(c, family_of(c).modules.norm), c.hidden, c.norm);
  if (!c.tied) rows.row(w.head.weight, "lm_head", ".weight", {c.vocab, c.hidden}, Init::normal);
  return std::move(rows.table);
}

// Where backward sums the gradient of a tied head (memory/sums.h).
enum class TiedHead { with_embedding, apart };

// The tensors of a gradient to which backward through the head adds.
template <class T>
Table<T> head_gradient_table(const Config& c, Tensors<T>& w, TiedHead tied) {
  Table<T> table = head_table(c, w);
  if (!c.tied) return table;
  table.push_back(embedding_table(c, w).front());
  if (tied == TiedHead::apart) table.back().matrix = &w.head.weight;
  return table;
}

template <class T>
Table<T> table(const Config& c, Tensors<T>& w) {
  Table<T> all = embedding_table(c, w);
  auto append = [&](const Table<T>& section) { all.insert(all.end(), section.begin(), section.end()); };
  for (Index l = 0; l < c.layers; ++l) append(layer_table(c, l, w.layers[static_cast<std::size_t>(l)]));
  append(head_table(c, w));
  return all;
}

// Allocates a rank's shard of these tensors.
template <class Device, class T>
void allocate(Device& dev, const Table<T>& rows, Kind kind, const Group& ranks = {}) {
  for (const Entry<T>& e : rows) {
    *e.matrix = allocate<T>(dev, shard(e.parameter.rows, ranks).size(), e.parameter.cols, kind);
  }
}

// Allocates these tensors in memory of the host.
template <class T>
void allocate(std::list<std::vector<T>>& memory, const Table<T>& rows) {
  for (const Entry<T>& e : rows) {
    memory.emplace_back(static_cast<std::size_t>(e.parameter.rows * e.parameter.cols));
    *e.matrix = {memory.back().data(), e.parameter.rows, e.parameter.cols};
  }
}

template <class T>
struct Model {
  Config config;
  Tensors<T> weights;
  Group shards = {};  // the ranks that share the weights: each has some rows of every tensor, but all of the adapters
  Place place = Place::near;  // of the matrices of layers
  bool in_shards(const Parameter& p) const { return shards.size > 1 && !p.adapter(); }
};

// Allocates the weights of a model.
template <class Device, class T>
void allocate_weights(Device& dev, Model<T>& model) {
  const Table<T> all = table(model.config, model.weights);
  const auto is_far = [&](const Entry<T>& e) { return model.place == Place::far && e.far && !e.quantised; };
  Table<T> near = plain(without_adapters(all));
  std::erase_if(near, is_far);
  allocate(dev, near, Kind::weights, model.shards);
  for (const Entry<T>& e : all) {
    const Parameter& p = e.parameter;
    if (e.quantised) *e.quantised = allocate_nf4(dev, p.rows * p.cols, model.config.plain_scales ? 1 : kNf4Blocks);
    if (is_far(e)) *e.far = allocate_far<T>(dev, shard(p.rows, model.shards).size(), p.cols, Kind::weights);
  }
  allocate(dev, adapters(all), Kind::weights);
}

// The initial values of a parameter. `spread` adds normal noise with this standard deviation, so that none has a special
// value such as one or zero; gradient checks need this.
inline InitialValues initial_values(const Parameter& p, Index layers, const Random& random, double spread) {
  if (p.init == Init::adapter_a) return {random, 0, 0, std::sqrt(static_cast<double>(p.cols))};
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(layers));
  const double std = p.init == Init::normal ? 0.02 : p.init == Init::residual ? residual_std : 0;
  return {random, p.init == Init::ones ? 1.0 : 0.0, std + spread};
}

// Sets some parameters to their initial values. `stream`: the first of their streams of random numbers.
template <class Device, class T>
void initialise(Device& dev, const Model<T>& model, const Table<T>& rows, std::uint64_t seed, std::uint64_t stream,
                double spread) {
  for (const Entry<T>& e : rows) {
    const Parameter& p = e.parameter;
    InitialValues values = initial_values(p, model.config.layers, Random(seed, stream++), spread);
    if (model.in_shards(p)) values.first = static_cast<std::uint64_t>(shard(p.rows, model.shards).begin * p.cols);
    if (e.quantised) {
      upload(dev, *e.quantised, quantise(on_host<float>(values, p.rows * p.cols)));
    } else {
      e.with_matrix([&](auto m) { initialise(dev, m, values); });
    }
  }
  dev.synchronize();
}

template <class Device, class T>
void initialise_adapters(Device& dev, Model<T>& model, std::uint64_t seed, double spread = 0) {
  initialise(dev, model, adapters(table(model.config, model.weights)), seed, std::uint64_t{1} << 32, spread);
}
template <class Device, class T>
void initialise(Device& dev, Model<T>& model, std::uint64_t seed, double spread = 0) {
  initialise(dev, model, without_adapters(table(model.config, model.weights)), seed, 0, spread);
  initialise_adapters(dev, model, seed, spread);
}

// The rows of the table for which `holds` holds, without tensors.
using Filter = bool (*)(const Parameter&);
inline std::vector<Parameter> parameters_of(
    const Config& c, Filter holds = [](const Parameter&) { return true; }) {
  Tensors<float> none(c);
  std::vector<Parameter> parameters;
  for (const auto& e : rows_where(table(c, none), holds)) parameters.push_back(e.parameter);
  return parameters;
}
inline std::vector<Parameter> trained_parameters(const Config& c) {
  return parameters_of(c, [](const Parameter& p) { return p.trained; });
}

// Counts all parameters but adapters, or those of another filter.
inline Index parameter_count(
    const Config& c, Filter counts = [](const Parameter& p) { return !p.adapter(); }) {
  Index count = 0;
  for (const Parameter& p : parameters_of(c, counts)) count += p.rows * p.cols;
  return count;
}
// Weights of the linear layers inside the model's layers.
inline Index linear_weights(const Config& c) {
  return parameter_count(c, [](const Parameter& p) { return *p.group != 0; });
}
inline Index trained_count(const Config& c) {
  return parameter_count(c, [](const Parameter& p) { return p.trained; });
}

inline bool trains_embedding(const Config& c) {
  Tensors<float> none(c);
  return !c.trained || !trained(embedding_table(c, none)).empty();
}

// The lowest layer that backward has to reach: 0 if the embedding is trained, c.layers if only the head is.
inline Index lowest_trained_layer(const Config& c) {
  Tensors<float> none(c);
  if (trains_embedding(c)) return 0;
  Index l = 0;
  while (l < c.layers && trained(layer_table(c, l, none.layers[static_cast<std::size_t>(l)])).empty()) ++l;
  return l;
}

}  // namespace streambp
