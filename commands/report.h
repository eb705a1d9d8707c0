// report.html: the curves of a run, what it is, and what it has written, as a page (pages/report.js). `train` writes it into
// the run's directory; `report` makes it again from metrics.jsonl, and compares runs.
#pragma once

#include "commands/page.h"
#include "data/files/run_log.h"
#include "model/config.h"

namespace streambp {

constexpr const char* kReportName = "report.html";

// What the page says of the run in this directory.
Json report_of(const RunLog& log, const fs::path& run);
void write_report(const fs::path& page, const std::vector<Json>& runs);

// What is trained: [kind of tensor, its layers, how many numbers].
Json trained_parts(const Config& config);
std::string now_in_utc();

}  // namespace streambp
