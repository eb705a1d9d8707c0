// Far memory in the commands: the same run near and far, what the planner chooses, and refusals.
#include "tests/commands.h"
#include "training/fit.h"

namespace streambp {
namespace {

class FarCommands : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    if (is_in_memory(dir)) GTEST_SKIP() << dir << " is in memory; set TMPDIR to a directory on a disk";
  }
  static std::string train(const std::string& more, Index length = 600) {
    return "train --hidden 16 --layers 3 --heads 2 --mlp 32 --batch 1 --steps 3 --sample 0 --eval-every 0 --length " +
           std::to_string(length) + " " + more;
  }
};

TEST_F(FarCommands, ARunHasTheSameBitsNearAndFar) {
  expect_ok(train("--out near --keep near"));
  EXPECT_EQ(metric("near", "far_memory"), std::vector<double>({0, 0, 0}));
  for (const std::string keep :
       {"far attention=far --chunk 512", "inputs=far attention=near", "weights=far", "far --mode full"}) {
    fs::remove_all("far");
    expect_ok(train("--out far --far . --keep " + keep), "in a file in .");
    EXPECT_GT(metric("far", "far_memory")[0], 0);
    expect_same_run("near", "far");
  }
}

TEST_F(FarCommands, WhatSavesTimeIsKeptIfThereIsRoom) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  expect_ok(train("--out all"), "kept     layer inputs; everything (a step that keeps inputs only needs ");
  expect_ok(train("--out plain --keep nothing"), "kept     layer inputs\n");
  expect_same_run("all", "plain");
  const double most = metric("all", "memory")[0], least = metric("plain", "memory")[0];
  EXPECT_GT(most, 1.5 * least);
  for (const double memory : {least, (least + most) / 2}) {
    expect_ok(train("--memory " + std::to_string(static_cast<std::size_t>(memory)) + " --out some"));
    EXPECT_LE(metric("some", "memory")[0], memory);
    expect_same_run("all", "some");
    fs::remove_all("some");
  }
  expect_ok(train("--out parts --keep attention=near gate-up=near"), "kept     layer inputs; attention, gate-up (");
  expect_ok(train("--out blocks --keep nothing --block-rows 256 --chunk 256", 900),
            "chunks of 256 rows in blocks of 256\n");
  expect_ok(train("--out whole --keep nothing --block-rows all", 900), "chunks of 512 rows\n");
  expect_same_run("blocks", "whole");
}

// A run stops in one order and resumes in the other.
TEST_F(FarCommands, ARunResumesInBlocks) {
  expect_ok(train("--out whole --block-rows all", 900));
  expect_ok(train("--out mixed --stop-after 1 --block-rows 256", 900));
  expect_ok("train --out mixed --resume --stop-after 2");  // still in blocks
  expect_ok("train --out mixed --resume --block-rows auto --keep auto");
  expect_same_run("whole", "mixed");
}

TEST_F(FarCommands, ARunResumesNearOrFar) {
  for (const char* dtype : {"f32", "bf16 --optimizer adamw-8bit"}) {
    const std::string common = std::string("--dtype ") + dtype + " --out ";
    expect_ok(train(common + "near"));
    fs::create_directory("disk");
    expect_ok(train(common + "mixed --stop-after 1 --keep far --far disk"));
    expect_ok("train --out mixed --resume --stop-after 2 --chunk 256");  // still far
    EXPECT_GT(metric("mixed", "far_memory")[1], 0);
    fs::remove("disk");  // empty, and not needed any more
    expect_ok("train --out mixed --resume --keep near");
    EXPECT_EQ(metric("mixed", "far_memory")[2], 0);
    expect_same_run("near", "mixed");
    fs::remove_all("near"), fs::remove_all("mixed");
  }
}

