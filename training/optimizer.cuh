// The optimizer: AdamW, the learning-rate schedule, and clipping by the global norm.
#pragma once

#include <cmath>

#include "kernels/adamw.cuh"
#include "kernels/elementwise.cuh"
#include "model/parameters.cuh"

namespace streambp {

// adamw_pure: moments in the type of the weights, no master weights
enum class OptimizerKind { none, adamw, adamw_pure };

struct OptimizerSettings {
  double rate = 3e-4, final_rate_fraction = 0.1;
  Index warmup = 0, steps = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  double clip = 1;  // largest global gradient norm; 0: no limit
};

// Linear warm-up from zero, then a cosine down to the final fraction. Steps count from one.
inline double learning_rate(const OptimizerSettings& s, Index step) {
  const auto t = static_cast<double>(step), warmup = static_cast<double>(s.warmup),
             total = static_cast<double>(s.steps);
  if (t <= warmup) return s.rate * t / warmup;
  const double progress = total > warmup ? std::min(1.0, (t - warmup) / (total - warmup)) : 1;
  const double cosine = 0.5 * (1 + std::cos(3.141592653589793 * progress));
  return s.rate * (s.final_rate_fraction + (1 - s.final_rate_fraction) * cosine);
}

// M: the type of the moments. With `master`, updates go to a float32 copy of the weights.
template <class T, class M>
struct Optimizer {
  Tensors<M> m, v;
  Tensors<float> master;

  explicit Optimizer(const Config& c) : m(c), v(c), master(c) {}

  template <class Device>
  void allocate(Device& dev, const Config& c, bool with_master) {
    streambp::allocate(dev, table(c, m), Kind::optimizer);
    streambp::allocate(dev, table(c, v), Kind::optimizer);
    if (with_master) streambp::allocate(dev, table(c, master), Kind::optimizer);
  }

  // Before the first update: zero the moments, copy the weights to the master weights.
  template <class Device>
  void start(Device& dev, Model<T>& model) {
    const auto weights = table(model.config, model.weights);
    const auto ms = table(model.config, m), vs = table(model.config, v);
    const auto masters = table(model.config, master);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (*ms[i].matrix) zero(dev, *ms[i].matrix);
      if (*vs[i].matrix) zero(dev, *vs[i].matrix);
      if (*masters[i].matrix) convert(dev, *masters[i].matrix, *weights[i].matrix);
    }
  }

  // One update. Weight decay applies to matrices only, not to norms and biases.
  template <class Device, class G>
  void update(Device& dev, Model<T>& model, Tensors<G>& gradient, AdamW settings) {
    const Config& c = model.config;
    const auto w = table(c, model.weights);
    const auto g = table(c, gradient);
    const auto ms = table(c, m), vs = table(c, v);
    const auto masters = table(c, master);
    const double decay = settings.decay;
    for (std::size_t i = 0; i < w.size(); ++i) {
      settings.decay = w[i].parameter.vector() ? 0 : decay;
      settings.parameter = i;
      adamw(dev, *w[i].matrix, *g[i].matrix, AdamWState<M>{*masters[i].matrix, *ms[i].matrix, *vs[i].matrix}, settings);
    }
  }
};

// sqrt(Σ g²) over all parameters
template <class Device, class G>
double global_norm(Device& dev, const Config& c, Tensors<G>& gradient) {
  const auto entries = table(c, gradient);
  auto scope = dev.scope();
  const auto sums = allocate<double>(dev, static_cast<Index>(entries.size()), kSquareSums, Kind::sums);
  Index i = 0;
  for (const Entry<G>& e : entries) {
    sum_of_squares(dev, sums.slice({i, i + 1}), *e.matrix);
    ++i;
  }
  double sum = 0;
  for (double part : to_host(dev, sums)) sum += part;
  return std::sqrt(sum);
}

}  // namespace streambp
