// Many matrices in one launch have the bits of one matrix at a time, and nothing beside them is written. And the number of
// launches of a training step.
#include "tests/gpu.h"

namespace streambp {
namespace {

class GpuJobs : public GpuTest {};

constexpr Index kBlock = 70000;

// The same positive numbers at every call.
template <class T>
Matrix<T> block_of(Cuda& dev, std::uint64_t seed) {
  const Matrix<T> block = allocate<T>(dev, 1, kBlock, Kind::chunk);
  std::vector<T> values;
  for (std::size_t i = 0; i < kBlock; ++i)
    values.push_back(static_cast<T>(static_cast<float>(Random(seed).uniform(i))));
  dev.upload(block, values.data());
  return block;
}

// Matrices within a block: aligned and not, with gaps between rows, empty, wide, and more of them than one launch takes.
template <class T>
std::vector<Matrix<T>> matrices(Matrix<T> block) {
  std::vector<Matrix<T>> all;
  Index used = 0;
  const auto next = [&](Index rows, Index cols, Index stride) {
    all.push_back({block.data + used, rows, cols, stride});
    used += rows * stride;
  };
  next(2, 2500, 2500);
  for (Index i = 0; i < sized<Index>(60, 30, 20); ++i) {
    used = round_up(used, 16);
    next(3, 40, 40), next(4, 16, 24), next(0, 5, 5), next(5, 0, 8), next(1, 1 + i, 1 + i);
    next(1, 16, 16), next(2, 300, 301), next(3, 9, 9);
  }
  EXPECT_LT(used, kBlock);
  return all;
}

// Calls f with the list, and with each of its twins alone.
template <class Job>
void together_and_alone(Cuda& dev, const std::vector<Job>& jobs, const std::vector<Job>& twins, auto&& f) {
  dev.reset_work();
  f(jobs);
  EXPECT_GT(dev.launches, 1);
  EXPECT_LT(dev.launches, static_cast<Index>(jobs.size()) / 4);
  for (const Job& twin : twins) f(std::vector<Job>{twin});
}

template <class T>
void expect_equal_bytes(Cuda& dev, Matrix<T> a, Matrix<T> b, const char* what) {
  const auto x = to_host(dev, a), y = to_host(dev, b);
  EXPECT_TRUE(x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0) << what;
}

template <class T, class U>
void expect_zeros_and_sums() {
  Cuda dev(std::size_t{1} << 23, kTile);
  const Matrix<T> a = block_of<T>(dev, 1), b = block_of<T>(dev, 1);
  const auto y = matrices(a), y_twins = matrices(b);
  const auto x = matrices(block_of<U>(dev, 2));
  std::vector<Operands<T, U>> jobs, twins;
  for (std::size_t i = 0; i < x.size(); ++i) jobs.push_back({y[i], x[i]}), twins.push_back({y_twins[i], x[i]});
  together_and_alone(dev, jobs, twins, [&](const auto& all) { add(dev, all); });
  expect_equal_bytes(dev, a, b, "sums");
  expect_equal_bytes(dev, a.columns(kBlock - 99, 99), block_of<T>(dev, 1).columns(kBlock - 99, 99), "beside them");
  together_and_alone(dev, y, y_twins, [&](const auto& all) { zero(dev, all); });
  expect_equal_bytes(dev, a, b, "zeros");
  for (const Matrix<T>& m : y)
    for (const T number : to_host(dev, m)) ASSERT_EQ(static_cast<double>(number), 0);
}
TEST_F(GpuJobs, ZerosAndSums) {
  in_every_order([] { expect_zeros_and_sums<float, float>(), expect_zeros_and_sums<BFloat16, float>(); });
}

template <class T>
void expect_row_squares() {
  Cuda dev(std::size_t{1} << 23, kTile);
  const auto x = matrices(block_of<T>(dev, 1));
  const auto a = allocate<double>(dev, 1, 2000, Kind::sums), b = allocate<double>(dev, 1, 2000, Kind::sums);
  zero(dev, std::vector{a, b});
  std::vector<RowSquares<T>> jobs, twins;
  Index rows = 0;
  for (const Matrix<T>& m : x) {
    jobs.push_back({a.columns(rows, m.rows), m}), twins.push_back({b.columns(rows, m.rows), m});
    rows += m.rows;
  }
  together_and_alone(dev, jobs, twins, [&](const auto& all) { row_squares(dev, all); });
  expect_equal_bytes(dev, a, b, "sums of squares");
  EXPECT_GT(to_host(dev, a)[0], 100);
}
TEST_F(GpuJobs, RowSquares) {
  in_every_order([] { expect_row_squares<float>(), expect_row_squares<BFloat16>(); });
}

OptimizerStep step_of(std::size_t parameter) {
  OptimizerStep s{0.1, 0.9, 0.95, 1e-8, parameter % 2 ? 0.1 : 0, 0.5, 3};
  s.parameter = parameter, s.first_row = static_cast<Index>(parameter % 3);
  return s;
}

template <class T, class G, class M>
void expect_adamw() {
  Cuda dev(std::size_t{1} << 23, kTile);
  const Matrix<G> gradient = block_of<G>(dev, 1);
  struct State {
    Matrix<T> w;
    Matrix<float> master;
    Matrix<M> m, v;
  };
  const auto state = [&] {
    return State{block_of<T>(dev, 2), block_of<float>(dev, 2), block_of<M>(dev, 3), block_of<M>(dev, 4)};
  };
  const State a = state(), b = state();
  const auto updates = [&](const State& s) {
    std::vector<AdamWUpdate<T, G, AdamWState<M>>> all;
    for (std::size_t i = 0; i < matrices(s.w).size(); ++i) {
      const Matrix<float> master = sizeof(M) > sizeof(T) ? matrices(s.master)[i] : Matrix<float>{};
      all.push_back(
          {matrices(s.w)[i], matrices(gradient)[i], {master, matrices(s.m)[i], matrices(s.v)[i]}, step_of(i)});
    }
    return all;
  };
  together_and_alone(dev, updates(a), updates(b), [&](const auto& all) { adamw(dev, all); });
  expect_equal_bytes(dev, a.w, b.w, "w"), expect_equal_bytes(dev, a.master, b.master, "master");
  expect_equal_bytes(dev, a.m, b.m, "m"), expect_equal_bytes(dev, a.v, b.v, "v");
  EXPECT_NE(static_cast<float>(to_host(dev, a.w)[0]), static_cast<float>(to_host(dev, block_of<T>(dev, 2))[0]));
}
TEST_F(GpuJobs, AdamW) {
  in_every_order([] {
    expect_adamw<float, float, float>();
    expect_adamw<BFloat16, float, float>();
    expect_adamw<BFloat16, BFloat16, BFloat16>();
  });
}

template <class T>
void expect_adamw_8bit() {
  Cuda dev(std::size_t{1} << 23, kTile);
  const auto gradients = matrices(block_of<T>(dev, 1));
  const Matrix<T> a = block_of<T>(dev, 2), b = block_of<T>(dev, 2);
  const auto updates = [&](Matrix<T> block) {
    const auto weights = matrices(block);
    std::vector<AdamW8bit<T, T>> all;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Matrix<T> w = weights[i];
      all.push_back({w, gradients[i], no_moments(dev, w.rows, w.cols), step_of(i)});
    }
    return all;
  };
  const auto jobs = updates(a), twins = updates(b);
  for (int step = 0; step < 2; ++step)
    together_and_alone(dev, jobs, twins, [&](const auto& all) { adamw_8bit(dev, all); });
  expect_equal_bytes(dev, a, b, "w");
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    expect_equal_bytes(dev, jobs[i].state.m.codes, twins[i].state.m.codes, "m");
    expect_equal_bytes(dev, jobs[i].state.v.codes, twins[i].state.v.codes, "v");
    expect_equal_bytes(dev, jobs[i].state.m.scales, twins[i].state.m.scales, "scales of m");
    expect_equal_bytes(dev, jobs[i].state.v.scales, twins[i].state.v.scales, "scales of v");
  }
}
TEST_F(GpuJobs, AdamWIn8Bits) {
  in_every_order([] { expect_adamw_8bit<float>(), expect_adamw_8bit<BFloat16>(); });
}