// Too little near memory for this length, so saved inputs go to far memory, unless that is forbidden.
TEST_F(FarCommands, TrainDecidesByMemory) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  const std::string plan =
      "plan --hidden 16 --layers 3 --heads 2 --mlp 32 --vocab 256 --length 6000 --dtype f32 --optimizer adamw --chunk "
      "256 --keep ";
  expect_ok(plan + "near --json near.json");
  expect_ok(plan + "far --json far.json");
  const auto peak = [](const char* file) -> std::size_t { return parse_json_file(file)["usage"]["stream"]["peak"]; };
  const std::size_t between = (peak("near.json") + peak("far.json")) / 2;
  const std::string run = train("--memory " + std::to_string(between) + " --out ", 6000);
  expect_ok(run + "run", "far      saved layer inputs (");
  EXPECT_LE(metric("run", "memory")[0], static_cast<double>(between));
  expect_refused(run + "refused --keep near", "tokens needs at least");
  expect_refused(run + "refused --far-memory 10KiB", "more --far-memory, or a smaller --length");
}

TEST_F(FarCommands, PlanCountsNearAndFarMemory) {
  if (kSanitized) GTEST_SKIP() << "slow; without sanitizers, it runs";
  const std::string plan = "plan qwen3-8b --accumulate 2 --memory 80GiB ";
  expect_ok(plan + "--json near.json");
  expect_ok(plan + "--far-memory 300GiB --json far.json", "far: saved layer inputs (");
  const Json near = parse_json_file("near.json")["longest"], far = parse_json_file("far.json")["longest"];
  EXPECT_EQ(near["stream"], 162816);
  EXPECT_GE(far["stream"], 1000000);
  EXPECT_GT(far["full"], near["full"]);

  auto usage = [&](const std::string& keep) {
    expect_ok("plan qwen3-8b --length 30000 --optimizer adamw-bf16 --matmul 500 --far-rate 20 --keep " + keep +
              " --json usage.json");
    return parse_json_file("usage.json")["usage"];
  };
  const Json all = usage("inputs=far optimizer=far weights=far gradients=near"), u = all["stream"], full = all["full"];
  const double inputs = 36 * 30000.0 * 4096 * 2, state = 2 * 2.0 * 8190735360;
  EXPECT_NEAR(u["far_by_kind"]["saved layer inputs"], inputs, 1e-3 * inputs);
  EXPECT_NEAR(u["far_by_kind"]["optimizer"], state, 1e-3 * state);
  EXPECT_FALSE(full["far_by_kind"].contains("saved layer inputs"));
  const double layers = 2.0 * 6945767424;  // bytes of their matrices
  EXPECT_NEAR(u["far_by_kind"]["weights"], layers, 1e-3 * layers);
  // The update has the state and the weights there and back, at once. Forward and backward read the weights too.
  EXPECT_NEAR(u["seconds"]["copy_waiting"], (state + layers) / 20e9, 1e-2 * state / 20e9);
  EXPECT_GT(u["seconds"]["copy_beside"], (2.9 * inputs * (1 - 2048.0 / 30000) + 1.9 * layers) / 20e9);
  // Gradients are written once, and read for the norm and for the update. They take the place of saved inputs.
  const Json with_gradients = usage("far")["stream"];
  EXPECT_NEAR(with_gradients["far_by_kind"]["gradients"], layers, 1e-3 * layers);
  const double waiting = (state + 1.5 * layers) / 20e9 + 2 * layers / 20e9;
  EXPECT_NEAR(with_gradients["seconds"]["copy_waiting"], waiting, 1e-2 * waiting);
  const double flops = u["flops"], matmul = u["matmul_flops"], attention = u["attention_flops"], moved = u["moved"];
  EXPECT_GT(attention, 0.1 * flops);
  EXPECT_NEAR(matmul + attention, flops, 0.01 * flops);
  const double compute = matmul / (kEfficiency * 500e12) + attention / 250e12 + moved / (kCopyEfficiency * 2.8e12);
  EXPECT_NEAR(u["seconds"]["compute"], compute, 1e-6);
}

// Only a plan with --memory chooses.
TEST_F(FarCommands, PlanShowsTheFastestStepIfItChoosesOne) {
  const std::string plan =
      "plan --hidden 64 --layers 2 --heads 2 --mlp 128 --vocab 100 --length 3000 --json plan.json ";
  const auto has_fastest = [] { return parse_json_file("plan.json")["usage"].contains("fastest"); };
  expect_ok(plan + "--keep everything --block-rows 2048");
  EXPECT_FALSE(has_fastest());
  expect_ok(plan + "--memory 1GiB");
  EXPECT_TRUE(has_fastest());
  expect_refused(plan + "--curve --memory 1GiB --far-memory 1GiB", "--curve shows near memory");
}

