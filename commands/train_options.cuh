// The options of a training run: what they are called, what they start as, and which of them a checkpoint brings back.
#pragma once

#include <cmath>

#include "commands/device_options.cuh"
#include "commands/grpo_options.cuh"
#include "commands/objective_options.cuh"
#include "data/documents/tokenised.cuh"
#include "training/run_directory.cuh"

namespace streambp {

struct TrainOptions {
  CLI::App* app = nullptr;
  ModelOptions model;
  DeviceOptions device;
  ObjectiveOptions objectives;
  GroupOptions groups;
  std::vector<std::string> data;
  std::string mode = "stream", memory, out, prompt, too_long = "split", learn = "answers", save_dtype = "same";
  DataOptions tokens;
  Index length = 768, documents = 2, micro_batches = 1, chunk = 512, stop_after = 0, sample_length = 700;
  Index evaluation_interval = 100, checkpoint_interval = CheckpointTimer::kByTime;
  double epochs = 1, evaluation_fraction = 0.05, temperature = 0.5;
  std::uint64_t seed = 1;
  bool resume = false;
  OptimizerSettings optimizer{.rate = 4e-3, .warmup = 20, .steps = 520};

  // On-line GRPO, in rounds of sampling and learning.
  bool rounds() const { return objectives.objective == "grpo" && groups.online(); }

  // A model directory to start from; without one, a model is trained from scratch.
  bool fine_tunes() const { return !model.model.empty(); }
  bool given(const char* name) const { return app->count(name) > 0; }

  void add_to(CLI::App& parent) {
    app = &parent;
    model.add_to(*app, "--model", false);
    app->get_option("--model")->description(
        "A model directory to fine-tune; without it a model is trained from scratch");
    device.add_to(*app, {"auto", "f32", "bf16"}, {"adamw", "adamw-bf16"});
    objectives.add_to(*app);
    groups.add_to(*app);

    group = "Data";
    option(
        "--data", data,
        "What to learn. For --model: .jsonl with messages, prompt and completion, or text, and for dpo prompt, chosen "
        "and rejected, for grpo prompt, completions and rewards, or only prompts; token files; texts. From scratch: a "
        "text, its bytes as tokens (default: stories made by the program)");
    option("--length", length, "Tokens in a document, or with --model in a pack of documents")
        ->check(CLI::Range(2, 1 << 24))
        ->default_str("768; with --model what the data wants and the memory allows");
    option("--batch", documents, "Documents, or packs, in a micro-batch, laid end to end in one token stream")
        ->check(CLI::Range(1, 1 << 20))
        ->default_str("2; with --model 1");
    option("--accumulate", micro_batches, "Micro-batches in a step")->check(CLI::Range(1, 1 << 12));
    option("--eval-fraction", evaluation_fraction, "Part of the data held out for evaluation")
        ->check(CLI::Range(0.0, 0.5));
    option("--chat", tokens.chat, "Layout of conversations, instead of that of the model's template: " + Chat::names());
    option("--learn", learn, "answers: completions and the assistant's turns; all: every token")
        ->check(CLI::IsMember({"answers", "all"}));
    option("--too-long", too_long,
           "What becomes of documents longer than --length; answers that are compared are not split, but refused")
        ->check(CLI::IsMember({"split", "truncate", "refuse"}));
    app->add_flag("--skip-bad", tokens.skip_bad,
                  "Leave out lines that cannot be used, instead of stopping at the first")
        ->group(group);

    group = "Memory";
    option("--mode", mode, "stream, checkpoint or full; the gradient has the same bits in each")
        ->check(CLI::IsMember({"stream", "checkpoint", "full"}));
    CLI::Option* chunk_option = option("--chunk", chunk, "Stream mode: rows whose activations exist at once")
                                    ->default_str("512; on a GPU 2048");
    option("--memory", memory, "Stream mode: budget, such as 512MiB; the largest chunk that fits is used")
        ->default_str("")
        ->excludes(chunk_option);

    group = "Learning";
    option("--steps", optimizer.steps, "Optimizer steps")
        ->check(CLI::Range(1, 1 << 30))
        ->default_str("520; with --model as --epochs says");
    option("--epochs", epochs, "With --model: times that all data is learned")->check(CLI::PositiveNumber);
    option("--rate", optimizer.rate, "Highest learning rate")
        ->check(CLI::NonNegativeNumber)
        ->default_str("0.004; with --model 1e-05, for dpo and grpo 1e-06");
    option("--warmup", optimizer.warmup, "Steps in which the rate rises; a cosine to a tenth follows")
        ->check(CLI::NonNegativeNumber)
        ->default_str("20; with --model a tenth of the steps at most");
    option("--decay", optimizer.decay, "Weight decay of matrices")
        ->check(CLI::NonNegativeNumber)
        ->default_str("0.1; with --model 0");
    option("--clip", optimizer.clip, "Largest global norm of a gradient; 0: any")->check(CLI::NonNegativeNumber);
    option("--seed", seed, "Of initial weights, batches and samples")->check(CLI::NonNegativeNumber);

    group = "Output";
    option("--out", out, "Directory for metrics.jsonl and checkpoints, each a model directory")
        ->default_str("out/run-1, run-2, ...");
    option("--save-dtype", save_dtype, "Type of the weights in model files; same: as they were loaded")
        ->check(CLI::IsMember({"same", "f32", "bf16", "f16"}));
    option("--eval-every", evaluation_interval, "Steps between evaluations; 0: only at the end")
        ->check(CLI::NonNegativeNumber);
    option("--checkpoint-every", checkpoint_interval,
           "Steps between checkpoints, all of which stay; 0: only at the end")
        ->check(CLI::NonNegativeNumber)
        ->default_str("about every 10 minutes; the newest two stay");
    app->add_flag("--resume", resume,
                  "Continue the run in --out from its newest checkpoint, or from the beginning if it has none")
        ->group(group);
    option("--stop-after", stop_after, "Stop after this step, with a checkpoint, as if interrupted; 0: run to the end")
        ->check(CLI::NonNegativeNumber);
    option("--sample", sample_length, "From scratch: tokens to sample at the end; 0: none")
        ->check(CLI::Range(0, 1 << 20));
    option("--prompt", prompt, "What the sample continues")->default_str("a line of the held-out text");
    option("--temperature", temperature, "Of the sample; 0: always the likeliest token")->check(CLI::NonNegativeNumber);
  }

