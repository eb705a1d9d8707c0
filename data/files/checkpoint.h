// Checkpoints of a training run: a model directory that can be published as it is, or one of adapters, and apart from
// it the training state:
//
//   OUT/step-000100/                                 the model
//   OUT/training/step-000100/optimizer.safetensors   the optimizer's state, such as Adam's moments, "m." and "v." before
//                                                    each name, and "master.": float32 weights, or the weights
//                                                    themselves where the model's files hold fewer bits
//   OUT/training/step-000100/state.json              the step, the options of the run, and a hash of every file
//
// Both are written under temporary names and renamed once they are on disk, the model last. A checkpoint is complete if
// both are there. OUT/last and OUT/best are links to the newest one and to the best one.
#pragma once

#include <unistd.h>

#include "data/files/adapters.h"
#include "data/files/files.h"
#include "data/files/gguf_writer.h"
#include "data/files/hash.h"
#include "data/files/hub.h"

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

// The training state of a checkpoint.
inline fs::path training_of(const fs::path& checkpoint) {
  return checkpoint.parent_path() / "training" / checkpoint.filename();
}
inline fs::path state_of(const fs::path& checkpoint) { return training_of(checkpoint) / "state.json"; }
// A file of a checkpoint: "config.json", "training/optimizer.safetensors".
inline fs::path file_of(const fs::path& checkpoint, const fs::path& name) {
  return name.has_parent_path() ? training_of(checkpoint) / name.filename() : checkpoint / name;
}

inline bool is_complete_checkpoint(const fs::path& path) {
  return fs::is_directory(path) && fs::exists(state_of(path));
}

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

// All checkpoints, incomplete ones too.
inline std::set<fs::path> all_checkpoints(const fs::path& out) {
  std::set<fs::path> found;
  std::error_code error;
  for (const fs::path& place : {out, out / "training"}) {
    for (const auto& entry : fs::directory_iterator(place, error))
      if (checkpoint_step(entry.path().filename().string())) found.insert(out / entry.path().filename());
  }
  return found;
}

// The newest complete checkpoint in a run's directory, or an empty path.
inline fs::path newest_checkpoint(const fs::path& out) {
  const std::vector<fs::path> all = complete_checkpoints(out);
  return all.empty() ? fs::path() : all.back();
}

// The checkpoint that OUT/last or OUT/best names, for a run moves these links. Other paths stay.
inline fs::path without_link(const fs::path& path) {
  std::error_code error;
  const fs::path link = path.has_filename() ? path : path.parent_path(), target = fs::read_symlink(link, error);
  return !error && checkpoint_step(target.string()) ? link.parent_path() / target : path;
}

// Makes OUT/name a link to a checkpoint. Returns why it cannot; empty: it did.
inline std::string link_to_checkpoint(const fs::path& checkpoint, const char* name) {
  const fs::path link = checkpoint.parent_path() / name, temporary = link.string() + ".tmp-" + std::to_string(getpid());
  try {
    if (fs::exists(fs::symlink_status(link)) && without_link(link) == link)
      return link.string() + " is not a link of this run, so it does not name " + checkpoint.filename().string();
    fs::remove(temporary);
    fs::create_symlink(checkpoint.filename(), temporary);
    rename_durably(temporary, link);
    return "";
  } catch (const std::system_error& error) {
    return link.string() + ": cannot make a link here, so use the names of checkpoints: " + error.code().message();
  }
}

// Resolves a directory with the file `kind`: `name` itself, or its newest checkpoint if `name` is a run directory.
inline std::string directory_with(const char* kind, const std::string& given) {
  const std::string name = without_link(given).string();
  std::error_code error;
  const fs::path newest = newest_checkpoint(name);
  const bool itself = fs::exists(fs::path(name) / kind, error);
  require(!itself || newest.empty() || !fs::exists(newest / kind), excerpt(name), ": holds ", kind,
          " and also the checkpoints of a run; name a checkpoint, such as ", newest.string(), ", or move ", kind,
          " away");
  if (itself) return name;
  require(!newest.empty() || !fs::exists(fs::path(name) / "run.json"), excerpt(name),
          ": is a run without a checkpoint yet; wait for one, or continue it with streambp train --resume");
  return newest.empty() ? name : newest.string();
}

// A model directory, also one that Hugging Face's tools have downloaded, or the newest model of a run.
inline std::string model_directory(const std::string& given) {
  std::error_code error;
  const std::string name = local_model(given);
  if (is_gguf(name)) return name;
  require(fs::is_directory(name, error), excerpt(name),
          ": is not a model directory; name one with config.json, the weights and tokenizer.json",
          how_to_download(name));
  const std::string found = directory_with("config.json", name);
  require(fs::exists(fs::path(found) / "config.json") || !has_adapters(found), excerpt(name),
          ": has adapters, not a whole model; name them with --adapter, and their base with --model");
  require(!has_adapters(found), excerpt(found), ": holds a whole model and also adapters, so it is not clear which is ",
          "meant; move adapter_config.json or config.json to another directory");
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
  if (!layout.adapter_config.empty()) return;
  const Table<T> narrowed = layout.narrowed(table(model.config, model.weights));
  if (!narrowed.empty()) f(optimizer.has_master() ? "weights." : "master.", narrowed);
}

// --- State ---

