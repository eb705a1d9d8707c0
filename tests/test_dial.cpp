// The dial between full memory and StreamBP: any set of kept parts, of any layers, near or far, in any blocks and chunks, gives
// the same bits, in exactly the planned memory.
#include <random>

#include "data/files/adapters.h"
#include "tests/ranks.cuh"
#include "training/fit.h"

namespace streambp {
namespace {

class Dice {
 public:
  explicit Dice(unsigned seed) : random_(seed) {}
  Index below(Index n) { return static_cast<Index>(random_() % static_cast<unsigned>(n)); }
  Index between(Index least, Index most) { return least + below(most - least + 1); }
  template <class C>
  const auto& one_of(const C& all) {
    return all[static_cast<std::size_t>(below(static_cast<Index>(std::size(all))))];
  }

  KeptSets kept_sets(Index layers) {
    const Place places[] = {Place::near, Place::far, Place::nowhere, Place::nowhere};
    KeptSets kept;
    for (Index l = 0; l < layers; ++l) {
      for (std::size_t i = 1; i < kParts; ++i) kept = kept.with(l, layers, static_cast<Part>(i), one_of(places));
      if (below(3) == 0) kept = kept.with(l, layers, Part::input, Place::far);
    }
    return kept;
  }
  Schedule schedule(Index layers) {
    Schedule s = Schedule::stream(between(1, 3) * kTile, between(1, 3) * kTile, kept_sets(layers));
    s.block = below(3) * s.chunk;
    return s;
  }

