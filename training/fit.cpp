#include "training/fit.cuh"

namespace streambp {

namespace {

double seconds(const Usage& usage, Kind kind, double rate) {
  return usage.far_traffic[static_cast<std::size_t>(kind)] / rate;
}

}  // namespace

Seconds predict(const Usage& usage, const Rates& rates) {
  return {usage.flops / (kEfficiency * rates.matmul),
          seconds(usage, Kind::saved, rates.far) + seconds(usage, Kind::attention, rates.far),
          seconds(usage, Kind::optimizer, rates.far), usage.sent / rates.link};
}

Fit fit(const StepSettings& s, Mode mode, Index rows, Index chunk, const Capacity& budget,
        const std::vector<Places>& places, const Rates& rates) {
  Fit best;
  double least = 0;
  for (const Places& p : places) {
    StepSettings with = s;
    with.places = p;
    const Index found =
        chunk > 0 || mode != Mode::stream ? std::max(chunk, s.tile) : chunk_for_budget(with, rows, budget);
    if (found == 0) continue;
    const Usage usage = plan(with, rows, schedule_for(mode, with, rows, found));
    if (!usage.fits(budget)) continue;
    const double time = predict(usage, rates).total();
    if (best.chunk == 0 || time < least) best = {found, p}, least = time;
  }
  return best;
}

}  // namespace streambp
