#include "training/timeline.h"

#include "training/trainer.h"

namespace streambp {

Timeline timeline(const StepSettings& settings, Index rows, const Schedule& schedule, std::size_t parts) {
  StepSettings s = settings;
  s.micro_batches = std::min(s.micro_batches, 2 * s.ranks.streams());  // all later rounds are like the second
  Timeline result(parts, plan(s, rows, schedule).flops);
  with_types(s, [&]<class T, class G>() {
    Plan dev(s.device, s.tile);
    dev.arena.on_change = [&] { result.record(dev.flops(), dev.arena.by_kind()); };
    Trainer<Plan, T, G> trainer(dev, s.config, rows, {s.optimizer, s.places}, s.objective, s.ranks);
    trainer.plan_step(s.micro_batches, schedule, s.optimizer, s.documents);
  });
  return result;
}

}  // namespace streambp