  // The options that decide the bits of a run; mode, chunk and intervals do not.
  template <class F>
  void for_each_lasting(F&& f) {
    f("--model", model.model), f("--family", model.family), f("--hidden", model.hidden), f("--layers", model.layers);
    f("--heads", model.heads), f("--kv-heads", model.kv_heads), f("--head-dim", model.head_dim), f("--mlp", model.mlp);
    f("--window", model.window), f("--tied", model.tied), f("--data", data), f("--length", length);
    f("--batch", documents), f("--accumulate", micro_batches), f("--eval-fraction", evaluation_fraction);
    f("--chat", tokens.chat), f("--learn", learn), f("--too-long", too_long), f("--skip-bad", tokens.skip_bad);
    f("--steps", optimizer.steps), f("--rate", optimizer.rate), f("--warmup", optimizer.warmup);
    f("--decay", optimizer.decay), f("--clip", optimizer.clip), f("--seed", seed), f("--dtype", device.dtype);
    f("--objective", objectives.objective), f("--mean", objectives.mean), f("--preference", objectives.preference);
    f("--beta", objectives.beta), f("--label-smoothing", objectives.label_smoothing), f("--margin", objectives.margin);
    f("--clip-low", objectives.clip_low), f("--clip-high", objectives.clip_high), f("--kl", objectives.kl);
    groups.for_each_lasting(f);
    f("--grad-dtype", device.gradient), f("--optimizer", device.optimizer), f("--save-dtype", save_dtype);
  }

  // From the state.json of a checkpoint, or the run.json of a run without one.
  void restore(const std::string& path) {
    const Json state = parse_json_file(path);
    require(state.is_object() && state.contains("options") && state["options"].is_object(), path,
            ": not the state of a run; is the file complete?");
    for_each_lasting([&](const char* name, auto& value) {
      require(state["options"].contains(name), path, ": the option ", name, " is missing");
      std::decay_t<decltype(value)> stored;
      constexpr bool integer = std::is_integral_v<decltype(stored)> && !std::is_same_v<decltype(stored), bool>;
      require(!integer || state["options"][name].is_number_integer(), path, ": the option ", name,
              " has a value of the wrong type");
      try {
        state["options"][name].get_to(stored);
      } catch (const Json::exception&) {
        fail(path, ": the option ", name, " has a value of the wrong type");
      }
      require(!given(name) || value == stored, name, " ", Json(value).dump(), ": the run in ", out,
              " was started with ", Json(stored).dump(), "; leave the option out, or start a new run");
      value = stored;
    });
  }

  // What --model changes of the defaults.
  void adapt_to_fine_tuning() {
    auto otherwise = [&](const char* name, auto& value, auto to) {
      if (!given(name)) value = to;
    };
    otherwise("--batch", documents, 1);
    otherwise("--rate", optimizer.rate, objectives.objective == "sft" ? 1e-5 : 1e-6);
    otherwise("--decay", optimizer.decay, 0.0);
  }

