#include "training/engine_files.h"

namespace streambp {

template struct EngineFiles<Cpu, float, float>;
template struct EngineFiles<Cpu, double, double>;
template struct EngineFiles<Cpu, BFloat16, float>;
template struct EngineFiles<Cpu, BFloat16, BFloat16>;

}  // namespace streambp
