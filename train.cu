// The story of a run, top to bottom: parse -> plan -> load -> loop { batch, gradient, step } -> save.
//
// With nvcc this file is CUDA; without, it is C++.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>

#include "commands/bench_command.cuh"
#include "commands/device_options.cuh"
#include "commands/eval_command.cuh"
#include "commands/generate_command.cuh"
#include "commands/plan_command.cuh"
#include "commands/tokenize_command.cuh"
#include "commands/verify_command.cuh"
#include "data/checkpoint.cuh"
#include "data/stories.cuh"
#include "data/text.cuh"
#include "generate.cuh"

namespace streambp {

class TrainCommand {
 public:
  explicit TrainCommand(CLI::App& parent) {
    app = parent.add_subcommand(
        "train",
        "Train a language model from scratch, exactly, in little memory.\n\n"
        "Without options: a small Llama on stories that the program makes up, in StreamBP mode, in about a minute on\n"
        "two cores; it samples from the result at the end. With your own text and half a gigabyte:\n\n"
        "  streambp train --data book.txt --length 4096 --memory 512MiB --steps 2000 --out book\n\n"
        "A run leaves metrics.jsonl and checkpoints in its output directory. --out DIR --resume continues it with\n"
        "the same bits as if it had never stopped, in any mode and with any chunk.");
    model.add_to(*app, "", false);
    device.add_to(*app, {"auto", "f32", "bf16"}, {"adamw", "adamw-bf16"});

    group = "Data";
    option("--data", data, "Plain text to learn, its bytes as tokens (default: stories made by the program)");
    option("--length", length, "Tokens in a document")->check(CLI::Range(2, 1 << 24));
    option("--batch", documents, "Documents in a micro-batch, laid end to end in one token stream")
        ->check(CLI::Range(1, 1 << 20));
    option("--accumulate", micro_batches, "Micro-batches in a step")->check(CLI::Range(1, 1 << 20));
    option("--eval-fraction", evaluation_fraction, "Part of the text held out for evaluation")
        ->check(CLI::Range(0.0, 0.5));

    group = "Memory";
    option("--mode", mode, "stream, checkpoint or full; the gradient has the same bits in each")
        ->check(CLI::IsMember({"stream", "checkpoint", "full"}));
    CLI::Option* chunk_option = option("--chunk", chunk, "Stream mode: rows whose activations exist at once")
                                    ->default_str("512; on a GPU 2048");
    option("--memory", memory, "Stream mode: budget, such as 512MiB; the largest chunk that fits is used")
        ->default_str("")
        ->excludes(chunk_option);

    group = "Learning";
    option("--steps", optimizer.steps, "Optimizer steps")->check(CLI::Range(1, 1 << 30));
    option("--rate", optimizer.rate, "Highest learning rate")->check(CLI::NonNegativeNumber);
    option("--warmup", optimizer.warmup, "Steps in which the rate rises; a cosine to a tenth follows")
        ->check(CLI::NonNegativeNumber);
    option("--decay", optimizer.decay, "Weight decay of matrices")->check(CLI::NonNegativeNumber);
    option("--clip", optimizer.clip, "Largest global norm of a gradient; 0: any")->check(CLI::NonNegativeNumber);
    option("--seed", seed, "Of initial weights, batches and samples")->check(CLI::NonNegativeNumber);

    group = "Output";
    option("--out", out, "Directory for metrics.jsonl and checkpoints")->default_str("out/run-1, run-2, ...");
    option("--eval-every", evaluation_interval, "Steps between evaluations; 0: only at the end")
        ->check(CLI::NonNegativeNumber);
    option("--checkpoint-every", checkpoint_interval, "Steps between checkpoints; 0: only at the end")
        ->check(CLI::NonNegativeNumber);
    app->add_flag("--resume", resume, "Continue the run in --out from its newest checkpoint")->group(group);
    option("--stop-after", stop_after, "Stop after this step, with a checkpoint, as if interrupted; 0: run to the end")
        ->check(CLI::NonNegativeNumber);
    option("--sample", sample_length, "Tokens to sample at the end; 0: none")->check(CLI::Range(0, 1 << 20));
    option("--prompt", prompt, "What the sample continues")->default_str("a line of the held-out text");
    option("--temperature", temperature, "Of the sample; 0: always the likeliest token")->check(CLI::NonNegativeNumber);
    app->callback([this] { run(); });
  }

 private:
  using Clock = std::chrono::steady_clock;
  template <class V>
  CLI::Option* option(const std::string& name, V& value, const std::string& help) {
    return app->add_option(name, value, help)->capture_default_str()->group(group);
  }

