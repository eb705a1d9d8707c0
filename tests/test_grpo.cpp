// On-line GRPO: advantages, batches of completions, and runs of train --objective grpo.
#include "tests/commands.h"
#include "training/grpo/rollouts.h"

namespace streambp {
namespace {

TEST(Advantages, AreStandardisedRewards) {
  const std::vector<double> rewards = {1, 0, 0, 2};
  const auto scaled = advantages(rewards, Scaled::yes), plain = advantages(rewards, Scaled::no);
  const double mean = 0.75, deviation = std::sqrt((0.0625 + 2 * 0.5625 + 1.5625) / 3);
  EXPECT_NEAR(plain[0], 0.25, 1e-15);
  EXPECT_NEAR(scaled[3], (2 - mean) / (deviation + 1e-4), 1e-12);
  for (double a : advantages(std::vector<double>(4, 5.0), Scaled::yes)) EXPECT_EQ(a, 0) << "all equally good";
  for (double a : advantages(std::vector<double>(6, 0.1), Scaled::yes)) EXPECT_EQ(a, 0) << "the mean is rounded";
  for (double a : advantages(std::vector<double>{3}, Scaled::yes)) EXPECT_EQ(a, 0) << "nothing to compare with";
  EXPECT_EQ(advantages(std::vector<double>{-1, 1, -1, 1}, Scaled::no), (std::vector<double>{-1, 1, -1, 1}));
}

TEST(Rollouts, HaveALossOnTheCompletionOnly) {
  const std::vector<Rollout> rollouts = {{{5, 6, 7, 8, 9}, 2, 0.5}, {{5, 6, 1}, 2, -1}, {{1, 2, 3, 4}, 1, 2}};
  const auto batches = batches_of(rollouts, 6);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].tokens, (Tokens{5, 6, 7, 8, 5, 6}));
  EXPECT_EQ(batches[0].targets, (Tokens{-1, 7, 8, 9, -1, 1}));
  EXPECT_EQ(batches[0].advantages, (std::vector<double>{0.5, 0.5, 0.5, 0.5, -1, -1}));
  EXPECT_EQ(batches[1].targets, (Tokens{2, 3, 4}));
  EXPECT_EQ(batches[1].key_begin, (Tokens{0, 0, 0}));
  EXPECT_THROW(batches_of(rollouts, 3), Error);
}

TEST(Rollouts, FillAtLeastSoManyBatches) {
  const std::vector<Rollout> rollouts(5, Rollout{{1, 2, 3, 4}, 1, 2});
  for (Index at_least = 1; at_least <= 5; ++at_least) {
    const auto batches = batches_of(rollouts, 9, at_least);  // three fit
    EXPECT_EQ(batches.size(), std::max<std::size_t>(2, static_cast<std::size_t>(at_least)));
    Index tokens = 0;
    for (const Batch& batch : batches) tokens += batch.size();
    EXPECT_EQ(tokens, 15);
  }
  EXPECT_THROW(batches_of(rollouts, 9, 6), Error);
}

class Grpo : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    expect_ok("train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out base");
    expect_ok("examples arithmetic --count 40 --out sums.jsonl");
    // Rewards completions by their number of lower-case letters, regardless of prompts and answers.
    write_file_atomically("letters.sh",
                          "while read -r line; do c=${line#*\\\"completion\\\":\\\"}; c=${c%%\\\"*}; d=$(printf %s "
                          "\"$c\" | tr -cd 'a-z'); echo ${#d}; done\n");
  }
  std::string run(const std::string& name, const std::string& arguments) const {
    return "train --objective grpo --model base --data sums.jsonl --completion 12 --prompts 3 --group 4 --out " + name +
           " " + arguments;
  }
  std::string letters() const { return "--reward-cmd 'sh letters.sh' "; }
};

TEST_F(Grpo, IncreasesTheReward) {
  expect_ok(run("run", letters() + "--rate 1e-2 --steps 45 --eval-every 0"));
  const auto reward = metric("run", "reward");
  ASSERT_EQ(reward.size(), 45u);
  const auto mean = [&](std::size_t from) { return std::accumulate(&reward[from], &reward[from] + 5, 0.0) / 5; };
  EXPECT_GT(mean(40), 2 * mean(0));
  for (const char* what : {"reward_deviation", "length", "entropy", "clip_fraction", "stopped", "without_advantage"}) {
    EXPECT_EQ(metric("run", what).size(), 45u) << what;
  }
  EXPECT_EQ(metric("run", "evaluation_reward").size(), 2u);
  EXPECT_EQ(metric("run", "sampling_difference"), std::vector<double>(45, 0.0)) << "the bits of training";
}

