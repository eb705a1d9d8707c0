// streambp eval: the loss of a model on documents, by file and by position.
#include "commands/chat_options.h"
#include "commands/command.h"
#include "commands/device_options.h"
#include "commands/part_options.h"
#include "commands/step_progress.h"
#include "data/documents/packing.h"
#include "data/documents/tokenised.h"
#include "data/files/checkpoint.h"
#include "training/plan.h"

namespace streambp {
namespace {

constexpr const char* kEvalDescription =
    "Measure a model's loss and perplexity on documents.\n\n"
    "  streambp eval --model qwen3-0.6b/ --data held-out.jsonl books.txt\n\n"
    "Documents longer than --length are split into pieces that do not see each other, so their loss is higher than\n"
    "that of one forward pass; eval reports this. The second table groups targets by context length, the number of\n"
    "tokens before them in their document or piece: a model that uses its context has a lower loss with more of it.\n"
    "Data files are as for streambp tokenize; the loss covers the same tokens as in training.";

class EvalCommand : public Command {
 public:
  explicit EvalCommand(CLI::App& app) : Command(app, "eval", kEvalDescription) {
    source.add_to(options);
    options.add("--data", &data, "Data: files and folders");
    options.require("--data");
    add_chat_options(options, data_options.chat);
    options.add("--skip-bad", &data_options.skip_bad, "Skip unusable lines");
    options.add("--length", &length, "Maximum tokens of a stream (default: chosen by model and memory)",
                checks::between(2, kLongestStream), "none");
    options.add("--json", &json_file, "Also write the results to this JSON file", checks::results_file());
    device.add_to(options, {"auto", "f32", "bf16"}, DeviceOptions::Optimizers::none);
    device.optimizer = "none";
  }

 private:
  // The mean loss of some targets.
  struct Loss {
    double sum = 0;
    Index count = 0;
    void add(double loss) { sum += loss, ++count; }
    double mean() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
    std::vector<std::string> cells() const {
      if (count == 0) return {"0", "", ""};
      return {std::to_string(count), format("%.4f", mean()), format("%.4g", std::exp(mean()))};
    }
    Json json() const {
      if (count == 0) return {{"targets", 0}};
      return {{"targets", count}, {"loss", mean()}, {"perplexity", std::exp(mean())}};
    }
  };
  struct File {
    std::string path;
    TokenFile tokens;
    Loss loss = {};

    // Documents that do not fit a stream.
    Index split(Index length) const {
      return std::ranges::count_if(tokens.lengths(), [&](Index n) { return n > length; });
    }
  };

  static constexpr Index kFirstBucket = 128;  // tokens of context; every further bucket ends at twice the context

  void run() override {
    source.resolve();
    config = source.config();
    model = source.model;
    settings = device.settings(config, 1);
    std::vector<File> files;
    for (const DataPart& part : data_parts(data)) {
      const std::string& path = part.name;
      require(part.weight == 0, path, ": weights are for training; leave them out");
      files.push_back({path, read_tokens(part)});
      files.back().tokens.require_vocabulary(config.vocab);
      require(files.back().tokens.kind() == DataKind::documents, path, ": ",
              kDataKinds[static_cast<int>(files.back().tokens.kind())],
              ", which eval does not measure; train --objective dpo or grpo evaluates held-out ones");
    }
    choose_length(files);
    measure(files);
    require(total.count > 0, data[0], ": no targets; no document has a token in the loss");
    report(files);
  }

  // Opens a token file directly; other data goes through a temporary token file.
  TokenFile read_tokens(const DataPart& part) const {
    const PrivateDirectory directory;
    if (!holds_tokens({part})) write_tokens({part}, model, data_options, directory.path() / "tokens.safetensors");
    return holds_tokens({part}) ? TokenFile(part.files[0])
                                : TokenFile(directory.path() / "tokens.safetensors", part.name);
  }

  Schedule schedule(Index rows) const {
    return schedule_for(Mode::stream, settings, rows, default_chunk(settings.tile));
  }

  std::size_t memory(Index rows) const { return plan_evaluation(settings, rows, schedule(rows)); }

  void choose_length(const std::vector<File>& files) {
    const std::size_t free = free_memory(settings.device);
    const Index limit = config.max_length > 0 ? config.max_length : kLongestStream;
    require(length <= limit || config.positions == Positions::rope, "--length ", length, " is longer than the ", limit,
            " positions that the model has learned");
    Index longest = 0;
    for (const File& file : files) longest = std::max(longest, file.tokens.longest());
    constexpr Index usual = 2048;  // short documents share a stream
    const Index wanted = length > 0 ? length : std::min(std::max(longest, usual), limit);
    const Index fitting = memory(wanted) <= free ? wanted : largest(wanted, [&](Index n) { return memory(n) <= free; });
    require(fitting >= 2 && (length == 0 || fitting == wanted), "a stream of ", wanted, " tokens needs ",
            human_bytes(memory(wanted)), ", and ", human_bytes(free), " are free: there is room for ", fitting,
            " tokens; give a smaller --length or model");
    length = fitting;
    settings.config.rope_scaling.longest = std::min(longest, length);
  }

