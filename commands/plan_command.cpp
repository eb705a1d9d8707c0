// streambp plan: memory and FLOPs of a training step, without running it.
#include "commands/command.cuh"
#include "commands/device_options.cuh"
#include "commands/model_options.cuh"
#include "commands/objective_options.cuh"
#include "commands/part_options.cuh"
#include "commands/rank_options.cuh"
#include "data/files/config.cuh"
#include "data/files/files.cuh"
#include "training/plan.cuh"
#include "training/timeline.cuh"

namespace streambp {
namespace {

constexpr const char* kPlanDescription =
    "Show the memory and FLOPs of a training step, without running it.\n\n"
    "The real training step runs on a device that only counts, so the answer is exact: the size in bytes of the\n"
    "memory block that a run allocates. It answers three questions:\n\n"
    "  streambp plan qwen3-8b --length 100000                 what does a step at this length need?\n"
    "  streambp plan qwen3-8b --memory 80GiB                  how long can the token stream be?\n"
    "  streambp plan qwen3-8b --length 100000 --memory 80GiB  which chunk fits?\n\n"
    "With --ranks it plans one process of several, and counts the bytes that it sends to the others:\n\n"
    "  streambp plan qwen3-8b --memory 80GiB --ranks 8 --sequence-ranks 8 --optimizer adamw-bf16\n\n"
    "With --objective dpo the stream holds a pair of documents, with grpo the completions of a group; the answers "
    "then\n"
    "include the length of one document.";

class PlanCommand : public Command {
 public:
  explicit PlanCommand(CLI::App& app) : options(app, "plan", kPlanDescription, [this] { run(); }) {
    model.add_to(options, "model", ModelOptions::Vocabulary::an_option);
    options.section("Step");
    options.add("--length",
                {&length, "Tokens of a micro-batch's stream", checks::between(1, kLongestStream), Lasts::no, "none"});
    options.add("--chunk", {&chunk,
                            "Stream mode: rows per chunk, the unit of recomputation (default: 512; on a GPU 2048)",
                            {},
                            Lasts::no,
                            "none"});
    options.add("--memory", {&memory, "Budget, such as 80GiB", checks::memory(), Lasts::no, "none"});
    options.add("--device", {&device, "Where the step runs; auto: cuda for bf16, else cpu",
                             checks::one_of({"auto", "cpu", "cuda"})});
    options.add("--dtype",
                {&dtype, "Type of weights and activations: bf16, f32 or f64", checks::one_of({"bf16", "f32", "f64"})});
    options.add("--grad-dtype",
                {&gradient, "Type of the accumulated gradient for bf16 weights; auto: bf16, of adapters f32",
                 checks::one_of({"auto", "bf16", "f32"})});
    add_optimizer_option(options, optimizer, DeviceOptions::Optimizers::optional);
    options.add("--accumulate",
                {&micro_batches,
                 "Micro-batches per step, of all ranks together. With one, the gradient reuses the memory of saved "
                 "layer inputs; with more, the whole gradient stays in memory",
                 checks::between(1, 1 << 12), Lasts::no, "1; one per token stream"});
    ranks.add_planned_to(options);
    options.add("--link", {&link, "With --ranks: how fast a rank can send, in GB/s", checks::positive()});
    objectives.add_to(options);
    part.add_to(options);
    options.add("--group",
                {&group_size, "grpo: completions of a prompt, all in one stream", checks::between(1, 1 << 16)});
    options.section("Output");
    options.add("--sweep", {&sweep,
                            "Write peak memory against length for the three modes to this JSON file, with --memory "
                            "also the longest stream",
                            checks::writable_file(), Lasts::no, "none"});
    options.add("--timeline",
                {&timeline_file, "Write memory by kind through one step, in the three modes, to this JSON file",
                 checks::writable_file(), Lasts::no, "none"});
    options.add("--json",
                {&json_file, "Also write the answer to this JSON file", checks::writable_file(), Lasts::no, "none"});
  }

