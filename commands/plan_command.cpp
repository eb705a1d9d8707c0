// streambp plan: memory and FLOPs of a training step, without running it.
#include "commands/command.h"
#include "commands/device_options.h"
#include "commands/memory_options.h"
#include "commands/model_options.h"
#include "commands/objective_options.h"
#include "commands/part_options.h"
#include "commands/plan_files.h"
#include "commands/rank_options.h"
#include "commands/rate_options.h"
#include "data/files/config.h"
#include "data/files/files.h"
#include "data/files/results.h"
#include "training/plan.h"

namespace streambp {
namespace {

constexpr const char* kPlanDescription =
    "Show the memory and FLOPs of a training step, without running it.\n\n"
    "The real training step runs on a device that only counts, so the answer is exact: the size in bytes of the "
    "memory block that a run allocates. What does a step at this length need? How long can the stream be? What is the "
    "fastest step?\n\n"
    "  streambp plan qwen3-8b --length 100000\n"
    "  streambp plan qwen3-8b --memory 80GiB\n"
    "  streambp plan qwen3-8b --length 100000 --memory 80GiB\n\n"
    "--far-memory is a second, larger memory. With --ranks it plans one process of several, and counts the bytes that "
    "it sends to the others:\n\n"
    "  streambp plan qwen3-8b --memory 80GiB --far-memory 300GiB\n"
    "  streambp plan qwen3-8b --memory 80GiB --ranks 8 --sequence-ranks 8\n\n"
    "With --objective dpo the stream holds a pair of documents, with grpo the completions of a group; the answers "
    "then include the length of one document.";

class PlanCommand : public Command {
 public:
  explicit PlanCommand(CLI::App& app) : Command(app, "plan", kPlanDescription) {
    model.add_to(options, "model", ModelOptions::Vocabulary::an_option);
    options.section("Step");
    options.add("--length", &length, "Tokens of a micro-batch's stream", checks::between(1, kLongestStream), "none");
    options.add("--chunk", &chunk,
                "Stream mode: rows per chunk, the unit of recomputation (default: 512; on a GPU 2048)", {}, "none");
    budget.add_to(options, "Budget of the device's memory, such as 80GiB", "none, with --keep far unlimited");
    options.add("--accumulate", &micro_batches,
                "Micro-batches per step, of all ranks together. With one, the gradient reuses the memory of saved "
                "layer inputs; with more, the whole gradient stays in memory",
                checks::between(1, 1 << 12), "1; one per token stream");
    ranks.add_planned_to(options);
    device.add_to(options, {"bf16", "f32", "f64"}, DeviceOptions::Optimizers::optional);
    given_rates.add_to(options);
    budget.add_directory_to(options);
    objectives.add_to(options);
    options.add("--group", &group_size, "grpo: completions of a prompt, all in one stream",
                checks::between(1, 1 << 16));
    part.add_to(options);
    options.section("Output");
    options.add("--sweep", &sweep,
                "Write peak memory against length for each mode to this JSON file, with --memory "
                "also the longest stream",
                checks::results_file());
    options.add("--timeline", &timeline_file,
                "Write a page (.html) that plays one step in each mode: its memory, what lives in each layer and "
                "chunk, and the operation that runs",
                checks::page());
    options.add("--curve", &curve,
                "Show what more memory buys: the fastest step, and what it keeps, from the least memory to "
                "everything kept");
    options.add("--json", &json_file, "Also write the answer to this JSON file", checks::results_file());
    options.first_page({"model", "--length", "--memory", "--far-memory", "--optimizer", "--lora", "--accumulate",
                        "--objective", "--ranks", "--sequence-ranks", "--curve", "--timeline", "--json"});
  }

 private:
  void run() override {
    complete();
    rates = given_rates.assumed(settings);
    measured = given_rates.measured(settings, room().far > 0 ? FarRate::measured : FarRate::assumed, budget.directory);
    introduce();
    const Capacity room = this->room();
    const bool bounded = !budget.memory.empty();
    if (bounded) result["memory"] = room.near, result["far_memory"] = room.far;
    if (bounded && !(length == 0 ? longest(room) : chunk_for(room))) return does_not_fit(room);
    if (length > 0 || !bounded) usage(length > 0 ? length : default_length());
    if (curve) print_curve(length > 0 ? length : default_length());
    settings.documents = documents_in(length > 0 ? length : default_length());
    const Planned planned = {settings, chunk, result};
    if (!sweep.empty()) write_sweep(sweep, planned);
    if (!timeline_file.empty())
      write_timeline(timeline_file, length > 0 ? length : default_length(), planned,
                     {fastest.chunk > 0 ? fastest.settings(settings) : settings, kept.only || block}, measured);
    if (!json_file.empty()) write_results(json_file, result);
  }