  void run() {
    const fs::path checkpoint = find_checkpoint();
    if (!checkpoint.empty()) restore_options(checkpoint);
    check_numbers();

    const Text text(data.empty() ? stories(seed, std::size_t{1} << 21) : read_file(data, std::size_t{1} << 36),
                    evaluation_fraction, length, text_name());
    settings = device.settings(configuration(), micro_batches);
    device.dtype = settings.dtype == DType::bf16 ? "bf16" : "f32";  // what "auto" came to belongs to the run
    const Schedule schedule = choose_schedule();
    on_device(device.gpu(), settings, [&]<class Device, class T, class G, class M>() {
      machine_rate = matmul_rate<Device, T>();
      Device dev(capacity<T, G, M>(schedule));
      Trainer<Device, T, G, M> trainer(dev, settings.config, documents * length, settings.optimizer);
      train(trainer, text, schedule, checkpoint);
    });
  }

  template <class Trainer>
  void train(Trainer& trainer, const Text& text, const Schedule& schedule, const fs::path& checkpoint) {
    Index step = 0;
    if (checkpoint.empty()) {
      trainer.initialise(seed);
    } else {
      step = load_checkpoint(checkpoint, text, trainer);
    }
    open_output(step);
    announce(schedule, trainer.dev.arena.capacity(), step);

    if (step == 0) evaluate(trainer, text, schedule, step);
    const Index last = stop_after > 0 ? std::min(stop_after, optimizer.steps) : optimizer.steps;
    start = Clock::now(), first_step = step;
    while (step < last) {
      ++step;
      std::vector<Batch> batches;
      for (Index i = 0; i < micro_batches; ++i) batches.push_back(text.batch(seed, step, i, documents, length));
      trainer.dev.reset_work();
      const auto step_start = Clock::now();
      const StepResult result = trainer.step(batches, schedule, optimizer, step);
      trainer.dev.synchronize();
      report(step, last, result, trainer.dev, std::chrono::duration<double>(Clock::now() - step_start).count());
      const bool at_end = step == last;
      if (at_end || (evaluation_interval > 0 && step % evaluation_interval == 0))
        evaluate(trainer, text, schedule, step);
      if (at_end || (checkpoint_interval > 0 && step % checkpoint_interval == 0)) save(trainer, text, step);
    }
    if (sample_length > 0) sample(trainer, text);
  }

  // --- Before the loop ---

  fs::path find_checkpoint() {
    const fs::path newest = newest_checkpoint(out);
    if (resume) {
      require(!out.empty(), "--resume needs --out DIR, the directory of the run to continue");
      require(!newest.empty(), out, ": no complete checkpoint to resume from; start the run without --resume");
      return newest;
    }
    require(newest.empty(), out, ": holds a run already; continue it with --resume, or give another --out");
    require(out.empty() || !fs::exists(fs::path(out) / "metrics.jsonl"), out,
            ": holds a run that left no checkpoint; remove the directory, or give another --out");
    return {};
  }

  // The options that decide the bits of a run; mode, chunk and intervals do not.
  template <class F>
  void for_each_lasting_option(F&& f) {
    f("--family", model.family), f("--hidden", model.hidden), f("--layers", model.layers), f("--heads", model.heads);
    f("--kv-heads", model.kv_heads), f("--head-dim", model.head_dim), f("--mlp", model.mlp),
        f("--window", model.window);
    f("--tied", model.tied), f("--data", data), f("--length", length), f("--batch", documents);
    f("--accumulate", micro_batches), f("--eval-fraction", evaluation_fraction), f("--steps", optimizer.steps);
    f("--rate", optimizer.rate), f("--warmup", optimizer.warmup), f("--decay", optimizer.decay);
    f("--clip", optimizer.clip), f("--seed", seed);
    f("--dtype", device.dtype), f("--grad-dtype", device.gradient), f("--optimizer", device.optimizer);
  }

  void restore_options(const fs::path& checkpoint) {
    const std::string path = (checkpoint / "state.json").string();
    const Json state = Json::parse(read_file(path), nullptr, false);
    require(!state.is_discarded() && state.is_object() && state.contains("options") && state.contains("step"), path,
            ": not the state of a run; is the file complete?");
    for_each_lasting_option([&](const char* name, auto& value) {
      require(state["options"].contains(name), path, ": the option ", name, " is missing");
      std::decay_t<decltype(value)> stored;
      try {
        state["options"][name].get_to(stored);
      } catch (const Json::exception&) {
        fail(path, ": the option ", name, " has a value of the wrong type");
      }
      require(app->count(name) == 0 || value == stored, name, " ", value, ": the run in ", out, " was started with ",
              stored, "; leave the option out, or start a new run");
      value = stored;
    });
  }

