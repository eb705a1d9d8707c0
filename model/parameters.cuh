// One table of named tensors for all model families. Weights, gradients and moments are sets of the same tensors;
// allocating, initialising, loading, saving, updating and comparing them are loops over this table.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "kernels/base/device.cuh"
#include "kernels/base/random.cuh"
#include "kernels/embedding.cuh"
#include "model/config.cuh"
#include "model/linear.cuh"
#include "parallel/group.cuh"

namespace streambp {

// Initial values: matrices are normal (with a smaller standard deviation if they write to the residual stream), norm
// weights are one, biases are zero.
enum class Init { normal, residual, ones, zeros };

// A row of the table.
struct Parameter {
  std::string name;  // in the Hugging Face checkpoint
  Index rows, cols;  // a vector has one row
  Init init;
  // GPT-2's files store matrices transposed, and q, k, v as three parts of one tensor, side by side.
  bool transposed = false;
  Index part = 0, parts = 1;

  bool vector() const { return init == Init::ones || init == Init::zeros; }
};

// The tensors of a layer. Tensors that the model does not have stay empty.
template <class T>
struct Layer {
  NormWeights<T> attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  Linear<T> q, k, v, o, gate, up, down;
};

// A full set of tensors: the weights, their gradient, or a moment of the optimizer.
template <class T>
struct Tensors {
  EmbeddingTables<T> embedding;
  std::vector<Layer<T>> layers;
  NormWeights<T> norm;
  Linear<T> head;

  explicit Tensors(const Config& c) : layers(static_cast<std::size_t>(c.layers)) {}
};

// A row of the table and its tensor.
template <class T>
struct Entry {
  Parameter parameter;
  Matrix<T>* matrix;
};
template <class T>
using Table = std::vector<Entry<T>>;

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
    table.push_back({p, &w});
  };
  auto norm = [&](NormWeights<T>& w, ModuleName module, Index width, Norm kind) {
    row(w.weight, module, ".weight", {1, width}, norm_init(c));
    if (kind == Norm::layer) row(w.bias, module, ".bias", {1, width}, Init::zeros);
  };
  auto linear = [&](Linear<T>& w, ModuleName module, TensorShape shape, Init init, bool bias, FusedPart part = {}) {
    row(w.weight, module, ".weight", shape, init, part);
    if (bias) row(w.bias, module, ".bias", {1, shape.rows}, Init::zeros, part);
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
  return table;
}

template <class T>
Table<T> head_table(const Config& c, Tensors<T>& w) {
  const bool gpt2 = c.family == "gpt2";
  Table<T> table = {{{gpt2 ? "ln_f.weight" : "model.norm.weight", 1, c.hidden, norm_init(c)}, &w.norm.weight}};
  if (c.norm == Norm::layer)
    table.push_back({{gpt2 ? "ln_f.bias" : "model.norm.bias", 1, c.hidden, Init::zeros}, &w.norm.bias});
  if (!c.tied) table.push_back({{"lm_head.weight", c.vocab, c.hidden, Init::normal}, &w.head.weight});
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

// Allocates a rank's shard of every tensor.
template <class Device, class T>
void allocate(Device& dev, const Table<T>& rows, Kind kind, const Group& ranks = {}) {
  for (const Entry<T>& e : rows) {
    *e.matrix = allocate<T>(dev, shard(e.parameter.rows, ranks).size(), e.parameter.cols, kind);
  }
}

inline Index parameter_count(const Config& c) {
  Tensors<float> none(c);
  Index count = 0;
  for (const auto& e : table(c, none)) count += e.parameter.rows * e.parameter.cols;
  return count;
}

template <class T>
struct Model {
  Config config;
  Tensors<T> weights;
  Group shards = {};  // the ranks that share the weights: each has some rows of every tensor
  Linear<T> head() const { return config.tied ? Linear<T>{weights.embedding.tokens, {}} : weights.head; }
};

// Initialises the weights. `spread` adds normal noise with this standard deviation to every weight, so that none has a
// special value such as one or zero; gradient checks need this.
template <class Device, class T>
void initialise(Device& dev, Model<T>& model, std::uint64_t seed, double spread = 0) {
  std::uint64_t number = 0;
  for (auto& [parameter, matrix] : table(model.config, model.weights)) {
    const Random random(seed, number++);
    const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(model.config.layers));
    const double mean = parameter.init == Init::ones ? 1 : 0;
    const double std = parameter.init == Init::normal ? 0.02 : parameter.init == Init::residual ? residual_std : 0;
    const double sigma = std + spread;
    const auto first = static_cast<std::size_t>(shard(parameter.rows, model.shards).begin * parameter.cols);
    std::vector<T> values(static_cast<std::size_t>(matrix->size()));
#pragma omp parallel for
    for (std::size_t i = 0; i < values.size(); ++i) {
      // rounded to float32 for every type, so a float64 model has the same weights as a float32 model
      const double noise = sigma == 0 ? 0 : sigma * random.normal(first + i);
      values[i] = static_cast<T>(static_cast<float>(mean + noise));
    }
    dev.upload(*matrix, values.data());
  }
}

}  // namespace streambp
