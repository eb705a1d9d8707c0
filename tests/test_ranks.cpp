// Ranks and lanes: any grid of ranks gives the bits of one process with as many lanes, in every mode; and what the plan
// counts is what is allocated and sent.
#include "tests/ranks.cuh"

namespace streambp {
namespace {

class EveryModel : public testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryModel, testing::ValuesIn(models_for_ranks()), PrintFamily());

TEST_P(EveryModel, LanesGiveTheSameGradientToRoundingAndTheSameLogProbs) {
  const Config& c = GetParam().config;
  const Task task{c, batches_of(c, 1), Mode::stream};
  const Trained one = train<Cpu, double>(task, {}), three = train<Cpu, double>(task, Ranks{{}, {}, 3});
  EXPECT_LE(three.weights->difference(*one.weights).relative, 1e-10);
  EXPECT_FALSE(*three.weights == *one.weights) << "lanes should change the order of additions";
  const std::size_t n = one.logp.size() / 2;  // of the first step
  EXPECT_TRUE(std::equal(one.logp.begin(), one.logp.begin() + static_cast<std::ptrdiff_t>(n), three.logp.begin()));
}

TEST_P(EveryModel, LanesGiveTheSameBitsInAllModes) {
  const Config& c = GetParam().config;
  const Trained full = train<Cpu, float>({c, batches_of(c, 2), Mode::full}, Ranks{{}, {}, 2});
  for (Index chunk : {kTile, 2 * kTile})
    EXPECT_TRUE((train<Cpu, float>({c, batches_of(c, 2), Mode::stream, chunk}, Ranks{{}, {}, 2}) == full)) << chunk;
}

TEST_P(EveryModel, SequenceRanksGiveTheBitsOfLanes) {
  const Config& c = GetParam().config;
  for (Mode mode : kModes) expect_bits_of_one_process<Cpu, float>(1, 2, {c, batches_of(c, 1), mode});
  expect_bits_of_one_process<Cpu, float>(1, 4, {c, batches_of(c, 1), Mode::stream});
}

TEST_P(EveryModel, DataRanksGiveTheBitsOfOneProcessThatAccumulates) {
  const Config& c = GetParam().config;
  for (Mode mode : kModes) expect_bits_of_one_process<Cpu, float>(2, 1, {c, batches_of(c, 2), mode});
  expect_bits_of_one_process<Cpu, float>(2, 1,
                                         {c, batches_of(c, 3), Mode::stream});  // one rank is idle in the last round
  expect_bits_of_one_process<Cpu, float>(4, 1,
                                         {c, batches_of(c, 5), Mode::stream});  // three ranks are idle in the second
}

// Per layer and rank: forward, recomputation and backward each exchange Q, K, V and the attention output, or gradients.
TEST(Ranks, SequenceParallelismSendsOnlyRowsForHeads) {
  const Config c = make_config("qwen3", {500, 64, 6, 8, 4, 16, 96, 0, true});
  const Index n = 4 * 3 * kTile, ranks = 4;
  auto sent = [&](Index layers) {
    StepSettings s{c};
    s.config.layers = layers;
    s.optimizer = OptimizerKind::none, s.ranks = {{0, ranks}, {0, ranks}};
    const double gradients = 4.0 * static_cast<double>(parameter_count(s.config)) * (ranks - 1) / ranks;
    return plan(s, n, schedule_for(Mode::stream, s.config, n, kTile)).sent - gradients;
  };
  const double widths = static_cast<double>(2 * c.attention(0).q_width() + 2 * c.attention(0).kv_width());
  const double expected = 3 * static_cast<double>(n) * widths * sizeof(float) * (ranks - 1) / (ranks * ranks);
  EXPECT_NEAR(sent(6) - sent(5), expected, 0.01 * expected);
}

TEST_P(EveryModel, GridsInAllTypesGiveTheBitsOfOneProcess) {
  const Config& c = GetParam().config;
  const Task task{c, batches_of(c, 3), Mode::stream};
  expect_bits_of_one_process<Cpu, BFloat16>(2, 2, task);
  if (kSanitized) return;  // the same code with other types
  expect_bits_of_one_process<Cpu, double>(2, 2, task);
  expect_bits_of_one_process<Cpu, BFloat16, float>(2, 2, task);
  for (OptimizerKind kind : {OptimizerKind::adamw_bf16, OptimizerKind::adamw_8bit, OptimizerKind::muon}) {
    Task other = task;
    other.optimizer = kind;
    expect_bits_of_one_process<Cpu, BFloat16, BFloat16>(2, 2, other);
  }
}

// Rows without a token are divided among the ranks, too. Each of these micro-batches takes 698 rows, the last all of them.
TEST(Ranks, UnusedRowsGiveTheBitsOfOneProcess) {
  const Config c = models_for_ranks()[1].config;
  Task task{c, {packed(c, {70, 300, 250}, 1), packed(c, {300, 378}, 2), packed(c, {64, 634}, 3)}, Mode::stream};
  task.layout = DocumentLayout{kDeltaBlock};
  expect_bits_of_one_process<Cpu, float>(2, 2, task);
  const Ranks alone = {{}, {}, 2};
  const Trained full = train<Cpu, float>(task, alone);
  task.layout = {};
  EXPECT_NEAR((train<Cpu, float>(task, alone)).loss, full.loss, 1e-5);
}

// The weights of a pair depend on all its log-probs, which are on several ranks.
TEST(Ranks, PairsGiveTheBitsOfOneProcess) {
  const Config c = models_for_ranks()[1].config;
  Task task{c, {}, Mode::stream};
  for (std::uint64_t i = 0; i < 3; ++i) task.batches.push_back(packed(c, {300, 280, 250, 270}, i));
  task.objective = {.kind = ObjectiveKind::dpo, .preference = Preference::simpo};
  expect_bits_of_one_process<Cpu, float>(2, 2, task);
}

}  // namespace
}  // namespace streambp
