#include "training/fit.h"

#include <bit>

#include "memory/summaries.h"

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
  double bytes, seconds;  // that it takes, about, and that it saves in a step
  double value() const { return seconds / bytes; }
};

// Of the summary of one layer on this rank, such as K and V, which always stays near.
double bytes_of_summary(const StepSettings& s, Index layer, Index rows) {
  return with_types(s, [&]<class T, class G>() {
    Plan dev;
    double bytes = 0;
    const SummaryShape shape = summary_shape(s.config, layer);
    for (const auto& m : allocate_summary<T>(dev, shape, rows, s.ranks.sequence.size).matrices())
      bytes += static_cast<double>(m.size() * sizeof(T));
    return bytes;
  });
}

// The parts of all layers, those first that save the most time for their bytes. Many layers are alike, so a model of one
// layer is planned for each kind. Among equal layers, later ones come first: backward begins with them, and their memory is
// free again when gradients need it.
std::vector<Item> items(const StepSettings& s, Index rows, Index chunk, const Rates& rates) {
  const Config& c = s.config;
  std::vector<std::pair<Config, std::vector<Index>>> kinds;
  for (Index layer = c.layers; layer-- > lowest_trained_layer(c);) {
    const Config only = c.only(layer);
    auto kind = std::ranges::find(kinds, only, [](const auto& k) { return k.first; });
    if (kind == kinds.end()) kind = kinds.insert(kind, {only, {}});
    kind->second.push_back(layer);
  }
  std::vector<Item> result;
  for (const auto& [config, layers] : kinds) {
    StepSettings one = s;
    one.optimizer = OptimizerKind::none, one.places = {};
    one.config = config, one.config.trained.reset();
    const auto with = [&](const KeptSets& kept) {
      one.kept = kept;
      return plan(one, rows, schedule_for(Mode::stream, one, rows, chunk));
    };
    const auto seconds_with = [&](const KeptSets& kept) {
      const Seconds seconds = predict(with(kept), rates);
      return seconds.compute + seconds.sent;
    };
    const double plain = seconds_with({});
    for (std::size_t i = 1; i < kParts; ++i) {
      const auto part = static_cast<Part>(i);
      const double seconds = plain - seconds_with(KeptSets().with(part)),
                   bytes = part == Part::keys_values ? bytes_of_summary(s, layers.front(), rows)
                                                     : static_cast<double>(with(KeptSets().with(part, Place::far)).far);
      for (const Index layer : layers)
        if (bytes > 0 && seconds > 0) result.push_back({layer, part, bytes, seconds});
    }
  }
  std::ranges::stable_sort(result, std::greater(), &Item::value);
  return result;
}

// The same in blocks of a stream: parts exist for one block at a time, and some K and V stay anyway.
std::vector<Item> in_blocks(std::vector<Item> items, const StepSettings& s, Index block, Index rows) {
  if (block == 0) return items;
  std::erase_if(items, [&](const Item& item) {
    return item.part == Part::keys_values && stays_in_blocks(s.config, item.layer, block * s.ranks.sequence.size);
  });
  for (Item& item : items) item.bytes *= static_cast<double>(block) / static_cast<double>(rows);
  return items;
}

// A step that keeps some of the items.
class KeptItems {
 public:
  KeptItems(const StepSettings& s, Mode mode, Index rows, Index chunk, const std::vector<Item>& items)
      : s_(s),
        mode_(mode),
        rows_(rows),
        chunk_(chunk),
        plain_(s.kept),
        items_(in_blocks(items, s, schedule_for(mode, s, rows, chunk).block, rows)) {
    places_.assign(items_.size(), Place::nowhere);
    update();
  }

  const Usage& usage() const { return usage_; }
  Fit fit() const { return {chunk_, s_.places, s_.kept, s_.block, usage_}; }

  // A lower bound of the predicted time, whatever is kept.
  double floor(const Rates& rates) const {
    double seconds = predict(usage_, rates).total();
    for (const Item& item : items_) seconds -= item.seconds;
    return seconds;
  }

