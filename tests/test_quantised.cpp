// Weights in 4 bits: against bitsandbytes (scripts/make_quantised_golden.py), the oracle, and in all modes.
#include "data/files/adapters.h"
#include "tests/golden.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

struct QuantisedCase {
  std::string name;
  Index rows, cols;
};

class BitsAndBytes : public testing::TestWithParam<QuantisedCase> {
 protected:
  Parameter parameter() const {
    return {.name = GetParam().name, .rows = GetParam().rows, .cols = GetParam().cols, .init = Init::normal};
  }

  const SafetensorsFile file{golden_folder() / "quantised/nf4.safetensors"};
};
INSTANTIATE_TEST_SUITE_P(Golden, BitsAndBytes,
                         testing::Values(QuantisedCase{"bfloat16", 96, 64}, QuantisedCase{"float16", 300, 64},
                                         QuantisedCase{"float32", 5, 26}, QuantisedCase{"tiny", 7, 64},
                                         QuantisedCase{"plain_scales", 300, 64}),
                         [](const auto& info) { return info.param.name; });

TEST_P(BitsAndBytes, ValuesHaveTheBitsOfBitsandbytes) {
  const auto expected = numbers<float>(file.at(GetParam().name + "/after"));
  std::vector<float> values(expected.size());
  dequantise(read_nf4(file, parameter()), Matrix<float>(values.data(), 1, static_cast<Index>(values.size())));
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected[i])) << i;
}

// The mean of the scales is rounded in another order, so a scale may differ by a step of its 8 bits.
TEST_P(BitsAndBytes, QuantisesAsBitsandbytesDoes) {
  const FourBitNumbers theirs = read_nf4(file, parameter()),
                       ours = quantise(numbers<float>(file.at(GetParam().name + "/before")), theirs.type);
  EXPECT_EQ(ours.codes, theirs.codes);
  if (GetParam().name == "plain_scales") return;
  EXPECT_NEAR(ours.offset, theirs.offset, 1e-6 * theirs.offset);
  std::size_t others = 0;
  for (std::size_t i = 0; i < ours.scale_codes.size(); ++i) {
    EXPECT_LE(std::abs(ours.scale_codes[i] - theirs.scale_codes[i]), 1) << i;
    others += ours.scale_codes[i] != theirs.scale_codes[i];
  }
  EXPECT_LE(others, 1 + ours.scale_codes.size() / 50);
  for (std::size_t i = 0; i < 256; ++i) EXPECT_NEAR(ours.scale_values[i], theirs.scale_values[i], 2e-7) << i;
}

// The layers of a fused tensor.
TEST(Quantised, PartsHaveTheValuesOfTheWhole) {
  const Index block = kNf4Block * kNf4Blocks, n = 3 * block + 130;
  std::vector<float> weights;
  for (Index i = 0; i < n; ++i) weights.push_back(static_cast<float>(Random(1).normal(static_cast<std::uint64_t>(i))));
  const auto values_of = [](const FourBitNumbers& numbers, Index size) {
    std::vector<float> values(static_cast<std::size_t>(size));
    dequantise(numbers, Matrix<float>(values.data(), 1, size));
    return values;
  };
  const FourBitNumbers whole = quantise(weights);
  const std::vector<float> expected = values_of(whole, n);
  for (const Rows part : {Rows{0, block}, Rows{block, 3 * block}, Rows{2 * block, n}}) {
    EXPECT_EQ(values_of(part_of(whole, {part}), part.size()),
              std::vector<float>(expected.begin() + part.begin, expected.begin() + part.end));
  }
}

// Several layers' weights in one tensor of a file: each gets its rows, if they begin with a block of scales.
TEST(Quantised, PartsOfATensorInAFile) {
  const SafetensorsFile file(golden_folder() / "quantised/nf4.safetensors");
  const auto parts_of = [&](Parameter p, Index rows, FourBits* expected = nullptr) {
    std::vector<Parameter> parts(2, p);
    parts[0].rows = rows, parts[1].rows = p.rows - rows;
    Table<float> table;
    std::vector<Matrix<float>> matrices(2);
    for (std::size_t i = 0; i < 2; ++i) table.push_back({parts[i], &matrices[i], expected});
    return four_bits_of(file, table);
  };
  Parameter p = {.name = "plain_scales", .rows = 300, .cols = 64, .init = Init::normal};
  const auto whole = numbers<float>(file.at("plain_scales/after"));
  std::vector<float> values(whole.size());
  const auto parts = parts_of(p, 101);
  EXPECT_EQ(parts[0].scales, 1);
  dequantise(parts[0], Matrix<float>(values.data(), 101, 64));
  dequantise(parts[1], Matrix<float>(values.data() + 101 * 64, 199, 64));
  EXPECT_EQ(values, whole);

  p.turn = 50;  // the rows of both, 50 at a time
  const auto in_turns = parts_of(p, 150);
  std::vector<float> turned(150 * 64);
  for (const Index part : {0, 1}) {
    dequantise(in_turns[static_cast<std::size_t>(part)], Matrix<float>(turned.data(), 150, 64));
    for (Index i = 0; i < 150 * 64; ++i) {
      const Index row = i / 64 / 50 * 100 + part * 50 + i / 64 % 50;
      ASSERT_EQ(turned[static_cast<std::size_t>(i)], whole[static_cast<std::size_t>(row * 64 + i % 64)]) << i;
    }
  }
  p.turn = 0;

  std::vector<std::uint8_t> codes(1);
  FourBits with_double_quantisation;
  with_double_quantisation.codes = Matrix<std::uint8_t>(codes.data(), 1, 1);
  EXPECT_ERROR(parts_of(p, 101, &with_double_quantisation), "bnb_4bit_use_double_quant");
  p.transposed = true;
  EXPECT_ERROR(parts_of(p, 101), "one transposed tensor");
  p = {.name = "float16", .rows = 300, .cols = 64, .init = Init::normal};
  EXPECT_ERROR(parts_of(p, 101), "a block of 16384 weights belongs to two projections");
  EXPECT_NO_THROW(parts_of(p, 256));
  p.turn = 50;
  EXPECT_ERROR(parts_of(p, 150), "a block of 16384 weights belongs to two projections");
}

