// streambp bench: the speed of a training step, against the machine's matmul rate.
#include <ctime>

#include "commands/command.h"
#include "commands/device_options.h"
#include "commands/memory_options.h"
#include "commands/part_options.h"
#include "commands/rank_options.h"
#include "commands/step_progress.h"
#include "data/files/config.h"
#include "data/files/files.h"
#include "data/files/results.h"
#include "training/plan.h"

namespace streambp {
namespace {

constexpr const char* kBenchDescription =
    "Measure the speed of a training step in the three modes.\n\n"
    "Runs forward, backward and the optimizer on random tokens in each mode, and prints the median of several runs. "
    "The baseline is the machine's matmul rate, measured in the same run. Recomputation in checkpoint and stream mode "
    "counts as FLOPs. Modes that do not fit into memory are skipped.\n\n"
    "  streambp bench                                  GPT-2 124M, one sequence of 1024\n"
    "  streambp bench --chunk 256 512 1024 --profile   chunks, and each operation's time\n"
    "  streambp bench --model qwen3-0.6b --length 4096 32768 --mode stream";

class BenchCommand : public Command {
 public:
  explicit BenchCommand(CLI::App& app) : Command(app, "bench", kBenchDescription) {
    model.add_to(options, "--model", ModelOptions::Vocabulary::an_option);
    device.add_to(options, {"auto", "f32", "bf16"}, DeviceOptions::Optimizers::optional);
    ranks.add_to(options);
    part.add_to(options);
    options.section("Measurement");
    options.add("--length", &lengths, "Tokens of the stream, one document; one or more lengths",
                checks::between(1, 1 << 24));
    options.add("--chunk", &stream_chunks, "One or more chunks for stream mode (default: 512; on a GPU 2048 to 8192)");
    options.add("--mode", &modes, "Only these modes", checks::one_of({"full", "checkpoint", "stream"}));
    options.add(
        "--keep", &keep,
        "Stream mode: what is kept for backward, in the words of train --keep, joined by commas: nothing (plain "
        "StreamBP), everything, inputs=far, attention=near,gate-up=near; one or more");
    options.add("--memory", &budgets,
                "Stream mode: also the fastest step that fits each of these budgets of near memory, "
                "such as 1GiB",
                checks::memory());
    memory.add_directory_to(options);
    options.add("--repeat", &repeat, "Measured runs of each mode, after a warm-up", checks::between(1, 1000));
    options.add("--json", &json_file, "Also write the results to this JSON file", checks::results_file());
    options.add("--profile", &profile, "Show the time per operation");
    options.first_page({"--model", "--length", "--mode", "--chunk", "--keep", "--memory", "--optimizer", "--dtype",
                        "--device", "--lora", "--repeat", "--profile", "--json"});
  }

 private:
  struct Candidate {
    std::string label;
    Schedule schedule;
    Usage planned;
    std::vector<double> seconds = {};
    double flops = 0;
    std::vector<Work> work = {};
    Index launches = 0;       // on a GPU
    double busy_seconds = 0;  // of all threads of the CPU, in the last run

    double median() const {
      std::vector<double> sorted = seconds;
      std::sort(sorted.begin(), sorted.end());
      return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
    }
  };