// A JSON file with a hash of itself.
inline void write_sealed_json(const fs::path& path, Json json) {
  json.erase("hash");
  json["hash"] = hash_of(text_of(json));
  write_file_atomically(path, text_of(json, 2) + "\n");
}
inline Json read_sealed_json(const fs::path& path) {
  Json json = parse_json_file(path);
  require(json.is_object() && json.contains("hash"), path.string(), ": not the state of a run of this version");
  const Json hash = json["hash"];
  json.erase("hash");
  require(hash == hash_of(text_of(json)), path.string(), ": was changed since the run wrote it; restore it, or ",
          path.filename() == "run.json"
              ? "start a new run"
              : "remove " + path.parent_path().string() + " to continue from an earlier checkpoint");
  return json;
}

inline bool is_sealed_json(const fs::path& path) {
  try {
    read_sealed_json(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// The hashes of a checkpoint's files, by their names.
inline Json hashes_of(const fs::path& model, const fs::path& training) {
  Json hashes;
  for (const auto& entry : fs::directory_iterator(model))
    hashes[entry.path().filename().string()] = file_hash(entry.path());
  hashes["training/optimizer.safetensors"] = file_hash(training / "optimizer.safetensors");
  return hashes;
}

// Reads the state of a checkpoint and checks the hashes of its files.
inline Json read_state(const fs::path& checkpoint) {
  const fs::path path = state_of(checkpoint);
  const Json state = read_sealed_json(path);
  const auto step = Fields(state, path.string()).get<Index>("step");
  require(checkpoint.filename() == checkpoint_name(step), path.string(), ": step ", step,
          " does not belong to this checkpoint; was the checkpoint renamed?");
  require(state.contains("files") && state["files"].is_object(), path.string(), ": lists no files");
  for (const auto& [name, hash] : state["files"].items()) {
    const fs::path file = file_of(checkpoint, name);
    const bool there = fs::exists(file);
    require(there && file_hash(file) == hash, file.string(),
            there ? ": differs from what the run saved" : ": is missing from the checkpoint",
            "; restore it, or remove ", checkpoint.string(), " to continue from an earlier checkpoint");
  }
  for (const auto& entry : fs::directory_iterator(checkpoint)) {  // weights in another file would be read instead
    const std::string name = entry.path().filename().string();
    require(state["files"].contains(name) || entry.path().extension() != ".safetensors", entry.path().string(),
            ": is no file of this checkpoint; move it away");
  }
  return state;
}

// --- Saving ---

// Rank 0 writes. The other ranks that share the optimizer's state pass empty directories.
template <class Device, class T, class Optimizer>
void write_checkpoint(Device& dev, const fs::path& directory, const fs::path& training, Model<T>& model,
                      const ModelLayout& layout, Optimizer& optimizer) {
  const Table<float> masters = optimizer.masters(model);
  const Table<T> weights = trained(table(model.config, model.weights));
  if (layout.adapter_config.empty()) {
    const bool exact = optimizer.has_master() && layout.holds_float32();
    save_model(dev, directory, model, layout, {.ranks = optimizer.ranks, .masters = exact ? masters : Table<float>()});
  } else if (optimizer.has_master()) {
    save_adapters(dev, directory, model.config, masters, layout.adapter_config, optimizer.ranks);
  } else {
    save_adapters(dev, directory, model.config, weights, layout.adapter_config, optimizer.ranks);
  }
  if (!layout.adapter_config.empty() && !directory.empty() && is_gguf(layout.base))
    write_gguf_adapter(directory, model.config, layout.base);
  SafetensorsWriter writer(training.empty() ? training : training / "optimizer.safetensors", {});
  for_each_optimizer_table(model, optimizer, layout, [&](const std::string& prefix, const auto& tensors) {
    write_tensors(dev, writer, prefix, tensors, optimizer.ranks);
  });
  writer.finish();
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
                         Optimizer& optimizer, Json state) {
  if (optimizer.ranks.rank > 0) {
    write_checkpoint(dev, {}, {}, model, layout, optimizer);
    return {};
  }
  const fs::path path = out / checkpoint_name(state.at("step").get<Index>()), training = training_of(path);
  fs::path aside;
  std::error_code error;
  for (const fs::path& of_killed_run : {path, training}) fs::remove_all(of_killed_run.string() + ".tmp", error);
  try {
    create_directory_atomically(path, path.string() + ".tmp", [&](const fs::path& files) {
      create_directory_atomically(training, training.string() + ".tmp", [&](const fs::path& own) {
        write_checkpoint(dev, files, own, model, layout, optimizer);
        state["files"] = hashes_of(files, own);
        write_sealed_json(own / "state.json", state);
        if (fs::exists(fs::symlink_status(path))) aside = set_aside(path);
        fs::remove_all(training);  // of a run that was killed before it had renamed the model
      });
    });
  } catch (...) {
    if (!fs::exists(path)) fs::remove_all(training, error);  // without its model it is not a checkpoint
    throw;
  }
  return aside;
}

// Renames first, so that no partly deleted checkpoint keeps its name.
inline void remove_checkpoint(const fs::path& path) {
  const fs::path renamed = path.string() + ".old.tmp";
  std::error_code error;
  fs::remove_all(renamed, error);
  fs::rename(path, renamed, error);
  if (error) return;
  fs::remove_all(training_of(path), error);
  fs::remove_all(renamed, error);
}

// --- Loading ---

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
  const SafetensorsFile file(training_of(checkpoint) / "optimizer.safetensors");
  for (const auto& [name, tensor] : file.tensors())
    if (name.starts_with("v.") || name.starts_with("v8.scale.") || name.starts_with("m8.scale."))
      require_not_negative(tensor);
  for_each_optimizer_table(model, optimizer, layout, [&](const std::string& prefix, const auto& tensors) {
    read_tensors(dev, file, prefix, tensors, optimizer.ranks);
  });
  MappedFile::require_intact();
}

}  // namespace streambp
