// streambp train --model: fine-tunes a model directory.
#include "tests/fine_tuning.h"

namespace streambp {
namespace {

TEST_F(FineTuning, RateZeroLeavesTheModelUnchanged) {
  expect_ok(train("--rate 0 --steps 1 --out " + path("same")));
  for (const char* file :
       {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    expect_equal("same/step-000001/" + std::string(file), "base/step-000002/" + std::string(file));
  }
  expect_ok(train("--rate 0 --steps 1 --save-dtype bf16 --out " + path("narrow")));
  const SafetensorsFile narrow(path("narrow/step-000001/model.safetensors"));
  for (const auto& [name, tensor] : narrow.tensors()) EXPECT_EQ(tensor.dtype, "BF16") << name;
}

// Also if the files have fewer bits than the weights: the checkpoint stores the unrounded weights separately.
TEST_F(FineTuning, ResumesBitForBit) {
  const std::string run = "--steps 6 --rate 1e-2 --accumulate 2 --save-dtype bf16 --out ";
  expect_ok(train(run + path("straight")));
  expect_ok(train(run + path("stopped") + " --stop-after 2"));
  expect_ok("train --resume --stop-after 5 --chunk 512 --out " + path("stopped"));
  fs::rename(path("base"), path("gone"));  // the checkpoint has everything that is needed
  expect_ok("train --resume --mode checkpoint --out " + path("stopped"));
  expect_same_checkpoint(path("straight/step-000006"), path("stopped/step-000006"));
}

TEST_F(FineTuning, ReducesTheHeldOutLoss) {
  expect_ok(train("--epochs 12 --rate 1e-2 --eval-fraction 0.2 --out " + path("run")));
  const auto held_out = metric("run", "evaluation_loss");
  ASSERT_GE(held_out.size(), 2u);
  EXPECT_LT(held_out.back(), 0.3 * held_out.front());
}

TEST_F(FineTuning, LossesOfHalvesNeedTargetsInBoth) {
  auto halves_of = [&](const std::string& completion) {
    std::string lines;
    for (int i = 0; i < 20; ++i) {
      lines += Json{{"prompt", std::string(60, 'q') + std::to_string(i)}, {"completion", completion}}.dump() + "\n";
    }
    write_file_atomically(path("data.jsonl"), lines);
    const std::string run = path("run") + std::to_string(completion.size());
    expect_ok(train("--steps 1 --eval-fraction 0.2 --out " + run));
    return contains(read_file(run + "/metrics.jsonl"), "first_half");
  };
  EXPECT_TRUE(halves_of(std::string(90, 'a')));
  EXPECT_FALSE(halves_of("short"));
}

// --- DPO ---

class DpoTraining : public FineTuning {
 protected:
  void SetUp() override {
    FineTuning::SetUp();
    fs::create_directory(path("data"));
    expect_ok("examples preferences --count 60 --out " + path("data/pairs.jsonl"));
  }
  std::string prefer(const std::string& arguments) const {
    return "train --objective dpo --model " + model + " --data " + path("data/pairs.jsonl") + " " + arguments;
  }
  std::vector<fs::path> references() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(path("data"))) {
      if (entry.path().filename().string().starts_with("reference-")) found.push_back(entry.path());
    }
    return found;
  }
};

TEST_F(DpoTraining, LearnsToPreferTheChosenAnswers) {
  for (const char* preference : {"sigmoid", "ipo", "simpo"}) {
    const std::string run = preference;
    expect_ok(prefer("--steps 30 --rate 3e-3 --length 600 --eval-fraction 0.3 --out " + path(run) + " --preference " +
                     preference));
    const auto accuracy = metric(run, "evaluation_accuracy"), margin = metric(run, "evaluation_margin");
    ASSERT_GE(accuracy.size(), 2u);
    EXPECT_GT(accuracy.back(), 0.9) << preference;
    EXPECT_GT(margin.back(), margin.front()) << preference;
  }
  EXPECT_NEAR(metric("sigmoid", "evaluation_loss").front(), std::log(2), 1e-12);
  for (const char* what : {"margin", "evaluation_margin"}) {
    EXPECT_EQ(metric("sigmoid", what).front(), 0)
        << "the reference model's bits, though the pairs are packed differently";
  }
  EXPECT_EQ(references().size(), 1u) << "one for sigmoid and ipo, none for simpo";
}

TEST_F(DpoTraining, ResumesBitForBitAndReusesTheReference) {
  const std::string run = "--steps 6 --rate 1e-2 --length 300 --accumulate 2 --out ";
  expect_ok(prefer(run + path("straight")));
  ASSERT_EQ(references().size(), 1u);
  const fs::path reference = references()[0];
  const auto made = fs::last_write_time(reference);
  expect_ok(prefer(run + path("stopped") + " --stop-after 2"));
  EXPECT_EQ(fs::last_write_time(reference), made) << "it was computed again";
  expect_ok("train --resume --stop-after 3 --mode full --out " + path("stopped"));
  write_file_atomically(reference, "damaged");
  expect_ok("train --resume --stop-after 4 --mode checkpoint --out " + path("stopped"));
  EXPECT_EQ(references().size(), 1u);
  fs::rename(model, path("gone"));  // its log-probs are cached
  expect_ok("train --resume --stop-after 5 --out " + path("stopped"));
  fs::remove(reference);
  expect_refused("train --resume --out " + path("stopped"), "not a model directory");
  fs::rename(path("gone"), model);
  expect_ok("train --resume --out " + path("stopped"));
  expect_same_checkpoint(path("straight/step-000006"), path("stopped/step-000006"));
}

TEST_F(DpoTraining, RefusesConflictingOptionsAndData) {
  const std::string out = " --out " + path("refused");
  const std::string on_pairs = " --model " + model + " --data " + path("data/pairs.jsonl");
  expect_refused("train" + on_pairs + out, "--objective dpo");
  expect_refused("eval" + on_pairs, "preferences");
  expect_refused("verify" + on_pairs, "--objective dpo");
  expect_refused("verify --objective dpo --model " + model + " --data " + path("data.jsonl"), "no preferences");
  expect_refused(train("--objective dpo" + out), "\"chosen\"");
  expect_refused(prefer("--length 100" + out), "--too-long truncate");
  expect_refused("train --objective dpo" + out, "--model");
  expect_refused(prefer("--mean documents" + out), "--mean");
  expect_refused(prefer("--margin 1" + out), "--margin is for --objective dpo with --preference simpo; leave it out");
  expect_refused(prefer("--preference ipo --label-smoothing 0.1" + out),
                 "--label-smoothing is for --objective dpo with --preference sigmoid or simpo; leave it out");
  expect_refused(prefer("--beta 0" + out), "--beta");
  expect_refused(prefer("--beta nan" + out), "finite");
  expect_refused(prefer("--objective grpo" + out), "--objective");
  expect_refused(train("--beta 1" + out), "--beta");
}

TEST_F(DpoTraining, VerifiesTheGradientOnPairs) {
  const Outcome outcome = execute("verify --objective dpo --model " + model + " --data " + path("data/pairs.jsonl") +
                                  " --length 700 --dtype f64");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "Verified")) << outcome.output;
}