// Sampling reads the weights of a layer from far memory, and so does the reference model, which replaces them for a while.
TEST_F(Grpo, FarMemoryGivesTheSameBits) {
  const std::string arguments = letters() + "--rate 1e-2 --steps 2 --inner 2 --kl 0.1 --eval-every 0 ";
  expect_ok(run("near", arguments));
  expect_ok(run("far", arguments + "--keep far --far ."));
  EXPECT_GT(metric("far", "far_memory")[0], 0);
  expect_same_run("near", "far");
  EXPECT_EQ(metric("near", "sampling_difference"), metric("far", "sampling_difference"));
}

// The samples of a round are recorded as lines from which off-line training takes the same step.
TEST_F(Grpo, OfflineTrainingMatchesOnline) {
  expect_ok(run("online", letters() + "--rate 1e-2 --steps 1 --eval-fraction 0 --temperature 0.7 --top-p 0.9"));
  const std::vector<Json> groups = json_lines("online/completions.jsonl");
  double reward = 0;
  std::string without_logps;
  for (Json json : groups) {
    ASSERT_EQ(json["rewards"].size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      reward += json["rewards"][i].get<double>() / 12;
      EXPECT_EQ(json["completions"][i].size(), json["old_logps"][i].size());
    }
    json.erase("old_logps");
    without_logps += json.dump() + "\n";
  }
  EXPECT_NEAR(metric("online", "reward").at(0), reward, 1e-12);
  EXPECT_EQ(groups.size(), 3u);
  const std::string offline =
      "train --objective grpo --model base --rate 1e-2 --steps 1 --length 512 --eval-fraction 0 --temperature 0.7 "
      "--data ";
  expect_ok(offline + "online/completions.jsonl --out offline");
  // also without old log-probs, because the reference model sampled the tokens
  write_file_atomically("unknown.jsonl", without_logps);
  expect_ok(offline + "unknown.jsonl --out unknown");
  const auto norm = [&](const char* name) { return metric(name, "gradient_norm").at(0); };
  EXPECT_NEAR(norm("offline"), norm("online"), 1e-5 * norm("online"));
  EXPECT_NEAR(norm("unknown"), norm("online"), 1e-5 * norm("online"));
  const SafetensorsFile a("online/step-000001/model.safetensors"), base("base/step-000002/model.safetensors");
  for (const std::string name : {"offline", "unknown"}) {
    const SafetensorsFile b(name + "/step-000001/model.safetensors");
    double difference = 0, moved = 0;
    for (const auto& [tensor, entry] : a.tensors()) {
      const auto x = numbers<float>(entry), y = numbers<float>(b.at(tensor)), begun = numbers<float>(base.at(tensor));
      for (std::size_t i = 0; i < x.size(); ++i) {
        difference += std::abs(double{x[i]} - y[i]), moved += std::abs(double{x[i]} - begun[i]);
      }
    }
    EXPECT_GT(moved, 0);
    EXPECT_LT(difference, 1e-2 * moved) << name;  // AdamW's first step amplifies the signs of small gradients
  }
}

TEST_F(Grpo, OfflineIncreasesTheRewardAndResumesBitForBit) {
  expect_ok("examples groups --count 10 --out groups.jsonl");
  const auto offline = [&](const std::string& options) {
    return "train --objective grpo --model base --data groups.jsonl --rate 3e-3 --steps 6 --length 6000 --pack 6000 "
           "--eval-fraction 0 --kl 0.1 " +
           options;
  };
  expect_ok(offline("--out straight"));
  const auto loss = metric("straight", "loss");  // every step learns all of them
  ASSERT_EQ(loss.size(), 6u);
  EXPECT_NEAR(loss[0], 0, 1e-6) << "advantages of a group cancel";
  EXPECT_LT(loss[5], -0.01);
  EXPECT_NEAR(metric("straight", "kl").at(0), 0, 1e-6);
  EXPECT_EQ(metric("straight", "clip_fraction").size(), 6u);
  expect_ok(offline("--stop-after 2 --mode full --out stopped"));
  expect_ok("train --resume --stop-after 4 --mode checkpoint --out stopped");
  expect_ok("train --resume --out stopped");
  expect_same_run("straight", "stopped");
  expect_ok("verify --objective grpo --model base --data groups.jsonl --length 400");
}

TEST_F(Grpo, OfflineRefusesInvalidData) {
  expect_ok("examples groups --count 30 --out groups.jsonl");
  const std::string groups = "train --model base --data groups.jsonl --out run ";
  expect_refused(groups, "--objective grpo");
  expect_refused(groups + "--objective dpo", "no preferences");
  expect_refused(groups + "--objective grpo --group 4", "--reward-cmd");
  expect_refused(groups + "--objective grpo --length 60", "--too-long what to do with them: truncate or drop");
  expect_refused(groups + "--objective grpo --learn all", "--learn all");
  write_file_atomically("text.jsonl", "{\"text\": \"a\"}\n");
  expect_refused("train --objective grpo --model base --data text.jsonl --out run", "\"rewards\"");
  expect_refused("eval --model base --data groups.jsonl", "groups");
  write_file_atomically("equal.jsonl", "{\"prompt\": \"a\", \"completions\": [\"b\", \"c\"], \"rewards\": [1, 1]}\n");
  expect_refused("train --objective grpo --model base --data equal.jsonl --out run", "so there is nothing to learn");
}