  // As many as fit, in their order; then those that fit into what is left.
  void keep_near(const Capacity& budget) {
    if (items_.empty()) return;
    const Index all = std::ssize(items_);
    Index guess = 0;
    for (double left = left_near(budget); guess < all; ++guess)
      if ((left -= items_[static_cast<std::size_t>(guess)].bytes) < 0) break;
    const auto first = [&](Index count) {
      for (std::size_t i = 0; i < places_.size(); ++i)
        places_[i] = static_cast<Index>(i) < count ? Place::near : Place::nowhere;
      update();
      return usage_.fits(budget);
    };
    const Index most = largest(all, first, guess);
    if (most == all) return;
    first(most);
    const std::vector<Place> fitting = places_;
    double left = left_near(budget);
    for (std::size_t i = 0; i < places_.size(); ++i)
      if (places_[i] == Place::nowhere && items_[i].bytes <= left) places_[i] = Place::near, left -= items_[i].bytes;
    update();
    if (!usage_.fits(budget)) places_ = fitting, update();
  }

  // Those that are not near, as many as fit and arrive while the step computes. Chunks of them take near memory, too, so
  // the last near ones may have to leave.
  void keep_far(const Capacity& budget, const Rates& rates) {
    const std::vector<Place> before = places_;
    const Usage near = usage_;
    Seconds seconds = predict(near, rates);
    auto left = static_cast<double>(budget.far - near.far);
    const double copies = 2 * static_cast<double>(ceil_div(s_.micro_batches, s_.ranks.streams())) / rates.far;
    const auto try_far = [&](std::size_t i) {
      const Item& item = items_[i];
      const bool arrives = seconds.beside + copies * item.bytes <= seconds.compute - item.seconds;
      places_[i] = Place::nowhere;
      if (item.part == Part::keys_values || item.bytes > left || !arrives) return;
      seconds.beside += copies * item.bytes, seconds.compute -= item.seconds, left -= item.bytes;
      places_[i] = Place::far;
    };
    for (std::size_t i = 0; i < places_.size(); ++i)
      if (places_[i] == Place::nowhere) try_far(i);
    update();
    for (std::size_t i = places_.size(); i-- > 0 && !usage_.fits(budget);) {
      if (places_[i] != Place::near) continue;
      seconds.compute += items_[i].seconds;
      try_far(i);
      update();
    }
    if (!usage_.fits(budget) || predict(usage_, rates).total() > predict(near, rates).total())
      places_ = before, update();
  }

 private:
  double left_near(const Capacity& budget) const {
    return static_cast<double>(budget.near) - static_cast<double>(usage_.peak);
  }
  void update() {
    s_.kept = plain_;
    for (std::size_t i = 0; i < items_.size(); ++i)
      if (places_[i] != Place::nowhere)
        s_.kept = s_.kept.with(items_[i].layer, s_.config.layers, items_[i].part, places_[i]);
    usage_ = plan(s_, rows_, schedule_for(mode_, s_, rows_, chunk_));
  }

  StepSettings s_;
  const Mode mode_;
  const Index rows_, chunk_;
  const KeptSets plain_;
  const std::vector<Item> items_;
  std::vector<Place> places_;  // of each item
  Usage usage_;
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
  const bool inputs_may_be_near = std::ranges::any_of(places, [](const Places& p) { return p.inputs == Place::near; });
  Fit best;
  for (const Index chunk : chunks_to_try(s, mode, rows, range)) {
    std::vector<Item> all;
    if (mode == Mode::stream && !choice.only) all = items(s, rows, chunk, rates);
    std::size_t peak_of_layers = 0;  // of a step without blocks
    for (const Index block : blocks_to_try(mode, rows, chunk, only)) {
      StepSettings with = s;
      with.kept = choice.only.value_or(KeptSets()), with.block = block;
      const std::size_t peak = plan(with, rows, schedule_for(mode, with, rows, chunk)).peak;
      if (block == 0) peak_of_layers = peak;
      if (block > 0 && !only && peak >= peak_of_layers) continue;
      for (const Places& p : places) {
        if (block > 0 && p.inputs == Place::far && inputs_may_be_near) continue;  // a block has few inputs
        with.places = p;
        KeptItems kept(with, mode, rows, chunk, all);
        const double least = best.chunk > 0 ? predict(best.usage, rates).total() : INFINITY;
        if (!kept.usage().fits(budget) || kept.floor(rates) >= least) continue;
        kept.keep_near(budget);
        if (choice.far && block == 0) kept.keep_far(budget, rates);
        if (predict(kept.usage(), rates).total() < least) best = kept.fit();
      }
    }
  }
  return best;
}

