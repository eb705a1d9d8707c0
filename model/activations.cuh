// The activations of one layer for one chunk of rows.
#pragma once

#include "kernels/base/device.cuh"
#include "model/config.cuh"

namespace streambp {

// K and V of a layer, or their gradients: N x kv_width each.
template <class T>
struct KeysValues {
  Matrix<T> k, v;
  KeysValues slice(Rows rows) const { return {k.slice(rows), v.slice(rows)}; }
};

// Activations of a layer for C rows, in the order in which forward computes them. q is the width of all query heads.
template <class T>
struct Activations {
  Matrix<T> attention_input;   // C x hidden    norm(x)
  Matrix<T> k_projected;       // C x kv        K before its norm, only with qk_norm
  Matrix<T> q_projected;       // C x q         Q before its norm, only with qk_norm
  Matrix<T> q;                 // C x q         after RoPE
  Matrix<T> attended;          // C x q
  Matrix<Accumulator<T>> lse;  // C x heads     log Σ exp of the attention scores
  Matrix<T> attention_output;  // C x hidden    attended oᵀ, only with post-norms
  Matrix<T> mlp_output;        // C x hidden    activated downᵀ, only with post-norms
  Matrix<T> middle;            // C x hidden    x + attention
  Matrix<T> mlp_input;         // C x hidden    norm(middle)
  Matrix<T> gate, up;          // C x mlp       gate only in gated MLPs
  Matrix<T> activated;         // C x mlp       the input of the down projection
};

template <class T, class Device>
KeysValues<T> allocate_keys_values(Device& dev, const Config& c, Index rows) {
  const auto k = allocate<T>(dev, rows, c.kv_width(), Kind::keys_values);
  return {k, allocate<T>(dev, rows, c.kv_width(), Kind::keys_values)};
}

// Only the activations needed to compute K and V.
template <class T, class Device>
Activations<T> allocate_key_value_activations(Device& dev, const Config& c, Index rows) {
  Activations<T> a;
  a.attention_input = allocate<T>(dev, rows, c.hidden, Kind::chunk);
  if (c.qk_norm) a.k_projected = allocate<T>(dev, rows, c.kv_width(), Kind::chunk);
  return a;
}

template <class T, class Device>
Activations<T> allocate_activations(Device& dev, const Config& c, Index rows) {
  auto matrix = [&](Index cols) { return allocate<T>(dev, rows, cols, Kind::chunk); };
  Activations<T> a = allocate_key_value_activations<T>(dev, c, rows);
  if (c.qk_norm) a.q_projected = matrix(c.q_width());
  a.q = matrix(c.q_width());
  a.attended = matrix(c.q_width());
  a.lse = allocate<Accumulator<T>>(dev, rows, c.heads, Kind::chunk);
  if (c.post_norms) a.attention_output = matrix(c.hidden), a.mlp_output = matrix(c.hidden);
  a.middle = matrix(c.hidden);
  a.mlp_input = matrix(c.hidden);
  if (c.gated()) a.gate = matrix(c.mlp);
  a.up = matrix(c.mlp);
  a.activated = matrix(c.mlp);
  return a;
}

}  // namespace streambp