 private:
  void run() {
    settings.config = model.config(std::max<Index>(length, 1024));
    part.apply(settings.config);
    settings.dtype = dtype == "bf16" ? DType::bf16 : dtype == "f64" ? DType::f64 : DType::f32;
    settings.wide_gradient = gradient == "f32" || (gradient == "auto" && dtype == "bf16" && part.adapters());
    const bool on_gpu = device == "cuda" || (device == "auto" && settings.dtype == DType::bf16);
    require(!on_gpu || settings.dtype != DType::f64, "--dtype f64 runs on the CPU only; on a GPU use f32 or bf16");
    require(!options.given("--grad-dtype") || settings.dtype == DType::bf16, "--grad-dtype ", gradient,
            " needs --dtype bf16");
    settings.device = on_gpu ? DeviceKind::cuda : DeviceKind::cpu;
    settings.tile = tile_of(settings.device);
    require(!options.given("--chunk") || length == 0 || memory.empty(),
            "--length and --memory find the largest chunk; leave out --chunk, or one of them");
    if (!options.given("--chunk")) chunk = default_chunk(settings.tile);
    check_chunk(chunk, settings.tile);
    settings.optimizer = optimizer_named(optimizer);
    check_optimizer(settings);
    settings.ranks = ranks.planned(settings.config, ranks.ranks);
    require(!options.given("--link") || ranks.ranks > 1, "--link is for --ranks");
    if (!options.given("--accumulate")) micro_batches = settings.ranks.streams();
    settings.micro_batches = micro_batches;
    settings.objective = objectives.settings(std::max<Index>(length, 1));
    require(!options.given("--group") || objectives.objective == "grpo", "--group is for --objective grpo");
    documents = objectives.objective == "dpo" ? 2 : objectives.objective == "grpo" ? group_size : 1;
    const std::size_t budget = memory.empty() ? 0 : parse_bytes(memory);
    const std::string trained = describe_trained(settings.config);
    std::printf("%s\n%s%s on a %s, optimizer %s, %s a step, objective %s\n\n", describe(settings.config).c_str(),
                (trained + (trained.empty() ? "" : "\n")).c_str(), dtype.c_str(), on_gpu ? "GPU" : "CPU",
                optimizer.c_str(), counted(micro_batches, "micro-batch").c_str(), objectives.objective.c_str());
    result = {{"config", config_to_json(settings.config)},
              {"device", on_gpu ? "cuda" : "cpu"},
              {"dtype", dtype},
              {"objective", objectives.objective},
              {"documents", documents},
              {"optimizer", optimizer},
              {"accumulate", micro_batches}};
    if (ranks.ranks > 1) {
      std::printf("Rank 0 of %ld: %s at a time, %s each\n\n", ranks.ranks,
                  counted(settings.ranks.streams(), "token stream").c_str(),
                  counted(ranks.sequence_ranks, "rank").c_str());
      result["ranks"] = ranks.ranks, result["sequence_ranks"] = ranks.sequence_ranks, result["shard"] = ranks.sharded;
    }
    if (budget) result["memory"] = budget;
    if (budget && length == 0) longest(budget);
    if (budget && length > 0) chunk_for(budget);
    if (length > 0 || !budget) usage(length > 0 ? length : default_length());
    if (!sweep.empty()) write_sweep();
    if (!timeline_file.empty()) write_timeline(length > 0 ? length : default_length());
    if (!json_file.empty()) write_file_atomically(json_file, result.dump(2) + "\n");
  }

  // Work depends on the number of documents in the stream; memory does not.
  Usage usage_in(Mode mode, Index rows) const {
    StepSettings s = settings;
    s.documents = documents_in(rows);
    return plan(s, rows, schedule(mode, rows));
  }

  // A longer stream than the model's learned positions holds several documents.
  Index documents_in(Index rows) const {
    const Config& c = settings.config;
    return c.positions == Positions::rope ? documents : std::max(documents, ceil_div(rows, c.max_length));
  }

  std::string shared_out(Index rows) const {
    const Index n = documents_in(rows);
    return n > 1 ? format(", %ld documents of %ld", n, ceil_div(rows, n)) : "";
  }

  Index default_length() const {
    return std::min<Index>(settings.config.max_length > 0 ? settings.config.max_length : 4096, 32768);
  }

  Schedule schedule(Mode mode, Index rows) const { return schedule_for(mode, settings, rows, chunk); }

