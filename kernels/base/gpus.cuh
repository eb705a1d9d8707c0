// The GPUs of this machine: which of them can run this program, and if not, why and what to do.
#pragma once

#include <cuda_runtime.h>

#include <cctype>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/base/error.h"

namespace streambp::cuda {

inline void check(cudaError_t error, const char* call, const char* file, int line) {
  require(error == cudaSuccess, file, ":", line, ": ", call, ": ", cudaGetErrorString(error), " (",
          cudaGetErrorName(error), ")");
}
#define STREAMBP_CHECK(call) ::streambp::cuda::check(call, #call, __FILE__, __LINE__)

// A driver runs programs built with the same or an older major version of CUDA.
struct MinimumDriver {
  int cuda, driver;  // release 12 needs r525
};
constexpr MinimumDriver kMinimumDrivers[] = {{13, 580}, {12, 525}};

// In CUDA's format: 12040 is "12.4".
inline std::string cuda_version(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

// Why a program built with this CUDA toolkit cannot run on this driver; empty if it can. `driver` is the newest CUDA
// version that the driver supports, or 0 without a driver.
inline std::string driver_problem(int driver, int toolkit) {
  if (driver == 0)
    return "no NVIDIA driver is loaded; install one, or start the container with access to it (docker run --gpus all)";
  if (driver / 1000 >= toolkit / 1000) return {};
  std::string needed = "a newer driver";
  for (const MinimumDriver& m : kMinimumDrivers) {
    if (m.cuda == toolkit / 1000) needed = "driver r" + std::to_string(m.driver) + " or newer";
  }
  const std::string remedy = driver / 1000 >= 12 ? ", or build with CUDA " + std::to_string(driver / 1000) : "";
  return "the NVIDIA driver supports CUDA " + cuda_version(driver) + ", and this program was built with CUDA " +
         cuda_version(toolkit) + ", which needs " + needed + "; update the driver" + remedy;
}

// A compute capability: 89 is 8.9.
constexpr int kOldest = 80;
inline std::string capability_name(int c) { return std::to_string(c / 10) + "." + std::to_string(c % 10); }

inline int current_gpu() {
  int number = 0;
  STREAMBP_CHECK(cudaGetDevice(&number));
  return number;
}
inline cudaDeviceProp properties(int gpu = current_gpu()) {
  cudaDeviceProp found;
  STREAMBP_CHECK(cudaGetDeviceProperties(&found, gpu));
  return found;
}
inline int capability(int gpu = current_gpu()) {
  const cudaDeviceProp p = properties(gpu);
  return 10 * p.major + p.minor;
}
inline std::string name(int gpu = current_gpu()) { return properties(gpu).name; }

// This process's number among those of the run on this machine: each uses its own GPU. In tests, threads are ranks.
inline thread_local int local_rank = 0;

// Why the driver shows no GPU to this process; empty if it does. Sets `count`.
inline std::string why_none(int& count) {
  int driver = 0;
  if (const cudaError_t error = cudaDriverGetVersion(&driver)) return cudaGetErrorString(error);
  if (std::string problem = driver_problem(driver, CUDART_VERSION); !problem.empty()) return problem;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return {};
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible && error == cudaErrorNoDevice)
    return "CUDA_VISIBLE_DEVICES is \"" + std::string(visible) + "\", which hides every GPU; unset or change it";
  return std::string(cudaGetErrorString(error)) +
         "; nvidia-smi shows what the driver sees (after an update of the driver, restart the machine)";
}

// The GPUs that this program supports. If there are none, `problem` says why.
inline std::vector<int> supported_gpus(std::string& problem) {
  int count = 0;
  problem = why_none(count);
  std::vector<int> supported;
  for (int gpu = 0; problem.empty() && gpu < count; ++gpu)
    if (capability(gpu) >= kOldest) supported.push_back(gpu);
  if (supported.empty() && problem.empty())
    problem = name(0) + " has compute capability " + capability_name(capability(0)) + ", and " +
              capability_name(kOldest) + " is the minimum";
  return supported;
}

// Why a supported GPU refuses this process, and the remedy.
inline std::string refusal(int gpu, cudaError_t error) {
  const std::string other = "choose another GPU with CUDA_VISIBLE_DEVICES";
  switch (error) {
    case cudaErrorDevicesUnavailable:
      return name(gpu) + ": another process has it for itself, or its compute mode forbids it; end that process " +
             "(nvidia-smi lists it), set the mode with nvidia-smi -c DEFAULT, or " + other;
    case cudaErrorMemoryAllocation:
      return name(gpu) + ": its memory is full; end the processes that use it (nvidia-smi lists them), or " + other;
    default:
      return name(gpu) + ": " + cudaGetErrorString(error) +
             "; nvidia-smi shows its state; restarting the machine may help, or " + other;
  }
}

// Why no GPU can be used; empty if one can. Selects this process's GPU. A launcher may show each process only its own.
inline std::string unusable() {
  std::string problem;
  const std::vector<int> gpus = supported_gpus(problem);
  if (gpus.empty()) return problem;
  const int gpu = gpus[static_cast<std::size_t>(local_rank) % gpus.size()];
  const cudaError_t error = cudaSetDevice(gpu);  // connects to it
  return error == cudaSuccess ? "" : refusal(gpu, error);
}

// The GPU's address on the bus of this machine, as Linux spells it: 0000:c1:00.0.
inline std::string address(int gpu = current_gpu()) {
  char id[32];
  STREAMBP_CHECK(cudaDeviceGetPCIBusId(id, sizeof id, gpu));
  for (char& c : id) c = static_cast<char>(std::tolower(c));
  return id;
}

struct MemoryOfGpu {
  std::size_t free = 0, total = 0;
};
inline MemoryOfGpu memory_of_gpu() {
  MemoryOfGpu m;
  STREAMBP_CHECK(cudaMemGetInfo(&m.free, &m.total));
  return m;
}

// The memory that a run may plan with: free memory minus a reserve for kernels and libraries, which CUDA loads on first
// use.
inline std::size_t free_memory() {
  const std::size_t reserve = std::size_t{384} << 20, free = memory_of_gpu().free;
  return free > reserve ? free - reserve : 0;
}

}  // namespace streambp::cuda
