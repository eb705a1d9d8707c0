#include "training/engine_instances.h"
#include "training/engine_on.h"

namespace streambp {

template class Trainer<Cpu, double>;

std::unique_ptr<Engine> make_cpu_f64_engine(const StepSettings& s, Index rows, const Capacity& capacity) {
  return std::make_unique<EngineOn<Cpu, double, double>>(s, rows, capacity);
}

}  // namespace streambp