TEST_F(GpuJobs, NothingIsNoLaunch) {
  Cuda dev(1 << 20);
  zero(dev, std::vector<Matrix<float>>{});
  zero(dev, std::vector<Matrix<float>>(300));
  EXPECT_EQ(dev.launches, 0);
}

// Launches of a step of a model with GPT-2's twelve layers. Their number does not depend on the width, nor on the number of
// rows within a tile: a step of GPT-2 124M with 1024 tokens has as many.
template <class T>
Index launches_of_a_step(OptimizerKind kind) {
  const Config c = make_config("gpt2", {67, 64, 12, 1, 1, 64, 128, 64, true});
  const Batch batch = packed(c, {32});
  Cuda dev(std::size_t{1} << 26);
  Trainer<Cuda, T> trainer(dev, c, batch.size(), kind);
  trainer.initialise(1);
  dev.reset_work();
  trainer.step({batch}, Schedule::full(batch.size()), {.steps = 10, .clip = 1e-3}, 1);
  return dev.launches;
}
TEST_F(GpuJobs, AStepOfGpt2HasFewLaunches) {
  EXPECT_LE(launches_of_a_step<float>(OptimizerKind::adamw), 600);
  EXPECT_LE(launches_of_a_step<BFloat16>(OptimizerKind::adamw), 650);
  EXPECT_LE(launches_of_a_step<BFloat16>(OptimizerKind::adamw_8bit), 650);
}

}  // namespace
}  // namespace streambp
