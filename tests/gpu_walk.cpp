// The walk on the Cuda device: every family in every mode against the CPU's float64, with equal bits in all modes and
// chunks, within the planned memory. And training.
#include "data/files/adapters.h"
#include "generation/generate.h"
#include "tests/gpu.h"
#include "tests/training.h"
#include "training/products.cuh"

namespace streambp {
namespace {

constexpr Index kTestTile = kTile;  // a small tile, so that short streams have several

class GpuWalk : public OnGpu<testing::TestWithParam<Family>> {};
#ifdef CUDA_ON_CPU
INSTANTIATE_TEST_SUITE_P(Families, GpuWalk, testing::ValuesIn(distinct_families()), PrintFamily());
#else
INSTANTIATE_TEST_SUITE_P(Families, GpuWalk, testing::ValuesIn(families()), PrintFamily());
#endif

std::vector<std::pair<std::string, Schedule>> schedules(Index rows) {
  const std::pair<std::string, Schedule> full = {"full", Schedule::full(rows)},
                                         stream = {"stream", Schedule::stream(kTile, kTile)},
                                         checkpoint = {"checkpoint", Schedule::checkpoint(rows)},
                                         wider = {"stream by two tiles", Schedule::stream(2 * kTile, kTile)},
                                         far = {"inputs far", with_far_inputs(wider.second)};
  const KeptSets some = KeptSets().with(Part::attention).with(Part::queries, Place::far).with(Part::gate_up);
  std::pair<std::string, Schedule> blocks = {"blocks", Schedule::stream(kTile, kTile, some)};
  blocks.second.block = sized<Index>(2, 1, 1) * kTile;
  if (sized(true, false, false)) return {full, stream, checkpoint, wider, far, blocks};
  return {full, blocks};
}

template <class T, class G>
void expect_gradient(const Config& c, double tolerance, const Objective& objective = {}) {
  const std::vector<Index> documents =
      sized<std::vector<Index>>({5, 300, 1, 220, 60, 793}, {5, 170, 1, 120}, {5, 170, 1, 120});
  Batch batch = packed(c, documents);
  const Schedule whole = Schedule::full(batch.size());
  if (objective.kind != ObjectiveKind::sft) {
    batch = with_objective_data(batch, run_gradient<Cpu, double>(c, batch, whole, random_weights()).logp);
  }
  const GradientRun truth = run_gradient<Cpu, double>(c, batch, whole, random_weights(), objective);
  if (!kEmulated) cuda::check_products<T>(c, kTestTile);  // as an engine does; the emulation has one algorithm
  std::optional<GradientRun> first;
  for (const auto& [name, schedule] : schedules(batch.size())) {
    const GradientRun run = run_gradient<Cuda, T, G>(c, batch, schedule, random_weights(), objective, kTestTile);
    const Difference error = run.gradient.difference(truth.gradient);
    EXPECT_LE(error.relative, tolerance) << name << ": " << error.tensor;
    EXPECT_NEAR(run.loss, truth.loss, tolerance * std::max(1.0, truth.loss)) << name;
    if (!first) first = run;
    expect_same_bits(run, *first, name);
  }
}

TEST_P(GpuWalk, GradientInFloat32) { expect_gradient<float, float>(GetParam().config, 1e-5); }
TEST_P(GpuWalk, GradientInBFloat16) { expect_gradient<BFloat16, BFloat16>(with_all_experts(GetParam().config), 0.1); }

class GpuTraining : public GpuTest {};

// Adapters of a base in 4 bits; adapters with shared matrices beside trained norms; and a top layer only.
TEST_F(GpuTraining, PartsHaveTheRightGradient) {
  Config quantised = make_config("qwen3", {83, 24, 2, 2, 1, 16, 40, 0, true});
  quantised.trained.emplace();
  quantised.adapters = new_adapters(quantised, {3, 6, false, {"all"}});
  quantised.base = Base::nf4;
  Config gpt2 = make_config("gpt2", {83, 24, 1, 2, 2, 12, 40, 800, true});
  gpt2.adapters = new_adapters(gpt2, {8, 4, true, {"c_attn", "mlp.c_proj"}});
  gpt2.trained = {"h.0.ln_1.bias", "h.0.ln_2.weight"};
  Config top = make_config("llama", {83, 24, 2, 2, 1, 16, 40, 0, false});
  top.trained = {"model.layers.1.mlp.down_proj.weight", "model.norm.weight"};
  for (const Config& c : {quantised, gpt2, top}) {
    expect_gradient<float, float>(c, 1e-5);
    expect_gradient<BFloat16, float>(c, 0.1);
  }
}

TEST_F(GpuTraining, EveryObjectiveHasTheRightGradient) {
  const Config c = make_config("qwen3", {83, 24, 1, 2, 1, 16, 40, 0, true});
  expect_gradient<float, float>(c, 1e-5, {.kind = ObjectiveKind::dpo});
  expect_gradient<float, float>(c, 1e-5, {.kind = ObjectiveKind::grpo, .mean = Mean::documents, .kl = 0.1});
  expect_gradient<BFloat16, BFloat16>(c, 0.06, {.kind = ObjectiveKind::dpo});
  expect_gradient<BFloat16, BFloat16>(c, 0.06, {.kind = ObjectiveKind::grpo, .mean = Mean::tokens, .kl = 0.1});
}

TEST_F(GpuTraining, Float32GradientRoundsToTheBFloat16Gradient) {
  const Config c = families()[3].config;
  const Batch batch = packed(c, {200, 100});
  const Schedule schedule = Schedule::stream(kTile, kTile);
  const auto narrow = run_gradient<Cuda, BFloat16, BFloat16>(c, batch, schedule, random_weights(), {}, kTestTile);
  const auto wide = run_gradient<Cuda, BFloat16, float>(c, batch, schedule, random_weights(), {}, kTestTile);
  for (std::size_t i = 0; i < wide.gradient.values.size(); ++i) {
    for (std::size_t j = 0; j < wide.gradient.values[i].size(); ++j) {
      const BFloat16 rounded(static_cast<float>(wide.gradient.values[i][j]));
      const double other = narrow.gradient.values[i][j];
      const bool embedding = wide.gradient.parameters[i].name == "model.embed_tokens.weight";  // rounded twice: tied
      if (embedding) continue;
      ASSERT_EQ(static_cast<double>(rounded), other) << wide.gradient.parameters[i].name << ", entry " << j;
    }
  }
}

TEST_F(GpuTraining, BFloat16IsNoWorseThanPyTorchs) { expect_no_worse_than_pytorch<Cuda>(kTestTile); }

TEST_F(GpuTraining, FollowsTheLossCurveOfTheCpu) {
  const Index steps = sized<Index>(200, 4, 2);
  const auto cpu = losses<Cpu, float, float>(OptimizerKind::adamw, steps);
  EXPECT_LT(cpu.back(), cpu.front() - sized(1.5, 0.1, 0.0));
  using Losses = std::vector<double>;
  const auto expect_near = [](const char* what, const Losses& curve, const Losses& truth, double tolerance) {
    for (std::size_t i = 0; i < std::min<std::size_t>(truth.size(), 12); ++i)
      EXPECT_NEAR(curve[i], truth[i], tolerance * truth[i]) << what << ", step " << i + 1;
    EXPECT_NEAR(curve.back(), truth.back(), 0.1 * truth.back()) << what;
  };
  using B = BFloat16;
  expect_near("float32", losses<Cuda, float, float>(OptimizerKind::adamw, steps, kTestTile), cpu, 1e-4);
  expect_near("float32 gradient", losses<Cuda, B, float>(OptimizerKind::adamw, steps, kTestTile), cpu, 2e-2);
  expect_near("pure bfloat16", losses<Cuda, B, B>(OptimizerKind::adamw_bf16, steps, kTestTile), cpu, 3e-2);
  expect_near("8-bit moments", losses<Cuda, B, B>(OptimizerKind::adamw_8bit, steps, kTestTile), cpu, 3e-2);
  expect_near("muon", losses<Cuda, float, float>(OptimizerKind::muon, steps, kTestTile),
              losses<Cpu, float, float>(OptimizerKind::muon, steps), 1e-3);
}

// Several sequences decode together: the logits after each step, on the GPU and in float64 on the CPU.
template <class T>
void expect_generation(const Config& c, double tolerance) {
  // Room for two segments of keys, if there are positions; a chunk is shorter than the tokens, so one is full, as planned.
  const Index room = c.positions == Positions::learned ? 720 : kSegment + 720, chunk = 96;
  const std::vector<Index> lengths = sized<std::vector<Index>>({700, 5, 190}, {150, 5, 40}, {90, 5, 17});
  auto run = [&]<class Device, class U>(Device& dev, Model<U>& model) {
    allocate(dev, table(c, model.weights), Kind::weights);
    initialise(dev, model, 3, 0.15);
    Generator<Device, U> generator(dev, model, {3, room, chunk});
    std::vector<double> all;
    std::vector<Tokens> next;
    for (Index length : lengths) next.push_back(packed(c, {length}).tokens);
    for (int step = 0; step < 3; ++step) {
      std::vector<typename Generator<Device, U>::Reading> readings;
      for (Index slot = 0; slot < 3; ++slot) readings.push_back({slot, next[index(slot)]});
      const auto logits = generator.read(readings);
      for (const auto x : logits) all.push_back(static_cast<double>(x));
      for (Index slot = 0; slot < 3; ++slot)
        next[index(slot)] = {static_cast<std::int32_t>((7 * step + slot) % c.vocab)};
    }
    return all;
  };
  Plan plan(DeviceKind::cuda);
  Model<T> planned{c, Tensors<T>(c)}, model = planned;
  allocate(plan, table(c, planned.weights), Kind::weights);
  Generator<Plan, T>(plan, planned, {3, room, chunk}).plan();
  Cuda gpu(plan.arena.peak(), kTestTile);
  const std::vector<double> ours = run(gpu, model);
  EXPECT_EQ(gpu.arena.peak(), plan.arena.peak());
  Cpu cpu(std::size_t{1} << 28);
  Model<double> exact{c, Tensors<double>(c)};
  const std::vector<double> truth = run(cpu, exact);
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    difference = std::max(difference, std::isfinite(ours[i]) ? std::abs(ours[i] - truth[i]) : INFINITY);
    largest = std::max(largest, std::abs(truth[i]));
  }
  EXPECT_LE(difference, tolerance * largest);
}

TEST_P(GpuWalk, GenerationInFloat32) { expect_generation<float>(GetParam().config, 1e-5); }
TEST_P(GpuWalk, GenerationInBFloat16) { expect_generation<BFloat16>(with_all_experts(GetParam().config), 0.06); }

template <class T>
struct GeneratingGpu {
  Cuda gpu{std::size_t{1} << 26, kTestTile};
  Model<T> model;

