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
  double bytes, seconds;  // that it takes, and that it saves
  double value() const { return seconds / bytes; }
};

// What this rank keeps of a part in one layer.
double bytes_of(const StepSettings& s, Index rows, Part wanted) {
  return with_types(s, [&]<class T, class G>() {
    double bytes = wanted == Part::keys_values ? static_cast<double>(2 * s.config.kv_width()) * sizeof(T) : 0;
    Activations<T> a;
    for_each_activation(s.config, 1, a, [&]<class M>(Part part, Matrix<M>&, Index columns, View) {
      if (part == wanted) bytes += static_cast<double>(columns) * sizeof(M);
    });
    return bytes * static_cast<double>(rows / s.ranks.sequence.size);
  });
}

// The parts of all layers, those first that save the most time for their bytes. Layers with the same kind of attention are
// alike, so a model of one layer is planned for each. Of equal layers, the last one comes first: backward begins with it,
// and its memory is free again when gradients need it.
std::vector<Item> items(const StepSettings& s, Index rows, Index chunk, const Rates& rates) {
  const Config& c = s.config;
  std::vector<Item> result;
  for (const bool local : {false, true}) {
    std::vector<Index> layers;
    for (Index layer = c.layers; layer-- > lowest_trained_layer(c);)
      if (c.is_local(layer) == local) layers.push_back(layer);
    if (layers.empty()) continue;
    StepSettings one = s;
    one.optimizer = OptimizerKind::none, one.micro_batches = s.ranks.streams(), one.places = {};
    one.config.layers = 1, one.config.trained.reset(), one.config.without_rope.clear(), one.config.local = {local};
    const auto seconds = [&](const KeptSets& kept) {
      one.kept = kept;
      return predict(plan(one, rows, schedule_for(Mode::stream, one, rows, chunk)), rates).compute;
    };
    const double plain = seconds({});
    for (std::size_t i = 1; i < kParts; ++i) {
      const auto part = static_cast<Part>(i);
      const Item item = {0, part, bytes_of(s, rows, part), plain - seconds(KeptSets().with(part))};
      for (const Index layer : layers)
        if (item.bytes > 0 && item.seconds > 0) result.push_back({layer, part, item.bytes, item.seconds});
    }
  }
  std::ranges::stable_sort(result, std::greater(), &Item::value);
  return result;
}

// A step that keeps some of the items.
class KeptItems {
 public:
  KeptItems(const StepSettings& s, Mode mode, Index rows, Index chunk, const std::vector<Item>& items)
      : s_(s), mode_(mode), rows_(rows), chunk_(chunk), items_(items), places_(items.size(), Place::nowhere) {}

  // As many as fit, in their order; then those that fit into what is left. So more memory is never worse.
  void keep_near(const Capacity& budget) {
    const auto first = [&](Index count) {
      std::fill_n(places_.begin(), count, Place::near);
      std::fill(places_.begin() + count, places_.end(), Place::nowhere);
      return usage();
    };
    const auto n = static_cast<Index>(items_.size());
    const Index count = first(n).fits(budget) ? n : largest(n, [&](Index i) { return first(i).fits(budget); });
    auto left = static_cast<double>(budget.near - first(count).peak);
    for (std::size_t i = static_cast<std::size_t>(count); i < items_.size(); ++i) {
      const double bytes = items_[i].bytes + kRounding;
      if (bytes <= left) places_[i] = Place::near, left -= bytes;
    }
  }

  // As many of the others as fit and arrive while the step computes.
  void keep_far(const Capacity& budget, const Rates& rates) {
    std::vector<std::size_t> others;
    for (std::size_t i = 0; i < items_.size(); ++i)
      if (places_[i] == Place::nowhere && items_[i].part != Part::keys_values) others.push_back(i);
    const auto first = [&](Index count) {
      for (std::size_t i = 0; i < others.size(); ++i)
        places_[others[i]] = static_cast<Index>(i) < count ? Place::far : Place::nowhere;
      const Usage u = usage();
      return u.fits(budget) && predict(u, rates).beside <= predict(u, rates).compute;
    };
    first(largest(static_cast<Index>(others.size()), first));
  }

  KeptSets sets() const {
    KeptSets result = s_.kept;
    for (std::size_t i = 0; i < items_.size(); ++i)
      if (places_[i] != Place::nowhere)
        result = result.with(items_[i].layer, s_.config.layers, items_[i].part, places_[i]);
    return result;
  }
  Usage usage() const {
    StepSettings s = s_;
    s.kept = sets();
    return plan(s, rows_, schedule_for(mode_, s, rows_, chunk_));
  }

 private:
  static constexpr double kRounding = 4 << 10;  // of the matrices of an item, to the alignment of memory

  const StepSettings& s_;
  const Mode mode_;
  const Index rows_, chunk_;
  const std::vector<Item>& items_;
  std::vector<Place> places_;  // of each item
};

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
      with.places = p, with.kept = choice.exactly.value_or(KeptSets());
      KeptItems kept(with, mode, rows, chunk, all);
      if (!kept.usage().fits(budget)) continue;
      kept.keep_near(budget);
      if (choice.far) kept.keep_far(budget, rates);
      const double time = predict(kept.usage(), rates).total();
      if (time < least) best = {chunk, p, kept.sets()}, least = time;
    }
  }
  return best;
}

}  // namespace streambp
