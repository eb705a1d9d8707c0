// Commands with a GGUF file for a model.
#include "tests/commands.h"
#include "tests/gguf_models.h"

namespace streambp {
namespace {

class GgufCommands : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    write_gguf_model("model.gguf", BlockType::q4_k);
    write_file_atomically("text.txt",
                          std::string(40, 'a') + " to be learned, again and again. " + std::string(90, 'b'));
  }
  static constexpr const char* kTrain = "train --model model.gguf --data text.txt --lora 4 --rate 0.02 --length 64 ";
};

TEST_F(GgufCommands, TrainResumeEvaluateMergeAndGenerate) {
  expect_ok(kTrain + std::string("--steps 4 --out whole"));
  expect_ok(kTrain + std::string("--steps 4 --stop-after 2 --out run"));
  EXPECT_TRUE(fs::exists("run/last/adapter.gguf"));
  expect_ok("train --resume --out run");
  EXPECT_EQ(read_file("run/last/adapter.gguf"), read_file("whole/last/adapter.gguf"));
  const auto loss_of = [](const std::string& arguments) {
    expect_ok("eval --data text.txt --json eval.json " + arguments);
    return parse_json_file("eval.json")["total"]["loss"].get<double>();
  };
  const double base = loss_of("--model model.gguf"), tuned = loss_of("--adapter run");
  EXPECT_EQ(loss_of("--model model.gguf --base unpacked"), base);
  EXPECT_EQ(loss_of("--model model.gguf --adapter run/last --base unpacked"), tuned);
  EXPECT_LT(tuned, base - 0.1);
  expect_ok("merge --adapter run --out merged");
  expect_ok("merge --adapter run --out merged.gguf --save-dtype f32");
  EXPECT_NEAR(loss_of("--model merged.gguf"), tuned, 1e-5);
  EXPECT_NEAR(loss_of("--model merged"), tuned, 0.01);
  expect_ok(kTrain + std::string("--steps 4 --train .*norm.* --out norms"));
  expect_ok("merge --adapter norms --out norms.gguf --save-dtype f32");
  EXPECT_NEAR(loss_of("--model norms.gguf"), loss_of("--adapter norms"), 1e-5);
  fs::copy_file("model.gguf", "sha256-0123");  // GGUF is known by its first bytes, too
  EXPECT_EQ(loss_of("--model sha256-0123"), base);
  expect_ok("generate --model model.gguf --adapter run --length 3 --prompt aaaa");
  expect_ok("plan model.gguf --lora 4 --length 512", "stream");
  expect_ok("verify --model model.gguf --lora 4 --length 300 --dtype f64 --oracle", "Exact");
}

TEST_F(GgufCommands, RefuseWhatCannotBe) {
  expect_refused("train --model model.gguf --data text.txt --out run",
                 "add --lora RANK, or load its numbers with --base unpacked");
  expect_refused("train --model none.gguf --data text.txt --lora 4 --out run", "none.gguf");
  write_file_atomically("empty.gguf", "");
  expect_refused("train --model empty.gguf --data text.txt --lora 4 --out run", "empty.gguf: 0 bytes are too few");
  expect_ok(kTrain + std::string("--steps 1 --out run"));
  expect_refused("merge --adapter run --out merged --save-dtype q8_0",
                 "is for GGUF files; name one with --out FILE.gguf");
  expect_ok(
      "train --model model.gguf --base unpacked --data text.txt --length 64 --steps 1 --save-dtype bf16 "
      "--out plain");
  expect_ok("train --model plain --data text.txt --lora 4 --length 64 --steps 1 --out other");
  expect_refused("merge --adapter other --out merged.gguf", "convert that with llama.cpp's convert_hf_to_gguf.py");
  EXPECT_FALSE(fs::exists("other/last/adapter.gguf"));
  write_gguf_model("model.gguf", BlockType::q6_k);
  expect_refused("eval --adapter run --data text.txt", "has changed since the adapters");
}

}  // namespace
}  // namespace streambp
