#include "training/engine_instances.h"
#include "training/engine_on.h"

namespace streambp {

template class Trainer<Cpu, float>;
template class Generator<Cpu, float>;

std::unique_ptr<Engine> make_cpu_f32_engine(const StepSettings& s, Index rows, const Capacity& capacity) {
  return std::make_unique<EngineOn<Cpu, float, float>>(s, rows, capacity);
}

double cpu_f32_matmul_rate() { return cpu::matmul_rate<float>(); }
double cpu_copy_rate() { return copy_rate<Cpu>(); }
double cpu_read_rate() { return cpu::read_rate(); }
double cpu_far_rate(const std::filesystem::path& directory) { return far_rate<Cpu>(directory); }

}  // namespace streambp
