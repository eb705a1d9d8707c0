// The arithmetic of the CPU: every element of a product has the bits of its defining formula, and elementary functions
// are accurate.
#include <numeric>

#include "kernels/base/inner_loops.h"
#include "kernels/base/row_sums.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

using cpu::Op;

// x y + sum as defined for bfloat16: rounded once, and subnormal numbers become zero.
float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float fused_and_flushed(float x, float y, float sum) {
  x = flushed(x), y = flushed(y);
  const float result = std::fma(x, y, sum);
  if (std::abs(result) != 0x1p-126f) return flushed(result);
  // Rounded to 24 bits, as if there were no smallest exponent, is it the smallest normal number?
  const double least = std::copysign(0x1p-126 - 0x1p-151, result);
  const double excess = std::fma(static_cast<double>(x), static_cast<double>(y), static_cast<double>(sum) - least);
  return excess * least >= 0 ? result : std::copysign(0.0f, result);
}

// An element by the definition in gemm.h.
template <class T>
Accumulator<T> defined(Accumulator<T> start, const std::function<T(Index)>& a, const std::function<T(Index)>& b,
                       Index inner) {
  using A = Accumulator<T>;
  constexpr bool in_pairs = std::is_same_v<T, BFloat16>;
  for (Index block = 0; block < inner; block += cpu::kBlock) {
    A sum = 0;
    const Index end = std::min(inner, block + cpu::kBlock);
    for (Index k = block; k < (in_pairs ? round_up(end, 2) : end); ++k) {
      if constexpr (in_pairs) {
        const auto number = [&](auto& f) { return (k ^ 1) < inner ? static_cast<float>(f(k ^ 1)) : 0; };
        sum = fused_and_flushed(number(a), number(b), sum);
      } else {
        sum = std::fma(a(k), b(k), sum);
      }
    }
    start = in_pairs ? flushed(flushed(start) + sum) : start + sum;
  }
  return start;
}

// Small: products and sums around the smallest normal number.
template <class T>
void expect_defined_bits(Index rows, Index cols, Index inner, Op op_a, Op op_b, bool small) {
  using A = Accumulator<T>;
  auto matrix = [small](Index rows, Index cols, std::uint64_t seed) {
    const Owned<float> noise(rows, cols, seed);
    std::vector<T> values;
    for (Index i = 0; i < noise.m.size(); ++i) {
      values.push_back(static_cast<T>(noise.m.data[i] * (small ? 0x1p-63f : 1)));
      if (small && i % 5 == 0) values.back() = static_cast<T>(noise.m.data[i] * 0x1p-130f);  // subnormal
    }
    return values;
  };
  const bool a_as_is = op_a == Op::as_is, b_as_is = op_b == Op::as_is;
  const std::vector<T> a_values = matrix(rows, inner, 1), b_values = matrix(inner, cols, 2);
  const Matrix<const T> a(a_values.data(), a_as_is ? rows : inner, a_as_is ? inner : rows),
      b(b_values.data(), b_as_is ? inner : cols, b_as_is ? cols : inner);
  const double spread = small ? 0x1p-127 : 1;
  const Owned<A> start(rows, cols + 3, 3, spread), c(rows, cols + 3, 3, spread),  // the rows of c are not contiguous
      few(rows, cols + 3, 3, spread);
  cpu::gemm<T>(c.m.columns(1, cols), a, op_a, b, op_b);
  if (a_as_is && rows <= cpu::kFewRows) {
    cpu::multiply_few_rows<T>(few.m.columns(1, cols), a, b, op_b);
    for (Index i = 0; i < few.m.size(); ++i) ASSERT_EQ(few.m.data[i], c.m.data[i]) << rows << " rows, element " << i;
  }
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < cols + 3; ++j) {
      if (j == 0 || j > cols) {
        ASSERT_EQ(c.m(i, j), start.m(i, j)) << "outside c";
        continue;
      }
      const A expected = defined<T>(
          start.m(i, j), [&](Index k) { return a_as_is ? a(i, k) : a(k, i); },
          [&](Index k) { return b_as_is ? b(k, j - 1) : b(j - 1, k); }, inner);
      ASSERT_EQ(c.m(i, j), expected) << rows << "x" << cols << "x" << inner << " at " << i << ", " << j - 1;
    }
  }
}