TEST_F(DpoTraining, RefusesToResumeWithADifferentReferenceModel) {
  expect_ok(prefer("--steps 3 --stop-after 1 --length 300 --out " + path("run")));
  fs::remove(references()[0]);
  expect_ok(
      "train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --seed 9 --out " +
      path("other"));
  fs::remove_all(model);
  fs::rename(path("other/step-000002"), model);
  expect_refused("train --resume --out " + path("run"), "no longer the model");
}

TEST_F(FineTuning, VerifiesTheGradientOnData) {
  const Outcome outcome =
      execute("verify --model " + model + " --data " + path("data.jsonl") + " --length 700 --dtype f64");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "Verified")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "700 tokens in")) << outcome.output;
}

// Every name that a command reads or writes may be a plain one, in the working directory.
TEST_F(FineTuning, PlainNamesAreInTheWorkingDirectory) {
  fs::rename(model, path("model"));
  fs::create_directories(path("empty"));
  const std::string train = "train --model model --data data.jsonl --length 256 --steps 1 --lora 2 --out ";
  for (const std::string& command : std::vector<std::string>{
           train + "tuned", "train --resume --out tuned", train + "empty", "verify --run tuned",
           "tokenize --model model --data data.jsonl --out t.safetensors", "merge --adapter tuned --out merged",
           "eval --model merged --data t.safetensors --json eval.json",
           "generate --adapter tuned --prompt a --length 1", "examples answers --out examples.jsonl"}) {
    const Outcome outcome = execute("-c \"cd " + dir.string() + " && " + binary() + " " + command + "\"", "/bin/sh");
    EXPECT_EQ(outcome.exit_code, 0) << command << "\n" << outcome.output;
  }
  const std::string here = "-c \"cd " + path("empty") + " && rm -r * && " + binary() +
                           " train --model ../model --data ../data.jsonl --steps 1 --out .\"";
  const Outcome outcome = execute(here, "/bin/sh");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(fs::exists(path("empty/step-000001/model.safetensors"))) << outcome.output;
}

