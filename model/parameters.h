// One table of named tensors for all model families. Weights, gradients and moments are sets of the same tensors;
// allocating, initialising, loading, saving, updating and comparing them are loops over this table.
#pragma once

#include <algorithm>
#include <cmath>
#include <list>

#include "kernels/base/device.cuh"
#include "kernels/base/random.h"
#include "kernels/initial.cuh"
#include "model/any_feed_forward.h"
#include "model/mixer.h"
#include "parallel/group.h"

namespace streambp {

// The table has three sections: embedding, layers, head.
template <class T>
Table<T> layer_table(const Config& c, Index l, Layer<T>& w) {
  const Modules& names = family_of(c).modules;
  const Index d = c.hidden;
  Section<T> rows = {c, module_name(c, names.layers) + std::to_string(l) + "."};
  const bool before = c.has_pre_norms(l), after = c.has_post_norms(l);
  if (before) rows.norm(w.attention_norm, names.attention_norm, d, c.norm);
  with_mixer(c, l, [&](auto mixer) { mixer.parameters(rows, w); });
  if (after) rows.norm(w.post_attention_norm, names.post_attention_norm, d, Norm::rms);
  if (before && !c.parallel) rows.norm(w.mlp_norm, names.mlp_norm, d, c.norm);
  with_feed_forward(c, l, [&](auto feed_forward) { feed_forward.parameters(rows, w); });
  if (after) rows.norm(w.post_mlp_norm, names.post_mlp_norm, d, Norm::rms);
  if (c.layer_scale) rows.row(w.scale, names.layer_scale, "", {1, 1}, Init::ones).trained = false;
  return std::move(rows.table);
}

template <class T>
Table<T> embedding_table(const Config& c, Tensors<T>& w) {
  const Modules& names = family_of(c).modules;
  Section<T> rows = {c};
  rows.row(w.embedding.tokens, module_name(c, names.tokens), ".weight", {c.vocab, c.hidden}, Init::normal);
  rows.in_blocks(w.embedding.quantised);
  if (c.positions == Positions::learned)
    rows.row(w.embedding.positions, names.positions, ".weight", {c.max_length, c.hidden}, Init::normal);
  return std::move(rows.table);
}

template <class T>
Table<T> head_table(const Config& c, Tensors<T>& w) {
  Section<T> rows = {c};
  rows.norm(w.norm, module_name(c, family_of(c).modules.norm), c.hidden, c.norm);
  if (!c.tied) {
    rows.row(w.head.weight, "lm_head", ".weight", {c.vocab, c.hidden}, Init::normal);
    rows.in_blocks(w.head.quantised);
  }
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
    const Index rows_of_rank = shard(e.parameter.rows, ranks).size();
    e.with_near([&]<class U>(Matrix<U>& m) { m = allocate<U>(dev, rows_of_rank, e.parameter.cols, kind); });
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
  // The ranks that share the weights: each has some rows of every tensor, but all of the replicated ones.
  Group shards = {};
  Place place = Place::near;  // of the matrices of layers
  bool in_shards(const Parameter& p) const { return shards.size > 1 && !p.replicated(); }
};

// Allocates the weights of a model.
template <class Device, class T>
void allocate_weights(Device& dev, Model<T>& model) {
  const Table<T> all = table(model.config, model.weights);
  const auto is_far = [&](const Entry<T>& e) { return model.place == Place::far && e.far && !e.quantised; };
  Table<T> near = plain(rows_where(all, [](const Parameter& p) { return !p.replicated(); }));
  std::erase_if(near, is_far);
  allocate(dev, near, Kind::weights, model.shards);
  for (const Entry<T>& e : all) {
    const Parameter& p = e.parameter;
    if (e.quantised && e.quantised->blocks.type != BlockType::none) {
      Blocks& blocks = e.quantised->blocks;
      blocks.bytes = allocate<std::uint8_t>(dev, p.rows, bytes_of_row(blocks.type, p.cols), Kind::weights);
    } else if (e.quantised) {
      const bool mxfp4 = e.quantised->mxfp4, plain_scales = model.config.plain_scales && !mxfp4;
      *e.quantised = allocate_four_bits(dev, p.rows * p.cols, plain_scales ? 1 : kNf4Blocks, mxfp4);
    }
    if (is_far(e)) *e.far = allocate_far<T>(dev, shard(p.rows, model.shards).size(), p.cols, Kind::weights);
  }
  allocate(dev, rows_where(all, [](const Parameter& p) { return p.replicated(); }), Kind::weights);
}

// The initial values of a parameter. `spread` adds normal noise with this standard deviation, so that none has a special
// value such as one or zero; gradient checks need this.
inline InitialValues initial_values(const Parameter& p, Index layers, const Random& random, double spread) {
  if (p.init == Init::adapter_a) return {random, 0, 0, std::sqrt(static_cast<double>(p.cols))};
  if (p.init == Init::log_uniform)  // in gradient checks, states last longer
    return {.random = random, .lowest = 0.01, .highest = spread > 0 ? 0.1 : 16};
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(layers));
  const double std = p.init == Init::normal ? 0.02 : p.init == Init::residual ? residual_std : 0;
  const double root = std::sqrt(static_cast<double>(p.cols));
  return {random, p.init == Init::ones ? 1.0 : p.init == Init::inverse_root ? 1 / root : 0.0, std + spread};
}

// Sets some parameters to their initial values. `stream`: the first of their streams of random numbers.
template <class Device, class T>
void initialise(Device& dev, const Model<T>& model, const Table<T>& rows, std::uint64_t seed, std::uint64_t stream,
                double spread) {
  for (const Entry<T>& e : rows) {
    const Parameter& p = e.parameter;
    InitialValues values = initial_values(p, model.config.layers, Random(seed, stream++), spread);
    if (model.in_shards(p)) values.first = static_cast<std::uint64_t>(shard(p.rows, model.shards).begin * p.cols);
    if (e.quantised && e.quantised->blocks) {
      zero(dev, e.quantised->blocks.bytes);  // most types are only read
    } else if (e.quantised) {
      const std::vector<float> weights = on_host<float>(values, p.rows * p.cols);
      upload(dev, *e.quantised, e.quantised->mxfp4 ? quantise_mxfp4(weights) : quantise(weights));
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
// The numbers of a parameter that a token uses.
inline Index active_numbers(const Parameter& p, const Config& c) {
  return p.rows * p.cols / most(p.experts, 1) * (p.experts > 0 ? c.experts_per_token : 1);
}
inline Index active_parameters(
    const Config& c, Filter counts = [](const Parameter& p) { return !p.adapter(); }) {
  Index count = 0;
  for (const Parameter& p : parameters_of(c, counts)) count += active_numbers(p, c);
  return count;
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
