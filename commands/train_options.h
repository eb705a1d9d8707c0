// The options of a training run.
#pragma once

#include "commands/chat_options.h"
#include "commands/device_options.h"
#include "commands/grpo_options.h"
#include "commands/memory_options.h"
#include "commands/objective_options.h"
#include "commands/part_options.h"
#include "commands/rank_options.h"
#include "commands/step_progress.h"
#include "data/documents/tokenised.h"
#include "data/files/checkpoint.h"
#include "training/checkpoint_timer.h"

namespace streambp {

constexpr const char* kTrainDescription =
    "Train a language model with exact gradients in little memory: fine-tune a model directory in Hugging Face's "
    "layout, all of it or adapters, or train a model from scratch.\n\n"
    "  streambp train --model Qwen3-0.6B --data chats.jsonl --out tuned\n"
    "  streambp train --model Qwen3-0.6B --data chats.jsonl --lora 32 --out adapters\n"
    "  streambp train --data book.txt --length 4096 --memory 512MiB --out book\n\n"
    "--out gets metrics.jsonl, report.html and checkpoints, each a model directory, or one of adapters as PEFT writes "
    "them. Ctrl-C finishes the step and saves a checkpoint; --out DIR --resume continues with the same bits, in any "
    "mode and with any chunk. Without options it trains a small model on generated stories, in two minutes.";

// In the order of RateSchedule.
inline const std::vector<std::string> kSchedules = {"cosine", "linear", "constant", "wsd"};
// In the order of TooLong.
inline const std::vector<std::string> kTooLong = {"split", "truncate", "drop", "refuse"};

// What fine-tuning takes where no option says otherwise.
struct FineTuning {
  static constexpr double kEpochs = 3, kEpochsOfObjectives = 1;  // of sft; of dpo and grpo
  static constexpr double kObjectives = 0.1;                     // of the rate, for dpo and grpo
  static constexpr Index kWarmup = 20, kWarmupShare = 10;        // steps, but at most one in ten
  static constexpr Index kSteps = 100;                           // of an epoch: what small data is divided into
  static constexpr Index kPack = 4096;                           // tokens, or the share of a step if that is less
  static constexpr Index kFewSteps = 50;                         // in fewer, a run learns little
  static constexpr Index kEvaluations = 10;                      // of a run, at most, and after ten steps at least
  static constexpr double kEvaluating = 0.05;                    // of a run's time, about, at most

  // The rate that learns best falls with a model's width, and of adapters, which begin at zero, more slowly: measured on
  // small models, and near what others use for large ones (docs/log.md).
  static double rate(Index width, bool adapters) {
    const double narrower = 2048.0 / static_cast<double>(width);
    return adapters ? 4e-4 * narrower : 4e-5 * narrower * std::sqrt(narrower);
  }
};

struct TrainOptions {
  OptionTable& table;
  ModelOptions model;
  DeviceOptions device;
  ObjectiveOptions objectives;
  GrpoOptions grpo;
  PartOptions part;
  MemoryOptions budget;
  RankOptions ranks;
  OptimizerSettings optimizer{.rate = 4e-3, .warmup = 20, .steps = 520};
  DataOptions tokens = {.progress = show_progress};

  std::vector<std::string> data, evaluation_data;
  std::string adapter, mode = "stream", out, prompt, too_long = "refuse", learn = "answers", save_dtype = "same",
                       schedule = "cosine";
  Index length = 768, pack = 0, batch = 2, micro_batches = 1, chunk = 512, stop_after = 0, sample_length = 700;
  Index evaluation_interval = 100, stop_when_worse = 0, checkpoint_interval = CheckpointTimer::kByTime;
  double epochs = FineTuning::kEpochs, evaluation_fraction = 0.05, balance = -1;
  std::uint64_t seed = 1;
  bool resume = false, resumed = false, tensorboard = false;
  bool repacked = false;  // resumed from a version that packed documents in another order
  Capacity room = 0;      // how much memory each rank may use

