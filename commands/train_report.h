// Reports a training run: on the console, in metrics.jsonl, and in report.html (commands/report.h).
#pragma once

#include "commands/interruption.h"
#include "commands/report.h"
#include "commands/step_progress.h"
#include "commands/train_task.h"
#include "commands/version.h"
#include "data/files/event_file.h"
#include "data/files/run_log.h"

namespace streambp {

// The metrics shown on the console; metrics.jsonl has all of them.
inline std::string shown(const Measures& measures) {
  std::string text;
  for (const char* name : {"accuracy", "margin", "reward", "length", "kl", "clip_fraction"}) {
    const auto found = measures.others.find(name);
    if (found != measures.others.end()) text += format("  %s %.3f", name, found->second);
  }
  return text;
}

// The corner points of the learning rate.
inline std::string describe_rate(const OptimizerSettings& s, const std::string& schedule) {
  std::string text = format("%g", s.rate);
  if (s.warmup > 0) text += format(" after %s of warm-up", counted(std::min(s.warmup, s.steps), "step"));
  const Index full = last_full_rate(s);
  if (full >= s.steps) return text + (s.schedule == RateSchedule::constant ? ", then constant" : "");
  if (s.schedule == RateSchedule::wsd) text += format(", constant until step %ld", full);
  return text + format(", then %s to %g at step %ld", schedule == "cosine" ? "a cosine" : "linear",
                       learning_rate(s, s.steps), s.steps);
}

class TrainReport : public Observer {
 public:
  // machine_rate: FLOP/s of large matrix products, the baseline of utilisation.
  TrainReport(RunDirectory& directory, const TrainOptions& options, const TrainTask& task, double machine_rate)
      : directory_(directory), options_(options), task_(task), run_(task.run), machine_rate_(machine_rate) {}

