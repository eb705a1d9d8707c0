#include "training/engine_files.h"

namespace streambp {

template struct EngineFiles<Cuda, float, float>;
template struct EngineFiles<Cuda, BFloat16, float>;
template struct EngineFiles<Cuda, BFloat16, BFloat16>;

}  // namespace streambp
