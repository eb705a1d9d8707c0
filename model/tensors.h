// The tensors of a model, and the rows of the table that names them (model/parameters.h).
#pragma once

#include <string>
#include <vector>

#include "kernels/base/far.h"
#include "kernels/embedding.cuh"
#include "model/families.h"
#include "model/linear.h"
#include "model/quantised.h"

namespace streambp {

// Initial values: matrices are normal (with a smaller standard deviation if they write to the residual stream), norm
// weights are one, biases are zero. Of an adapter, a is uniform and b is zero, so that it changes nothing at first.
enum class Init { normal, residual, ones, zeros, inverse_root, log_uniform, adapter_a, adapter_b };

// A row of the table.
struct Parameter {
  std::string name;  // in the Hugging Face checkpoint
  Index rows, cols;  // a vector has one row
  Init init;
  const char* group = "";   // of a linear layer's weight: attention, mlp, experts or router
  bool transposed = false;  // in files
  Index part = 0;           // in files, parameters of one name are the parts of one tensor, side by side
  bool trained = true;
  bool per_channel = false;  // a filter for each row; in files, (rows x 1 x cols)
  bool in_layer = false;     // else of the embedding, the last norm or the head
  Index turn = 0;            // in files, the parts of a tensor take turns, so many rows each; 0: one follows the other
  Index experts = 0;         // in files, (experts x rows of each x cols)
  Index heads = 0;           // in files, a vector is (heads x numbers of each)
  bool wide = false;         // few numbers, in float32 at least

  bool vector() const {
    return init == Init::ones || init == Init::zeros || init == Init::inverse_root || init == Init::log_uniform;
  }
  Index length() const { return vector() ? cols : rows; }
  bool adapter() const { return init == Init::adapter_a || init == Init::adapter_b; }
  // Of a linear layer's weight: its name in PEFT.
  std::string module() const { return experts > 0 ? name : name.substr(0, name.rfind('.')); }
  bool replicated() const { return adapter() || wide; }  // never in shards of ranks
};

// A part of a linear layer that is one tensor in files: its adapters share the first part's a.
template <class T>
Linear<T> with_shared_a(Linear<T> w, const Linear<T>& first) {
  if (!w.adapter.a) w.adapter.a = first.adapter.a;
  return w;
}

// Of a mixture of experts. gate, up and down have the weights of all experts.
template <class T>
struct MixtureWeights {
  Linear<T> router, gate, up, down;
  Matrix<Accumulator<T>> bias;  // of the router's choice
  Matrix<std::int32_t> ready;   // of experts in 4 bits: which of them are dequantised

  Linear<T> ups() const { return with_shared_a(up, gate); }
};

// The tensors of a layer. Tensors that the model does not have stay empty.
template <class T>
struct Layer {
  NormWeights<T> attention_norm, q_norm, k_norm, post_attention_norm, mlp_norm, post_mlp_norm;
  Linear<T> q, k, v;  // of attention, or of a gated delta rule
  Linear<T> gate, up, down;
  Linear<T> o;        // of any mixer
  Linear<T> b, c, x;  // of a short convolution
  Matrix<T> taps;
  Linear<T> attention_gate;
  Matrix<T> sinks;           // of attention
  Linear<T> z, beta, decay;  // of a gated delta rule
  Matrix<Accumulator<T>> a_log;
  Matrix<T> dt_bias;
  NormWeights<Accumulator<T>> output_norm;
  MixtureWeights<T> routed, shared;  // experts
  Matrix<T> scale;                   // of the layer's output

  // Where q, k and v are one tensor in files, as in GPT-2 and in Qwen3.5's delta rules, their adapters share q's a; so do q
  // and attention's gate in Qwen3.5, z in Qwen3-Next, gate and up in Phi-3, and b, c and x of a convolution.
  Linear<T> keys() const { return with_shared_a(k, q); }
  Linear<T> values() const { return with_shared_a(v, q); }
  Linear<T> gate_of_attention() const { return with_shared_a(attention_gate, q); }
  Linear<T> z_part() const { return with_shared_a(z, q); }
  Linear<T> decay_part() const { return with_shared_a(decay, beta); }
  Linear<T> ups() const { return with_shared_a(up, gate); }
  Linear<T> c_part() const { return with_shared_a(c, b); }
  Linear<T> x_part() const { return with_shared_a(x, b); }
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
  Linear<T> output() const {
    return head.weight || head.quantised ? head : Linear<T>{embedding.tokens, {}, {}, embedding.quantised};
  }
};

// A row of the table and its tensor. If that is quantised or in far memory, the matrix is empty.
template <class T>
struct Entry {
  Parameter parameter;
  Matrix<T>* matrix;
  FourBits* quantised = nullptr;
  FarMatrix<T>* far = nullptr;             // where it can be far
  Matrix<Accumulator<T>>* wide = nullptr;  // instead of `matrix`, where the type differs

