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

// Of the matrices of a part, to the alignment of memory.
constexpr double kRounding = 4 << 10;

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
      const Item item = {0, part, bytes_of(s, rows, part) + kRounding, plain - seconds(KeptSets().with(part))};
      for (const Index layer : layers)
        if (item.bytes > kRounding && item.seconds > 0) result.push_back({layer, part, item.bytes, item.seconds});
    }
  }
  std::ranges::stable_sort(result, std::greater(), &Item::value);
  return result;
}

// A step that keeps some of the items.
class KeptItems {
 public:
  KeptItems(const StepSettings& s, Mode mode, Index rows, Index chunk, const std::vector<Item>& items)
      : s_(s), mode_(mode), rows_(rows), chunk_(chunk), items_(items), usage_(planned()) {
    // Of several blocks, one at a time keeps them.
    if (s.block > 0 && s.block < rows)
      for (Item& item : items_) item.bytes *= static_cast<double>(s.block) / static_cast<double>(rows);
  }

  const Usage& usage() const { return usage_; }
  const KeptSets& sets() const { return s_.kept; }

  // A lower bound of the predicted time, whatever is kept.
  double floor(const Rates& rates) const {
    Seconds seconds = predict(usage_, rates);
    for (const Item& item : items_) seconds.compute -= item.seconds;
    return seconds.total();
  }

  // All, or as many as fit, in their order, and then those that fit into what is left. So more memory is never worse.
  void keep_near(const Capacity& budget) {
    const StepSettings plain = s_;
    for (std::size_t i = 0; i < items_.size(); ++i) keep(i, Place::near);
    if (const Usage all = planned(); all.fits(budget)) {
      usage_ = all;
      return;
    }
    s_ = plain;
    std::size_t next = 0;
    for (double left = left_near(budget); next < items_.size() && items_[next].bytes <= left;
         left = left_near(budget)) {
      for (; next < items_.size() && items_[next].bytes <= left; ++next)
        left -= items_[next].bytes, keep(next, Place::near);
      usage_ = planned();  // their peaks differ from the sum
    }
    double left = left_near(budget);
    for (; next < items_.size(); ++next) {
      if (items_[next].bytes > left)
        others_.push_back(next);
      else
        left -= items_[next].bytes, keep(next, Place::near);
    }
    usage_ = planned();
  }

  // As many of the others as fit and arrive while the step computes.
  void keep_far(const Capacity& budget, const Rates& rates) {
    const StepSettings before = s_;
    Seconds seconds = predict(usage_, rates);
    auto left = static_cast<double>(budget.far - usage_.far);
    for (const std::size_t i : others_) {
      const Item& item = items_[i];
      const double copied = 2 * item.bytes * static_cast<double>(s_.micro_batches / s_.ranks.streams()) / rates.far;
      seconds.beside += copied, seconds.compute -= item.seconds, left -= item.bytes;
      if (left < 0 || seconds.beside > seconds.compute) break;
      if (item.part != Part::keys_values) keep(i, Place::far);
    }
    const Usage usage = planned();
    if (usage.fits(budget))
      usage_ = usage;
    else
      s_ = before;
  }

 private:
  double left_near(const Capacity& budget) const { return static_cast<double>(budget.near - usage_.peak); }
  void keep(std::size_t item, Place place) {
    s_.kept = s_.kept.with(items_[item].layer, s_.config.layers, items_[item].part, place);
  }
  Usage planned() const { return plan(s_, rows_, schedule_for(mode_, s_, rows_, chunk_)); }

  StepSettings s_;
  const Mode mode_;
  const Index rows_, chunk_;
  std::vector<Item> items_;
  Usage usage_;
  std::vector<std::size_t> others_;  // that are not near
};

// The default chunk, and halves of it.
std::vector<Index> chunks_to_try(const StepSettings& s, Mode mode, Index rows, const ChunkRange& range) {
  if (mode != Mode::stream || range.least == range.most) return {std::max(range.most, s.tile)};
  std::vector<Index> chunks;
  for (Index chunk = std::min({range.most, default_chunk(s), round_up(rows, s.tile)}); chunk >= s.tile; chunk /= 2)
    chunks.push_back(chunk / s.tile * s.tile);
  return chunks;
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
std::vector<Index> blocks_to_try(Mode mode, Index rows, Index chunk, const std::optional<Index>& only) {
  if (only || mode != Mode::stream) return {only.value_or(0)};
  std::vector<Index> blocks = {0};
  for (Index size = chunk; 2 * size < rows; size *= 4) blocks.push_back(size);
  return blocks;
}

Fit fit(const StepSettings& s, Mode mode, Index rows, const Allowed& allowed, const Rates& rates) {
  const auto& [range, budget, places, choice, only] = allowed;
  Fit best;
  double least = INFINITY;
  for (const Index chunk : chunks_to_try(s, mode, rows, range)) {
    std::vector<Item> all;
    if (mode == Mode::stream && !choice.exactly) all = items(s, rows, chunk, rates);
    std::size_t peak = 0;  // of a step without blocks
    for (const Index block : blocks_to_try(mode, rows, chunk, only)) {
      StepSettings in_blocks = s;
      in_blocks.block = block;
      const std::size_t of_block = plan(in_blocks, rows, schedule_for(mode, in_blocks, rows, chunk)).peak;
      if (block == 0) peak = of_block;
      if (block > 0 && !only && of_block >= peak) continue;
      for (const Places& p : places) {
        if (block > 0 && p.inputs == Place::far && places.size() > 1) continue;  // a block has few inputs
        StepSettings with = s;
        with.places = p, with.kept = choice.exactly.value_or(KeptSets()), with.block = block;
        KeptItems kept(with, mode, rows, chunk, all);
        if (!kept.usage().fits(budget) || kept.floor(rates) >= least) continue;
        kept.keep_near(budget);
        if (choice.far) kept.keep_far(budget, rates);
        const double time = predict(kept.usage(), rates).total();
        if (time < least) best = {chunk, p, kept.sets(), block}, least = time;
      }
    }
  }
  return best;
}

std::vector<Point> fastest_by_memory(const StepSettings& s, Index rows, Allowed allowed, const Rates& rates,
                                     int steps) {
  const auto usage = [&](const Fit& found) {
    StepSettings with = s;
    with.places = found.places, with.kept = found.kept, with.block = found.block;
    return plan(with, rows, schedule_for(Mode::stream, with, rows, found.chunk));
  };
  std::size_t least = Plan::kUnlimited;
  for (const Index block : blocks_to_try(Mode::stream, rows, s.tile, allowed.block)) {
    const Fit plain = {s.tile, allowed.places.front(), allowed.kept.exactly.value_or(KeptSets()), block};
    least = std::min(least, usage(plain).peak);
  }
  std::vector<Point> points;
  allowed.budget = Plan::kUnlimited;
  const std::size_t most = usage(fit(s, Mode::stream, rows, allowed, rates)).peak;
  for (int i = 0; i <= steps; ++i) {
    const double share = static_cast<double>(i) / steps, ratio = static_cast<double>(most) / static_cast<double>(least);
    allowed.budget = i == steps ? most : static_cast<std::size_t>(static_cast<double>(least) * std::pow(ratio, share));
    const Fit found = fit(s, Mode::stream, rows, allowed, rates);
    const Usage used = usage(found);
    if (found.chunk > 0 && (points.empty() || used.peak > points.back().usage.peak)) points.push_back({found, used});
  }
  return points;
}

}  // namespace streambp