  void progress(const Progress& progress) override { show_progress(progress); }
  void begin(Index first_step) override {
    first_step_ = last_step_ = first_step;
    watch_ = {};
    if (first_step > 0 && this_process().rank == 0) log_ = RunLog(directory_.path() / "metrics.jsonl", show_progress);
    if (options_.tensorboard && this_process().rank == 0) events_.emplace(directory_.path(), first_step);
    record({{"step", first_step}, {"begin", beginning()}});
    const TrainOptions& o = options_;
    const StepSettings& s = run_.settings;
    std::string chunked = o.mode == "stream" ? format(", chunks of %ld rows", run_.schedule.chunk) : "";
    if (run_.schedule.block > 0) chunked += format(" in blocks of %ld", run_.schedule.block);
    print("model    %s\n", describe(s.config));
    if (const std::string part = describe_trained(s.config); !part.empty()) print("trained  %s\n", part);
    print("data     %s\n", run_.source.description);
    for (const std::string& part : task_.parts) print("         %s\n", part);
    if (!task_.first_learned.empty()) print("learns   to write, in its first document: %s\n", task_.first_learned);
    if (const std::string& program = o.grpo.program; !program.empty())
      print("reward   by the command %s\n", RewardProgram::shown(program, program.size()));
    print("steps    %ld, of %s%ld tokens in %s, in streams of up to %ld\n", run_.optimizer.steps,
          run_.documents ? "about " : "", run_.tokens_per_step(), counted(run_.micro_batches, "micro-batch"),
          run_.rows());
    print("rate     %s\n", describe_rate(run_.optimizer, o.schedule));
    print("memory   %s, planned: mode %s%s\n", human_bytes(run_.memory.near), o.mode, chunked);
    if (o.mode == "stream") {
      const std::string parts = describe(run_.schedule.kept, s.config);
      const std::string plain = " (a step that keeps inputs only needs " + human_bytes(task_.plain_memory) + ")";
      print("kept     layer inputs%s\n", parts == "nothing" ? "" : "; " + parts + plain);
    }
    if (run_.memory.far > 0) {
      print("far      %s in %s\n", describe_far(plan(s, run_.rows(), run_.schedule).far_by_kind),
            o.budget.far_place(s.device));
    }
    print("machine  %s, %s, matmul at %.0f GFLOP/s; \"%% matmul\" of a step is its share of that\n",
          device_name(s.device), name(s.dtype), machine_rate_ / 1e9);
    if (const Ranks& r = s.ranks; r.all.size > 1) {
      print("ranks    %ld: %s at a time, %s each\n", r.all.size, counted(r.streams(), "token stream"),
            counted(r.sequence.size, "rank"));
    }
    const bool alone = s.device == DeviceKind::cuda && s.ranks.all.size == 1 && !process_library().empty();
    if (const Index gpus = alone ? gpus_for_ranks() : 0; gpus > 1)
      note(format("%ld GPUs can be used; mpirun -n %ld streambp train ... uses all of them", gpus, gpus));
    for (const std::string& text : task_.notes) note(text);
    for (const fs::path& path : directory_.incomplete()) note("skipped " + path.string() + ": a part of it is missing");
    print("output   %s%s\n\n", directory_.path(), first_step > 0 ? format(", resumed after step %ld", first_step) : "");
    if (first_step >= run_.last_step())
      print("nothing to do: the run is at step %ld of %ld\n", first_step, run_.optimizer.steps);
    std::fflush(stdout);
  }
  void steps_begin() override { interruption_.emplace(); }
  void steps_ended() { interruption_.reset(); }  // from here on, a signal ends the program
  bool interrupted() noexcept override { return Interruption::signal() != 0; }
  void step_begins(Index step, const std::vector<Batch>& batches, DeviceBase& device) override {
    if (run_.grpo) return;  // most of its work, the sampling, is done
    const auto flops = [this, step, &batches] {
      StepSettings s = run_.settings;
      if (const BlockSettings& blocks = run_.optimizer.blocks)
        s.config.trained = names_of_block(s.config, blocks, block_of_step(blocks, s.config.layers, step));
      return step_flops(s, batches, run_.schedule);
    };
    progress_.emplace(device, format("step %ld/%ld", step, run_.last_step()), flops);
  }
  void step_ends() noexcept override { progress_.reset(); }
  void step(const StepReport& report) override {
    const auto& [step, batches, result, device, seconds] = report;
    Index tokens = 0;
    for (const Batch& batch : batches) tokens += batch.size();
    const double tokens_per_second = static_cast<double>(tokens) / seconds,
                 utilisation = device.flops() / seconds / machine_rate_;
    Json line = {{"step", step},
                 {"loss", result.measures.loss},
                 {"gradient_norm", result.gradient.norm},
                 {"gradient_fingerprint", hash_digits(result.gradient.fingerprint)},
                 {"rate", learning_rate(run_.optimizer, step)},
                 {"tokens_per_second", tokens_per_second},
                 {"utilisation", utilisation},
                 {"memory", device.arena.peak()},
                 {"far_memory", device.far.peak()},
                 {"seconds", seconds}};
    for (const auto& [measure, value] : result.measures.others) line[measure] = value;
    if (const RoutingCounts& routing = result.measures.routing; routing.experts > 0) {
      line["expert_entropy"] = routing.entropy(), line["busiest_expert"] = routing.busiest();
      line["idle_experts"] = routing.idle();
      routing_ += routing;
    }
    record(line);
    last_step_ = step;
    if (options_.online_grpo() && run_.grpo->begins_round(step)) check_round(step, result.measures);

    // A terminal shows short steps on one line; a file gets about twenty lines of them.
    const Index last = run_.last_step(), interval = std::max<Index>(1, (last - first_step_) / 20);
    const bool terminal = on_terminal(), lasting = step == last || step % interval == 0 || seconds > kLongStep;
    if (!terminal && !lasting) return;
    const auto left = static_cast<Index>(watch_.seconds() / static_cast<double>(step - first_step_) *
                                         static_cast<double>(last - step));
    print("%s%*ld/%ld%s  loss %.4f%s  norm %.2f  %s tok/s  %2.0f%% matmul  %s  %ld:%02ld left%s", fresh_line(),
          static_cast<int>(std::to_string(last).size()), step, last, epoch_at(step), result.measures.loss,
          shown(result.measures), result.gradient.norm, human_count(tokens_per_second), 100 * utilisation,
          human_bytes(device.arena.peak()), left / 60, left % 60, Escape{lasting ? "\n" : ""});
    std::fflush(stdout);
  }
  // Of each layer's experts, 1 for equal use.
  static Json loads(const RoutingCounts& routing) {
    std::vector<std::vector<double>> loads(static_cast<std::size_t>(routing.layers()));
    for (std::size_t l = 0; l < loads.size(); ++l)
      for (Index e = 0; e < routing.experts; ++e)
        loads[l].push_back(std::round(1000 * routing.load(static_cast<Index>(l), e)) / 1000);
    return loads;
  }
  // On-line GRPO: rounds that teach nothing.
  void check_round(Index step, const Measures& measures) {
    constexpr Index several = 5;
    idle_rounds_ = measures.others.at("without_advantage") == 1 ? idle_rounds_ + 1 : 0;
    if ((idle_rounds_ == 1 && step == 1) || idle_rounds_ == several)
      note(
          format("warning: in the %s the completions of each prompt have the same reward, so the model learns nothing "
                 "from it; check the rewards, or use easier or harder prompts or a larger --group",
                 step == 1 ? "first round" : format("last %ld rounds", several)));
    if (step == 1 && measures.others.at("stopped") == 0)
      note(format("warning: all completions of the first round were cut off at %ld tokens; use a larger --completion",
                  run_.grpo->completion()));
  }
  void evaluation(Index step, const Evaluation& e) override {
    const double value = e.reward ? *e.reward : e.measures.loss;
    const std::string what = e.reward ? "reward" : "loss";
    Json line = {{"step", step}, {"evaluation_" + what, value}};
    std::string details = shown(e.measures);
    if (run_.settings.objective.kind == ObjectiveKind::sft && e.halves) {
      line["first_half"] = e.halves->first;
      line["second_half"] = e.halves->second;
      details = format(" (tokens in the first half of each document %.4f, in the second %.4f)", e.halves->first,
                       e.halves->second);
    }
    for (const auto& [measure, value] : e.measures.others) line["evaluation_" + measure] = value;
    if (routing_.rows > 0) line["expert_load"] = loads(std::exchange(routing_, {}));
    record(line);
    if (sample && step < run_.last_step()) add_sample(step);
    write_page();
    print("%safter step %ld: held-out %s %.*f%s\n", fresh_line(), step, what, e.reward ? 3 : 4, value, details);
    std::fflush(stdout);
  }
  void saved(Index step, const fs::path& checkpoint) override {
    write_page();
    if (step != run_.last_step()) return;
    const fs::path last = directory_.path() / "last";
    print("saved    %s%s\n", checkpoint, without_link(last) == checkpoint ? (", which is " + last.string()) : "");
  }
  void note(const std::string& text) override { print("%snote     %s\n", fresh_line(), text); }
  // Names the best checkpoint.
  void end() {
    const RunDirectory::HeldOut best = directory_.best(), lowest = directory_.lowest();
    if (!std::isfinite(best.loss)) return;
    const char* what = options_.online_grpo() ? "reward" : "loss";
    const auto shown = [&](double loss) { return format("%s %.4f", what, options_.online_grpo() ? -loss : loss); };
    const fs::path link = directory_.path() / "best";
    print("best     %s, held-out %s%s\n", best.path, shown(best.loss),
          without_link(link) == best.path ? (", which is " + link.string()) : "");
    if (lowest.loss < best.loss)
      note(format("after step %ld it was %s, but that is no checkpoint: see --checkpoint-every", lowest.step,
                  shown(lowest.loss)));
  }