template <class T>
void expect_defined_bits(bool small) {
  constexpr std::array<Index, 3> shapes[] = {{1, 1, 1},     {2, 3, 5},    {5, 17, 16},   {6, 64, 32},
                                             {13, 31, 255}, {7, 65, 256}, {3, 130, 257}, {256, 5, 600}};
  for (const Op op_a : {Op::as_is, Op::transposed}) {
    for (const Op op_b : {Op::as_is, Op::transposed}) {
      for (const auto& [rows, cols, inner] : shapes) expect_defined_bits<T>(rows, cols, inner, op_a, op_b, small);
    }
  }
  for (Index rows = 1; rows <= cpu::kFewRows; ++rows) {
    for (const auto& [cols, inner] : {std::pair<Index, Index>{35, 261}, {64, 40}})
      expect_defined_bits<T>(rows, cols, inner, Op::as_is, Op::transposed, small);
    for (const auto& [cols, inner] : {std::pair<Index, Index>{112, 261}, {64, 41}})
      expect_defined_bits<T>(rows, cols, inner, Op::as_is, Op::as_is, small);
  }
}

TEST(Gemm, EveryElementHasTheBitsOfItsDefinition) {
  for (const std::string& instructions : cpu::instruction_sets()) {
    SCOPED_TRACE(instructions);
    cpu::use_instructions(instructions);
    expect_defined_bits<float>(false);
    expect_defined_bits<double>(false);
    for (const bool small : {false, true}) expect_defined_bits<BFloat16>(small);
  }
  EXPECT_THROW(cpu::use_instructions("MMX"), Error);
}

TEST(Gemm, RefusesOperandsThatDoNotFit) {
  const cpu::LeftBlock<float> block;
  cpu::RightPanels<float> panels(8);
  Owned<float> b(4, 8, 1), c(2, 8, 2);
  panels.pack(b.m, Op::as_is);
  EXPECT_THROW(block.matrix(cpu::kBlock + 1, 1), Error);
  EXPECT_THROW(cpu::multiply<float>(c.m, block.copy(b.m, Op::as_is), panels, Update::add), Error);
  EXPECT_THROW(block.copy(c.m, Op::as_is).slice({1, 3}), Error);
  const Owned<float> many(17, 8, 3), product(17, 4, 4);
  EXPECT_THROW(cpu::multiply_few_rows<float>(product.m, many.m, b.m, Op::transposed), Error);
}