  explicit TrainOptions(OptionTable& table) : table(table) {
    model.add_to(table, "", ModelOptions::Vocabulary::fixed);
    table.add("--model", &model.model,
              "A model directory or a GGUF file to fine-tune; without it a model is trained from scratch");
    device.add_to(table, {"auto", "f32", "bf16"}, DeviceOptions::Optimizers::required);
    objectives.add_to(table);
    grpo.add_to(table);
    part.add_to(table, PartOptions::Of::run);
    table.add("--adapter", &adapter, "Continue the training of these adapters of --model, in PEFT's layout");
    add_data_options();
    add_memory_options();
    ranks.add_to(table);
    add_optimizer_options();
    add_output_options();
    table.can_resume({.kept = {"--mode", "--chunk", "--memory", "--far-memory", "--keep", "--block-rows", "--far",
                               "--reward-seconds", "--tensorboard", "--eval-every", "--stop-when-worse",
                               "--checkpoint-every", "--sample", "--prompt"},
                      .hashed = {"--reward-cmd"},
                      .forgotten = {"--device", "--ranks", "--sequence-ranks", "--shard", "--epochs", "--out",
                                    "--resume", "--stop-after"}});
    table.first_page({"--model", "--data", "--out", "--epochs", "--rate", "--length", "--batch", "--accumulate",
                      "--lora", "--base", "--memory", "--objective", "--resume"});
  }

  // Completes the options, from `state_file` (the checkpoint or run.json of the run to resume) or with the defaults of
  // fine-tuning. Then refuses combinations that make no sense.
  void complete(const std::filesystem::path& state_file) {
    model.model = without_link(local_model(model.model)).string(), adapter = without_link(adapter).string();
    resumed = !state_file.empty();
    if (resumed) {
      restore(state_file);
    } else {
      if (!given("--accumulate")) micro_batches = this_process().count / ranks.sequence_ranks;
      if (ranks.lanes == 0) ranks.lanes = ranks.sequence_ranks;
    }
    auto otherwise = [&](const char* flag, auto& value, auto to) {
      if (!given(flag)) value = to;
    };
    if (!resumed && !fine_tunes()) otherwise("--temperature", grpo.temperature, 0.5);
    if (!resumed && fine_tunes()) {
      otherwise("--batch", batch, 1);
      otherwise("--epochs", epochs,
                objectives.objective == "sft" ? FineTuning::kEpochs : FineTuning::kEpochsOfObjectives);
      otherwise("--decay", optimizer.decay, 0.0);
    }
    optimizer.schedule = static_cast<RateSchedule>(std::ranges::find(kSchedules, schedule) - kSchedules.begin());
    check();
    optimizer.seed = seed, optimizer.blocks = part.block_settings(seed);
    if (fine_tunes()) sample_length = 0;
    if (learn == "all") tokens.learn = Learn::all;
  }

  bool given(const std::string& flag) const { return table.given(flag); }
  // Starts from a model directory; otherwise a model is trained from scratch.
  bool fine_tunes() const { return !model.model.empty(); }
  bool trains_adapters() const { return part.adapters() || !adapter.empty(); }
  Config balanced(Config c) const {
    if (balance < 0) return c;
    require(c.experts > 0 && c.router_kind == RouterKind::softmax, "--balance: ", c.family,
            " has no experts that a softmax chooses; leave it out");
    c.balanced = balance > 0, c.balance_factor = balance;
    return c;
  }
  // Samples completions itself.
  bool online_grpo() const { return objectives.objective == "grpo" && grpo.online(); }

