// The operations of a mixture of experts: forward against their formulas in float64, backward against finite differences of
// a whole mixture, and bit for bit between chunks, lanes and threads.
#include "kernels/group_bias.cuh"
#include "kernels/grouped_matmul.cuh"
#include "kernels/router.cuh"
#include "tests/operations.h"

namespace streambp {
namespace {

template <class T>
struct Experts {
  using A = Accumulator<T>;
  static constexpr Index kRows = 300, kExperts = 7;
  const Index chosen, in_width, out_width;
  RouterStyle style;
  Owned<A> logits, bias{1, kExperts, 2}, dlogits{kRows, kExperts, 3};
  Owned<T> x, w, b, y, dy, dx;
  Owned<A> dw, db;
  std::vector<std::int32_t> experts;  // of each row

  explicit Experts(Index chosen, const RouterStyle& style = {}, Index lanes = 1, Index in = 5, Index out = 9)
      : chosen(chosen),
        in_width(in),
        out_width(out),
        style(style),
        logits(kRows, kExperts, 1),
        x(kRows, in, 4),
        w(kExperts * out, in, 5),
        b(1, kExperts * out, 9),
        y(kRows, out, 6),
        dy(kRows, out, 7),
        dx(kRows, in, 8),
        dw(lanes * kExperts * out, in, 0, 0),
        db(lanes, kExperts * out, 0, 0) {}

  RouterInput<A> router(Rows rows) const { return {logits.m.slice(rows), bias.m, style}; }

  // The mixture of some rows. Backward, too, if its gradients are wanted.
  void run(Cpu& dev, Rows rows, bool backward = false) {
    auto scope = dev.scope();
    const Routes routes = allocate_routes(dev, rows.size(), chosen, kExperts);
    const auto weights = allocate<A>(dev, rows.size(), chosen, Kind::chunk);
    route(dev, routes.chosen, weights, router(rows));
    sort_by_expert(dev, routes);
    const auto in = allocate<T>(dev, routes.size(), in_width, Kind::chunk),
               out = allocate<T>(dev, routes.size(), out_width, Kind::chunk);
    gather_rows<Cpu, T>(dev, in, x.m.slice(rows), routes);
    grouped_matmul<Cpu, T>(dev, out, in, w.m, routes, Update::assign);
    add_group_bias<Cpu, T>(dev, out, b.m, routes);
    combine_rows<Cpu, T>(dev, y.m.slice(rows), out, weights, routes);
    if (!backward) {
      experts.assign(routes.chosen.data, routes.chosen.data + routes.chosen.size());
      return;
    }
    const auto dweights = allocate<A>(dev, rows.size(), chosen, Kind::chunk);
    const auto din = allocate<T>(dev, routes.size(), in_width, Kind::chunk);
    gather_rows<Cpu, T>(dev, out, dy.m.slice(rows), routes);  // in the memory of the output
    grouped_matmul_backward_input<Cpu, T>(dev, din, out, w.m, routes, Update::assign);
    combine_rows_backward<Cpu, T>(dev, dweights, din, in, weights, routes);
    grouped_matmul_backward_weight<Cpu, T, A>(dev, dw.m, out, in, routes);
    weighted_bias_backward<Cpu, T>(dev, dweights, out, b.m, weights, routes);
    group_bias_backward<Cpu, T>(dev, db.m, out, routes);
    combine_rows<Cpu, T>(dev, dx.m.slice(rows), din, {}, routes);
    route_backward(dev, dlogits.m.slice(rows), routes.chosen, dweights, router(rows));
  }
};

const std::vector<RouterStyle> kStyles = {{RouterKind::softmax, false, 0, 1},
                                          {RouterKind::softmax, true, 0, 1.5},
                                          {RouterKind::sigmoid, false, 0, 2},
                                          {RouterKind::sigmoid, true, 1e-6, 1}};

// Sorts all experts of a row, and computes the weights of the first.
TEST(ExpertOperations, MatchTheirFormulas) {
  for (const RouterStyle& style : kStyles) {
    for (const Index chosen : {1, 3, 7}) {
      Experts<double> e(chosen, style);
      for (Index i = 0; i < e.kRows; i += 3) e.logits.m(i, 4) = e.logits.m(i, 2);  // equal ones
      e.bias.m(0, 4) = e.bias.m(0, 2);
      e.run(device(), {0, e.kRows});
      std::vector<std::vector<double>> weights;  // of all experts; 0 of those that are not chosen
      for (Index i = 0; i < e.kRows; ++i) {
        std::vector<std::pair<double, Index>> order;
        std::vector<double> p;
        for (Index n = 0; n < e.kExperts; ++n) {
          const double z = e.logits.m(i, n), sigma = 1 / (1 + std::exp(-z));
          p.push_back(style.kind == RouterKind::sigmoid ? sigma : std::exp(z));
          order.emplace_back(style.kind == RouterKind::sigmoid ? -sigma - e.bias.m(0, n) : -z, n);
        }
        std::ranges::sort(order);
        double chosen_sum = style.eps, all = 0;
        for (const double x : p) all += x;
        for (Index j = 0; j < chosen; ++j) chosen_sum += p[order[j].second];
        const double divisor = style.renormalised ? chosen_sum : style.kind == RouterKind::sigmoid ? 1 : all;
        std::vector<double>& row = weights.emplace_back(e.kExperts);
        std::set<std::int32_t> expected;
        for (Index j = 0; j < chosen; ++j)
          row[order[j].second] = style.scale * p[order[j].second] / divisor, expected.insert(order[j].second);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), e.experts.begin() + i * chosen)) << i;
      }
      expect_near(e.y.m, [&](Index i, Index j) {
        double sum = 0;
        for (Index n = 0; n < e.kExperts; ++n) {
          for (Index k = 0; k < e.in_width; ++k) sum += weights[i][n] * e.x.m(i, k) * e.w.m(n * e.out_width + j, k);
          sum += weights[i][n] * e.b.m(0, n * e.out_width + j);
        }
        return sum;
      });
    }
  }
}

