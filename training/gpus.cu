// The GPUs of this machine, for the program: what was found, what can be used, and why not. Compiled apart, because asking
// the driver for a kernel loads all kernels of a translation unit.
#ifdef STREAMBP_NCCL
#include <nccl.h>
#endif

#include "parallel/connection.cuh"
#include "training/engine_instances.h"

namespace streambp {
namespace {

// What nvcc compiled for: 890 is 8.9. At least the last one is there as PTX too, which the driver translates for newer GPUs.
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

__global__ void probe() {}

std::string rebuilt_for(int capability) {
  return "build it with cmake -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(capability) +
         " and a CUDA toolkit that knows it";
}

std::string built_for() {
  std::string text;
  for (const int architecture : kArchitectures)
    text += (text.empty() ? "" : ", ") + cuda::capability_name(architecture / 10);
  return text;
}

// Code for 8.0 also runs on 8.6, but not on 9.0.
bool has_code_for(int capability) {
  return std::ranges::any_of(kArchitectures, [&](int architecture) {
    return architecture / 100 == capability / 10 && architecture / 10 <= capability;
  });
}

// Why this process cannot use a supported GPU after all; empty if it can.
std::string refusal_of(int gpu) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSetDevice(gpu);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe);
  cudaGetLastError();  // clears it
  const std::string number = cuda::capability_name(cuda::capability(gpu));
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
    return cuda::name(gpu) + ": it has compute capability " + number + ", and this program was built for " +
           built_for() + "; " + rebuilt_for(cuda::capability(gpu));
  if (error == cudaErrorUnsupportedPtxVersion)
    return cuda::name(gpu) + ": the driver is too old to translate this program's code for it; update the driver, or " +
           rebuilt_for(cuda::capability(gpu));
  return error == cudaSuccess ? "" : cuda::refusal(gpu, error);
}

}  // namespace

void choose_gpu(const Process& process) { cuda::local_rank = static_cast<int>(process.local_rank); }

std::string why_no_gpu() {
  std::string problem = cuda::unusable();
  return problem.empty() ? refusal_of(cuda::current_gpu()) : problem;
}

std::vector<FoundGpu> found_gpus() {
  int count = 0;
  std::vector<FoundGpu> gpus;
  if (!cuda::why_none(count).empty()) return gpus;
  for (int gpu = 0; gpu < count; ++gpu) {
    const int capability = cuda::capability(gpu);
    FoundGpu& f = gpus.emplace_back(FoundGpu{cuda::name(gpu), cuda::capability_name(capability), cuda::address(gpu)});
    f.problem = capability < cuda::kOldest ? cuda::capability_name(cuda::kOldest) + " is the minimum" : refusal_of(gpu);
    if (!f.problem.empty()) continue;
    const cuda::MemoryOfGpu memory = cuda::memory_of_gpu();
    f.free = memory.free, f.total = memory.total;
  }
  return gpus;
}

Index gpus_for_ranks() {
#ifdef STREAMBP_NCCL
  std::string problem;
  const std::vector<int> gpus = cuda::supported_gpus(problem);
  if (gpus.empty()) return 0;
  return std::ranges::count(gpus, cuda::name(gpus[0]), [](int gpu) { return cuda::name(gpu); });  // of one kind
#else
  return why_no_gpu().empty() ? 1 : 0;
#endif
}

std::string gpu_software() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  std::string text = "for compute capability " + built_for() + ", CUDA " + cuda::cuda_version(CUDART_VERSION) + "; " +
                     (driver == 0 ? "no driver" : "the driver supports CUDA " + cuda::cuda_version(driver));
#ifdef STREAMBP_NCCL
  return text + "; NCCL " + std::to_string(NCCL_VERSION_CODE / 10000) + "." +
         std::to_string(NCCL_VERSION_CODE / 100 % 100);
#else
  return text + "; without NCCL, so a run has one GPU (install NVIDIA's libnccl-dev and build again)";
#endif
}

std::string gpu_note() {
  const int capability = cuda::capability();
  if (has_code_for(capability)) return {};
  return "the driver now translates the GPU code for compute capability " + cuda::capability_name(capability) +
         ", which takes minutes the first time; to have it ready, " + rebuilt_for(capability);
}

std::string gpu_address() { return cuda::address(); }

std::string gpu::name() { return cuda::name(); }
std::size_t gpu::free_memory(const Ranks& hosts) {
  const Connection<Cuda> connection(hosts);  // measures what is left beside it
  return cuda::free_memory();
}

}  // namespace streambp
