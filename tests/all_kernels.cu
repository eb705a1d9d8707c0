// Instantiates every kernel: a training step in each combination of types, and generation. scripts/kernel_resources.sh compiles it;
// nothing runs it.
#include "generation/generate.h"
#include "training/trainer.h"

namespace streambp {

template <class T, class G>
void step(Cuda& dev, const Config& c, const Batch& batch) {
  Trainer<Cuda, T, G>(dev, c, 1, OptimizerKind::adamw).step({batch}, Schedule::full(1), OptimizerSettings{}, 1);
}
template void step<float, float>(Cuda&, const Config&, const Batch&);
template void step<BFloat16, float>(Cuda&, const Config&, const Batch&);
template void step<BFloat16, BFloat16>(Cuda&, const Config&, const Batch&);

template class Generator<Cuda, float>;
template class Generator<Cuda, BFloat16>;

}  // namespace streambp
