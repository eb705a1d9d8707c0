#include "training/fit.h"

namespace streambp {

namespace {

double bytes(const Usage& usage, std::initializer_list<Kind> kinds) {
  double sum = 0;
  for (Kind kind : kinds) sum += usage.far_traffic[static_cast<std::size_t>(kind)];
  return sum;
}

}  // namespace

Seconds predict(const Usage& usage, const Rates& rates) {
  return {
      (usage.flops - usage.attention_flops) / (kEfficiency * rates.matmul) + usage.attention_flops / rates.attention,
      bytes(usage, {Kind::saved, Kind::attention, Kind::weights}) / rates.far,
      bytes(usage, {Kind::gradients}) / rates.far + bytes(usage, {Kind::optimizer}) / (rates.far * rates.far_streams),
      usage.sent / rates.link};
}

Fit fit(const StepSettings& s, Mode mode, Index rows, const Allowed& allowed, const Rates& rates) {
  const auto& [chunks, budget, places] = allowed;
  Fit best;
  double least = 0;
  const auto useful = [&](Index chunk) { return std::min(chunk, default_chunk(s)); };
  for (const Places& p : places) {
    StepSettings with = s;
    with.places = p;
    Index chunk = std::max(chunks.most, s.tile);
    if (mode == Mode::stream && chunks.least < chunks.most)
      chunk = std::min(chunks.most, chunk_for_budget(with, rows, budget));
    if (chunk == 0) continue;
    const Usage usage = plan(with, rows, schedule_for(mode, with, rows, chunk));
    if (!usage.fits(budget)) continue;
    const double time = predict(usage, rates).total();
    const bool same_time = time < 1.01 * least && least < 1.01 * time,
               better = same_time ? useful(chunk) > useful(best.chunk) : time < least;
    if (best.chunk == 0 || better) best = {chunk, p}, least = time;
  }
  return best;
}

}  // namespace streambp
