// The mixer is the only branch of a layer that mixes rows. It has a causal summary: what a row needs of the rows before it.
//
//   summarise    writes the summary of some rows
//   forward      of a chunk; reads the summary of earlier rows and writes that of its own
//   recompute    repeats forward as far as backward needs it; the summary exists already
//   output       back at the width of the residual stream
//   backward     of a chunk, once all later chunks of the layer are done; adds to the gradient of the summary of its own rows
//                and of earlier ones
//   decode       in generation: the summary of each sequence is in a cache
//
// The concept Mixer says this in code. A new mixer is a file with two classes like those of model/softmax_attention.h (a
// description, and what computes), a value of MixerKind, and a line in each of with_mixer, MixerActivations and LayerMixer;
// if its summary has matrices of other shapes, a field of Summary. docs/contributing.md lists all places.
#pragma once

#include <concepts>
#include <numeric>
#include <variant>

#include "model/delta_rule.h"
#include "model/short_convolution.h"
#include "model/softmax_attention.h"

namespace streambp {

// Calls f with the description of a layer's mixer.
template <class F>
auto with_mixer(const Config& c, Index layer, F&& f) {
  if (c.mixer(layer) == MixerKind::delta_rule) return f(DeltaRule());
  if (c.mixer(layer) == MixerKind::convolution) return f(Convolution());
  return f(Attention{c.attention(layer), c.has_values(layer)});
}

inline SummaryShape summary_shape(const Config& c, Index layer) {
  return with_mixer(c, layer, [&](auto mixer) { return mixer.summary(c); });
}

// In generation: the summary of a sequence.
inline SummaryShape cache_shape(const Config& c, Index layer) {
  return with_mixer(c, layer, [&](auto mixer) { return mixer.cache(c); });
}

// Numbers of ranks that divide this number can share a stream; all can, if it is 0.
inline Index sequence_divisor(const Config& c) {
  Index divisor = 0;
  for (Index layer = 0; layer < c.layers; ++layer)
    divisor = std::gcd(divisor, with_mixer(c, layer, [&](auto mixer) { return mixer.divisor(c); }));
  return divisor;
}

// The activations of a layer's mixer; those of the others are empty.
template <class T>
struct MixerActivations {
  AttentionActivations<T> attention;
  ConvolutionActivations<T> convolution;
  DeltaActivations<T> delta;
};

struct ForEachMatrix {
  void operator()(Part, auto&, Index /*columns*/, View) const {}
};

template <class M, class T, class A = Accumulator<T>>
concept Mixer = requires(M m, typename M::Activations& a, const typename M::Chunk& chunk, const StreamRows& at,
                         const KeptParts& kept, Matrix<T> x, const Summary<T>& past, const Summary<A>& dpast,
                         const Layer<A>& g, const SequenceRows& rows, const Config& c, Section<T>& table, Layer<T>& w,
                         MixerActivations<T>& all, const typename M::Description& layer) {
  { layer.summary(c) } -> std::same_as<SummaryShape>;
  { layer.cache(c) } -> std::same_as<SummaryShape>;
  { layer.divisor(c) } -> std::same_as<Index>;
  layer.parameters(table, w);
  { M::Description::of(all) } -> std::same_as<typename M::Activations&>;
  layer.for_each_activation(c, Index(), a, ForEachMatrix());
  m.summarise(at, x, past);
  m.forward(chunk);
  m.recompute(chunk, kept);
  m.output(x, a, Input<T>());
  {
    m.backward(g, x, dpast, chunk)
    } -> std::same_as<Matrix<T>>;  // from the gradient of the output to that of the input
  m.decode(a, x, past, rows);
};

template <class Device, class T>
class LayerMixer {
 public:
  using A = Accumulator<T>;
  using Activations = MixerActivations<T>;
  using Chunk = MixerChunk<T, Activations>;

  LayerMixer(Device& dev, const Config& c, const Frequencies& frequencies, Index layer, const Layer<T>& weights,
             const Group& sequence)
      : mixer_(make(dev, c, frequencies, layer, weights, sequence)) {}

  void summarise(const StreamRows& at, Matrix<T> x, const Summary<T>& past) {
    std::visit([&](auto& m) { m.summarise(at, x, past); }, mixer_);
  }
  void forward(const Chunk& chunk) {
    std::visit([&](auto& m) { m.forward(of(m, chunk)); }, mixer_);
  }
  void recompute(const Chunk& chunk, const KeptParts& kept) {
    std::visit([&](auto& m) { m.recompute(of(m, chunk), kept); }, mixer_);
  }
  void output(Matrix<T> y, const Activations& a, Input<T> residual = {}) {
    std::visit([&](auto& m) { m.output(y, of(m, a), residual); }, mixer_);
  }
  Matrix<T> backward(const Layer<A>& g, Matrix<T> dy, const Summary<A>& dpast, const Chunk& chunk) {
    return std::visit([&](auto& m) { return m.backward(g, dy, dpast, of(m, chunk)); }, mixer_);
  }
  void decode(const Activations& a, Matrix<T> x, const Summary<T>& cache, const SequenceRows& rows) {
    std::visit([&](auto& m) { m.decode(of(m, a), x, cache, rows); }, mixer_);
  }

 private:
  using Any = std::variant<SoftmaxAttention<Device, T>, ShortConvolution<Device, T>, GatedDeltaRule<Device, T>>;

  static Any make(Device& dev, const Config& c, const Frequencies& frequencies, Index layer, const Layer<T>& weights,
                  const Group& sequence) {
    if (c.mixer(layer) == MixerKind::convolution) return ShortConvolution<Device, T>(dev, c, weights, sequence);
    if (c.mixer(layer) == MixerKind::delta_rule) return GatedDeltaRule<Device, T>(dev, c, weights, sequence);
    return SoftmaxAttention<Device, T>(dev, c, frequencies, layer, weights, sequence);
  }
  template <Mixer<T> M>
  static const typename M::Activations& of(const M&, const Activations& a) {
    return M::Description::of(a);
  }
  template <Mixer<T> M>
  static typename M::Chunk of(const M&, const Chunk& chunk) {
    return {chunk.at, chunk.x, chunk.past, M::Description::of(chunk.a)};
  }

  Any mixer_;
};

}  // namespace streambp
