// The gated delta rule: against the recurrence, row by row, in double precision; and bit for bit between chunks, and between a
// document alone and among others.
#include "kernels/base/random.h"
#include "kernels/delta_gates.cuh"
#include "kernels/delta_rule.cuh"
#include "tests/support.cuh"

namespace streambp {
namespace {

const DeltaShape kDeltaShape = {2, 4, 5, 7};
// Documents that cross a tile's end begin at multiples of 64.
const Lengths kDeltaLengths = {1, 63, 130, 62, 1, 127, 64, 65, 63, 600, 2};

template <class T>
struct DeltaCase {
  using A = Accumulator<T>;
  struct Numbers {
    std::vector<T> values;
    Index cols;
    Matrix<T> matrix() { return {values.data(), static_cast<Index>(values.size()) / cols, cols}; }
  };
  struct Sums {
    std::vector<A> values;
    Index cols;
    Matrix<A> matrix() { return {values.data(), static_cast<Index>(values.size()) / cols, cols}; }
  };
  std::vector<std::int32_t> key_begin;
  Numbers q, k, v, beta, dout;
  Sums decay;

  Numbers out, dq, dk, dv;
  Sums dbeta, ddecay, states, dstates;
  Index rows = 0;

  explicit DeltaCase(const Lengths& lengths, Index only = -1) {
    Index first = 0;
    std::vector<Index> kept;
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      for (Index i = 0; i < lengths[n] && (only < 0 || static_cast<std::size_t>(only) == n); ++i) {
        kept.push_back(first + i);
        key_begin.push_back(static_cast<std::int32_t>(only < 0 ? first : 0));
      }
      first += lengths[n];
    }
    rows = static_cast<Index>(kept.size());
    std::uint64_t stream = 0;
    const auto random = [&](auto& numbers, Index cols, auto&& value) {
      const Random source(7, stream++);
      numbers.cols = cols;
      for (const Index row : kept)
        for (Index j = 0; j < cols; ++j)
          numbers.values.emplace_back(
              static_cast<float>(value(source.normal(static_cast<std::uint64_t>(row * cols + j)))));
    };
    const auto plain = [](double x) { return x; };
    random(q, kDeltaShape.key_heads * kDeltaShape.key_dim, plain),
        random(k, kDeltaShape.key_heads * kDeltaShape.key_dim, plain);
    random(v, kDeltaShape.value_heads * kDeltaShape.value_dim, plain), random(dout, v.cols, plain);
    random(beta, kDeltaShape.value_heads, [](double x) { return 1 / (1 + std::exp(-2 * x)); });
    random(decay, kDeltaShape.value_heads, [](double x) { return x > 2 ? -300 : -0.1 * x * x; });
    const auto zeros = [&](auto& numbers, Index rows, Index cols) {
      numbers.values.assign(static_cast<std::size_t>(rows * cols), {}), numbers.cols = cols;
    };
    zeros(out, rows, v.cols), zeros(dq, rows, q.cols), zeros(dk, rows, q.cols), zeros(dv, rows, v.cols);
    zeros(dbeta, rows, beta.cols), zeros(ddecay, rows, beta.cols);
    const Index size = kDeltaShape.value_heads * kDeltaShape.key_dim * kDeltaShape.value_dim;
    zeros(states, ceil_div(rows, kTile), size), zeros(dstates, 1, size);
  }