TEST_F(FineTuning, RefusesInvalidOptions) {
  const std::string out = " --out " + path("refused");
  expect_refused("train --model " + path("nothing") + " --data x" + out, "is not a model directory");
  expect_refused("train --model \"\" --data " + path("data.jsonl") + out, "--model: the value is empty");
  expect_refused("train --model " + model + out, "--data");
  expect_refused("train --model " + model + " --data " + path("nothing.jsonl") + out, "nothing.jsonl");
  expect_refused(train("--hidden 64" + out), "leave out the options of models from scratch");
  expect_refused(train("--sample 10" + out), "streambp generate");
  expect_refused("train --epochs 2" + out, "--model");
  expect_refused(train("--chat chatml --learn half" + out), "--learn");
  expect_refused("verify --data " + path("data.jsonl"), "--model DIR");
  write_file_atomically(path("base/step-000002/model.safetensors"), "nonsense");
  expect_refused(train(out), "model.safetensors");
}

TEST_F(FineTuning, RefusedRunsLeaveNoFiles) {
  write_file_atomically(path("empty.jsonl"), "");
  write_file_atomically(path("bad.jsonl"), "{\"prompt\": \"a\"\n");
  const std::string on = "train --model " + model + " --data ", out = " --out " + path("deep/refused");
  expect_refused(on + path("data.jsonl") + " --memory lots" + out, "lots");
  expect_refused("train --model " + model + " --data " + path("data.jsonl") + " --length 256 --memory 10KiB" + out,
                 "needs at least");
  expect_refused(train("--mode full" + out), "--chunk");
  expect_refused(train("--mode sideways" + out), "--mode");
  expect_refused(train("--objective dpo" + out), "\"chosen\"");
  expect_refused(train("--objective grpo" + out), "\"rewards\"");
  expect_refused(train("--epochs 1e300" + out), "--epochs");
  expect_refused(train("--chat nothing" + out), "nothing");
  expect_refused(on + path("data.jsonl") + " --too-long refuse --length 32" + out,
                 "more than the 32 that --length and the model allow; use a larger --length or --too-long truncate");
  expect_refused(on + path("data.jsonl") + " --memory 10KiB" + out, "use more --memory or a smaller model");
  expect_refused(train("--batch 4000000" + out), "--batch");
  expect_refused(on + path("empty.jsonl") + out, "empty.jsonl");
  expect_refused(on + path("bad.jsonl") + out, "bad.jsonl:1");
  fs::create_directory(path("mine"));
  expect_refused(train("--objective dpo --out " + path("mine")), "\"chosen\"");
  // The weights are read after the data.
  Json config = Json::parse(read_file(model + "/config.json"));
  config["intermediate_size"] = config["intermediate_size"].get<Index>() * 2;
  write_file_atomically(model + "/config.json", config.dump());
  expect_refused(train("--out " + path("mine")), "has shape");
  expect_refused(train(out), "has shape");
}

TEST_F(FineTuning, DocumentsOutsideTheVocabularyAreRefused) {
  Json config = Json::parse(read_file(model + "/config.json"));
  config["vocab_size"] = 100;
  write_file_atomically(model + "/config.json", config.dump());
  expect_refused(train("--out " + path("run")), "outside the model's vocabulary of 100");
}

}  // namespace
}  // namespace streambp
