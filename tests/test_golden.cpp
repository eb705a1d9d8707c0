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
  std::set<std::string> seen;
  for (const std::string& name : golden_cases()) seen.insert(Golden(name).config.family);
  EXPECT_EQ(seen, (std::set<std::string>{"gemma3", "gpt2", "llama", "mistral", "qwen2", "qwen3"}));
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
void expect_golden(const std::string& name, double tolerance) {
  const Golden golden(name);
  const Batch& batch = golden.batch;
  const double loss = golden.numbers<double>("loss")[0];
  const auto logp = golden.numbers<double>("logp"), logits = golden.numbers<double>("logits");

  // the golden gradient, in the table's layout
  std::vector<Owned<double>> storage;
  Tensors<double> truth_tensors(golden.config);
  for (auto& e : table(golden.config, truth_tensors)) {
    *e.matrix = storage.emplace_back(e.parameter.rows, e.parameter.cols, 0);
  }
  Cpu host(0);
  read_tensors(host, golden.file, "grad/", table(golden.config, truth_tensors));
  const HostGradient truth = host_gradient(host, golden.config, truth_tensors);

  for (Mode mode : kModes) {
    const Schedule schedule = schedule_for(mode, golden.config, batch.size(), kTile);
    const GradientRun run = run_gradient<Cpu, T>(golden.config, batch, schedule, golden.weights());
    const Difference error = run.gradient.difference(truth);
    EXPECT_LE(error.relative, tolerance) << streambp::name(mode) << ": " << error.tensor;
    EXPECT_NEAR(run.loss, loss, tolerance * loss) << streambp::name(mode);
    for (std::size_t t = 0; t < logp.size(); ++t) {
      EXPECT_NEAR(run.logp[t], logp[t], tolerance * max_abs(logp)) << streambp::name(mode) << ", token " << t;
    }
  }

  // the logits, from the forward pass alone
  Cpu dev(std::size_t{1} << 26);
  Trainer<Cpu, T> trainer(dev, golden.config, batch.size(), OptimizerKind::none);
  golden.weights()(dev, trainer.model);
  trainer.load(batch);
  Walk<Cpu, T> walk(dev, trainer.model, trainer.view, {Keep::nothing, kTile, kTile}, {});
  const Matrix<T> computed = Head<Cpu, T>(dev, golden.config, trainer.model.weights).logits(walk.forward());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    ASSERT_NEAR(
        static_cast<double>(computed(static_cast<Index>(i) / computed.cols, static_cast<Index>(i) % computed.cols)),
        logits[i], tolerance * max_abs(logits))
        << "logit " << i;
  }
}

TEST_P(GoldenCase, Float64AgreesTo1em10) { expect_golden<double>(GetParam(), 1e-10); }
TEST_P(GoldenCase, Float32AgreesTo1em5) { expect_golden<float>(GetParam(), 1e-5); }

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
  save_model(dev, dir, saved.model, ModelLayout(golden.config));
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
