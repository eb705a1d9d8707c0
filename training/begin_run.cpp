// What precedes the first step of a run: its weights, reference log-probs, its directory.
#include "data/documents/reference_logps.h"
#include "training/train.h"

namespace streambp {

namespace {

// The cached log-probs with the key in run.reference, which becomes that of rank 0: the others may have other disks.
std::optional<std::vector<float>> cached(Run& run, const RunDirectory& directory, Index longest) {
  const StepSettings& s = run.settings;
  const auto key = [&] {
    const std::string version = s.dtype == DType::bf16 ? ", version " + std::to_string(kBFloat16Version) : "",
                      type = name(s.dtype) + version + (s.config.base == Base::nf4 ? " on nf4" : "");
    return reference_key(run.documents->file, model_directory(run.model), type, longest);
  };
  std::optional<std::vector<float>> logps;
  const TokenFile& file = run.documents->file;
  if (this_process().rank == 0) {
    run.reference = directory.checkpoint().empty() ? key() : stored_reference(directory.checkpoint());
    logps = find_reference(run.reference_caches, run.reference, file);
    require(logps || run.reference == key(), run.model.string(), ": is no longer the model that the run in ",
            directory.path().string(), " started from, or another version of streambp began the run; its reference ",
            "log-probs are needed: restore the model, or ", reference_name(run.reference));
  }
  run.reference = from_first(run.reference);
  if (largest_of_ranks(logps.has_value()) == 0) return {};
  const std::string bytes = from_first(logps ? std::string(bytes_of(*logps)) : "");
  logps.emplace(bytes.size() / sizeof(float));
  std::memcpy(logps->data(), bytes.data(), bytes.size());
  return logps;
}

// From the cache of an earlier run, or computed by `engine`, which has the weights that the run starts from.
void attach_reference_logps(Engine& engine, Run& run, const RunDirectory& directory, Observer& observer) {
  const TokenFile& file = run.documents->file;
  const Index longest = run.documents->settings.longest;
  std::optional<std::vector<float>> logps = cached(run, directory, longest);
  if (!logps) {
    auto compute = [&] {
      logps = compute_reference(
          file, {longest, run.rows(), run.settings.ranks.streams(), layout_of(run.settings.config)},
          [&](const std::vector<Batch>& batches) { return engine.evaluate(batches, run.schedule); },
          [&](double part) {
            observer.progress({"reference log-probs", part});
          });
    };
    const bool is_reference = directory.checkpoint().empty() && !run.trains_adapters();
    is_reference ? compute() : engine.with_weights_of(model_directory(run.model), compute);
    if (this_process().rank == 0) save_reference(run.reference_caches, run.reference, *logps);
  }
  run.documents->attach(*logps);
  run.source.evaluation = run.documents->evaluation;
}

// Continues from a checkpoint. Returns its step.
Index restore(Engine& engine, const Run& run, const RunDirectory& directory, Observer& observer) {
  const fs::path& checkpoint = directory.checkpoint();
  const fs::path path = state_of(checkpoint);
  const Json json = read_state(checkpoint);
  const Fields state(json, path.string());
  const std::string began = " since the run in " + directory.path().string() + " began; restore it";
  require(state.get<std::string>("data") == run.source.fingerprint, run.source.description, ": the data has changed",
          began, ", or start a new run");
  const bool adapters = run.trains_adapters();
  const auto is_of_run = [&] {
    Config saved = read_config(checkpoint);  // a fine-tuned model keeps its config.json, also with --balance
    saved.balanced = run.settings.config.balanced, saved.balance_factor = run.settings.config.balance_factor;
    return config_to_json(saved) == config_to_json(run.settings.config);
  };
  require(adapters || is_of_run(), (checkpoint / "config.json").string(), ": is not the model that ", path.string(),
          " describes");
  require(!adapters || state.get<std::string>("base") == run.base, run.start.string(), ": has changed", began);
  const Index step = state.get<Index>("step");
  if (run.settings.dtype == DType::bf16 && state.get<Index>("bf16_version", 1) != kBFloat16Version)
    observer.note(
        "another version of streambp computed the steps so far, with other sums in bfloat16; from here on, the "
        "run's bits differ from what that version would give");
  if (run.optimizer.blocks && step > 0) engine.train_block(run.optimizer.blocks, step);
  engine.restore(checkpoint, *run.layout);
  require(step <= run.optimizer.steps, path.string(), ": step ", step, " is beyond the run's ", run.optimizer.steps,
          "; the file is damaged, use an earlier checkpoint");
  return step;
}

}  // namespace

Index begin_run(Engine& engine, Run& run, RunDirectory& directory, Observer& observer) {
  require(run.layout.has_value(), "the run has no layout for its checkpoints; set Run::layout");
  require(run.grpo || run.source.batch, "the run has no batches; set Run::source");
  require(run.documents || !run.needs_reference_logps(),
          "this objective needs reference log-probs, which are those of Run::documents; set it");
  Index step = 0;
  if (!directory.checkpoint().empty()) {
    step = restore(engine, run, directory, observer);
  } else if (run.start.empty()) {
    engine.initialise(run.seed);
  } else {
    engine.load(run.start, run.adapters);
    if (run.adapters.empty()) engine.initialise_adapters(run.seed);
  }
  if (run.needs_reference_logps()) attach_reference_logps(engine, run, directory, observer);
  directory.open(step, run.options);
  if (run.grpo) run.grpo->record_in(directory.keep_until(step, "completions.jsonl"));
  observer.begin(step);
  return step;
}

}  // namespace streambp
