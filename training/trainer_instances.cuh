// The trainers and generators that the engines and the plan compile. A file that includes this links to them.
#pragma once

#include "generation/generate.h"
#include "training/trainer.h"

namespace streambp {

extern template class Trainer<Cpu, float>;
extern template class Trainer<Cpu, double>;
extern template class Trainer<Cpu, BFloat16>;
extern template class Trainer<Cpu, BFloat16, float>;
extern template class Trainer<Plan, float>;
extern template class Generator<Cpu, float>;
extern template class Generator<Cpu, BFloat16>;
#ifdef STREAMBP_CUDA
extern template class Trainer<Cuda, float>;
extern template class Trainer<Cuda, BFloat16>;
extern template class Trainer<Cuda, BFloat16, float>;
extern template class Generator<Cuda, float>;
extern template class Generator<Cuda, BFloat16>;
#endif

}  // namespace streambp
