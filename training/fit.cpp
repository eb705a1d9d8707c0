#include "training/fit.h"

#include <cmath>

#include "model/activations.h"

namespace streambp {

namespace {

double bytes(const Usage& usage, std::initializer_list<Kind> kinds) {
  double sum = 0;
  for (Kind kind : kinds) sum += usage.far_traffic[static_cast<std::size_t>(kind)];
  return sum;
}

// A part of one layer that can be kept.
struct Item {
  Index layer;
  Part part;
  double seconds_per_byte;  // that keeping it saves
};

// The bytes of a row of a part, kept for backward.
double bytes_per_row(const StepSettings& s, Part wanted) {
  return with_types(s, [&]<class T, class G>() {
    double bytes = 0;
    if (wanted == Part::keys_values) bytes = static_cast<double>(2 * s.config.kv_width()) * sizeof(T);
    Activations<T> a;
    for_each_activation(s.config, 1, a, [&]<class M>(Part part, Matrix<M>&, Index columns, View) {
      if (part == wanted) bytes += static_cast<double>(columns) * sizeof(M);
    });
    return bytes;
  });
}

// The parts of all layers, those first that save the most time for their bytes. Layers with the same kind of attention are
// alike, so a model of one layer is planned for each. Of equal layers, the last one comes first: backward begins with it,
// and its memory is free again when gradients need it.
std::vector<Item> items(const StepSettings& s, Index rows, Index chunk, const Rates& rates) {
  const Config& c = s.config;
  std::vector<Item> result;
  for (const bool local : {false, true}) {
    StepSettings one = s;
    one.optimizer = OptimizerKind::none, one.micro_batches = s.ranks.streams(), one.places = {};
    one.config.layers = 1, one.config.trained.reset(), one.config.without_rope.clear();
    one.config.local = {local};
    const auto seconds = [&](const KeptSets& kept) {
      one.kept = kept;
      return predict(plan(one, rows, schedule_for(Mode::stream, one, rows, chunk)), rates).compute;
    };
    std::vector<Index> layers;
    for (Index layer = c.layers; layer-- > lowest_trained_layer(c);)
      if (c.is_local(layer) == local) layers.push_back(layer);
    if (layers.empty()) continue;
    const double nothing = seconds(KeptParts::inputs());
    for (std::size_t i = 1; i < kParts; ++i) {
      const auto part = static_cast<Part>(i);
      const double bytes = bytes_per_row(s, part) * static_cast<double>(rows);
      if (bytes == 0) continue;
      const double saved = nothing - seconds(KeptParts::inputs().with(part));
      for (const Index layer : layers) result.push_back({layer, part, saved / bytes});
    }
  }
  std::ranges::stable_sort(result, std::greater(), &Item::seconds_per_byte);
  return result;
}

// Parts that are kept: near ones, then far ones.
KeptSets kept(const StepSettings& s, const std::vector<Item>& items, std::size_t near, std::size_t far) {
  KeptSets result = s.kept;
  std::size_t i = 0;
  for (const auto& [layer, part, density] : items) {
    if (density <= 0) break;
    if (i >= near && part == Part::keys_values) continue;
    if (i >= near + far) break;
    result = result.with(layer, s.config.layers, part, i++ < near ? Place::near : Place::far);
  }
  return result;
}

}  // namespace

Seconds predict(const Usage& usage, const Rates& rates) {
  return {
      usage.matmul_flops / (kEfficiency * rates.matmul) + usage.attention_flops / rates.attention +
          usage.moved / (kCopyEfficiency * rates.memory),
      bytes(usage, {Kind::saved, Kind::kept, Kind::weights}) / rates.far,
      bytes(usage, {Kind::gradients}) / rates.far + bytes(usage, {Kind::optimizer}) / (rates.far * rates.far_streams),
      usage.sent / rates.link};
}
Fit fit(const StepSettings& s, Mode mode, Index rows, const Allowed& allowed, const Rates& rates) {
  const auto& [range, budget, places, choice] = allowed;
  std::vector<Index> chunks = {std::max(range.most, s.tile)};
  if (mode == Mode::stream && range.least < range.most) {
    chunks.clear();
    for (Index chunk = std::min({range.most, default_chunk(s), round_up(rows, s.tile)}); chunk >= s.tile; chunk /= 2)
      chunks.push_back(chunk / s.tile * s.tile);
  }
  Fit best;
  double least = INFINITY;
  for (const Index chunk : chunks) {
    std::vector<Item> all;
    if (mode == Mode::stream && !choice.exactly) all = items(s, rows, chunk, rates);
    for (const Places& p : places) {
      StepSettings with = s;
      with.places = p, with.kept = choice.exactly.value_or(KeptParts::inputs());
      const auto usage = [&](std::size_t near, std::size_t far) {
        StepSettings richer = with;
        richer.kept = kept(with, all, near, far);
        return plan(richer, rows, schedule_for(mode, richer, rows, chunk));
      };
      if (!usage(0, 0).fits(budget)) continue;
      const auto most = [&](Index limit, auto&& good) {
        return static_cast<std::size_t>(good(limit) ? limit : largest(limit, good));
      };
      const auto n = static_cast<Index>(all.size());
      const std::size_t near = most(n, [&](Index count) { return usage(count, 0).fits(budget); });
      const std::size_t far = !choice.far ? 0 : most(n - near, [&](Index count) {
        const Usage u = usage(near, count);
        return u.fits(budget) && predict(u, rates).beside <= predict(u, rates).compute;
      });
      const double time = predict(usage(near, far), rates).total();
      if (time < least) best = {chunk, p, kept(with, all, near, far)}, least = time;
    }
  }
  return best;
}

}  // namespace streambp