  std::string text_name() const { return data.empty() ? "the program's own stories" : data; }

  // What the options' own checks do not see, also of options that come from a checkpoint.
  void check_numbers() const {
    require(0 <= evaluation_fraction && evaluation_fraction <= 0.5, "--eval-fraction must be between 0 and 0.5");
    require(optimizer.warmup >= 0, "--warmup must not be negative");
    for (Index number : {length, documents, micro_batches, optimizer.steps, model.hidden, model.layers, model.heads}) {
      require(number > 0, "a size or count of ", number, " makes no run; is ", out, "/step-*/state.json damaged?");
    }
    require(documents <= kLongestStream / length, "--batch ", documents, " documents of --length ", length,
            " are more than the ", kLongestStream,
            " tokens that a stream may have; use --accumulate for larger batches");
    for (const auto& [name, value] : {std::pair{"--rate", optimizer.rate},
                                      {"--decay", optimizer.decay},
                                      {"--clip", optimizer.clip},
                                      {"--temperature", temperature}}) {
      require(std::isfinite(value) && value >= 0, name, " must be a finite number and not negative");
    }
  }

  Config configuration() const {
    ModelOptions options = model;
    options.vocab = Text::kVocabulary;
    return options.config(length);
  }

  Schedule choose_schedule() {
    const Index rows = documents * length;
    const Mode chosen = mode == "full" ? Mode::full : mode == "checkpoint" ? Mode::checkpoint : Mode::stream;
    require(chosen == Mode::stream || (app->count("--chunk") == 0 && memory.empty()),
            "--chunk and --memory belong to --mode stream; ", mode, " mode has the whole stream as its chunk");
    if (app->count("--chunk") == 0) chunk = std::max<Index>(settings.tile, 512);
    if (!memory.empty()) {
      const std::size_t budget = parse_bytes(memory);
      chunk = chunk_for_budget(settings, rows, budget);
      require(chunk > 0, "a step needs at least ",
              human_bytes(plan(settings, rows, schedule_of(chosen, settings.tile)).peak), ", more than --memory ",
              memory, "; give more, or a smaller --batch, --length or model");
    }
    check_chunk(chunk, settings.tile);
    const Schedule schedule = schedule_of(chosen, chunk);
    require_room(settings, chosen, rows, chunk, plan(settings, rows, schedule).peak, free_memory(device.gpu()));
    return schedule;
  }

  Schedule schedule_of(Mode mode, Index chunk) const {
    return schedule_for(mode, settings.config, documents * length, chunk, settings.tile);
  }

  // What the run will allocate: a step, an evaluation and a sample, each run on the Plan device.
  template <class T, class G, class M>
  std::size_t capacity(const Schedule& schedule) const {
    Plan dev;
    Trainer<Plan, T, G, M> trainer(dev, settings.config, documents * length, settings.optimizer);
    trainer.plan_step(micro_batches, schedule, settings.optimizer);
    trainer.plan_evaluation(schedule);
    if (sample_length > 0) Generator<Plan, T>(dev, trainer.model, 1, length, kTile).plan();
    return dev.arena.peak();
  }

  template <class Trainer>
  Index load_checkpoint(const fs::path& checkpoint, const Text& text, Trainer& trainer) {
    const Json json = Json::parse(read_file(checkpoint / "state.json"), nullptr, false);
    const Fields state(json, (checkpoint / "state.json").string());
    require(state.get<std::string>("text") == text.fingerprint(), text_name(),
            ": the text has changed since the run in ", out, " began; bring the old text back, or start a new run");
    require(config_to_json(read_config(checkpoint)) == config_to_json(trainer.model.config),
            (checkpoint / "config.json").string(), ": is not the model that ", state.file, " describes");
    load_model(trainer.dev, checkpoint, trainer.model);
    const SafetensorsFile moments(checkpoint / "optimizer.safetensors");
    for_each_optimizer_table(trainer.model.config, trainer.optimizer, [&](const char* prefix, const auto& tensors) {
      read_tensors(trainer.dev, moments, prefix, tensors);
    });
    const Index step = state.get<Index>("step");
    require(checkpoint.filename() == checkpoint_name(step) && step <= optimizer.steps, state.file, ": step ", step,
            " does not belong to this checkpoint; the file is damaged, use an earlier checkpoint");
    return step;
  }

