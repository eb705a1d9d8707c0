// The command line as a user runs it: its output, files and exit codes, and how it handles misuse.
#include "data/documents/stories.h"
#include "tests/commands.h"

namespace streambp {
namespace {

const std::string kTiny = " --hidden 16 --layers 2 --heads 2 --mlp 32 --length 64 --batch 2 --sample 0 --eval-every 0";

// --- help and misuse ---

TEST_F(Commands, EveryCommandHasHelp) {
  for (const char* command : {"", "train", "verify", "plan", "bench", "tokenize", "eval", "generate", "examples"}) {
    const Outcome outcome = execute(std::string(command) + " --help");
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_TRUE(contains(outcome.output, "streambp " + std::string(*command ? command : "train"))) << outcome.output;
  }
}

TEST_F(Commands, MisuseExitsWith2AndNamesTheRemedy) {
  expect_refused("", "no command is given; streambp --help lists the commands");
  expect_refused("fly me", "\"fly\" is not a command; streambp --help lists the commands");
  expect_refused("--fly", "\"--fly\" is not a command");
  expect_refused("train --wings 2", "--wings");
  expect_refused("train --length many", "--length");
  expect_refused("train --length 0", "--length");
  expect_refused("train --chunk 100" + kTiny, "try 256");
  expect_refused("train --chunk 256 --memory 1GiB" + kTiny, "--chunk");
  expect_refused("train --mode full --chunk 256" + kTiny, "--chunk");
  expect_refused("train --mode sideways", "--mode");
  expect_refused("train --heads 3 --hidden 16", "--hidden");
  expect_refused("train --heads 4 --kv-heads 3 --hidden 16", "kv-heads");
  expect_refused("train --hidden 10 --heads 2", "even");
  expect_refused("train --window 8", "--window");
  expect_refused("plan --family mistral --window 0", "--window");
  expect_refused("verify --objective dpo --length 600 --beta 1e308", "the loss is NaN");
  expect_refused("train --memory 10KiB" + kTiny, "needs at least");
  expect_refused("train --memory lots" + kTiny, "lots");
  // The step fits; the keys and values of the sample do not.
  expect_refused(
      "train --length 20000 --batch 1 --hidden 32 --heads 4 --kv-heads 4 --layers 30 --memory 110MiB --steps 1 --out " +
          path("run"),
      "the sample at the end brings the run to 152");
  expect_refused("train --prompt caf\xe9" + kTiny, "\xe9\" is not UTF-8");
  expect_refused("eval --model model --data caf\xe9.txt", "is not UTF-8");
  expect_refused("train --rate nan", "--rate");
  expect_refused("train --eval-fraction nan", "--eval-fraction");
  expect_refused("train --seed -1", "--seed");
  expect_refused("train --batch 1000000 --length 1000", "--batch");
  expect_refused("plan --hidden 4000000000", "--hidden");
  expect_refused("train --hidden 100000 --layers 200 --heads 400", "are free; use a smaller model");
  expect_refused("train --resume", "--out");
  expect_refused("train --resume --out " + path("nothing"), "no complete checkpoint");
  expect_refused("verify --chunk 64", "64");
  expect_refused("verify --length 4 --documents 3", "--documents");
  expect_refused("verify --chat chatml", "--chat is for --data; leave it out");
  expect_refused("verify --model gpt2 --data x.txt --documents 2", "--documents is for random documents");
  expect_refused("verify --tokens x --documents 2", "--documents is for random documents");
  expect_refused("verify --tokens x --length 100", "--length is for random documents and --data");
  expect_refused("verify --model nowhere", "nowhere");
  expect_refused("verify --model gpt2 --hidden 3", "--hidden");
  expect_refused("plan gpt5", "gpt5");
  expect_refused("plan qwen3-8b --length 100000 --memory 1GiB", "needs at least");
  // The least chunk is 2048 rows in bfloat16; a chunk of 256 would fit.
  expect_refused("plan qwen3-8b --length 100000 --memory 47.3GiB", "needs at least 47.58 GiB");
  expect_refused("plan qwen3-8b --length 100000 --memory 70GiB --chunk 2048", "leave out --chunk");
  expect_refused("plan qwen3-8b --dtype f32 --optimizer adamw-bf16", "bf16");
  for (const char* command : {"plan gpt2", "bench --length 64", "train"}) {
    expect_refused(std::string(command) + " --dtype f32 --grad-dtype f32", "--grad-dtype f32 needs --dtype bf16");
  }
  expect_refused("plan \"\"", "model: the value is empty");
  expect_refused("train --out \"\"", "--out: the value is empty");
  expect_refused("plan qwen3-8b --json " + path("no/such/dir/file.json"), "no/such/dir");
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
  write_file_atomically(path("file"), "");
  for (const std::string command : {"plan qwen3-8b", "verify --length 10000000", "bench --length 10000000"})
    expect_refused(command + " --json " + path("nowhere/x.json"), "there is no directory " + path("nowhere"));
  for (const std::size_t length : {246, 300})  // under its name, or under the temporary one
    expect_refused("plan qwen3-8b --json " + path(std::string(length, 'x')),
                   "File name too long; choose a shorter name");
  expect_refused("bench --json " + dir.string(), "directory");
  expect_refused("verify --json /dev/null", "--json: /dev/null");
  expect_refused("train --out " + path("file") + kTiny, "file: exists and is not a directory");
}

TEST_F(Commands, HelpToAFullDeviceIsAnError) {
  for (const char* arguments : {"--help", "train --help", "--version"}) {
    EXPECT_EQ(execute(std::string(arguments) + " > /dev/full").exit_code, 2) << arguments;
  }
}

// verify prints the fingerprints that tests/test_fingerprints.cpp checks.
TEST_F(Commands, VerifyPrintsTheSameFingerprintOnEveryMachine) {
  const std::string known = read_file(STREAMBP_SOURCE "/tests/golden/fingerprints.txt");
  for (const auto& [family, dtype, objective] : std::initializer_list<std::array<std::string, 3>>{
           {"gpt2", "f32", "sft"}, {"qwen3", "f32", "dpo"}, {"gemma3", "f64", "grpo --kl 0.1"}}) {
    const Outcome outcome = execute("verify --layers 2 --length 400 --family " + family + " --dtype " + dtype +
                                    " --objective " + objective);
    const std::string name = family + " " + dtype + " " + objective.substr(0, objective.find(' ')) + " ";
    ASSERT_TRUE(contains(known, name)) << name;
    const std::string fingerprint = known.substr(known.find(name) + name.size(), 16);
    EXPECT_TRUE(contains(outcome.output, "Fingerprint: " + fingerprint + ", on any CPU.")) << name << outcome.output;
  }
}

TEST_F(Commands, VersionNamesCommitAndDevices) {
  const Outcome outcome = execute("--version");
  EXPECT_EQ(outcome.exit_code, 0);
  for (const char* part : {"streambp ", "commit ", "CPU ", "threads", "GPU "})
    EXPECT_TRUE(contains(outcome.output, part)) << outcome.output;
}

TEST_F(Commands, ErrorsNameUnusableFiles) {
  write_file_atomically(path("empty.txt"), "");
  write_file_atomically(path("short.txt"), "a few bytes");
  write_file_atomically(path("broken.json"), "{\"model_type\": ");
  fs::create_directories(path("model"));
  expect_refused("train --data " + path("missing.txt"), "missing.txt");
  expect_refused("train --data " + dir.string(), "directory");
  expect_refused("train --data " + path("empty.txt"), "empty.txt");
  expect_refused("train --data " + path("short.txt"), "short.txt");
  expect_refused("plan " + path("broken.json"), "broken.json");
  expect_refused("verify --model " + path("model"), "config.json");
  fs::create_directories(path("begun"));
  write_file_atomically(path("begun/run.json"), "{}");
  for (const char* command : {"plan ", "bench --model ", "verify --model ", "eval --data x --model "})
    expect_refused(command + path("begun"), "begun: is a run without a checkpoint yet");
  expect_refused("plan " + std::string(300, 'x'), "is neither the name of a known model");
  expect_refused("train --out " + path("empty.txt") + "/run" + kTiny, "empty.txt");
  expect_refused("train --out /proc/streambp" + kTiny, "/proc/streambp");
}

TEST_F(Commands, DamagedCheckpointsAreRefused) {
  ASSERT_EQ(execute("train --steps 2 --out " + path("run") + kTiny).exit_code, 0);
  const std::string checkpoint = path("run/step-000002");
  const std::string good = read_file(checkpoint + "/model.safetensors");
  auto with_model = [&](const std::string& bytes, const std::string& said) {
    write_file_atomically(checkpoint + "/model.safetensors", bytes);
    expect_refused("verify --length 200 --model " + checkpoint, said);
  };
  with_model(good.substr(0, good.size() / 2), "model.safetensors");
  with_model(good.substr(0, 5), "model.safetensors");
  with_model("", "model.safetensors");
  std::string nan = good;
  const float bad = std::nanf("");
  std::memcpy(nan.data() + nan.size() - 4, &bad, 4);
  with_model(nan, "NaN");
  write_file_atomically(checkpoint + "/model.safetensors", good);
  EXPECT_EQ(execute("verify --length 200 --model " + checkpoint).exit_code, 0);

  const std::string good_config = read_file(checkpoint + "/config.json");
  Json config = Json::parse(good_config);
  config["hidden_size"] = 18;
  write_file_atomically(checkpoint + "/config.json", config.dump());
  expect_refused("verify --length 200 --model " + checkpoint, "shape");

  config["hidden_size"] = 16;
  config["rope_theta"] = 5;
  write_file_atomically(checkpoint + "/config.json", config.dump());
  expect_refused("train --resume --out " + path("run"), "config.json");
  write_file_atomically(checkpoint + "/config.json", good_config);

  const fs::path state_file = state_of(checkpoint);
  const Json state = parse_json_file(state_file);
  Json other_step = state;
  other_step["step"] = 1;
  write_sealed_json(state_file, other_step);
  expect_refused("train --resume --out " + path("run"), "state.json");
  for (const auto& [name, value] : std::vector<std::pair<const char*, Json>>{{"--family", "nope"},
                                                                             {"--heads", 0},
                                                                             {"--length", 0},
                                                                             {"--steps", -5},
                                                                             {"--batch", -1},
                                                                             {"--eval-fraction", 0.9},
                                                                             {"--eval-every", -7},
                                                                             {"--mode", "sideways"},
                                                                             {"--clip", "much"},
                                                                             {"--memory", "lots"}}) {
    Json json = state;
    json["options"][name] = value;
    write_sealed_json(state_file, json);
    expect_refused("train --resume --out " + path("run"), "state.json");
  }
  for (const std::string& bytes : {std::string("{}"), state.dump().substr(0, 20), std::string("[1]")}) {
    write_file_atomically(state_file, bytes);
    expect_refused("train --resume --out " + path("run"), "state.json");
  }
}

// --- verify ---

TEST_F(Commands, VerifyProvesEveryFamilyAndWritesItsTable) {
  for (const char* family : {"gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3"}) {
    const Outcome outcome = execute("verify --length 600 --hidden 32 --layers 2 --dtype f64 --oracle --family " +
                                    std::string(family) + " --json " + path("verify.json"));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "Verified")) << outcome.output;
    const Json json = Json::parse(read_file(path("verify.json")));
    EXPECT_TRUE(json["verified"].get<bool>());
    EXPECT_EQ(json["runs"].size(), 5u);
    for (const Json& r : json["runs"]) {
      EXPECT_LE(r["error"].get<double>(), 1e-10);
      EXPECT_TRUE(r["bits_equal"].get<bool>());
      EXPECT_EQ(r["peak"], r["planned"]);
    }
  }
}

