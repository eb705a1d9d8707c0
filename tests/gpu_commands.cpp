// The commands on the Cuda device: the program on a GPU, or a build with emulated GPU code.
#include "tests/byte_model.h"
#include "tests/commands.h"
#include "tests/gpu.h"

namespace streambp {
namespace {

class GpuCommands : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    const std::string reason = cuda::unusable();
    if (!reason.empty()) GTEST_SKIP() << "no GPU: " << reason;
  }
  Outcome run_on_gpu(const std::string& arguments) {
    return execute(arguments + " --device cuda", kEmulated ? STREAMBP_EMULATED : binary());
  }
  Json json(const std::string& name) const { return Json::parse(read_file(path(name))); }
};

const std::string kTinyModel = " --hidden 32 --layers 2 --heads 2 --mlp 64";

TEST_F(GpuCommands, VerifyProvesTheGradient) {
  for (const char* dtype : {"f32", "bf16"}) {
    for (const char* family : {"gpt2", "mistral", "qwen3"}) {
      const Outcome outcome = run_on_gpu(std::string("verify --tile 256 --length ") + sized("3000", "300", "300") +
                                         " --vocab 60 --family " + family + " --dtype " + dtype + kTinyModel +
                                         " --json " + path("verify.json"));
      EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
      const Json result = json("verify.json");
      EXPECT_TRUE(result["verified"]) << outcome.output;
      for (const Json& run : result["runs"]) EXPECT_TRUE(run["bits_equal"]);
      if (sized(false, false, true)) break;  // one family
    }
  }
}

TEST_F(GpuCommands, VerifyComparesSeveralChunksByDefault) {
  const Outcome outcome =
      run_on_gpu("verify --tile 512 --vocab 20 --dtype f32 --hidden 16 --layers 1 --heads 1 --mlp 16");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "1664 tokens")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "stream       1024")) << outcome.output;
}

TEST_F(GpuCommands, VerifySavesTheGradientForGivenTokens) {
  const std::vector<std::int32_t> tokens = {5, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9};
  std::ofstream(path("tokens"), std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * 4));
  const std::string arguments = "verify --dtype f32 --vocab 10 --tokens " + path("tokens") + kTinyModel;
  EXPECT_EQ(run_on_gpu(arguments + " --save-gradient " + path("gpu.safetensors")).exit_code, 0);
  EXPECT_EQ(execute(arguments + " --device cpu --save-gradient " + path("cpu.safetensors")).exit_code, 0);
  const SafetensorsFile gpu(path("gpu.safetensors")), cpu(path("cpu.safetensors"));
  ASSERT_EQ(gpu.tensors().size(), cpu.tensors().size());
  for (const auto& [name, tensor] : cpu.tensors()) {
    std::vector<float> a(static_cast<std::size_t>(tensor.count)), b(a.size());
    read(tensor, a.data()), read(gpu.at(name), b.data());
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5) << name;
  }
}

// Stopping and resuming a run changes no byte of its files, in every combination of types.
TEST_F(GpuCommands, TrainingResumesBitForBit) {
  for (const std::string types :
       {"--dtype f32", "--dtype bf16", "--dtype bf16 --grad-dtype f32", "--dtype bf16 --optimizer adamw-bf16"}) {
    const std::string common = kTinyModel + " --length " + sized("64", "24", "24") +
                               " --batch 2 --accumulate 2 --steps 2 --eval-every 0 " + types + " --sample 0 --out ";
    const std::string whole = path("whole" + types), parts = path("parts" + types);
    const Outcome outcome = run_on_gpu("train" + common + "'" + whole + "'");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_EQ(run_on_gpu("train --stop-after 1" + common + "'" + parts + "'").exit_code, 0);
    EXPECT_EQ(run_on_gpu("train --resume --sample 0 --out '" + parts + "'").exit_code, 0);
    expect_same_checkpoint(whole + "/step-000002", parts + "/step-000002");
    if (sized(false, false, true)) break;
  }
}

TEST_F(GpuCommands, TrainsInThePlannedMemoryAndSamples) {
  const Outcome outcome =
      run_on_gpu("train" + kTinyModel + " --length 64 --batch 2 --steps 2 --sample 5 --out " + path("run"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "bfloat16")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "A sample, continuing")) << outcome.output;
}

TEST_F(GpuCommands, BenchMeasuresAndProfiles) {
  for (const char* optimizer : {"none", "adamw", "adamw-bf16", "adamw-8bit", "muon"}) {
    const Outcome outcome = run_on_gpu(std::string("bench --length 300 --vocab 60 --repeat 2 --profile --optimizer ") +
                                       optimizer + kTinyModel + " --json " + path("bench.json"));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_EQ(json("bench.json")["runs"].size(), 3u);
    EXPECT_TRUE(contains(outcome.output, "attention backward")) << outcome.output;
    EXPECT_EQ(json("bench.json")["products"][0]["product"].get<std::string>().find("forward: "), 0u) << outcome.output;
    if (sized(false, false, true)) break;
  }
}