  std::function<Json()> sample;  // of the model, for the report after an evaluation; may be empty

  // A line of metrics.jsonl, which is also in the report.
  void record(const Json& line) {
    if (!directory_.write_metrics(line))
      note("warning: metrics.jsonl was removed during the run; a new one has the lines from here on");
    log_.add(line);
    if (events_) events_->add(line);
  }
  // Writes report.html. A run goes on without it, unless a signal ends both.
  void write_page() {
    if (this_process().rank > 0) return;
    const fs::path page = directory_.path() / kReportName;
    try {
      require_replaceable_page(page);
      write_report(page, {report_of(log_, directory_.path())});
    } catch (const std::exception& error) {
      if (!std::exchange(without_page_, true))
        print_error("streambp: note: no report: %s\n", std::string(error.what()));
    }
  }
  // The page of a run that ends with an error says why.
  void failed(const std::string& error) noexcept {
    if (log_.empty()) return;  // the run has not begun
    try {
      std::string text = error;
      const std::string secret = RewardProgram::shown(options_.grpo.program, 200);  // as such errors name the command
      if (const std::size_t at = text.find(secret); at != std::string::npos) text.erase(at, secret.size());
      record({{"step", last_step_}, {"error", text}});
      write_page();
    } catch (...) {  // a full disk, or a signal; the run ends with its error all the same
    }
  }