// With equal tokens, attention's gradient vanishes in exact arithmetic: all that float32 has of it is rounding.
TEST_F(Commands, VerifyReportsRoundingAndFailsOnlyBeyondIt) {
  const std::vector<std::int32_t> tokens(300, 3);
  write_file_atomically(path("tokens"), std::string(reinterpret_cast<const char*>(tokens.data()), 4 * tokens.size()));
  for (const char* dtype : {"f32", "f64"}) {
    const Outcome outcome =
        execute("verify --oracle --device cpu --family qwen3 --hidden 32 --layers 2 --vocab 16 --chunk 256 --dtype " +
                std::string(dtype) + " --tokens " + path("tokens"));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "300 tokens in 1 document, 299 targets,")) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "Verified")) << outcome.output;
  }
}

// --- plan and bench ---

TEST_F(Commands, PlanAnswersItsThreeQuestions) {
  const Outcome longest = execute("plan qwen3-8b --accumulate 2 --memory 80GiB --json " + path("longest.json"));
  EXPECT_EQ(longest.exit_code, 0) << longest.output;
  EXPECT_GE(Json::parse(read_file(path("longest.json")))["longest"]["stream"], 150000);
  const Outcome usage = execute("plan llama-3.2-1b --length 30000 --optimizer adamw --json " + path("usage.json"));
  EXPECT_EQ(usage.exit_code, 0) << usage.output;
  const Json modes = Json::parse(read_file(path("usage.json")))["usage"];
  EXPECT_LT(modes["stream"]["peak"], modes["checkpoint"]["peak"]);
  EXPECT_LT(modes["checkpoint"]["peak"], modes["full"]["peak"]);
  EXPECT_EQ(modes["checkpoint"]["flops"], modes["stream"]["flops"]);
  const Outcome positions = execute("plan gpt2 --length 3000");  // more than the model's 1024 positions
  EXPECT_TRUE(contains(positions.output, "3000 tokens, 3 documents of 1000:")) << positions.output;
  const Outcome chunk = execute("plan qwen3-8b --length 100000 --memory 70GiB");
  EXPECT_EQ(chunk.exit_code, 0);
  EXPECT_TRUE(contains(chunk.output, "Largest chunk")) << chunk.output;
  EXPECT_EQ(execute("plan qwen2.5-7b --sweep " + path("sweep.json")).exit_code, 0);
  EXPECT_GT(Json::parse(read_file(path("sweep.json")))["curve"]["stream"].size(), 10u);
}

