// One table of named tensors for all model families. Weights, gradients and moments are sets of the same tensors;
// allocating, initialising, loading, saving, updating and comparing them are loops over this table.
#pragma once

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/random.cuh"
#include "kernels/embedding.cuh"
#include "model/config.cuh"
#include "model/linear.cuh"
#include "model/quantised.cuh"
#include "parallel/group.cuh"

namespace streambp {

// Initial values: matrices are normal (with a smaller standard deviation if they write to the residual stream), norm
// weights are one, biases are zero. Of an adapter, a is uniform and b is zero, so that it changes nothing at first.
enum class Init { normal, residual, ones, zeros, adapter_a, adapter_b };

// A row of the table.
struct Parameter {
  std::string name;  // in the Hugging Face checkpoint
  Index rows, cols;  // a vector has one row
  Init init;
  // GPT-2's files store matrices transposed, and q, k, v as three parts of one tensor, side by side.
  bool transposed = false;
  Index part = 0, parts = 1;
  bool trained = true;
  bool in_layer = false;  // else of the embedding, the last norm or the head

  bool vector() const { return init == Init::ones || init == Init::zeros; }
  bool adapter() const { return init == Init::adapter_a || init == Init::adapter_b; }
};

// The tensors of a layer. Tensors that the model does not have stay empty.
template <class T>
struct Layer {
  NormWeights<T> attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  Linear<T> q, k, v, o, gate, up, down;

  std::array<Linear<T>*, 7> linears() { return {&q, &k, &v, &o, &gate, &up, &down}; }

  // In GPT-2 the adapters of q, k and v share q's a.
  Linear<T> keys() const { return with_shared_a(k); }
  Linear<T> values() const { return with_shared_a(v); }

 private:
  Linear<T> with_shared_a(Linear<T> w) const {
    if (!w.adapter.a) w.adapter.a = q.adapter.a;
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

inline bool is_trained(const Config& c, const std::string& name) { return !c.trained || c.trained->contains(name); }

inline Init norm_init(const Config& c) { return c.norm_offset == 1 ? Init::zeros : Init::ones; }

// A module in Llama-like files and in GPT-2's; its tensors are NAME.weight and NAME.bias.
struct ModuleName {
  const char *llama, *gpt2 = "";
};
struct TensorShape {
  Index rows, cols;
};
// Which part of a fused tensor of GPT-2's files.
struct FusedPart {
  Index part = 0, parts = 1;
};

// The table has three sections: embedding, layers, head.
template <class T>
Table<T> layer_table(const Config& c, Index l, Layer<T>& w) {
  const bool gpt2 = c.family == "gpt2";
  const Index d = c.hidden, q = c.q_width(), kv = c.kv_width(), m = c.mlp;
  const std::string prefix = (gpt2 ? "h." : "model.layers.") + std::to_string(l) + ".";
  Table<T> table;
  auto row = [&](Matrix<T>& w, ModuleName module, const char* tensor, TensorShape shape, Init init,
                 FusedPart part = {}) {
    Parameter p = {prefix + (gpt2 ? module.gpt2 : module.llama) + tensor, shape.rows, shape.cols, init};
    if (gpt2) p.transposed = !p.vector(), p.part = part.part, p.parts = part.parts;
    p.trained = is_trained(c, p.name);
    table.push_back({p, &w});
  };
  auto norm = [&](NormWeights<T>& w, ModuleName module, Index width, Norm kind) {
    row(w.weight, module, ".weight", {1, width}, norm_init(c));
    if (kind == Norm::layer) row(w.bias, module, ".bias", {1, width}, Init::zeros);
  };
  auto linear = [&](Linear<T>& w, ModuleName module, TensorShape shape, Init init, bool bias, FusedPart part = {}) {
    row(w.weight, module, ".weight", shape, init, part);
    table.back().far = &w.far;
    if (c.base == Base::nf4) table.back().quantised = &w.quantised;
    if (bias) row(w.bias, module, ".bias", {1, shape.rows}, Init::zeros, part);
    if (!gpt2) part = {};
    const std::string name = prefix + (gpt2 ? module.gpt2 : module.llama);
    const auto adapter = c.adapters.find(name);
    if (adapter == c.adapters.end()) return;
    const auto [rank, scale] = adapter->second;
    w.adapter.scale = scale;  // not a tensor, but set with them
    if (part.part == 0) table.push_back({{name + ".lora_A.weight", rank, shape.cols, Init::adapter_a}, &w.adapter.a});
    table.push_back({{.name = name + ".lora_B.weight",
                      .rows = shape.rows,
                      .cols = rank,
                      .init = Init::adapter_b,
                      .part = part.part,
                      .parts = part.parts},
                     &w.adapter.b});
  };
  const char* mlp_norm = c.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm";
  // clang-format off
  norm(w.attention_norm, {"input_layernorm", "ln_1"}, d, c.norm);
  linear(w.q, {"self_attn.q_proj", "attn.c_attn"}, {q, d},  Init::normal, c.qkv_bias, {0, 3});
  linear(w.k, {"self_attn.k_proj", "attn.c_attn"}, {kv, d}, Init::normal, c.qkv_bias, {1, 3});
  linear(w.v, {"self_attn.v_proj", "attn.c_attn"}, {kv, d}, Init::normal, c.qkv_bias, {2, 3});
  if (c.qk_norm) norm(w.q_norm, {"self_attn.q_norm"}, c.head_dim, Norm::rms);
  if (c.qk_norm) norm(w.k_norm, {"self_attn.k_norm"}, c.head_dim, Norm::rms);
  linear(w.o, {"self_attn.o_proj", "attn.c_proj"}, {d, q}, Init::residual, c.output_bias);
  if (c.post_norms) norm(w.post_attention_norm, {"post_attention_layernorm"}, d, Norm::rms);
  norm(w.mlp_norm, {mlp_norm, "ln_2"}, d, c.norm);
  if (c.gated()) linear(w.gate, {"mlp.gate_proj"}, {m, d}, Init::normal, c.mlp_bias);
  linear(w.up,   {"mlp.up_proj",   "mlp.c_fc"},    {m, d}, Init::normal,   c.mlp_bias);
  linear(w.down, {"mlp.down_proj", "mlp.c_proj"},  {d, m}, Init::residual, c.mlp_bias);
  if (c.post_norms) norm(w.post_mlp_norm, {"post_feedforward_layernorm"}, d, Norm::rms);
  // clang-format on
  for (auto& e : table) e.parameter.in_layer = true;
  return table;
}

template <class T>
Table<T> embedding_table(const Config& c, Tensors<T>& w) {
  const bool gpt2 = c.family == "gpt2";
  Table<T> table = {
      {{gpt2 ? "wte.weight" : "model.embed_tokens.weight", c.vocab, c.hidden, Init::normal}, &w.embedding.tokens}};
  if (c.positions == Positions::learned) {
    table.push_back({{gpt2 ? "wpe.weight" : "model.embed_positions.weight", c.max_length, c.hidden, Init::normal},
                     &w.embedding.positions});
  }
  for (auto& e : table) e.parameter.trained = is_trained(c, e.parameter.name);
  return table;
}

template <class T>
Table<T> head_table(const Config& c, Tensors<T>& w) {
  const bool gpt2 = c.family == "gpt2";
  Table<T> table = {{{gpt2 ? "ln_f.weight" : "model.norm.weight", 1, c.hidden, norm_init(c)}, &w.norm.weight}};
  if (c.norm == Norm::layer)
    table.push_back({{gpt2 ? "ln_f.bias" : "model.norm.bias", 1, c.hidden, Init::zeros}, &w.norm.bias});
  if (!c.tied) table.push_back({{"lm_head.weight", c.vocab, c.hidden, Init::normal}, &w.head.weight});
  for (auto& e : table) e.parameter.trained = is_trained(c, e.parameter.name);
  return table;
}

// Where backward sums the gradient of a tied head (memory/sums.cuh).
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
    if (e.quantised) *e.quantised = allocate_nf4(dev, p.rows * p.cols);
    if (is_far(e)) *e.far = allocate_far<T>(dev, shard(p.rows, model.shards).size(), p.cols, Kind::weights);
  }
  allocate(dev, adapters(all), Kind::weights);
}

// The initial value of element n of a parameter. `spread` adds normal noise with this standard deviation, so that none
// has a special value such as one or zero; gradient checks need this.
inline double initial_value(const Parameter& p, Index layers, const Random& random, std::size_t n, double spread) {
  if (p.init == Init::adapter_a) return (2 * random.uniform(n) - 1) / std::sqrt(static_cast<double>(p.cols));
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(layers));
  const double std = p.init == Init::normal ? 0.02 : p.init == Init::residual ? residual_std : 0;
  const double sigma = std + spread, mean = p.init == Init::ones ? 1 : 0;
  return sigma == 0 ? mean : mean + sigma * random.normal(n);
}

