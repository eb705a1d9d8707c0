// Users' machines: what stops the program from using a GPU is named, with a remedy.
#include "tests/support.cuh"
#include "tests/temporary.h"
#include "training/engine_instances.h"

namespace streambp {
namespace {

// The machine is as before when this ends.
class Machines : public testing::Test {
 protected:
  void TearDown() override {
    cuda_on_cpu::gpu = cuda_on_cpu::later_gpus = cuda_on_cpu::kGeForce;
    cuda_on_cpu::driver_version = 13000, cuda_on_cpu::gpu_count = 1, cuda_on_cpu::current_gpu = 0;
    cuda_on_cpu::context_error = cuda_on_cpu::image_error = cudaSuccess;
    cuda::local_rank = 0;
    unsetenv("CUDA_VISIBLE_DEVICES");
  }

  // Why no GPU can be used. An engine says the same.
  static std::string refusal() {
    const std::string reason = why_no_gpu();
    StepSettings settings{make_config("llama", {11, 8, 1, 2, 1, 4, 12, 0, false})};
    settings.device = DeviceKind::cuda, settings.dtype = DType::f32, settings.tile = kTile;
    EXPECT_PRED2(contains, error_of([&] { make_engine(settings, 1, std::size_t{1} << 20); }), reason);
    return reason;
  }
};

constexpr cuda_on_cpu::Gpu kTuring{7, 5, 64 << 10}, kNewest{12, 1, 99 << 10};

TEST_F(Machines, WithoutAUsableDriver) {
  cuda_on_cpu::driver_version = 0;
  EXPECT_PRED2(contains, refusal(), "no NVIDIA driver is loaded; install one, or start the container with access");
  cuda_on_cpu::driver_version = 12040;
  EXPECT_PRED2(contains, refusal(), "needs driver r580 or newer; update the driver, or build with CUDA 12");
}

TEST_F(Machines, WithoutAVisibleGpu) {
  cuda_on_cpu::gpu_count = 0;
  EXPECT_PRED2(contains, refusal(), "nvidia-smi shows what the driver sees");
  setenv("CUDA_VISIBLE_DEVICES", "7", 1);
  EXPECT_PRED2(contains, refusal(), "CUDA_VISIBLE_DEVICES is \"7\", which hides every GPU; unset or change it");
}

TEST_F(Machines, WithAnOldGpu) {
  cuda_on_cpu::gpu = kTuring;
  EXPECT_PRED2(contains, refusal(), "has compute capability 7.5, and 8.0 is the minimum");
}

TEST_F(Machines, WithAGpuThatAnotherProcessUses) {
  cuda_on_cpu::context_error = cudaErrorDevicesUnavailable;
  EXPECT_PRED2(contains, refusal(), "another process has it for itself");
  EXPECT_PRED2(contains, refusal(), "choose another GPU with CUDA_VISIBLE_DEVICES");
  cuda_on_cpu::context_error = cudaErrorMemoryAllocation;
  EXPECT_PRED2(contains, refusal(), "its memory is full; end the processes that use it");
  cuda_on_cpu::context_error = cudaErrorIllegalAddress;
  EXPECT_PRED2(contains, refusal(), "an illegal memory access was encountered; nvidia-smi shows its state");
}

TEST_F(Machines, WithAGpuThatWasHiddenFromTheBuild) {
  cuda_on_cpu::gpu = kNewest;
  for (const cudaError_t error : {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction}) {
    cuda_on_cpu::image_error = error;
    EXPECT_PRED2(contains, refusal(),
                 "it has compute capability 12.1, and this program was built for 8.0, 9.0; build "
                 "it with cmake -DCMAKE_CUDA_ARCHITECTURES=121 and a CUDA toolkit that knows it");
  }
  cuda_on_cpu::image_error = cudaErrorUnsupportedPtxVersion;
  EXPECT_PRED2(contains, refusal(), "update the driver, or build it with cmake -DCMAKE_CUDA_ARCHITECTURES=121");
  cuda_on_cpu::image_error = cudaSuccess;
  EXPECT_EQ(refusal(), "");
  EXPECT_PRED2(contains, gpu_note(), "translates the GPU code for compute capability 12.1");
  cuda_on_cpu::gpu = cuda_on_cpu::kHopper;
  EXPECT_EQ(gpu_note(), "");
  cuda_on_cpu::gpu = cuda_on_cpu::kGeForce;  // 8.6 runs the code of 8.0
  EXPECT_EQ(gpu_note(), "");
}

// A process takes a GPU that the program supports; the ranks of a run share out those.
TEST_F(Machines, WithGpusOfSeveralKinds) {
  cuda_on_cpu::gpu = kTuring, cuda_on_cpu::gpu_count = 3;
  EXPECT_EQ(refusal(), "");
  EXPECT_EQ(cuda::current_gpu(), 1);
  EXPECT_EQ(gpus_for_ranks(), 2);
  cuda::local_rank = 1;
  EXPECT_EQ(refusal(), "");
  EXPECT_EQ(cuda::current_gpu(), 2);
  const std::vector<FoundGpu> gpus = found_gpus();
  ASSERT_EQ(gpus.size(), 3u);
  EXPECT_EQ(gpus[0].problem, "8.0 is the minimum");
  EXPECT_EQ(gpus[1].problem, "");
  EXPECT_GT(gpus[1].total, 0u);
}

// What another process holds is named when a run does not fit.
TEST_F(Machines, WithTooLittleMemoryFree) {
  Cuda other(std::size_t{600} << 20);
  EXPECT_PRED2(contains, error_of([] { Cuda dev(std::size_t{500} << 20); }), "because 600 MiB are in use already");
}

}  // namespace
}  // namespace streambp
