// Peak memory by kind and FLOPs of a training step, found by running the step itself on the Plan device, not by a
// separate formula. Also the longest stream for a memory budget.
#pragma once

#include "generation/generate.h"
#include "training/settings.h"

namespace streambp {

struct Usage {
  std::size_t peak = 0;
  Bytes by_kind{};
  double flops = 0, matmul_flops = 0, attention_flops = 0;
  double moved = 0;     // bytes that all other operations read and write
  double sent = 0;      // bytes to other ranks
  std::size_t far = 0;  // peak of far memory
  Bytes far_by_kind{};
  ByKind<double> far_traffic{};  // bytes to and from far memory

  void count(const Work& work) {
    flops += work.flops, sent += work.sent;
    if (work.name.starts_with("matmul")) {
      matmul_flops += work.flops;
    } else if (work.name.starts_with("attention")) {
      attention_flops += work.flops;
    } else {
      moved += work.bytes;
    }
  }
  Capacity capacity() const { return {peak, far}; }
  bool fits(const Capacity& budget) const { return peak <= budget.near && far <= budget.far; }
};

Usage plan(const StepSettings& s, Index rows, const Schedule& schedule);

// About the FLOPs of a step with these micro-batches: a few percent off, with sliding windows and many documents more.
double step_flops(StepSettings s, const std::vector<Batch>& batches, const Schedule& schedule);

// The peak memory of a run: a step, an evaluation and, with slots, generation.
Capacity plan_run(const StepSettings& s, Index rows, const Schedule& schedule, const GenerationShape& generation);

// The peak memory of the weights and an evaluation of a stream.
std::size_t plan_evaluation(const StepSettings& s, Index rows, const Schedule& schedule);

// The peak memory of the weights and generation; without slots, of the weights alone.
std::size_t plan_generation(const StepSettings& s, const GenerationShape& generation);

// The largest n in 1 .. limit for which fits(n), or 0. fits must be true up to some n and false beyond. The search gallops
// away from the guess.
template <class F>
Index largest(Index limit, F&& fits, Index guess = 0) {
  Index good = 0, bad = limit + 1;
  const auto fits_at = [&](Index n) { return fits(n) ? (good = n, true) : (bad = n, false); };
  const bool up = guess == 0 || fits_at(std::min(guess, limit));
  for (Index step = 1; bad - good > 1; step *= 2)
    if (fits_at(up ? std::min(good + step, bad - 1) : std::max(bad - step, good + 1)) != up) break;
  while (bad - good > 1) fits_at(good + (bad - good) / 2);
  return good;
}

// The longest stream, in whole tiles, for which a step fits the budget, or 0.
Index longest_for_budget(const StepSettings& s, Mode mode, Index chunk, const Capacity& budget);

}  // namespace streambp
