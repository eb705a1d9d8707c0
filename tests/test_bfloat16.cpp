// The commands with --dtype bf16 on the CPU: saved models, generation and evaluation beside float32.
#include "tests/byte_model.h"
#include "tests/commands.h"

namespace streambp {
namespace {

class BFloat16Commands : public Commands {
 protected:
  // A model of bytes in float32 files, and text.
  void SetUp() override {
    Commands::SetUp();
    save_chat_model("model", make_config("qwen3", {259, 32, 2, 4, 2, 8, 64, 300, false}));
    write_file_atomically("text.txt", "A text to be read.");
    write_file_atomically("data.jsonl", "{\"prompt\": \"One and one\", \"completion\": \" is two.\"}\n");
  }
};

TEST_F(BFloat16Commands, ARunOfAnotherVersionSaysThatItsBitsDiffer) {
  expect_ok(
      "train --dtype bf16 --layers 2 --hidden 32 --length 64 --batch 2 --steps 3 --stop-after 1 --sample 0 --out run");
  const auto resume = [](const std::string& more) { return expect_ok("train --resume --sample 0 --out run" + more); };
  EXPECT_FALSE(contains(resume(" --stop-after 2"), "bits differ"));
  const fs::path state_file = state_of("run/step-000002");
  Json state = read_sealed_json(state_file);
  state.erase("bf16_version");  // earlier versions had none
  write_sealed_json(state_file, state);
  EXPECT_PRED2(contains, resume(""), "from here on, the run's bits differ");
}

// The saved model is the master weights in float32, or with --save-dtype their rounded values.
TEST_F(BFloat16Commands, FineTunesAModelDirectory) {
  const std::string run =
      "train --dtype bf16 --model model --data data.jsonl --steps 4 --rate 1e-3 --eval-fraction 0 --out ";
  expect_ok(run + "wide");
  expect_ok(run + "narrow --save-dtype bf16");
  const SafetensorsFile wide("wide/step-000004/model.safetensors"), narrow("narrow/step-000004/model.safetensors"),
      training("wide/training/step-000004/optimizer.safetensors");
  for (const auto& [name, tensor] : wide.tensors()) {
    ASSERT_EQ(tensor.dtype, "F32") << name;
    EXPECT_EQ(std::memcmp(tensor.data, training.at("master." + name).data, tensor.bytes), 0) << name;
    ASSERT_EQ(narrow.at(name).dtype, "BF16") << name;
    const auto master = numbers<float>(tensor);
    const auto rounded = numbers<BFloat16>(narrow.at(name));
    for (std::size_t i = 0; i < master.size(); ++i) ASSERT_EQ(BFloat16(master[i]).bits, rounded[i].bits) << name;
  }
  expect_ok("eval --dtype bf16 --model narrow --data text.txt");
}

TEST_F(BFloat16Commands, GeneratesAndEvaluatesAlmostLikeFloat32) {
  const std::string model = " --model model";
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string type = std::string(" --dtype ") + dtype + " --json " + dtype;
    expect_ok("generate --chat chatml --prompt Hello you --samples 2 --length 8 --seed 3" + model + type);
    expect_ok("eval --data text.txt" + model + type + ".eval");
  }
  ASSERT_EQ(parse_json_file("bf16")["texts"].size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(parse_json_file("bf16")["texts"][i]["prompt_tokens"],
              parse_json_file("f32")["texts"][i]["prompt_tokens"]);
  }
  const double loss = parse_json_file("bf16.eval")["total"]["loss"],
               exact = parse_json_file("f32.eval")["total"]["loss"];
  EXPECT_NE(loss, exact);
  EXPECT_NEAR(loss, exact, 0.1);
}

TEST_F(BFloat16Commands, EveryObjectiveHasTheSameBitsInAllModes) {
  for (const char* objective : {"dpo", "grpo"}) {
    expect_ok(std::string("verify --dtype bf16 --layers 2 --length 300 --objective ") + objective);
  }
}

TEST_F(BFloat16Commands, BenchAndPlanCountTheMemoryOfTheCpu) {
  const std::string step = " --optimizer adamw-bf16 --length 600 --dtype bf16 --device cpu --json ";
  expect_ok("bench --family qwen3 --hidden 32 --layers 2 --repeat 1 --mode stream" + step + "bench");
  expect_ok("plan --family qwen3 --hidden 32 --layers 2 --vocab 256" + step + "plan");
  EXPECT_EQ(parse_json_file("bench")["dtype"], "bfloat16");
  const auto gradients = [&](const std::string& options) -> std::size_t {
    expect_ok("plan qwen3-0.6b" + step + "gradients.json " + options);
    return parse_json_file("gradients.json")["usage"]["full"]["by_kind"]["gradients"];
  };
  EXPECT_EQ(gradients("--accumulate 16"), 2 * gradients("--accumulate 15"));
  EXPECT_EQ(gradients("--accumulate 16 --grad-dtype bf16"), gradients("--accumulate 2"));
  EXPECT_EQ(parse_json_file("bench")["runs"][0]["memory"], parse_json_file("plan")["usage"]["stream"]["peak"]);
}

}  // namespace
}  // namespace streambp