// Several steps per round, clipping, a KL penalty, several micro-batches, and different modes.
TEST_F(Grpo, ResumesBitForBit) {
  const std::string options =
      letters() + "--rate 1e-2 --steps 6 --inner 2 --kl 0.1 --length 70 --temperature 1.5 --top-p 0.95 --top-k 40 ";
  expect_ok(run("straight", options));
  expect_ok(run("stopped", options + "--stop-after 2 --mode full"));
  const std::string resume = "train --resume " + letters() + "--out stopped";
  expect_ok(resume + " --stop-after 4 --mode checkpoint");
  fs::rename("base", "gone");
  expect_refused(resume, "no longer the model");
  fs::rename("gone", "base");
  expect_ok(resume + " --chunk 512");
  expect_same_run("straight", "stopped");
  EXPECT_EQ(read_file("straight/completions.jsonl"), read_file("stopped/completions.jsonl"));
  EXPECT_EQ(metric("straight", "sampling_difference"), std::vector<double>(6, 0.0)) << "at the same temperature";
  const auto kl = metric("straight", "kl");
  ASSERT_EQ(kl.size(), 6u);
  EXPECT_NEAR(kl[0], 0, 1e-6) << "still the reference model";
  EXPECT_GT(kl[5], 1e-4);
  EXPECT_EQ(metric("straight", "clip_fraction")[0], 0) << "on-policy";
  EXPECT_EQ(metric("straight", "clip_fraction")[2], 0) << "on-policy again in the next round";
}

// A run's directory may be published, and come from somebody else.
TEST_F(Grpo, CommandsAreNeitherStoredNorRunFromAFile) {
  const std::string command = "--reward-cmd 'key=secret; while read -r line; do echo ${#line}; done' ";
  expect_ok(run("run", command + "--steps 2 --stop-after 1"), "reward   by the command \"key=secret; while");
  for (const auto& entry : fs::recursive_directory_iterator("run")) {
    EXPECT_FALSE(entry.is_regular_file() && contains(read_file(entry.path()), "secret")) << entry.path();
  }
  const std::string failing = "--reward-cmd='key=secret; read -r line; exit 1' --steps 2";
  expect_failed(run("failed", failing), "secret");
  for (const char* file : {"failed/metrics.jsonl", "failed/report.html"}) {
    EXPECT_PRED2(contains, read_file(file), "--reward-cmd=...");
    EXPECT_PRED2(contains, read_file(file), "\"error\"");
    EXPECT_FALSE(contains(read_file(file), "secret")) << file;
  }
  const std::string resume = "train --resume --out run ";
  expect_refused(resume, "--reward-cmd: the run in run was started with this option, which is not");
  expect_refused(resume + letters(), "--reward-cmd: the run in run was started with another --reward-");

  const fs::path state = state_of("run/step-000001");
  const std::string before = read_file(state);
  Json edited = Json::parse(before);
  EXPECT_EQ(edited["options"]["--reward-cmd"].get<std::string>().size(), 16u);
  // Earlier versions stored a temperature that was not that of completions.
  for (const char* option : {"--top-p", "--top-k"}) edited["options"].erase(option);
  edited["options"]["--temperature"] = 0.5;
  write_sealed_json(state, edited);
  expect_ok(resume + command);
  EXPECT_EQ(Json::parse(read_file(state_of("run/step-000002")))["options"]["--temperature"], 1);
  for (const char* old : {"run/step-000002", "run/training/step-000002"}) fs::remove_all(old);
  edited["options"]["--reward-cmd"] = ": > run-by-a-file; cat";
  write_sealed_json(state, edited);
  expect_refused(resume, "not stored");
  expect_refused(resume + command, "another");
  write_file_atomically(state, before);
  expect_ok(resume + command);
  expect_ok(run("exact", "--reward exact --steps 2 --stop-after 1"));
  expect_refused("train --resume --out exact " + command, "was started without this option; leave it out");
}

TEST_F(Grpo, UsesEveryPromptOncePerEpoch) {
  expect_ok(
      "train --objective grpo --model base --data sums.jsonl --completion 2 --prompts 9 --group 2 --reward exact "
      "--inner 2 --eval-fraction 0 --save-dtype bf16 --out run");  // 40 prompts: 5 rounds
  EXPECT_EQ(metric("run", "reward").size(), 10u);
  const SafetensorsFile narrow("run/step-000010/model.safetensors");
  for (const auto& [name, tensor] : narrow.tensors()) EXPECT_EQ(tensor.dtype, "BF16") << name;
}