// In bfloat16, from float32 files: the saved model is the master weights. Resuming changes no bit.
TEST_F(GpuCommands, FineTunesAModelDirectory) {
  save_random_model(path("model"), make_config("gemma3", {256, 32, 2, 4, 2, 8, 64, 300, true}), 1, [](auto&) {});
  for (const auto& [name, contents] : byte_tokenizer_files()) write_file_atomically(path("model/" + name), contents);
  write_file_atomically(path("data.jsonl"), "{\"prompt\": \"One and one\", \"completion\": \" is two.\"}\n");
  const std::string run =
      "train --model " + path("model") + " --data " + path("data.jsonl") + " --steps 4 --rate 1e-3 --eval-fraction 0 ";
  const Outcome outcome = run_on_gpu(run + "--out " + path("whole"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(run_on_gpu(run + "--stop-after 1 --out " + path("parts")).exit_code, 0);
  EXPECT_EQ(run_on_gpu("train --resume --out " + path("parts")).exit_code, 0);
  expect_same_checkpoint(path("whole/step-000004"), path("parts/step-000004"));
  const SafetensorsFile tuned(path("whole/step-000004/model.safetensors")),
      training(path("whole/training/step-000004/optimizer.safetensors"));
  for (const auto& [name, tensor] : tuned.tensors()) {
    const Tensor& master = training.at("master." + name);
    EXPECT_EQ(tensor.dtype, "F32") << name;
    EXPECT_EQ(std::memcmp(tensor.data, master.data, tensor.bytes), 0) << name;
  }
}

// In float32 the GPU generates what the CPU generates, and eval finds the same loss.
TEST_F(GpuCommands, GeneratesAndEvaluatesLikeTheCpu) {
  save_random_model(path("model"), make_config("qwen3", {259, 32, 2, 4, 2, 8, 64, 300, false}), 1, [](auto&) {});
  write_file_atomically(path("model/tokenizer.json"), byte_tokenizer({"<|im_start|>", "<|im_end|>"}).dump());
  write_file_atomically(path("model/tokenizer_config.json"), "{\"eos_token\": \"<|im_end|>\"}");
  write_file_atomically(path("text.txt"), "A text to be read.");
  const std::string model = " --model " + path("model"), generate = "generate" + model +
                                                                    " --chat chatml --prompt Hello you " +
                                                                    " --samples 2 --length 8 --seed 3 --json ";
  const std::string eval = "eval" + model + " --data " + path("text.txt") + " --json ";
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string type = std::string(" --dtype ") + dtype;
    for (const std::string& command : {generate, eval}) {
      const Outcome outcome = run_on_gpu(command + path("gpu.json") + type);
      ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
      ASSERT_EQ(execute(command + path("cpu.json") + " --device cpu").exit_code, 0);
      const Json gpu = json("gpu.json"), cpu = json("cpu.json");
      if (command == eval) {
        EXPECT_NEAR(gpu["total"]["loss"].get<double>(), cpu["total"]["loss"].get<double>(),
                    dtype == std::string("f32") ? 1e-4 : 0.1);
      } else {
        ASSERT_EQ(gpu["texts"].size(), 4u);
        for (std::size_t i = 0; i < 4; ++i)
          EXPECT_EQ(gpu["texts"][i]["prompt_tokens"], cpu["texts"][i]["prompt_tokens"]);
        if (dtype == std::string("f32")) {
          for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(gpu["texts"][i]["tokens"], cpu["texts"][i]["tokens"]);
        }
      }
    }
  }
}

TEST_F(GpuCommands, ReportsWhatFitsWhenARunDoesNot) {
  const Outcome outcome = run_on_gpu("train --hidden 102400 --layers 200 --heads 800 --out " + path("run"));
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(contains(outcome.output, "are free; use a smaller model")) << outcome.output;
  const Outcome wide = run_on_gpu("train --hidden 1024 --heads 2 --out " + path("run"));
  EXPECT_EQ(wide.exit_code, 2);
  EXPECT_TRUE(contains(wide.output, "heads of width 512 are wider than the 256")) << wide.output;
  const Outcome longer =
      run_on_gpu("train --hidden 2048 --layers 1 --heads 16 --batch 1 --length 16000000 --out " + path("run"));
  EXPECT_EQ(longer.exit_code, 2) << longer.output;
}

}  // namespace
}  // namespace streambp
