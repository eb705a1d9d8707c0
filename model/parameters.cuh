// What is trained: the configuration of a model and one table of named tensors for all model families.
//
// The families differ in fields of Config, not in code paths of their own:
//
//              norm    positions   MLP      biases              also
//   gpt2       layer   learned     gelu     all                 tied head, fused and transposed weights in its files
//   llama      rms     rope        swiglu   none (optional)     Llama 3 stretches the rotary frequencies
//   mistral    rms     rope        swiglu   none                sliding window
//   qwen2      rms     rope        swiglu   q, k, v             tied head in the small ones
//   qwen3      rms     rope        swiglu   none                norm on every head's q and k, head_dim is free
//   gemma3     rms     rope        geglu    none                likewise, with norms of 1 + weight, also on what attention
//                                                               and MLP add; scaled embedding and scores; most layers
//                                                               local, with a sliding window and frequencies of their own
#pragma once

#include <string>
#include <vector>

#include "kernels/activation.cuh"
#include "kernels/attention_shape.cuh"
#include "kernels/base/device.cuh"
#include "kernels/base/random.cuh"
#include "kernels/norm.cuh"
#include "kernels/rope.cuh"

namespace streambp {

enum class Norm { rms, layer };
enum class Positions { learned, rope };

struct Config {
  std::string family = "llama";
  Index vocab = 0, hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, mlp = 0;
  Index max_length = 0;  // rows of the position table where positions are learned, else what the model was made for
  Norm norm = Norm::rms;
  double norm_eps = 1e-5, norm_offset = 0;
  bool post_norms = false;  // what attention and MLP add to the residual stream is normed too
  Positions positions = Positions::rope;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  Mlp mlp_kind = Mlp::swiglu;
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  bool qk_norm = false;
  bool tied = false;  // the head's weight is the token embedding
  double embedding_scale = 1;
  double score_scale = 0;  // of attention; 0: 1 / √head_dim
  // In local layers a token attends to itself and the window-1 tokens before it. Without a window no layer is local.
  Index window = 0;
  std::vector<bool> local;      // is layer l? empty: all are
  double local_rope_theta = 0;  // of local layers, whose frequencies are not scaled then; 0: as the others

  Index q_width() const { return heads * head_dim; }
  Index kv_width() const { return kv_heads * head_dim; }
  bool gated() const { return mlp_kind != Mlp::gelu; }
  bool is_local(Index layer) const { return window > 0 && (local.empty() || local[static_cast<std::size_t>(layer)]); }
  NormStyle norm_style() const { return {norm_eps, norm == Norm::layer, norm_offset}; }
  NormStyle head_norm_style() const { return {norm_eps, false, norm_offset}; }
  AttentionShape attention(Index layer) const {
    return {heads, kv_heads, head_dim, is_local(layer) ? window : 0, score_scale};
  }
};

// No model is near that deep; and what holds a row for each layer stays small, whatever a file says.
constexpr Index kMostLayers = 1 << 12;

// Refuses what no operation could compute, in words a user understands.
inline void validate(const Config& c) {
  require(c.vocab > 0 && c.hidden > 0 && c.layers > 0 && c.heads > 0 && c.kv_heads > 0 && c.head_dim > 0 && c.mlp > 0,
          "model: vocabulary, hidden, layers, heads, kv-heads, head-dim and mlp must all be positive");
  constexpr Index most = Index{1} << 24;  // so that no size of a tensor, and none of BLAS's 32-bit ones, overflows
  require(c.layers <= kMostLayers, "model: ", c.layers, " layers are more than the ", kMostLayers,
          " that are supported");
  for (Index size : {c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.mlp, c.max_length, c.window}) {
    require(size <= most, "model: a size of ", size, " is more than the ", most, " that are supported");
  }
  require(c.heads <= most / c.head_dim, "model: ", c.heads, " heads of ", c.head_dim, " are too wide");
  require(c.heads % c.kv_heads == 0, "model: ", c.heads, " query heads cannot share ", c.kv_heads,
          " key/value heads evenly; choose kv-heads that divides heads");
  require(c.positions == Positions::learned || c.head_dim % 2 == 0,
          "model: rotary positions turn pairs of numbers, so ", "head-dim must be even, not ", c.head_dim);
  require(c.positions == Positions::rope || c.max_length > 0,
          "model: learned positions need a positive maximum length");
  require(c.window >= 0, "model: the attention window must not be negative");
  require(c.norm_eps > 0 && c.rope_theta > 0 && c.local_rope_theta >= 0,
          "model: norm epsilon and rope theta must be positive");
  require(c.embedding_scale > 0 && c.score_scale >= 0, "model: the scales of embedding and attention must be positive");
  require(c.local.empty() || static_cast<Index>(c.local.size()) == c.layers, "model: ", c.local.size(),
          " layers are said to be local or not, and there are ", c.layers);
}

// How a parameter starts: matrices normal (those that write into the residual stream smaller), norms so that they
// multiply by one, biases zero.
enum class Init { normal, residual, ones, zeros };

// A row of the table.
struct Parameter {
  std::string name;  // in the Hugging Face checkpoint
  Index rows, cols;  // a vector has one row
  Init init;
  // In GPT-2's files matrices are stored transposed, and q, k, v as three parts of one tensor, side by side.
  bool transposed = false;
  Index part = 0, parts = 1;