 private:
  void add_data_options() {
    table.section("Data");
    table.add(
        "--data", &data,
        "Files and folders: with --model conversations, prompts with completions or rewards, preferences, texts or "
        "tokens, in the forms that streambp tokenize --help shows; to mix by weight: a.jsonl:0.7 b.jsonl:0.3. From "
        "scratch: one text; its bytes are the tokens (default: generated stories)");
    table.add("--length", &length, "Tokens of a document, with --model at most", checks::between(2, 1 << 24),
              "768; with --model those of the longest, if memory has room for them");
    table.add("--pack", &pack,
              "With --model: tokens that a pack is filled to, in whole documents; a longer document is a "
              "pack alone. A step has --batch x --accumulate packs",
              checks::between(1, 1 << 24), "a hundredth of the data, at most 4096; for grpo 4096");
    table.add("--batch", &batch, "Documents, or packs, per micro-batch, laid end to end in one token stream",
              checks::between(1, 1 << 20), "2; with --model 1");
    table.add("--accumulate", &micro_batches,
              "Micro-batches per step, over all processes; for on-line GRPO the minimum per round",
              checks::between(1, 1 << 12), "1; one per token stream");
    table.add("--eval-fraction", &evaluation_fraction, "Held-out fraction of the data", checks::between(0, 0.5));
    table.add("--eval-data", &evaluation_data,
              "With --model: held-out data in separate files or folders, instead of a fraction of "
              "--data. Every evaluation reads all of it");
    add_chat_options(table, tokens.chat);
    table.add("--learn", &learn, "Tokens in the loss: answers (completions and the assistant's messages) or all",
              checks::one_of({"answers", "all"}));
    table.add("--too-long", &too_long,
              "What to do with documents, pairs and completions that are longer than --length: split (documents only), "
              "truncate or drop them, or refuse to train. Texts (.txt) are always split",
              checks::one_of(kTooLong));
    table.add("--skip-bad", &tokens.skip_bad, "Skip unusable lines instead of stopping at the first");
  }
  void add_memory_options() {
    table.section("Memory");
    table.add("--mode", &mode, "stream, checkpoint or full; the gradient has the same bits in each",
              checks::one_of({"stream", "checkpoint", "full"}));
    table.add("--chunk", &chunk, "Stream mode: rows per chunk, the unit of recomputation", checks::between(1, 1 << 24),
              "512; on a GPU 2048, or up to 8192 for narrow models");
    budget.add_to(table, "Stream mode: memory budget, such as 512MiB; the run takes the fastest step that fits",
                  "what is free");
    budget.add_directory_to(table);
    table.keep_together({"--mode", "--chunk", "--memory"});
  }
  void add_optimizer_options() {
    table.section("Optimization");
    table.add("--steps", &optimizer.steps, "Optimizer steps", checks::between(1, 1 << 30),
              "520; with --model given by --epochs");
    table.add("--epochs", &epochs, "With --model: passes over the data", checks::positive(), "3; for dpo and grpo 1");
    table.add("--rate", &optimizer.rate, "Peak learning rate", checks::not_negative(),
              "0.004; with --model by its width, 4e-05 for 2048 and 1.4e-05 for 4096, of adapters 4e-04 and 2e-04; for "
              "dpo and grpo a tenth");
    table.add("--warmup", &optimizer.warmup, "Steps of linear warm-up", checks::between(0, 1 << 30),
              "20; with --model a tenth of the steps at most");
    table.add("--schedule", &schedule,
              "After the warm-up the rate falls along a cosine or a line, or is constant; wsd: constant, "
              "then linear in the last steps. A constant or wsd run can be resumed with more --steps",
              checks::one_of(kSchedules));
    table.add("--cooldown", &optimizer.cooldown, "Last steps of wsd, in which the rate goes down",
              checks::between(0, 1 << 30), "a fifth of the steps");
    table.add("--final-rate", &optimizer.final_rate_fraction, "Rate at the end, as a fraction of --rate",
              checks::between(0, 1));
    table.add("--decay", &optimizer.decay, "Weight decay of matrices", checks::not_negative(), "0.1; with --model 0");
    table.add("--clip", &optimizer.clip, "Largest global gradient norm; 0: no limit", checks::not_negative());
    table.add("--balance", &balance,
              "Mixtures of experts: weight of the loss that balances their use, such as 0.01; 0: without (default: as "
              "the model's config.json says; of a new model 0)",
              checks::not_negative(), "none");
    table.add("--seed", &seed, "Seed of initial weights, batches and samples");
  }
  void add_output_options() {
    table.section("Output");
    table.add(
        "--out", &out,
        "New or empty directory for metrics.jsonl, report.html and checkpoints, each a directory of a model or of "
        "adapters",
        {}, "out/run-1, run-2, ...");
    table.add("--tensorboard", &tensorboard, "Also write event files for TensorBoard to --out");
    table.add("--save-dtype", &save_dtype, "Type of saved weights; same: as loaded",
              checks::one_of({"same", "f32", "bf16", "f16"}));
    table.add("--eval-every", &evaluation_interval, "Steps between evaluations; 0: only at the end",
              checks::between(0, 1 << 30),
              "100; on documents a tenth of the steps, but at least 10, and so many that evaluations take 5 % of "
              "the time at most");
    table.add("--stop-when-worse", &stop_when_worse,
              "Stop after so many evaluations in a row that are worse than the best one; 0: never",
              checks::between(0, 1 << 30));
    table.add("--checkpoint-every", &checkpoint_interval,
              "Steps between checkpoints, which are then all kept; 0: only at the end. By default the one with "
              "the best held-out loss is kept, too, if saving takes at most 5 % of the time. The links best and "
              "last in --out name it and the newest one",
              checks::between(0, 1 << 30), "about every 10 minutes; the newest two are kept");
    table.add("--resume", &resume,
              "Continue the run in --out from its newest checkpoint, or from the beginning if it has none");
    table.add("--stop-after", &stop_after, "Stop after this step, with a checkpoint, as if interrupted; 0: never",
              checks::between(0, 1 << 30));
    table.add("--sample", &sample_length,
              "From scratch: tokens to sample at the end (and up to 160 for the report after each evaluation); 0: none",
              checks::between(0, 1 << 20));
    table.add("--prompt", &prompt, "Prompt of the sample", {}, "a line of the held-out text");
  }

