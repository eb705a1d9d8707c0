// The files that `streambp verify` writes.
#pragma once

#include <unistd.h>

#include <set>

#include "commands/option_table.h"
#include "commands/print.h"
#include "commands/report.h"
#include "data/files/checkpoint.h"
#include "referee/recorded_step.h"
#include "training/engine.h"

namespace streambp {

struct VerifyOutput {
  std::string gradient, batch, json, html;

  void add_to(OptionTable& options) {
    options.section("Output");
    options.add(
        "--save-gradient", &gradient,
        "Write the gradient of the last stream run to this safetensors file, in float32 (with --dtype f64 in float64)",
        checks::results_file());
    options.add("--save-batch", &batch,
                "Write the batch to this safetensors file, in the form of --batch, for another trainer",
                checks::results_file());
    options.add("--json", &json, "Write the results to this JSON file", checks::results_file());
    options.add("--html", &html, "Write the results to this page, with a map of all parameters", checks::page());
  }

  void check() const {
    std::set<std::string> files;
    for (const auto& [option, file] : {std::pair{"--save-gradient", gradient}, {"--save-batch", batch}})
      require(file.empty() || extension_of(file) == ".safetensors", option, " ", file,
              ": is a safetensors file; name it .safetensors");
    for (const std::string& file : {gradient, batch, json, html})
      require(file.empty() || files.insert(file).second, file, ": another option names the same file");
  }

  // Writes the results. what: the model and the batch, in words.
  void write(Json results, const std::string& what) const {
    if (!json.empty()) write_results(json, results);
    if (html.empty()) return;
    results["what"] = what, results["command"] = command_line(), results["date"] = now_in_utc();
    write_page(html, "What was verified of a gradient", {"certificate.js"}, results);
    print("The page is %s; open it in a browser.\n", html);
  }

  // names: of the tensors of the model's files
  void save_gradient(const Config& config, const StoredNames& names, DType dtype, const HostTensors& values) const {
    dtype == DType::f64 ? save_gradient_as<double>(config, names, values)
                        : save_gradient_as<float>(config, names, values);
  }

 private:
  // Writes the gradient of the trained parameters as numbers of type T.
  template <class T>
  void save_gradient_as(const Config& config, const StoredNames& names, const HostTensors& gradients) const {
    Tensors<T> tensors(config);
    Table<T> rows = trained(table(config, tensors));
    for (Entry<T>& e : rows)
      if (!e.parameter.adapter()) e.parameter.name = names.of(e.parameter.name);
    Plan size;
    allocate(size, rows, Kind::gradients);
    Cpu host(size.arena.peak());
    allocate(host, rows, Kind::gradients);
    std::size_t i = 0;
    for (auto& e : rows) {
      const std::vector<double>& values = gradients[i++];
      host.upload(*e.matrix, std::vector<T>(values.begin(), values.end()).data());
    }
    SafetensorsWriter writer(gradient, {{"format", "pt"}, {"written_by", kWrittenBy}});
    write_tensors(host, writer, "", rows);
    writer.finish();
  }
};

}  // namespace streambp