  // What the options' own checks do not see, also of options that come from a checkpoint.
  void check() const {
    require(0 <= evaluation_fraction && evaluation_fraction <= 0.5, "--eval-fraction must be between 0 and 0.5");
    require(optimizer.warmup >= 0, "--warmup must not be negative");
    for (Index number : {length, documents, micro_batches, optimizer.steps, model.hidden, model.layers, model.heads}) {
      require(number > 0, "a size or count of ", number, " makes no run; is ", out,
              "/step-*/training/state.json damaged?");
    }
    require(documents <= kLongestStream / length, "--batch ", documents, " documents of --length ", length,
            " are more than the ", kLongestStream,
            " tokens that a stream may have; use --accumulate for larger batches");
    for (const auto& [name, value] : {std::pair{"--rate", optimizer.rate},
                                      {"--decay", optimizer.decay},
                                      {"--clip", optimizer.clip},
                                      {"--epochs", epochs},
                                      {"--temperature", temperature}}) {
      require(std::isfinite(value) && value >= 0, name, " must be a finite number and not negative");
    }
    auto one_of = [](const char* name, const std::string& value, std::initializer_list<const char*> choices) {
      require(std::find(choices.begin(), choices.end(), value) != choices.end(), name, " cannot be \"", value, "\"");
    };
    one_of("--learn", learn, {"answers", "all"});
    one_of("--objective", objectives.objective, {"sft", "dpo", "grpo"});
    one_of("--mean", objectives.mean, {"", "tokens", "documents", "length"});
    one_of("--preference", objectives.preference, {"sigmoid", "ipo", "simpo"});
    objectives.check();
    check_groups();
    one_of("--too-long", too_long, {"split", "truncate", "refuse"});
    one_of("--save-dtype", save_dtype, {"same", "f32", "bf16", "f16"});
    one_of("--dtype", device.dtype, {"auto", "f32", "bf16"});
    one_of("--grad-dtype", device.gradient, {"auto", "f32", "bf16"});
    one_of("--optimizer", device.optimizer, {"adamw", "adamw-bf16"});
    require(!given("--epochs") || (!given("--steps") && !resume),
            "--epochs says how many steps there are; leave out --steps, and --resume has the steps of its run");
    const bool all_tokens = std::all_of(data.begin(), data.end(), [](const std::string& name) {
      return fs::path(name).extension() == ".safetensors" || fs::path(name).extension() == ".bin";
    });
    for (const char* name : {"--chat", "--learn", "--skip-bad"}) {
      require(!given(name) || !all_tokens || !fine_tunes() || data.empty(), name,
              " is for texts, and these data are tokens already");
    }
    for (const char* name :
         {"--chat", "--learn", "--too-long", "--skip-bad", "--epochs", "--save-dtype", "--objective"}) {
      require(fine_tunes() || !given(name), name, " goes with --model DIR, a model to fine-tune");
    }
    for (const char* name : {"--sample", "--prompt", "--temperature"}) {
      require(!fine_tunes() || !given(name), name,
              " is for models from scratch; talk to a fine-tuned one with streambp generate");
    }
    require(!fine_tunes() || !data.empty(), "--model needs --data FILE, what it is to learn");
    require(fine_tunes() || data.size() <= 1, "--data: from scratch a model learns one text");
    require(!fine_tunes() || !model.sizes_given(), "--model is a model that has its sizes; leave out the options of ",
            "models from scratch");
  }

  // A round begins from the weights alone, so that checkpoints lie between rounds.
  void check_groups() const {
    if (objectives.objective != "grpo") {
      require(!groups.any_given(), "the options of groups go with --objective grpo");
      return;
    }
    groups.check();
    if (!rounds()) return;
    for (const char* name : {"--accumulate", "--batch", "--learn", "--too-long", "--skip-bad"}) {
      require(!given(name), name, " is not for --reward and --reward-cmd, whose rounds decide");
    }
    for (const auto& [name, steps] : {std::pair{"--steps", optimizer.steps},
                                      {"--stop-after", stop_after},
                                      {"--checkpoint-every", std::max<Index>(0, checkpoint_interval)}}) {
      require(steps % groups.inner == 0 || (name == std::string("--steps") && !given(name) && !resume), name, " ",
              steps, " is not a multiple of the ", groups.inner,
              " --inner steps of a round; a run can only stop between rounds");
    }
  }

 private:
  template <class V>
  CLI::Option* option(const std::string& name, V& value, const std::string& help) {
    return app->add_option(name, value, help)->capture_default_str()->group(group);
  }

  std::string group;
};

}  // namespace streambp
