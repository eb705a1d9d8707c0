// Stands in for the GPU engines in a build without GPU code. STREAMBP_NO_GPU_CODE is the reason.
#include "training/engine_instances.h"

namespace streambp {

namespace {
[[noreturn]] void refuse() { fail("no GPU can be used: ", why_no_gpu()); }
}  // namespace

void choose_gpu(const Process&) {}
std::string why_no_gpu() { return "this program was built without GPU code: " STREAMBP_NO_GPU_CODE; }
std::string gpu_note() { refuse(); }
Index gpus_for_ranks() { return 0; }
std::vector<FoundGpu> found_gpus() { return {}; }
std::string gpu_software() { return {}; }
std::string gpu_address() { refuse(); }

namespace gpu {
std::size_t free_memory(const Ranks&) { refuse(); }
std::string name() { refuse(); }
double copy_rate() { refuse(); }
double far_rate(const std::filesystem::path&) { refuse(); }
std::unique_ptr<Engine> make_f32_engine(const StepSettings&, Index, const Capacity&) { refuse(); }
std::unique_ptr<Engine> make_bf16_engine(const StepSettings&, Index, const Capacity&) { refuse(); }
double f32_matmul_rate() { refuse(); }
double bf16_matmul_rate() { refuse(); }
std::vector<ProductTiming> time_f32_products(const Config&, Index, Index) { refuse(); }
std::vector<ProductTiming> time_bf16_products(const Config&, Index, Index) { refuse(); }

}  // namespace gpu

}  // namespace streambp
