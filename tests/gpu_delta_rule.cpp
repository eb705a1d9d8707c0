// The gated delta rule on both devices against the CPU in float64, and bit for bit between chunks.
#include "kernels/delta_rule.cuh"
#include "tests/both_devices.h"

namespace streambp {
namespace {

template <class Tested>
class DeltaRuleOnDevices : public OnBothDevices<Tested> {
 public:
  using T = typename Tested::T;

  struct Case {
    DeltaShape shape;
    TwinIntegers key_begin;
    Index rows, tiles, keys, values, heads, state;
    Twin<T> q, k, v, beta, dout, out, dq, dk, dv;
    Twin<float> decay, dbeta, ddecay, states, dstates;

    Case(DeltaRuleOnDevices& test, const DeltaShape& s, const std::vector<std::int32_t>& documents)
        : shape(s),
          key_begin(*test.gpu, documents),
          rows(key_begin.host.cols),
          tiles(ceil_div(rows, kTile)),
          keys(s.key_heads * s.key_dim),
          values(s.value_heads * s.value_dim),
          heads(s.value_heads),
          state(values * s.key_dim),
          q(test.random(rows, keys)),
          k(test.random(rows, keys)),
          v(test.random(rows, values)),
          beta(test.random(rows, heads, 0.1, 0.6)),
          dout(test.random(rows, values)),
          out(test.random(rows, values)),
          dq(test.random(rows, keys)),
          dk(test.random(rows, keys)),
          dv(test.random(rows, values)),
          decay(*test.gpu, rows, heads, 99, 0.05, -0.1),
          dbeta(test.wide(rows, heads)),
          ddecay(test.wide(rows, heads)),
          states(test.wide(tiles, state)),
          dstates(test.wide(1, state, 0.1)) {}

    void run(DeltaRuleOnDevices& test, Index chunk) const {
      const auto n = ceil_div(rows, chunk);
      for (Index c = 0; c < n; ++c) {
        const Rows part = piece(c, chunk, rows);
        test.both(
            [&](auto& dev, auto out, auto q, auto k, auto v, auto beta, auto decay, auto key_begin, auto states) {
              delta_rule(dev, out.slice(part),
                         {q.slice(part), k.slice(part), v.slice(part), beta.slice(part), decay.slice(part)},
                         {part, key_begin, shape, states});
            },
            out, q, k, v, beta, decay, key_begin, states);
      }
      for (Index c = n - 1; c >= 0; --c) {
        const Rows part = piece(c, chunk, rows);
        test.both(
            [&](auto& dev, auto dq, auto dk, auto dv, auto dbeta, auto ddecay, auto dstates, auto dout, auto q, auto k,
                auto v, auto beta, auto decay, auto key_begin, auto states) {
              using U = std::remove_pointer_t<decltype(dq.data)>;
              delta_rule_backward<std::remove_reference_t<decltype(dev)>, U>(
                  dev, {dq.slice(part), dk.slice(part), dv.slice(part), dbeta.slice(part), ddecay.slice(part)}, dstates,
                  dout.slice(part), {q.slice(part), k.slice(part), v.slice(part), beta.slice(part), decay.slice(part)},
                  {part, key_begin, shape, states});
            },
            dq, dk, dv, dbeta, ddecay, dstates, dout, q, k, v, beta, decay, key_begin, states);
      }
    }
    std::string bytes(DeltaRuleOnDevices& test) const {
      std::string all;
      const auto add = [&](const auto& twin) {
        const auto numbers = to_host(*test.gpu, twin.gpu);
        all.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0]));
      };
      add(out), add(dq), add(dk), add(dv), add(dbeta), add(ddecay), add(states), add(dstates);
      return all;
    }
  };
};
TYPED_TEST_SUITE(DeltaRuleOnDevices, DeviceTypes, DeviceTypeNames);

// The first row of each row's document. Those that cross a tile begin at multiples of 64.
std::vector<std::int32_t> first_rows(const Lengths& lengths) {
  std::vector<std::int32_t> first;
  for (const Index n : lengths)
    first.insert(first.end(), static_cast<std::size_t>(n), static_cast<std::int32_t>(first.size()));
  return first;
}

TYPED_TEST(DeltaRuleOnDevices, IsThatOfFloat64AndDoesNotDependOnChunks) {
  using T = typename TestFixture::T;
  const std::vector<std::pair<DeltaShape, Lengths>> cases = {
      {{1, 1, 128, 128}, {70}}, {{1, 2, 16, 32}, {1, 63, 200, 56, 5}}, {{1, 3, 24, 40}, {10, 54, 217}}};
  in_every_order([&] {
    for (const auto& [shape, lengths] : cases) {
      SCOPED_TRACE(testing::Message() << shape.key_dim << " x " << shape.value_dim);
      auto scope = this->gpu->scope();
      auto start = [&, seed = this->seed] {
        this->seed = seed;
        return std::make_unique<typename TestFixture::Case>(*this, shape, first_rows(lengths));
      };
      const auto whole = start(), parts = start();
      whole->run(*this, 2 * kTile), parts->run(*this, kTile);
      const double near = std::is_same_v<T, float> ? 1e-5 : 2e-2;
      this->expect_near("out", whole->out, near);
      this->expect_near("dq", whole->dq, near);
      this->expect_near("dk", whole->dk, near);
      this->expect_near("dv", whole->dv, near);
      this->expect_near("dbeta", whole->dbeta, near);
      this->expect_near("ddecay", whole->ddecay, near);
      this->expect_near("dstates", whole->dstates, near);
      EXPECT_TRUE(whole->bytes(*this) == parts->bytes(*this));
    }
  });
}

}  // namespace
}  // namespace streambp