  void run() override {
    memory.check();
    options.only({"--chunk", "--keep", "--memory"}, wanted(Mode::stream), " is for stream mode");
    if (model.model.empty() && !model.sizes_given()) model.model = "gpt2";
    const Index longest = std::ranges::max(lengths);
    Config config = model.config(longest);
    part.apply(config);
    config.rope_scaling.longest = longest;
    // Weights are random, so a table of learned positions can have any length.
    if (config.positions == Positions::learned) config.max_length = std::max(config.max_length, longest);
    gpu = device.kind() == DeviceKind::cuda;
    const Ranks grid = ranks.grid(config, device.kind());
    settings = device.settings(config, grid.streams());
    settings.ranks = grid;
    if (stream_chunks.empty()) stream_chunks = {default_chunk(settings)};
    for (Index chunk : stream_chunks) check_chunk(chunk, settings.tile);
    const std::string trained = describe_trained(config);
    print("%s\n%s%s%s on %s, optimizer %s, median of %ld\n", describe(config), trained,
          Escape{trained.empty() ? "" : "\n"}, name(settings.dtype), device_name(settings.device), device.optimizer,
          repeat);
    for (const Index of_this_turn : lengths) {
      length = of_this_turn;
      print("\n%ld tokens:\n", length);
      std::fflush(stdout);
      if (std::vector<Candidate> candidates = candidates_that_fit(); !candidates.empty()) measure(candidates);
    }
    require(results.contains("runs"), "no mode fits into memory; give a smaller --length or model");
  }

  bool wanted(Mode mode) const {
    return modes.empty() || std::find(modes.begin(), modes.end(), name(mode)) != modes.end();
  }

  std::vector<Candidate> candidates_that_fit() {
    std::vector<Candidate> candidates;
    const Capacity room = {ranks.room(settings.device), far_room_of_each_rank(settings.device, memory.directory)};
    StepSettings planned = settings;  // of rank 0 on all ranks, so that all skip the same modes
    planned.ranks = ranks.planned(settings.config);
    auto add = [&](std::string label, Mode mode, Index chunk, Place inputs = Place::near, const KeptSets& kept = {},
                   Index block = 0) {
      if (!wanted(mode)) return;
      planned.places.inputs = inputs, planned.kept = kept, planned.block = block;
      const Schedule schedule = schedule_for(mode, planned, length, chunk);
      const Usage usage = plan(planned, length, schedule);
      auto lacks = [&](std::size_t needed, std::size_t free, const char* what) {
        if (needed <= free) return false;
        print("%s needs %s%s, and %s are free: skipped\n", label, human_bytes(needed), what, human_bytes(free));
        return true;
      };
      if (!lacks(usage.peak, room.near, "") && !lacks(usage.far, room.far, " of far memory"))
        candidates.push_back({label, schedule, usage});
    };
    add("full", Mode::full, 0);
    add("checkpoint", Mode::checkpoint, 0);
    for (Index chunk : stream_chunks) {
      for (const std::string& set : keep) {
        const KeepOption words = keep_words(set);
        add(format("stream %ld%s", chunk, (set == "nothing" ? "" : ", " + set)), Mode::stream, chunk,
            words.place("inputs").value_or(Place::near), words.parts().value_or(KeptParts::inputs()));
      }
    }
    for (const std::string& budget : budgets) {
      planned.places = {}, planned.kept = {}, planned.block = 0;
      const ChunkRange chunks =
          options.given("--chunk") ? exactly(stream_chunks.front()) : up_to(stream_chunks.front());
      const Allowed allowed = {chunks, parse_bytes(budget), {{}}};
      const Rates rates = usual_rates(settings.device, settings.config.head_dim);
      const Fit found = fit(planned, Mode::stream, length, allowed, rates);
      if (found.chunk == 0) {
        const std::size_t least = closest(planned, Mode::stream, length, allowed).usage.peak;
        print("no step fits %s, the smallest needs %s: skipped\n", budget, human_bytes(least));
        continue;
      }
      print("fastest in %s: chunks of %ld rows%s, kept beside layer inputs: %s\n", budget, found.chunk,
            found.block > 0 ? format(" in blocks of %ld", found.block) : "", describe(found.kept, settings.config));
      add("fastest in " + budget, Mode::stream, found.chunk, Place::near, found.kept, found.block);
    }
    return candidates;
  }

