// Golden data from PyTorch (scripts/make_golden.py): transformers' own classes evaluated in float64.
#include "tests/training.h"

namespace streambp {
namespace {

double max_abs(const std::vector<double>& v) {
  double result = 0;
  for (double x : v) result = std::max(result, std::abs(x));
  return result;
}

class GoldenCase : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Golden, GoldenCase, testing::ValuesIn(golden_cases()),
                         [](const auto& info) { return info.param; });

TEST(Golden, CoversEveryFamily) {
  std::set<std::string> seen, all;
  for (const std::string& name : golden_cases()) seen.insert(Golden(name).config.family);
  for (const ModelFamily& family : model_families()) all.insert(family.name);
  EXPECT_EQ(seen, all);
}

// Every tensor of the file is a parameter of the table, and vice versa.
TEST_P(GoldenCase, TheTableNamesExactlyTheTensorsOfTheCheckpoint) {
  const Golden golden(GetParam());
  std::set<std::string> in_file, in_table;
  for (const auto& [name, tensor] : golden.file.tensors()) {
    if (name.starts_with("weights/")) in_file.insert(name.substr(8));
  }
  Tensors<float> none(golden.config);
  for (const auto& e : table(golden.config, none)) in_table.insert(e.parameter.name);
  EXPECT_EQ(in_file, in_table);
}

template <class T>
void expect_golden_case(const std::string& name, double tolerance) {
  const Golden golden(name);
  const Batch& batch = golden.batch;
  const auto logp = golden.numbers<double>("logp"), logits = golden.numbers<double>("logits");
  const HostGradient truth = golden_gradient(golden.file, "grad/", golden.config);
  const double loss = golden.numbers<double>("loss")[0];
  for (const GradientRun& run : expect_golden<T>(truth, loss, tolerance, golden.config, batch, golden.weights())) {
    for (std::size_t t = 0; t < logp.size(); ++t)
      EXPECT_NEAR(run.logp[t], logp[t], tolerance * max_abs(logp)) << "token " << t;
  }

  // the logits, from the forward pass alone
  Cpu dev(std::size_t{1} << 26);
  Trainer<Cpu, T> trainer(dev, golden.config, layout_of(golden.config).rows(batch), OptimizerKind::none);
  golden.weights()(dev, trainer.model);
  trainer.load(batch);
  Walk<Cpu, T> walk(dev, trainer.model, trainer.view, {KeptParts::nothing(), kTile, kTile}, {});
  const Matrix<T> computed = Head<Cpu, T>(dev, golden.config, trainer.model.weights).logits(walk.forward());
  std::vector<Index> rows(static_cast<std::size_t>(computed.rows));
  std::iota(rows.begin(), rows.end(), 0);
  rows = RowMap(layout_of(golden.config), batch).of_tokens(rows);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const std::size_t vocab = static_cast<std::size_t>(computed.cols);
    ASSERT_NEAR(static_cast<double>(computed(rows[i / vocab], static_cast<Index>(i % vocab))), logits[i],
                tolerance * max_abs(logits))
        << "logit " << i;
  }
}

TEST_P(GoldenCase, Float64AgreesTo1em10) { expect_golden_case<double>(GetParam(), 1e-10); }
TEST_P(GoldenCase, Float32AgreesTo1em5) { expect_golden_case<float>(GetParam(), 1e-5); }

TEST(Golden, BFloat16IsNoWorseThanPyTorchs) { expect_no_worse_than_pytorch<Cpu>(); }

// Loading a model and saving it loses no bit, in GPT-2's fused and transposed layout too.
TEST_P(GoldenCase, SavingAndLoadingLosesNoBit) {
  const Golden golden(GetParam());
  const fs::path dir = fs::path(testing::TempDir()) / ("streambp_golden_" + GetParam());
  fs::create_directories(dir);
  Cpu dev(std::size_t{1} << 22), dev2(std::size_t{1} << 22);
  Trainer<Cpu, float> saved(dev, golden.config, 1, OptimizerKind::none),
      loaded(dev2, golden.config, 1, OptimizerKind::none);
  golden.weights()(dev, saved.model);
  ModelLayout layout(golden.config);
  layout.names.pieces.clear();  // experts in one tensor
  save_model(dev, dir, saved.model, layout);
  load_model(dev2, dir, loaded.model);
  EXPECT_TRUE(host_gradient(dev, golden.config, saved.model.weights) ==
              host_gradient(dev2, golden.config, loaded.model.weights));
  const SafetensorsFile file(dir / "model.safetensors");
  for (const auto& [name, tensor] : file.tensors()) {
    const Tensor& original = golden.file.at("weights/" + name);
    EXPECT_EQ(tensor.shape, original.shape) << name;
    EXPECT_EQ(std::memcmp(tensor.data, original.data, tensor.bytes), 0) << name;
  }
  // the configuration comes back as well
  EXPECT_EQ(config_to_json(read_config(dir)), config_to_json(golden.config));
  fs::remove_all(dir);
}

}  // namespace
}  // namespace streambp
