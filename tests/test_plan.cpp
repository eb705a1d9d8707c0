// The plan: its memory matches the arena to the byte, its chunks and lengths are the largest that fit, and the
// advertised lengths fit.
#include "commands/step_progress.h"
#include "data/files/checkpoint.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

// A whole training step, optimizer included, on the Cpu device in an arena of exactly the planned size.
template <class T>
void expect_plan_is_the_arena(const Config& c, Index rows, const Schedule& schedule, OptimizerKind kind,
                              Index micro_batches, const std::string& what) {
  constexpr DType type = sizeof(T) == 8 ? DType::f64 : sizeof(T) == 4 ? DType::f32 : DType::bf16;
  const StepSettings settings{c, type, kind, micro_batches};
  const Usage usage = plan(settings, rows, schedule);
  Cpu dev(usage.peak);
  Trainer<Cpu, T> trainer(dev, c, rows, kind);
  trainer.initialise(1, 0.1);
  std::vector<Batch> batches;
  for (Index i = 0; i < micro_batches; ++i) batches.push_back(packed(c, {rows}, static_cast<std::uint64_t>(i)));
  if (kind == OptimizerKind::none) {
    trainer.accumulate(batches, schedule);
  } else {
    trainer.step(batches, schedule, OptimizerSettings{}, 1);
  }
  EXPECT_EQ(dev.arena.peak(), usage.peak) << what;
  EXPECT_EQ(dev.arena.capacity(), usage.peak) << what;
  EXPECT_EQ(dev.arena.peak_by_kind(), usage.by_kind) << what;
  EXPECT_EQ(dev.flops(), usage.flops) << what;
  std::size_t sum = 0;
  for (std::size_t bytes : usage.by_kind) sum += bytes;
  EXPECT_EQ(sum, usage.peak) << what;
}

TEST(Plan, MatchesThePeakOfTheArenaToTheByte) {
  for (const Family& family : walked_families()) {
    for (Index rows : sized<Lengths>({1, 769}, {300})) {
      for (Mode mode : kModes) {
        for (Index micro_batches : sized<Lengths>({1, 2}, {2})) {
          if (rows == 769 && micro_batches == 1) continue;
          const OptimizerKind kind = micro_batches == 1 ? OptimizerKind::none : OptimizerKind::adamw;
          const Schedule schedule = schedule_for(mode, family.config, rows, kTile);
          const std::string what =
              family.name + ", " + std::to_string(rows) + " rows, " + name(mode) + ", " + std::to_string(micro_batches);
          expect_plan_is_the_arena<float>(family.config, rows, schedule, kind, micro_batches, what);
          if (rows == 1) continue;
          expect_plan_is_the_arena<BFloat16>(family.config, rows, schedule, kind, micro_batches, what);
        }
      }
    }
  }
}

// What other trainers do: the memory between that of checkpointing and of StreamBP, for the same work.
TEST(Plan, KnowsCheckpointingWithAChunkedLoss) {
  const Config c = families()[2].config;
  const Schedule schedule = schedule_for(Mode::chunked_loss, c, 769, kTile);
  expect_plan_is_the_arena<float>(c, 769, schedule, OptimizerKind::adamw, 2, "chunked loss");
  StepSettings s{known_models().at("qwen3-8b"), DType::bf16, OptimizerKind::none, 1};
  s.device = DeviceKind::cuda, s.tile = kGpuTile;
  const auto of = [&](Mode mode) { return plan(s, 100000, schedule_for(mode, s, 100000, 2048)); };
  const auto gib = [&](Mode mode) { return static_cast<double>(of(mode).peak) / (1 << 30); };
  EXPECT_NEAR(gib(Mode::checkpoint), 105, 1);
  EXPECT_NEAR(gib(Mode::chunked_loss), 61, 1);
  EXPECT_NEAR(gib(Mode::stream), 48, 1);
  EXPECT_NEAR(of(Mode::chunked_loss).flops, of(Mode::stream).flops, 1e-3 * of(Mode::stream).flops);
}

TEST(Plan, EstimatesTheFlopsOfAStep) {
  for (const Family& family : walked_families()) {
    const Config& c = family.config;
    const std::vector<Batch> batches = {packed(c, {700}), packed(c, {128, 300, 50}), packed(c, {64, 384, 220})};
    const Schedule schedule = schedule_for(Mode::stream, c, 700, kTile);
    const StepSettings settings{c, DType::f32, OptimizerKind::adamw, 3};
    Cpu dev(plan(settings, 700, schedule).peak);
    Trainer<Cpu, float> trainer(dev, c, 700, OptimizerKind::adamw);
    trainer.initialise(1, 0.1);
    trainer.step(batches, schedule, OptimizerSettings{}, 1);
    EXPECT_NEAR(step_flops(settings, batches, schedule) / dev.flops(), 1, 0.05)
        << family.name;  // windows are estimated
  }
}