TEST(Quantised, RoundsToFloat16AsStoredValuesDo) {
  for (const float x : {0.0f, 1.0f, -1.00049f, 1.00048828f, 65504.0f, 65519.9f, 65520.0f, -1e9f, 6.1e-5f, 6.0e-8f,
                        2.9e-8f, 2.98e-8f, -8.9e-8f, 0x1.002p0f, 0x1.006p0f}) {
    const float rounded = static_cast<float>(Float16(x));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(rounded_to(OriginalType::f16, x)), std::bit_cast<std::uint32_t>(rounded))
        << x;
  }
}

Config in_4_bits(const std::string& family) {
  Config c = make_config(family, {83, 40, 2, 4, family == "gpt2" ? 4 : 2, 10, 66, 800, family == "gpt2"});
  c.trained.emplace();
  c.adapters = new_adapters(c, {3, 6, false, {"all"}});
  c.mxfp4 = family == "gpt_oss";
  if (!c.mxfp4) c.base = Base::nf4;
  return c;
}

// The gradient is that of the dequantised weights, exactly.
TEST(Quantised, GradientsOfAdaptersMatchTheOracle) {
  for (const char* family : {"gpt2", "qwen3", "qwen3_moe", "gpt_oss"}) {
    const Config c = in_4_bits(family);
    const Batch batch = packed(c, {5, 270, 1, 30});
    auto dequantised = [&](Cpu&, Model<double>& model) {  // fills the oracle's model, which has plain weights
      Cpu dev(std::size_t{1} << 24);
      Trainer<Cpu, double> trainer(dev, c, 1, OptimizerKind::none);
      trainer.initialise(3, 0.15);
      const auto from = table(c, trainer.model.weights), to = table(model.config, model.weights);
      for (std::size_t i = 0; i < to.size(); ++i) {
        const std::vector<double> values =
            from[i].quantised ? dequantised_on_host<double>(dev, *from[i].quantised, to[i].matrix->size())
                              : to_host(dev, *from[i].matrix);
        std::copy(values.begin(), values.end(), to[i].matrix->data);
      }
    };
    const oracle::Result truth = oracle_gradient(c, batch, dequantised);
    const GradientRun exact = run_gradient<Cpu, double>(c, batch, Schedule::stream(kTile, kTile), random_weights());
    expect_oracle(exact, truth);
    for (const Schedule& schedule : {Schedule::full(batch.size()), Schedule::stream(2 * kTile, kTile)}) {
      expect_same_bits(run_gradient<Cpu, double>(c, batch, schedule, random_weights()), exact);
    }
  }
}

TEST(Quantised, TakesFourBitsAndAScale) {
  const Config plain = make_config("llama", {256, 256, 8, 4, 4, 64, 1024, 0, false});
  Config c = plain;
  c.base = Base::nf4, c.trained.emplace();
  c.adapters = new_adapters(c, {4, 8, false, {"q_proj"}});
  auto weights = [](const Config& c) {
    return plan({c, DType::bf16, OptimizerKind::none}, 256, Schedule::stream(kTile, kTile))
        .by_kind[static_cast<std::size_t>(Kind::weights)];
  };
  const double linear = 8.0 * (4 * 256 * 256 + 3 * 256 * 1024), layer = linear / 8;
  const double saved = static_cast<double>(weights(plain)) - static_cast<double>(weights(c));
  // Per weight 4 bits, a byte of 64 and a float of 16384; 1 KiB per tensor; and one layer in bfloat16.
  EXPECT_NEAR(saved, linear * (2 - 0.5 - 1.0 / 64 - 4.0 / 16384) - 2 * layer, 0.02 * saved);
}

