// Checkpoints of a training run. Each one is a model directory, plus what training needs:
//
//   OUT/step-000100/config.json, model.safetensors, ...   the model
//   OUT/step-000100/training/optimizer.safetensors        the optimizer's state: Adam's moments, with "m." and "v." before
//                                                         each name (in 8 bits "m8.", "m8.scale.", ...), "master."
//                                                         for float32 weights, and the weights themselves where the
//                                                         model's files hold fewer bits
//   OUT/step-000100/training/state.json                   the step and the options of the run
//
// A run that trains adapters has adapter_config.json and adapter_model.safetensors instead of the model.
//
// A checkpoint is written under a temporary name and renamed once it is complete and on disk. state.json is written
// last; a directory without it is not a complete checkpoint.
#pragma once

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/files/adapters.cuh"

namespace streambp {

inline std::string checkpoint_name(Index step) {
  std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 6 ? 6 - digits.size() : 0, '0') + digits;
}

// The step in a checkpoint's name; empty if it is not such a name.
inline std::optional<Index> checkpoint_step(const std::string& name) {
  const bool digits = name.starts_with("step-") && name.find_first_not_of("0123456789", 5) == std::string::npos;
  if (!digits || name.size() == 5 || name.size() > 20) return std::nullopt;
  return std::stoll(name.substr(5));
}

inline bool is_complete_checkpoint(const fs::path& path) { return fs::exists(path / "training/state.json"); }

// The complete checkpoints in a run's directory, oldest first.
inline std::vector<fs::path> complete_checkpoints(const fs::path& out) {
  std::vector<std::pair<Index, fs::path>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(out, error)) {
    const auto step = checkpoint_step(entry.path().filename().string());
    if (step && is_complete_checkpoint(entry.path())) found.emplace_back(*step, entry.path());
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  for (const auto& [step, path] : found) paths.push_back(path);
  return paths;
}

// The newest complete checkpoint in a run's directory, or an empty path.
inline fs::path newest_checkpoint(const fs::path& out) {
  const std::vector<fs::path> all = complete_checkpoints(out);
  return all.empty() ? fs::path() : all.back();
}

// Resolves a directory with the file `kind`: `name` itself, or its newest checkpoint if `name` is a run directory.
inline std::string directory_with(const char* kind, const std::string& name) {
  std::error_code error;
  if (fs::exists(fs::path(name) / kind, error)) return name;
  const fs::path newest = newest_checkpoint(name);
  require(!newest.empty() || !fs::exists(fs::path(name) / "run.json"), excerpt(name),
          ": is a run without a checkpoint yet; wait for one, or continue it with streambp train --resume");
  return newest.empty() ? name : newest.string();
}

// A model directory, or the newest model of a run.
inline std::string model_directory(const std::string& name) {
  std::error_code error;
  require(fs::is_directory(name, error), excerpt(name),
          ": is not a model directory; name one with config.json, the weights and tokenizer.json");
  const std::string found = directory_with("config.json", name);
  require(fs::exists(fs::path(found) / "config.json") || !has_adapters(found), excerpt(name),
          ": has adapters, not a whole model; name them with --adapter, and their base with --model");
  return found;
}

// A directory with adapters, or the newest ones of a run.
inline std::string adapter_directory(const std::string& name) {
  std::error_code error;
  require(fs::is_directory(name, error), excerpt(name),
          ": is not a directory of adapters; name one with adapter_config.json and adapter_model.safetensors");
  const std::string found = directory_with("adapter_config.json", name);
  require(has_adapters(found), excerpt(name), ": has no adapter_config.json, so it does not hold adapters",
          fs::exists(fs::path(found) / "config.json") ? "; a whole model is named with --model" : "");
  return found;
}

// Calls f(prefix, table) for the tensors of the optimizer, and for the weights if the model's files hold fewer bits.
// Adapters are saved in float32.
template <class T, class Optimizer, class F>
void for_each_optimizer_table(Model<T>& model, Optimizer& optimizer, const ModelLayout& layout, F&& f) {
  optimizer.for_each_state(model.config, f);
  if (layout.adapter_config.empty() && layout.narrows<T>())
    f(optimizer.has_master() ? "weights." : "master.", table(model.config, model.weights));
}