  void run(Index chunk) {
    Cpu dev(std::size_t{1} << 26);
    const auto span = [&](Rows part) {
      return DeltaSpan<A>{part, {key_begin.data(), 1, rows}, kDeltaShape, states.matrix()};
    };
    const auto in = [&](Rows part) {
      return DeltaInput<T>{q.matrix().slice(part), k.matrix().slice(part), v.matrix().slice(part),
                           beta.matrix().slice(part), decay.matrix().slice(part)};
    };
    const Index chunks = ceil_div(rows, chunk);
    for (Index c = 0; c < chunks; ++c) {
      const Rows part = piece(c, chunk, rows);
      delta_rule<Cpu, T>(dev, out.matrix().slice(part), in(part), span(part));
    }
    for (Index c = chunks - 1; c >= 0; --c) {
      const Rows part = piece(c, chunk, rows);
      delta_rule_backward<Cpu, T>(dev,
                                  {dq.matrix().slice(part), dk.matrix().slice(part), dv.matrix().slice(part),
                                   dbeta.matrix().slice(part), ddecay.matrix().slice(part)},
                                  dstates.matrix(), dout.matrix().slice(part), in(part), span(part));
    }
  }
};

// The recurrence and its derivative, row by row: writes the results of a case.
void recurrence(DeltaCase<double>& c) {
  const Index K = kDeltaShape.key_dim, V = kDeltaShape.value_dim;
  for (Index h = 0; h < kDeltaShape.value_heads; ++h) {
    const Index kh = h / kDeltaShape.group();
    std::vector<std::vector<double>> before, after;  // the state
    std::vector<double> state(static_cast<std::size_t>(K * V));
    const auto unit = [&](auto& x, Index t, double scale) {
      std::vector<double> y;
      double squares = 1e-6;
      for (Index i = 0; i < K; ++i) y.push_back(x.matrix()(t, kh * K + i)), squares += y.back() * y.back();
      for (double& n : y) n *= scale / std::sqrt(squares);
      return std::pair(y, std::sqrt(squares));
    };
    const double root = 1 / std::sqrt(static_cast<double>(K));
    const auto at = [&](std::vector<double>& s, Index i, Index j) -> double& {
      return s[static_cast<std::size_t>(i * V + j)];
    };
    for (Index t = 0; t < c.rows; ++t) {
      if (c.key_begin[static_cast<std::size_t>(t)] == t) std::ranges::fill(state, 0.0);
      before.push_back(state);
      const auto q = unit(c.q, t, root).first, k = unit(c.k, t, 1).first;
      for (double& s : state) s *= std::exp(c.decay.matrix()(t, h));
      for (Index j = 0; j < V; ++j) {
        double seen = 0;
        for (Index i = 0; i < K; ++i) seen += at(state, i, j) * k[static_cast<std::size_t>(i)];
        const double u = c.beta.matrix()(t, h) * (c.v.matrix()(t, h * V + j) - seen);
        double o = 0;
        for (Index i = 0; i < K; ++i) {
          at(state, i, j) += k[static_cast<std::size_t>(i)] * u;
          o += at(state, i, j) * q[static_cast<std::size_t>(i)];
        }
        c.out.matrix()(t, h * V + j) = o;
      }
      after.push_back(state);
    }
    std::vector<double> ds(static_cast<std::size_t>(K * V));
    for (Index t = c.rows - 1; t >= 0; --t) {
      const auto T = static_cast<std::size_t>(t);
      const auto [q, q_norm] = unit(c.q, t, root);
      const auto [k, k_norm] = unit(c.k, t, 1);
      const double beta = c.beta.matrix()(t, h), e = std::exp(c.decay.matrix()(t, h));
      std::vector<double> dq(static_cast<std::size_t>(K)), dk(static_cast<std::size_t>(K));
      double dbeta = 0, dg = 0;
      for (Index j = 0; j < V; ++j) {
        const double dy = c.dout.matrix()(t, h * V + j);
        double seen = 0, du = 0;
        for (Index i = 0; i < K; ++i) {
          const auto I = static_cast<std::size_t>(i);
          dq[I] += at(after[T], i, j) * dy, at(ds, i, j) += q[I] * dy;
          seen += e * at(before[T], i, j) * k[I], du += at(ds, i, j) * k[I];
        }
        const double rest = c.v.matrix()(t, h * V + j) - seen;
        for (Index i = 0; i < K; ++i) {
          const auto I = static_cast<std::size_t>(i);
          const double old = at(ds, i, j);
          dk[I] += old * beta * rest - beta * du * e * at(before[T], i, j);
          const double d_decayed = old - beta * du * k[I];
          dg += d_decayed * e * at(before[T], i, j);
          at(ds, i, j) = d_decayed * e;
        }
        dbeta += du * rest, c.dv.matrix()(t, h * V + j) = beta * du;
      }
      c.dbeta.matrix()(t, h) = dbeta, c.ddecay.matrix()(t, h) = dg;
      const auto add_unit_gradient = [&](auto& to, auto& x, const std::vector<double>& dy, double norm, double scale) {
        double dot = 0;
        for (Index i = 0; i < K; ++i) dot += dy[static_cast<std::size_t>(i)] * x.matrix()(t, kh * K + i);
        for (Index i = 0; i < K; ++i)
          to.matrix()(t, kh * K + i) +=
              scale * (dy[static_cast<std::size_t>(i)] / norm - x.matrix()(t, kh * K + i) * dot / (norm * norm * norm));
      };
      add_unit_gradient(c.dq, c.q, dq, q_norm, root), add_unit_gradient(c.dk, c.k, dk, k_norm, 1);
      if (c.key_begin[T] == t) std::ranges::fill(ds, 0.0);
    }
  }
}

template <class N, class M>
double distance_of(const N& a, const M& b) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    const double x = static_cast<double>(a.values[i]), y = static_cast<double>(b.values[i]);
    error += (x - y) * (x - y), size += y * y;
  }
  return std::sqrt(error / size);
}
template <class C, class D>
void expect_results(const C& a, const D& b, double limit) {
  EXPECT_LE(distance_of(a.out, b.out), limit) << "output";
  EXPECT_LE(distance_of(a.dq, b.dq), limit) << "dq";
  EXPECT_LE(distance_of(a.dk, b.dk), limit) << "dk";
  EXPECT_LE(distance_of(a.dv, b.dv), limit) << "dv";
  EXPECT_LE(distance_of(a.dbeta, b.dbeta), limit) << "dbeta";
  EXPECT_LE(distance_of(a.ddecay, b.ddecay), limit) << "ddecay";
}