  void complete() {
    Config config = model.config(std::max<Index>(length, 1024));
    part.apply(config);
    const Ranks grid = ranks.planned(config, ranks.ranks);
    if (!options.given("--accumulate")) micro_batches = grid.streams();
    settings = device.settings(config, micro_batches);
    settings.ranks = grid;
    settings.objective = objectives.settings(std::max<Index>(length, 1));
    documents = objectives.objective == "dpo" ? 2 : objectives.objective == "grpo" ? group_size : 1;
    options.only({"--link"}, ranks.ranks > 1, " is for --ranks");
    options.only({"--group"}, objectives.objective == "grpo", " is for --objective grpo");
    if (!options.given("--chunk")) chunk = default_chunk(settings.tile);
    check_chunk(chunk, settings.tile);
    budget.check();
    require(budget.far_memory.empty() || !budget.memory.empty(),
            "--far-memory says how much more there is than --memory; give that too");
    places = {{}};
    if (room().far > 0) places = budget.places(Mode::stream, settings);
    settings.places = places.front();
    kept = budget.kept_choice(Mode::stream, settings.config);
    block = budget.chosen_block(Mode::stream);
    settings.kept = kept.only.value_or(KeptSets()), settings.block = block.value_or(0);
    std::set<std::string> files;
    for (const std::string& file : {sweep, timeline_file, json_file})
      require(file.empty() || files.insert(file).second, file, ": two options name this file; give each its own");
    require(!curve || room().far == 0, "--curve shows near memory; leave out --far-memory, and --keep with far");
  }

  // Prints what is planned.
  void introduce() {
    const std::string trained = describe_trained(settings.config);
    const bool on_gpu = settings.device == DeviceKind::cuda;
    print("%s\n%s%s%s on a %s, optimizer %s, %s a step, objective %s\n\n", describe(settings.config), trained,
          Escape{trained.empty() ? "" : "\n"}, device.dtype, on_gpu ? "GPU" : "CPU", device.optimizer,
          counted(micro_batches, "micro-batch"), objectives.objective);
    result = {{"config", config_to_json(settings.config)},
              {"device", on_gpu ? "cuda" : "cpu"},
              {"dtype", device.dtype},
              {"objective", objectives.objective},
              {"documents", documents},
              {"optimizer", device.optimizer},
              {"name", model.model},
              {"accumulate", micro_batches}};
    if (ranks.ranks == 1) return;
    print("Rank 0 of %ld: %s at a time, %s each\n\n", ranks.ranks, counted(settings.ranks.streams(), "token stream"),
          counted(ranks.sequence_ranks, "rank"));
    result["ranks"] = ranks.ranks, result["sequence_ranks"] = ranks.sequence_ranks, result["shard"] = ranks.sharded;
  }

  // Without --far-memory, or --keep with far, a plan stays in near memory.
  Capacity room() const {
    Capacity room = Plan::kUnlimited;
    if (!budget.memory.empty()) room.near = parse_bytes(budget.memory);
    if (budget.name_far_memory()) room.far = Plan::kUnlimited;
    if (!budget.far_memory.empty()) room.far = parse_bytes(budget.far_memory);
    return room;
  }

  Seconds seconds(const Usage& u) const { return predict(u, measured); }