// Sets some parameters to their initial values. `stream`: the first of their streams of random numbers.
template <class Device, class T>
void initialise(Device& dev, const Model<T>& model, const Table<T>& rows, std::uint64_t seed, std::uint64_t stream,
                double spread) {
  for (const Entry<T>& e : rows) {
    const Parameter& p = e.parameter;
    const Random random(seed, stream++);
    const auto first = static_cast<std::uint64_t>(model.in_shards(p) ? shard(p.rows, model.shards).begin * p.cols : 0);
    // rounded to float32 for every type, so a float64 model has the same weights as a float32 model
    const auto value = [=, layers = model.config.layers](std::size_t i) {
      return static_cast<float>(initial_value(p, layers, random, first + i, spread));
    };
    if (e.quantised) {
      std::vector<float> values(static_cast<std::size_t>(p.rows * p.cols));
#pragma omp parallel for
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(i);
      upload(dev, *e.quantised, quantise(values));
    } else {
      e.with_matrix([&](auto m) {
        std::vector<T> values(static_cast<std::size_t>(m.size()));
#pragma omp parallel for
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(value(i));
        dev.upload(m, values.data());
      });
    }
  }
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

// Of all parameters, or with another filter.
template <class F>
Index parameter_count(const Config& c, F&& counts) {
  Tensors<float> none(c);
  Index count = 0;
  for (const auto& e : rows_where(table(c, none), counts)) count += e.parameter.rows * e.parameter.cols;
  return count;
}
inline Index parameter_count(const Config& c) {
  return parameter_count(c, [](const Parameter& p) { return !p.adapter(); });
}
// Weights of the linear layers inside the model's layers.
inline Index linear_weights(const Config& c) {
  return c.layers * (c.hidden * (2 * c.q_width() + 2 * c.kv_width()) + (c.gated() ? 3 : 2) * c.hidden * c.mlp);
}
inline Index trained_count(const Config& c) {
  return parameter_count(c, [](const Parameter& p) { return p.trained; });
}

// The lowest layer that backward has to reach: 0 if the embedding is trained, c.layers if only the head is.
inline Index lowest_trained_layer(const Config& c) {
  Tensors<float> none(c);
  if (!c.trained || !trained(embedding_table(c, none)).empty()) return 0;
  Index l = 0;
  while (l < c.layers && trained(layer_table(c, l, none.layers[static_cast<std::size_t>(l)])).empty()) ++l;
  return l;
}

}  // namespace streambp
