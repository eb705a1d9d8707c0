// The command line as a user runs it: its output, files and exit codes, and how it handles misuse.
#include "data/documents/stories.h"
#include "tests/commands.h"

namespace streambp {
namespace {

const std::string kTiny = " --hidden 16 --layers 2 --heads 2 --mlp 32 --length 64 --batch 2 --sample 0 --eval-every 0";

// --- misuse ---

TEST_F(Commands, MisuseExitsWith2AndNamesTheRemedy) {
  expect_refused("", "no command is given; streambp --help lists the commands");
  expect_refused("train --length many", "--length");
  expect_refused("train --length 0", "--length");
  expect_refused("train --chunk 100" + kTiny, "try 256");
  expect_refused("train --mode full --chunk 256" + kTiny, "--chunk");
  expect_refused("train --mode sideways", "--mode");
  expect_refused("train --heads 3 --hidden 16", "--hidden");
  expect_refused("train --heads 4 --kv-heads 3 --hidden 16", "kv-heads");
  expect_refused("train --hidden 10 --heads 2", "even");
  expect_refused("train --window 8", "--window");
  expect_refused("plan --family mistral --window 0", "--window");
  expect_refused("verify --objective dpo --hidden 16 --layers 1 --length 600 --beta 1e308", "the loss is NaN");
  expect_refused("train --memory 10KiB" + kTiny, "needs at least");
  expect_refused("train --memory lots" + kTiny, "lots");
  // The step fits; the keys and values of the sample do not.
  expect_refused(
      "train --length 20000 --batch 1 --hidden 32 --heads 4 --kv-heads 4 --layers 30 --memory 110MiB --steps 1 --out "
      "run",
      "the sample at the end brings the run to 153");
  expect_refused("train --prompt caf\xe9" + kTiny, "\xe9\" is not UTF-8");
  expect_refused("eval --model model --data caf\xe9.txt", "is not UTF-8");
  expect_refused("train --rate nan", "--rate");
  expect_refused("train --eval-fraction nan", "--eval-fraction");
  expect_refused("train --seed -1", "--seed");
  expect_refused("train --batch 1000000 --length 1000", "--batch");
  expect_refused("plan --hidden 4000000000", "--hidden");
  expect_refused("train --hidden 100000 --layers 200 --heads 400", "are free; use a smaller model");
  expect_refused("train --resume", "--out");
  expect_refused("train --resume --out nothing", "no complete checkpoint");
  expect_refused("verify --chunk 64", "64");
  expect_refused("verify --length 4 --documents 3", "--documents");
  expect_refused("verify --chat chatml", "--chat is for --data; leave it out");
  expect_refused("verify --model gpt2 --data x.txt --documents 2", "--documents is for random documents");
  expect_refused("verify --tokens x --documents 2", "--documents is for random documents");
  expect_refused("verify --tokens x --length 100", "--length is for random documents and --data");
  expect_refused("verify --model nowhere", "nowhere");
  expect_refused("verify --model gpt2 --hidden 3", "--hidden");
  expect_refused("plan gpt5", "gpt5");
  expect_refused("plan qwen3-8b --dtype f32 --optimizer adamw-bf16", "bf16");
  for (const char* command : {"plan gpt2", "bench --length 64", "train"}) {
    expect_refused(std::string(command) + " --dtype f32 --grad-dtype f32", "--grad-dtype f32 needs --dtype bf16");
  }
  expect_refused("plan \"\"", "model: the value is empty");
  expect_refused("train --out \"\"", "--out: the value is empty");
  expect_refused("plan qwen3-8b --json no/such/dir/file.json", "no/such/dir");
}

TEST_F(Commands, ValuesOutOfRangeAreRefused) {
  expect_refused("train --seed 18446744073709551616" + kTiny, "--seed");  // 2^64
  expect_refused("train --memory ''" + kTiny, "--memory");
  expect_refused("train --rate inf" + kTiny, "--rate");
  expect_refused("train --eval-every -1" + kTiny, "--eval-every");
  expect_refused("verify --device cpu --tile 100", "--tile");
  expect_refused("plan qwen3-8b --accumulate 5000", "--accumulate");
}

// The error comes before the work.
TEST_F(Commands, UnwritableOutputsAreRefusedBeforeTheWork) {
  write_file_atomically("file", "");
  for (const std::string command : {"plan qwen3-8b", "verify --length 10000000", "bench --length 10000000"})
    expect_refused(command + " --json nowhere/x.json", "there is no directory nowhere");
  for (const std::size_t length : {246, 300})  // under its name, or under the temporary one
    expect_refused("plan qwen3-8b --json " + std::string(length, 'x'), "File name too long; choose a shorter name");
  expect_refused("bench --json " + dir.string(), "directory");
  expect_refused("verify --json /dev/null", "--json: /dev/null");
  expect_refused("train --out file" + kTiny, "file: exists and is not a directory");
}

TEST_F(Commands, HelpToAFullDeviceIsAnError) {
  for (const char* arguments : {"--help", "train --help", "--version"}) {
    expect_failed(std::string(arguments) + " > /dev/full");
  }
}

// verify prints the fingerprints that tests/test_fingerprints.cpp checks.
TEST_F(Commands, VerifyPrintsTheSameFingerprintOnEveryMachine) {
  const std::string known = read_file(STREAMBP_SOURCE "/tests/golden/fingerprints.txt");
  for (const auto& [family, dtype, objective] : std::initializer_list<std::array<std::string, 3>>{
           {"gpt2", "f32", "sft"}, {"qwen3", "f32", "dpo"}, {"gemma3", "f64", "grpo --kl 0.1"}}) {
    const std::string name = family + " " + dtype + " " + objective.substr(0, objective.find(' ')) + " ";
    ASSERT_TRUE(contains(known, name)) << name;
    const std::string fingerprint = known.substr(known.find(name) + name.size(), 16);
    expect_ok("verify --layers 2 --length 400 --family " + family + " --dtype " + dtype + " --objective " + objective,
              "Fingerprint: " + fingerprint + ", on any CPU.");
  }
}

TEST_F(Commands, VersionNamesCommitAndDevices) {
  expect_ok("--version", "streambp ", "commit ", "CPU ", " thread", "GPU ");
  expect_ok("devices", "CPU ", " thread", "of memory free", "GPU ", "MPI ");
}

TEST_F(Commands, ErrorsNameUnusableFiles) {
  write_file_atomically("empty.txt", "");
  write_file_atomically("short.txt", "a few bytes");
  write_file_atomically("broken.json", "{\"model_type\": ");
  fs::create_directories("model");
  expect_refused("train --data missing.txt", "missing.txt");
  expect_refused("train --data " + dir.string(), "directory");
  expect_refused("train --data empty.txt", "empty.txt");
  write_file_atomically("long.txt", "");
  fs::resize_file("long.txt", std::uintmax_t{1} << 40);  // with holes; the 64 GiB that could be read took all memory
  expect_refused("train --data long.txt", "long.txt: has more than", "too many for the memory that is free; split it");
  expect_refused("train --data short.txt", "short.txt");
  expect_refused("plan broken.json", "broken.json");
  expect_refused("verify --model model", "config.json");
  fs::create_directories("begun");
  write_file_atomically("begun/run.json", "{}");
  for (const std::string command : {"plan ", "bench --model ", "verify --model ", "eval --data x --model "})
    expect_refused(command + "begun", "begun: is a run without a checkpoint yet");
  expect_refused("plan " + std::string(300, 'x'), "is neither the name of a known model");
  expect_refused("train --out empty.txt/run" + kTiny, "empty.txt");
  expect_refused("train --out /proc/streambp" + kTiny, "/proc/streambp");
}

TEST_F(Commands, PathsThatNoFileSystemTakesAreNamed) {
  const std::string name(300, 'x');
  for (const std::string command : {"train --data ", "report ", "verify --model ", "train --out "}) {
    const std::string said = expect_refused(command + name, name);
    EXPECT_FALSE(contains(said, "filesystem error")) << said;
  }
  expect_refused("report " + name, name + ": File name too long; check the path");
}

// 1 means that a verification failed.
TEST_F(Commands, ThreadsThatCannotStartAreAnErrorOfTheProgram) {
  expect_outcome(2, shell("OMP_NUM_THREADS=1000000 " + binary() + " --version"), "OMP_NUM_THREADS asks for 1000000");
  const std::string huge = "OMP_NUM_THREADS=200 OMP_STACKSIZE=1000G ";  // more than there are addresses
  expect_outcome(2, shell(huge + binary() + " verify --length 64"), "libgomp: Thread creation failed");
}

TEST_F(Commands, DamagedCheckpointsAreRefused) {
  expect_ok("train --steps 2 --out run" + kTiny);
  const std::string checkpoint = "run/step-000002";
  const std::string good_config = read_file(checkpoint + "/config.json");
  Json config = Json::parse(good_config);
  config["rope_theta"] = 5;
  write_file_atomically(checkpoint + "/config.json", config.dump());
  expect_refused("train --resume --out run", "config.json");
  write_file_atomically(checkpoint + "/config.json", good_config);

  const fs::path state_file = state_of(checkpoint);
  const Json state = parse_json_file(state_file);
  Json other_step = state;
  other_step["step"] = 1;
  write_sealed_json(state_file, other_step);
  expect_refused("train --resume --out run", "state.json");
  const Json wrong = {{"--family", "nope"}, {"--heads", 0},           {"--length", 0},      {"--steps", -5},
                      {"--batch", -1},      {"--eval-fraction", 0.9}, {"--eval-every", -7}, {"--mode", "sideways"},
                      {"--clip", "much"},   {"--memory", "lots"}};
  for (const auto& [name, value] : wrong.items()) {
    Json json = state;
    json["options"][name] = value;
    write_sealed_json(state_file, json);
    expect_refused("train --resume --out run", "state.json");
  }
  for (const std::string& bytes : {std::string("{}"), state.dump().substr(0, 20), std::string("[1]")}) {
    write_file_atomically(state_file, bytes);
    expect_refused("train --resume --out run", "state.json");
  }
}

// --- verify ---

TEST_F(Commands, VerifyWritesItsTable) {
  expect_ok("verify --length 600 --hidden 32 --layers 2 --dtype f64 --oracle --family cohere2 --json verify.json",
            "Verified");
  const Json json = parse_json_file("verify.json");
  EXPECT_TRUE(json["verified"].get<bool>());
  EXPECT_EQ(json["runs"].size(), 5u);
  for (const Json& r : json["runs"]) {
    EXPECT_LE(r["error"].get<double>(), 1e-10);
    EXPECT_TRUE(r["bits_equal"].get<bool>());
    EXPECT_EQ(r["peak"], r["planned"]);
  }
}
// tests/test_walk.cpp has their gradients.
TEST_F(Commands, EveryFamilyHasASmallModel) {
  for (const ModelFamily& family : model_families())
    expect_ok(std::string("plan --length 600 --hidden 32 --layers 2 --family ") + family.name, "2 layers of width 32");
}
// With equal tokens, attention's gradient vanishes in exact arithmetic: all that float32 has of it is rounding.
TEST_F(Commands, VerifyReportsRoundingAndFailsOnlyBeyondIt) {
  const std::vector<std::int32_t> tokens(300, 3);
  write_file_atomically("tokens", std::string(reinterpret_cast<const char*>(tokens.data()), 4 * tokens.size()));
  for (const char* dtype : {"f32", "f64"}) {
    expect_ok("verify --oracle --device cpu --family qwen3 --hidden 32 --layers 2 --vocab 16 --chunk 256 --dtype " +
                  std::string(dtype) + " --tokens tokens",
              "300 tokens in 1 document, 299 targets,", "Verified");
  }
}

// --- plan and bench ---

TEST_F(Commands, PlanAnswersItsThreeQuestions) {
  expect_ok("plan qwen3-8b --accumulate 2 --memory 80GiB --json longest.json");
  EXPECT_GE(parse_json_file("longest.json")["longest"]["stream"], 150000);
  expect_ok("plan llama-3.2-1b --length 30000 --optimizer adamw --json usage.json");
  const Json modes = parse_json_file("usage.json")["usage"];
  EXPECT_LT(modes["stream"]["peak"], modes["checkpoint"]["peak"]);
  EXPECT_LT(modes["checkpoint"]["peak"], modes["full"]["peak"]);
  EXPECT_EQ(modes["checkpoint"]["flops"], modes["stream"]["flops"]);
  expect_ok("plan gpt2 --length 3000", "3000 tokens, 3 documents of 1000:");  // more than the model's 1024 positions
  expect_ok("plan qwen3-8b --length 100000 --memory 70GiB --json fast.json",
            "Fastest in 70.00 GiB: chunks of 2048 rows\nkept beside layer inputs: attention");
  expect_ok("plan qwen3-8b --length 100000 --memory 70GiB --chunk 8192", "Fastest in 70.00 GiB: chunks of 8192 rows");
  const Json steps = parse_json_file("fast.json")["usage"];
  EXPECT_LT(steps["fastest"]["seconds"]["total"], steps["stream"]["seconds"]["total"]);
  expect_ok("plan qwen3-0.6b --length 20000 --curve --json curve.json", "More memory buys a faster step", "everything");
  const Json curve = parse_json_file("curve.json")["curve"];
  for (std::size_t i = 1; i < curve.size(); ++i) {
    EXPECT_GT(curve[i]["peak"], curve[i - 1]["peak"]);
    EXPECT_LE(curve[i]["seconds"], curve[i - 1]["seconds"]);
  }
  EXPECT_GT(curve.size(), 5u);
  expect_ok("plan qwen2.5-7b --sweep sweep.json");
  EXPECT_GT(parse_json_file("sweep.json")["curve"]["stream"].size(), 10u);
}

TEST_F(Commands, BenchPrintsEveryMode) {
  expect_ok(
      "bench --family qwen3 --hidden 32 --layers 1 --length 600 --repeat 1 --chunk 256 512 --profile --json bench.json",
      "full", "checkpoint", "stream 256", "stream 512", "attention backward");
  EXPECT_EQ(parse_json_file("bench.json")["runs"].size(), 4u);
  EXPECT_GT(parse_json_file("bench.json")["attention_rate"], 0);
  expect_ok("plan gpt2 --length 2000 --rates bench.json", "predicted time");
}

// On a GPU, attention has its own rate: twice as many tokens take more than twice as long.
TEST_F(Commands, PlanPredictsWithTheRatesOfTheMachine) {
  const auto seconds = [](const std::string& options) {
    expect_ok("plan qwen3-0.6b --length 65536 --json plan.json " + options);
    return parse_json_file("plan.json")["usage"]["stream"]["seconds"]["total"].get<double>();
  };
  write("rates.json", R"({"matmul_rate": 6e14, "attention_rate": 3e14, "copy_rate": 2.8e12})");
  write("slow.json", R"({"matmul_rate": 6e14, "attention_rate": 1e14})");
  const double assumed = seconds(""), half = seconds("--matmul 300");
  EXPECT_EQ(seconds("--rates rates.json"), assumed);
  EXPECT_GT(half, 1.9 * assumed) << "little of this step is norms and the like";
  EXPECT_LT(half, 2 * assumed);
  EXPECT_GT(seconds("--rates slow.json"), 2 * assumed) << "most of this step is attention";
  write("none.json", "{}");
  expect_refused("plan gpt2 --rates none.json", "none.json: holds no rates; write it with bench --profile --json");
  write("text.json", R"({"matmul_rate": "fast"})");
  expect_refused("plan gpt2 --rates text.json", "text.json: matmul_rate is not a rate");
  expect_refused("plan gpt2 --rates missing.json", "missing.json");
}

TEST_F(Commands, RunDirectoriesAreModels) {
  expect_ok("train --steps 2 --out run" + kTiny);
  for (const std::string command : {"plan --length 300 ", "verify --length 300 --model "})
    expect_ok(command + "run", "2 layers of width 16");
}

// --- train ---

TEST_F(Commands, TrainingLearnsSavesAndSamples) {
  expect_ok(
      "train --hidden 48 --layers 2 --length 128 --steps 40 --eval-every 20 --checkpoint-every 15 --sample 30 --out "
      "run",
      "A sample");
  const auto losses = metric("run", "evaluation_loss");
  EXPECT_LT(losses.back(), losses.front() - 1.5);
  EXPECT_EQ(metric("run", "gradient_norm").size(), 40u);
  EXPECT_EQ(newest_checkpoint("run"), fs::path("run/step-000040"));
  EXPECT_TRUE(fs::exists("run/training/step-000015/state.json"));
  for (const std::string& name : files()) EXPECT_FALSE(contains(name, ".tmp")) << name;
  expect_refused("train --steps 1 --out run" + kTiny, "--resume");
}

// All modes and chunks, and a run stopped and resumed in other modes: the same weights and moments, bit for bit.
TEST_F(Commands, ResumedRunsAndOtherModesGiveTheSameBits) {
  const std::string common =
      "train --steps 7 --accumulate 2 --length 210 --batch 3 --hidden 32 --layers 2 --sample 0 --eval-every 3 --family "
      "qwen3 ";
  expect_ok(common + "--out whole");
  expect_ok(common + "--mode full --out full");
  expect_ok(common + "--chunk 256 --out small_chunk");
  expect_ok(common + "--memory 4MiB --out budget");
  expect_ok(common + "--stop-after 3 --out resumed");
  expect_ok("train --resume --mode checkpoint --stop-after 5 --sample 0 --out resumed");
  expect_ok("train --resume --sample 0 --out resumed");
  for (const char* other : {"full", "small_chunk", "budget", "resumed"}) expect_same_run("whole", other);
  EXPECT_EQ(steps_with("resumed", "loss"), (std::vector<Index>{1, 2, 3, 4, 5, 6, 7}));
  expect_refused("train --resume --rate 1 --out resumed", "--rate");
}

TEST_F(Commands, ResumingKeepsTheOptionsOfTheRun) {
  const std::string common = "train --steps 6 --hidden 16 --layers 2 --heads 2 --mlp 32 --length 64 --batch 2 ";
  expect_ok(common +
            "--sample 0 --eval-every 2 --checkpoint-every 3 --memory 4MiB --dtype auto --stop-after 2 --out run");
  const std::string resumed = expect_ok("train --resume --dtype auto --stop-after 5 --out run");
  EXPECT_FALSE(contains(resumed, "A sample")) << resumed;
  EXPECT_TRUE(fs::exists("run/step-000003"));
  EXPECT_EQ(steps_with("run", "evaluation_loss"), (std::vector<Index>{0, 2, 4, 5}));
  auto option = [&](const std::string& checkpoint, const char* name) {
    return parse_json_file("run/training/" + checkpoint + "/state.json")["options"][name];
  };
  EXPECT_EQ(option("step-000005", "--memory"), "4MiB");
  // A new --mode or --chunk replaces all three.
  expect_ok("train --resume --chunk 256 --eval-every 0 --out run");
  EXPECT_EQ(option("step-000006", "--memory"), "");
  EXPECT_EQ(option("step-000006", "--eval-every"), 0);
  EXPECT_EQ(option("step-000006", "--checkpoint-every"), 3);
}

// With the same warm-up and cool-down, the rate of a constant or wsd run so far does not depend on the number of steps, so
// more steps give the bits of a longer run.
TEST_F(Commands, RunsOfAConstantRateCanBeExtended) {
  const std::string run = "train --warmup 1 --cooldown 2 --schedule wsd" + kTiny;
  expect_ok(run + " --steps 6 --out whole",
            "0.004 after 1 step of warm-up, constant until step 4, then linear to 0.0004 at step 6");
  expect_ok(run + " --steps 5 --stop-after 3 --out part");
  expect_refused("train --resume --out part --steps 4", "--steps 4");
  expect_refused("train --resume --out whole --steps 9", "cool-down", "next time keep a checkpoint before it");
  expect_ok("train --resume --out part --steps 6");
  expect_same_checkpoint("whole/step-000006", "part/step-000006");
  expect_refused("train --resume --out part --steps 9",
                 "part/step-000003 is from before it: move the later checkpoints away to start from that one");
  expect_ok("train --schedule constant --warmup 0 --steps 2 --out constant" + kTiny, "0.004, then constant");
  expect_ok("train --resume --out constant --steps 3");
  EXPECT_TRUE(fs::exists("constant/step-000003"));
  expect_refused("train --schedule constant --final-rate 0.5 --out x" + kTiny, "--final-rate");
  expect_refused("train --cooldown 3 --out x" + kTiny, "belongs to --schedule wsd");
}

TEST_F(Commands, ResumingOnADifferentTextIsRefused) {
  write_file_atomically("text.txt", stories(1, 20000));
  expect_ok("train --steps 4 --stop-after 2 --data text.txt --out run" + kTiny);
  write_file_atomically("text.txt", stories(2, 20000));
  expect_refused("train --resume --out run", "text.txt");
}

TEST_F(Commands, DivergingRunsStopWithARemedy) {
  expect_failed("train --steps 50 --rate 1e30 --warmup 0 --clip 0 --out run" + kTiny, "Try a lower --rate");
  EXPECT_TRUE(newest_checkpoint("run").empty());
  expect_refused("train --steps 2 --out run" + kTiny, "left no checkpoint");
}

}  // namespace
}  // namespace streambp