  void usage(Index rows) {
    std::printf("Peak memory and work of a step on a stream of %ld tokens%s:\n\n", rows, shared_out(rows).c_str());
    TextTable table({"", "full", "checkpoint", "stream"});
    std::array<Usage, 3> usages;
    for (Mode mode : kModes) usages[static_cast<std::size_t>(mode)] = usage_in(mode, rows);
    for (std::size_t kind = 0; kind < usages[0].by_kind.size(); ++kind) {
      std::vector<std::string> row = {kKindNames[kind]};
      std::size_t sum = 0;
      for (const Usage& u : usages) sum += u.by_kind[kind], row.push_back(human_bytes(u.by_kind[kind]));
      if (sum > 0) table.add(row);
    }
    std::vector<std::string> peak = {"peak"}, work = {"FLOPs"}, sent = {"sent"}, floor = {"time to send"};
    for (Mode mode : kModes) {
      const Usage& u = usages[static_cast<std::size_t>(mode)];
      peak.push_back(human_bytes(u.peak));
      work.push_back(human_count(u.flops));
      sent.push_back(human_bytes(static_cast<std::size_t>(u.sent)));
      floor.push_back(format("%.3g s", u.sent / (link * 1e9)));
      Json kinds;
      for (std::size_t kind = 0; kind < u.by_kind.size(); ++kind) kinds[kKindNames[kind]] = u.by_kind[kind];
      result["usage"][name(mode)] = {
          {"length", rows}, {"peak", u.peak}, {"flops", u.flops}, {"sent", u.sent}, {"by_kind", kinds}};
    }
    table.add(peak);
    table.add(work);
    if (ranks.ranks > 1) table.add(sent), table.add(floor);
    table.print();
    const Schedule stream = schedule(Mode::stream, rows);
    std::printf("\n(stream: chunks of %ld rows, logits of %ld rows)\n", stream.chunk, stream.head_chunk);
  }

  void longest(std::size_t budget) {
    std::printf("Longest token stream in %s:\n\n", human_bytes(budget).c_str());
    TextTable table({"mode", "tokens", "peak", "FLOPs", documents > 1 ? "of each document" : ""});
    for (Mode mode : kModes) {
      const Index rows = longest_for_budget(settings, mode, chunk, budget);
      result["longest"][name(mode)] = rows;
      if (rows == 0) {
        table.add({name(mode), "0", "does not fit", "", ""});
        continue;
      }
      const Usage u = usage_in(mode, rows);
      table.add({name(mode), std::to_string(rows), human_bytes(u.peak), human_count(u.flops),
                 documents > 1 ? std::to_string(rows / documents) : ""});
    }
    table.print();
    std::printf("\n(stream: chunks of %ld rows)\n", chunk);
  }

  void chunk_for(std::size_t budget) {
    const Index found = chunk_for_budget(settings, length, budget);
    const Index tile = settings.tile;
    const std::size_t least = plan(settings, length, schedule_for(Mode::stream, settings, length, tile)).peak;
    require(found > 0, "a step on ", length, " tokens needs at least ", human_bytes(least), ", more than the ",
            human_bytes(budget),
            " allowed; use more --memory or a shorter --length (without --length, plan shows the longest)");
    std::printf("Largest chunk in %s: %ld rows\n\n", human_bytes(budget).c_str(), found);
    result["chunk"] = chunk = found;
  }

  void write_sweep() {
    Json curve = result;
    for (Mode mode : kModes) {
      Json points = Json::array();
      for (Index rows = 1024; rows <= (Index{1} << 18); rows = rows * 5 / 4 / kTile * kTile) {
        points.push_back({{"length", rows}, {"peak", plan(settings, rows, schedule(mode, rows)).peak}});
      }
      curve["curve"][name(mode)] = points;
    }
    curve["chunk"] = chunk;
    curve["name"] = model.model;
    write_file_atomically(sweep, curve.dump(1) + "\n");
    std::printf("\nThe curve is in %s; scripts/plot.py draws it.\n", sweep.c_str());
  }

  void write_timeline(Index rows) {
    constexpr std::size_t parts = 1000;  // more than a plot can show
    Json file = result;
    file.update({{"length", rows}, {"chunk", chunk}, {"name", model.model}, {"kinds", kKindNames}});
    for (Mode mode : kModes) {
      const Timeline line = timeline(settings, rows, schedule(mode, rows), parts);
      file["timeline"][name(mode)] = {{"flops", line.flops}, {"bytes", line.parts}};
    }
    write_file_atomically(timeline_file, file.dump() + "\n");
    std::printf("\nThe timeline is in %s; scripts/plot.py draws it.\n", timeline_file.c_str());
  }

  OptionTable options;
  ModelOptions model;
  ObjectiveOptions objectives;
  PartOptions part;
  RankOptions ranks;
  double link = 50;
  Index length = 0, chunk = 0, micro_batches = 1, group_size = 8, documents = 1;
  std::string memory, device = "auto", dtype = "bf16", gradient = "auto", optimizer = "none", sweep, timeline_file,
                      json_file;
  StepSettings settings;
  Json result;
};

}  // namespace

std::unique_ptr<Command> plan_command(CLI::App& app) { return std::make_unique<PlanCommand>(app); }

}  // namespace streambp
