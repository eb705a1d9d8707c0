// Peak memory by kind and FLOPs of a training step, found by running the step itself on the Plan device, not by a
// separate formula. Also the largest chunk and the longest stream for a memory budget.
#pragma once

#include "model/generate.h"
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

// The largest n in 1 .. limit for which fits(n), or 0. fits must be true up to some n and false beyond. good: fits(good).
template <class F>
Index largest(Index limit, F&& fits, Index good = 0) {
  Index step = std::max<Index>(1, good / 8), bad = good + step;
  for (; bad <= limit && fits(bad); bad = good + step) good = bad, step *= 2;
  bad = std::min(bad, limit + 1);
  while (bad - good > 1) {
    const Index middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

// The largest chunk for which a step fits the budget, or 0.
Index chunk_for_budget(const StepSettings& s, Index rows, const Capacity& budget);

// The longest stream, in whole tiles, for which a step fits the budget, or 0. known: one that fits.
Index longest_for_budget(const StepSettings& s, Mode mode, Index chunk, const Capacity& budget, Index known = 0);

}  // namespace streambp
