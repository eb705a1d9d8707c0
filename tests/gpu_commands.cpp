// The commands on the Cuda device: the program on a GPU, or a build with emulated GPU code.
#include "tests/byte_model.h"
#include "tests/commands.h"
#include "tests/gpu.h"

namespace streambp {
namespace {

class GpuCommands : public OnGpu<Commands> {
 protected:
  Outcome run_on_gpu(const std::string& arguments) {
    return execute(arguments + " --device cuda", kEmulated ? STREAMBP_EMULATED : binary());
  }
  template <class... Said>
  std::string expect_ok_on_gpu(const std::string& arguments, const Said&... said) {
    return expect_outcome(0, run_on_gpu(arguments), said...);
  }
};

const std::string kTinyModel = " --hidden 32 --layers 2 --heads 2 --mlp 64";

TEST_F(GpuCommands, VerifyProvesTheGradient) {
  using Cases = std::vector<std::array<std::string, 2>>;
  const Cases two = {{"f32", "gpt2"}, {"bf16", "mistral"}};
  for (const auto& [dtype, family] : sized(Cases{two[0], two[1], {"bf16", "gpt2"}, {"f32", "qwen3"}}, two, {two[0]})) {
    expect_ok_on_gpu(std::string("verify --tile 256 --length ") + sized("3000", "300", "300") +
                     " --vocab 60 --family " + family + " --dtype " + dtype + kTinyModel + " --json verify.json");
    const Json result = parse_json_file("verify.json");
    EXPECT_TRUE(result["verified"]);
    for (const Json& run : result["runs"]) EXPECT_TRUE(run["bits_equal"]);
  }
}

TEST_F(GpuCommands, VerifyComparesSeveralChunksByDefault) {
  const Outcome outcome =
      run_on_gpu("verify --tile 256 --vocab 20 --dtype f32 --hidden 16 --layers 1 --heads 1 --mlp 16");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "896 tokens")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "stream        512")) << outcome.output;
}

// Stopping and resuming a run changes no byte of its files, in every combination of types.
TEST_F(GpuCommands, TrainingResumesBitForBit) {
  using Strings = std::vector<std::string>;
  const Strings all = {"--dtype f32", "--dtype bf16 --optimizer adamw-bf16", "--dtype bf16",
                       "--dtype bf16 --grad-dtype f32"};
  for (const std::string& types : sized(all, Strings{all[1]}, Strings{all[0]})) {
    const std::string common = kTinyModel + " --length " + sized("64", "24", "24") +
                               " --batch 2 --accumulate 2 --steps 2 --eval-every 0 " + types + " --sample 0 --out ";
    const std::string whole = "whole" + types, parts = "parts" + types;
    expect_ok_on_gpu("train" + common + "'" + whole + "'");
    expect_ok_on_gpu("train --stop-after 1" + common + "'" + parts + "'");
    expect_ok_on_gpu("train --resume --sample 0 --out '" + parts + "'");
    expect_same_run(whole, parts);
  }
}

TEST_F(GpuCommands, TrainsInThePlannedMemoryAndSamples) {
  expect_ok_on_gpu("train" + kTinyModel + " --length 64 --batch 2 --steps 2 --sample 5 --out run", "bfloat16",
                   "A sample, continuing");
}

TEST_F(GpuCommands, BenchMeasuresAndProfiles) {
  for (const char* optimizer : {"none", "adamw-8bit"}) {
    expect_ok_on_gpu(std::string("bench --length 300 --vocab 60 --profile --repeat ") + sized("2", "1", "1") +
                         " --optimizer " + optimizer + kTinyModel + " --json bench.json",
                     "attention backward");
    const Json bench = parse_json_file("bench.json");
    EXPECT_EQ(bench["runs"].size(), 3u);
    EXPECT_TRUE(bench["products"][0]["product"].get<std::string>().starts_with("forward: ")) << bench;
    if (sized(false, true, true)) break;
  }
}

