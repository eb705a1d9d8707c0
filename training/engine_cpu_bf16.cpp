#include "training/engine_instances.h"
#include "training/engine_on.h"

namespace streambp {

template class Trainer<Cpu, BFloat16>;
template class Trainer<Cpu, BFloat16, float>;
template class Generator<Cpu, BFloat16>;

std::unique_ptr<Engine> make_cpu_bf16_engine(const StepSettings& s, Index rows, const Capacity& capacity) {
  return with_types(s, [&]<class T, class G>() -> std::unique_ptr<Engine> {
    if constexpr (std::is_same_v<T, BFloat16>) return std::make_unique<EngineOn<Cpu, T, G>>(s, rows, capacity);
    fail("this engine computes in bfloat16");
  });
}

double cpu_bf16_matmul_rate() { return cpu::matmul_rate<BFloat16>(); }

}  // namespace streambp