 private:
  // What the run's report says before its curves.
  Json beginning() const {
    const TrainOptions& o = options_;
    const StepSettings& s = run_.settings;
    return {{"command", command_line({}, o.table.secrets())},
            {"date", now_in_utc()},
            {"version", std::string(kVersion) + ", commit " + kCommit},
            {"machine", device_name(s.device)},
            {"matmul_rate", machine_rate_},
            {"model", describe(s.config)},
            {"trained", describe_trained(s.config)},
            {"trained_parts", trained_parts(s.config)},
            {"data", run_.source.description},
            {"data_fingerprint", run_.source.fingerprint},
            {"objective", o.objectives.objective},
            {"steps", run_.optimizer.steps},
            {"tokens", run_.tokens_per_step()},
            {"rate", describe_rate(run_.optimizer, o.schedule)},
            {"clip", run_.optimizer.clip},
            {"planned_memory", run_.memory.near},
            {"mode", o.mode},
            {"chunk", run_.schedule.chunk},
            {"block", run_.schedule.block},
            {"kept", describe(run_.schedule.kept, s.config)},
            {"ranks", s.ranks.all.size},
            {"options", run_.options}};
  }
  // "  epoch 1.3/3"
  std::string epoch_at(Index step) const {
    if (run_.steps_per_epoch == 0) return "";
    const auto epochs = [&](Index steps) { return static_cast<double>(steps) / run_.steps_per_epoch; };
    return format("  epoch %.1f/%g", epochs(step), std::round(10 * epochs(run_.optimizer.steps)) / 10);
  }
  // A run goes on without it.
  void add_sample(Index step) {
    Json text;
    try {
      text = sample();
    } catch (const std::exception& error) {
      return note(std::string("no sample: ") + error.what());
    }
    record({{"step", step}, {"sample", text}});
  }

  RunDirectory& directory_;
  const TrainOptions& options_;
  const TrainTask& task_;
  const Run& run_;
  RoutingCounts routing_;  // since the last evaluation
  const double machine_rate_;
  Index first_step_ = 0, last_step_ = 0, idle_rounds_ = 0;
  Stopwatch watch_;
  std::optional<Interruption> interruption_;
  std::optional<StepProgress> progress_;
  RunLog log_;
  bool without_page_ = false;  // which the user knows
  std::optional<EventFile> events_;
};

}  // namespace streambp