// Of the ranks that share the optimizer's state, rank 0 writes; the others have an empty directory.
template <class Device, class T, class Optimizer>
void write_checkpoint(Device& dev, const fs::path& directory, Model<T>& model, const ModelLayout& layout,
                      Optimizer& optimizer, const Json& state) {
  const fs::path training = directory.empty() ? directory : directory / "training";
  const Table<float> masters = optimizer.masters(model.config);
  const Table<T> weights = trained(table(model.config, model.weights));
  if (layout.adapter_config.empty()) {
    const bool exact = optimizer.has_master() && layout.holds_float32();
    save_model(dev, directory, model, layout, kLargestShard, optimizer.ranks, exact ? masters : Table<float>());
  } else if (optimizer.has_master()) {
    save_adapters(dev, directory, model.config, masters, layout.adapter_config, optimizer.ranks);
  } else {
    save_adapters(dev, directory, model.config, weights, layout.adapter_config, optimizer.ranks);
  }
  SafetensorsWriter writer(training.empty() ? training : training / "optimizer.safetensors", {});
  for_each_optimizer_table(model, optimizer, layout, [&](const std::string& prefix, const auto& tensors) {
    write_tensors(dev, writer, prefix, tensors, optimizer.ranks);
  });
  writer.finish();
  if (directory.empty()) return;
  write_file_atomically(training / "state.json", state.dump(2) + "\n");
  flush_to_disk(directory);
}

// Renames whatever has the name of a new checkpoint, so that no user data is deleted.
inline fs::path set_aside(const fs::path& path) {
  fs::path aside = path.string() + ".replaced";
  for (int i = 2; fs::exists(fs::symlink_status(aside)); ++i) aside = path.string() + ".replaced-" + std::to_string(i);
  rename_durably(path, aside);
  return aside;
}

// Saves checkpoint state["step"]. Returns the new name of whatever had its name before, or an empty path.
template <class Device, class T, class Optimizer>
fs::path save_checkpoint(Device& dev, const fs::path& out, Model<T>& model, const ModelLayout& layout,
                         Optimizer& optimizer, const Json& state) {
  if (optimizer.ranks.rank > 0) {
    write_checkpoint(dev, {}, model, layout, optimizer, state);
    return {};
  }
  const fs::path path = out / checkpoint_name(state.at("step").get<Index>());
  fs::path aside;
  const fs::path temporary = path.string() + ".tmp";
  std::error_code error;
  fs::remove_all(temporary, error);  // of a run that was killed
  create_directory_atomically(path, temporary, [&](const fs::path&) {
    fs::create_directories(temporary / "training");
    write_checkpoint(dev, temporary, model, layout, optimizer, state);
    if (fs::exists(fs::symlink_status(path))) aside = set_aside(path);
  });
  return aside;
}

// Renames first, so that no partly deleted checkpoint keeps its name.
inline void remove_checkpoint(const fs::path& path) {
  const fs::path renamed = path.string() + ".old.tmp";
  std::error_code error;
  fs::remove_all(renamed, error);
  fs::rename(path, renamed, error);
  if (!error) fs::remove_all(renamed, error);
}

// AdamW takes the square root of v, so a negative value would become NaN some steps later. Scales are magnitudes.
inline void require_not_negative(const Tensor& tensor) {
  const Index size = dtype_size(tensor.dtype);
  bool good = is_real(tensor);
#pragma omp parallel for reduction(&& : good)
  for (Index i = 1; i <= tensor.count; ++i)  // little-endian: the last byte has the sign
    good = good && (tensor.data[i * size - 1] & std::byte{0x80}) == std::byte{0};
  require(good, tensor.where, ": holds a negative number; the file is damaged, use an earlier checkpoint");
}

template <class Device, class T, class Optimizer>
void load_checkpoint(Device& dev, const fs::path& checkpoint, Model<T>& model, const ModelLayout& layout,
                     Optimizer& optimizer) {
  const bool has_adapters = !layout.adapter_config.empty();
  load_model(dev, has_adapters ? layout.base : checkpoint, model);
  if (has_adapters) AdapterDirectory(checkpoint).load(dev, model);
  const SafetensorsFile file(checkpoint / "training/optimizer.safetensors");
  for (const auto& [name, tensor] : file.tensors())
    if (name.starts_with("v.") || name.starts_with("v8.scale.") || name.starts_with("m8.scale."))
      require_not_negative(tensor);
  for_each_optimizer_table(model, optimizer, layout, [&](const std::string& prefix, const auto& tensors) {
    read_tensors(dev, file, prefix, tensors, optimizer.ranks);
  });
}

}  // namespace streambp