TEST_F(Grpo, EqualRewardsChangeNothing) {
  expect_ok(run("run", "--reward-cmd 'while read -r line; do echo 3; done' --rate 1e-2 --steps 6 --inner 1"),
            "in the first round the completions of each prompt have the same reward",
            "in the last 5 rounds the completions of each prompt have the same reward");
  EXPECT_TRUE(read_file("run/step-000006/model.safetensors") == read_file("base/step-000002/model.safetensors"));
}

// Without --completion: 512 tokens, or what the model's context and memory have room for. A resumed run has the same.
TEST_F(Grpo, CompletionsHaveTheRoomThatThereIs) {
  const std::string train =
      "train --objective grpo --model base --prompts 1 --group 2 --reward exact --eval-fraction 0 --data ";
  const char *said = "40 prompts, 1 with 2 completions of up to 54 tokens each in a round",
             *prompt =
                 "{\"answer\": \"\", \"prompt\": \"0123456789012345678901234567890123456789012345678901234567890123\"}";
  expect_ok(train + "sums.jsonl --steps 2 --stop-after 1 --out run", said,
            "completions have up to 54 tokens instead of 512, for lack of room in the model's context");
  expect_ok("train --resume --out run --memory 1GiB", said);
  write_file_atomically("long.jsonl", prompt);
  expect_refused(train + "long.jsonl --out long", "no room for a completion in the model's context of 64 tokens");

  const std::string config = "base/step-000002/config.json";
  Json longer = Json::parse(read_file(config));
  longer["max_position_embeddings"] = 4096;
  write_file_atomically(config, longer.dump());
  expect_ok(train + "sums.jsonl --memory 600KiB --steps 1 --out small", "for lack of room in memory");
  const Index fitting = Json::parse(read_file(state_of("small/step-000001")))["options"]["--completion"];
  EXPECT_GT(fitting, 54);
  const std::string more = "sums.jsonl --memory 600KiB --out more --completion ";
  expect_refused(train + more + std::to_string(fitting + 1), "use more --memory");
}

TEST_F(Grpo, FailingRewardsStopTheRun) {
  for (const auto& [program, said] : {std::pair{"exit 3", "3"},
                                      {"cat > /dev/null; sleep 100", "did not answer"},
                                      {"while read -r line; do echo -1e200; done", "too large to compare"}}) {
    const std::string limit = contains(program, "sleep") ? "--reward-seconds 1 " : "";
    expect_failed(run("run", limit + "--steps 2 --reward-cmd '" + program + "'"), said);
    EXPECT_FALSE(fs::exists("run/step-000002"));
  }  // the next one may have the same --out
  expect_ok(run("run", letters() + "--steps 1"));
  expect_refused(run("run", letters() + "--steps 1"), "holds a run already");
}

TEST_F(Grpo, RefusesInvalidOptions) {
  expect_refused(run("run", ""), "--reward");
  expect_refused(run("run", "--reward exact " + letters()), "one of them");
  expect_refused(run("run", "--reward exact --batch 2"), "--batch");
  expect_refused(run("run", "--reward exact --inner 2 --steps 3"), "multiple");
  expect_refused(run("run", "--reward exact --inner 2 --steps 4 --stop-after 3"), "multiple");
  expect_refused(run("run", "--reward exact --length 10"), "--length");
  expect_refused(run("run", "--reward exact --group 1"), "--group");
  expect_refused(run("run", "--reward exact --kl -1"), "--kl");
  expect_refused(run("run", "--reward exact --temperature 0"), "use one between 0.1 and 10");
  expect_refused(run("run", "--reward exact --top-p 1.5"), "at most 1");
  expect_refused("train --model base --data sums.jsonl --reward exact --out run", "--objective grpo");
  expect_refused("train --objective grpo --reward exact --out run", "--model");
  // A step fits; the keys and values of one completion do not.
  expect_ok(
      "train --steps 1 --hidden 32 --heads 4 --kv-heads 4 --layers 30 --length 64 --batch 1 --sample 0 --out deep");
  expect_refused(
      "train --objective grpo --reward exact --model deep --data sums.jsonl --prompts 1 --group 2 --completion 20000 "
      "--memory 110MiB --steps 1 --out run",
      "sampling a completion brings the run to 153");
  write_file_atomically("bad.jsonl", "{\"prompt\": \"1 + 1 = \", \"answer\": \"2\"}\n{\"prompt\": \"1 + 1 = \"}\n");
  expect_refused("train --objective grpo --reward exact --model base --data bad.jsonl --out run", "bad.jsonl:2: ");
}

}  // namespace
}  // namespace streambp
