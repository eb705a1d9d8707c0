#include "training/engine.h"

#include <omp.h>

#include "kernels/base/inner_loops.h"
#include "training/engine_instances.h"

namespace streambp {

std::unique_ptr<Engine> make_engine(const StepSettings& s, Index rows, const Capacity& capacity) {
  if (s.device == DeviceKind::cuda) {
    require(s.dtype != DType::f64, "float64 is computed on the CPU only; use --device cpu");
    const std::string reason = why_no_gpu();
    require(reason.empty(), "no GPU can be used: ", reason, "; use --device cpu");
    return (s.dtype == DType::f32 ? gpu::make_f32_engine : gpu::make_bf16_engine)(s, rows, capacity);
  }
  return (s.dtype == DType::f64   ? make_cpu_f64_engine
          : s.dtype == DType::f32 ? make_cpu_f32_engine
                                  : make_cpu_bf16_engine)(s, rows, capacity);
}

std::size_t free_memory(DeviceKind device, const Ranks& hosts) {
  return device == DeviceKind::cuda ? gpu::free_memory(hosts) : available_memory();
}

std::size_t free_far_memory(DeviceKind device, const std::filesystem::path& directory) {
  if (device == DeviceKind::cuda) return available_memory() / 100 * 90;
  try {
    const std::filesystem::path place = far_directory(directory);
    return why_not_far(place).empty() ? std::filesystem::space(place).available / 100 * 95 : 0;
  } catch (const std::exception&) {
    return 0;
  }
}

std::string device_name(DeviceKind device) {
  return device == DeviceKind::cuda
             ? gpu::name()
             : std::to_string(omp_get_max_threads()) + (omp_get_max_threads() == 1 ? " thread" : " threads");
}

std::string product_instructions() { return cpu::instruction_sets().back(); }

double matmul_rate(DeviceKind device, DType dtype) {
  if (device == DeviceKind::cpu) return dtype == DType::bf16 ? cpu_bf16_matmul_rate() : cpu_f32_matmul_rate();
  return dtype == DType::bf16 ? gpu::bf16_matmul_rate() : gpu::f32_matmul_rate();
}

std::vector<ProductTiming> time_products(const StepSettings& s, Index rows) {
  return (s.dtype == DType::bf16 ? gpu::time_bf16_products : gpu::time_f32_products)(s.config, rows, s.tile);
}

double copy_rate(DeviceKind device) { return device == DeviceKind::cuda ? gpu::copy_rate() : cpu_copy_rate(); }
double far_rate(DeviceKind device, const std::filesystem::path& directory) {
  return device == DeviceKind::cuda ? gpu::far_rate(directory) : cpu_far_rate(directory);
}
double read_rate(DeviceKind device) { return device == DeviceKind::cuda ? gpu::copy_rate() : cpu_read_rate(); }

}  // namespace streambp
