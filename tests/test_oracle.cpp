// The oracle's own operations, against finite differences and other formulas of the same numbers.
#include "referee/defects.h"

#include <list>

#include "referee/gradient_check.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

using oracle::Array, oracle::Number, oracle::Tape;

// A mixer with random tensors, adapters on all linear layers, and several documents.
class OracleMixers : public testing::Test {
 protected:
  OracleMixers() {
    c.hidden = 6, c.heads = 4, c.kv_heads = 2, c.head_dim = 6, c.rotary_share = 0.5;
    c.qk_norm = QkNorm::heads, c.norm_offset = 1, c.attention_gate = true;
    c.delta_key_heads = 2, c.delta_value_heads = 4, c.delta_key_dim = 3, c.delta_value_dim = 5;
    c.convolution_width = 4;
    documents({1, 2, 70});
  }
  void documents(const std::vector<std::size_t>& lengths) {
    batch = {};
    for (const std::size_t length : lengths) batch.append(Tokens(length, 0));
  }

  Matrix<Number> tensor(const std::string& name, Index rows, Index cols, double size) {
    const Random random(7, tensors.size());
    std::vector<Number>& numbers = memory.emplace_back(static_cast<std::size_t>(rows * cols));
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i].value = size * random.normal(i);
    return tensors.emplace_back(name, Matrix<Number>(numbers.data(), rows, cols)).second;
  }
  Linear<Number> linear(const std::string& name, Index rows, Index cols, bool shares_a = false) {
    Linear<Number> w{tensor(name, rows, cols, 0.5), {}};
    if (!shares_a) w.adapter.a = tensor(name + ".a", 2, cols, 0.5);
    w.adapter.b = tensor(name + ".b", rows, 2, 0.5), w.adapter.scale = 0.7;
    return w;
  }
  void delta_tensors() {
    const Index heads = c.delta_value_heads;
    x = tensor("x", batch.size(), c.hidden, 1);
    w.q = linear("q", c.delta_key_width(), c.hidden), w.k = linear("k", c.delta_key_width(), c.hidden);
    w.v = linear("v", c.delta_value_width(), c.hidden, true);
    w.taps = tensor("taps", c.delta_width(), c.convolution_width, 0.5);
    w.z = linear("z", c.delta_value_width(), c.hidden);
    w.beta = linear("beta", heads, c.hidden), w.decay = linear("decay", heads, c.hidden);
    w.a_log = tensor("a_log", 1, heads, 1), w.dt_bias = tensor("dt_bias", 1, heads, 1);
    w.output_norm.weight = tensor("output_norm", 1, c.delta_value_dim, 1);
    w.o = linear("o", c.hidden, c.delta_value_width());
  }
  void attention_tensors() {
    x = tensor("x", batch.size(), c.hidden, 1);
    w.q = linear("q", c.attention(0).q_width(), c.hidden);
    w.attention_gate = linear("gate", c.attention(0).q_width(), c.hidden, true);
    w.k = linear("k", c.attention(0).kv_width(), c.hidden), w.v = linear("v", c.attention(0).kv_width(), c.hidden);
    w.q_norm.weight = tensor("q_norm", 1, c.head_dim, 1), w.k_norm.weight = tensor("k_norm", 1, c.head_dim, 1);
    w.o = linear("o", c.hidden, c.attention(0).q_width());
  }

  Array output(Tape& tape, MixerKind kind) const {
    if (kind == MixerKind::delta_rule) return oracle::delta_rule(tape, c, batch, w, x);
    return oracle::attention(tape, c, {kind, false, true}, batch, w, x);
  }

  void expect_gradients(MixerKind kind) {
    const Random random(8);
    const auto factor = [&](Index t, Index i) { return random.normal(static_cast<std::uint64_t>(t * c.hidden + i)); };
    const auto loss = [&] {
      Tape tape;
      const Array y = output(tape, kind);
      double sum = 0;
      for (Index t = 0; t < y.rows; ++t)
        for (Index i = 0; i < y.cols; ++i) sum += factor(t, i) * y(t, i).value;
      return sum;
    };
    Tape tape;
    const Array y = output(tape, kind);
    for (Index t = 0; t < y.rows; ++t)
      for (Index i = 0; i < y.cols; ++i) y(t, i).grad = factor(t, i);
    tape.backward();
    for (const auto& [name, m] : tensors) {
      double largest = 0;
      for (Index i = 0; i < m.size(); ++i) largest = std::max(largest, std::abs(m.data[i].grad));
      EXPECT_GT(largest, 1e-3) << name;
      for (Index i = 0; i < m.size(); i += std::max<Index>(1, m.size() / 12)) {
        const double h = 1e-5, start = m.data[i].value;
        m.data[i].value = start + h;
        const double above = loss();
        m.data[i].value = start - h;
        const double below = loss();
        m.data[i].value = start;
        EXPECT_NEAR(m.data[i].grad, (above - below) / (2 * h), 1e-7 * largest) << name << ", entry " << i;
      }
    }
  }

  Config c;
  TokenBatch batch;
  Matrix<Number> x;
  Layer<Number> w;
  std::list<std::vector<Number>> memory;
  std::vector<std::pair<std::string, Matrix<Number>>> tensors;
};

TEST_F(OracleMixers, TheGradientOfADeltaRuleIsThatOfFiniteDifferences) {
  delta_tensors();
  expect_gradients(MixerKind::delta_rule);
}

TEST_F(OracleMixers, TheGradientOfADeltaRuleWithADoubledBetaIsThatOfFiniteDifferences) {
  c.doubles_beta = true, c.output_norm_eps = 0.1;
  delta_tensors();
  expect_gradients(MixerKind::delta_rule);
}

