// Ranks and lanes: any grid of ranks gives the bits of one process with as many lanes, in every mode; and what the plan
// counts is what is allocated and sent.
#include "tests/support.cuh"
#include "tests/thread_ranks.cuh"

namespace streambp {
namespace {

// Heads that two and four ranks can share.
std::vector<Family> models() {
  std::vector<Family> all;
  auto add = [&](std::string name, Config c) { return &all.emplace_back(Family{std::move(name), c}).config; };
  add("gpt2", make_config("gpt2", {67, 24, 2, 4, 4, 6, 100, 1200, true}));
  add("qwen3", make_config("qwen3", {83, 30, 2, 8, 4, 6, 45, 0, true}));
  add("qwen2", make_config("qwen2", {71, 32, 1, 8, 4, 8, 36, 0, false}));
  Config* c = add("gemma3", make_config("gemma3", {89, 26, 2, 4, 4, 10, 44, 0, true}));
  c->window = 20, c->local = {true, false}, c->local_rope_theta = 100;
  if (kSanitized) all.erase(all.begin() + 2, all.end());
  return all;
}

// Several tiles, the last incomplete; two documents begin inside a tile.
const Lengths kRows = sized<Lengths>({520, 40, 300}, {270, 40, 20});

struct Outcome {
  double loss = 0, norm = 0;
  std::vector<double> logp;
  std::optional<HostGradient> weights;
  bool operator==(const Outcome& other) const {
    return loss == other.loss && norm == other.norm && logp == other.logp && *weights == *other.weights;
  }
};

struct Task {
  Config config;
  std::vector<Batch> batches;  // of a step
  Mode mode;
  Index chunk = kTile;
  OptimizerKind optimizer = OptimizerKind::adamw;
  Objective objective = {};
};

// Two steps on a device with exactly the planned memory.
template <class T, class G = T, class M = Accumulator<T>>
Outcome train(const Task& task, const Ranks& ranks) {
  Index rows = 0;
  for (const Batch& batch : task.batches) rows = std::max(rows, batch.size());
  const Index own = Division{rows, kTile, 0, ranks.sequence.size}.own();
  StepSettings s{task.config};
  s.dtype = std::is_same_v<T, BFloat16> ? DType::bf16 : sizeof(T) == 4 ? DType::f32 : DType::f64;
  s.wide_gradient = sizeof(G) > sizeof(T);
  s.optimizer = task.optimizer, s.objective = task.objective, s.ranks = ranks;
  s.micro_batches = static_cast<Index>(task.batches.size());
  const Schedule schedule = schedule_for(task.mode, task.config, own, task.chunk);
  const Usage planned = plan(s, rows, schedule);
  Cpu dev(planned.peak);
  Trainer<Cpu, T, G, M> trainer(dev, task.config, rows, task.optimizer, task.objective, ranks);
  trainer.initialise(1, 0.1);
  Outcome outcome;
  for (Index step = 1; step <= 2; ++step) {
    const auto add_logps = [&](std::size_t, const auto& logp) {
      outcome.logp.insert(outcome.logp.end(), logp.begin(), logp.end());
    };
    const StepResult result = trainer.step(task.batches, schedule, {.warmup = 1, .steps = 4}, step, add_logps);
    outcome.loss = result.measures.loss, outcome.norm = result.gradient_norm;
  }
  std::vector<std::vector<double>> weights;
  for (const auto& e : table(task.config, trainer.model.weights)) {
    const std::vector<T> rows = rows_on_all(dev, trainer.model.shards, *e.matrix);
    weights.emplace_back(rows.begin(), rows.end());
  }
  outcome.weights.emplace(task.config, std::move(weights));
  const std::string what = std::string(name(task.mode)) + ", rank " + std::to_string(ranks.all.rank);
  EXPECT_EQ(dev.arena.peak(), planned.peak) << what;
  double sent = 0;
  for (const Group* group : {&ranks.all, &ranks.sequence})
    if (group->transport) sent += std::exchange(static_cast<ThreadTransport*>(group->transport)->sent, 0);
  EXPECT_EQ(sent, 2 * planned.sent) << what;
  return outcome;
}

std::vector<Batch> batches_of(const Config& c, std::size_t count) {
  std::vector<Batch> batches;
  for (std::size_t i = 0; i < count; ++i) {
    Lengths lengths = kRows;
    lengths[0] -= static_cast<Index>(7 * i), lengths[1] += static_cast<Index>(7 * i);
    batches.push_back(packed(c, lengths, 5 + i));
  }
  return batches;
}

template <class T, class G = T, class M = Accumulator<T>>
void expect_bits_of_one_process(Index streams, Index sequence, const Task& task) {
  const Outcome alone = train<T, G, M>(task, Ranks{{}, {}, sequence});
  as_ranks(streams, sequence, [&](const Ranks& ranks) {
    omp_set_num_threads(1);
    Ranks with_shards = ranks;
    with_shards.shard_weights = true;
    for (const Ranks& r : {ranks, with_shards}) {
      EXPECT_TRUE((train<T, G, M>(task, r) == alone))
          << streams << "x" << sequence << " ranks, " << name(task.mode) << ", rank " << r.all.rank;
    }
  });
}

class EveryModel : public testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryModel, testing::ValuesIn(models()), PrintFamily());

TEST_P(EveryModel, LanesGiveTheSameGradientToRoundingAndTheSameLogProbs) {
  const Config& c = GetParam().config;
  const Task task{c, batches_of(c, 1), Mode::stream};
  const Outcome one = train<double>(task, {}), three = train<double>(task, Ranks{{}, {}, 3});
  EXPECT_LE(three.weights->difference(*one.weights).relative, 1e-10);
  EXPECT_FALSE(*three.weights == *one.weights) << "lanes should change the order of additions";
  const std::size_t n = one.logp.size() / 2;  // of the first step
  EXPECT_TRUE(std::equal(one.logp.begin(), one.logp.begin() + static_cast<std::ptrdiff_t>(n), three.logp.begin()));
}

TEST_P(EveryModel, LanesGiveTheSameBitsInAllModes) {
  const Config& c = GetParam().config;
  const Outcome full = train<float>({c, batches_of(c, 2), Mode::full}, Ranks{{}, {}, 2});
  for (Index chunk : {kTile, 2 * kTile})
    EXPECT_TRUE(train<float>({c, batches_of(c, 2), Mode::stream, chunk}, Ranks({{}, {}, 2})) == full) << chunk;
}

TEST_P(EveryModel, SequenceRanksGiveTheBitsOfLanes) {
  const Config& c = GetParam().config;
  for (Mode mode : kModes) expect_bits_of_one_process<float>(1, 2, {c, batches_of(c, 1), mode});
  expect_bits_of_one_process<float>(1, 4, {c, batches_of(c, 1), Mode::stream});
}

TEST_P(EveryModel, DataRanksGiveTheBitsOfOneProcessThatAccumulates) {
  const Config& c = GetParam().config;
  for (Mode mode : kModes) expect_bits_of_one_process<float>(2, 1, {c, batches_of(c, 2), mode});
  expect_bits_of_one_process<float>(2, 1, {c, batches_of(c, 3), Mode::stream});  // one rank is idle in the last round
  expect_bits_of_one_process<float>(4, 1, {c, batches_of(c, 5), Mode::stream});  // three ranks are idle in the second
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
  const double widths = static_cast<double>(2 * c.q_width() + 2 * c.kv_width());
  const double expected = 3 * static_cast<double>(n) * widths * sizeof(float) * (ranks - 1) / (ranks * ranks);
  EXPECT_NEAR(sent(6) - sent(5), expected, 0.01 * expected);
}

TEST_P(EveryModel, GridsInAllTypesGiveTheBitsOfOneProcess) {
  const Config& c = GetParam().config;
  const Task task{c, batches_of(c, 3), Mode::stream};
  expect_bits_of_one_process<double>(2, 2, task);
  expect_bits_of_one_process<BFloat16>(2, 2, task);
  expect_bits_of_one_process<BFloat16, float>(2, 2, task);
  Task pure = task;
  pure.optimizer = OptimizerKind::adamw_pure;
  expect_bits_of_one_process<BFloat16, BFloat16, BFloat16>(2, 2, pure);
}

// The weights of a pair depend on all its log-probs, which are on several ranks.
TEST(Ranks, PairsGiveTheBitsOfOneProcess) {
  const Config c = models()[1].config;
  Task task{c, {}, Mode::stream};
  for (std::uint64_t i = 0; i < 3; ++i) task.batches.push_back(packed(c, {300, 280, 250, 270}, i));
  task.objective = {.kind = ObjectiveKind::dpo, .preference = Preference::simpo};
  expect_bits_of_one_process<float>(2, 2, task);
}

}  // namespace
}  // namespace streambp