  explicit GeneratingGpu(const Config& c) : model{c, Tensors<T>(c)} {
    allocate(gpu, table(c, model.weights), Kind::weights);
    initialise(gpu, model, 3, 0.15);
  }
};

// The logits of a slot do not depend on the slots that are read beside it: the same bits.
template <class T>
void expect_independent_slots(const Config& c) {
  GeneratingGpu<T> subject(c);
  Generator<Cuda, T> together(subject.gpu, subject.model, {5, 100, 64}),
      alone(subject.gpu, subject.model, {1, 100, 64});
  const auto width = static_cast<std::ptrdiff_t>(c.vocab);
  for (const Index length : {70, 1, 1}) {
    std::vector<Tokens> texts;
    std::vector<typename Generator<Cuda, T>::Reading> readings;
    for (Index slot = 0; slot < 5; ++slot) texts.push_back(packed(c, {std::max<Index>(1, length - 7 * slot)}).tokens);
    for (Index slot = 0; slot < 5; ++slot) readings.push_back({slot, texts[index(slot)]});
    const auto all = together.read(readings), one = alone.read({{0, texts[2]}});
    EXPECT_EQ(std::memcmp(&all[index(2 * width)], one.data(), one.size() * sizeof(T)), 0) << length;
  }
}
TEST_F(GpuTraining, SlotsDoNotDependOnEachOther) {
  expect_independent_slots<float>(families()[3].config);
  expect_independent_slots<BFloat16>(families()[3].config);
}

// The first tokens are launched operation by operation, later ones as a graph: the draws and the counted work are those of
// single launches, also when a sequence ends, another one begins, or the sampling changes.
template <class T>
void expect_repeats(const Config& c) {
  struct Run {
    std::vector<Draw> draws;
    std::vector<Work> work;
    std::vector<Index> launches;  // of each step
  };
  const auto run = [&](bool single_launches) {
    GeneratingGpu<T> subject(c);
    subject.gpu.profile = single_launches;  // it times every operation, so none is part of a graph
    Generator<Cuda, T> generator(subject.gpu, subject.model, {3, kSegment + 40, 64});
    Run result;
    std::vector<Tokens> next = {{1, 2, 3}, {4, 5}, {6}};
    for (int step = 0; step < 18; ++step) {
      const std::vector<Index> slots = step < 7 || step > 12 ? std::vector<Index>{0, 1, 2} : std::vector<Index>{2, 0};
      if (step == 13) next[1] = {7, 8, 9}, generator.start(1, next[1], 40, {});
      std::vector<typename Generator<Cuda, T>::Reading> readings;
      for (const Index slot : slots) readings.push_back({slot, next[index(slot)], index(slot) + 5});
      const Index before = subject.gpu.launches;
      const auto draws = generator.read(readings, {.temperature = step < 16 ? 1.0 : 0.8, .seed = 3});
      result.launches.push_back(subject.gpu.launches - before);
      for (std::size_t i = 0; i < slots.size(); ++i)
        next[index(slots[i])] = {static_cast<std::int32_t>(draws[i].token)};
      result.draws.insert(result.draws.end(), draws.begin(), draws.end());
    }
    result.work = subject.gpu.work();
    return result;
  };
  const Run graphs = run(false), singly = run(true);
  for (std::size_t i = 0; i < singly.draws.size(); ++i) {
    EXPECT_EQ(graphs.draws[i].token, singly.draws[i].token) << i;
    EXPECT_EQ(graphs.draws[i].logp, singly.draws[i].logp) << i;
  }
  ASSERT_EQ(graphs.work.size(), singly.work.size());
  for (const Work& w : singly.work) {
    const auto same = std::find_if(graphs.work.begin(), graphs.work.end(), [&](auto& g) { return g.name == w.name; });
    ASSERT_NE(same, graphs.work.end()) << w.name;
    EXPECT_TRUE(same->calls == w.calls && same->flops == w.flops && same->bytes == w.bytes) << w.name;
  }
  const Index single = singly.launches[1];
  EXPECT_GT(single, 16);
  EXPECT_EQ(graphs.launches, (std::vector<Index>{singly.launches[0], single, single, single, 1, 1, 1, single, single,
                                                 single, 1, 1, 1, singly.launches[13], 1, 1, single, single}));
}
TEST_F(GpuTraining, RepeatedTokensAreOneLaunchWithTheSameBits) {
  const Config c = make_config("qwen3", {83, 24, 2, 2, 1, 16, 40, 0, true});
  expect_repeats<float>(c);
  expect_repeats<BFloat16>(c);
}

// A graph holds addresses, so it is not used when the memory below has moved.
TEST_F(GpuTraining, GraphsSurviveAnotherGenerator) {
  const Config c = make_config("qwen3", {83, 24, 2, 2, 1, 16, 40, 0, true});
  const auto run = [&](bool with_another) {
    GeneratingGpu<BFloat16> subject(c);
    using G = Generator<Cuda, BFloat16>;
    G generator(subject.gpu, subject.model, {1, 40, 64});
    std::optional<G> another;
    std::vector<std::int32_t> tokens = {1};
    for (int step = 0; step < 20; ++step) {
      const Tokens next = {tokens.back()};
      if (step == 8 && with_another) another.emplace(subject.gpu, subject.model, GenerationShape{2, 40, 64});
      if (another) another->read({{0, next}, {1, next}}, Sampling());
      tokens.push_back(generator.read({{0, next}}, Sampling()).front().token);
    }
    return tokens;
  };
  EXPECT_EQ(run(true), run(false));
}

// Work that cannot be recorded is launched singly, and an error does not outlive it.
TEST_F(GpuTraining, WorkThatIsNoGraphIsLaunchedSingly) {
  Cuda dev(1 << 16);
  GraphCache<Cuda> graphs;
  const auto m = allocate<float>(dev, 1, 100, Kind::chunk);
  std::vector<float> host(100, 1.0f);
  dev.upload(m, host.data());
  int runs = 0;
  for (int i = 0; i < 6; ++i) {
    graphs.run(dev, 1, [&] {
      ++runs;
      zero(dev, m);
      dev.synchronize();  // which a graph must not
    });
  }
  EXPECT_EQ(runs, 7) << "the fourth one was tried twice";
  dev.download(host.data(), m);
  EXPECT_EQ(host, std::vector<float>(100));
  for (const int failing : {4, 6}) {  // while it is recorded; while a graph works
    GraphCache<Cuda> others;
    int run = 0;
    const auto work = [&] {
      zero(dev, m);
      if (run == failing) fail("broken");
    };
    while (++run < failing) others.run(dev, 1, work);
    EXPECT_EQ(error_of([&] { others.run(dev, 1, work); }), "broken");
    EXPECT_FALSE(dev.only_accounts);
    run = 0;
    EXPECT_NO_THROW(others.run(dev, 1, work));
  }
}

#ifdef CUDA_ON_CPU
// What the host gives to the GPU (kernels, products, copies, waits) to read one token in each of several slots.
template <class T>
std::size_t work_of_a_token(const Config& c, Index slots) {
  GeneratingGpu<T> subject(c);
  Generator<Cuda, T> generator(subject.gpu, subject.model, {slots, 20, 64});
  const Tokens text = {1, 2, 3}, next = {5};
  std::size_t work = 0;
  for (const Tokens& tokens : {text, next}) {
    std::vector<typename Generator<Cuda, T>::Reading> readings;
    for (Index slot = 0; slot < slots; ++slot) readings.push_back({slot, tokens});
    const auto poison = std::exchange(Arena::poison, nullptr);  // it would fill every allocation
    const std::size_t before = cuda_on_cpu::host_work;
    generator.read(readings, Sampling());
    work = cuda_on_cpu::host_work - before;
    Arena::poison = poison;
  }
  return work;
}

TEST_F(GpuTraining, LaunchesPerTokenDoNotDependOnTheSlots) {
  Config c = make_config("qwen3", {80, 24, 1, 2, 1, 16, 40, 0, true});
  const auto expect_work = [&]<class T>(T) {
    c.layers = 1;
    const std::size_t one_layer = work_of_a_token<T>(c, 1);
    c.layers = 2;
    const std::size_t work = work_of_a_token<T>(c, 1);
    for (const Index slots : {3, 8}) EXPECT_EQ(work_of_a_token<T>(c, slots), work) << slots << " slots";
    EXPECT_EQ(work - one_layer, 14u) << "of a layer: 7 kernels and 7 products";
    EXPECT_EQ(one_layer - 14, 9u)
        << "embedding, last rows, norm, logits, sampling; tokens in and out, waiting for both";
  };
  expect_work(0.0f);
  expect_work(BFloat16());
}
#endif

// A repeated step gives the same bits: nothing depends on the order of blocks.
TEST_F(GpuTraining, RepeatsBitForBit) {
  const Index steps = sized<Index>(3, 2, 1);
  const auto run = [=] { return losses<Cuda, BFloat16, BFloat16>(OptimizerKind::adamw_bf16, steps, kTestTile); };
  const auto first = run();
  in_every_order([&] { EXPECT_EQ(run(), first); });
}

TEST_F(GpuTraining, RefusesChunksThatAreNotWholeTiles) {
  const Config c = families()[2].config;
  const Batch batch = packed(c, {600});
  for (const Schedule& schedule : {Schedule::stream(kTile, 2 * kTile), Schedule::stream(2 * kTile, kTile)}) {
    EXPECT_THROW((run_gradient<Cuda, float>(c, batch, schedule, random_weights(), {}, 2 * kTile)), Error);
  }
}

}  // namespace
}  // namespace streambp
