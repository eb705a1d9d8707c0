// streambp report: the curves of runs, as a page.
#include "commands/command.h"
#include "commands/report.h"
#include "commands/step_progress.h"
#include "commands/text.h"

namespace streambp {
namespace {

constexpr const char* kReportDescription =
    "Show the curves of a run as a page, or compare runs.\n\n"
    "A run writes report.html itself. This makes it again from metrics.jsonl, also for a run that goes on or was\n"
    "killed, and shows several runs in one page:\n\n"
    "  streambp report out/run-1                       out/run-1/report.html\n"
    "  streambp report out/run-1 out/run-2             comparison.html\n\n"
    "The page needs no network. It shows the loss, rate, gradient norm, speed and memory of each step, metrics of the\n"
    "objective, completions and samples, and up to which step the gradients of runs have the same fingerprints.";

class ReportCommand : public Command {
 public:
  explicit ReportCommand(CLI::App& app) : Command(app, "report", kReportDescription) {
    options.add("runs", &runs, "Directories of runs");
    options.add("--html", &page, "The page to write", checks::page(),
                "report.html of the run; of several comparison.html");
  }

 private:
  void run() override {
    require(!runs.empty(), "name a run: streambp report out/run-1");
    require(runs.size() <= kMost, "at most ", kMost, " runs can be compared");
    std::vector<Json> reports;
    for (const fs::path run : runs) {
      require(fs::is_directory(run), run.string(), ": no such directory of a run");
      const fs::path metrics = run / "metrics.jsonl";
      require(fs::exists(metrics), metrics.string(), ": no such file; is ", run.string(), " the directory of a run?");
      const RunLog log(metrics, show_progress);
      require(!log.empty(), metrics.string(), ": holds no metrics yet");
      reports.push_back(report_of(log, run));
    }
    std::map<std::string, int> names;
    for (const Json& report : reports) ++names[report.at("name")];
    for (std::size_t i = 0; i < runs.size(); ++i)
      if (names[reports[i].at("name")] > 1) reports[i]["name"] = runs[i];
    if (page.empty()) page = runs.size() == 1 ? fs::path(runs[0]) / kReportName : fs::path("comparison.html");
    require_replaceable_page(page);
    write_report(page, reports);
    print("report   %s\n", page);
  }

  static constexpr std::size_t kMost = 8;

  std::vector<std::string> runs;
  std::string page;
};

}  // namespace

std::unique_ptr<Command> report_command(CLI::App& app) { return std::make_unique<ReportCommand>(app); }

}  // namespace streambp
