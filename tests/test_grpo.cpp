// On-line GRPO: advantages, batches of completions, and runs of train --objective grpo.
#include "../rollouts.cuh"
#include "commands.cuh"

namespace streambp {
namespace {

TEST(Advantages, AreRewardsInUnitsOfTheGroupsDeviation) {
  const std::vector<double> rewards = {1, 0, 0, 2, 5, 5, 5, 5, -1, 1, -1, 1};
  const auto scaled = advantages(rewards, 4, true), plain = advantages(rewards, 4, false);
  const double mean = 0.75, deviation = std::sqrt((0.0625 + 2 * 0.5625 + 1.5625) / 3);
  EXPECT_NEAR(plain[0], 0.25, 1e-15);
  EXPECT_NEAR(scaled[3], (2 - mean) / (deviation + 1e-4), 1e-12);
  for (std::size_t i = 4; i < 8; ++i) EXPECT_EQ(scaled[i], 0) << "all as good as each other";
  EXPECT_EQ(plain[9], 1);
  EXPECT_EQ(plain[10], -1);
  const double tenth = 0.1;  // whose mean is not a tenth, as rounded
  for (double a : advantages({tenth, tenth, tenth, tenth, tenth, tenth}, 6, true)) EXPECT_EQ(a, 0);
}

TEST(Rollouts, AreDocumentsOfWhichTheCompletionIsLearned) {
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

class Grpo : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    expect_ok("train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out " +
              path("base"));
    expect_ok("examples arithmetic --count 40 --out " + path("sums.jsonl"));
    // Rewards completions with many small letters, knowing neither prompts nor answers.
    write_file_atomically(
        path("letters.sh"),
        "while read -r line; do c=${line#*\\\"completion\\\":\\\"}; c=${c%%\\\"*}; d=$(printf %s \"$c\" | tr "
        "-cd 'a-z'); echo ${#d}; done\n");
  }
  void expect_ok(const std::string& arguments) {
    const Outcome outcome = execute(arguments);
    ASSERT_EQ(outcome.exit_code, 0) << arguments << "\n" << outcome.output;
  }
  std::string run(const std::string& name, const std::string& arguments) const {
    return "train --objective grpo --model " + path("base") + " --data " + path("sums.jsonl") +
           " --completion 12 --prompts 3 --group 4 --out " + path(name) + " " + arguments;
  }
  std::string letters() const { return "--reward-cmd 'sh " + path("letters.sh") + "' "; }
  std::vector<double> metric(const std::string& name, const char* what) const {
    std::istringstream lines(read_file(path(name + "/metrics.jsonl")));
    std::vector<double> values;
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      if (json.contains(what)) values.push_back(json[what]);
    }
    return values;
  }
  void expect_equal_models(const std::string& a, const std::string& b) {
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"}) {
      EXPECT_TRUE(read_file(path(a) + "/" + file) == read_file(path(b) + "/" + file)) << a << ", " << b << ": " << file;
    }
  }
};

TEST_F(Grpo, DoesMoreOfWhatIsRewarded) {
  expect_ok(run("run", letters() + "--rate 1e-2 --steps 45 --eval-every 0"));
  const auto reward = metric("run", "reward");
  ASSERT_EQ(reward.size(), 45u);
  const auto mean = [&](std::size_t from) { return std::accumulate(&reward[from], &reward[from] + 5, 0.0) / 5; };
  EXPECT_GT(mean(40), 2 * mean(0));
  for (const char* what : {"reward_deviation", "length", "entropy", "clip_fraction", "stopped", "without_advantage"}) {
    EXPECT_EQ(metric("run", what).size(), 45u) << what;
  }
  EXPECT_EQ(metric("run", "evaluation_reward").size(), 2u);
}