  bool vector() const { return init == Init::ones || init == Init::zeros; }
};

// The tensors of a layer. Matrices are (outputs x inputs): y = x wᵀ + bias. Absent ones stay empty.
template <class T>
struct Layer {
  Matrix<T> attention_norm, attention_norm_bias, post_attention_norm;
  Matrix<T> q, q_bias, k, k_bias, v, v_bias, q_norm, k_norm, o, o_bias;
  Matrix<T> mlp_norm, mlp_norm_bias, post_mlp_norm;
  Matrix<T> gate, gate_bias, up, up_bias, down, down_bias;
};

// A full set of tensors: the weights, their gradient, or a moment of the optimizer.
template <class T>
struct Tensors {
  Matrix<T> embedding, positions;
  std::vector<Layer<T>> layers;
  Matrix<T> norm, norm_bias, head;

  explicit Tensors(const Config& c) : layers(static_cast<std::size_t>(c.layers)) {}
};

// A row of the table together with the place of its tensor.
template <class T>
struct Entry {
  Parameter parameter;
  Matrix<T>* matrix;
};
template <class T>
using Table = std::vector<Entry<T>>;

inline Init norm_init(const Config& c) { return c.norm_offset == 1 ? Init::zeros : Init::ones; }

// The one table of parameters, in three sections. A walk over it is how weights are allocated, initialised, loaded,
// saved, updated and compared.
template <class T>
Table<T> layer_table(const Config& c, Index l, Layer<T>& w) {
  const bool gpt2 = c.family == "gpt2", layer_norm = c.norm == Norm::layer;
  const Index d = c.hidden, q = c.q_width(), kv = c.kv_width(), m = c.mlp;
  const Init ones = norm_init(c);
  const std::string prefix = (gpt2 ? "h." : "model.layers.") + std::to_string(l) + ".";
  Table<T> table;
  // present?, tensor, its name in Llama-like files and in GPT-2's, shape, start, part of GPT-2's fused tensor
  auto row = [&](bool present, Matrix<T>& w, const char* name, const char* gpt2_name, Index rows, Index cols, Init init,
                 Index part = 0, Index parts = 1) {
    const bool vector = init == Init::ones || init == Init::zeros;
    if (!present) return;
    table.push_back(
        {{prefix + (gpt2 ? gpt2_name : name), rows, cols, init, gpt2 && !vector, gpt2 ? part : 0, gpt2 ? parts : 1},
         &w});
  };
  // clang-format off
  row(true,         w.attention_norm,      "input_layernorm.weight", "ln_1.weight", 1, d, ones);
  row(layer_norm,   w.attention_norm_bias, "input_layernorm.bias",   "ln_1.bias",   1, d, Init::zeros);
  row(true,         w.q,         "self_attn.q_proj.weight", "attn.c_attn.weight", q,  d, Init::normal, 0, 3);
  row(c.qkv_bias,   w.q_bias,    "self_attn.q_proj.bias",   "attn.c_attn.bias",   1,  q, Init::zeros,  0, 3);
  row(true,         w.k,         "self_attn.k_proj.weight", "attn.c_attn.weight", kv, d, Init::normal, 1, 3);
  row(c.qkv_bias,   w.k_bias,    "self_attn.k_proj.bias",   "attn.c_attn.bias",   1, kv, Init::zeros,  1, 3);
  row(true,         w.v,         "self_attn.v_proj.weight", "attn.c_attn.weight", kv, d, Init::normal, 2, 3);
  row(c.qkv_bias,   w.v_bias,    "self_attn.v_proj.bias",   "attn.c_attn.bias",   1, kv, Init::zeros,  2, 3);
  row(c.qk_norm,    w.q_norm,    "self_attn.q_norm.weight", "", 1, c.head_dim, ones);
  row(c.qk_norm,    w.k_norm,    "self_attn.k_norm.weight", "", 1, c.head_dim, ones);
  row(true,         w.o,         "self_attn.o_proj.weight", "attn.c_proj.weight", d, q, Init::residual);
  row(c.output_bias, w.o_bias,   "self_attn.o_proj.bias",   "attn.c_proj.bias",   1, d, Init::zeros);
  row(c.post_norms, w.post_attention_norm, "post_attention_layernorm.weight", "", 1, d, ones);
  row(true,         w.mlp_norm, c.post_norms ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight",
                                                                        "ln_2.weight", 1, d, ones);
  row(layer_norm,   w.mlp_norm_bias, "post_attention_layernorm.bias",   "ln_2.bias",   1, d, Init::zeros);
  row(c.gated(),    w.gate,      "mlp.gate_proj.weight", "",                m, d, Init::normal);
  row(c.gated() && c.mlp_bias, w.gate_bias, "mlp.gate_proj.bias", "",       1, m, Init::zeros);
  row(true,         w.up,        "mlp.up_proj.weight",   "mlp.c_fc.weight", m, d, Init::normal);
  row(c.mlp_bias,   w.up_bias,   "mlp.up_proj.bias",     "mlp.c_fc.bias",   1, m, Init::zeros);
  row(true,         w.down,      "mlp.down_proj.weight", "mlp.c_proj.weight", d, m, Init::residual);
  row(c.mlp_bias,   w.down_bias, "mlp.down_proj.bias",   "mlp.c_proj.bias", 1, d, Init::zeros);
  row(c.post_norms, w.post_mlp_norm, "post_feedforward_layernorm.weight", "", 1, d, ones);
  // clang-format on
  return table;
}

template <class T>
Table<T> embedding_table(const Config& c, Tensors<T>& w) {
  const bool gpt2 = c.family == "gpt2";
  Table<T> table = {
      {{gpt2 ? "wte.weight" : "model.embed_tokens.weight", c.vocab, c.hidden, Init::normal}, &w.embedding}};
  if (c.positions == Positions::learned) {
    table.push_back(
        {{gpt2 ? "wpe.weight" : "model.embed_positions.weight", c.max_length, c.hidden, Init::normal}, &w.positions});
  }
  return table;
}

template <class T>
Table<T> head_table(const Config& c, Tensors<T>& w) {
  const bool gpt2 = c.family == "gpt2";
  Table<T> table = {{{gpt2 ? "ln_f.weight" : "model.norm.weight", 1, c.hidden, norm_init(c)}, &w.norm}};
  if (c.norm == Norm::layer)
    table.push_back({{gpt2 ? "ln_f.bias" : "model.norm.bias", 1, c.hidden, Init::zeros}, &w.norm_bias});
  if (!c.tied) table.push_back({{"lm_head.weight", c.vocab, c.hidden, Init::normal}, &w.head});
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
  for (const Entry<T>& e : rows) *e.matrix = dev.template allocate<T>(e.parameter.rows, e.parameter.cols, kind, end);
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
  const Matrix<T>& head() const { return config.tied ? weights.embedding : weights.head; }
};

// Starts the weights. With `spread` every number gets normal noise of that size on top, so that nothing is left at a
// special value such as one or zero; gradient checks want that.
template <class Device, class T>
void initialise(Device& dev, Model<T>& model, std::uint64_t seed, double spread = 0) {
  std::uint64_t stream = 0;
  for (auto& [parameter, matrix] : table(model.config, model.weights)) {
    const Random random(seed, stream++);
    const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(model.config.layers));
    const double mean = parameter.init == Init::ones ? 1 : 0;
    const double std = parameter.init == Init::normal ? 0.02 : parameter.init == Init::residual ? residual_std : 0;
    const double sigma = std + spread;
    std::vector<T> values(static_cast<std::size_t>(matrix->size()));
#pragma omp parallel for
    for (std::size_t i = 0; i < values.size(); ++i) {
      // rounded to float32 in every type, so that a float64 model holds the same numbers as a float32 one
      const double noise = sigma == 0 ? 0 : sigma * random.normal(i);
      values[i] = static_cast<T>(static_cast<float>(mean + noise));
    }
    dev.upload(*matrix, values.data());
  }
}

}  // namespace streambp
