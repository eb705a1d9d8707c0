// The activations of one layer for one chunk of rows.
#pragma once

#include "kernels/base/device.cuh"
#include "model/config.cuh"
#include "parallel/division.cuh"

namespace streambp {

// K and V of a layer, or their gradients: N x kv_width each.
template <class T>
struct KeysValues {
  Matrix<T> k, v;
  KeysValues slice(Rows rows) const { return {k.slice(rows), v.slice(rows)}; }
};

// Activations of attention itself, which mixes rows: of all rows of the chunk, but only of the heads of this rank.
// Without sequence parallelism, these are all heads, and q and attended are the same matrices as in Activations.
template <class T>
struct HeadActivations {
  Matrix<T> q, attended;
  Matrix<Accumulator<T>> lse;  // log Σ exp of the attention scores, a column per head
};

// Activations of a layer for C rows, in the order in which forward computes them. q is the width of all query heads.
template <class T>
struct Activations {
  Matrix<T> attention_input;  // C x hidden    norm(x)
  Matrix<T> k_projected;      // C x kv        K before its norm, only with qk_norm
  Matrix<T> q_projected;      // C x q         Q before its norm, only with qk_norm
  KeysValues<T> keys_values;  // C x kv        only with sequence parallelism: K and V, to be exchanged
  Matrix<T> q;                // C x q         after RoPE
  HeadActivations<T> heads;
  Matrix<T> attended;          // C x q
  Matrix<T> attention_output;  // C x hidden    attended oᵀ, only with post-norms
  Matrix<T> mlp_output;        // C x hidden    activated downᵀ, only with post-norms
  Matrix<T> middle;            // C x hidden    x + attention
  Matrix<T> mlp_input;         // C x hidden    norm(middle)
  Matrix<T> gate, up;          // C x mlp       gate only in gated MLPs
  Matrix<T> activated;         // C x mlp       the input of the down projection

  // What backward reads of some of the rows, except for attention itself.
  Activations slice(Rows rows) const {
    auto part = [&](Matrix<T> m) { return m ? m.slice(rows) : m; };
    Activations a;
    a.attention_input = part(attention_input), a.k_projected = part(k_projected), a.q_projected = part(q_projected);
    a.attended = part(attended), a.attention_output = part(attention_output), a.mlp_output = part(mlp_output);
    a.middle = part(middle), a.mlp_input = part(mlp_input);
    a.gate = part(gate), a.up = part(up), a.activated = part(activated);
    return a;
  }
};

// K and V of the heads of one of `ranks` ranks.
template <class T, class Device>
KeysValues<T> allocate_keys_values(Device& dev, const Config& c, Index rows, Index ranks = 1) {
  const auto k = allocate<T>(dev, rows, c.kv_width() / ranks, Kind::keys_values);
  return {k, allocate<T>(dev, rows, c.kv_width() / ranks, Kind::keys_values)};
}

// Only the activations needed to compute K and V.
template <class T, class Device>
Activations<T> allocate_key_value_activations(Device& dev, const Config& c, Index rows, Index ranks = 1) {
  auto matrix = [&](Index cols) { return allocate<T>(dev, rows, cols, Kind::chunk); };
  Activations<T> a;
  a.attention_input = matrix(c.hidden);
  if (c.qk_norm) a.k_projected = matrix(c.kv_width());
  if (ranks > 1) a.keys_values.k = matrix(c.kv_width()), a.keys_values.v = matrix(c.kv_width());
  return a;
}

// Attention's outputs for the heads of one of `ranks` ranks.
template <class T, class Device>
HeadActivations<T> allocate_attention(Device& dev, const Config& c, Index rows, Index ranks, Kind kind) {
  const auto attended = allocate<T>(dev, rows, c.q_width() / ranks, kind);
  return {{}, attended, allocate<Accumulator<T>>(dev, rows, c.heads / ranks, kind)};
}

// kept: attention's outputs, if they are kept elsewhere
template <class T, class Device>
Activations<T> allocate_activations(Device& dev, const Config& c, const DividedRows& rows, Index ranks = 1,
                                    const HeadActivations<T>& kept = {}) {
  auto matrix = [&](Index cols) { return allocate<T>(dev, rows.own.size(), cols, Kind::chunk); };
  Activations<T> a = allocate_key_value_activations<T>(dev, c, rows.own.size(), ranks);
  if (c.qk_norm) a.q_projected = matrix(c.q_width());
  a.q = matrix(c.q_width());
  a.heads = kept.lse.cols > 0 ? kept : allocate_attention<T>(dev, c, rows.all.size(), ranks, Kind::chunk);
  a.heads.q = ranks == 1 ? a.q : allocate<T>(dev, rows.all.size(), c.q_width() / ranks, Kind::chunk);
  a.attended = ranks == 1 ? a.heads.attended : matrix(c.q_width());
  if (c.post_norms) a.attention_output = matrix(c.hidden), a.mlp_output = matrix(c.hidden);
  a.middle = matrix(c.hidden);
  a.mlp_input = matrix(c.hidden);
  if (c.gated()) a.gate = matrix(c.mlp);
  a.up = matrix(c.mlp);
  a.activated = matrix(c.mlp);
  return a;
}

}  // namespace streambp