TEST(DeltaRule, IsTheRecurrence) {
  DeltaCase<double> truth(kDeltaLengths), run(kDeltaLengths);
  recurrence(truth);
  run.run(kTile);
  expect_results(run, truth, 1e-13);
  DeltaCase<float> narrow(kDeltaLengths);
  narrow.run(kTile);
  expect_results(narrow, truth, 2e-6);
  DeltaCase<BFloat16> rounded(kDeltaLengths);
  rounded.run(kTile);
  expect_results(rounded, truth, 2e-2);
}

template <class C>
auto bytes_of_results(const C& c) {
  const auto bytes = [](const auto& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  return std::vector{bytes(c.out.values), bytes(c.dq.values),    bytes(c.dk.values),
                     bytes(c.dv.values),  bytes(c.dbeta.values), bytes(c.ddecay.values)};
}

template <class T>
void expect_no_dependence() {
  DeltaCase<T> one(kDeltaLengths);
  one.run(4 * kTile);
  for (const Index chunk : {kTile, 2 * kTile}) {
    DeltaCase<T> other(kDeltaLengths);
    other.run(chunk);
    EXPECT_TRUE(bytes_of_results(one) == bytes_of_results(other)) << chunk;
  }
  Index first = 0;
  for (std::size_t n = 0; n < kDeltaLengths.size(); ++n) {
    DeltaCase<T> alone(kDeltaLengths, static_cast<Index>(n));
    alone.run(kTile);
    const Rows rows = {first, first + kDeltaLengths[n]};
    first = rows.end;
    const auto same = [&](auto& part, auto& whole) {
      const auto of_document = whole.matrix().slice(rows);
      return std::memcmp(part.values.data(), of_document.data, part.values.size() * sizeof(part.values[0])) == 0;
    };
    EXPECT_TRUE(same(alone.out, one.out) && same(alone.dq, one.dq) && same(alone.dk, one.dk) &&
                same(alone.dv, one.dv) && same(alone.dbeta, one.dbeta) && same(alone.ddecay, one.ddecay))
        << "document " << n;
  }
}
TEST(DeltaRule, DependsNeitherOnChunksNorOnOtherDocuments) {
  expect_no_dependence<float>();
  expect_no_dependence<double>();
  expect_no_dependence<BFloat16>();
}

// A state that decays below the smallest number is gone, and so is the gradient of its decay, however large A is.
TEST(DeltaRule, ForgetsWithoutATrace) {
  DeltaCase<float> c({130});
  std::ranges::fill(c.decay.values, -1e30f);
  c.run(kTile);
  EXPECT_TRUE(std::ranges::all_of(c.ddecay.values, [](float x) { return x == 0; }));
  Cpu dev(std::size_t{1} << 16);
  Owned<float> a(3, 2, 1), b(3, 2, 2), a_log(1, 2, 3, 0, 100), dt(1, 2, 4), beta(3, 2, 5), decay(3, 2, 6),
      da_log(1, 2, 0, 0), ddt(1, 2, 0, 0), dbeta(3, 2, 7), ddecay(3, 2, 0, 0);
  const DeltaGates<float> gates = {a.m, b.m, a_log.m, dt.m};
  delta_gates(dev, beta.m, decay.m, gates);
  delta_gates_backward(dev, a.m, b.m, da_log.m, ddt.m, dbeta.m, ddecay.m, gates);
  for (const Owned<float>& x : {a, da_log, ddt})
    EXPECT_TRUE(std::all_of(x.m.data, x.m.data + x.m.size(), [](float x) { return x == 0; }));
}

}  // namespace
}  // namespace streambp