TEST_F(OracleMixers, TheGradientOfGatedAttentionIsThatOfFiniteDifferences) {
  documents({1, 2, 12});
  attention_tensors();
  expect_gradients(MixerKind::attention);
}

// The state is never written down: with A[i,j] = exp(g[j+1] + ... + g[i]),
//   u[i] = β[i] (v[i] - Σ_{j<i} A[i,j] (k[i]·k[j]) u[j])        o[i] = Σ_{j≤i} A[i,j] (q[i]·k[j]) u[j]
TEST_F(OracleMixers, ADeltaRuleIsAttentionToWhatEarlierRowsWrote) {
  const Index n = batch.size(), keys = 3, values = 5;
  oracle::DeltaRule head{tensor("q", n, keys, 1),   tensor("k", n, keys, 0.6), tensor("v", n, values, 1),
                         tensor("beta", n, 1, 0.5), tensor("g", n, 1, 0.5),    tensor("o", n, values, 0)};
  Tape tape;
  oracle::delta_rule(tape, batch, head);
  const auto dot = [&](Array a, Index i, Array b, Index j) {
    double sum = 0;
    for (Index l = 0; l < keys; ++l) sum += a(i, l).value * b(j, l).value;
    return sum;
  };
  for (Index column = 0; column < values; ++column) {
    std::vector<double> u;
    for (Index i = 0; i < n; ++i) {
      double read = 0, o = 0, g = 0;
      for (Index j = i; j-- > batch.key_begin[static_cast<std::size_t>(i)];) {
        g += head.g(j + 1, 0).value;
        read += std::exp(g) * dot(head.k, i, head.k, j) * u[static_cast<std::size_t>(j)];
        o += std::exp(g) * dot(head.q, i, head.k, j) * u[static_cast<std::size_t>(j)];
      }
      u.push_back(head.beta(i, 0).value * (head.v(i, column).value - read));
      o += dot(head.q, i, head.k, i) * u.back();
      ASSERT_NEAR(head.o(i, column).value, o, 1e-11 * (1 + std::abs(o))) << "row " << i;
    }
  }
}

// Neither the state nor the rows of the convolution pass from a document to the next.
TEST_F(OracleMixers, ADocumentIsTheSameAloneAndPacked) {
  delta_tensors();
  Tape tape;
  const Array packed = output(tape, MixerKind::delta_rule);
  const Index begin = batch.documents()[2].begin;
  x = x.slice({begin, batch.size()});
  documents({70});
  const Array alone = output(tape, MixerKind::delta_rule);
  for (Index t = 0; t < alone.rows; ++t)
    for (Index i = 0; i < alone.cols; ++i) ASSERT_EQ(alone(t, i).value, packed(begin + t, i).value) << t;
}

// Defects differ from the right gradient, and from each other.
void expect_own_gradients(const Config& c, const std::vector<const char*>& names) {
  RecordedBatch recorded;
  recorded.batch = packed(c, {40, 1, 21});
  for (const std::int32_t target : recorded.batch.targets) recorded.batch.advantages.push_back(target >= 0);
  recorded.rows.assign(recorded.batch.tokens.size(), 0), recorded.columns = recorded.rows;
  TrainingCase correct{c, {}};
  correct.step.batches = {recorded};
  const auto gradient = [&](const TrainingCase& of) {
    const Batch& batch = of.step.batches[0].batch;
    return oracle_gradient(of.config, batch, random_weights(), oracle::linear(batch.advantages), of.wrong).gradient;
  };
  const auto difference = [](const auto& a, const auto& b) {
    DifferenceOfTensors all;
    for (const auto& [name, values] : a) all.add(name, values, b.at(name));
    return all.worst().relative;
  };
  std::map<std::string, std::map<std::string, std::vector<double>>> seen = {{"right", gradient(correct)}};
  for (const char* name : names) {
    TrainingCase wrong = correct;
    const auto defect = std::ranges::find(all_defects(), std::string(name), &Defect::name);
    ASSERT_TRUE(defect != all_defects().end() && defect->apply(wrong)) << name;
    const auto of_defect = gradient(wrong);
    for (const auto& [name, other] : seen)
      EXPECT_GT(difference(of_defect, other), 1e-4) << defect->name << ", " << name;
    seen[name] = of_defect;
  }
}

TEST(OracleDefects, OfHybridModels) {
  Config c = make_config("qwen3_5", {13, 12, 4, 4, 2, 8, 10, 0, false});
  c.rotary_share = 0.5, c.doubles_beta = true;
  expect_own_gradients(
      c, {"state-leaks", "convolution-leaks", "state-and-convolution-leak", "state-reset", "convolution-reset",
          "gate-before-norm", "delta-unscaled", "beta-undoubled", "decay-missing", "decay-bias", "decay-softplus",
          "state-bf16", "attention-gate", "rope-whole-head", "output-norm-offset", "heads-in-turn"});
}

TEST(OracleDefects, OfMixtures) {
  Config c = make_config("qwen3_next", {13, 12, 2, 2, 1, 8, 10, 0, false});
  expect_own_gradients(c, {"router-renormalised", "shared-gate", "branch-router", "router-foreign-slots"});
  c.balanced = true, c.balance_factor = 0.5;
  expect_own_gradients(c, {"balance-missing", "balance-doubled", "router-renormalised"});
  expect_own_gradients(make_config("lfm2_moe", {13, 12, 3, 2, 1, 8, 10, 0, true}),
                       {"router-bias", "router-renormalised", "branch-router"});
}

}  // namespace
}  // namespace streambp
