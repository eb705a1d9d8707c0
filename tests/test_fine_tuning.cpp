// streambp train --model: fine-tunes a model directory.
#include "tests/fine_tuning.h"

namespace streambp {
namespace {

TEST_F(FineTuning, RateZeroLeavesTheModelUnchanged) {
  expect_ok(train("--rate 0 --steps 1 --out same"));
  for (const char* file :
       {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    expect_equal("same/step-000001/" + std::string(file), "model/" + std::string(file));
  }
  expect_ok(train("--rate 0 --steps 1 --save-dtype bf16 --out narrow"));
  const SafetensorsFile narrow("narrow/step-000001/model.safetensors");
  for (const auto& [name, tensor] : narrow.tensors()) EXPECT_EQ(tensor.dtype, "BF16") << name;
}

// Also if the files have fewer bits than the weights: the checkpoint stores the unrounded weights separately.
TEST_F(FineTuning, ResumesBitForBit) {
  const std::string run = "--steps 6 --rate 1e-2 --accumulate 2 --save-dtype bf16 --out ";
  expect_ok(train(run + "straight"));
  expect_ok(train(run + "stopped --stop-after 2"));
  expect_ok("train --resume --stop-after 5 --chunk 512 --out stopped");
  fs::rename("model", "gone");  // the checkpoint has everything that is needed
  expect_ok("train --resume --mode checkpoint --out stopped");
  expect_same_run("straight", "stopped");
}

TEST_F(FineTuning, ReducesTheHeldOutLoss) {
  expect_ok(train("--epochs 12 --rate 1e-2 --eval-fraction 0.2 --out run"),
            "\nlearns   to write, in its first document: ", "GFLOP/s; \"% matmul\" of a step is its share of that\n",
            " (tokens in the first half of each document ");
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
    write_file_atomically("data.jsonl", lines);
    const std::string run = "run" + std::to_string(completion.size());
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
    fs::create_directory("data");
    expect_ok("examples preferences --count 60 --out data/pairs.jsonl");
  }
  static std::string prefer(const std::string& arguments) {
    return "train --objective dpo --model model --data data/pairs.jsonl " + arguments;
  }
};

TEST_F(DpoTraining, LearnsToPreferTheChosenAnswers) {
  for (const char* preference : {"sigmoid", "ipo", "simpo"}) {
    const std::string run = preference;
    expect_ok(
        prefer("--steps 30 --rate 3e-3 --length 600 --eval-fraction 0.3 --out " + run + " --preference " + preference));
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

TEST_F(DpoTraining, CachedReferencesInBFloat16NameTheVersionOfTheArithmetic) {
  expect_ok(prefer("--dtype bf16 --steps 1 --length 300 --out run"));
  ASSERT_EQ(references().size(), 1u);
  EXPECT_PRED2(contains, SafetensorsFile(references()[0]).metadata().at("key"), "bfloat16, version 2");
}

TEST_F(DpoTraining, ResumesBitForBitAndReusesTheReference) {
  const std::string run = "--steps 6 --rate 1e-2 --length 300 --accumulate 2 --out ";
  expect_ok(prefer(run + "straight"));
  ASSERT_EQ(references().size(), 1u);
  const fs::path reference = references()[0];
  const auto made = fs::last_write_time(reference);
  expect_ok(prefer(run + "stopped --stop-after 2"));
  EXPECT_EQ(fs::last_write_time(reference), made) << "it was computed again";
  expect_ok("train --resume --stop-after 3 --mode full --out stopped");
  write_file_atomically(reference, "damaged");
  expect_ok("train --resume --stop-after 4 --mode checkpoint --out stopped");
  EXPECT_EQ(references().size(), 1u);
  fs::rename("model", "gone");  // its log-probs are cached
  expect_ok("train --resume --stop-after 5 --out stopped");
  fs::remove(reference);
  expect_refused("train --resume --out stopped", "not a model directory");
  fs::rename("gone", "model");
  expect_ok("train --resume --out stopped");
  expect_same_run("straight", "stopped");
}

TEST_F(DpoTraining, RefusesConflictingOptionsAndData) {
  const std::string out = " --out refused";
  const std::string on_pairs = " --model model --data data/pairs.jsonl";
  expect_refused("train" + on_pairs + out, "--objective dpo");
  expect_refused("eval" + on_pairs, "preferences");
  expect_refused("verify" + on_pairs, "--objective dpo");
  expect_refused("verify --objective dpo --model model --data data.jsonl", "no preferences");
  expect_refused(train("--objective dpo" + out), "\"chosen\"");
  expect_refused(prefer("--length 100" + out), "--too-long what to do with them: truncate or drop");
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
  expect_ok("verify --objective dpo --model model --data data/pairs.jsonl --length 700 --dtype f64", "Verified");
}

TEST_F(DpoTraining, RefusesToResumeWithADifferentReferenceModel) {
  expect_ok(prefer("--steps 3 --stop-after 1 --length 300 --out run"));
  fs::remove(references()[0]);
  expect_ok(
      "train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --seed 9 --out other");
  fs::remove_all("model");
  fs::rename("other/step-000002", "model");
  expect_refused("train --resume --out run", "no longer the model");
}

TEST_F(FineTuning, VerifiesTheGradientOnData) {
  expect_ok("verify --model model --data data.jsonl --length 700 --dtype f64", "Verified", "700 tokens in");
}

// Every name that a command reads or writes may be a plain one, in the working directory.
TEST_F(FineTuning, PlainNamesAreInTheWorkingDirectory) {
  fs::create_directories("empty");
  const std::string train = "train --model model --data data.jsonl --length 256 --steps 1 --lora 2 --out ";
  for (const std::string& command : std::vector<std::string>{
           train + "tuned", "train --resume --out tuned", train + "empty", "verify --run tuned",
           "tokenize --model model --data data.jsonl --out t.safetensors", "merge --adapter tuned --out merged",
           "eval --model merged --data t.safetensors --json eval.json",
           "generate --adapter tuned --prompt a --length 1", "examples answers --out examples.jsonl"})
    expect_ok(command);
  expect_outcome(0, shell("cd empty && rm -r * && " + binary() +
                          " train --model ../model --data ../data.jsonl --steps 1 --out ."));
  EXPECT_TRUE(fs::exists("empty/step-000001/model.safetensors"));
}

// As Hugging Face's tools leave them: refs, and snapshots of links to blobs.
TEST_F(FineTuning, DownloadedModelsHaveTheNamesOfTheHub) {
  setenv("HF_HOME", (dir / "home").c_str(), 1);
  unsetenv("HF_HUB_CACHE");
  const std::string run =
      "train --model Some-One/Tiny_Model.1 --data data.jsonl --length 256 --steps 1 --lora 2 --out tuned";
  expect_refused(run, "is not a model directory", "not in " + (dir / "home/hub").string(),
                 "hf download Some-One/Tiny_Model.1");
  const fs::path cached = "home/hub/models--Some-One--Tiny_Model.1";
  fs::create_directories(cached / "snapshots/abc"), fs::create_directories(cached / "blobs"),
      fs::create_directories(cached / "refs");
  for (const auto& entry : fs::directory_iterator("model")) {
    fs::rename(entry, cached / "blobs" / entry.path().filename());
    fs::create_symlink("../../blobs" / entry.path().filename(), cached / "snapshots/abc" / entry.path().filename());
  }
  write_file_atomically(cached / "refs/main", "abc");
  expect_ok(run);
  EXPECT_EQ(parse_json_file("tuned/step-000001/adapter_config.json")["base_model_name_or_path"],
            "Some-One/Tiny_Model.1");
  expect_ok("train --resume --out tuned");
  const std::string model = " --model Some-One/Tiny_Model.1 ";
  for (const char* command : {"eval --data data.jsonl --length 256", "generate --prompt a --length 1",
                              "verify --length 64", "plan Some-One/Tiny_Model.1"})
    expect_ok(command + (contains(command, "plan") ? "" : model), contains(command, "generate") ? "" : "2 layers");
  expect_ok("plan Qwen/Qwen3-8B --length 1000", "8.19G parameters");
  expect_ok("plan Qwen3-8B --length 1000", "8.19G parameters");
  expect_refused("plan Some-One/Other", "hf download Some-One/Other");
  unsetenv("HF_HOME");
}

TEST_F(FineTuning, RefusesInvalidOptions) {
  const std::string out = " --out refused";
  expect_refused("train --model nothing --data x" + out, "is not a model directory");
  expect_refused("train --model \"\" --data data.jsonl" + out, "--model: the value is empty");
  expect_refused("train --model model" + out, "--data");
  expect_refused("train --model model --data nothing.jsonl" + out, "nothing.jsonl");
  expect_refused(train("--hidden 64" + out), "leave out the options of models from scratch");
  expect_refused(train("--sample 10" + out), "streambp generate");
  expect_refused("train --epochs 2" + out, "--model");
  expect_refused(train("--chat chatml --learn half" + out), "--learn");
  expect_refused("verify --data data.jsonl", "--model DIR");
  write_file_atomically("model/model.safetensors", "nonsense");
  expect_refused(train(out), "model.safetensors");
}

// What the error suggests is enough, and what is cut by choice is counted.
TEST_F(FineTuning, LongDocumentsAreRefusedOrCutByChoice) {
  change_config("max_position_embeddings", 16384);
  const Json line = {{"prompt", "a"}, {"completion", std::string(6000, 'a')}};
  write_file_atomically("long.jsonl", read_file("data.jsonl") + line.dump() + "\n");
  const std::string run = "train --model model --data long.jsonl --steps 1 --eval-fraction 0 ";
  const std::string tail = "or say with --too-long what to do with them: split, truncate or drop";
  expect_refused(
      run + "--length 256 --out refused",
      "long.jsonl: 1 of 41 documents is longer than the 256 tokens of a stream, the longest has 6002; use --length "
      "6002, " +
          tail);
  const std::string refused =
      expect_refused(run + "--memory 2200KiB --keep near --out refused", "; use --memory ", tail);
  const std::size_t memory = refused.find("--memory ");
  expect_ok(run + "--keep near --out whole " +
            refused.substr(memory, refused.find_first_of(", ", memory + 9) - memory));
  expect_ok(run + "--length 6002 --out whole-too");
  expect_same_run("whole", "whole-too");
  const std::string says = "; 1 longer than 256 tokens: ";
  expect_ok(run + "--length 256 --too-long split --out split", says + "split");
  expect_ok(run + "--length 256 --too-long drop --out drop", says + "dropped");
  expect_ok(run + "--length 256 --too-long truncate --out truncate", says + "truncated");
  EXPECT_PRED2(contains, read_file("truncate/report.html"), says + "truncated");
}

// Small data has about a hundred steps, however long a stream may be; fewer than 50 are a warning.
TEST_F(FineTuning, SmallDataHasAHundredSteps) {
  std::string lines;
  for (int i = 0; i < 120; ++i)
    lines +=
        Json{{"prompt", "question " + std::to_string(i)}, {"completion", std::string(i * 7 % 90, 'a')}}.dump() + "\n";
  write_file_atomically("small.jsonl", lines);
  const std::string run = "train --model model --data small.jsonl ";
  const std::string said = expect_ok(run + "--eval-every 0 --out small", "  epoch 1.0/3  loss");
  EXPECT_FALSE(contains(said, "warning: only")) << said;
  const Index steps = static_cast<Index>(json_lines("small/metrics.jsonl").back()["step"]);
  EXPECT_GE(steps, 3 * 85);
  EXPECT_LE(steps, 3 * 125);
  expect_ok(run + "--pack 4096 --length 4096 --out few",
            "warning: only 6 steps, in which a model learns little; use --epochs 25, or a smaller --pack");
}

// A run of a version that packed documents by their length.
TEST_F(FineTuning, ARunWithOtherPacksSaysSo) {
  expect_ok(train("--steps 3 --stop-after 1 --out run"));
  EXPECT_FALSE(contains(expect_ok("train --resume --stop-after 2 --out run"), "with other packs"));
  const fs::path state_file = state_of("run/step-000002");
  Json state = read_sealed_json(state_file);
  for (const char* later : {"--pack", "--eval-data", "--template-arg"}) state["options"].erase(later);
  write_sealed_json(state_file, state);
  expect_ok("train --resume --out run", "with other packs; from here on, its steps differ");
}

// Examples without a model to fine-tune are not text.
TEST_F(FineTuning, ExamplesNeedAModel) {
  fs::copy("data.jsonl", "data.json.gz");
  for (const char* data : {"data.jsonl", "data.json.gz"})
    expect_refused("train --steps 1 --out refused --data " + std::string(data),
                   std::string(data) + ": is not plain text; name the model to fine-tune on it with --model DIR");
  for (const char* table : {"data.csv", "data.parquet"}) {
    write_file_atomically(table, "prompt,completion\n");
    for (const char* model : {"", "--model model "})
      expect_refused("train --steps 1 --out refused " + std::string(model) + "--data " + table,
                     std::string(table) + ": ", "is not read; convert it: python3 -c 'import datasets");
  }
}

TEST_F(FineTuning, RefusedRunsLeaveNoFiles) {
  write_file_atomically("empty.jsonl", "");
  write_file_atomically("bad.jsonl", "{\"prompt\": \"a\"\n");
  const std::string on = "train --model model --data ", out = " --out deep/refused";
  expect_refused("train --model model --data data.jsonl --length 256 --memory 10KiB" + out, "needs at least");
  expect_refused(train("--mode full" + out), "--chunk");
  expect_refused(train("--epochs 1e300" + out), "--epochs");
  expect_refused(train("--chat nothing" + out), "nothing");
  expect_refused(on + "data.jsonl --pack 300 --length 256" + out, "--pack 300 is more than --length 256");
  expect_refused(on + "data.jsonl --memory 10KiB" + out, "use more --memory, a smaller model");
  expect_refused(on + "data.jsonl --batch 64 --memory 1100KiB" + out, "use more --memory, a smaller --batch");
  expect_refused(train("--batch 4000000" + out), "--batch");
  expect_refused(on + "empty.jsonl" + out, "empty.jsonl");
  expect_refused(on + "bad.jsonl" + out, "bad.jsonl:1");
  fs::create_directory("mine");
  expect_refused(train("--objective dpo --out mine"), "\"chosen\"");
  // The weights are read after the data.
  change_config("intermediate_size", 8);
  expect_refused(train("--out mine"), "has shape");
  expect_refused(train(out), "has shape");
}

TEST_F(FineTuning, DocumentsOutsideTheVocabularyAreRefused) {
  change_config("vocab_size", 100);
  expect_refused(train("--out run"), "outside the model's vocabulary of 100");
}

// --- Held-out data, and the checkpoint that does best on it ---

class HeldOut : public FineTuning {
 protected:
  // What training makes likelier, the held-out data has not.
  void SetUp() override {
    FineTuning::SetUp();
    std::string lines;
    for (int i = 0; i < 12; ++i)
      lines += Json{{"prompt", "say " + std::to_string(i)}, {"completion", std::string(30, 'z')}}.dump() + "\n";
    write_file_atomically("eval.jsonl", lines);
  }
  static std::string target(const char* link) { return fs::read_symlink(link).string(); }
  static Index best_step(const std::string& run) {
    const auto losses = metric(run, "evaluation_loss");
    return steps_with(run,
                      "evaluation_loss")[std::ranges::min_element(losses.begin() + 1, losses.end()) - losses.begin()];
  }
};

TEST_F(HeldOut, EvalDataIsAllEvaluatedAndNeverTrainedOn) {
  expect_ok(train("--steps 2 --eval-fraction 0 --out without"));
  expect_ok(train("--steps 2 --eval-data eval.jsonl --out run"),
            "eval.jsonl (prompt, completion): 12 documents, held out");
  EXPECT_EQ(metric("run", "loss"), metric("without", "loss"));
  expect_ok("eval --model run/last --data eval.jsonl --json loss.json");
  const double loss = parse_json_file("loss.json")["files"][0]["loss"];
  EXPECT_NEAR(metric("run", "evaluation_loss").back(), loss, 1e-5);
  expect_refused(train("--eval-data eval.jsonl --eval-fraction 0.1 --out no"), "leave out --eval-fraction");
  expect_refused(train("--eval-data gone.jsonl --out no"), "gone.jsonl");
  expect_refused("train --eval-data eval.jsonl --out no", "--eval-data needs --model");
  write_file_atomically("pairs.jsonl", R"({"prompt": "a", "chosen": "b", "rejected": "c"})");
  expect_refused(train("--eval-data pairs.jsonl --out no"), "pairs.jsonl:1: a preference among documents");
}

TEST_F(HeldOut, TheBestCheckpointIsKeptAndARunThatGetsWorseStops) {
  const std::string run =
      "--rate 1e-2 --warmup 0 --eval-data eval.jsonl --eval-every 2 --steps 60 --stop-when-worse 3 --out ";
  const std::string said = expect_ok(train(run + "run"), "stopped after step ", ", which is run/best");
  const Index best = best_step("run"), last = steps("run");
  EXPECT_GT(best, 0);
  EXPECT_EQ(last, best + 6) << said;
  EXPECT_EQ(target("run/best"), checkpoint_name(best));
  EXPECT_EQ(target("run/last"), checkpoint_name(last));
  EXPECT_EQ(complete_checkpoints("run"),
            (std::vector<fs::path>{"run/" + checkpoint_name(best), "run/" + checkpoint_name(last)}));
  expect_ok("train --resume --out run", "stopped after step " + std::to_string(last));
  EXPECT_EQ(steps("run"), last);
  expect_ok("generate --model run/best --prompt a --length 2");

  // A run that is interrupted between evaluations counts on.
  expect_ok(train(run + "parts --stop-after " + std::to_string(best + 3)));
  expect_ok("train --resume --stop-after 0 --out parts", "stopped after step " + std::to_string(last));
  EXPECT_EQ(target("parts/best"), checkpoint_name(best));
  expect_same_run("run", "parts");
}

// A few evaluations, unless they would take more than a twentieth of the time: 456 tokens, after steps of 61.
TEST_F(HeldOut, ADefaultRunIsEvaluatedAFewTimes) {
  expect_ok(train("--steps 40 --out usual"));
  EXPECT_EQ(steps_with("usual", "evaluation_loss"), (std::vector<Index>{0, 20, 40}));
  fs::copy("data.jsonl", "more.jsonl");
  expect_ok(
      "train --model model --data data.jsonl:1 more.jsonl:3 --length 256 --pack 61 --steps 40 --eval-data eval.jsonl "
      "--out large",
      "more.jsonl (prompt, completion): 40 documents, 74% of an epoch's tokens", ": 12 documents, held out");
  EXPECT_EQ(steps_with("large", "evaluation_loss"), (std::vector<Index>{0, 40}));
  expect_failed(train("--eval-data eval.jsonl:1 more.jsonl:1 --out no"), "weights are for training on documents");
}

TEST_F(HeldOut, WithoutEvaluationsTheBestCheckpointIsTheLast) {
  const std::string said =
      expect_ok(train("--steps 2 --eval-fraction 0 --checkpoint-every 1 --out run"), "step-000002, which is run/last");
  EXPECT_FALSE(contains(said, "held-out"));
  EXPECT_EQ(target("run/best"), "step-000002");
  expect_refused(train("--eval-fraction 0 --stop-when-worse 2 --out no"), "--stop-when-worse needs evaluations");
  // The names stay where a run moves its links.
  expect_ok("train --model run/last --data data.jsonl --length 256 --steps 1 --lora 2 --out adapters");
  EXPECT_EQ(parse_json_file("adapters/last/adapter_config.json")["base_model_name_or_path"], "run/step-000002");
}

}  // namespace
}  // namespace streambp
