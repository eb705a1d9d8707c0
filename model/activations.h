// The activations of one layer for one chunk of rows.
#pragma once

#include "memory/schedule.h"
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

// Which rows a matrix of a chunk has: this rank's, with all heads, or all rows, with this rank's heads.
enum class View { own_rows, all_rows };

// The matrices of a chunk's activations, by part. Calls f(part, matrix, columns, view).
template <class T, class F>
void for_each_activation(const Config& c, Index ranks, Activations<T>& a, F&& f) {
  using enum Part;
  AttentionActivations<T>& m = a.mixer;
  const auto own = [&](Part part, Matrix<T>& matrix, Index columns) { f(part, matrix, columns, View::own_rows); };
  own(normed, a.mixer_input, c.hidden);
  if (c.has_qk_norm()) own(queries, m.k_projected, c.kv_width()), own(queries, m.q_projected, c.q_width());
  f(c.has_qk_norm() ? normed : queries, m.q.heads, c.q_width() / ranks, View::all_rows);
  f(attention, m.attended.heads, c.q_width() / ranks, View::all_rows);
  f(attention, m.lse, c.heads / ranks, View::all_rows);
  if (c.post_norms) own(mixer_output, a.mixer_output, c.hidden);
  own(c.post_norms ? normed : mixer_output, a.middle, c.hidden);
  own(normed, a.feed_forward_input, c.hidden);
  if (c.gated()) own(gate_up, a.feed_forward.gate, c.mlp);
  own(gate_up, a.feed_forward.up, c.mlp);
  own(activated, a.feed_forward.activated, c.mlp);
  if (c.post_norms) own(feed_forward_output, a.feed_forward_output, c.hidden);
}

// Whether a model's layers have this part.
inline bool has(const Config& c, Part wanted) {
  bool found = wanted == Part::keys_values;
  Activations<float> a;
  for_each_activation(c, 1, a, [&](Part part, auto&, Index, View) { found |= part == wanted; });
  return found;
}

// Only the activations that K and V are computed from.
template <class T, class Device>
Activations<T> allocate_key_value_activations(Device& dev, const Config& c, Index rows) {
  Activations<T> a;
  a.mixer_input = allocate<T>(dev, rows, c.hidden, Kind::chunk);
  if (c.has_qk_norm()) a.mixer.k_projected = allocate<T>(dev, rows, c.kv_width(), Kind::chunk);
  return a;
}

// Memory for the activations of a chunk, but for those that are kept elsewhere.
template <class T, class Device>
Activations<T> allocate_activations(Device& dev, const Config& c, const DividedRows& rows, const Group& ranks = {},
                                    const Activations<T>& kept = {}) {
  Activations<T> a = kept;
  for_each_activation(c, ranks.size, a, [&]<class M>(Part, Matrix<M>& matrix, Index columns, View view) {
    const Index n = view == View::own_rows ? rows.own.size() : rows.all.size();
    if (!matrix) matrix = allocate<M>(dev, n, columns, Kind::chunk);
  });
  HeadExchange exchange(dev, ranks);
  for (Exchanged<T>* m : {&a.mixer.q, &a.mixer.attended}) *m = exchange.with_rows(m->heads, rows.own.size());
  return a;
}

}  // namespace streambp