// Several steps a round, clipping, the distance to the starting model, several micro-batches, and other modes.
TEST_F(Grpo, ResumesBitForBit) {
  const std::string options = letters() + "--rate 1e-2 --steps 6 --inner 2 --kl 0.1 --length 70 ";
  expect_ok(run("straight", options));
  expect_ok(run("stopped", options + "--stop-after 2 --mode full"));
  expect_ok("train --resume --stop-after 4 --mode checkpoint --out " + path("stopped"));
  fs::rename(path("base"), path("gone"));
  expect_refused("train --resume --out " + path("stopped"), "not the model any more");
  fs::rename(path("gone"), path("base"));
  expect_ok("train --resume --chunk 512 --out " + path("stopped"));
  expect_equal_models("straight/step-000006", "stopped/step-000006");
  const auto kl = metric("straight", "kl");
  ASSERT_EQ(kl.size(), 6u);
  EXPECT_NEAR(kl[0], 0, 1e-6) << "the starting model itself";
  EXPECT_GT(kl[5], 1e-4);
  EXPECT_EQ(metric("straight", "clip_fraction")[0], 0) << "the policy that sampled";
  EXPECT_EQ(metric("straight", "clip_fraction")[2], 0) << "and again in the next round";
}

TEST_F(Grpo, EveryPromptHasItsTurnInAnEpoch) {
  expect_ok(
      "train --objective grpo --model " + path("base") + " --data " + path("sums.jsonl") +
      " --completion 2 --prompts 9 --group 2 --reward exact --inner 2 --eval-fraction 0 --save-dtype bf16 --out " +
      path("run"));  // 40 prompts: 5 rounds
  EXPECT_EQ(metric("run", "reward").size(), 10u);
  const SafetensorsFile narrow(path("run/step-000010/model.safetensors"));
  for (const auto& [name, tensor] : narrow.tensors()) EXPECT_EQ(tensor.dtype, "BF16") << name;
}

TEST_F(Grpo, EqualRewardsChangeNothing) {
  expect_ok(run("run", "--reward-cmd 'while read -r line; do echo 3; done' --rate 1e-2 --steps 2"));
  EXPECT_TRUE(read_file(path("run/step-000002/model.safetensors")) ==
              read_file(path("base/step-000002/model.safetensors")));
}

TEST_F(Grpo, RewardsThatCannotBeHadStopTheRun) {
  for (const auto& [program, said] : {std::pair{"exit 3", "3"},
                                      {"read -r line; echo maybe", "maybe"},
                                      {"cat > /dev/null; sleep 100", "did not answer"},
                                      {"while read -r line; do echo nan; done", "nan"}}) {
    const Outcome outcome =
        execute(run("run", "--steps 2 --reward-seconds 1 --reward-cmd '" + std::string(program) + "'"));
    EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, said)) << outcome.output;
    EXPECT_FALSE(fs::exists(path("run/step-000002")));
    fs::remove_all(path("run"));
  }
}

TEST_F(Grpo, RefusesWhatMakesNoRun) {
  expect_refused(run("run", ""), "--reward");
  expect_refused(run("run", "--reward exact " + letters()), "one of them");
  expect_refused(run("run", "--reward exact --batch 2"), "--batch");
  expect_refused(run("run", "--reward exact --inner 2 --steps 3"), "multiple");
  expect_refused(run("run", "--reward exact --inner 2 --steps 4 --stop-after 3"), "multiple");
  expect_refused(run("run", "--reward exact --length 10"), "--length");
  expect_refused(run("run", "--reward exact --group 1"), "--group");
  expect_refused(run("run", "--reward exact --kl -1"), "--kl");
  expect_refused(
      "train --model " + path("base") + " --data " + path("sums.jsonl") + " --reward exact --out " + path("run"),
      "--objective grpo");
  expect_refused("train --objective grpo --reward exact --out " + path("run"), "--model");
  write_file_atomically(path("bad.jsonl"),
                        "{\"prompt\": \"1 + 1 = \", \"answer\": \"2\"}\n{\"prompt\": \"1 + 1 = \"}\n");
  expect_refused("train --objective grpo --reward exact --model " + path("base") + " --data " + path("bad.jsonl") +
                     " --out " + path("run"),
                 "bad.jsonl:2: ");
}

}  // namespace
}  // namespace streambp
