// Stands in for the GPU engines in a build without GPU code. STREAMBP_NO_GPU_CODE is the reason.
#include "training/engine_instances.h"

namespace streambp::gpu {

void set_local_rank(Index) {}
std::string why_unusable() { return "this program was built without GPU code: " STREAMBP_NO_GPU_CODE; }
std::vector<FoundGpu> found() { return {}; }
Index count_for_ranks() { return 0; }
std::string software() { return {}; }

namespace {
[[noreturn]] void refuse() { fail("no GPU can be used: ", why_unusable()); }
}  // namespace

std::string note() { refuse(); }
std::size_t free_memory(const Ranks&) { refuse(); }
std::string name() { refuse(); }
std::string address() { refuse(); }
double copy_rate() { refuse(); }
double far_rate(const std::filesystem::path&) { refuse(); }
std::unique_ptr<Engine> make_f32_engine(const StepSettings&, Index, const Capacity&) { refuse(); }
std::unique_ptr<Engine> make_bf16_engine(const StepSettings&, Index, const Capacity&) { refuse(); }
double f32_matmul_rate() { refuse(); }
double bf16_matmul_rate() { refuse(); }
std::vector<ProductTiming> time_f32_products(const Config&, Index, Index) { refuse(); }
std::vector<ProductTiming> time_bf16_products(const Config&, Index, Index) { refuse(); }

}  // namespace streambp::gpu