template <class T>
void expect_defined_softmax(Accumulator<T> cap, Accumulator<T> odd_one) {
  using A = Accumulator<T>;
  constexpr Index keys = 131, dim = 5, first = 3, last = 120;
  const A scale = A(0.3), delta = A(0.1);
  const auto same = [](A x, A y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  const auto some_scores = [&] {
    const Owned<A> s(1, keys, 1, 9);
    s.m(0, 40) = odd_one;
    return s;
  };
  const Owned<A> scores = some_scores(), p = some_scores(), dp(1, keys, 2), ds(1, keys, 2), before(1, dim, 3),
                 output(1, dim, 3);
  const Owned<T> rounded(1, keys, 4), rounded_ds(1, keys, 5);
  const auto score = [&](Index j) {
    return cap > 0 ? soft_capped(scores.m(0, j) * scale, cap) : scores.m(0, j) * scale;
  };

  cpu::RunningSoftmax<A> running{A(0.5), A(7)};
  A maximum = running.maximum;
  for (Index j = first; j < last; ++j) maximum = score(j) > maximum ? score(j) : maximum;
  const A shrink = exponential(A(0.5) - maximum);
  const A sum =
      A(7) * shrink + cpu::sum_of(last - first, [&](Index j) { return exponential(score(first + j) - maximum); });
  const auto& loops = cpu::inner_loops<T>();
  loops.softmax_row({p.m.data, keys, {first, last}, scale, cap}, running, output.m.data, dim, rounded.m.data);
  EXPECT_EQ(running.maximum, maximum);
  EXPECT_TRUE(same(running.sum, sum)) << running.sum << ", expected " << sum;
  for (Index d = 0; d < dim; ++d) EXPECT_EQ(output.m(0, d), before.m(0, d) * shrink);
  for (Index j = 0; j < keys; ++j) {
    const A expected = first <= j && j < last ? exponential(score(j) - maximum) : A(0);
    EXPECT_TRUE(same(p.m(0, j), expected)) << j;
    EXPECT_TRUE((std::is_same_v<A, T>) || same(rounded.m(0, j), T(expected))) << j;
  }

  const Owned<A> again = some_scores();
  loops.softmax_backward_row({again.m.data, keys, {first, last}, scale, cap}, ds.m.data, maximum, delta, rounded.m.data,
                             rounded_ds.m.data);
  for (Index j = 0; j < keys; ++j) {
    const A slope = cap > 0 ? soft_cap_slope(score(j), cap) : A(1),
            d = first <= j && j < last ? p.m(0, j) * ((dp.m(0, j) - delta) * slope) * scale : A(0);
    EXPECT_TRUE(same(again.m(0, j), p.m(0, j)) && same(ds.m(0, j), d)) << j;
    EXPECT_TRUE((std::is_same_v<A, T>) || (same(rounded.m(0, j), T(p.m(0, j))) && same(rounded_ds.m(0, j), T(d)))) << j;
  }
}

TEST(Softmax, RowsHaveTheBitsOfTheirDefinition) {
  for (const std::string& instructions : cpu::instruction_sets()) {
    SCOPED_TRACE(instructions);
    cpu::use_instructions(instructions);
    for (const float cap : {0.0f, 2.0f}) {
      for (const float odd_one : {1.0f, 1000.0f, -INFINITY, NAN}) {
        SCOPED_TRACE(odd_one);
        expect_defined_softmax<float>(cap, odd_one);
        expect_defined_softmax<double>(cap, odd_one);
        expect_defined_softmax<BFloat16>(cap, odd_one);
      }
    }
  }
}

// Logits of 20 and more, rounded to bfloat16, would be off by up to 0.06.
TEST(Head, LogProbsOfBFloat16HaveTheAccuracyOfFloat32) {
  constexpr Index rows = 30, hidden = 64, vocab = 500;
  Cpu dev(std::size_t{1} << 20);
  const Owned<BFloat16> y(rows, hidden, 1), w(vocab, hidden, 2);
  const Owned<float> logits(rows, vocab, 3), logp(1, rows, 4);
  std::vector<std::int32_t> targets;
  for (Index i = 0; i < rows; ++i) targets.push_back(static_cast<std::int32_t>(i * 7));
  matmul<Cpu, float, BFloat16>(dev, logits.m, y.m, w.m);
  log_probabilities(dev, logp.m, logits.m, Matrix<const std::int32_t>(targets.data(), 1, rows));
  for (Index i = 0; i < rows; ++i) {
    std::vector<double> truth(vocab);
    double sum = 0;
    for (Index j = 0; j < vocab; ++j) {
      for (Index k = 0; k < hidden; ++k)
        truth[index(j)] += static_cast<double>(y.m(i, k)) * static_cast<double>(w.m(j, k));
      sum += std::exp(truth[index(j)]);
    }
    EXPECT_NEAR(logp.m(0, i), truth[static_cast<std::size_t>(targets[static_cast<std::size_t>(i)])] - std::log(sum),
                2e-5);
  }
}

TEST(LaneSums, AddElementsInAFixedOrder) {
  for (Index n : {0, 1, 15, 16, 17, 100}) {
    const Owned<float> x(1, std::max<Index>(n, 1), 7);
    float lanes[16] = {};
    for (Index j = 0; j < n; ++j) lanes[j % 16] += x.m.data[j];
    for (Index half : {8, 4, 2, 1}) {
      for (Index lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    EXPECT_EQ(cpu::sum_of(n, [&](Index j) { return x.m.data[j]; }), lanes[0]);
  }
}

// The relative error of f against g at many points.
template <class F, class G>
void expect_accurate(const char* what, double tolerance, std::pair<double, double> range, const F& f, const G& g) {
  double largest = 0;
  constexpr int points = 100000;
  for (int i = 0; i <= points; ++i) {
    const double x = range.first + (range.second - range.first) * i / points;
    const long double truth = g(static_cast<long double>(x));
    largest = std::max(largest, static_cast<double>(std::abs((f(x) - truth) / truth)));
  }
  EXPECT_LT(largest, tolerance) << what << " from " << range.first << " to " << range.second;
}

TEST(ElementaryFunctions, AreAccurate) {
  using Ranges = std::vector<std::pair<double, double>>;
  const auto narrow = [](long double x) { return static_cast<float>(x); };
  const auto exp = [](auto x) { return exponential(x); };
  const auto true_exp = [](long double x) { return std::exp(x); };
  for (const auto& range : Ranges{{-700, 700}, {-1e-3, 1e-3}}) expect_accurate("exp", 2.3e-16, range, exp, true_exp);
  expect_accurate(
      "exp in float32", 1.2e-7, {-87, 88}, [&](double x) { return exp(narrow(x)); },
      [&](long double x) { return true_exp(narrow(x)); });
  const auto log = [](double x) { return logarithm(x); };
  const auto true_log = [](long double x) { return std::log(x); };
  for (const auto& range : Ranges{{1e-300, 1e-299}, {1e-3, 0.999}, {1.001, 2}, {2, 1e6}})
    expect_accurate("log", 4.5e-16, range, log, true_log);
  const auto expm1 = [](auto x) { return exponential_minus_one(x); };
  const auto true_expm1 = [](long double x) { return std::expm1(x); };
  for (const auto& range : Ranges{{-40, 86}, {-2, 2}, {1e-300, 1e-299}, {1e-17, 1e-14}, {-1e-5, -1e-9}}) {
    expect_accurate("expm1", 3.4e-16, range, expm1, true_expm1);
    if (range.first == 1e-300) continue;
    expect_accurate(
        "expm1 in float32", 1.8e-7, range, [&](double x) { return expm1(narrow(x)); },
        [&](long double x) { return true_expm1(narrow(x)); });
  }
  const auto log1p = [](double x) { return logarithm_one_plus(x); };
  const auto true_log1p = [](long double x) { return std::log1p(x); };
  for (const auto& range : Ranges{{1e-300, 1e-299}, {1e-17, 1e-14}, {1e-9, 1e-5}, {1e-3, 1}, {-0.9, -1e-3}, {1, 1e6}})
    expect_accurate("log1p", 4.5e-16, range, log1p, true_log1p);
  expect_accurate(
      "log_sigmoid", 4.5e-16, {-700, 700}, [](double x) { return log_sigmoid(x); },
      [](long double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); });
  expect_accurate(
      "power", 3e-15, {0, 1}, [](double y) { return power(1e6, -y); },
      [](long double y) { return std::pow(1e6L, -y); });
  for (double x : {0.0, 0.5, 1e3, 123456.789, 1e6, -77777.7}) {
    const auto [sine, cosine] = sine_cosine(x);
    EXPECT_NEAR(sine, std::sin(x), 2.3e-16);
    EXPECT_NEAR(cosine, std::cos(x), 2.3e-16);
  }
}

TEST(ElementaryFunctions, HandleValuesAtTheEdges) {
  EXPECT_EQ(exponential(0.0), 1);
  EXPECT_EQ(exponential(0.0f), 1);
  EXPECT_EQ(logarithm(1.0), 0);
  EXPECT_GT(exponential(-1e30f), 0);
  EXPECT_LT(exponential(-1e30f), 1e-37f);
  EXPECT_TRUE(std::isfinite(exponential(1e30)) && std::isfinite(exponential(1e30f)));
  EXPECT_TRUE(std::isnan(exponential(static_cast<float>(NAN))) && std::isnan(exponential(static_cast<double>(NAN))));
  EXPECT_EQ(logarithm(0.0), -INFINITY);
  EXPECT_EQ(logarithm(static_cast<double>(INFINITY)), INFINITY);
  EXPECT_NEAR(logarithm(1e-310), std::log(1e-310), 2e-13) << "subnormal";
  EXPECT_EQ(logarithm(0x1p-1074), -1074 * 0.6931471805599453);
  EXPECT_EQ(exponential_minus_one(0.0f), 0);
  EXPECT_EQ(exponential_minus_one(0x1p-1074), 0x1p-1074);
  EXPECT_EQ(exponential_minus_one(-1e300), -1);
  EXPECT_EQ(exponential_minus_one(-1e30f), -1);
  EXPECT_TRUE(std::isfinite(exponential_minus_one(1e30f)) && std::isfinite(exponential_minus_one(1e300)));
  EXPECT_TRUE(std::isnan(exponential_minus_one(static_cast<double>(NAN))));
  EXPECT_EQ(logarithm_one_plus(0), 0);
  EXPECT_EQ(logarithm_one_plus(0x1p-1074), 0x1p-1074);
  EXPECT_TRUE(std::isnan(logarithm_one_plus(NAN)) && std::isnan(log_sigmoid(NAN)));
  EXPECT_EQ(log_sigmoid(-1e300), -1e300);
  EXPECT_LE(log_sigmoid(1e300), 0);
  EXPECT_TRUE(std::isnan(logarithm(-1.0)) && std::isnan(logarithm(static_cast<double>(NAN))));
}

// In a loop, the compiler computes several values at once.
template <class T, class F>
void expect_same_bits_in_vectors(double from, double to, F f) {
  constexpr int n = 1000;
  std::vector<T> x(n), in_vectors(n);
  for (int i = 0; i < n; ++i) x[static_cast<std::size_t>(i)] = static_cast<T>(from + (to - from) * i / n);
  const T* const from_x = x.data();
  T* const y = in_vectors.data();
#pragma omp simd
  for (int i = 0; i < n; ++i) y[i] = f(from_x[i]);
  T (*volatile alone)(T) = [](T value) { return F()(value); };
  for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(in_vectors[i], alone(x[i])) << x[i];
}

TEST(ElementaryFunctions, HaveTheSameBitsInVectors) {
  const auto exp = [](auto x) { return exponential(x); };
  const auto expm1 = [](auto x) { return exponential_minus_one(x); };
  const auto logistic = [](auto x) { return sigmoid(x); };
  for (const double size : {1e-6, 1.0, 100.0, 800.0}) {
    expect_same_bits_in_vectors<float>(-size, size, exp), expect_same_bits_in_vectors<double>(-size, size, exp);
    expect_same_bits_in_vectors<float>(-size, size, expm1), expect_same_bits_in_vectors<double>(-size, size, expm1);
    expect_same_bits_in_vectors<float>(-size, size, logistic);
    expect_same_bits_in_vectors<double>(-size, size, logistic);
  }
}

}  // namespace
}  // namespace streambp