TEST_F(Commands, BenchPrintsEveryMode) {
  const Outcome outcome =
      execute("bench --family qwen3 --hidden 32 --layers 1 --length 600 --repeat 1 --chunk 256 512 --profile --json " +
              path("bench.json"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  for (const char* part : {"full", "checkpoint", "stream 256", "stream 512", "attention backward"})
    EXPECT_TRUE(contains(outcome.output, part)) << part;
  EXPECT_EQ(Json::parse(read_file(path("bench.json")))["runs"].size(), 4u);
}

TEST_F(Commands, RunDirectoriesAreModels) {
  ASSERT_EQ(execute("train --steps 2 --out " + path("run") + kTiny).exit_code, 0);
  for (const char* command :
       {"plan --length 300 ", "bench --length 300 --repeat 1 --mode stream --model ", "verify --length 300 --model "}) {
    const Outcome outcome = execute(command + path("run"));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_TRUE(contains(outcome.output, "2 layers of width 16")) << outcome.output;
  }
  const Outcome help = execute("bench --help");
  EXPECT_TRUE(contains(help.output, "none: forward and backward only;")) << help.output;
}

// --- train ---

TEST_F(Commands, TrainingLearnsSavesAndSamples) {
  const Outcome outcome = execute(
      "train --hidden 48 --layers 2 --length 128 --steps 40 --eval-every 20 --checkpoint-every 15 --sample 30 --out " +
      path("run"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "A sample")) << outcome.output;
  const auto lines = metrics("run");
  EXPECT_LT(lines.back()["evaluation_loss"], lines.front()["evaluation_loss"].get<double>() - 1.5);
  Index steps = 0;
  for (const Json& line : lines) steps += line.contains("gradient_norm");
  EXPECT_EQ(steps, 40);
  EXPECT_EQ(newest_checkpoint(path("run")), fs::path(path("run/step-000040")));
  EXPECT_TRUE(fs::exists(path("run/training/step-000015/state.json")));
  for (const std::string& name : files()) EXPECT_FALSE(contains(name, ".tmp")) << name;
  expect_refused("train --steps 1 --out " + path("run") + kTiny, "--resume");
}

// All modes and chunks, and a run stopped and resumed in other modes: the same weights and moments, bit for bit.
TEST_F(Commands, ResumedRunsAndOtherModesGiveTheSameBits) {
  const std::string common =
      "train --steps 7 --accumulate 2 --length 210 --batch 3 --hidden 32 --layers 2 --sample 0 --eval-every 3 --family "
      "qwen3 ";
  expect_ok(common + "--out " + path("whole"));
  expect_ok(common + "--mode full --out " + path("full"));
  expect_ok(common + "--chunk 256 --out " + path("small_chunk"));
  expect_ok(common + "--memory 4MiB --out " + path("budget"));
  expect_ok(common + "--stop-after 3 --out " + path("resumed"));
  expect_ok("train --resume --mode checkpoint --stop-after 5 --sample 0 --out " + path("resumed"));
  expect_ok("train --resume --sample 0 --out " + path("resumed"));
  for (const std::string other : {"full", "small_chunk", "budget", "resumed"})
    expect_same_checkpoint(path("whole/step-000007"), path(other + "/step-000007"));
  // each step once in the metrics, with the same loss
  std::vector<Json> whole, resumed;
  for (const Json& line : metrics("whole")) whole.push_back(line.contains("loss") ? line["loss"] : Json());
  for (const Json& line : metrics("resumed")) {
    if (line.contains("loss")) resumed.push_back(line["loss"]);
  }
  whole.erase(std::remove(whole.begin(), whole.end(), Json()), whole.end());
  EXPECT_EQ(whole, resumed);
  expect_refused("train --resume --rate 1 --out " + path("resumed"), "--rate");
}

TEST_F(Commands, ResumingKeepsTheOptionsOfTheRun) {
  const std::string common = "train --steps 6 --hidden 16 --layers 2 --heads 2 --mlp 32 --length 64 --batch 2 ";
  ASSERT_EQ(execute(common +
                    "--sample 0 --eval-every 2 --checkpoint-every 3 --memory 4MiB --dtype auto --stop-after 2 "
                    "--out " +
                    path("run"))
                .exit_code,
            0);
  const Outcome resumed = execute("train --resume --dtype auto --stop-after 5 --out " + path("run"));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_FALSE(contains(resumed.output, "A sample")) << resumed.output;
  EXPECT_TRUE(fs::exists(path("run/step-000003")));
  std::vector<Index> evaluated;
  for (const Json& line : metrics("run")) {
    if (line.contains("evaluation_loss")) evaluated.push_back(line["step"]);
  }
  EXPECT_EQ(evaluated, (std::vector<Index>{0, 2, 4, 5}));
  auto option = [&](const std::string& checkpoint, const char* name) {
    return Json::parse(read_file(path("run/training/" + checkpoint + "/state.json")))["options"][name];
  };
  EXPECT_EQ(option("step-000005", "--memory"), "4MiB");
  // A new --mode or --chunk replaces all three.
  EXPECT_EQ(execute("train --resume --chunk 256 --eval-every 0 --out " + path("run")).exit_code, 0);
  EXPECT_EQ(option("step-000006", "--memory"), "");
  EXPECT_EQ(option("step-000006", "--eval-every"), 0);
  EXPECT_EQ(option("step-000006", "--checkpoint-every"), 3);
}

TEST_F(Commands, ResumingOnADifferentTextIsRefused) {
  write_file_atomically(path("text.txt"), stories(1, 20000));
  ASSERT_EQ(
      execute("train --steps 4 --stop-after 2 --data " + path("text.txt") + " --out " + path("run") + kTiny).exit_code,
      0);
  write_file_atomically(path("text.txt"), stories(2, 20000));
  expect_refused("train --resume --out " + path("run"), "text.txt");
}

TEST_F(Commands, DivergingRunsStopWithARemedy) {
  const Outcome outcome = execute("train --steps 50 --rate 1e30 --warmup 0 --clip 0 --out " + path("run") + kTiny);
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(contains(outcome.output, "Try a lower --rate")) << outcome.output;
  EXPECT_TRUE(newest_checkpoint(path("run")).empty());
  expect_refused("train --steps 2 --out " + path("run") + kTiny, "left no checkpoint");
}

// Metrics of steps after the checkpoint that a run continues from are replaced, not repeated.
TEST_F(Commands, ResumingFromAnEarlierCheckpointRewritesTheMetrics) {
  ASSERT_EQ(execute("train --steps 6 --checkpoint-every 2 --out " + path("run") + kTiny).exit_code, 0);
  const std::string truth = read_file(path("run/step-000006/model.safetensors"));
  fs::remove_all(path("run/step-000006"));
  fs::remove(path("run/training/step-000004/state.json"));  // an incomplete checkpoint is skipped
  ASSERT_EQ(execute("train --resume --sample 0 --out " + path("run")).exit_code, 0);
  EXPECT_TRUE(read_file(path("run/step-000006/model.safetensors")) == truth);
  std::vector<Index> steps;
  for (const Json& line : metrics("run")) {
    if (line.contains("loss")) steps.push_back(line["step"]);
  }
  EXPECT_EQ(steps, (std::vector<Index>{1, 2, 3, 4, 5, 6}));
}

}  // namespace
}  // namespace streambp
