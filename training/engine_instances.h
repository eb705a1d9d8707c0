// The instances of the engine. Each one is compiled in the file named after it.
#pragma once

#include "training/engine.h"

namespace streambp {

std::unique_ptr<Engine> make_cpu_f32_engine(const StepSettings& s, Index rows, const Capacity& capacity);
std::unique_ptr<Engine> make_cpu_bf16_engine(const StepSettings& s, Index rows, const Capacity& capacity);
std::unique_ptr<Engine> make_cpu_f64_engine(const StepSettings& s, Index rows, const Capacity& capacity);
double cpu_f32_matmul_rate();
double cpu_bf16_matmul_rate();
double cpu_copy_rate();
double cpu_read_rate();
double cpu_far_rate(const std::filesystem::path& directory);

// Without a CUDA compiler, no_cuda.cpp defines these, and what training/engine.h says of GPUs.
namespace gpu {
std::size_t free_memory(const Ranks& hosts);
std::string name();
double copy_rate();
double far_rate(const std::filesystem::path& directory);
std::unique_ptr<Engine> make_f32_engine(const StepSettings& s, Index rows, const Capacity& capacity);
std::unique_ptr<Engine> make_bf16_engine(const StepSettings& s, Index rows, const Capacity& capacity);
double f32_matmul_rate();
double bf16_matmul_rate();
std::vector<ProductTiming> time_f32_products(const Config& config, Index rows, Index tile);
std::vector<ProductTiming> time_bf16_products(const Config& config, Index rows, Index tile);
}  // namespace gpu

}  // namespace streambp