  bool is_far() const { return far && far->cols > 0; }
  // Calls f with the matrix in near memory.
  template <class F>
  auto with_near(F&& f) const {
    return wide ? f(*wide) : f(*matrix);
  }
  // The matrix of a wide parameter.
  Matrix<Accumulator<T>>& wide_matrix() const {
    if constexpr (std::is_same_v<T, Accumulator<T>>) return *matrix;
    return *wide;
  }
  // Calls f with the matrix, near or far.
  template <class F>
  auto with_matrix(F&& f) const {
    return is_far() ? f(*far) : with_near(f);
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

  template <class U>
  Parameter& row(Matrix<U>& w, const std::string& module, const char* tensor, TensorShape shape, Init init) {
    Parameter p = {prefix + module + tensor, shape.rows, shape.cols, init};
    p.in_layer = !prefix.empty();
    for (const Entry<T>& e : table) p.part += e.parameter.name == p.name;
    p.trained = p.adapter() || !c.trained || c.trained->contains(p.name);
    Entry<T> entry = {p, nullptr};
    if constexpr (std::is_same_v<U, T>) {
      entry.matrix = &w;
    } else {
      entry.wide = &w;
    }
    return table.emplace_back(entry).parameter;
  }
  // In files, the parts of this linear layer take turns, with so many rows each.
  void take_turns(const std::string& module, const std::vector<Index>& rows) {
    for (const char* tensor : {".weight", ".bias", ".lora_B.weight"})
      for (Entry<T>& e : table)
        if (e.parameter.name == prefix + module + tensor)
          e.parameter.turn = rows[static_cast<std::size_t>(e.parameter.part)];
  }
  // The last weight may stay as a GGUF file stores it.
  void in_blocks(FourBits& q) {
    const auto found = c.blocks.find({table.back().parameter.name, table.back().parameter.part});
    if (found == c.blocks.end()) return;
    table.back().quantised = &q, q.blocks.type = found->second;  // not a tensor, but set with them
  }
  void norm(NormWeights<T>& w, const std::string& module, Index width, Norm kind, Init init = Init::ones,
            Index heads = 0) {
    if (!c.norm_weight) return;
    row(w.weight, module, ".weight", {1, width}, c.norm_offset == 1 ? Init::zeros : init).heads = heads;
    if (kind == Norm::layer && c.norm_bias) row(w.bias, module, ".bias", {1, width}, Init::zeros);
  }
  // The weights of all experts, one below the other. Parts of one tensor take turns: expert by expert, or row by row.
  void experts(Linear<T>& w, const char* module, TensorShape shape, Index turn, Init init) {
    Parameter& weight = row(w.weight, module, "", {c.experts * shape.rows, shape.cols}, init);
    const Index part = weight.part;
    weight.group = "experts", weight.experts = c.experts, weight.turn = turn;
    weight.transposed = family_of(c).modules.experts_transposed;
    table.back().far = &w.far;
    if (c.base == Base::nf4 || c.keeps_mxfp4()) table.back().quantised = &w.quantised;
    in_blocks(w.quantised);
    w.quantised.mxfp4 = c.keeps_mxfp4();  // not a tensor, but set with them
    if (c.mlp_bias) {
      Parameter& bias = row(w.bias, std::string(module) + "_bias", "", {1, c.experts * shape.rows}, Init::zeros);
      bias.experts = c.experts, bias.turn = turn;
    }
    adapter(w, module, shape, part, c.experts, turn);
  }
  // A router is never in 4 bits or in far memory.
  void router(Linear<T>& w, const char* module, TensorShape shape, bool bias) {
    row(w.weight, module, ".weight", shape, Init::normal).group = "router";
    if (bias) row(w.bias, module, ".bias", {1, shape.rows}, Init::zeros);
    adapter(w, module, shape, 0);
  }
  void linear(const char* group, Linear<T>& w, const char* module, TensorShape shape, Init init, bool bias) {
    Parameter& weight = row(w.weight, module, ".weight", shape, init);
    const Index part = weight.part;
    weight.group = group, weight.transposed = family_of(c).modules.transposed;
    table.back().far = &w.far;
    if (c.base == Base::nf4) table.back().quantised = &w.quantised;
    in_blocks(w.quantised);
    if (bias) row(w.bias, module, ".bias", {1, shape.rows}, Init::zeros);
    adapter(w, module, shape, part);
  }

 private:
  // shape: of an expert's weight, where there are experts
  void adapter(Linear<T>& w, const char* module, TensorShape shape, Index part, Index experts = 0, Index turn = 0) {
    const auto found = c.adapters.find(prefix + module);
    if (found == c.adapters.end()) return;
    const auto [rank, scale] = found->second;
    const Index all = most(experts, 1);
    w.adapter.scale = scale;  // not a tensor, but set with them
    if (part == 0) row(w.adapter.a, module, ".lora_A.weight", {all * rank, shape.cols}, Init::adapter_a);
    Parameter& b = row(w.adapter.b, module, ".lora_B.weight", {all * shape.rows, rank}, Init::adapter_b);
    b.experts = experts, b.turn = turn;
  }
};

}  // namespace streambp
