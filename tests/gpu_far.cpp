// Far memory of the GPU: pinned host memory. The same bits as near.
#include "tests/gpu.h"
#include "tests/ranks.cuh"

namespace streambp {
namespace {

class GpuFar : public GpuTest {};

Trained train_with(const Task& task, const Places& places) {
  Task with_places = task;
  with_places.places = places;
  if (places.inputs == Place::far) with_places.kept = KeptParts(Place::far);
  return train<Cuda, BFloat16>(with_places, {}, kTile);
}

// Chunks of one tile and of two; the stream has three.
TEST_F(GpuFar, InputsGiveTheSameBits) {
  const Changed piece(cuda::pinned_piece, std::size_t{1} << 16);  // copies cross pieces
  const Config c = models_for_ranks()[1].config;
  for (Index tiles : sized<Lengths>({1, 2}, {1}, {1})) {
    const Task task{c, {packed(c, sized<Lengths>({520, 40}, {520, 40}, {270}))}, Mode::stream, tiles * kTile};
    EXPECT_TRUE(train_with(task, {Place::far, Place::near, Place::far, Place::far}) == train_with(task, {})) << tiles;
  }
}

TEST_F(GpuFar, IsReservedInPieces) {
  const Changed piece(cuda::pinned_piece, std::size_t{1} << 16);
  Capacity capacity(0, 160'000);
  std::vector<double> shares;
  capacity.on_reserved = [&](double share) { shares.push_back(share); };
  const auto error = [&] { return error_of([&] { Cuda dev(capacity); }); };
  EXPECT_EQ(error(), "");
  ASSERT_EQ(shares.size(), 3u);
  EXPECT_EQ(shares[2], 1);
#ifdef CUDA_ON_CPU
  const Changed limit(cuda_on_cpu::pinned_memory.limit, std::size_t{80'000});
  EXPECT_PRED2(contains, error(), "only 0 MiB: out of memory; ");
  EXPECT_EQ(cuda_on_cpu::pinned_memory.limit, 80'000u) << "what was pinned is released";
#endif
}

// The embedding has so many rows that it is updated in parts.
TEST_F(GpuFar, OptimizersGiveTheSameBits) {
  const Config c = make_config("qwen3", {4096 + 77, 8, 1, 2, 1, 4, 12, 0, true});
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::adamw_8bit, OptimizerKind::muon}) {
    const Task task{c, {packed(c, {30})}, Mode::stream, kTile, kind};
    const Trained near = train_with(task, {}), far = train_with(task, {Place::far, Place::far}),
                  all_far = train_with(task, {Place::far, Place::far, Place::far, Place::far});
    EXPECT_TRUE(far == near && all_far == near) << static_cast<int>(kind);
    if (kSanitized) break;
  }
}

}  // namespace
}  // namespace streambp
