// Training a part of a model from the command line: adapters and parameters by name.
#include "tests/fine_tuning.h"

namespace streambp {
namespace {

class TrainPart : public FineTuning {
 protected:
  double eval(const std::string& arguments) {
    expect_ok("eval --data data.jsonl --length 256 --json eval.json " + arguments);
    return parse_json_file("eval.json")["total"]["loss"];
  }
  static std::size_t tensors(const std::string& file) { return SafetensorsFile(file).tensors().size(); }
};

TEST_F(TrainPart, AdaptersLearnAndBecomePartOfAModel) {
  const std::string before = read_file("model/model.safetensors");
  const double base = eval("--model model");
  expect_ok(train("--lora 4 --steps 30 --rate 1e-2 --eval-fraction 0 --out run"));
  EXPECT_TRUE(read_file("model/model.safetensors") == before) << "the base has changed";
  EXPECT_FALSE(fs::exists("run/step-000030/model.safetensors"));
  EXPECT_EQ(tensors("run/step-000030/adapter_model.safetensors"), 28u);  // 2 layers of 7 linear layers
  EXPECT_EQ(tensors("run/training/step-000030/optimizer.safetensors"), 56u);

  const double adapted = eval("--adapter run");  // the adapters name their base
  EXPECT_LT(adapted, 0.95 * base);
  EXPECT_EQ(eval("--model model --adapter run/step-000030"), adapted);
  expect_ok("generate --adapter run --prompt question --length 8 --json a.json");

  fs::create_directory("merged.tmp");  // not ours
  expect_ok("merge --adapter run --out merged/");
  EXPECT_TRUE(fs::exists("merged.tmp"));
  EXPECT_NEAR(eval("--model merged"), adapted, 1e-5);
  EXPECT_TRUE(read_file("merged/config.json") == read_file("model/config.json"));
  EXPECT_TRUE(fs::exists("merged/tokenizer.json"));

  // Trained further, they begin where they ended; a rate of 0 changes no bit of them.
  expect_ok(train("--adapter run --steps 1 --rate 0 --eval-fraction 0 --out more"));
  for (const char* file : {"adapter_model.safetensors", "adapter_config.json"})
    expect_equal("run/step-000030/" + std::string(file), "more/step-000001/" + std::string(file));
  EXPECT_NEAR(metric("more", "loss").front(), adapted, 0.3);
  expect_ok("verify --model model --adapter run --length 300");
  expect_ok(train("--adapter run --dtype bf16 --steps 1 --rate 0 --eval-fraction 0 --out b"));
  expect_equal("run/step-000030/adapter_model.safetensors", "b/step-000001/adapter_model.safetensors");

  // Beside another copy of the base, they name that one.
  fs::copy("model", "copy", fs::copy_options::recursive);
  expect_ok(
      "train --model copy --data data.jsonl --length 256 --adapter run --steps 1 --rate 0 --eval-fraction 0 --out "
      "moved");
  const Json config = parse_json_file("moved/step-000001/adapter_config.json");
  EXPECT_EQ(config["base_model_name_or_path"], "copy") << "no directory of this machine";
}

TEST_F(TrainPart, AdaptersResumeBitForBit) {
  int number = 0;
  for (const std::string type : {"--dtype f32 --optimizer muon", "--dtype bf16 --optimizer adamw-8bit"}) {
    const std::string run =
        type + " --lora 3 --lora-on attention up_proj --rslora --steps 4 --rate 1e-2 --accumulate 2 --out ";
    const std::string name = std::to_string(number++);
    expect_ok(train(run + "straight" + name));
    expect_ok(train(run + "stopped" + name + " --stop-after 1"));
    expect_ok("train --resume --stop-after 3 --chunk 512 --out stopped" + name);
    expect_ok("train --resume --mode full --out stopped" + name);
    expect_same_run("straight" + name, "stopped" + name);
  }
  expect_ok(train("--lora 3 --steps 4 --stop-after 1 --out run"));
  fs::rename("model", "gone");
  expect_refused("train --resume --out run", "not a model directory");
  fs::rename("gone", "model");
  std::string changed = read_file("model/model.safetensors");
  changed.back() ^= 1;
  write_file_atomically("model/model.safetensors", changed);
  expect_refused("train --resume --out run", "has changed since the run in");
}

// The reference model is the base, with the adapters off.
TEST_F(TrainPart, PreferencesNeedNoSecondModel) {
  expect_ok("examples preferences --count 40 --out pairs.jsonl");
  const std::string prefer =
      "train --objective dpo --model model --data pairs.jsonl --lora 4 --length 600 --pack 600 --rate 1e-2 ";
  expect_ok(prefer + "--steps 12 --eval-fraction 0.3 --out straight");
  EXPECT_EQ(metric("straight", "evaluation_margin").front(), 0);
  EXPECT_GT(metric("straight", "evaluation_margin").back(), 0.1);
  expect_ok(prefer + "--steps 12 --eval-fraction 0.3 --stop-after 6 --out stopped");
  for (const fs::path& file : references()) fs::remove(file);
  expect_ok("train --resume --out stopped");  // computes them again, beside the adapters of step 6
  expect_same_run("straight", "stopped");
}

TEST_F(TrainPart, OnlineGrpoTurnsTheAdaptersOff) {
  std::string prompts;
  for (int i = 0; i < 8; ++i) prompts += Json{{"prompt", "question " + std::to_string(i)}}.dump() + "\n";
  write_file_atomically("prompts.jsonl", prompts);
  const std::string train =
      "train --objective grpo --kl 0.1 --model model --data prompts.jsonl --reward-cmd 'while read -r line; do echo "
      "${#line}; done' --lora 4 "
      "--prompts 2 --group 4 --completion 12 --steps 3 --rate 1e-2 --eval-fraction 0 --out ";
  setenv("TMPDIR", "none", 1);  // weights cannot be offloaded
  expect_ok(train + "run");
  unsetenv("TMPDIR");
  expect_ok(train + "more --train '.*norm.*'");  // the reference has the norms of before
  for (const char* run : {"run", "more"}) {
    const auto kl = metric(run, "kl");
    EXPECT_EQ(kl.front(), 0) << run;
    EXPECT_GT(kl.back(), 0) << run;
  }
}

TEST_F(TrainPart, OnlyNamedParametersChange) {
  const std::string options = "--train 'model.layers.1.mlp.*|model.norm.weight' --steps 4 --rate 1e-2 --out ";
  expect_ok(train(options + "run"));
  const SafetensorsFile before("model/model.safetensors"), after("run/step-000004/model.safetensors");
  for (const auto& [name, tensor] : before.tensors()) {
    const bool same = std::memcmp(tensor.data, after.at(name).data, tensor.bytes) == 0;
    EXPECT_EQ(same, !name.starts_with("model.layers.1.mlp.") && name != "model.norm.weight") << name;
  }
  EXPECT_EQ(tensors("run/training/step-000004/optimizer.safetensors"), 8u);
  expect_ok(train(options + "stopped --stop-after 2"));
  expect_ok("train --resume --out stopped");
  expect_same_run("run", "stopped");
}

// Frozen weights are saved as they were computed with: beside a bfloat16 run, rounded to bfloat16.
TEST_F(TrainPart, FrozenWeightsAreSavedAsTheyWereUsed) {
  expect_ok(train("--save-dtype bf16 --rate 0 --steps 1 --out narrow"));
  for (const std::string base : {"model", "narrow/step-000001"}) {
    const std::string out = "run" + std::to_string(base.size());
    expect_ok("train --model " + base +
              " --data data.jsonl --length 256 --dtype bf16 --train 'model.norm.weight' --steps 3 --rate 0.1 --out " +
              out);
    const SafetensorsFile before(base + "/model.safetensors"), after(out + "/step-000003/model.safetensors");
    for (const auto& [name, tensor] : before.tensors()) {
      auto old = numbers<float>(tensor), now = numbers<float>(after.at(name));
      for (float& x : old) x = BFloat16(x);  // weights are bfloat16
      EXPECT_EQ(old == now, name != "model.norm.weight") << base << ": " << name;
    }
  }
}

// Adapters and parameters of the base can be trained together; both are in the adapters' file, as PEFT has them.
TEST_F(TrainPart, AdaptersAndParametersOfTheBase) {
  const std::string options =
      "--lora 2 --lora-on q_proj --train '.*norm.*' --steps 4 --rate 1e-2 --eval-fraction 0 --out ";
  expect_ok(train(options + "run"));
  EXPECT_EQ(tensors("run/step-000004/adapter_model.safetensors"), 4u + 5u);
  const Json config = parse_json_file("run/step-000004/adapter_config.json");
  EXPECT_EQ(config["modules_to_save"].size(), 5u);
  const double adapted = eval("--adapter run");
  EXPECT_NE(adapted, eval("--model model"));
  expect_ok("merge --adapter run --out merged");
  EXPECT_NEAR(eval("--model merged"), adapted, 1e-5);
  expect_ok(train(options + "stopped --stop-after 2"));
  expect_ok("train --resume --out stopped");
  expect_same_run("run", "stopped");
}

// A base in 4 bits: its files stay as they are, and adapters are trained on what 4 bits hold.
TEST_F(TrainPart, AdaptersOfABaseInFourBits) {
  const std::string before = read_file("model/model.safetensors");
  const std::string options = "--lora 3 --base nf4 --steps 4 --rate 1e-2 --eval-fraction 0 --out ";
  expect_ok(train(options + "run"));
  EXPECT_TRUE(read_file("model/model.safetensors") == before);
  expect_ok(train(options + "stopped --stop-after 2"));
  expect_ok("train --resume --mode full --out stopped");
  expect_same_run("run", "stopped");
  const double plain = eval("--adapter run"), quantised = eval("--base nf4 --adapter run");
  EXPECT_NE(plain, quantised);
  EXPECT_NEAR(plain, quantised, 0.1 * plain);
  // Merged with the weights that they were trained with.
  expect_ok("merge --base nf4 --save-dtype f32 --adapter run --out merged");
  EXPECT_NEAR(eval("--model merged"), quantised, 1e-5);
  expect_ok("generate --base nf4 --adapter run --prompt question --length 8 --seed 1");
  expect_refused(train("--base nf4"), "only its adapters can be trained; add --lora RANK");
  expect_refused(train("--base nf4 --train '.*norm.*'"), "only its adapters can be trained; add --lora RANK");
  expect_refused(train("--base nf4 --lora 2 --lora-on v_proj --train '.*q_proj.*'"), "quantised weights are frozen");
  expect_refused("train --base nf4", "--base nf4 needs --model DIR");
  // Weights of the base that were trained cannot be replaced by 4 bits.
  expect_ok(train("--lora 2 --lora-on v_proj --train '.*q_proj.*' --steps 1 --eval-fraction 0 --out both"));
  expect_refused("eval --base nf4 --adapter both --data data.jsonl", "quantised weights are frozen");
  expect_refused("merge --base nf4 --adapter both --out m", "quantised weights are frozen");
}

// One block of layers after the other; each one changes its own layers only.
TEST_F(TrainPart, BlocksTakeTurns) {
  const std::string options =
      "--blocks 1 --block-steps 2 --block-order descending --rate 1e-2 --eval-fraction 0 --out ";
  auto changed = [](const std::string& a, const std::string& b) {
    std::set<std::string> names;
    const SafetensorsFile before(a + "/model.safetensors"), after(b + "/model.safetensors");
    for (const auto& [name, tensor] : before.tensors())
      if (std::memcmp(tensor.data, after.at(name).data, tensor.bytes) != 0) names.insert(name.substr(0, 14));
    return names;
  };
  for (const auto& [type, states] :
       {std::pair<std::string, std::size_t>("--dtype f32 ", 18), {"--dtype bf16 --save-dtype f16 ", 48}}) {
    const std::string run = "run" + std::to_string(type.size());
    expect_ok(train(type + "--steps 6 --checkpoint-every 1 " + options + run));
    if (type == "--dtype f32 ") {
      EXPECT_EQ(changed("model", run + "/step-000002"), std::set<std::string>{"model.layers.1"});
      EXPECT_EQ(changed(run + "/step-000002", run + "/step-000004"), std::set<std::string>{"model.layers.0"});
      EXPECT_EQ(changed(run + "/step-000004", run + "/step-000006"), std::set<std::string>{"model.layers.1"});
    }
    EXPECT_EQ(tensors(run + "/training/step-000003/optimizer.safetensors"), states);
    // A run resumes in the middle of a turn, and between two.
    for (const std::string stop : {"1", "2", "5"}) {
      const std::string stopped = run + "-stopped-" + stop;
      expect_ok(train(type + "--steps 6 " + options + stopped + " --stop-after " + stop));
      expect_ok("train --resume --chunk 512 --out " + stopped);
      expect_same_run(run, stopped);
    }
  }
  for (const std::string optimizer : {"adamw-8bit", "muon"}) {
    const std::string with = "--steps 4 --optimizer " + optimizer + " ";
    expect_ok(train(with + options + optimizer));
    expect_ok(train(with + "--stop-after 3 " + options + "stopped-" + optimizer));
    expect_ok("train --resume --out stopped-" + optimizer);
    expect_equal(optimizer + "/step-000004/model.safetensors",
                 "stopped-" + optimizer + "/step-000004/model.safetensors");
  }
  expect_refused(train("--blocks 3"), "layers are not a multiple of this");
  expect_ok("train --family qwen3_5 --layers 4 --hidden 32 --length 256 --steps 1 --out hybrid");
  expect_refused("train --model hybrid/last --data data.jsonl --blocks 2 --out refused", "choose --blocks 4");
  expect_refused(train("--blocks 1 --lora 2"), "leave out --lora and --train");
  expect_refused(train("--block-steps 2"), "--block-steps needs --blocks LAYERS");
}

TEST_F(TrainPart, NewModelsHaveExpertsAndResume) {
  const std::string sizes = "--layers 1 --hidden 32 --heads 2 --length 256 --sample 0 --steps 2 ";
  expect_ok("train --family mixtral --experts 3 " + sizes + "--out whole");
  expect_ok("train --family mixtral --experts 3 --stop-after 1 " + sizes + "--out stopped");
  expect_ok("train --resume --out stopped");
  expect_equal("whole/step-000002/model.safetensors", "stopped/step-000002/model.safetensors");
  EXPECT_PRED2(contains, read_file("whole/last/config.json"), "\"num_local_experts\": 3");
  const std::string tune = "--model whole/last --data data.jsonl --steps 1 --eval-fraction 0 ";
  expect_ok("train " + tune + "--base nf4 --lora 2 --lora-on all experts router --out tuned");
  expect_ok("merge --adapter tuned --out merged");
  expect_refused("train " + tune + "--train '.*gate_up_proj' --lora 2 --out refused", "cannot hold it");
  expect_refused("train " + tune + "--lora 2 --lora-on mlp --out refused", "experts and router stand for the rest");
  const std::string balanced = "train --experts 4 --balance 0.05 --eval-every 1 " + sizes;
  expect_ok(balanced + "--out balanced"), expect_ok(balanced + "--stop-after 1 --out half");
  expect_ok("train --resume --out half");
  expect_equal("balanced/step-000002/model.safetensors", "half/step-000002/model.safetensors");
  EXPECT_PRED2(contains, read_file("balanced/last/config.json"), "\"output_router_logits\": true");
  const std::vector<Json> lines = metrics("balanced");
  const Json load = lines.back().at("expert_load");
  EXPECT_EQ(load.size(), 1u);
  double sum = 0, busiest = 0;
  for (const double share : load[0]) sum += share, busiest = std::max(busiest, share);
  EXPECT_NEAR(sum, 4, 0.01);
  const Json& step = lines[lines.size() - 2];
  EXPECT_NEAR(step.at("busiest_expert").get<double>(), busiest, 0.001);
  EXPECT_EQ(step.at("idle_experts"), static_cast<double>(std::ranges::count(load[0], Json(0.0))) / 4);
  EXPECT_NEAR(step.at("balance_loss").get<double>(), 2, 0.1);
  EXPECT_LT(step.at("expert_entropy").get<double>(), 1);
  expect_ok(
      "train --model whole/last --data data.jsonl --steps 2 --stop-after 1 --eval-fraction 0 --balance 0.3 --out "
      "tuning");
  expect_ok("train --resume --out tuning");
  expect_refused("train --balance 0.1 --out refused", "llama has no experts that a softmax chooses");
  expect_refused("train --family llama --experts 4 --out refused", "llama has no experts");
  expect_refused("train --experts 4 --experts-per-token 5 --out refused", "there are 4 experts");
  expect_refused("train --experts 4 --mlp 65 --out refused", "--mlp 65 cannot be divided among the 2 experts");
}

TEST_F(TrainPart, RefusesWhatCannotWork) {
  expect_refused(train("--lora-alpha 4"), "--lora-alpha needs --lora RANK");
  expect_refused(train("--lora 2 --lora-on q_proj nothing"), "--lora-on nothing: the model has no linear layer");
  expect_refused(train("--train 'model.layers.9.*'"), "no parameter has such a name");
  expect_refused(train("--train '('"), "is not a regular expression");
  expect_refused("train --lora 4", "--lora needs --model DIR");
  expect_refused("train --adapter base", "--adapter needs --model DIR");
  expect_refused(train("--lora 2 --train '.*q_proj.*'"), "but the layer has an adapter; choose one of them");
  expect_refused(train("--lora 2 --lora-alpha 0"), "--lora-alpha");
  expect_refused(train("--lora 2 --save-dtype bf16"), "adapters are always saved in float32");
  expect_refused(train("--adapter model"), "does not hold adapters; a whole model is named with --model");
  expect_refused("eval --data data.jsonl", "--model is required");

  expect_ok(train("--lora 2 --steps 1 --eval-fraction 0 --out run"));
  expect_refused("generate --model run --prompt a", "has adapters, not a whole model; name them with --adapter");
  expect_refused(train("--lora 2 --adapter run"), "already say what is trained; leave it out");
  expect_refused("merge --adapter run --out base", "exists; name a new one");
  expect_ok("train --steps 1 --hidden 16 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out other");
  expect_refused("eval --model other --adapter run --data data.jsonl", "has shape");
  const std::string adapters = "run/step-000001/adapter_model.safetensors", whole = read_file(adapters);
  write_file_atomically(adapters, whole.substr(0, whole.size() / 2));
  expect_refused("eval --adapter run --data data.jsonl", "truncated");
  write_file_atomically(adapters, "");
  expect_refused("eval --adapter run --data data.jsonl", adapters);
  fs::remove(adapters);
  expect_refused("merge --adapter run --out merged", adapters);
}

}  // namespace
}  // namespace streambp