Fit closest(const StepSettings& s, Mode mode, Index rows, const Allowed& allowed) {
  const Index chunk = allowed.chunks.least > 0 ? allowed.chunks.least : s.tile;
  StepSettings with = s;
  with.kept = allowed.kept.only.value_or(KeptSets());
  Fit least;
  for (const Places& places : allowed.places) {
    for (const Index block : blocks_to_try(mode, rows, chunk, allowed.block)) {
      if (block > 0 && !allowed.block && places.inputs == Place::far) continue;
      with.places = places, with.block = block;
      const Usage usage = plan(with, rows, schedule_for(mode, with, rows, chunk));
      if (least.chunk == 0 || usage.peak < least.usage.peak) least = {chunk, places, with.kept, block, usage};
    }
    if (least.usage.peak <= allowed.budget.near) break;
  }
  return least;
}

Longest longest_that_fits(const StepSettings& s, Mode mode, const Allowed& allowed) {
  const Index chunk = allowed.chunks.most;
  const auto usage = [&](const StepSettings& with, Index rows) {
    return plan(with, rows, schedule_for(mode, with, rows, chunk));
  };
  Longest best = {0, s};
  const auto improves = [&](const Places& places, Index block) {
    StepSettings with = s;
    with.places = places, with.block = block;
    if (best.rows > 0 && !usage(with, best.rows + kTile).fits(allowed.budget)) return false;
    const Index rows = longest_for_budget(with, mode, chunk, allowed.budget);
    return rows > best.rows && (best = {rows, with}, true);
  };
  // The places that need the least near memory come first: then few others have to be searched.
  for (std::size_t i = allowed.places.size(); i-- > 0;) improves(allowed.places[i], allowed.block.value_or(0));
  if (mode != Mode::stream || allowed.block || best.rows == 0) return best;
  for (const Places& places : allowed.places) {
    if (places.inputs == Place::far) continue;  // a block has few inputs
    const auto peak = [&](Index block) {
      StepSettings with = s;
      with.places = places, with.block = block;
      return usage(with, best.rows).peak;
    };
    // Large blocks keep many inputs, and many small ones keep many windows: the best is usually near 8 chunks.
    const auto smallest_block = [&]() -> Index {
      const auto chunks = static_cast<std::size_t>(std::clamp<Index>(best.rows / chunk / 8, 1, 8));
      const Index block = static_cast<Index>(std::bit_floor(chunks)) * chunk;
      if (peak(block) >= peak(0)) return 0;
      return std::ranges::min({std::max(chunk, block / 4), std::max(chunk, block / 2), block, 2 * block, 4 * block}, {},
                              peak);
    };
    for (Index block; (block = smallest_block()) > 0 && improves(places, block);) {
    }
  }
  return best;
}

std::vector<Fit> fastest_by_memory(const StepSettings& s, Index rows, Allowed allowed, const Rates& rates, int steps) {
  allowed.budget = Plan::kUnlimited;
  const auto least = static_cast<double>(closest(s, Mode::stream, rows, allowed).usage.peak),
             most = static_cast<double>(fit(s, Mode::stream, rows, allowed, rates).usage.peak);
  std::vector<Fit> points;
  for (int i = 0; i <= steps; ++i) {
    const double budget = i == steps ? most : least * std::pow(most / least, 1.0 * i / steps);
    allowed.budget = static_cast<std::size_t>(budget);
    const Fit found = fit(s, Mode::stream, rows, allowed, rates);
    if (found.chunk > 0 && (points.empty() || found.usage.peak > points.back().usage.peak)) points.push_back(found);
  }
  return points;
}

}  // namespace streambp
