// What metrics.jsonl of a run says, in bounded memory: for report.html (commands/report.h), while the run goes on or from
// the file of a run that is going on, was killed, or was resumed.
#pragma once

#include <cmath>

#include "data/files/hash.h"
#include "data/files/lines.h"
#include "data/progress.h"
#include "text/json.h"

namespace streambp {

// A metric over steps. When there are too many points, neighbours are merged; each keeps the lowest and the highest of its
// values, so no peak is lost.
class MetricSeries {
 public:
  void add(Index step, double value) {
    if (!std::isfinite(value)) return static_cast<void>(lost_.size() < kMost ? lost_.push_back(step) : void());
    if (points_.empty() || points_.back().count == together_) points_.push_back({step, 0, 0, value, value});
    points_.back().add(step, value);
    if (points_.size() > kMost) merge();
  }

  Json json() const {
    Json steps = Json::array(), means = Json::array(), lows = Json::array(), highs = Json::array();
    for (const Point& p : points_) {
      steps.push_back(p.step), means.push_back(shortened(p.sum / static_cast<double>(p.count)));
      lows.push_back(shortened(p.low)), highs.push_back(shortened(p.high));
    }
    Json series = {{"steps", steps}, {"mean", means}};
    if (together_ > 1) series["low"] = lows, series["high"] = highs;
    if (!lost_.empty()) series["not_finite"] = lost_;
    return series;
  }

 private:
  static constexpr std::size_t kMost = 600;

  struct Point {
    Index step;  // the last one
    Index count;
    double sum, low, high;

    void add(Index later, double value) {
      step = later, ++count, sum += value;
      low = std::min(low, value), high = std::max(high, value);
    }
  };

  void merge() {
    for (std::size_t i = 0; i < points_.size(); i += 2) {
      Point& merged = points_[i / 2] = points_[i];
      if (i + 1 == points_.size()) break;
      const Point& next = points_[i + 1];
      merged.step = next.step, merged.count += next.count, merged.sum += next.sum;
      merged.low = std::min(merged.low, next.low), merged.high = std::max(merged.high, next.high);
    }
    points_.resize((points_.size() + 1) / 2);
    together_ *= 2;
  }

  // Five digits are more than a chart shows.
  static double shortened(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.5g", value);
    return std::strtod(text, nullptr);
  }

  std::vector<Point> points_;
  std::vector<Index> lost_;  // steps with NaN or infinity
  Index together_ = 1;       // values in a point
};

class RunLog {
 public:
  RunLog() = default;
  // Lines that are damaged, as a killed run may leave its last one, are counted and left out.
  explicit RunLog(
      const fs::path& metrics, const OnProgress& progress = [](const Progress&) {}) {
    Lines lines(metrics);
    Progress reading = {"reading " + metrics.string()};
    for (std::string line; lines.next(line);) {
      reading.fraction = lines.fraction(), progress(reading);
      const Json json = json_or_null(line);
      const bool good = json.is_object() && json.contains("step") && json["step"].is_number_integer();
      good ? add(json) : static_cast<void>(++damaged_);
    }
  }

  void add(const Json& line) {
    const Index step = line["step"];
    for (const auto& [name, value] : line.items()) {
      if (name == "begin" && value.is_object()) {
        add_spread(begins_, value, step);
      } else if (name == "sample" && value.is_object() && value.value("prompt", Json()).is_string() &&
                 value.value("text", Json()).is_string()) {
        add_spread(samples_, value, step);
      } else if (name == "error" && value.is_string()) {
        error_ = {{"step", step}, {"text", value}};
      } else if (name == "expert_load" && is_table(value)) {
        expert_load_ = value;
      } else if (name == "gradient_fingerprint" && value.is_string()) {
        add_fingerprint(step, value);
      } else if (name != "step" && (metrics_.contains(name) || metrics_.size() < kMostMetrics) &&
                 (value.is_number() || value.is_null())) {  // JSON has no NaN
        metrics_[name].add(step, value.is_null() ? NAN : value.get<double>());
      }
    }
    last_ = std::max(last_, step);
    if (line.contains("loss")) error_ = nullptr;  // the run went on
  }

  Json json() const {
    Json series = Json::object();
    for (const auto& [name, metric] : metrics_) series[name] = metric.json();
    return {{"begins", begins_},   {"samples", samples_},           {"series", series}, {"last", last_},
            {"damaged", damaged_}, {"fingerprints", fingerprints_}, {"error", error_},  {"expert_load", expert_load_}};
  }
  bool empty() const { return metrics_.empty() && begins_.empty(); }

 private:
  static constexpr std::size_t kMostMetrics = 64, kMostOfThem = 32;

  // Lines of numbers, none of them empty.
  static bool is_table(const Json& lines) {
    const auto is_line = [](const Json& line) {
      return line.is_array() && !line.empty() && std::ranges::all_of(line, [](auto& x) { return x.is_number(); });
    };
    return lines.is_array() && !lines.empty() && std::ranges::all_of(lines, is_line);
  }
  // Of the first steps and each power of two: [step, its fingerprint, a hash of those of all steps since `first` without a
  // gap, first], so that two runs show how long they are the same.
  void add_fingerprint(Index step, const std::string& fingerprint) {
    if (step != fingerprinted_ + 1) first_ = step, so_far_.clear();
    fingerprinted_ = step, so_far_ = hash_of(so_far_ + fingerprint);
    if (step <= 16 || (step & (step - 1)) == 0) fingerprints_.push_back({step, fingerprint, so_far_, first_});
  }
  // The first one, and others spread over the run.
  static void add_spread(std::vector<Json>& all, Json one, Index step) {
    one["step"] = step;
    all.push_back(std::move(one));
    if (all.size() <= kMostOfThem) return;
    std::vector<Json> kept;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (i % 2 == 0 || i + 1 == all.size()) kept.push_back(std::move(all[i]));
    all = std::move(kept);
  }

  std::vector<Json> begins_, samples_, fingerprints_;
  std::map<std::string, MetricSeries> metrics_;
  Json error_, expert_load_;  // the last ones
  std::string so_far_;
  Index last_ = 0, damaged_ = 0, fingerprinted_ = 0, first_ = 0;
};

}  // namespace streambp