// A model directory with 4-bit weights, as transformers saves one with bitsandbytes.
class QuantisedDirectory : public TemporaryDirectory {
 protected:
  void SetUp() override {
    TemporaryDirectory::SetUp();
    write_model(true);
  }
  void write_model(bool double_quantised) {
    config_.base = Base::nf4;
    Cpu dev(std::size_t{1} << 24);
    Trainer<Cpu, float> trainer(dev, config_, 1, OptimizerKind::none);
    trainer.initialise(3, 0.1);
    SafetensorsWriter writer(dir / "model.safetensors", {});
    const std::vector<float> values = nf4_values();
    std::list<FourBitNumbers> kept;
    std::list<std::string> states;
    std::list<std::vector<float>> plain;
    for (const Entry<float>& e : table(config_, trainer.model.weights)) {
      const Parameter& p = e.parameter;
      if (!e.quantised) {
        write_tensor(dev, writer, p.name, Table<float>{e}, "F32");
        continue;
      }
      const FourBitNumbers& n = kept.emplace_back(FourBitNumbers{
          to_host(dev, e.quantised->codes), to_host(dev, e.quantised->scale_codes),
          to_host(dev, e.quantised->block_scales), to_host(dev, e.quantised->scale_values), e.quantised->offset});
      Json state = {{"quant_type", "nf4"}, {"blocksize", 64}, {"dtype", "float32"}, {"shape", {p.rows, p.cols}}};
      if (double_quantised)
        state.update({{"nested_blocksize", 256}, {"nested_offset", n.offset}, {"nested_dtype", "float32"}});
      const std::string& text = states.emplace_back(state.dump());
      auto add = [&](const std::string& name, const char* type, const auto* data, std::size_t count) {
        writer.add(p.name + name, type, {static_cast<Index>(count)}, data, count * sizeof(*data));
      };
      add("", "U8", n.codes.data(), n.codes.size());
      if (double_quantised) {
        add(".absmax", "U8", n.scale_codes.data(), n.scale_codes.size());
        add(".nested_absmax", "F32", n.block_scales.data(), n.block_scales.size());
        add(".nested_quant_map", "F32", n.scale_values.data(), n.scale_values.size());
      } else {
        std::vector<float>& scales = plain.emplace_back();
        for (Index b = 0; b < std::ssize(n.scale_codes); ++b) scales.push_back(scale_of_block(*e.quantised, b));
        add(".absmax", "F32", scales.data(), scales.size());
      }
      add(".quant_map", "F32", values.data(), values.size());
      add(kNf4State, "U8", text.data(), text.size());
    }
    writer.finish();
    write_config({{"bnb_4bit_use_double_quant", double_quantised}});
  }
  void write_config(const Json& other) {
    Json json = config_to_json(config_);
    json["quantization_config"] = {{"quant_method", "bitsandbytes"},       {"load_in_4bit", true},
                                   {"bnb_4bit_quant_type", "nf4"},         {"bnb_4bit_use_double_quant", true},
                                   {"bnb_4bit_compute_dtype", "bfloat16"}, {"llm_int8_skip_modules", {"lm_head"}}};
    json["quantization_config"].update(other);
    write_file_atomically(dir / "config.json", json.dump());
  }

  Config config_ = make_config("qwen3", {83, 40, 2, 4, 2, 10, 66, 800, false});
};

TEST_F(QuantisedDirectory, LoadsAndComputesWithTheseWeights) {
  Config c = read_config(dir);
  EXPECT_EQ(c.base, Base::nf4);
  c.trained.emplace();
  c.adapters = new_adapters(c, {2, 4, false, {"all"}});
  const Batch batch = packed(c, {60});
  const Schedule schedule = Schedule::full(batch.size());
  const GradientRun made = run_gradient<Cpu, float>(c, batch, schedule, random_weights(3, 0.1));
  const auto load = [&](auto& dev, auto& model) {
    load_model(dev, dir, model);
    initialise_adapters(dev, model, 3, 0.1);
  };
  expect_same_bits(run_gradient<Cpu, float>(c, batch, schedule, load), made);

  write_model(false);  // the same scales, without double quantisation
  c.plain_scales = read_config(dir).plain_scales;
  EXPECT_TRUE(c.plain_scales);
  const GradientRun plain = run_gradient<Cpu, float>(c, batch, schedule, load);
  EXPECT_TRUE(plain.gradient == made.gradient);
  EXPECT_EQ(plain.peak, plain.planned);
}

TEST_F(QuantisedDirectory, RefusesOtherQuantisations) {
  auto refuses = [&](const Json& other, const std::string& reason) {
    write_config(other);
    EXPECT_ERROR(read_config(dir), reason);
  };
  refuses({{"quant_method", "gptq"}}, "quantised by \"gptq\"");
  refuses({{"load_in_4bit", false}}, "only nf4 is supported");
  refuses({{"bnb_4bit_quant_type", "fp4"}}, "call dequantize() on it");
  refuses({{"bnb_4bit_quant_type", nullptr}}, "only nf4 is supported");
  refuses({{"llm_int8_skip_modules", {"lm_head", "model.layers.0.mlp"}}}, "all linear layers must be in 4 bits");
  write_config({{"llm_int8_skip_modules", {"lm_head", "mtp.fc"}}});  // is not computed
  EXPECT_NO_THROW(read_config(dir));
  refuses({{"a_new_option", 1}}, "\"a_new_option\"");
}

}  // namespace
}  // namespace streambp
