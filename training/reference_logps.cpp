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

}  // namespace

void attach_reference_logps(Engine& engine, Run& run, const RunDirectory& directory, Observer& observer) {
  const TokenFile& file = run.documents->file;
  const Index longest = run.documents->settings.longest;
  std::optional<std::vector<float>> logps = cached(run, directory, longest);
  if (!logps) {
    auto compute = [&] {
      logps = compute_reference(
          file, {longest, run.rows(), run.settings.ranks.streams()},
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

}  // namespace streambp
