// The activations of one layer for one chunk of rows.
#pragma once

#include "model/any_feed_forward.h"
#include "model/mixer.h"

namespace streambp {

// In the order in which forward computes them, with a row for each of this rank's rows of the chunk.
template <class T>
struct Activations {
  Matrix<T> mixer_input;  // norm(x), or x
  MixerActivations<T> mixer;
  Matrix<T> mixer_output;        // only with post-norms: the mixer's branch before its norm
  Matrix<T> middle;              // x + the mixer's branch
  Matrix<T> feed_forward_input;  // norm(middle), or middle
  FeedForwardActivations<T> feed_forward;
  Matrix<T> feed_forward_output;  // only with post-norms
};

// The matrices of a chunk's activations in a layer, by part. Calls f(part, matrix, columns, view).
template <class T, class F>
void for_each_activation(const Config& c, Index layer, Index ranks, Activations<T>& a, F&& f) {
  using enum Part;
  const auto own = [&](Part part, Matrix<T>& matrix, Index columns) { f(part, matrix, columns, View::own_rows); };
  own(normed, a.mixer_input, c.hidden);
  with_mixer(c, layer, [&](auto mixer) { mixer.for_each_activation(c, ranks, mixer.of(a.mixer), f); });
  const bool norm_follows = c.has_post_norms(layer);
  if (norm_follows) own(mixer_output, a.mixer_output, c.hidden);
  own(norm_follows ? normed : mixer_output, a.middle, c.hidden);
  own(normed, a.feed_forward_input, c.hidden);
  with_feed_forward(c, layer, [&](auto kind) { kind.for_each_activation(c, kind.of(a.feed_forward), f); });
  if (norm_follows) own(feed_forward_output, a.feed_forward_output, c.hidden);
}

// Whether a model's layers have this part.
inline bool has(const Config& c, Part wanted) {
  bool found = wanted == Part::keys_values;
  Activations<float> a;
  for (Index l = 0; l < c.layers; ++l)
    for_each_activation(c, l, 1, a, [&](Part part, auto&, Index, View) { found |= part == wanted; });
  return found;
}

// Memory for the activations of a chunk, but for those that are kept elsewhere.
template <class T, class Device>
Activations<T> allocate_activations(Device& dev, const Config& c, Index layer, const DividedRows& rows,
                                    const Group& ranks = {}, const Activations<T>& kept = {}) {
  Activations<T> a = kept;
  for_each_activation(c, layer, ranks.size, a, [&]<class M>(Part, Matrix<M>& matrix, Index columns, View view) {
    const Index n = view == View::own_rows ? rows.own.size() : rows.all.size();
    if (!matrix) matrix = allocate<M>(dev, n, columns, Kind::chunk);
  });
  with_mixer(c, layer, [&](auto mixer) { mixer.complete(dev, ranks, mixer.of(a.mixer), c, rows.own.size()); });
  with_feed_forward(c, layer, [&](auto kind) { kind.complete(dev, kind.of(a.feed_forward), c, rows.own.size()); });
  return a;
}

}  // namespace streambp
