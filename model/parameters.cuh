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

// The table has three sections: embedding, layers, head.
template <class T>
Table<T> layer_table(const Config& c, Index l, Layer<T>& w) {
  const bool gpt2 = c.family == "gpt2", layer_norm = c.norm == Norm::layer;
  const Index d = c.hidden, q = c.q_width(), kv = c.kv_width(), m = c.mlp;
  const Init ones = norm_init(c);
  const std::string prefix = (gpt2 ? "h." : "model.layers.") + std::to_string(l) + ".";
  Table<T> table;
  // present?, tensor, its name in Llama-like files and in GPT-2's, shape, initial value, part of GPT-2's fused tensor
  auto row = [&](bool present, Matrix<T>& w, const char* name, const char* gpt2_name, Index rows, Index cols, Init init,
                 Index part = 0, Index parts = 1) {
    const bool vector = init == Init::ones || init == Init::zeros;
    if (!present) return;
    table.push_back(
        {{prefix + (gpt2 ? gpt2_name : name), rows, cols, init, gpt2 && !vector, gpt2 ? part : 0, gpt2 ? parts : 1},
         &w});
  };
  // clang-format off
  row(true,          w.attention_norm.weight, "input_layernorm.weight", "ln_1.weight", 1, d, ones);
  row(layer_norm,    w.attention_norm.bias,   "input_layernorm.bias",   "ln_1.bias",   1, d, Init::zeros);
  row(true,          w.q.weight, "self_attn.q_proj.weight", "attn.c_attn.weight", q,  d, Init::normal, 0, 3);
  row(c.qkv_bias,    w.q.bias,   "self_attn.q_proj.bias",   "attn.c_attn.bias",   1,  q, Init::zeros,  0, 3);
  row(true,          w.k.weight, "self_attn.k_proj.weight", "attn.c_attn.weight", kv, d, Init::normal, 1, 3);
  row(c.qkv_bias,    w.k.bias,   "self_attn.k_proj.bias",   "attn.c_attn.bias",   1, kv, Init::zeros,  1, 3);
  row(true,          w.v.weight, "self_attn.v_proj.weight", "attn.c_attn.weight", kv, d, Init::normal, 2, 3);
  row(c.qkv_bias,    w.v.bias,   "self_attn.v_proj.bias",   "attn.c_attn.bias",   1, kv, Init::zeros,  2, 3);
  row(c.qk_norm,     w.q_norm.weight, "self_attn.q_norm.weight", "", 1, c.head_dim, ones);
  row(c.qk_norm,     w.k_norm.weight, "self_attn.k_norm.weight", "", 1, c.head_dim, ones);
  row(true,          w.o.weight, "self_attn.o_proj.weight", "attn.c_proj.weight", d, q, Init::residual);
  row(c.output_bias, w.o.bias,   "self_attn.o_proj.bias",   "attn.c_proj.bias",   1, d, Init::zeros);
  row(c.post_norms,  w.post_attention_norm.weight, "post_attention_layernorm.weight", "", 1, d, ones);
  row(true,          w.mlp_norm.weight, c.post_norms ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight",
                                                                                   "ln_2.weight", 1, d, ones);
  row(layer_norm,    w.mlp_norm.bias,   "post_attention_layernorm.bias",           "ln_2.bias",   1, d, Init::zeros);
  row(c.gated(),     w.gate.weight, "mlp.gate_proj.weight", "",                m, d, Init::normal);
  row(c.gated() && c.mlp_bias, w.gate.bias, "mlp.gate_proj.bias", "",          1, m, Init::zeros);
  row(true,          w.up.weight,   "mlp.up_proj.weight",   "mlp.c_fc.weight", m, d, Init::normal);
  row(c.mlp_bias,    w.up.bias,     "mlp.up_proj.bias",     "mlp.c_fc.bias",   1, m, Init::zeros);
  row(true,          w.down.weight, "mlp.down_proj.weight", "mlp.c_proj.weight", d, m, Init::residual);
  row(c.mlp_bias,    w.down.bias,   "mlp.down_proj.bias",   "mlp.c_proj.bias", 1, d, Init::zeros);
  row(c.post_norms,  w.post_mlp_norm.weight, "post_feedforward_layernorm.weight", "", 1, d, ones);
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

template <class Device, class T>
void allocate(Device& dev, const Table<T>& rows, Kind kind, End end = End::bottom) {
  for (const Entry<T>& e : rows) *e.matrix = allocate<T>(dev, e.parameter.rows, e.parameter.cols, kind, end);
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
    std::vector<T> values(static_cast<std::size_t>(matrix->size()));
#pragma omp parallel for
    for (std::size_t i = 0; i < values.size(); ++i) {
      // rounded to float32 for every type, so a float64 model has the same weights as a float32 model
      const double noise = sigma == 0 ? 0 : sigma * random.normal(i);
      values[i] = static_cast<T>(static_cast<float>(mean + noise));
    }
    dev.upload(*matrix, values.data());
  }
}

}  // namespace streambp