// In bfloat16, from float32 files: the saved model is the master weights. Resuming changes no bit.
TEST_F(GpuCommands, FineTunesAModelDirectory) {
  save_random_model("model", make_config("gemma3", {256, 32, 2, 4, 2, 8, 64, 300, true}));
  for (const auto& [name, contents] : byte_tokenizer_files()) write_file_atomically("model/" + name, contents);
  write_file_atomically("data.jsonl", "{\"prompt\": \"One and one\", \"completion\": \" is two.\"}\n");
  const std::string run = "train --model model --data data.jsonl --steps 4 --rate 1e-3 --eval-fraction 0 ";
  expect_ok_on_gpu(run + "--out whole");
  expect_ok_on_gpu(run + "--stop-after 1 --out parts");
  expect_ok_on_gpu("train --resume --out parts");
  expect_same_run("whole", "parts");
  const SafetensorsFile tuned("whole/step-000004/model.safetensors"),
      training("whole/training/step-000004/optimizer.safetensors");
  for (const auto& [name, tensor] : tuned.tensors()) {
    const Tensor& master = training.at("master." + name);
    EXPECT_EQ(tensor.dtype, "F32") << name;
    EXPECT_EQ(std::memcmp(tensor.data, master.data, tensor.bytes), 0) << name;
  }
}

// In float32 the GPU generates what the CPU generates, and eval finds the same loss.
TEST_F(GpuCommands, GeneratesAndEvaluatesLikeTheCpu) {
  save_chat_model("model", make_config("qwen3", {259, 32, 2, 4, 2, 8, 64, 300, false}));
  write_file_atomically("text.txt", "A text to be read.");
  // The --json files of the GPU and of the CPU.
  const auto both = [&](const std::string& command, const std::string& dtype) {
    expect_ok_on_gpu(command + " --model model --json gpu.json --dtype " + dtype);
    expect_ok(command + " --model model --json cpu.json --device cpu");
    return std::pair(parse_json_file("gpu.json"), parse_json_file("cpu.json"));
  };
  for (const std::string dtype : {"f32", "bf16"}) {
    const std::string longer(150, 'x');  // its completions share a page of the cache
    const auto [gpu, cpu] =
        both("generate --chat chatml --prompt Hello " + longer + " --samples 2 --length 8 --seed 3", dtype);
    ASSERT_EQ(gpu["texts"].size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(gpu["texts"][i]["prompt_tokens"], cpu["texts"][i]["prompt_tokens"]);
      if (dtype == "f32") {
        EXPECT_EQ(gpu["texts"][i]["tokens"], cpu["texts"][i]["tokens"]);
      }
    }
    const auto [gpu_loss, cpu_loss] = both("eval --data text.txt", dtype);
    EXPECT_NEAR(gpu_loss["total"]["loss"].get<double>(), cpu_loss["total"]["loss"].get<double>(),
                dtype == "f32" ? 1e-4 : 0.1);
  }
  const auto [gpu, cpu] = both("generate --prompt Hello --length 4 --seed 3 --repetition-penalty 1.3", "f32");
  EXPECT_EQ(gpu["texts"][0]["tokens"], cpu["texts"][0]["tokens"]);
}

TEST_F(GpuCommands, ListsTheDevices) {
  const std::string program = kEmulated ? STREAMBP_EMULATED : binary();
  const auto devices = [&](const std::string& machine) {
    return expect_outcome(0, execute(machine + program + " devices", "env"), "CPU      ", ", compute capability ",
                          " free", "GPU code for compute capability ", "; the driver supports CUDA ", "MPI      ");
  };
  const std::string one = devices("CUDA_ON_CPU_GPUS=1 "), two = devices("CUDA_ON_CPU_GPUS=2 ");
  if (!kEmulated || STREAMBP_MPI == 0) return;
  EXPECT_FALSE(contains(one, "mpirun -n"));
  EXPECT_TRUE(contains(two, "mpirun -n 2 streambp train ... uses all of them")) << two;
}

TEST_F(GpuCommands, ReportsWhatFitsWhenARunDoesNot) {
  for (const auto& [options, said] : {std::pair<std::string, std::string>("--hidden 102400 --layers 200 --heads 800",
                                                                          "are free; use a smaller model"),
                                      {"--hidden 1200 --heads 2", "heads of width 600 are wider than the 512"},
                                      {"--hidden 2048 --layers 1 --heads 16 --batch 1 --length 16000000", ""}})
    expect_outcome(2, run_on_gpu("train --out run " + options), said);
}

}  // namespace
}  // namespace streambp