TEST_F(FarCommands, BenchMeasuresBoth) {
  expect_ok(
      "bench --hidden 16 --layers 2 --heads 2 --mlp 32 --vocab 50 --length 600 --mode stream --repeat 1 --keep nothing "
      "inputs=far --json bench.json",
      "stream 512, inputs=far");
  EXPECT_EQ(parse_json_file("bench.json")["runs"][0]["far_memory"], 0);
  EXPECT_GT(parse_json_file("bench.json")["runs"][1]["far_memory"], 0);
}

TEST_F(FarCommands, RefusesMisuse) {
  const std::string run = train("--out run ");
  expect_refused(run + "--keep sideways", "--keep \"sideways\": expected auto, near, far");
  expect_refused(run + "--keep activations=far", "expected auto, near, far");
  expect_refused(run + "--keep weights=", "expected auto, near, far");
  expect_refused("plan qwen3-0.6b --lora 8 --base nf4 --keep weights=far", "weights in 4 bits stay near");
  expect_refused(run + "--mode full --keep inputs=far", "full mode keeps all activations in near memory");
  expect_refused(run + "--keep far --far-memory 1KiB", "more --far-memory");
  expect_refused(run + "--keep far --far-memory nine", "is not an amount of memory");
  expect_refused(run + "--keep far --far-memory 0x10", "is not an amount of memory");
  expect_refused(run + "--keep far --far nowhere", "is not a directory");
  if (is_in_memory("/dev/shm")) {
    expect_outcome(2, execute(run + "--keep far", "TMPDIR=/dev/shm " + binary()),
                   "0 B far are free in a file in /dev/shm, which is in memory");
  }
  expect_refused("plan gpt2 --keep optimizer=far", "has no state");
  expect_refused("plan gpt2 --keep near far", "repeats or contradicts");
  expect_refused("plan gpt2 --keep weights=near weights=far", "repeats or contradicts");
  expect_ok("plan qwen3-0.6b --lora 8 --base nf4 --keep far inputs=near attention=far");
  expect_refused("plan gpt2 --far-memory 1GiB", "give that too");
  if (is_in_memory("/dev/shm")) expect_refused(run + "--far /dev/shm", "is in memory");
  expect_refused("bench --mode full --keep inputs=far", "--keep is for stream mode");
  expect_refused("bench --mode full --chunk 256", "--chunk is for stream mode");
  expect_outcome(1, execute("plan qwen3-8b --length 900000 --memory 80GiB --far-memory 100GiB"), "needs at least");
  expect_refused("bench --keep inputs=middle", "expected auto, near, far, nothing");
  expect_refused("bench --keep attention=near,sideways", "expected auto, near, far, nothing");
  expect_refused("bench --keep weights=far", "leave out the rest");
  expect_refused(run + "--keep keys-values=far", "keys and values stay near");
  expect_refused(run + "--keep auto gate-up=near", "--keep auto decides on everything that is kept; give it alone");
  expect_refused(run + "--keep fast", "(keys-values only near)");
  expect_refused(run + "--keep attention=near attention=far", "repeats or contradicts");
  expect_refused(run + "--keep nothing everything", "repeats or contradicts");
  expect_refused(run + "--mode full --keep attention=near", "is for --mode stream");
  expect_refused(run + "--mode full --block-rows 256", "is for --mode stream");
  expect_refused(run + "--keep nothing attention=near", "repeats or contradicts");
  expect_refused(run + "--keep attention=near nothing", "repeats or contradicts");
  expect_refused(run + "--keep feed-forward-output=near", "the layers of this model have no such part");
  expect_refused(run + "--keep everything --memory 700KiB", "tokens needs at least");
  expect_refused("bench --keep ''", "expected auto, near, far, nothing");
  expect_refused("bench --memory some", "is not an amount of memory");
  expect_refused("plan gpt2 --curve --keep attention=far", "--curve shows near memory");
  for (const char* block : {"0", "-256", "some", "1e3", ""})
    expect_refused(run + "--block-rows " + std::string(block), "--block-rows");
}

}  // namespace
}  // namespace streambp