 private:
  std::mt19937 random_;
};

// A model with windows in some of its layers, shorter or longer than blocks.
Config windowed(Dice& dice) {
  Config c = make_config("gemma3", {89, 26, 3, 4, 2, 6, 44, 0, true});
  c.window = dice.one_of(std::array{3, 20, 128, 300, 900}), c.local_rope_theta = 100;
  c.local = {dice.below(2) == 0, true, dice.below(2) == 0};
  return c;
}

template <class T>
void expect_bits_of_full_memory(unsigned seed, int cases) {
  Dice dice(seed);
  const std::vector<Family> families = walked_families();
  for (int i = 0; i < cases;) {
    const Config c = dice.below(2) == 0 ? windowed(dice) : dice.one_of(families).config;
    Lengths lengths;
    for (Index rows = 0; rows < dice.between(3, 6) * kTile; rows += lengths.back())
      lengths.push_back(dice.one_of(std::array{dice.between(1, 40), dice.between(200, 900)}));
    for (Index& length : lengths)
      if (c.max_length > 0) length = std::min(length, c.max_length);
    const Batch batch = packed(c, lengths);
    const GradientRun full = run_gradient<Cpu, T>(c, batch, Schedule::full(batch.size()), random_weights());
    for (int n = 0; n < 10 && i < cases; ++n, ++i) {
      const Schedule schedule = dice.schedule(c.layers);
      expect_same_bits(run_gradient<Cpu, T>(c, batch, schedule, random_weights()), full,
                       c.family + ", window " + std::to_string(c.window) + ", " + std::to_string(batch.size()) +
                           " rows, chunk " + std::to_string(schedule.chunk) + ", block " +
                           std::to_string(schedule.block));
      if (testing::Test::HasFailure()) return;
    }
  }
}
constexpr int kCases = kSanitized ? 20 : 120;
TEST(Dial, AnySetBlockAndChunkGivesTheBitsOfFullMemoryInFloat32) { expect_bits_of_full_memory<float>(1, kCases); }
TEST(Dial, AnySetBlockAndChunkGivesTheBitsOfFullMemoryInBFloat16) { expect_bits_of_full_memory<BFloat16>(2, kCases); }

Task windowed_task(Index block) {
  Config c = models_for_ranks().back().config;
  c.window = 20, c.local = {true, false};
  Task task{c, batches_of(c, sized<std::size_t>(3, 1), {700, sized<Index>(250, 60)}), Mode::stream};
  task.block = block;
  return task;
}

// In the last round, one rank has blocks without rows.
TEST(Dial, RanksInBlocksGiveTheBitsOfOneProcess) {
  for (const auto& [streams, sequence] : {std::pair(1, 2), {2, 1}, {2, 2}}) {
    if (kSanitized && streams > 1) break;
    expect_bits_of_one_process<Cpu, float>(streams, sequence, windowed_task(sequence == 1 ? 2 * kTile : kTile));
  }
  if (kSanitized) return;
  Task task = windowed_task(2 * kTile);
  task.places = {Place::near, Place::far, Place::far, Place::far}, task.kept = KeptParts::everything();
  expect_bits_of_one_process<Cpu, BFloat16>(2, 1, task);
}

// Several blocks give the bits of one.
template <class T, class G = T>
void expect_bits_of_one_block(const Task& whole) {
  const Trained truth = train<Cpu, T, G>(whole, {});
  for (const Index block : sized<Lengths>({kTile, 2 * kTile, 3 * kTile}, {2 * kTile})) {
    Task task = whole;
    task.block = block;
    if (!kSanitized) {
      EXPECT_TRUE((train<Cpu, T, G>(task, {}) == truth)) << block;
    }
    task.kept = KeptParts::everything();
    EXPECT_TRUE((train<Cpu, T, G>(task, {}) == truth)) << block << ", everything kept";
  }
}
TEST(Dial, MicroBatchesInBlocks) { expect_bits_of_one_block<BFloat16, float>(windowed_task(0)); }
TEST(Dial, PairsInBlocks) {
  Task task = windowed_task(0);
  task.batches = {packed(task.config, {300, 280, 250, 270})};
  task.objective = {.kind = ObjectiveKind::dpo, .preference = Preference::simpo};
  expect_bits_of_one_block<float>(task);
}
TEST(Dial, RewardsInBlocks) {
  Task task = windowed_task(0);
  const Objective objective = {.kind = ObjectiveKind::grpo, .kl = 0.1};
  for (Batch& batch : task.batches) batch = with_objective_data(batch, std::vector<double>(batch.tokens.size(), -2));
  task.objective = objective;
  expect_bits_of_one_block<float>(task);
}
TEST(Dial, AdaptersInBlocks) {
  Task task = windowed_task(0);
  task.config.trained.emplace();
  task.config.adapters = new_adapters(task.config, {.rank = 3, .alpha = 6});
  expect_bits_of_one_block<float>(task);
  task.config.base = Base::nf4;
  expect_bits_of_one_block<BFloat16, float>(task);
}
TEST(Dial, SomeLayersInBlocks) {
  Task task = windowed_task(0);
  task.config.trained = {"model.layers.1.mlp.up_proj.weight"};
  expect_bits_of_one_block<float>(task);
}
TEST(Dial, WeightsInFarMemoryInBlocks) {
  Task task = windowed_task(0);
  task.places.weights = task.places.gradients = Place::far;
  expect_bits_of_one_block<float>(task);
}

// Steps of models with and without windows, trained completely or with adapters; in several rounds, and on ranks.
std::vector<std::pair<std::string, StepSettings>> steps_to_plan() {
  std::vector<std::pair<std::string, StepSettings>> steps;
  StepSettings plain{make_config("llama", {256, 256, 8, 4, 4, 64, 512, 0, true})};
  plain.optimizer = OptimizerKind::none;
  const auto add = [&](const char* name) { return &steps.emplace_back(name, plain).second; };
  add("whole model");
  StepSettings* s = add("windows");
  s->config.window = 500, s->config.local = {true, true, true, false, true, true, true, false};
  s = add("adapters and windows");
  s->config.window = 100, s->config.local = {true, true, true, false, true, true, true, false};
  s->config.trained.emplace(), s->config.adapters = new_adapters(s->config, {.rank = 4, .alpha = 8});
  s = add("16 micro-batches");
  s->micro_batches = 16, s->optimizer = OptimizerKind::adamw;
  s = add("two ranks share a stream");
  s->ranks.all.size = s->ranks.sequence.size = 2;
  return steps;
}

TEST(Dial, MoreMemoryIsNeverSlower) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  for (const auto& [name, s] : steps_to_plan()) {
    for (const bool far : {false, true}) {
      SCOPED_TRACE(name + (far ? ", with far memory" : ""));
      const Rates rates = usual_rates(s.device, 64);
      const std::vector<Places> places = far ? std::vector<Places>{{}, {Place::far}} : std::vector<Places>{{}};
      double time = INFINITY;
      for (std::size_t kib = 20 << 10; kib <= (std::size_t{1} << 20); kib = kib * 5 / 4) {
        const Capacity budget(kib << 10, far ? std::size_t{1} << 31 : 0);
        const Fit found = fit(s, Mode::stream, 8000, {up_to(8000), budget, places, {{}, far}}, rates);
        if (found.chunk == 0) continue;
        const StepSettings with = found.settings(s);
        const Usage usage = plan(with, 8000, schedule_for(Mode::stream, with, 8000, found.chunk));
        EXPECT_TRUE(usage.fits(budget)) << kib;
        EXPECT_EQ(usage.peak, found.usage.peak);
        EXPECT_LE(predict(usage, rates).total(), (far ? 1.005 : 1) * time) << kib;
        time = predict(usage, rates).total();
      }
      const double least = predict(plan(s, 8000, Schedule::full(8000)), rates).total();
      const Fit everything = fit(s, Mode::stream, 8000, {up_to(8000), Plan::kUnlimited, {{}}}, rates);
      EXPECT_LE(predict(everything.usage, rates).total(), 1.01 * least) << "nothing is computed twice";
    }
  }
}

// In 80 GiB, adapters on Gemma's 27B shapes: blocks need less memory for a longer stream.
TEST(Dial, BlocksTakeLessMemoryWhereMostLayersHaveWindows) {
  Config c = make_config("gemma3", {262208, 5376, 62, 32, 16, 128, 21504, 0, true});
  c.window = 1024, c.local.clear();
  for (Index l = 0; l < c.layers; ++l) c.local.push_back((l + 1) % 6 != 0);
  c.trained.emplace(), c.adapters = new_adapters(c, {.rank = 32, .alpha = 32}), c.base = Base::nf4;
  StepSettings s{c, DType::bf16, OptimizerKind::none};
  s.device = DeviceKind::cuda, s.tile = kGpuTile, s.wide_gradient = true;
  const auto longest = [&](Index block) {
    s.block = block;
    return static_cast<double>(longest_for_budget(s, Mode::stream, 2048, std::size_t{80} << 30));
  };
  EXPECT_GE(longest(16384), 1.9 * longest(0));
}

TEST(Dial, TheLongestStreamMayBeInBlocks) {
  Config c = make_config("gemma3", {300, 64, 12, 4, 2, 16, 128, 0, true});
  c.window = 64, c.local.clear();
  for (Index l = 0; l < c.layers; ++l) c.local.push_back((l + 1) % 6 != 0);
  const StepSettings s{c, DType::f32, OptimizerKind::none};
  const std::size_t budget = std::size_t{24} << 20;
  Allowed allowed = {exactly(kTile), budget, {{}}};
  const Longest longest = longest_that_fits(s, Mode::stream, allowed);
  EXPECT_GT(longest.settings.block, 0);
  EXPECT_GT(longest.rows, longest_for_budget(s, Mode::stream, kTile, budget));
  EXPECT_EQ(longest.rows, longest_for_budget(longest.settings, Mode::stream, kTile, budget));
  const auto fits = [&](Index rows) { return closest(s, Mode::stream, rows, allowed).usage.fits(budget); };
  EXPECT_TRUE(fits(longest.rows));
  EXPECT_FALSE(fits(2 * longest.rows));

  allowed.budget = {budget, std::size_t{6} << 20}, allowed.places = {{}, {Place::far}};
  EXPECT_GE(longest_that_fits(s, Mode::stream, allowed).rows, longest.rows) << "far memory makes no stream shorter";
}

}  // namespace
}  // namespace streambp