  // A run's directory, and its metrics up to the step it continues from.
  void open_output(Index step) {
    for (Index i = 1; out.empty(); ++i) {
      const fs::path candidate = fs::path("out") / ("run-" + std::to_string(i));
      if (!fs::exists(candidate)) out = candidate.string();
    }
    std::error_code error;
    fs::create_directories(out, error);
    require(!error, out, ": cannot create the output directory: ", error.message(), "; give another --out");
    const fs::path path = fs::path(out) / "metrics.jsonl";
    std::string kept;
    if (step > 0 && fs::exists(path)) {
      std::istringstream lines(read_file(path));
      for (std::string line; std::getline(lines, line);) {
        const Json json = Json::parse(line, nullptr, false);
        if (json.is_object() && json.contains("step") && json["step"].is_number() && json["step"] <= step)
          kept += line + "\n";
      }
    }
    write_file_atomically(path, kept);
    metrics.open(path, std::ios::app);
  }

  void announce(const Schedule& schedule, std::size_t capacity, Index step) const {
    const std::string chunked = mode == "stream" ? format(", chunks of %ld rows", schedule.chunk) : "";
    std::printf("model    %s\n", describe(settings.config).c_str());
    std::printf("data     %s: %ld x %ld tokens x %ld micro-batches a step\n", data.empty() ? "stories" : data.c_str(),
                documents, length, micro_batches);
    std::printf("memory   %s, planned: mode %s%s\n", human_bytes(capacity).c_str(), mode.c_str(), chunked.c_str());
    std::printf("machine  %s, %s, matmul at %.0f GFLOP/s\n", device_name(device.gpu()).c_str(), name(settings.dtype),
                machine_rate / 1e9);
    std::printf("output   %s%s\n\n", out.c_str(), step > 0 ? format(", resumed after step %ld", step).c_str() : "");
    std::fflush(stdout);
  }

  // --- In the loop ---

  void write_metrics(const Json& line) {
    metrics << line.dump() << "\n" << std::flush;
    require(metrics.good(), out, "/metrics.jsonl: cannot write: ", std::strerror(errno));
  }

  void report(Index step, Index last, const StepResult& result, const DeviceBase& dev, double seconds) {
    const double tokens_per_second = static_cast<double>(micro_batches * documents * length) / seconds;
    const double utilisation = dev.flops() / seconds / machine_rate;
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    const double left = elapsed / static_cast<double>(step - first_step) * static_cast<double>(last - step);
    write_metrics({{"step", step},
                   {"loss", result.loss},
                   {"gradient_norm", result.gradient_norm},
                   {"rate", learning_rate(optimizer, step)},
                   {"tokens_per_second", tokens_per_second},
                   {"utilisation", utilisation},
                   {"memory", dev.arena.peak()},
                   {"seconds", seconds}});
    // A terminal shows every step on one line; a file gets a line now and then.
    const bool terminal = isatty(STDOUT_FILENO);
    const Index interval = std::max<Index>(1, (last - first_step) / 20);
    const bool lasting = step == last || step % interval == 0;
    if (!terminal && !lasting) return;
    std::printf("%s%*ld/%ld  loss %.4f  norm %.2f  %s tok/s  %2.0f%% matmul  %s  %ld:%02ld left%s",
                terminal ? "\r\033[K" : "", static_cast<int>(std::to_string(last).size()), step, last, result.loss,
                result.gradient_norm, human_count(tokens_per_second).c_str(), 100 * utilisation,
                human_bytes(dev.arena.peak()).c_str(), static_cast<Index>(left) / 60, static_cast<Index>(left) % 60,
                lasting ? "\n" : "");
    std::fflush(stdout);
  }

  // The held-out loss, and how it falls along a document: a model that uses its context does better late than early.
  template <class Trainer>
  void evaluate(Trainer& trainer, const Text& text, const Schedule& schedule, Index step) {
    if (evaluation_fraction == 0) return;
    double loss = 0, halves[2] = {0, 0};
    Index count = 0, counts[2] = {0, 0};
    constexpr Index batches = 8;
    for (Index i = 0; i < batches; ++i) {
      const Batch batch = text.evaluation_batch(i, batches, documents, length);
      trainer.evaluate(batch, schedule);
      const auto logp = trainer.log_probabilities();
      for (std::size_t t = 0; t < logp.size(); ++t) {
        const double token_loss = -static_cast<double>(logp[t]);
        const int half = batch.positions[t] >= length / 2;
        loss += token_loss, ++count;
        halves[half] += token_loss, ++counts[half];
      }
    }
    loss /= static_cast<double>(count);
    for (int half : {0, 1}) halves[half] /= static_cast<double>(counts[half]);
    write_metrics({{"step", step}, {"evaluation_loss", loss}, {"first_half", halves[0]}, {"second_half", halves[1]}});
    std::printf("%safter step %ld: held-out loss %.4f (documents' first half %.4f, second %.4f)\n",
                isatty(STDOUT_FILENO) ? "\r\033[K" : "", step, loss, halves[0], halves[1]);
    std::fflush(stdout);
  }