  void measure(std::vector<File>& files) {
    const auto engine = make_engine(settings, length, memory(length));
    engine->load(model, source.adapter);
    for (File& file : files) {
      Packing packing(cut(file.tokens.lengths(), length, TooLong::split), length, 1, 1, layout_of(config));
      for (Index i = 0; i < packing.packs(); ++i) {
        show_work(format("%s: %ld of %ld", file.path, i, packing.packs()));
        Batch batch;
        append(batch, file.tokens, packing.pack(i));
        if (batch.target_count() == 0) continue;
        count(file, batch, engine->evaluate({batch}, schedule(length)).front());
      }
    }
    show_work("");
  }

  void count(File& file, const Batch& batch, const std::vector<double>& logp) {
    for (std::size_t t = 0; t < batch.targets.size(); ++t) {
      if (batch.targets[t] < 0) continue;
      const double loss = -logp[t];
      require(std::isfinite(loss), file.path, ": the loss of token ", batch.targets[t], " at position ",
              batch.positions[t] + 1, " is ", loss, "; are the weights damaged, or out of range for this --dtype?");
      std::size_t bucket = 0;
      for (Index end = kFirstBucket; batch.positions[t] >= end; end *= 2) ++bucket;
      if (bucket >= buckets.size()) buckets.resize(bucket + 1);
      file.loss.add(loss), total.add(loss), buckets[bucket].add(loss);
    }
  }

  void report(const std::vector<File>& files) const {
    Json json = {{"model", source.name()}, {"length", length}, {"dtype", name(settings.dtype)}};
    print("%s\n%s on %s, streams of up to %ld tokens\n\n", describe(config), name(settings.dtype),
          device_name(settings.device), length);
    report_by_file(files, json);
    for (const File& file : files) {
      if (const std::string skipped = file.tokens.skipped(); !skipped.empty()) print("%s\n", skipped);
    }
    print("\n");
    report_by_position(json);
    if (!json_file.empty()) write_results(json_file, std::move(json));
  }

  static std::vector<std::string> row(std::vector<std::string> begin, const Loss& loss) {
    for (std::string& cell : loss.cells()) begin.push_back(std::move(cell));
    return begin;
  }

  void report_by_file(const std::vector<File>& files, Json& json) const {
    TextTable by_file({"data", "documents", "targets", "loss", "perplexity"});
    Index documents = 0, split = 0;
    for (const File& file : files) {
      by_file.add(row({file.path, std::to_string(file.tokens.documents())}, file.loss));
      json["files"].push_back(file.loss.json());
      json["files"].back()["path"] = file.path;
      json["files"].back()["documents"] = file.tokens.documents();
      json["files"].back()["split"] = file.split(length);
      documents += file.tokens.documents();
      split += file.split(length);
    }
    if (files.size() > 1) by_file.add(row({"total", std::to_string(documents)}, total));
    json["total"] = total.json();
    by_file.print();
    if (split == 0) return;
    print(
        "%ld of %ld documents are longer than %ld tokens. They were split into pieces that do not see each other,\n"
        "so their loss is higher than that of one forward pass%s.\n",
        split, documents, length, config.positions == Positions::rope ? "; a larger --length avoids this" : "");
  }

  void report_by_position(Json& json) const {
    TextTable by_position({"context", "targets", "loss", "perplexity"});
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      const Index end = kFirstBucket << i, begin = i == 0 ? 0 : end / 2;
      by_position.add(row({format("%ld-%ld", begin, end - 1)}, buckets[i]));
      json["positions"].push_back(buckets[i].json());
      json["positions"].back()["begin"] = begin;
      json["positions"].back()["end"] = end;
    }
    by_position.print();
  }

  ModelSource source;
  std::string model, json_file;
  std::vector<std::string> data;
  DataOptions data_options = {.progress = show_progress};
  DeviceOptions device;
  Index length = 0;

  Config config;
  StepSettings settings;
  Loss total;
  std::vector<Loss> buckets;  // by context: 0 .. 127, 128 .. 255, 256 .. 511, ...
};

}  // namespace

std::unique_ptr<Command> eval_command(CLI::App& app) { return std::make_unique<EvalCommand>(app); }

}  // namespace streambp
