#include "training/engine_instances.h"
#include "training/engine_on.h"
#include "training/products.cuh"

namespace streambp {
template class Trainer<Cuda, float>;
template class Generator<Cuda, float>;
}  // namespace streambp

namespace streambp::gpu {

double copy_rate() { return streambp::copy_rate<Cuda>(); }
double far_rate(const std::filesystem::path& directory) { return streambp::far_rate<Cuda>(directory); }

std::unique_ptr<Engine> make_f32_engine(const StepSettings& s, Index rows, const Capacity& capacity) {
  cuda::check_products<float>(s.config, s.tile);
  return std::make_unique<EngineOn<Cuda, float, float>>(s, rows, capacity, s.tile);
}
double f32_matmul_rate() { return cuda::time_large_product<float>().best(); }
std::vector<ProductTiming> time_f32_products(const Config& config, Index rows, Index tile) {
  return cuda::time_products<float>(config, rows, tile);
}

}  // namespace streambp::gpu
