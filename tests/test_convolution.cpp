// Short convolutions: documents that begin beside the edges of tiles, in all modes and on ranks, in decoding, and against
// the oracle.
#include "data/files/adapters.h"
#include "tests/ranks.cuh"

namespace streambp {
namespace {

Config hybrid(Index width = 3) {
  Config c = make_config("lfm2", {41, 20, 3, 4, 2, 6, 26, 0, true});
  c.mixers = {MixerKind::convolution, MixerKind::attention, MixerKind::convolution};
  c.convolution_width = width;
  return c;
}

// Documents that begin at the last two rows of a tile, and at the first two and the third of one; one of two rows around the
// edge; a tile that is one document.
const Lengths kAroundEdges = {255, 1, 2, 253, 2, 256, 1, 255, 5};

TEST(Convolution, DocumentsThatBeginBesideEdgesHaveTheGradientOfTheOracle) {
  for (const Index width : {2, 3, 4, 7}) {
    const Config c = hybrid(width);
    const Batch batch = packed(c, width == 3 ? kAroundEdges : Lengths{255, 1, 2, 40});
    const oracle::Result truth = oracle_gradient(c, batch, random_weights());
    const GradientRun full = run_gradient<Cpu, double>(c, batch, Schedule::full(batch.size()), random_weights());
    expect_oracle(full, truth, "width " + std::to_string(width));
    Schedule blocks = Schedule::stream(kTile, kTile);
    blocks.block = kTile;
    for (const Schedule& schedule : {Schedule::stream(kTile, kTile), Schedule::stream(2 * kTile, kTile), blocks})
      expect_same_bits(run_gradient<Cpu, double>(c, batch, schedule, random_weights()), full);
  }
}

// Rounding does not depend on where a document lies among tiles.
TEST(Convolution, ADocumentHasTheSameBitsAnywhere) {
  const Config c = hybrid();
  std::vector<std::vector<double>> logps;
  for (const Index before : {0, 254, 255, 256, 257}) {
    Batch batch;
    Random random(9);
    const auto document = [&](Index length, std::uint64_t use) {
      Tokens tokens;
      for (Index i = 0; i < length; ++i)
        tokens.push_back(static_cast<std::int32_t>(random.below(41, use + static_cast<std::uint64_t>(i))));
      return tokens;
    };
    if (before > 0) batch.append(document(before, 1000));
    batch.append(document(300, 5000));
    const auto logp = run_gradient<Cpu, BFloat16>(c, batch, Schedule::stream(kTile, kTile), random_weights()).logp;
    logps.emplace_back(logp.begin() + before, logp.end());
  }
  for (const auto& logp : logps) EXPECT_EQ(logp, logps.front());
}

TEST(Convolution, RanksAndLanesGiveTheBitsOfOneProcess) {
  const Config c = hybrid();
  const Task task{c, batches_of(c, 1, kAroundEdges), Mode::stream};
  for (const Index sequence : {1, 2}) expect_bits_of_one_process<Cpu, float>(1, sequence, task);
  Task far = task;
  far.places = {Place::far, Place::far, Place::far, Place::far}, far.block = kTile;
  expect_bits_of_one_process<Cpu, BFloat16>(1, 2, far);
}

TEST(Convolution, AdaptersAreOnAllKindsOfLayers) {
  const Config c = hybrid();
  const auto adapters = new_adapters(c, {.rank = 2, .alpha = 4});
  EXPECT_EQ(adapters.size(), 2u * (2 + 3) + (4 + 3));
  for (const char* name : {"conv.in_proj", "feed_forward.w2"})
    EXPECT_TRUE(adapters.contains(std::string("model.layers.2.") + name)) << name;
  EXPECT_TRUE(adapters.contains("model.layers.1.self_attn.q_proj"));
  EXPECT_EQ(new_adapters(c, {.rank = 2, .alpha = 4, .on = {"attention"}}).size(), 2u * 2 + 4);
}

TEST(Convolution, AConvolutionAloneNeedsNoDivisorOfRanks) {
  Config c = hybrid();
  EXPECT_EQ(sequence_divisor(c), 2);
  c.mixers.assign(3, MixerKind::convolution);
  EXPECT_EQ(sequence_divisor(c), 0);
  const Task task{c, batches_of(c, 1, kAroundEdges), Mode::stream};
  expect_bits_of_one_process<Cpu, float>(1, 3, task);
}

}  // namespace
}  // namespace streambp
