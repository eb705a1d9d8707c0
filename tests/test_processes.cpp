// Runs of several processes under mpirun: the bits of one process, resuming on other numbers of ranks, and faults.
#include "tests/processes.h"

namespace streambp {
namespace {

TEST_F(Processes, VerifyProvesThatRanksGiveTheBitsOfOneProcess) {
  const std::string model = "verify --length 700 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --chunk 256 --json ";
  expect_runs(2, model + "ranks.json --sequence-ranks 2 --objective dpo --oracle --dtype f64");
  expect_ok(model + "lanes.json --lanes 2 --objective dpo --dtype f64");
  const Json ranks_json = parse_json_file("ranks.json"), lanes = parse_json_file("lanes.json");
  EXPECT_EQ(ranks_json["verified"], true);
  EXPECT_EQ(ranks_json["runs"][0]["mode"], "one process");
  EXPECT_EQ(ranks_json["fingerprint"], lanes["fingerprint"]);
  expect_runs(4, model + "grid.json --sequence-ranks 2 --dtype bf16 --objective grpo");
  EXPECT_EQ(parse_json_file("grid.json")["verified"], true);
}

TEST_F(Processes, TrainingGivesTheFilesOfOneProcess) {
  const std::string train = "train" + kModelForRanks + "--steps 3 ";
  expect_ok(train + "--accumulate 2 --out one");
  expect_runs(2, train + "--out data");
  expect_same_run("one", "data");
  EXPECT_EQ(metric("one", "evaluation_loss"), metric("data", "evaluation_loss"));
  expect_ok(train + "--accumulate 2 --lanes 2 --out lanes");
  expect_runs(2, train + "--accumulate 2 --sequence-ranks 2 --mode full --out sequence");
  expect_same_run("lanes", "sequence");
  expect_runs(4, train + "--sequence-ranks 2 --mode checkpoint --shard weights --out grid");
  expect_same_run("lanes", "grid");
  if (kSanitized) return;
  expect_ok(train + "--accumulate 8 --out eight");
  expect_runs(8, train + "--out ranks");
  expect_same_run("eight", "ranks");
}

// GPT-2's files hold matrices transposed, and Q, K and V as one tensor. Ranks read and write shards of them.
TEST_F(Processes, OtherOptimizersAndFusedTensorsGiveTheFilesOfOneProcess) {
  const std::string gpt2 = " --family gpt2 --hidden 32 --layers 2 --heads 4 --length 300 --batch 2 --sample 0 ";
  for (const auto& [name, model, shards] : {std::tuple("adamw-8bit", kModelForRanks, std::string()),
                                            {"muon", gpt2 + "--eval-every 0 ", std::string("--shard weights ")}}) {
    const std::string one = std::string("one-") + name, ranks = std::string("ranks-") + name,
                      train = "train" + model + "--steps 3 --dtype bf16 --accumulate 3 --optimizer " + name + " --out ";
    expect_ok(train + one);
    expect_runs(2, train + ranks + " --stop-after 2 " + shards);  // in the last round one rank has no micro-batch
    expect_runs(2, "train --resume " + shards + "--out " + ranks);
    expect_same_run(one, ranks);
  }
}

// Every rank has all of the adapters, whatever happens to the base.
TEST_F(Processes, AdaptersAreTheSameOnAnyRanks) {
  expect_ok("train" + kModelForRanks + "--steps 1 --out base");
  std::string lines;
  for (int i = 0; i < 20; ++i)
    lines += Json{{"prompt", "question"}, {"completion", std::string(30 + 9 * i % 50, 'a')}}.dump() + "\n";
  write_file_atomically("data.jsonl", lines);
  const std::string train = "train --model " + newest_checkpoint("base").string() +
                            " --data data.jsonl --length 300 --lora 3 --train '.*norm.*' --steps 3 --rate 1e-2 ";
  expect_ok(train + "--lanes 2 --accumulate 2 --out one");
  expect_runs(2, train + "--sequence-ranks 2 --accumulate 2 --out sequence");
  expect_runs(2, train + "--lanes 2 --accumulate 2 --shard weights --out shards");
  expect_ok(train + "--base nf4 --optimizer muon --accumulate 2 --out one-nf4");
  expect_runs(2, train + "--base nf4 --optimizer muon --accumulate 2 --out data-nf4");
  for (const auto& [one, run] :
       {std::pair<std::string, std::string>{"one", "sequence"}, {"one", "shards"}, {"one-nf4", "data-nf4"}}) {
    expect_same_checkpoint(one + "/step-000003", run + "/step-000003");
    EXPECT_EQ(metric(one, "gradient_norm"), metric(run, "gradient_norm")) << run;
  }
}

TEST_F(Processes, ARunResumesOnAnotherNumberOfRanks) {
  const std::string train = "train" + kModelForRanks + "--steps 3 ";
  expect_ok(train + "--accumulate 4 --lanes 2 --out whole");
  expect_runs(4, train + "--accumulate 4 --sequence-ranks 2 --stop-after 1 --out run");
  expect_runs(2, "train --resume --stop-after 2 --out run");
  expect_ok("train --resume --out run");
  expect_same_run("whole", "run");
}

// Two ranks; rank 1 gets a signal once there is a checkpoint of step 2. Then the run resumes.
TEST_F(Processes, ARunThatLosesARankOrGetsASignalResumesWithTheSameBits) {
  const std::string train = "train" + kModelForRanks + "--accumulate 2 --steps 100000 --out ";
  for (const std::string signal : {"KILL", "TERM"}) {
    const std::string one = binary() + " " + train + signal + " --checkpoint-every 2";
    const std::string victim = "sh -c '" + one + " & while [ ! -e " + signal +
                               "/step-000002 ]; do sleep 0.01; done; kill -" + signal + " $!; wait $!'";
    const auto begun = std::chrono::steady_clock::now();
    const Outcome outcome = run("-n 1 " + one + " : -n 1 " + victim);
    EXPECT_NE(outcome.exit_code, 0) << outcome;
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(140)) << "hangs: " << outcome;
    EXPECT_EQ(contains(outcome.output, "by a signal; the checkpoint is"), signal == "TERM") << outcome;
    const Index saved = *checkpoint_step(newest_checkpoint(signal).filename().string());
    const std::string stop = " --stop-after " + std::to_string(saved + 4);
    expect_runs(2, "train --resume --out " + signal + stop);
    expect_ok(train + "whole-" + signal + stop);
    expect_same_run("whole-" + signal, signal);
  }
}

// Ranks sample some of the completions each; rank 0 asks for the rewards. Every round has several steps.
TEST_F(Processes, OnlineGrpoGivesTheFilesOfOneProcess) {
  expect_ok("train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out base");
  expect_ok("examples arithmetic --count 20 --out sums.jsonl");
  fs::copy("sums.jsonl", "held.jsonl");
  const std::string reward = "--reward-cmd 'while read -r line; do echo ${#line}; done' ";
  const std::string train =
      "train --objective grpo --model base --data sums.jsonl --completion 6 --prompts 3 --group 4 --steps 4 --inner 2 "
      "--kl 0.1 --rate 1e-2 --eval-every 2 --eval-data held.jsonl " +
      reward;
  expect_ok(train + "--accumulate 2 --out one");
  expect_runs(2, train + "--stop-after 2 --out ranks");
  // Ranks sample at their own pace, so weights stay near.
  expect_runs(2, "train --resume --keep far " + reward + "--out ranks");
  expect_same_run("one", "ranks");
  for (const char* name : {"reward", "evaluation_reward", "kl"}) EXPECT_EQ(metric("one", name), metric("ranks", name));
  for (const std::string link : {"last", "best"})
    EXPECT_EQ(fs::read_symlink("one/" + link), fs::read_symlink("ranks/" + link));
  EXPECT_EQ(read_file("one/completions.jsonl"), read_file("ranks/completions.jsonl"));
  EXPECT_GT(metric("one", "gradient_norm").at(0), 0);
  EXPECT_GT(metric("one", "kl").at(3), 0);
}

TEST_F(Processes, RefusesWhatCannotWork) {
  const std::string train = "train" + kModelForRanks + "--steps 3 --out run ";
  expect_refused_by_ranks(ranks(3) + train + "--sequence-ranks 2", "does not divide the number of processes, 3");
  expect_refused_by_ranks(ranks(2) + train + "--accumulate 1", "too few for 2 token streams");
  expect_refused_by_ranks(ranks(2) + train + "--accumulate 1 --lanes 2", "share streams with --sequence-ranks 2");
  expect_refused_by_ranks(ranks(4) + train + "--sequence-ranks 4", "the key and value heads of each layer; use 1 or 2");
  expect_refused_by_ranks(ranks(2) + train + "--ranks 3", "--ranks 3, but 2 processes were started");
  expect_refused_by_ranks(ranks(2) + "eval --model x --data y", "streambp eval runs in one process");
  expect_refused_by_ranks(ranks(2) + train + "--nonsense", "--nonsense");
  expect_refused_by_ranks("-n 1 " + binary() + " " + train + ": -n 1 " + binary() + " " + train + "--rate 1",
                          "rank 1 has the options");
  expect_refused("verify --ranks 2", "start them with mpirun -n 2");
  expect_refused("verify --sequence-ranks 2", "does not divide");
  expect_refused("verify --shard weights", "--shard weights is for several processes");
}

TEST_F(Processes, AFullDiskEndsAllRanks) {
  // Files of more than 20 KB fail. MPI itself uses larger ones, unless told otherwise.
  const std::string program = "sh -c 'ulimit -f 40; exec " + binary() + " \"$0\" \"$@\"' ";
  const Outcome outcome =
      run("--mca btl tcp,self -x PMIX_MCA_gds=hash -n 2 " + program + "train" + kModelForRanks + "--steps 3 --out run");
  expect_all_fail(outcome, "rank 0: ");
  EXPECT_TRUE(newest_checkpoint("run").empty());
}

}  // namespace
}  // namespace streambp
