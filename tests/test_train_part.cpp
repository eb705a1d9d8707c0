// Training a part of a model from the command line: adapters and parameters by name.
#include "tests/fine_tuning.h"

namespace streambp {
namespace {

class TrainPart : public FineTuning {
 protected:
  double eval(const std::string& arguments) {
    expect_ok("eval --data " + path("data.jsonl") + " --length 256 --json " + path("eval.json") + " " + arguments);
    return Json::parse(read_file(path("eval.json")))["total"]["loss"];
  }
  void expect_equal_runs(const std::string& a, const std::string& b, const std::string& step) {
    expect_same_checkpoint(path(a) + "/" + step, path(b) + "/" + step);
  }
  std::vector<std::string> names(const std::string& file) const {
    std::vector<std::string> result;
    const SafetensorsFile opened(path(file));
    for (const auto& [name, tensor] : opened.tensors()) result.push_back(name);
    return result;
  }
};

TEST_F(TrainPart, AdaptersLearnAndBecomePartOfAModel) {
  const std::string before = read_file(model + "/model.safetensors");
  const double base = eval("--model " + model);
  expect_ok(train("--lora 4 --steps 30 --rate 1e-2 --eval-fraction 0 --out " + path("run")));
  EXPECT_TRUE(read_file(model + "/model.safetensors") == before) << "the base has changed";
  EXPECT_FALSE(fs::exists(path("run/step-000030/model.safetensors")));
  EXPECT_EQ(names("run/step-000030/adapter_model.safetensors").size(), 28u);  // 2 layers of 7 linear layers
  EXPECT_EQ(names("run/training/step-000030/optimizer.safetensors").size(), 56u);

  const double adapted = eval("--adapter " + path("run"));  // the adapters name their base
  EXPECT_LT(adapted, 0.95 * base);
  EXPECT_EQ(eval("--model " + model + " --adapter " + path("run/step-000030")), adapted);
  expect_ok("generate --adapter " + path("run") + " --prompt question --length 8 --json " + path("a.json"));

  fs::create_directory(path("merged.tmp"));  // not ours
  expect_ok("merge --adapter " + path("run") + " --out " + path("merged") + "/");
  EXPECT_TRUE(fs::exists(path("merged.tmp")));
  EXPECT_NEAR(eval("--model " + path("merged")), adapted, 1e-5);
  EXPECT_TRUE(read_file(path("merged/config.json")) == read_file(model + "/config.json"));
  EXPECT_TRUE(fs::exists(path("merged/tokenizer.json")));

  // Trained further, they begin where they ended; a rate of 0 changes no bit of them.
  expect_ok(train("--adapter " + path("run") + " --steps 1 --rate 0 --eval-fraction 0 --out " + path("more")));
  for (const char* file : {"adapter_model.safetensors", "adapter_config.json"})
    expect_equal("run/step-000030/" + std::string(file), "more/step-000001/" + std::string(file));
  EXPECT_NEAR(metric("more", "loss").front(), adapted, 0.3);
  expect_ok("verify --model " + model + " --adapter " + path("run") + " --length 300");
  expect_ok(
      train("--adapter " + path("run") + " --dtype bf16 --steps 1 --rate 0 --eval-fraction 0 --out " + path("b")));
  expect_equal("run/step-000030/adapter_model.safetensors", "b/step-000001/adapter_model.safetensors");

  // Beside another copy of the base, they name that one.
  fs::copy(model, path("copy"), fs::copy_options::recursive);
  expect_ok("train --model " + path("copy") + " --data " + path("data.jsonl") + " --length 256 --adapter " +
            path("run") + " --steps 1 --rate 0 --eval-fraction 0 --out " + path("moved"));
  const Json config = Json::parse(read_file(path("moved/step-000001/adapter_config.json")));
  EXPECT_EQ(config["base_model_name_or_path"], "copy") << "no directory of this machine";
}

TEST_F(TrainPart, AdaptersResumeBitForBit) {
  int number = 0;
  for (const std::string type : {"--dtype f32", "--dtype bf16", "--dtype bf16 --optimizer adamw-bf16",
                                 "--dtype f32 --optimizer muon", "--dtype bf16 --optimizer adamw-8bit"}) {
    const std::string run =
        type + " --lora 3 --lora-on attention up_proj --rslora --steps 4 --rate 1e-2 --accumulate 2 --out ";
    const std::string name = std::to_string(number++);
    expect_ok(train(run + path("straight" + name)));
    expect_ok(train(run + path("stopped" + name) + " --stop-after 1"));
    expect_ok("train --resume --stop-after 3 --chunk 512 --out " + path("stopped" + name));
    expect_ok("train --resume --mode full --out " + path("stopped" + name));
    expect_equal_runs("straight" + name, "stopped" + name, "step-000004");
  }
  expect_ok(train("--lora 3 --steps 4 --stop-after 1 --out " + path("run")));
  fs::rename(model, path("gone"));
  expect_refused("train --resume --out " + path("run"), "not a model directory");
  fs::rename(path("gone"), model);
  const std::string weights = model + "/model.safetensors";
  std::string changed = read_file(weights);
  changed.back() ^= 1;
  write_file_atomically(weights, changed);
  expect_refused("train --resume --out " + path("run"), "has changed since the run in");
}

// The reference model is the base, with the adapters off.
TEST_F(TrainPart, PreferencesNeedNoSecondModel) {
  expect_ok("examples preferences --count 40 --out " + path("pairs.jsonl"));
  const std::string prefer = "train --objective dpo --model " + model + " --data " + path("pairs.jsonl") +
                             " --lora 4 --length 600 --rate 1e-2 ";
  expect_ok(prefer + "--steps 12 --eval-fraction 0.3 --out " + path("straight"));
  EXPECT_EQ(metric("straight", "evaluation_margin").front(), 0);
  EXPECT_GT(metric("straight", "evaluation_margin").back(), 0.1);
  expect_ok(prefer + "--steps 12 --eval-fraction 0.3 --stop-after 6 --out " + path("stopped"));
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    if (entry.path().filename().string().starts_with("reference-")) fs::remove(entry.path());
  }
  expect_ok("train --resume --out " + path("stopped"));  // computes them again, beside the adapters of step 6
  expect_equal_runs("straight", "stopped", "step-000012");
}

TEST_F(TrainPart, OnlineGrpoTurnsTheAdaptersOff) {
  std::string prompts;
  for (int i = 0; i < 8; ++i) prompts += Json{{"prompt", "question " + std::to_string(i)}}.dump() + "\n";
  write_file_atomically(path("prompts.jsonl"), prompts);
  const std::string train = "train --objective grpo --kl 0.1 --model " + model + " --data " + path("prompts.jsonl") +
                            " --reward-cmd 'while read -r line; do echo ${#line}; done' --lora 4 --prompts 2 --group 4 "
                            "--completion 12 --steps 3 --rate 1e-2 --eval-fraction 0 --out ";
  setenv("TMPDIR", path("none").c_str(), 1);  // weights cannot be offloaded
  expect_ok(train + path("run"));
  unsetenv("TMPDIR");
  expect_ok(train + path("more") + " --train '.*norm.*'");  // the reference has the norms of before
  for (const char* run : {"run", "more"}) {
    const auto kl = metric(run, "kl");
    EXPECT_EQ(kl.front(), 0) << run;
    EXPECT_GT(kl.back(), 0) << run;
  }
}

TEST_F(TrainPart, OnlyNamedParametersChange) {
  const std::string options = "--train 'model.layers.1.mlp.*|model.norm.weight' --steps 4 --rate 1e-2 --out ";
  expect_ok(train(options + path("run")));
  const SafetensorsFile before(model + "/model.safetensors"), after(path("run/step-000004/model.safetensors"));
  for (const auto& [name, tensor] : before.tensors()) {
    const bool same = std::memcmp(tensor.data, after.at(name).data, tensor.bytes) == 0;
    EXPECT_EQ(same, !name.starts_with("model.layers.1.mlp.") && name != "model.norm.weight") << name;
  }
  EXPECT_EQ(names("run/training/step-000004/optimizer.safetensors").size(), 8u);
  expect_ok(train(options + path("stopped") + " --stop-after 2"));
  expect_ok("train --resume --out " + path("stopped"));
  expect_same_checkpoint(path("run/step-000004"), path("stopped/step-000004"));
}

// Frozen weights are saved as they were computed with: beside a bfloat16 run, rounded to bfloat16.
TEST_F(TrainPart, FrozenWeightsAreSavedAsTheyWereUsed) {
  expect_ok(train("--save-dtype bf16 --rate 0 --steps 1 --out " + path("narrow")));
  for (const std::string& base : {model, path("narrow/step-000001")}) {
    const std::string out = path("run") + std::to_string(base.size());
    expect_ok("train --model " + base + " --data " + path("data.jsonl") +
              " --length 256 --dtype bf16 --train 'model.norm.weight' --steps 3 --rate 0.1 --out " + out);
    const SafetensorsFile before(base + "/model.safetensors"), after(out + "/step-000003/model.safetensors");
    for (const auto& [name, tensor] : before.tensors()) {
      std::vector<float> old(static_cast<std::size_t>(tensor.count)), now(old);
      read(tensor, old.data()), read(after.at(name), now.data());
      for (float& x : old) x = BFloat16(x);  // weights are bfloat16
      EXPECT_EQ(old == now, name != "model.norm.weight") << base << ": " << name;
    }
  }
}

// Adapters and parameters of the base can be trained together; both are in the adapters' file, as PEFT has them.
TEST_F(TrainPart, AdaptersAndParametersOfTheBase) {
  const std::string options =
      "--lora 2 --lora-on q_proj --train '.*norm.*' --steps 4 --rate 1e-2 --eval-fraction 0 --out ";
  expect_ok(train(options + path("run")));
  EXPECT_EQ(names("run/step-000004/adapter_model.safetensors").size(), 4u + 5u);
  const Json config = Json::parse(read_file(path("run/step-000004/adapter_config.json")));
  EXPECT_EQ(config["modules_to_save"].size(), 5u);
  const double adapted = eval("--adapter " + path("run"));
  EXPECT_NE(adapted, eval("--model " + model));
  expect_ok("merge --adapter " + path("run") + " --out " + path("merged"));
  EXPECT_NEAR(eval("--model " + path("merged")), adapted, 1e-5);
  expect_ok(train(options + path("stopped") + " --stop-after 2"));
  expect_ok("train --resume --out " + path("stopped"));
  expect_equal_runs("run", "stopped", "step-000004");
}

// A base in 4 bits: its files stay as they are, and adapters are trained on what 4 bits hold.
TEST_F(TrainPart, AdaptersOfABaseInFourBits) {
  const std::string before = read_file(model + "/model.safetensors");
  const std::string options = "--lora 3 --base nf4 --steps 4 --rate 1e-2 --eval-fraction 0 --out ";
  expect_ok(train(options + path("run")));
  EXPECT_TRUE(read_file(model + "/model.safetensors") == before);
  expect_ok(train(options + path("stopped") + " --stop-after 2"));
  expect_ok("train --resume --mode full --out " + path("stopped"));
  expect_equal_runs("run", "stopped", "step-000004");
  const double plain = eval("--adapter " + path("run")), quantised = eval("--base nf4 --adapter " + path("run"));
  EXPECT_NE(plain, quantised);
  EXPECT_NEAR(plain, quantised, 0.1 * plain);
  // Merged with the weights that they were trained with.
  expect_ok("merge --base nf4 --save-dtype f32 --adapter " + path("run") + " --out " + path("merged"));
  EXPECT_NEAR(eval("--model " + path("merged")), quantised, 1e-5);
  expect_ok("generate --base nf4 --adapter " + path("run") + " --prompt question --length 8 --seed 1");
  expect_refused(train("--base nf4"), "only its adapters can be trained; add --lora RANK");
  expect_refused(train("--base nf4 --train '.*norm.*'"), "only its adapters can be trained; add --lora RANK");
  expect_refused(train("--base nf4 --lora 2 --lora-on v_proj --train '.*q_proj.*'"), "weights in 4 bits are frozen");
  expect_refused("train --base nf4", "--base nf4 needs --model DIR");
  // Weights of the base that were trained cannot be replaced by 4 bits.
  expect_ok(train("--lora 2 --lora-on v_proj --train '.*q_proj.*' --steps 1 --eval-fraction 0 --out " + path("both")));
  expect_refused("eval --base nf4 --adapter " + path("both") + " --data " + path("data.jsonl"), "4 bits are frozen");
  expect_refused("merge --base nf4 --adapter " + path("both") + " --out " + path("m"), "4 bits are frozen");
}

// One block of layers after the other; each one changes its own layers only.
TEST_F(TrainPart, BlocksTakeTurns) {
  const std::string options =
      "--blocks 1 --block-steps 2 --block-order descending --rate 1e-2 --eval-fraction 0 --out ";
  auto changed = [&](const std::string& a, const std::string& b) {
    std::set<std::string> names;
    const SafetensorsFile before(path(a) + "/model.safetensors"), after(path(b) + "/model.safetensors");
    for (const auto& [name, tensor] : before.tensors())
      if (std::memcmp(tensor.data, after.at(name).data, tensor.bytes) != 0) names.insert(name.substr(0, 14));
    return names;
  };
  for (const std::string type : {"--dtype f32 ", "--dtype bf16 ", "--dtype bf16 --save-dtype f16 "}) {
    const std::string run = "run" + std::to_string(type.size());
    expect_ok(train(type + "--steps 6 --checkpoint-every 1 " + options + path(run)));
    if (type == "--dtype f32 ") {
      EXPECT_EQ(changed("base/step-000002", run + "/step-000002"), std::set<std::string>{"model.layers.1"});
      EXPECT_EQ(changed(run + "/step-000002", run + "/step-000004"), std::set<std::string>{"model.layers.0"});
      EXPECT_EQ(changed(run + "/step-000004", run + "/step-000006"), std::set<std::string>{"model.layers.1"});
    }
    EXPECT_EQ(names(run + "/training/step-000003/optimizer.safetensors").size(), type == "--dtype f32 "    ? 18u
                                                                                 : type == "--dtype bf16 " ? 27u
                                                                                                           : 48u);
    // A run resumes in the middle of a turn, and between two.
    for (const std::string stop : {"1", "2", "5"}) {
      const std::string stopped = run + "-stopped-" + stop;
      expect_ok(train(type + "--steps 6 " + options + path(stopped) + " --stop-after " + stop));
      expect_ok("train --resume --chunk 512 --out " + path(stopped));
      expect_same_checkpoint(path(run + "/step-000006"), path(stopped + "/step-000006"));
    }
  }
  for (const std::string optimizer : {"adamw-8bit", "muon"}) {
    const std::string with = "--steps 4 --optimizer " + optimizer + " ";
    expect_ok(train(with + options + path(optimizer)));
    expect_ok(train(with + "--stop-after 3 " + options + path("stopped-" + optimizer)));
    expect_ok("train --resume --out " + path("stopped-" + optimizer));
    expect_equal(optimizer + "/step-000004/model.safetensors",
                 "stopped-" + optimizer + "/step-000004/model.safetensors");
  }
  expect_refused(train("--blocks 3"), "layers are not a multiple of this");
  expect_refused(train("--blocks 1 --lora 2"), "leave out --lora and --train");
  expect_refused(train("--block-steps 2"), "--block-steps needs --blocks LAYERS");
}

TEST_F(TrainPart, RefusesWhatCannotWork) {
  expect_refused(train("--lora-alpha 4"), "--lora-alpha needs --lora RANK");
  expect_refused(train("--lora 2 --lora-on q_proj nothing"), "--lora-on nothing: the model has no linear layer");
  expect_refused(train("--train 'model.layers.9.*'"), "no parameter has such a name");
  expect_refused(train("--train '('"), "is not a regular expression");
  expect_refused("train --lora 4", "--lora needs --model DIR");
  expect_refused("train --adapter " + path("base"), "--adapter needs --model DIR");
  expect_refused(train("--lora 2 --train '.*q_proj.*'"), "but the layer has an adapter; choose one of them");
  expect_refused(train("--lora 2 --lora-alpha 0"), "--lora-alpha");
  expect_refused(train("--lora 2 --save-dtype bf16"), "adapters are always saved in float32");
  expect_refused(train("--adapter " + model), "does not hold adapters; a whole model is named with --model");
  expect_refused("eval --data " + path("data.jsonl"), "--model is required");

  expect_ok(train("--lora 2 --steps 1 --eval-fraction 0 --out " + path("run")));
  const std::string run = path("run");
  expect_refused("generate --model " + run + " --prompt a",
                 "has adapters, not a whole model; name them with --adapter");
  expect_refused(train("--lora 2 --adapter " + run), "already say what is trained; leave it out");
  expect_refused("merge --adapter " + run + " --out " + path("base"), "exists; name a new directory");
  expect_ok("train --steps 1 --hidden 16 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out " +
            path("other"));
  expect_refused("eval --model " + path("other") + " --adapter " + run + " --data " + path("data.jsonl"), "has shape");
  const std::string adapters = path("run/step-000001/adapter_model.safetensors"), whole = read_file(adapters);
  write_file_atomically(adapters, whole.substr(0, whole.size() / 2));
  expect_refused("eval --adapter " + run + " --data " + path("data.jsonl"), "truncated");
  write_file_atomically(adapters, "");
  expect_refused("eval --adapter " + run + " --data " + path("data.jsonl"), adapters);
  fs::remove(adapters);
  expect_refused("merge --adapter " + run + " --out " + path("merged"), adapters);
}

}  // namespace
}  // namespace streambp