  // Of words joined by commas.
  KeepOption keep_words(const std::string& joined) const {
    std::vector<std::string> words;
    std::stringstream text(joined + ",");
    for (std::string word; std::getline(text, word, ',');) words.push_back(word);
    const KeepOption result(words);
    result.require_parts_of(settings.config);
    for (const char* other : {"", "optimizer", "weights", "gradients"})
      require(!result.place(other), "--keep ", quote(joined),
              ": bench takes nothing, everything, inputs=near, inputs=far, ",
              "and parts such as attention=near; leave out the rest");
    return result;
  }

  void measure(std::vector<Candidate>& candidates) {
    Capacity capacity = 0;
    for (const Candidate& c : candidates) {
      capacity.near = std::max(capacity.near, c.planned.peak);
      capacity.far = std::max(capacity.far, c.planned.far);
    }
    capacity.directory = memory.directory, capacity.on_reserved = show_reserved;
    const double first_rate = matmul_rate(settings.device, settings.dtype);
    bandwidth = copy_rate(settings.device);
    if (capacity.far > 0) far = far_rate(settings.device, memory.directory);
    if (gpu && profile && products.empty()) products = time_products(settings, std::min(length, stream_chunks.front()));
    const std::size_t free_before = free_memory(settings.device);
    const auto engine = make_engine(settings, length, capacity);
    engine->initialise(1);
    const std::vector<Batch> batches(static_cast<std::size_t>(settings.ranks.streams()), random_document());
    if (profile) link = engine->link_rate();
    rate = time_runs(*engine, batches, candidates, first_rate);
    if (gpu) {
      const std::size_t free_now =
          free_memory(settings.device) + capacity.near;  // approximate: other processes may allocate or free memory
      driver_overhead = free_before > free_now ? free_before - free_now : 0;
      engine->time_operations(profile);  // a separate run, because timing every operation slows a GPU down
      for (Candidate& c : candidates) {
        if (!profile) continue;
        run_once(*engine, batches, c.schedule);
        c.work = engine->device().work(), c.launches = engine->device().launches;
      }
    }
    if (this_process().rank == 0) report(candidates);
  }

  // The runs take turns, so that a disturbance of the machine affects all modes. Returns the median matmul rate.
  double time_runs(Engine& engine, const std::vector<Batch>& batches, std::vector<Candidate>& candidates,
                   double first_rate) {
    std::vector<double> rates = {first_rate};
    for (Index i = 0; i <= repeat; ++i) {
      if (!gpu) rates.push_back(matmul_rate(settings.device, settings.dtype));
      for (Candidate& c : candidates) {
        const std::clock_t before = std::clock();  // of all threads
        const double seconds = run_once(engine, batches, c.schedule);
        c.busy_seconds = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
        if (i == 0) continue;  // a warm-up, in which the kernel also clears the pages of memory
        c.seconds.push_back(seconds);
        c.flops = engine.device().flops();
        c.work = engine.device().work();
        show_work(format("%s: %.3f s", c.label, seconds));
      }
    }
    show_work("");
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
  }

  // The seconds of one step.
  double run_once(Engine& engine, const std::vector<Batch>& batches, const Schedule& schedule) {
    engine.device().reset_work();
    engine.synchronize();
    const Stopwatch watch;
    if (settings.optimizer == OptimizerKind::none) {
      engine.release_gradient();
      engine.accumulate(batches, schedule);
    } else {
      engine.step(batches, schedule, OptimizerSettings{.rate = 1e-5, .steps = 1 << 20}, ++steps);
    }
    engine.synchronize();
    const auto microseconds = static_cast<Index>(1e6 * watch.seconds());
    return static_cast<double>(largest_of_ranks(microseconds)) * 1e-6;  // all ranks measure the same
  }

  Batch random_document() const {
    Batch batch;
    std::vector<std::int32_t> tokens;
    const Random random(1);
    for (Index i = 0; i < length; ++i) {
      tokens.push_back(static_cast<std::int32_t>(
          random.below(static_cast<std::uint64_t>(settings.config.vocab), static_cast<std::uint64_t>(i))));
    }
    batch.append(tokens, tokens.front());
    return batch;
  }