  // Work depends on the number of documents in the stream; memory does not.
  Usage usage_in(Mode mode, Index rows, StepSettings s) const {
    s.documents = documents_in(rows);
    return plan(s, rows, schedule_for(mode, s, rows, chunk));
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
    print("Peak memory and work of a step on a stream of %ld tokens%s:\n\n", rows, shared_out(rows));
    std::vector<std::string> header = {""};
    std::vector<Usage> usages;
    const auto column = [&](const char* name, Mode mode) {
      header.push_back(name), usages.push_back(usage_in(mode, rows, settings));
      result["usage"][name] = to_json(rows, usages.back());
    };
    for (Mode mode : kPlannedModes) column(name(mode), mode);
    if (fastest.chunk > 0 && (fastest.kept != settings.kept || fastest.block != settings.block)) {
      header.push_back("fastest"), usages.push_back(usage_in(Mode::stream, rows, fastest.settings(settings)));
      result["usage"]["fastest"] = to_json(rows, usages.back());
    }
    TextTable table(header);
    auto add = [&](const std::string& name, auto&& value) {
      std::vector<std::string> row = {name};
      for (const Usage& u : usages) row.push_back(value(u));
      table.add(row);
    };
    auto add_by_kind = [&](const std::string& prefix, Bytes Usage::*bytes) {
      for (std::size_t kind = 0; kind < usages[0].by_kind.size(); ++kind) {
        const bool any =
            std::any_of(usages.begin(), usages.end(), [&](const Usage& u) { return (u.*bytes)[kind] > 0; });
        const bool states = kind == static_cast<std::size_t>(Kind::keys_values) && settings.config.has_delta_rule();
        const std::string label = prefix + (states ? "keys, values, states" : kKindNames[kind]);
        if (any) add(label, [&](const Usage& u) { return human_bytes((u.*bytes)[kind]); });
      }
    };
    add_by_kind("", &Usage::by_kind);
    add("peak", [](const Usage& u) { return human_bytes(u.peak); });
    add_by_kind("far: ", &Usage::far_by_kind);
    add("FLOPs", [](const Usage& u) { return human_count(u.flops); });
    if (ranks.ranks > 1) {
      add("sent", [](const Usage& u) { return human_bytes(static_cast<std::size_t>(u.sent)); });
      add("time to send", [&](const Usage& u) { return human_seconds(seconds(u).sent); });
    }
    add("predicted time", [&](const Usage& u) { return human_seconds(seconds(u).total()); });
    table.print();
    const Schedule stream = schedule(Mode::stream, rows);
    print("\n(stream: chunks of %ld rows%s, logits of %ld rows)\n", stream.chunk, in_blocks(stream.block),
          stream.head_chunk);
    print("(chunked-loss: checkpointing of whole layers, with such logits, as in other trainers)\n");
    print_prediction(header.back(), seconds(usages.back()));
  }

  Json to_json(Index rows, const Usage& u) const {
    Json kinds, far;
    for (std::size_t kind = 0; kind < u.by_kind.size(); ++kind) {
      kinds[kKindNames[kind]] = u.by_kind[kind];
      if (u.far_by_kind[kind] > 0) far[kKindNames[kind]] = u.far_by_kind[kind];
    }
    const Seconds s = seconds(u);
    return {{"length", rows},
            {"peak", u.peak},
            {"far", u.far},
            {"flops", u.flops},
            {"matmul_flops", u.matmul_flops},
            {"attention_flops", u.attention_flops},
            {"moved", u.moved},
            {"sent", u.sent},
            {"by_kind", kinds},
            {"far_by_kind", far},
            {"seconds",
             {{"total", s.total()},
              {"compute", s.compute},
              {"copy_beside", s.beside},
              {"copy_waiting", s.waiting},
              {"send", s.sent}}}};
  }

  void print_prediction(const std::string& step, const Seconds& s) const {
    std::string text = human_seconds(s.compute) + format(
                                                      " to compute at %.2f of the %.4g TFLOP/s of matrix products, "
                                                      "%.3g in attention, and %.3g TB/s in the rest",
                                                      kEfficiency, measured.matmul / 1e12, measured.attention / 1e12,
                                                      kCopyEfficiency * measured.memory / 1e12);
    if (s.beside > 0) text += "; beside it " + human_seconds(s.beside) + " to copy what forward and backward need";
    if (s.waiting > 0) text += "; " + human_seconds(s.waiting) + " to copy what they wait for";
    if (s.beside + s.waiting > 0) text += format(" at %.3g GB/s", measured.far / 1e9);
    if (s.sent > 0) text += "; " + human_seconds(s.sent) + format(" to send at %g GB/s", measured.link / 1e9);
    if (given_rates.are_assumed(settings.device))
      text += "; the rates are assumed, those of an H100: give measured ones with --rates";
    print("(predicted time of %s: %s)\n", step, text);
  }

  // False: no stream fits.
  bool longest(const Capacity& room) {
    print("Longest token stream in %s%s:\n\n", human_bytes(room.near), far_room(room));
    std::vector<std::string> header = {"mode", "tokens", "peak", "FLOPs", "predicted"};
    if (room.far > 0) header.insert(header.begin() + 3, "far");
    if (documents > 1) header.push_back("of each document");
    TextTable table(header);
    Usage stream;
    std::string blocks;
    for (Mode mode : kPlannedModes) {
      const auto [rows, best] = longest_that_fits(settings, mode, {exactly(chunk), room, places, kept, block});
      result["longest"][name(mode)] = rows;
      const char* limit = rows / kTile == kLongestStream / kTile ? " or more" : "";
      std::vector<std::string> row = {name(mode), std::to_string(rows) + limit};
      if (rows == 0) {
        row.push_back("does not fit");
      } else {
        const Usage u = usage_in(mode, rows, best);
        row.push_back(human_bytes(u.peak));
        if (room.far > 0) row.push_back(human_bytes(u.far));
        row.push_back(human_count(u.flops));
        row.push_back(human_seconds(seconds(u).total()));
        if (documents > 1) row.push_back(std::to_string(rows / documents));
        if (mode == Mode::stream) stream = u, blocks = in_blocks(best.block), settings.places = best.places;
      }
      row.resize(header.size());
      table.add(row);
    }
    table.print();
    print("\n(stream: chunks of %ld rows%s%s)\n", chunk, blocks, far_part(stream));
    print("(chunked-loss: checkpointing of whole layers, logits in chunks, as in other trainers)\n");
    return result["longest"]["stream"] > 0;
  }

