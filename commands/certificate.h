// Prints what holds for a model, data and settings: streambp verify --certificate.
#pragma once

#include "commands/page.h"
#include "commands/verify_options.h"
#include "data/files/tokenizer_file.h"
#include "referee/certificate.h"

namespace streambp {

constexpr Index kLargeModel = 20'000'000;  // parameters

inline std::string text_of(const Certificate::Result& result) {
  const std::string note = result.note.empty() ? "" : " (" + result.note + ")";
  switch (result.verdict) {
    case Certificate::Verdict::same_bits:
      return "same bits" + note;
    case Certificate::Verdict::rounding:
      return format("%.1e apart", result.error) + note;
    case Certificate::Verdict::not_run:
      return "not run: " + result.note;
    default:
      return "FAILS" + (result.error > 0 ? format(": %.1e apart", result.error) : ": " + result.note);
  }
}

// The tokens in the loss, and what the first two documents learn.
inline std::string describe_learned(const Batch& batch, const fs::path& tokenizer_of) {
  const std::vector<Rows> documents = batch.documents();
  std::string text =
      format("%ld of %ld, in %s", batch.target_count(), batch.size(), counted(std::ssize(documents), "document"));
  if (tokenizer_of.empty()) return text;
  const Tokenizer tokenizer = read_tokenizer(tokenizer_of);
  int examples = 0;
  for (std::size_t d = 0; d < std::min<std::size_t>(2, documents.size()); ++d) {
    Tokens learned;
    for (Index t = documents[d].begin; t < documents[d].end; ++t) {
      const std::int32_t target = batch.targets[static_cast<std::size_t>(t)];
      if (target >= 0) learned.push_back(target);
    }
    if (learned.empty()) continue;
    text += (examples++ == 0 ? ", such as " : " and ") + quote(tokenizer.decode(learned));
  }
  return text;
}

// How checkpoints of this model are laid out; nothing if it is random and only adapters are trained.
inline std::optional<ModelLayout> layout_of(const VerifyInput& input) {
  const Config& c = input.config;
  if (input.weights.empty() && !c.adapters.empty()) return std::nullopt;
  ModelLayout layout = input.weights.empty() ? ModelLayout(c) : ModelLayout(input.weights);
  if (c.adapters.empty()) return layout;
  layout.base = fs::absolute(input.weights);
  layout.adapter_config = input.adapter.empty() ? adapter_config(c, input.part.settings(), "base")
                                                : AdapterDirectory(input.adapter).config_for("base");
  return layout;
}

// quick: without lines that take minutes for a large model; full; or the name of a line
inline std::vector<std::string> certificate_choices() {
  std::vector<std::string> names = {"quick", "full"};
  for (const Certificate::Line& line : Certificate::lines()) names.emplace_back(line.name);
  return names;
}

// Completes the subject with what the input says about files. Returns whether no line fails.
inline bool print_certificate(const std::string& which, const VerifyInput& input, Certificate::Subject subject,
                              Json& json) {
  subject.model = input.weights, subject.adapter = input.adapter, subject.layout = layout_of(input);
  const std::string command = command_line({"--certificate", "--html", "--json"});
  subject.quick = which == "quick" && parameter_count(subject.settings.config) > kLargeModel;
  const std::string learned = describe_learned(subject.batch, input.reads_data() ? input.weights : fs::path());
  Certificate certificate(std::move(subject));
  bool all_hold = true;
  for (const Certificate::Line& line : Certificate::lines()) {
    if (which != "quick" && which != "full" && which != line.name) continue;
    const Stopwatch watch;
    std::string what;
    show_work(line.name);
    const Certificate::Result result = certificate.compare(line, what);
    show_work("");
    print("%-13s %s: %s\n", line.name, what, text_of(result));
    std::fflush(stdout);
    const bool ran = result.verdict != Certificate::Verdict::not_run,
               holds = result.verdict != Certificate::Verdict::fails;
    json["certificate"].push_back({{"name", line.name},
                                   {"what", what},
                                   {"result", text_of(result)},
                                   {"holds", ran ? Json(holds) : Json(nullptr)},
                                   {"seconds", watch.seconds()},
                                   {"command", command + " --certificate " + line.name}});
    all_hold &= holds;
  }
  print("%-13s tokens in the loss: %s\n", "learned", learned);
  print("\nTo repeat a line: %s --certificate NAME\n", command);
  json["learned"] = learned, json["command"] = command + " --certificate " + which, json["holds"] = all_hold;
  return all_hold;
}

}  // namespace streambp
