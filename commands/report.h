// report.html: the curves of a run, what it is, and what it has written, as a page (pages/report.js). `train` writes it into
// the run's directory; `report` makes it again from metrics.jsonl, and compares runs.
#pragma once

#include <ctime>

#include "commands/page.h"
#include "data/files/run_log.h"
#include "model/config.h"
#include "model/parameters.h"

namespace streambp {

constexpr std::size_t kMostText = 4000;  // bytes of a text to read

inline std::string shortened(const std::string& text) {
  if (text.size() <= kMostText) return text;
  std::size_t end = kMostText;
  while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // a character stays whole
  return text.substr(0, end) + " [... " + std::to_string(text.size() - end) + " more bytes]";
}

// The whole lines in the first and the last megabytes of a file.
inline std::vector<std::string> lines_of(const fs::path& path) {
  constexpr std::size_t part = 1 << 22;
  std::error_code error;
  if (fs::symlink_status(path, error).type() == fs::file_type::not_found) return {};
  const std::size_t size = regular_file_size(path);
  const FilePointer file = open_to_read(path);
  std::string begin(std::min(size, part), '\0'), end(std::min(size - begin.size(), part), '\0');
  begin.resize(read_block(file, begin, path));
  std::fseek(file.get(), -static_cast<long>(end.size()), SEEK_END);
  end.resize(read_block(file, end, path));
  if (size > 2 * part) begin.resize(begin.rfind('\n') + 1), end.erase(0, end.find('\n') + 1);
  std::vector<std::string> lines;
  std::istringstream text(begin + end);
  for (std::string line; std::getline(text, line) && !text.eof();) lines.push_back(line);
  return lines;
}

// What a part of a message says; of anything but text, its JSON.
inline std::string words_of(const Json& part) {
  if (part.is_string()) return part;
  if (!part.is_array()) return part.is_object() && part.contains("text") ? words_of(part["text"]) : part.dump();
  std::string words;
  for (const Json& item : part) words += words_of(item);
  return words;
}

// The roles and words of a prompt's messages; a text has no role.
inline Json turns_of(const Json& prompt) {
  Json turns = Json::array();
  if (!prompt.is_array()) turns.push_back({"", shortened(words_of(prompt))});
  std::size_t bytes = 0;
  for (const Json& message : prompt.is_array() ? prompt : Json::array()) {
    std::string role, words;
    for (const auto& [name, value] : message.items()) {
      if (name == "role") role = words_of(value);
      if (name == "role" || value.is_null()) continue;
      words += (words.empty() ? "" : "\n") + (name == "content" ? "" : name + ": ") + words_of(value);
    }
    turns.push_back({role, shortened(words)});
    if ((bytes += words.size()) >= kMostText && turns.size() < prompt.size()) {
      turns.push_back({"", "[... " + std::to_string(prompt.size() - turns.size()) + " more messages]"});
      break;
    }
  }
  return turns;
}

// Groups of completions that on-line GRPO sampled, from the first to the last.
inline Json completions_of(const fs::path& run) {
  constexpr std::size_t most = 16;
  const std::vector<std::string> lines = lines_of(run / "completions.jsonl");
  Json groups = Json::array();
  for (std::size_t i = 0; i < std::min(most, lines.size()); ++i) {
    const std::size_t at = lines.size() <= most ? i : i * (lines.size() - 1) / (most - 1);
    const Json line = json_or_null(lines[at]);
    const bool whole = line.is_object() && line.contains("step") && line["step"].is_number() &&
                       line.contains("prompt") && line.contains("texts") && line["texts"].is_array() &&
                       line.contains("rewards") && line["rewards"].is_array();
    if (!whole) continue;
    Json group = {{"step", line["step"]}, {"rewards", line["rewards"]}, {"prompt", turns_of(line["prompt"])}};
    for (const Json& text : line["texts"])
      if (text.is_string() && group["texts"].size() < 4) group["texts"].push_back(shortened(text));
    groups.push_back(group);
  }
  return groups;
}

// What the page says of the run in this directory.
inline Json report_of(const RunLog& log, const fs::path& run) {
  Json report = log.json();
  const fs::path path = fs::absolute(run).lexically_normal();
  report["name"] = path.has_filename() ? path.filename() : path.parent_path().filename();
  report["completions"] = completions_of(run);
  for (Json& sample : report["samples"])
    for (const char* text : {"prompt", "text"}) sample[text] = shortened(sample[text]);
  return report;
}

inline void write_report(const fs::path& page, const std::vector<Json>& runs) {
  const std::string first = runs[0].at("name");
  const std::string title = runs.size() == 1 ? "Run “" + first + "”"
                                             : "Runs “" + first + "” and " + std::to_string(runs.size() - 1) + " more";
  write_page(page, title, {"report.js"}, {{"runs", runs}});
}

// What is trained: [kind of tensor, its layers, how many numbers].
inline Json trained_parts(const Config& config) {
  struct Part {
    std::vector<Index> layers;
    double numbers = 0;
  };
  std::map<std::string, Part> parts;
  for (const Parameter& p : trained_parameters(config)) {
    std::string kind = p.name;
    std::vector<Index> layer;
    if (const std::size_t digits = kind.find_first_of("0123456789"); p.in_layer && digits != std::string::npos) {
      layer.push_back(std::stol(kind.substr(digits)));  // model.layers.12.self_attn.q_proj.weight
      kind = kind.substr(kind.find('.', digits) + 1);
    }
    Part& part = parts[kind];
    part.layers.insert(part.layers.end(), layer.begin(), layer.end());
    part.numbers += static_cast<double>(p.rows * p.cols);
  }
  Json result = Json::array();
  for (const auto& [kind, part] : parts) result.push_back({kind, part.layers, part.numbers});
  return result;
}

inline std::string now_in_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", gmtime_r(&now, &utc));
  return text;
}

constexpr const char* kReportName = "report.html";

}  // namespace streambp
