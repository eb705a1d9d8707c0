// Far memory: files, their failures, and the same bits near and far.
#include "data/files/checkpoint.h"
#include "tests/ranks.cuh"
#include "tests/temporary.h"

namespace streambp {
namespace {

constexpr Places kFar = {Place::far, Place::far, Place::far, Place::far};
const KeptSets kFarParts(KeptParts(Place::far));

class FarMemory : public TemporaryDirectory {};

// Sizes below, at and beyond a block of the file and the buffer of its thread; copies overlap.
TEST_F(FarMemory, KeepsWhatWasPut) {
  const std::vector<Index> sizes = {1, 1023, 1024, 1025, (1 << 18) - 1, (1 << 18) + 3, 700000};
  Capacity capacity(std::size_t{16} << 20, std::size_t{16} << 20);
  capacity.directory = dir;
  Cpu dev(capacity);
  std::vector<Matrix<float>> near;
  std::vector<FarMatrix<float>> far;
  std::vector<PendingCopy> copies;
  for (Index n : sizes) {
    near.push_back(allocate<float>(dev, 1, n, Kind::saved));
    for (Index i = 0; i < n; ++i) near.back().data[i] = static_cast<float>(i + n);
    far.push_back(allocate_far<float>(dev, 1, n, Kind::saved));
    copies.push_back(dev.put(far.back(), near.back()));
  }
  wait_for(copies);
  for (const auto& m : near) zero(dev, m);
  for (std::size_t i = sizes.size(); i-- > 0;) copies.push_back(dev.get(near[i], far[i]));
  wait_for(copies);
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    for (Index i = 0; i < sizes[k]; ++i) ASSERT_EQ(near[k].data[i], static_cast<float>(i + sizes[k])) << sizes[k];
    EXPECT_EQ(to_host(dev, far[k]), to_host(dev, near[k]));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir)) << "the file has a name";
}

TEST_F(FarMemory, RefusesWhatDoesNotFit) {
  Capacity capacity(1024, std::size_t{1} << 50);
  capacity.directory = dir;
  EXPECT_ERROR(Cpu{capacity}, "cannot reserve 1073741824 MiB of far memory here");
  capacity.directory = dir / "nowhere";
  EXPECT_ERROR(Cpu{capacity}, "nowhere: cannot create a temporary file here");
}

// An error of the file reaches whoever waits for a later copy, and ending the device does not hang.
TEST_F(FarMemory, ReportsErrorsOfTheDisk) {
  const int code = exit_code_of([&] {
    Capacity capacity(std::size_t{1} << 20, std::size_t{1} << 20);
    capacity.directory = dir;
    Cpu dev(capacity);
    const FileSizeLimit limit(4096);
    const auto near = allocate<float>(dev, 1, 4096, Kind::saved);
    zero(dev, near);
    const auto far = allocate_far<float>(dev, 1, 4096, Kind::saved);
    for (int i = 0; i < 2; ++i) {
      if (!contains(error_of([&] { dev.put(far, near).wait(); }), "cannot write far memory here: File too large"))
        return 1;
    }
    return 0;
  });
  EXPECT_EQ(code, 0);
}

// If the disk fails, the step fails. If it fails during the update, the weights are of no step and must not be saved.
TEST_F(FarMemory, AStepFailsWithItsDisk) {
  const Config c = make_config("llama", {50, 16, 2, 2, 2, 8, 30, 0, true});
  for (const Places& places : {Places{Place::far, Place::near}, Places{Place::near, Place::far}}) {
    const int code = exit_code_of([&] {
      omp_set_num_threads(1);
      StepSettings s{c};
      s.places = places;
      const Schedule schedule = schedule_for(Mode::stream, s, 600, kTile);
      Capacity capacity = plan(s, 600, schedule).capacity();
      capacity.directory = dir;
      Cpu dev(capacity);
      Trainer<Cpu, float> trainer(dev, c, 600, {OptimizerKind::adamw, places});
      trainer.initialise(1);
      const FileSizeLimit limit(4096);
      try {
        trainer.step({packed(c, {600})}, schedule, {.warmup = 1, .steps = 4}, 1);
      } catch (const Error&) {
        return trainer.updating == (places.optimizer == Place::far) ? 0 : 1;
      }
      return 2;
    });
    EXPECT_EQ(code, 0);
  }
}

// A parameter with so many rows is updated in parts.
Config large_vocabulary() { return make_config("qwen3", {2 * 4096 + 77, 12, 3, 2, 1, 6, 20, 0, true}); }

template <class T, class G = T>
void expect_same_bits(const Task& task, const Ranks& ranks = {}) {
  const Trained near = train<Cpu, T, G>(task, ranks);
  for (const Places& places : {Places{Place::far, Place::near}, Places{Place::near, Place::far},
                               Places{.weights = Place::far}, Places{.gradients = Place::far}, kFar}) {
    Task far = task;
    far.places = places;
    if (places == kFar && task.mode == Mode::stream) far.kept = kFarParts;
    EXPECT_TRUE((train<Cpu, T, G>(far, ranks) == near)) << name(task.mode) << ", chunk " << task.chunk;
  }
}

TEST(Far, TrainingGivesTheSameBits) {
  const Config c = models_for_ranks()[1].config;
  const auto batches = batches_of(c, 2);
  for (Index chunk : {kTile, 2 * kTile}) expect_same_bits<float>({c, batches, Mode::stream, chunk});
  expect_same_bits<float>({c, batches, Mode::checkpoint});
  expect_same_bits<BFloat16>({c, batches, Mode::stream}, Ranks{{}, {}, 3});
}

