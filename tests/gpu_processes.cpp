// The program with one GPU per process, connected by NCCL and started by mpirun.
#include "tests/gpu.h"
#include "tests/processes.h"

#ifdef STREAMBP_NCCL

namespace streambp {
namespace {

const std::string kModel = " --family qwen3 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --mlp 48 ";

// Emulated, every process has the number of GPUs that CUDA_ON_CPU_GPUS says.
class GpuProcesses : public OnGpu<Processes> {
 protected:
  void TearDown() override {
    unsetenv("CUDA_ON_CPU_GPUS");
    Processes::TearDown();
  }
  const std::string program = kEmulated ? STREAMBP_EMULATED : binary();
  const std::string train =
      "train --device cuda" + kModel + "--length 40 --steps 2 --accumulate 2 --sample 0 --eval-every 0 ";
  const std::string verify = "verify --device cuda" + kModel + "--length 300 --tile 256 --sequence-ranks 2 ";
};

TEST_F(GpuProcesses, GiveTheBitsOfOneGpu) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (!kEmulated && count < 2) GTEST_SKIP() << "needs 2 GPUs";
  setenv("CUDA_ON_CPU_GPUS", "2", 1);
  expect_outcome(0, execute(train + "--out one", program));
  expect_runs(2, train + "--shard weights --out data", program);
  expect_same_run("one", "data");
  expect_runs(2, verify + "--json verify.json", program);
  EXPECT_TRUE(parse_json_file("verify.json")["verified"]);
}

TEST_F(GpuProcesses, NeedAGpuEach) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (count > 1) GTEST_SKIP() << "needs one GPU";
  expect_refused_by_ranks(ranks(2, program) + train + "--out run", "ranks 0 and 1 both use the GPU");
}

}  // namespace
}  // namespace streambp

#endif