  void restore(const std::filesystem::path& state_file) {
    const Json state = read_sealed_json(state_file);
    require(state.contains("options"), state_file.string(), ": not the state of a run; is the file complete?");
    Json options = state["options"];
    // What checkpoints of earlier versions do not have.
    const Json usual = {{"--schedule", "cosine"},
                        {"--cooldown", 0},
                        {"--final-rate", 0.1},
                        {"--eval-data", Json::array()},
                        {"--template-arg", Json::array()},
                        {"--top-p", 1.0},
                        {"--top-k", 0},
                        {"--temperature", 0.5},
                        {"--balance", -1.0}};
    if (options.is_object() && !options.contains("--top-p") && options.value("--objective", Json()) == "grpo")
      options["--temperature"] = 1.0;
    if (options.is_object()) options.insert(usual.begin(), usual.end());
    repacked = options.is_object() && !options.contains("--pack");
    if (repacked) options["--pack"] = options.value("--length", Json(0));
    // The rate of the steps so far does not depend on how many follow, unless the cool-down has begun.
    const Json before = options.value("--schedule", Json());
    const bool extends = given("--steps") && (before == "constant" || before == "wsd") && options.contains("--steps") &&
                         options["--steps"].is_number_integer() && options["--steps"] < optimizer.steps;
    if (extends) {
      const Index last_full = options["--steps"].get<Index>() - options.value("--cooldown", Index{0});
      std::string remedy = "next time keep a checkpoint before it, with --checkpoint-every or --stop-after";
      for (const std::filesystem::path& path : complete_checkpoints(out))
        if (*checkpoint_step(path.filename().string()) <= last_full)
          remedy = path.string() + " is from before it: move the later checkpoints away to start from that one";
      require(before != "wsd" || state.value("step", Index{0}) <= last_full, "--steps ", optimizer.steps,
              ": the cool-down of the run in ", out, " began after step ", last_full, ", so it cannot be extended; ",
              remedy);
      options["--steps"] = optimizer.steps;
    }
    table.restore(options, state_file.string(), out);
  }
  void check() const {
    require(batch <= kLongestStream / length, "--batch ", batch, " documents of --length ", length,
            " are more than the ", kLongestStream,
            " tokens that a stream may have; use --accumulate for larger batches");
    require(pack <= length || !given("--pack") || !given("--length"), "--pack ", pack, " is more than --length ",
            length, ", the tokens of a stream; use a larger --length");
    objectives.check();
    check_memory();
    check_data();
    check_grpo();
    check_ranks();
    require(!given("--epochs") || (!given("--steps") && !resume),
            "--epochs sets the number of steps; leave out --steps. A resumed run keeps its steps");
    table.only({"--cooldown"}, schedule == "wsd", " belongs to --schedule wsd");
    table.only({"--final-rate"}, schedule != "constant", " has no meaning with --schedule constant");
  }
  void check_memory() const {
    if (given("--chunk")) check_chunk(chunk, tile_of(device.kind()));
    budget.check();
    require(mode == "stream" || (!given("--chunk") && budget.memory.empty()),
            "--chunk and --memory belong to --mode stream; in ", mode, " mode the chunk is the whole stream");
  }
  void check_data() const {
    if (fine_tunes() && !resumed) model_directory(model.model);
    const auto parts = data_parts(data);
    const auto held_out = data_files(evaluation_data);
    const auto holds_tokens = [](const fs::path& file) {
      return extension_of(file) == ".safetensors" || extension_of(file) == ".bin";
    };
    const bool all_tokens =
        std::ranges::all_of(held_out, holds_tokens) &&
        std::ranges::all_of(parts, [&](const DataPart& part) { return std::ranges::all_of(part.files, holds_tokens); });
    const std::string needs_model = " needs --model DIR, a model to fine-tune";
    table.only({"--chat", "--date", "--template-arg", "--trust-messages", "--learn", "--skip-bad"},
               !all_tokens || !fine_tunes() || data.empty(), " is for text, but this data is already tokenised");
    table.only(PartOptions::kFlags, fine_tunes(), needs_model);
    table.only({"--chat", "--date", "--template-arg", "--trust-messages", "--learn", "--too-long", "--skip-bad",
                "--epochs", "--save-dtype", "--objective", "--pack"},
               fine_tunes(), needs_model);
    table.only(PartOptions::kFlags, adapter.empty(),
               ": the adapters of --adapter already say what is trained; leave it out");
    std::vector<std::string> of_samples = {"--sample", "--prompt"};
    if (objectives.objective != "grpo") of_samples.push_back("--temperature");
    table.only(of_samples, !fine_tunes(),
               " is for models from scratch; sample from a fine-tuned one with streambp generate");
    require(fine_tunes() || adapter.empty(), "--adapter needs --model DIR, the base of the adapters");
    require(fine_tunes() || part.base == "plain", "--base ", part.base, needs_model);
    part.check();
    require(!fine_tunes() || !data.empty(), "--model needs --data FILE to train on");
    table.only({"--eval-data"}, fine_tunes(), needs_model);
    require(evaluation_data.empty() || !given("--eval-fraction"),
            "--eval-data is the held-out data, so none of --data is held out; leave out --eval-fraction");
    require(
        stop_when_worse == 0 || (evaluation_interval > 0 && (evaluation_fraction > 0 || !evaluation_data.empty())),
        "--stop-when-worse needs evaluations during the run: give --eval-data or --eval-fraction, and --eval-every");
    require(fine_tunes() || data.empty() || (parts.size() == 1 && parts[0].files.size() == 1),
            "--data: training from scratch takes only one text, not several files or a directory of them");
    for (const DataPart& part : parts)
      require(
          fine_tunes() || content_type(part.name) == ".txt" || !is_data(part.name), part.name,
          ": is not plain text; name the model to fine-tune on it with --model DIR. (Without one, a model is trained "
          "from scratch on the bytes of a text)");
    require(!fine_tunes() || !model.sizes_given(), "--model already has its sizes; leave out the options of ",
            "models from scratch");
  }
  // Every round begins with sampling, so checkpoints are only possible between rounds.
  void check_grpo() const {
    if (objectives.objective != "grpo") {
      require(!grpo.any_given(), "options such as --group and --reward need --objective grpo");
      return;
    }
    grpo.check();
    if (!online_grpo()) return;
    table.only({"--batch", "--pack", "--learn", "--too-long", "--skip-bad"}, false,
               " has no meaning with --reward or --reward-cmd, where a round is a batch");
    for (const auto& [flag, steps] : {std::pair{"--steps", optimizer.steps},
                                      {"--stop-after", stop_after},
                                      {"--checkpoint-every", std::max<Index>(0, checkpoint_interval)}}) {
      const bool chosen_later = flag == std::string("--steps") && !given(flag) && !resumed;
      require(chosen_later || steps % grpo.inner == 0, flag, " ", steps, " is not a multiple of the ", grpo.inner,
              " --inner steps of a round; a run stops between rounds only");
    }
  }
  void check_ranks() const {
    const Index count = this_process().count, streams = count / ranks.sequence_ranks;
    require(!online_grpo() || ranks.sharded == "state", "--shard weights: GRPO that samples its completions needs all ",
            "weights on every rank; leave it out");
    require(micro_batches >= streams, "--accumulate ", micro_batches, ": a step has ",
            counted(micro_batches, "micro-batch"), ", too few for ", streams, " token streams; start fewer processes",
            ranks.lanes > 1 ? ", or let them share streams with --sequence-ranks " + std::to_string(ranks.lanes) : "");
  }
};

}  // namespace streambp
