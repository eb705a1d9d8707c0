// The GPUs of this machine, for the program: what was found, what can be used, and why not. Compiled apart, because asking
// the driver for a kernel loads all kernels of a translation unit.
#ifdef STREAMBP_NCCL
#include <nccl.h>
#endif

#include "kernels/base/gpus.cuh"
#include "training/engine_instances.h"

namespace streambp::gpu {
namespace {

// What nvcc compiled for: 890 is 8.9. The last one also as PTX, which the driver translates for newer GPUs.
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

__global__ void probe() {}

std::string rebuilt_for(int capability) {
  return "build it with cmake -DCMAKE_CUDA_ARCHITECTURES=" + std::to_string(capability);
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
  const std::string name = cuda::name(gpu) + ": ", other = "choose another GPU with CUDA_VISIBLE_DEVICES";
  STREAMBP_CHECK(cudaSetDevice(gpu));
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFree(nullptr);  // connects to the GPU
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe);
  cudaGetLastError();
  switch (error) {
    case cudaSuccess:
      return {};
    case cudaErrorDevicesUnavailable:
      return name + "another process has it for itself, or its compute mode forbids it; end that process (nvidia-smi " +
             "lists it), set the mode with nvidia-smi -c DEFAULT, or " + other;
    case cudaErrorMemoryAllocation:
      return name + "its memory is full; end the processes that use it (nvidia-smi lists them), or " + other;
    case cudaErrorNoKernelImageForDevice:
      return name + "it has compute capability " + cuda::capability_name(cuda::capability(gpu)) +
             ", and this program was built for " + built_for() + "; " + rebuilt_for(cuda::capability(gpu));
    case cudaErrorUnsupportedPtxVersion:
      return name + "the driver is too old to translate this program's code for it; update the driver, or " +
             rebuilt_for(cuda::capability(gpu));
    default:
      return name + cudaGetErrorString(error) + "; nvidia-smi shows its state, and a restart may mend it, or " + other;
  }
}

}  // namespace

void set_place(Index rank, Index count, bool alone) {
  cuda::place = {static_cast<int>(rank), static_cast<int>(count), alone};
}

std::string why_unusable() {
  std::string problem = cuda::unusable();
  return problem.empty() ? refusal_of(cuda::current_gpu()) : problem;
}

std::vector<FoundGpu> found() {
  int count = 0;
  std::vector<FoundGpu> gpus;
  if (!cuda::why_none(count).empty()) return gpus;
  for (int gpu = 0; gpu < count; ++gpu) {
    const int capability = cuda::capability(gpu);
    FoundGpu& f = gpus.emplace_back(FoundGpu{cuda::name(gpu), cuda::capability_name(capability)});
    f.problem = capability < cuda::kOldest ? cuda::capability_name(cuda::kOldest) + " is the minimum" : refusal_of(gpu);
    if (!f.problem.empty()) continue;
    const cuda::MemoryOfGpu memory = cuda::memory_of_gpu();
    f.free = memory.free, f.total = memory.total;
  }
  return gpus;
}

Index count_for_ranks() {
  std::string problem;
  const auto supported = static_cast<Index>(cuda::supported_gpus(problem).size());
#ifdef STREAMBP_NCCL
  return supported;
#else
  return least(supported, 1);
#endif
}

std::string software() {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  std::string text = "for compute capability " + built_for() + ", CUDA " + cuda::cuda_version(CUDART_VERSION) +
                     "; the driver supports " + (driver == 0 ? "none" : "CUDA " + cuda::cuda_version(driver));
#ifdef STREAMBP_NCCL
  return text + "; NCCL " + std::to_string(NCCL_VERSION_CODE / 10000) + "." +
         std::to_string(NCCL_VERSION_CODE / 100 % 100);
#else
  return text + "; without NCCL, so a run has one GPU (install NVIDIA's libnccl-dev and build again)";
#endif
}

std::string note() {
  const int capability = cuda::capability();
  if (has_code_for(capability)) return {};
  return "the driver now translates the GPU code for compute capability " + cuda::capability_name(capability) +
         ", which takes minutes the first time; to have it ready, " + rebuilt_for(capability);
}

std::string name() { return cuda::name(); }
std::string address() { return cuda::address(); }
std::size_t free_memory() { return cuda::free_memory(); }

}  // namespace streambp::gpu