TEST(StepProgress, ShowsWhatIsDone) {
  Plan dev;
  const auto shown = [&](StepProgress::Pace pace, double flops) {
    testing::internal::CaptureStdout();
    const StepProgress progress(
        dev, "step 1/2", [] { return 100.0; }, pace);
    dev.reset_work();
    dev.operation("product", flops, 0);
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_TRUE(shown({0, 0}, 25).starts_with("step 1/2: 25% done, about "));
  EXPECT_TRUE(shown({0, 0}, 500).starts_with("step 1/2: 99% done, about "));  // more than estimated
  EXPECT_EQ(shown({0, 0}, 0.5), "step 1/2: 0% done\n");
  EXPECT_EQ(shown({1e9, 0}, 25), "");
  EXPECT_FALSE(dev.on_work);
}

// With 2048 rows, the products of a narrow model have fewer blocks than a GPU runs at once.
TEST(Plan, DefaultChunksFillAGpu) {
  StepSettings s{known_models().at("qwen3-8b")};
  s.device = DeviceKind::cuda, s.tile = kGpuTile;
  EXPECT_EQ(default_chunk(s), 2048);
  s.config.hidden = 1536;
  EXPECT_EQ(default_chunk(s), 4096);
  s.config.hidden = 768;
  EXPECT_EQ(default_chunk(s), 8192);
  s.device = DeviceKind::cpu, s.tile = kTile;
  EXPECT_EQ(default_chunk(s), 512);
}

TEST(Plan, KnowsEveryOptimizer) {
  const Config c = families()[2].config;
  const Schedule schedule = schedule_for(Mode::stream, c, 300, kTile);
  for (const auto& [name, kind] : kOptimizers) {
    expect_plan_is_the_arena<float>(c, 300, schedule, kind, 1, name);
    expect_plan_is_the_arena<BFloat16>(c, 300, schedule, kind, 2, name);
  }
}

// All later micro-batches are like the second, so a thousand take no longer to plan.
TEST(Plan, ManyMicroBatchesNeedTheMemoryOfTwo) {
  StepSettings s{known_models().at("gpt2"), DType::f32, OptimizerKind::adamw, 1};
  const Schedule schedule = schedule_for(Mode::stream, s.config, 1000, 256);
  auto with = [&](Index micro_batches) {
    s.micro_batches = micro_batches;
    return plan(s, 1000, schedule);
  };
  const Usage two = with(2), three = with(3), four = with(4), many = with(Index{1} << 40);
  EXPECT_EQ(three.peak, two.peak);
  EXPECT_EQ(many.by_kind, two.by_kind);
  EXPECT_NEAR(four.flops - three.flops, three.flops - two.flops, 1e-9 * two.flops);
}

TEST(Plan, TheLongestStreamIsTheLongestThatFits) {
  StepSettings s{known_models().at("qwen3-0.6b"), DType::bf16, OptimizerKind::none, 1};
  const std::size_t budget = std::size_t{5} << 30;
  auto peak = [&](Mode mode, Index rows, Index c) { return plan(s, rows, schedule_for(mode, s, rows, c)).peak; };
  for (Mode mode : kModes) {
    const Index rows = longest_for_budget(s, mode, 1024, budget);
    EXPECT_LE(peak(mode, rows, 1024), budget);
    EXPECT_GT(peak(mode, rows + kTile, 1024), budget);
  }
  EXPECT_EQ(longest_for_budget(s, Mode::full, 1024, 1 << 20), 0);
}

TEST(Plan, LargestFindsTheLimit) {
  for (Index edge : {0, 1, 2, 3, 7, 8, 99, 100}) {
    for (Index guess : {0, 1, 2, 8, 50, 99, 100, 1000})
      EXPECT_EQ(largest(
                    100, [&](Index n) { return n <= edge; }, guess),
                edge);
  }
  EXPECT_EQ(largest(100, [](Index) { return true; }), 100);
}

// The advertised lengths for 80 GiB.
TEST(Plan, LongSequencesFitIn80GiB) {
  const std::size_t budget = std::size_t{80} << 30;
  auto longest = [&](const char* model, OptimizerKind kind, Index micro_batches) {
    StepSettings s{known_models().at(model), DType::bf16, kind, micro_batches};
    s.device = DeviceKind::cuda;
    return longest_for_budget(s, Mode::stream, 1024, budget);
  };
  EXPECT_GE(longest("qwen3-8b", OptimizerKind::none, 2), 150000);  // the whole gradient resident
  EXPECT_GE(longest("qwen3-4b", OptimizerKind::adamw_bf16, 1), 260000);
  EXPECT_GE(longest("qwen3-8b", OptimizerKind::adamw_bf16, 1), 90000);
}

// With one micro-batch, the gradient reuses the memory of saved layer inputs, so the peak is less than their sum.
TEST(Plan, SavedInputsAndGradientShareOneBlock) {
  const StepSettings one{known_models().at("qwen3-8b"), DType::bf16, OptimizerKind::none, 1};
  StepSettings two = one;
  two.micro_batches = 2;
  const Index rows = 60000;
  const Schedule schedule = schedule_for(Mode::stream, one.config, rows, 1024);
  EXPECT_LT(plan(one, rows, schedule).peak + (std::size_t{12} << 30), plan(two, rows, schedule).peak);
}

// Per token and in bf16, for streams so long that layers and not the head set the peak: saved layer inputs, the running
// gradient, K, V, and float32 dK, dV; nothing else grows with the length.
TEST(Plan, BytesPerTokenMatchTheFormula) {
  const Config c = known_models().at("qwen3-8b");
  const StepSettings s{c, DType::bf16, OptimizerKind::none, 2};
  auto peak = [&](Index rows) {
    return static_cast<double>(plan(s, rows, schedule_for(Mode::stream, c, rows, 1024)).peak);
  };
  const double per_token = (peak(1 << 19) - peak(1 << 18)) / (1 << 18);
  const double expected = 2.0 * static_cast<double>(c.layers * c.hidden + c.hidden) +
                          2.0 * 2 * static_cast<double>(c.attention(0).kv_width()) +
                          2.0 * 4 * static_cast<double>(c.attention(0).kv_width());
  // and eight numbers: token, target, position, key_begin, weight, logp, its place by token and by position
  EXPECT_NEAR(per_token, expected + 8 * 4, 1);
}

TEST(Plan, ParameterCountsMatchPublishedModels) {
  const std::map<std::string, double> published = {
      {"gpt2", 124.44e6},          {"gpt2-xl", 1557.6e6},         {"llama-3.2-1b", 1235.8e6},
      {"llama-3.2-3b", 3212.7e6},  {"llama-3.1-8b", 8030.3e6},    {"qwen2.5-0.5b", 494.0e6},
      {"qwen2.5-1.5b", 1543.7e6},  {"qwen2.5-3b", 3085.9e6},      {"qwen2.5-7b", 7615.6e6},
      {"qwen3-0.6b", 596.0e6},     {"qwen3-1.7b", 1720.6e6},      {"qwen3-4b", 4022.5e6},
      {"qwen3-8b", 8190.7e6},      {"qwen3-14b", 14768.3e6},      {"qwen3-32b", 32762.1e6},
      {"llama-2-7b", 6738.4e6},    {"mistral-7b-v0.1", 7241.7e6}, {"smollm2-135m", 134.5e6},
      {"smollm2-1.7b", 1711.4e6},  {"tinyllama-1.1b", 1100.0e6},  {"gemma-3-270m", 268.1e6},
      {"gemma-3-1b", 999.9e6},     {"smollm3-3b", 3075.1e6},      {"starcoder2-3b", 3030.4e6},
      {"starcoder2-7b", 7174.0e6}, {"gemma-2b", 2506.2e6},        {"gemma-7b", 8537.7e6},
      {"phi-3-mini-4k", 3821.1e6}, {"phi-4", 14659.5e6},          {"olmo-2-7b", 7298.6e6},
      {"glm-4-9b", 9400.0e6},      {"granite-3.3-2b", 2533.5e6},  {"granite-3.3-8b", 8170.8e6},
      {"command-r", 34980.8e6},    {"aya-expanse-8b", 8028.0e6},  {"exaone-4.0-1.2b", 1279.4e6},
      {"ernie-4.5-0.3b", 360.7e6}, {"seed-oss-36b", 36151.1e6},   {"lfm2-350m", 354.5e6},
      {"lfm2-700m", 742.5e6},      {"lfm2-1.2b", 1170.3e6},       {"lfm2-2.6b", 2569.3e6},
      {"qwen3.5-0.8b", 752.4e6},   {"qwen3.5-2b", 1881.8e6},      {"qwen3.5-4b", 4205.8e6},
      {"qwen3.5-9b", 8953.8e6},    {"qwen3.5-27b", 26896.0e6},    {"olmo-hybrid-7b", 7430.9e6}};
  for (const auto& [model, count] : published) {
    EXPECT_NEAR(static_cast<double>(parameter_count(known_models().at(model))), count, 0.1e6) << model;
  }
}

}  // namespace
}  // namespace streambp