  // False: no step fits.
  bool chunk_for(const Capacity& room) {
    const Allowed allowed = {chunks(), room, places, kept, block};
    settings.documents = documents_in(length);
    const Fit found = fit(settings, Mode::stream, length, allowed, rates);
    if (found.chunk == 0) {
      const Usage least = closest(settings, Mode::stream, length, allowed).usage;
      print_error(
          "streambp: a step on %ld tokens needs at least %s%s, more than the %s%s allowed; use %smore --memory%s "
          "or a shorter --length\n",
          length, human_bytes(least.peak), least.far > 0 ? format(" and %s of far memory", human_bytes(least.far)) : "",
          human_bytes(room.near), far_room(room), budget.remedy(), room.far > 0 ? ", more --far-memory" : "");
      return false;
    }
    settings.places = found.places, fastest = found;
    const std::string parts = describe(found.kept, settings.config);
    result["chunk"] = chunk = found.chunk, result["block"] = found.block, result["kept"] = parts;
    print("Fastest in %s%s: chunks of %ld rows%s%s\nkept beside layer inputs: %s\n\n", human_bytes(room.near),
          far_room(room), chunk, in_blocks(found.block), far_part(found.usage), parts);
    return true;
  }

  void does_not_fit(const Capacity& room) {
    exit_code = 1;
    if (length == 0)
      print_error("streambp: no stream fits into %s%s\n", human_bytes(room.near), far_room(room)), print("\n");
    result["fits"] = false;
    result["alternatives"] = print_alternatives(settings, {exactly(chunk), room, places, kept, block}, length, budget);
    if (!json_file.empty()) write_results(json_file, result);
  }

  ChunkRange chunks() const { return options.given("--chunk") ? exactly(chunk) : up_to(default_chunk(settings)); }
  static std::string in_blocks(Index block) { return block > 0 ? format(" in blocks of %ld", block) : ""; }

  // From the least near memory to everything kept.
  void print_curve(Index rows) {
    print("\nMore memory buys a faster step, of %ld tokens:\n\n", rows);
    TextTable table({"memory", "predicted time", "chunk", "block", "kept beside layer inputs"}, TextTable::Last::text);
    StepSettings s = settings;
    s.documents = documents_in(rows), s.places = {};
    const Allowed allowed = {chunks(), Plan::kUnlimited, {{}}, kept, block};
    for (const Fit& found : fastest_by_memory(s, rows, allowed, rates, 8)) {
      const std::string block = found.block > 0 ? std::to_string(found.block) : "all",
                        kept = describe(found.kept, s.config);
      table.add({human_bytes(found.usage.peak), human_seconds(seconds(found.usage).total()),
                 std::to_string(found.chunk), block, kept});
      result["curve"].push_back({{"peak", found.usage.peak},
                                 {"seconds", seconds(found.usage).total()},
                                 {"chunk", found.chunk},
                                 {"block", found.block},
                                 {"kept", kept}});
    }
    table.print();
  }

  static std::string far_room(const Capacity& room) {
    if (room.far == 0) return "";
    return room.far == Plan::kUnlimited ? " and far memory" : format(" and %s of far memory", human_bytes(room.far));
  }
  static std::string far_part(const Usage& u) { return u.far > 0 ? "; far: " + describe_far(u.far_by_kind) : ""; }

  ModelOptions model;
  ObjectiveOptions objectives;
  PartOptions part;
  RankOptions ranks;
  MemoryOptions budget;
  DeviceOptions device{.optimizer = "none", .planned = true};
  Index length = 0, chunk = 0, micro_batches = 1, group_size = 8, documents = 1;
  std::string sweep, timeline_file, json_file;
  bool curve = false;
  StepSettings settings;
  std::vector<Places> places;  // that --keep allows
  KeptChoice kept;             // and these parts of layers
  std::optional<Index> block;  // this one
  Fit fastest;
  RateOptions given_rates;
  Rates rates = usual_rates(DeviceKind::cuda, 128);  // for choices, which depend on no measurement
  Rates measured = rates;                            // for the times that are shown
  Json result;
};

}  // namespace

std::unique_ptr<Command> plan_command(CLI::App& app) { return std::make_unique<PlanCommand>(app); }

}  // namespace streambp
