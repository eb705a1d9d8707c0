// The walk: every parameter of every family in every mode, against the oracle and bit for bit between modes.
#include "tests/support.cuh"

namespace streambp {
namespace {

// Document ends fall inside tiles and chunks; the last tile is incomplete.
const Lengths kDocuments = sized<Lengths>({5, 300, 1, 220, 60, 37}, {5, 270, 1, 60});

class EveryFamily : public testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Walk, EveryFamily, testing::ValuesIn(walked_families()), PrintFamily());

// Every mode, and every way to keep parts of layers.
std::vector<std::pair<std::string, Schedule>> all_schedules(Index rows) {
  std::vector<std::pair<std::string, Schedule>> schedules = {{"full", Schedule::full(rows)},
                                                             {"checkpoint", Schedule::checkpoint(rows)}};
  // one tile; two, which do not divide the stream; longer than the stream
  for (Index tiles : sized<Lengths>({1, 2, 4}, {1})) {
    schedules.push_back({"stream " + std::to_string(tiles * kTile), Schedule::stream(tiles * kTile, kTile)});
  }
  schedules.push_back({"stream by one tile, head by two", Schedule::stream(kTile, 2 * kTile)});
  for (Index tiles : sized<Lengths>({1, 2}, {1})) {
    const auto add = [&](const std::string& kept, const KeptSets& sets) {
      schedules.push_back(
          {kept + ", by " + std::to_string(tiles * kTile), Schedule::stream(tiles * kTile, kTile, sets)});
    };
    add("inputs far", KeptParts::inputs(Place::far));
    add("everything", KeptParts::everything());
    add("all that can be far", KeptParts(Place::far));
  }
  for (const auto& [chunk, block] : {std::pair(1, 1), {1, 2}, {2, 2}}) {
    schedules.push_back({"blocks of " + std::to_string(block * kTile) + ", by " + std::to_string(chunk * kTile),
                         Schedule::stream(chunk * kTile, kTile)});
    schedules.back().second.block = block * kTile;
  }
  // Each part alone, in the last layer, and without it all others.
  for (std::size_t i = 1; i < kParts; ++i) {
    const auto part = static_cast<Part>(i);
    const KeptSets others = KeptParts::everything().with(part, Place::nowhere);
    schedules.push_back({std::string("without ") + kPartNames[i], Schedule::stream(kTile, kTile, others)});
  }
  return schedules;
}

// The other schedules have the same bits, below.
TEST_P(EveryFamily, GradientInFloat64MatchesTheOracle) {
  const Config& c = GetParam().config;
  const Batch batch = packed(c, kDocuments);
  const oracle::Result truth = oracle_gradient(c, batch, random_weights());
  for (const Schedule& schedule : {Schedule::full(batch.size()), Schedule::stream(kTile, kTile)})
    expect_oracle(run_gradient<Cpu, double>(c, batch, schedule, random_weights()), truth);
}

TEST_P(EveryFamily, GradientInFloat32MatchesFloat64ToRounding) {
  const Config& c = GetParam().config;
  const Batch batch = packed(c, kDocuments);
  const GradientRun truth = run_gradient<Cpu, double>(c, batch, Schedule::full(batch.size()), random_weights());
  for (const Schedule& schedule : {Schedule::full(batch.size()), Schedule::stream(kTile, kTile)}) {
    const Difference error =
        run_gradient<Cpu, float>(c, batch, schedule, random_weights()).gradient.difference(truth.gradient);
    EXPECT_LE(error.relative, 1e-5) << error.tensor;
  }
}

// The median of three models: a small model may have numbers that cancel, and then only its errors of rounding are left.
TEST_P(EveryFamily, GradientInBFloat16MatchesFloat64ToRounding) {
  const Config c = with_all_experts(GetParam().config);
  const Batch batch = packed(c, kDocuments);
  const Schedule schedule = Schedule::stream(kTile, kTile);
  std::vector<double> errors;
  for (std::uint64_t seed : {3, 4, 5}) {
    const GradientRun truth = run_gradient<Cpu, double>(c, batch, schedule, random_weights(seed));
    const GradientRun run = run_gradient<Cpu, BFloat16>(c, batch, schedule, random_weights(seed));
    errors.push_back(run.gradient.difference(truth.gradient).relative);
  }
  std::ranges::sort(errors);
  EXPECT_LE(errors[1], 0.08);
}

template <class T>
void expect_equal_bits(const Config& c) {
  const Batch batch = packed(c, kDocuments);
  const GradientRun full = run_gradient<Cpu, T>(c, batch, Schedule::full(batch.size()), random_weights());
  for (const auto& [name, schedule] : all_schedules(batch.size())) {
    expect_same_bits(run_gradient<Cpu, T>(c, batch, schedule, random_weights()), full, name);
  }
}
TEST_P(EveryFamily, AllModesAndChunksGiveTheSameBitsInFloat32) { expect_equal_bits<float>(GetParam().config); }
TEST_P(EveryFamily, AllModesAndChunksGiveTheSameBitsInBFloat16) { expect_equal_bits<BFloat16>(GetParam().config); }
// A document's gradient must not depend on its neighbours in the stream.
TEST_P(EveryFamily, PackedDocumentsDoNotSeeEachOther) {
  Config c = GetParam().config;
  c.balanced = false;  // that loss is one of all documents
  const Batch all = packed(c, sized<Lengths>({270, 150, 133}, {260, 30, 13}));
  std::vector<Batch> alone;
  for (const Rows rows : all.documents()) alone.push_back(part_of(all, rows));
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const GradientRun together = run_gradient<Cpu, double>(c, all, schedule, random_weights());
  const Difference error =
      run_gradient<Cpu, double>(c, alone, schedule, random_weights()).gradient.difference(together.gradient);
  EXPECT_LE(error.relative, 1e-12) << error.tensor;
}

// Micro-batches are normalised by the number of targets of the whole step, so accumulation is exact. It has the same
// bits in every mode, and every mode uses exactly the planned memory.
TEST(Walk, AccumulationIsExactAndHasTheSameBitsInAllModes) {
  const Config c = families()[3].config;
  const std::vector<Batch> batches = {packed(c, {100, 7}, 1), packed(c, {400, 231}, 2), packed(c, {5, 6}, 3)};
  const Batch all = end_to_end(batches);
  const GradientRun truth = run_gradient<Cpu, double>(c, all, Schedule::full(all.size()), random_weights());
  std::optional<GradientRun> first;
  for (Mode mode : kModes) {
    const Schedule schedule = schedule_for(mode, c, batches[1].size(), kTile);
    const GradientRun run = run_gradient<Cpu, double>(c, batches, schedule, random_weights());
    EXPECT_LE(run.gradient.difference(truth.gradient).relative, 1e-12) << name(mode);
    EXPECT_NEAR(run.loss, truth.loss, 1e-12 * truth.loss);
    if (!first) first = run;
    expect_same_bits(run, *first, name(mode));
  }
}

// The number of threads does not change any bit.
template <class T>
void expect_equal_bits_for_any_number_of_threads() {
  const Config c = families()[9].config;
  const Batch batch = packed(c, kDocuments);
  const int threads = omp_get_max_threads();
  std::optional<HostGradient> first;
  for (int n : {1, 2, 3, 7}) {
    omp_set_num_threads(n);
    const GradientRun run = run_gradient<Cpu, T>(c, batch, Schedule::stream(2 * kTile, kTile), random_weights());
    if (!first) first = run.gradient;
    EXPECT_TRUE(run.gradient == *first) << n << " threads";
  }
  omp_set_num_threads(threads);
}
TEST(Walk, AnyNumberOfThreadsGivesTheSameBitsInFloat32) { expect_equal_bits_for_any_number_of_threads<float>(); }
TEST(Walk, AnyNumberOfThreadsGivesTheSameBitsInBFloat16) { expect_equal_bits_for_any_number_of_threads<BFloat16>(); }

// Wide enough that a matrix has several blocks of columns.
TEST(Walk, WideLayersAgreeToo) {
  Config c = make_config("qwen3", {1100, 420, 1, 6, 2, 90, 900, 0, false});
  const Batch batch = packed(c, sized<Lengths>({270, 20}, {9, 8}));
  const oracle::Result truth = oracle_gradient(c, batch, random_weights(3, 0.05));
  const GradientRun full = run_gradient<Cpu, double>(c, batch, Schedule::full(batch.size()), random_weights(3, 0.05));
  expect_oracle(full, truth);
  expect_same_bits(run_gradient<Cpu, double>(c, batch, Schedule::stream(kTile, kTile), random_weights(3, 0.05)), full);
}

TEST(Walk, RefusesChunksThatAreNotWholeTiles) {
  EXPECT_THROW(chunks(1000, 100), Error);
  EXPECT_THROW(chunks(1000, 0), Error);
}

TEST(Walk, RefusesBatchesThatTheModelCannotRead) {
  const Config c = families()[0].config;
  Cpu dev(1 << 24);
  Trainer<Cpu, float> trainer(dev, c, 64, OptimizerKind::none);
  const Schedule schedule = Schedule::stream(kTile, kTile);
  auto expect_refused = [&](const char* why, const std::function<void(Batch&)>& change) {
    Batch batch = packed(c, {20});
    change(batch);
    EXPECT_THROW(trainer.accumulate(batch, Counts(batch), schedule), Error) << why;
  };
  const auto vocabulary = static_cast<std::int32_t>(c.vocab), length = static_cast<std::int32_t>(c.max_length);
  expect_refused("token beyond the vocabulary", [&](Batch& b) { b.tokens[3] = vocabulary; });
  expect_refused("negative token", [](Batch& b) { b.tokens[3] = -1; });
  expect_refused("target beyond the vocabulary", [](Batch& b) { b.targets[3] = 1 << 30; });
  expect_refused("position beyond the table", [&](Batch& b) { b.positions[3] = length; });
  expect_refused("no targets", [](Batch& b) { std::ranges::fill(b.targets, -1); });
  expect_refused("negative position", [](Batch& b) { b.positions[3] = -1; });
  expect_refused("a token that does not attend to itself", [](Batch& b) { b.key_begin[3] = 4; });
  expect_refused("key_begin that falls again", [](Batch& b) { b.key_begin[3] = 2; });
  expect_refused("a document that reaches into the one before",
                 [](Batch& b) { std::fill(b.key_begin.begin() + 3, b.key_begin.end(), 2); });
  expect_refused("a target too few", [](Batch& b) { b.targets.pop_back(); });
  expect_refused("longer than the stream", [&](Batch& b) { b = packed(c, {65}); });
  expect_refused("empty", [](Batch& b) { b = {}; });
}

}  // namespace
}  // namespace streambp
