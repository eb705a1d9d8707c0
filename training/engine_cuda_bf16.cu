#include "training/engine_instances.h"
#include "training/engine_on.h"
#include "training/products.cuh"

namespace streambp {
template class Trainer<Cuda, BFloat16>;
template class Trainer<Cuda, BFloat16, float>;
template class Generator<Cuda, BFloat16>;
}  // namespace streambp

namespace streambp::gpu {

std::unique_ptr<Engine> make_bf16_engine(const StepSettings& s, Index rows, const Capacity& capacity) {
  cuda::check_products<BFloat16>(s.config, s.tile);
  return with_types(s, [&]<class T, class G>() -> std::unique_ptr<Engine> {
    if constexpr (std::is_same_v<T, BFloat16>) return std::make_unique<EngineOn<Cuda, T, G>>(s, rows, capacity, s.tile);
    fail("this engine computes in bfloat16");
  });
}
double bf16_matmul_rate() { return cuda::time_large_product<BFloat16>().best(); }
std::vector<ProductTiming> time_bf16_products(const Config& config, Index rows, Index tile) {
  return cuda::time_products<BFloat16>(config, rows, tile);
}

}  // namespace streambp::gpu
