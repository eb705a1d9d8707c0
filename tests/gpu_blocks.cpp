// Weights in blocks on a GPU, against a CPU.
#include "tests/gguf_models.h"
#include "tests/gpu.h"
#include "tests/temporary.h"
#include "tests/training.h"

namespace streambp {
namespace {

class GpuBlocks : public GpuTest {};

template <class T>
void expect_bits_of_cpu(Cuda& gpu, BlockType type, const SwappedAxes& columns) {
  constexpr Index rows = 5, cols = 512;
  std::vector<std::uint8_t> bytes = random_blocks(type, rows, cols, 3);
  const Index width = bytes_of_row(type, cols);
  const std::vector<std::int32_t> chosen = {3, 0, 3};
  std::vector<T> expected(rows * cols), rows_expected(chosen.size() * cols);
  Cpu host(0);
  const Blocks on_host = {type, {bytes.data(), rows, width}, columns};
  dequantise(host, Matrix<T>(expected.data(), rows, cols), on_host);
  dequantise(host, Matrix<T>(rows_expected.data(), 3, cols), on_host, Matrix<const std::int32_t>(chosen.data(), 1, 3));
  auto scope = gpu.scope();
  const Blocks q = {type, allocate<std::uint8_t>(gpu, rows, width, Kind::weights), columns};
  const auto list = allocate<std::int32_t>(gpu, 1, 3, Kind::weights);
  const auto all = allocate<T>(gpu, rows, cols, Kind::weights), some = allocate<T>(gpu, 3, cols, Kind::weights);
  gpu.upload(q.bytes, bytes.data()), gpu.upload(list, chosen.data());
  dequantise(gpu, all, q), dequantise(gpu, some, q, list);
  const auto same = [](const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
  };
  EXPECT_TRUE(same(to_host(gpu, all), expected)) << static_cast<int>(type);
  EXPECT_TRUE(same(to_host(gpu, some), rows_expected)) << static_cast<int>(type);
}

TEST_F(GpuBlocks, HaveTheBitsOfACpu) {
  Cuda gpu(std::size_t{1} << 20);
  for (const GgufType& type : kGgufTypes) {
    if (size_of_block(type.type).weights() == 1) continue;
    for (const SwappedAxes& columns : {SwappedAxes{}, SwappedAxes{2, 4, 32}}) {
      expect_bits_of_cpu<float>(gpu, type.type, columns);
      expect_bits_of_cpu<BFloat16>(gpu, type.type, columns);
    }
  }
}

void expect_gradient_of_numbers(const std::string& architecture) {
  const fs::path file = fs::path(testing::TempDir()) / ("gpu_blocks_" + architecture + ".gguf");
  write_gguf_model(file, BlockType::q4_k, architecture);
  const Config kept = with_small_adapters(read_config(file));
  Config unpacked = kept;
  unpacked.blocks.clear();
  const Batch batch = packed(kept, {200, 100});
  const auto weights = [&](auto& dev, auto& model) {
    load_model(dev, file, model);
    initialise_adapters(dev, model, 3, 0.05);
  };
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const GradientRun truth = run_gradient<Cpu, double>(unpacked, batch, schedule, weights),
                    run = run_gradient<Cuda, float, float>(kept, batch, schedule, weights, {}, kTile);
  const Difference error = run.gradient.difference(truth.gradient);
  EXPECT_LE(error.relative, 1e-5) << error.tensor;
  EXPECT_NEAR(run.loss, truth.loss, 1e-5 * truth.loss);
}

TEST_F(GpuBlocks, ModelsHaveTheGradientOfTheirNumbers) {
  for (const char* architecture : {"gpt2", "llama", "qwen3moe"}) expect_gradient_of_numbers(architecture);
}

}  // namespace
}  // namespace streambp
