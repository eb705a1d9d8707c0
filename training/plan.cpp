#include "training/plan.h"

#include "training/trainer.h"

namespace streambp {

template class Trainer<Plan, float>;

namespace {

Usage plan_step(const StepSettings& s, Index rows, const Schedule& schedule, Index micro_batches) {
  return with_types(s, [&]<class T, class G>() -> Usage {
    Plan dev(s.device, s.tile);
    Trainer<Plan, T, G> trainer(dev, s.config, rows, {s.optimizer, s.places}, s.objective, s.ranks);
    trainer.plan_step(micro_batches, schedule, s.optimizer, s.documents);
    Usage usage;
    usage.peak = dev.arena.peak(), usage.by_kind = dev.arena.peak_by_kind();
    usage.far = dev.far.peak(), usage.far_by_kind = dev.far.peak_by_kind(), usage.far_traffic = dev.far_traffic();
    for (const Work& work : dev.work()) usage.count(work);
    return usage;
  });
}

// All full rounds of micro-batches from the second on are alike. So two of them and the last, partial one are enough.
Index two_rounds(const StepSettings& s) {
  const Index streams = s.ranks.streams();
  return s.micro_batches <= 2 * streams ? s.micro_batches : 2 * streams + s.micro_batches % streams;
}

template <class T>
void plan(Plan& dev, const Model<T>& model, const GenerationShape& g) {
  if (g.slots > 0) Generator<Plan, T>(dev, model, g).plan();
}

}  // namespace

Usage plan(const StepSettings& s, Index rows, const Schedule& schedule) {
  Usage usage = plan_step(s, rows, schedule, two_rounds(s));
  if (const Index more = (s.micro_batches - two_rounds(s)) / s.ranks.streams(); more > 0) {
    const Usage next = plan_step(s, rows, schedule, two_rounds(s) + s.ranks.streams());
    const auto add = [&](double& sum, double of_next) { sum += static_cast<double>(more) * (of_next - sum); };
    for (double Usage::*of :
         {&Usage::flops, &Usage::matmul_flops, &Usage::attention_flops, &Usage::moved, &Usage::sent})
      add(usage.*of, next.*of);
    for (std::size_t kind = 0; kind < usage.far_traffic.size(); ++kind)
      add(usage.far_traffic[kind], next.far_traffic[kind]);
  }
  return usage;
}

double step_flops(StepSettings s, const std::vector<Batch>& batches, const Schedule& schedule) {
  double tokens = 0, pairs = 0;  // of each token and all tokens of its document
  for (const Batch& batch : batches) {
    for (const Rows& document : batch.documents()) {
      const auto n = static_cast<double>(document.size());
      tokens += n, pairs += n * n;
    }
  }
  const double rows = std::ceil(tokens / static_cast<double>(batches.size()));
  const auto flops = [&](Index documents) {
    s.documents = documents;
    return plan(s, static_cast<Index>(rows), schedule).flops;
  };
  // Attention's FLOPs are proportional to the pairs, and two documents in place of one halve these.
  const double one = flops(1), attention = 2 * (one - flops(2));
  return one - attention * (1 - pairs / (rows * tokens));
}

Capacity plan_run(const StepSettings& s, Index rows, const Schedule& schedule, const GenerationShape& generation) {
  return with_types(s, [&]<class T, class G>() -> Capacity {
    Plan dev(s.device, s.tile);
    Trainer<Plan, T, G> trainer(dev, s.config, rows, {s.optimizer, s.places}, s.objective, s.ranks);
    trainer.plan_step(two_rounds(s), schedule, s.optimizer);
    trainer.plan_evaluation(schedule);
    plan(dev, trainer.model, generation);
    return {dev.arena.peak(), dev.far.peak()};
  });
}

std::size_t plan_evaluation(const StepSettings& s, Index rows, const Schedule& schedule) {
  return with_types(s, [&]<class T, class G>() {
    Plan dev(s.device, s.tile);
    Trainer<Plan, T, G>(dev, s.config, rows, {OptimizerKind::none, s.places}, {}, s.ranks).plan_evaluation(schedule);
    return dev.arena.peak();
  });
}

std::size_t plan_generation(const StepSettings& s, const GenerationShape& generation) {
  return with_types(s, [&]<class T, class G>() {
    Plan dev(s.device, s.tile);
    Trainer<Plan, T, G> trainer(dev, s.config, 0, {OptimizerKind::none, s.places});
    plan(dev, trainer.model, generation);
    return dev.arena.peak();
  });
}

Index longest_for_budget(const StepSettings& s, Mode mode, Index chunk, const Capacity& budget) {
  // Ranks that share a stream have the same number of tiles each.
  const Index unit = s.ranks.sequence.size > 1 ? s.ranks.sequence.size * s.tile : kTile;
  struct Point {
    Index units;
    double over;  // bytes more than the budget
  };
  const auto point = [&](Index units) -> Point {
    const Index rows = units * unit;
    const Usage u = plan_step(s, rows, schedule_for(mode, s, rows, chunk), two_rounds(s));
    const auto over = [](std::size_t used, std::size_t allowed) {
      return static_cast<double>(used) - static_cast<double>(allowed);
    };
    return {units, std::max(over(u.peak, budget.near), u.far > 0 ? over(u.far, budget.far) : -INFINITY)};
  };
  // Memory is nearly linear in the length, so a line through two points says which length to try next. Up to the first
  // that does not fit, the line goes on from the last two that do. After that, `good` and `bad` enclose the answer, and the
  // line becomes steeper while only `good` moves (the Illinois method).
  Point good = point(1), bad = {kLongestStream / unit + 1, INFINITY};
  if (good.over > 0) return 0;
  for (Index next = 8; bad.units - good.units > 1;) {
    const Point last = good, found = point(std::clamp(next, good.units + 1, bad.units - 1));
    const bool fits = found.over <= 0;
    (fits ? good : bad) = found;
    const bool enclosed = bad.over < INFINITY;
    if (enclosed && fits) bad.over /= 2;
    const Point &from = enclosed ? good : last, &to = enclosed ? bad : good;
    const double units = -good.over * static_cast<double>(to.units - from.units) / (to.over - from.over);
    const double most = 7 * static_cast<double>(good.units), beyond = 1.02 * units + 1;
    next = good.units + static_cast<Index>(enclosed ? units : beyond < most ? beyond : most);
  }
  return unit * good.units;
}

}  // namespace streambp