  // Of this length, as soon as it is measured: a later one may take too long, or fail.
  void report(const std::vector<Candidate>& candidates) {
    print_table(candidates);
    const bool alone = settings.ranks.all.size == 1;
    print("\nMatmul rate of %s: %.1f GFLOP/s.%s\n", alone ? "this machine" : "rank 0", rate / 1e9,
          alone ? "" : " GFLOP/s and memory are those of rank 0; tokens/s are those of all ranks.");
    if (gpu) print("The driver uses %s in addition to the planned memory.\n", human_bytes(driver_overhead));
    if (profile) print("Copy within memory: %.1f GB/s, read and written.\n", bandwidth / 1e9);
    if (far > 0) print("Far memory: %.2f GB/s.\n", far / 1e9);
    if (profile && !alone) print("Sent by rank 0 while all ranks send to all: %.1f GB/s.\n", link / 1e9);
    for (const Candidate& c : candidates) {
      if (profile) print_profile(c);
    }
    if (!products.empty() && !results.contains("products")) print_products();
    std::fflush(stdout);
    if (!json_file.empty()) write_results(json_file, results);
  }

  // The table is also added to the results.
  void print_table(const std::vector<Candidate>& candidates) {
    results.update({{"config", config_to_json(settings.config)},
                    {"device", device_name(settings.device)},
                    {"dtype", name(settings.dtype)},
                    {"optimizer", device.optimizer},
                    {"ranks", settings.ranks.all.size},
                    {"sequence_ranks", settings.ranks.sequence.size},
                    {"matmul_rate", rate}});
    if (profile) {
      const std::vector<Work>& work = candidates.back().work;
      results["copy_rate"] = bandwidth, results["link_rate"] = link;
      results["attention_rate"] =
          total_of("attention", &Work::flops, work) / total_of("attention", &Work::seconds, work);
    }
    if (far > 0) results["far_rate"] = far;
    if (gpu) results["driver_overhead"] = driver_overhead;
    TextTable table({"mode", "seconds", "min", "max", "tokens/s", "GFLOP/s", "of matmul", "predicted", "memory"});
    Rates rates = usual_rates(settings.device, settings.config.head_dim);
    rates.attention *= rate / rates.matmul, rates.matmul = rate, rates.memory = bandwidth;
    if (far > 0) rates.far = far;
    for (const Candidate& c : candidates) {
      const double seconds = c.median(), flops = c.flops / seconds, predicted = predict(c.planned, rates).total();
      const auto [least, most] = std::minmax_element(c.seconds.begin(), c.seconds.end());
      table.add({c.label, format("%.3f", seconds), format("%.3f", *least), format("%.3f", *most),
                 human_count(static_cast<double>(length * settings.ranks.streams()) / seconds),
                 format("%.1f", flops / 1e9), format("%.2f", flops / rate), human_seconds(predicted),
                 human_bytes(c.planned.peak)});
      Json& run = results["runs"].emplace_back(Json{{"mode", c.label},
                                                    {"length", length},
                                                    {"seconds", c.seconds},
                                                    {"median", seconds},
                                                    {"flops", c.flops},
                                                    {"of_matmul", flops / rate},
                                                    {"predicted", predicted},
                                                    {"memory", c.planned.peak},
                                                    {"far_memory", c.planned.far}});
      if (gpu && profile) run["launches"] = c.launches;
      for (const Work& w : c.work) {
        if (!profile) break;
        run["profile"].push_back({{"operation", w.name},
                                  {"calls", w.calls},
                                  {"seconds", w.seconds},
                                  {"flops", w.flops},
                                  {"bytes", w.bytes},
                                  {"sent", w.sent}});
      }
    }
    table.print();
  }