TEST(ExpertOperations, HaveTheGradientsOfFiniteDifferences) {
  for (const RouterStyle& style : kStyles) {
    Experts<double> e(3, style);
    const Loss loss = [&] {
      e.run(device(), {0, e.kRows});
      return dot(e.y.m, e.dy.m);
    };
    e.run(device(), {0, e.kRows}, true);
    expect_gradient("dx", e.x.m, e.dx.m, loss);
    expect_gradient("dw", e.w.m, e.dw.m, loss);
    expect_gradient("db", e.b.m, e.db.m, loss);
    expect_gradient("dlogits", e.logits.m, e.dlogits.m, loss);
  }
}

template <class T>
void expect_bits_of_one_chunk() {
  for (const Index lanes : {1, 2}) {
    for (const bool uneven : {false, true}) {  // all rows to three experts, none to the others
      Experts<T> whole(3, kStyles[1], lanes), parts(3, kStyles[1], lanes);
      for (Index i = 0; uneven && i < whole.kRows; ++i)
        for (Index n = 0; n < 3; ++n) whole.logits.m(i, n) = parts.logits.m(i, n) = 50;
      Cpu dev(std::size_t{1} << 22);
      whole.run(dev, {0, whole.kRows}, true);
      omp_set_num_threads(3);
      for (const Rows rows : {Rows{256, 300}, Rows{0, 256}}) parts.run(dev, rows, true);
      omp_set_num_threads(1);
      const auto same = [](auto a, auto b) { return std::memcmp(a.data, b.data, a.size() * sizeof(*a.data)) == 0; };
      EXPECT_TRUE(same(whole.y.m, parts.y.m) && same(whole.dx.m, parts.dx.m));
      EXPECT_TRUE(same(whole.dlogits.m, parts.dlogits.m));
      EXPECT_EQ(same(whole.dw.m, parts.dw.m) && same(whole.db.m, parts.db.m), lanes == 1)
          << "a chunk of two tiles gives the second to lane 1";
    }
  }
}
TEST(ExpertOperations, HaveTheSameBitsInChunks) {
  expect_bits_of_one_chunk<double>();
  expect_bits_of_one_chunk<float>();
  expect_bits_of_one_chunk<BFloat16>();
}

// An element does not depend on how many there are, and units of work are divided correctly.
TEST(ExpertOperations, OfManyColumnsHaveTheBitsOfFew) {
  Experts<float> wide(3, kStyles[1], 1, 800, 520), few(3, kStyles[1]);
  for (Index i = 0; i < few.kRows; ++i) {
    for (Index k = 0; k < few.in_width; ++k) few.x.m(i, k) = wide.x.m(i, 795 + k);
    for (Index j = 0; j < few.out_width; ++j) few.dy.m(i, j) = wide.dy.m(i, 511 + j);
  }
  for (auto* e : {&wide, &few}) e->run(device(), {0, e->kRows}, true);
  for (Index n = 0; n < few.kExperts; ++n) {
    for (Index j = 0; j < few.out_width; ++j) {
      EXPECT_EQ(few.db.m(0, n * few.out_width + j), wide.db.m(0, n * wide.out_width + 511 + j));
      for (Index k = 0; k < few.in_width; ++k)
        EXPECT_EQ(few.dw.m(n * few.out_width + j, k), wide.dw.m(n * wide.out_width + 511 + j, 795 + k));
    }
  }
}

// A model that has diverged: the loss tells.
TEST(ExpertOperations, SurviveNotANumber) {
  Experts<float> e(3);
  for (Index n = 0; n < e.kExperts; ++n) e.logits.m(1, n) = NAN;
  e.run(device(), {0, e.kRows}, true);
  EXPECT_TRUE(std::isnan(e.y.m(1, 0)));
  EXPECT_FALSE(std::isnan(e.y.m(0, 0)));
}

}  // namespace
}  // namespace streambp
