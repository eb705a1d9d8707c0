// Reports a training run: on the console, in metrics.jsonl, and in report.html (commands/report.h).
#pragma once

#include <chrono>
#include <optional>

#include "commands/interruption.h"
#include "commands/step_progress.h"
#include "commands/train_task.h"
#include "data/files/event_file.h"
#include "data/files/run_log.h"

namespace streambp {

class TrainReport : public Observer {
 public:
  // machine_rate: FLOP/s of large matrix products, the baseline of utilisation.
  TrainReport(RunDirectory& directory, const TrainOptions& options, const TrainTask& task, double machine_rate)
      : directory_(directory), options_(options), task_(task), run_(task.run), machine_rate_(machine_rate) {}

  void progress(const Progress& progress) override { show_progress(progress); }
  void begin(Index first_step) override;
  void steps_begin() override { interruption_.emplace(); }
  void steps_ended() { interruption_.reset(); }  // from here on, a signal ends the program
  bool interrupted() noexcept override { return Interruption::signal() != 0; }
  void step_begins(Index step, const std::vector<Batch>& batches, DeviceBase& device) override;
  void step_ends() noexcept override { progress_.reset(); }
  void step(const StepReport& report) override;
  void check_round(Index step, const Measures& measures);
  void evaluation(Index step, const Evaluation& evaluation) override;
  void saved(Index step, const fs::path& checkpoint) override;
  void note(const std::string& text) override;
  void end();  // names the best checkpoint

  std::function<Json()> sample;  // of the model, for the report after an evaluation; may be empty

  // A line of metrics.jsonl, which is also in the report.
  void record(const Json& line);
  // Writes report.html. A run goes on without it, unless a signal ends both.
  void write_page();
  // The page of a run that ends with an error says why.
  void failed(const std::string& error) noexcept;

 private:
  Json beginning() const;
  std::string epoch_at(Index step) const;
  void add_sample(Index step);

  using Clock = std::chrono::steady_clock;

  RunDirectory& directory_;
  const TrainOptions& options_;
  const TrainTask& task_;
  const Run& run_;
  const double machine_rate_;
  Index first_step_ = 0, last_step_ = 0, idle_rounds_ = 0;
  Clock::time_point start_;
  std::optional<Interruption> interruption_;
  std::optional<StepProgress> progress_;
  RunLog log_;
  bool without_page_ = false;  // which the user knows
  std::optional<EventFile> events_;
};

}  // namespace streambp