  // The time of an operation relative to its lower bound: FLOPs at the matmul rate, bytes at the copy rate, or bytes sent
  // at the rate of the link.
  std::string over_floor(const Work& w) const {
    const double to_send = w.sent > 0 ? w.sent / link : 0;
    const double floor = std::max({w.flops / rate, w.bytes / bandwidth, to_send});
    return floor > 0 ? format("%.2f", w.seconds / floor) : "";
  }

  void print_profile(const Candidate& c) const {
    const std::string launches = gpu ? format(", %ld launches", c.launches) : "";
    print("\n%s, profile of one run%s:\n", c.label, launches);
    std::vector<Work> work = c.work;
    std::sort(work.begin(), work.end(), [](const Work& a, const Work& b) { return a.seconds > b.seconds; });
    double total = 0;
    for (const Work& w : work) total += w.seconds;
    if (const double threads = omp_get_max_threads(); !gpu && threads > 1) {
      // If threads wait only where one works alone, idle time is (threads - 1) times the time of that one.
      const double run = c.seconds.back(), busy = c.busy_seconds / run;
      const double serial = std::clamp((threads - busy) / (threads - 1), 0.0, 1.0), between = 1 - total / run;
      print("%.2f of %.0f threads were busy (or spinning): ", busy, threads);
      print("%.1f%% of the time is serial, if that is why the others wait.\n", 100 * serial);
      print("%.1f%% of the time is between operations.\n", 100 * between);
    }
    TextTable table({"operation", "calls", "seconds", "share", "GFLOP/s", "GB/s", "over floor"});
    for (const Work& w : work) {
      table.add({std::string(w.name), std::to_string(w.calls), format("%.3f", w.seconds),
                 format("%.1f%%", 100 * w.seconds / total), format("%.1f", w.flops / w.seconds / 1e9),
                 format("%.1f", (w.bytes + w.sent) / w.seconds / 1e9), over_floor(w)});
    }
    table.print();
  }

  // Shows the cost of algorithms that do not split sums.
  void print_products() {
    print(
        "\ncuBLASLt matrix products of the first length, with 32 MiB of workspace, and with its own choice of "
        "algorithm in addition:\n");
    TextTable table({"product", "GFLOP/s", "waves", "with workspace", "free choice", "waves", "ratio"});
    for (const ProductTiming& p : products) {
      table.add({p.name, format("%.1f", p.ours.rate / 1e9), format("%.2f", p.ours.waves),
                 format("%.1f", p.with_workspace.rate / 1e9), format("%.1f", p.free_choice.rate / 1e9),
                 format("%.2f", p.free_choice.waves), format("%.2f", p.ours.rate / p.free_choice.rate)});
      results["products"].push_back({{"product", p.name},
                                     {"rate", p.ours.rate},
                                     {"waves", p.ours.waves},
                                     {"workspace_rate", p.with_workspace.rate},
                                     {"free_rate", p.free_choice.rate},
                                     {"free_waves", p.free_choice.waves}});
    }
    table.print();
  }

  ModelOptions model;
  DeviceOptions device;
  RankOptions ranks;
  PartOptions part;
  StepSettings settings;
  bool gpu = false;
  double rate = 0, bandwidth = 0, link = 0, far = 0;  // of matmul, of copies, between ranks, and of far memory
  std::vector<ProductTiming> products;                // on a GPU
  std::size_t driver_overhead = 0;                    // beyond the planned memory: kernels and libraries
  std::vector<Index> lengths = {1024};
  Index length = 0;  // of the stream that is measured now
  Index repeat = 5;
  Json results;     // of all lengths so far
  Index steps = 0;  // taken
  std::vector<Index> stream_chunks;
  std::vector<std::string> modes, keep = {"nothing"}, budgets;
  MemoryOptions memory;
  std::string json_file;
  bool profile = false;
};

}  // namespace

std::unique_ptr<Command> bench_command(CLI::App& app) { return std::make_unique<BenchCommand>(app); }

}  // namespace streambp