TEST(Far, EveryOptimizerGivesTheSameBits) {
  const Config c = large_vocabulary();
  for (const auto& [name, kind] : kOptimizers) {
    if (kind == OptimizerKind::none) continue;
    const Task task{c, {packed(c, {70, 30})}, Mode::stream, kTile, kind};
    expect_same_bits<BFloat16>(task);
    if (kind == OptimizerKind::adamw) expect_same_bits<double>(task), expect_same_bits<BFloat16, float>(task);
  }
}

// Kept outputs of attention spare its second forward pass, and of everything nothing is computed again.
TEST(Far, KeptPartsSaveTheirRecomputation) {
  const Config c = models_for_ranks()[1].config;
  StepSettings s{c};
  auto flops = [&](const KeptSets& kept) {
    s.kept = kept;
    return plan(s, 600, schedule_for(Mode::stream, s, 600, kTile)).flops;
  };
  const auto attention = [](Place place) { return KeptSets().with(Part::attention, place); };
  const double pairs = 600 * 601 / 2, forward = 4 * pairs * static_cast<double>(c.attention(0).q_width() * c.layers);
  EXPECT_NEAR(flops({}) - flops(attention(Place::near)), forward, 0.01 * forward);
  EXPECT_EQ(flops(attention(Place::near)), flops(attention(Place::far)));
  EXPECT_EQ(flops(KeptParts::everything()), plan(s, 600, Schedule::full(600)).flops);
}

// What is kept near is freed layer by layer, as saved inputs are, so the gradient takes its memory.
TEST(Far, KeptAttentionIsFreedLayerByLayer) {
  StepSettings s{known_models().at("qwen3-0.6b"), DType::bf16, OptimizerKind::none};
  s.kept = s.kept.with(Part::attention);
  auto peak = [&](Place inputs) {
    s.places.inputs = inputs;
    return plan(s, 30000, schedule_for(Mode::stream, s, 30000, 512)).peak;
  };
  EXPECT_LT(peak(Place::far), peak(Place::near));
}

TEST(Far, AdaptersGiveTheSameBits) {
  Config c = models_for_ranks()[1].config;
  c.trained.emplace();
  c.adapters = new_adapters(c, {.rank = 3, .alpha = 6});
  expect_same_bits<float>({c, batches_of(c, 1), Mode::stream});
}

// Only the top layer is trained, so only its input is kept.
TEST(Far, LayersBelowTheLowestTrainedOneKeepNothing) {
  Config c = large_vocabulary();
  c.trained = {"model.layers.2.mlp.up_proj.weight"};
  const Task task{c, {packed(c, {600})}, Mode::stream};
  expect_same_bits<float>(task);
  StepSettings s{c};
  s.optimizer = OptimizerKind::none, s.places.inputs = Place::far;
  EXPECT_EQ(plan(s, 600, schedule_for(Mode::stream, s, 600, kTile)).far, 600 * 12 * sizeof(float) / 4096 * 4096 + 4096);
}

TEST(Far, RanksGiveTheBitsOfOneProcess) {
  const Config c = models_for_ranks()[1].config;
  Task task{c, batches_of(c, 3), Mode::stream};
  task.places = kFar;
  expect_bits_of_one_process<Cpu, float>(2, 2, task);
  task.optimizer = OptimizerKind::muon;
  expect_bits_of_one_process<Cpu, BFloat16>(2, 2, task);
  expect_bits_of_one_process<Cpu, float>(1, 4,
                                         {c, batches_of(c, 1), Mode::stream, kTile, OptimizerKind::adamw, {}, kFar});
}

// Three ranks, two rows of k and v: one rank has none.
TEST(Far, RanksWithoutRowsGiveTheBitsOfOneProcess) {
  const Config c = make_config("llama", {11, 8, 1, 2, 1, 2, 12, 0, false});
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
    const std::vector<Batch> batches = {packed(c, {12}), packed(c, {5, 7}), packed(c, {9, 3})};
    expect_bits_of_one_process<Cpu, float>(3, 1, {c, batches, Mode::stream, kTile, kind, {}, kFar});
  }
}

// A checkpoint has the same bytes, and a run continues from it near or far.
TEST_F(FarMemory, CheckpointsAreTheSame) {
  const Config c = large_vocabulary();
  const Batch batch = packed(c, {70, 30});
  StepSettings s{c, DType::bf16};
  auto run = [&](Place place, OptimizerKind kind, const fs::path& from, const std::string& to) {
    s.places = place == Place::far ? kFar : Places(), s.optimizer = kind;
    const Schedule schedule = schedule_for(Mode::stream, s, batch.size(), kTile);
    Cpu dev(plan(s, batch.size(), schedule).capacity());
    Trainer<Cpu, BFloat16> trainer(dev, c, batch.size(), {kind, s.places});
    const ModelLayout layout(c);
    Index step = 1;
    if (from.empty()) {
      trainer.initialise(1);
    } else {
      load_checkpoint(dev, from, trainer.model, layout, *trainer.optimizer), ++step;
    }
    trainer.step({batch}, schedule, {.warmup = 1, .steps = 4}, step);
    const Json state = {{"step", step}, {"options", Json::object()}};
    fs::create_directories(dir / to);
    save_checkpoint(dev, dir / to, trainer.model, layout, *trainer.optimizer, state);
    return dir / to / checkpoint_name(step);
  };
  for (OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::adamw_8bit}) {
    const std::string name = std::to_string(static_cast<int>(kind));
    const fs::path near = run(Place::near, kind, {}, name + "near"), far = run(Place::far, kind, {}, name + "far");
    const fs::path near_then_far = run(Place::far, kind, near, name + "near-far"),
                   far_then_near = run(Place::near, kind, far, name + "far-near");
    expect_same_checkpoint(near, far);
    expect_same_checkpoint(near_then_far, far_then_near);
  }
}

}  // namespace
}  // namespace streambp
