// What `streambp verify` reads: a model, and a batch of random documents, user data or given tokens; and what it
// writes.
#pragma once

#include "commands/chat_options.h"
#include "commands/model_options.h"
#include "commands/objective_options.h"
#include "commands/option_table.h"
#include "commands/part_options.h"
#include "commands/report.h"
#include "commands/step_progress.h"
#include "commands/text.h"
#include "data/documents/packing.h"
#include "data/documents/tokenised.h"
#include "data/files/checkpoint.h"
#include "parallel/processes.h"
#include "referee/random_documents.h"
#include "referee/recorded_step.h"
#include "training/engine.h"

namespace streambp {

class VerifyInput {
 public:
  ModelOptions model;
  ObjectiveOptions objectives;
  PartOptions part;
  std::string adapter;
  std::uint64_t seed = 1;

  void add_to(OptionTable& options) {
    options_ = &options;
    model.add_to(options, "--model", ModelOptions::Vocabulary::an_option);
    objectives.add_to(options);
    part.add_to(options);
    options.add("--adapter", &adapter, "Load the adapters of this directory, in PEFT's layout, into --model");
    options.section("Stream");
    options.add("--length", &length_, "Tokens of the stream, in documents of unequal length",
                checks::between(4, 1 << 24), "1200; a certificate 300; on a GPU more than three tiles");
    options.add("--documents", &documents_, "Documents in the stream", checks::between(1, 1 << 20), "3; for pairs 4");
    options.add("--data", &data_,
                "Use documents (dpo: pairs) from these files and folders; needs a --model directory with a tokenizer. "
                "Log-probs, rewards and advantages are random");
    add_chat_options(options, data_options_.chat);
    options.add("--tokens", &tokens_file_, "Use the tokens in this file (little-endian int32) as one document");
    options.add("--seed", &seed, "Seed of random weights and tokens");
  }

  // Sets the length of the stream, unless --length does.
  void default_length(Index length) {
    if (!options_->given("--length")) length_ = length;
  }

  // Reads or draws the batch, and checks it against the model.
  void prepare() {
    require(data_.empty() || tokens_file_.empty(), "--data and --tokens cannot be combined; leave out one");
    const bool tokens = !tokens_file_.empty();
    options_->only({"--chat", "--date", "--trust-messages"}, !data_.empty(), " is for --data; leave it out");
    options_->only({"--documents"}, data_.empty() && !tokens, " is for random documents; leave it out");
    options_->only({"--length"}, !tokens, " is for random documents and --data; leave it out");
    objective = objectives.settings(length_);
    if (objective.kind == ObjectiveKind::dpo && !options_->given("--documents")) documents_ = 4;
    if (!tokens_file_.empty()) {
      batch = tokens_of_file();
      length_ = batch.size();
    }
    prepare_model();
    if (!data_.empty()) first_then_others([&] { batch = documents_of_data(); });
    if (batch.size() == 0) {
      require(documents_ * 2 <= length_, "--documents ", documents_, " of two tokens or more do not fit --length ",
              length_);
      batch = random_documents(config, documents_, length_, seed);
    }
    config.rope_scaling.longest = data_.empty() && tokens_file_.empty() ? length_ : batch.longest();
    const auto documents = static_cast<Index>(batch.documents().size());
    require(objective.kind != ObjectiveKind::dpo || documents % 2 == 0,
            "--objective dpo needs pairs of documents, not ", documents, "; give an even number of --documents");
    require(config.positions == Positions::rope || batch.size() <= config.max_length * documents, "--length ",
            batch.size(), " in ", documents, " documents is longer than the ", config.max_length,
            " positions of the model; give more --documents");
  }

  // Without a batch.
  void prepare_model() {
    model.model = local_model(model.model);
    if (is_model(model.model)) weights = model.model = model_directory(model.model);
    config = model.config(length_);
    choose_part();
  }

  bool reads_data() const { return !data_.empty(); }

  // One micro-batch per token stream: different random documents, or the same --data or --tokens for each.
  std::vector<Batch> batches(Index streams) const {
    std::vector<Batch> all(static_cast<std::size_t>(streams), batch);
    for (Index i = 1; i < streams && data_.empty() && tokens_file_.empty(); ++i)
      all[static_cast<std::size_t>(i)] =
          random_documents(config, documents_, length_, seed + static_cast<std::uint64_t>(i));
    return all;
  }

  Config config;
  Objective objective;
  Batch batch;
  fs::path weights;  // a model directory; empty: random weights

 private:
  // What is trained: what the options say, or what the adapters' files say.
  void choose_part() {
    if (adapter.empty()) return part.apply(config);
    require(is_model(model.model), "--adapter goes with --model DIR, the base of the adapters");
    options_->only(PartOptions::kFlags, false, " is for new adapters, without --adapter; leave it out");
    adapter = adapter_directory(adapter);
    AdapterDirectory(adapter).add_to(config);
    apply_base(part.base, config);
  }

  Batch tokens_of_file() const {
    const std::string bytes = read_file(tokens_file_, std::size_t{1} << 26);
    std::vector<std::int32_t> tokens(bytes.size() / 4);
    require(tokens.size() >= 2 && bytes.size() % 4 == 0, tokens_file_, ": ", bytes.size(),
            " bytes are not two or more tokens of 4 bytes each");
    std::memcpy(tokens.data(), bytes.data(), bytes.size());
    Batch result;
    result.append(tokens);
    return result;
  }

  // Documents in the order of the data, up to `length` tokens.
  Batch documents_of_data() {
    require(is_model(model.model), "--data goes with --model DIR, a model directory with a tokenizer");
    const TokenFile file = tokenised(data_parts(data_), model.model, data_options_, cache_directory());
    file.require_vocabulary(config.vocab);
    const Index longest = config.positions == Positions::learned ? config.max_length : length_;
    const bool pairs = objective.kind == ObjectiveKind::dpo, grpo = objective.kind == ObjectiveKind::grpo;
    if (!grpo || file.preferences()) objectives.require_kind(file);
    Batch result;
    for (Index d = 0; d < file.documents() && result.size() + 2 <= length_; ++d) {
      const Index left = length_ - result.size(), room = pairs ? length_ / 2 : left;  // half for each side of a pair
      if (pairs && d % 2 == 0 && result.size() > 0 && file.length(d) + file.length(d + 1) > left) break;
      const PackedPiece piece{d, 0, std::min({file.length(d), longest, room})};
      Batch document;
      append(document, file, piece);
      if (!grpo || document.target_count() > 0) append(result, file, piece);
    }
    require(result.target_count() > 0, data_[0], ": its first ", length_,
            " tokens have no targets; give a larger --length");
    return result;
  }

  OptionTable* options_ = nullptr;
  Index length_ = 1200, documents_ = 3;
  std::vector<std::string> data_;
  DataOptions data_options_ = {.progress = show_progress};
  std::string tokens_file_;
};

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