  template <class Trainer>
  void save(Trainer& trainer, const Text& text, Index step) {
    Json state;
    state["step"] = step;
    state["text"] = text.fingerprint();
    for_each_lasting_option([&](const char* name, auto& value) { state["options"][name] = value; });
    save_checkpoint(trainer.dev, out, trainer.model, trainer.optimizer, state);
    if (step == optimizer.steps || step == stop_after) {
      std::printf("saved    %s\n", (fs::path(out) / checkpoint_name(step)).c_str());
    }
  }

  // --- After the loop ---

  template <class Device, class T, class G, class M>
  void sample(Trainer<Device, T, G, M>& trainer, const Text& text) {
    if (prompt.empty()) prompt = text.prompt();
    const Index room = length - 1;
    const std::string begin = prompt.substr(0, static_cast<std::size_t>(room));
    Tokens tokens;
    std::string shown;
    for (unsigned char byte : begin) tokens.push_back(byte), shown += static_cast<char>(printable(byte));
    std::printf("\nA sample, continuing \"%s\":\n\n%s", shown.c_str(), shown.c_str());
    Generator<Device, T> generator(trainer.dev, trainer.model, 1, length, kTile);
    GenerationSettings settings{{.temperature = temperature, .seed = seed}};
    settings.length = std::min(sample_length, length - static_cast<Index>(begin.size()));
    generate(generator, {tokens}, settings, [](std::size_t, const Continuation& text) {
      std::printf("%c", printable(text.tokens.back()));
      std::fflush(stdout);
    });
    std::printf("\n");
  }

  // Single bytes make no valid UTF-8, and control characters would command the terminal.
  static int printable(std::int32_t token) {
    return (32 <= token && token < 127) || token == '\n' || token == '\t' ? token : '?';
  }

  CLI::App* app;
  std::string group;
  ModelOptions model;
  DeviceOptions device;
  StepSettings settings;
  std::string data, mode = "stream", memory, out, prompt;
  Index length = 768, documents = 2, micro_batches = 1, chunk = 512, stop_after = 0, sample_length = 700;
  Index evaluation_interval = 100, checkpoint_interval = 0;
  double evaluation_fraction = 0.05, temperature = 0.5;
  std::uint64_t seed = 1;
  bool resume = false;
  OptimizerSettings optimizer{.rate = 4e-3, .warmup = 20, .steps = 520};

  std::ofstream metrics;
  double machine_rate = 0;
  Clock::time_point start;
  Index first_step = 0;
};

}  // namespace streambp

int main(int argc, char** argv) {
  using namespace streambp;
  CLI::App app{
      "streambp: exact backpropagation of long sequences in little memory.\n\n"
      "  streambp train           train a model (without options: a small one, in about a minute)\n"
      "  streambp verify          prove that the gradient is the full-memory gradient, bit for bit\n"
      "  streambp plan MODEL      tell the memory and work of a training step at any length\n"
      "  streambp bench           measure the speed of a training step\n"
      "  streambp tokenize        turn data into the tokens that a model is trained on\n"
      "  streambp eval            measure a model's loss on documents, and by position in them\n"
      "  streambp generate        let a model continue prompts, or talk with it\n\n"
      "Each has a --help of its own. Exit codes: 0 done, 1 a verification failed, 2 something to mend."};
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  TrainCommand train(app);
  VerifyCommand verify(app);
  PlanCommand plan(app);
  BenchCommand bench(app);
  TokenizeCommand tokenize(app);
  EvalCommand eval(app);
  GenerateCommand generate(app);
  for (CLI::App* command : app.get_subcommands({})) command->group("");  // the text above lists them
  try {
    app.parse(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) fail("cannot write to standard output; is the disk full?");
    return verify.failed() ? 1 : 0;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    std::cerr << "streambp: " << e.what() << "\nSee " << (argc > 1 ? "streambp " + std::string(argv[1]) : "streambp")
              << " --help\n";
  } catch (const std::bad_alloc&) {
    std::cerr << "streambp: out of host memory\n";
  } catch (const std::exception& e) {
    std::cerr << "streambp: " << e.what() << "\n";
  }
  return 2;
}
