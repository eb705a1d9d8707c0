// The activations of one layer for one chunk of rows.
#pragma once

#include "model/feed_forward.h"
#include "model/softmax_attention.h"

namespace streambp {

// In the order in which forward computes them, with a row for each of this rank's rows of the chunk.
template <class T>
struct Activations {
  Matrix<T> mixer_input;  // norm(x), or x
  AttentionActivations<T> mixer;
  Matrix<T> mixer_output;        // only with post-norms: the mixer's branch before its norm
  Matrix<T> middle;              // x + the mixer's branch
  Matrix<T> feed_forward_input;  // norm(middle), or middle
  FeedForwardActivations<T> feed_forward;
  Matrix<T> feed_forward_output;  // only with post-norms
};

// Only the activations that K and V are computed from.
template <class T, class Device>
Activations<T> allocate_key_value_activations(Device& dev, const Config& c, Index rows) {
  auto matrix = [&](Index cols) { return allocate<T>(dev, rows, cols, Kind::chunk); };
  Activations<T> a;
  a.mixer_input = matrix(c.hidden);
  if (c.has_qk_norm()) a.mixer.k_projected = matrix(c.kv_width());
  return a;
}

// kept: attention's outputs, if they are kept elsewhere
template <class T, class Device>
Activations<T> allocate_activations(Device& dev, const Config& c, const DividedRows& rows, const Group& ranks = {},
                                    const AttentionOutput<T>& kept = {}) {
  auto matrix = [&](Index cols) { return allocate<T>(dev, rows.own.size(), cols, Kind::chunk); };
  HeadExchange exchange(dev, ranks);
  Activations<T> a = allocate_key_value_activations<T>(dev, c, rows.own.size());
  AttentionActivations<T>& m = a.mixer;
  if (c.has_qk_norm()) m.q_projected = matrix(c.q_width());
  m.q = exchange.with_heads(matrix(c.q_width()), rows.all.size());
  const bool is_kept = static_cast<bool>(kept.lse);
  m.attended = exchange.with_rows(
      is_kept ? kept.attended : allocate<T>(dev, rows.all.size(), exchange.share(c.q_width()), Kind::chunk),
      rows.own.size());
  m.lse = is_kept ? kept.lse : allocate<Accumulator<T>>(dev, rows.all.size(), exchange.share(c.heads), Kind::chunk);
  if (c.post_norms) a.mixer_output = matrix(c.hidden), a.feed_forward_output = matrix(c.hidden);
  a.middle = matrix(c.hidden);
  a.feed_forward_input = matrix(c.hidden);
  if (c.gated()) a.feed_forward.gate = matrix(c.mlp);
  a.feed_forward.up = matrix(c.mlp);
  a.feed_forward.activated = matrix(c.mlp);
  return a;
}

}  // namespace streambp
