// streambp verify --certificate: its lines hold, and fail where something differs.
#include "referee/certificate.h"
#include "referee/random_documents.h"
#include "tests/byte_model.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

Certificate::Subject subject(DType dtype) {
  const Config c = make_config("qwen3", {50, 32, 2, 4, 2, 8, 40, 0, true});
  StepSettings settings{c};
  settings.dtype = dtype, settings.optimizer = OptimizerKind::none;
  const Batch batch = random_documents(c, 3, 300, 1);
  const auto fill = [](Engine& engine) { engine.initialise(1, 0.05); };
  return {.settings = settings,
          .batch = batch,
          .chunks = {256, 512},
          .fill = fill,
          .oracle = [] { return 1e-15; },
          .rounding_limit = dtype == DType::bf16 ? 0.3 : 1e-3,
          .layout = ModelLayout(c)};
}

Certificate::Result compare(Certificate::Subject subject, const std::string& name) {
  Certificate certificate(std::move(subject));
  std::string what;
  for (const Certificate::Line& line : Certificate::lines())
    if (name == line.name) return certificate.compare(line, what);
  throw Error("no line has the name " + name);
}

using enum Certificate::Verdict;

TEST(Certificate, EveryLineHolds) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    Certificate certificate(subject(dtype));
    for (const Certificate::Line& line : Certificate::lines()) {
      std::string what;
      const Certificate::Result result = certificate.compare(line, what);
      const std::string name = line.name;
      SCOPED_TRACE(std::string(streambp::name(dtype)) + ", " + what + ": " + result.note);
      if (name == "merge" || (name == "sampling" && dtype == DType::f64)) {
        EXPECT_EQ(result.verdict, not_run);
      } else if (result.verdict != not_run) {  // far memory needs a disk, other instructions a processor that has them
        EXPECT_EQ(result.verdict, name == "accumulation" || name == "oracle" ? rounding : same_bits);
      }
    }
  }
}

TEST(Certificate, ALineFailsIfSomethingDiffers) {
  Certificate::Subject other_weights = subject(DType::f32);
  other_weights.fill = [seed = 0](Engine& engine) mutable {
    engine.initialise(static_cast<std::uint64_t>(++seed), 0.05);
  };
  const Certificate::Result far = compare(other_weights, "far");
  EXPECT_TRUE(far.verdict == fails || far.verdict == not_run) << far.note;

  Certificate::Subject wrong = subject(DType::f32);
  wrong.oracle = [] { return 1e-6; };
  EXPECT_EQ(compare(wrong, "oracle").verdict, fails);

  Certificate::Subject strict = subject(DType::f32);
  strict.rounding_limit = 1e-12;
  EXPECT_EQ(compare(strict, "accumulation").verdict, fails);

  Certificate::Subject without_a_disk = subject(DType::f32);
  without_a_disk.layout = std::nullopt;
  EXPECT_EQ(compare(without_a_disk, "resume").verdict, not_run);

  Certificate::Subject infinite = subject(DType::f32);
  infinite.fill = [](Engine& engine) { engine.initialise(1, 1e30); };
  EXPECT_ERROR(compare(infinite, "modes"), "the loss is not finite");
}

// A merged model with one matrix that is 1% larger is another model, in bfloat16 too.
class MergedCertificate : public TemporaryDirectory {
 protected:
  // Adapters, with the last layer's times a factor.
  fs::path adapters(float factor) const {
    const fs::path made = dir / ("adapters-" + std::to_string(factor));
    fs::create_directories(made);
    Cpu dev(std::size_t{1} << 20);
    Trainer<Cpu, float> trainer(dev, config, 1, OptimizerKind::none);
    trainer.initialise(1, 0.1);
    scale(dev, trainer.model.weights.layers[1].down.adapter.b, factor);
    save_adapters(dev, made, config, trained(table(config, trainer.model.weights)),
                  adapter_config(config, new_ones, "base"));
    return made;
  }
  const LoraSettings new_ones{.rank = 2, .alpha = 4};
  Config config = make_config("qwen3", {50, 32, 2, 4, 2, 8, 40, 0, true});
};
TEST_F(MergedCertificate, FailsIfTheMergeIsWrong) {
  save_random_model(dir / "base", config);
  config.adapters = new_adapters(config, new_ones), config.trained.emplace();
  const fs::path right = adapters(1), wrong = adapters(1.01f);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    Certificate::Subject merged = subject(dtype);
    merged.settings.config = config, merged.model = dir / "base";
    merged.fill = [&](Engine& engine) { engine.initialise(1), engine.load(dir / "base", right); };
    for (const fs::path& adapter : {right, wrong}) {
      merged.adapter = adapter;
      const Certificate::Result result = compare(merged, "merge");
      EXPECT_EQ(result.verdict, adapter == right ? rounding : fails)
          << name(dtype) << ": " << result.error << result.note;
    }
  }
}

// The parts of a fused tensor count as one tensor: the gradient of GPT-2's K bias vanishes in exact arithmetic.
TEST(Certificate, APartOfATensorThatVanishesIsNoError) {
  Certificate::Subject gpt2 = subject(DType::f32);
  const Config c = make_config("gpt2", {50, 32, 2, 4, 4, 8, 40, 300, true});
  gpt2.settings.config = c, gpt2.layout = ModelLayout(c), gpt2.rounding_limit = 1e-5;
  gpt2.batch = random_documents(c, 3, 300, 1);
  const Certificate::Result result = compare(gpt2, "accumulation");
  EXPECT_EQ(result.verdict, rounding) << result.error;
}

TEST(Certificate, QuickLeavesOutWhatTakesMinutes) {
  Certificate::Subject large = subject(DType::f32);
  large.quick = true;
  for (const char* name : {"oracle", "resume"}) EXPECT_EQ(compare(large, name).verdict, not_run) << name;
  EXPECT_EQ(compare(large, "modes").verdict, same_bits);
}

TEST(Certificate, RunsOfEveryOptimizerResume) {
  for (const auto& [optimizer, kind] : kOptimizers) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      if (dtype == DType::f32 && kind == OptimizerKind::adamw_bf16) continue;
      Certificate::Subject trained = subject(dtype);
      trained.settings.optimizer = kind;
      EXPECT_EQ(compare(trained, "resume").verdict, same_bits) << optimizer << ", " << name(dtype);
    }
  }
}

TEST(Certificate, OneDocumentIsNotCompared) {
  Certificate::Subject one = subject(DType::f32);
  one.batch = random_documents(one.settings.config, 1, 300, 1);
  EXPECT_EQ(compare(one, "packing").verdict, not_run);
  EXPECT_EQ(compare(one, "accumulation").verdict, not_run);
  EXPECT_EQ(compare(one, "modes").verdict, same_bits);
}

}  // namespace
}  // namespace streambp
