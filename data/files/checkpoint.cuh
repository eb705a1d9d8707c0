// Checkpoints of a training run. Each is a model directory of its own, with what training needs beside it:
//
//   OUT/step-000100/config.json, model.safetensors, ...   the model
//   OUT/step-000100/training/optimizer.safetensors        the moments, "m." and "v." before each name, and "master." where
//                                                         the weights have more bits than the model's files
//   OUT/step-000100/training/state.json                   the step and the options of the run
//
// A checkpoint is written under a temporary name and renamed when it is complete.
#pragma once

#include <filesystem>
#include <string>

#include "data/files/model_directory.cuh"

namespace streambp {

inline std::string checkpoint_name(Index step) {
  std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 6 ? 6 - digits.size() : 0, '0') + digits;
}

// The newest complete checkpoint in a run's directory, or an empty path.
inline fs::path newest_checkpoint(const fs::path& out) {
  fs::path newest;
  Index newest_step = -1;
  if (!fs::is_directory(out)) return newest;
  for (const auto& entry : fs::directory_iterator(out)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("step-") || name.find_first_not_of("0123456789", 5) != std::string::npos) continue;
    if (name.size() > 20 || name.size() == 5 || !fs::exists(entry.path() / "training/state.json")) continue;
    const Index step = std::stoll(name.substr(5));
    if (step > newest_step) newest_step = step, newest = entry.path();
  }
  return newest;
}

// Where a model lies that a user named: a model directory, or a run's, of which it is the newest.
inline std::string model_directory(const std::string& name) {
  require(fs::is_directory(name), name,
          ": is no model directory; name the one that holds config.json, the weights and tokenizer.json");
  const fs::path newest = newest_checkpoint(name);
  return newest.empty() || fs::exists(fs::path(name) / "config.json") ? name : newest.string();
}

// The optimizer's tensors as tables under their prefixes: moments, and the weights where the model's files hold fewer of
// their bits.
template <class T, class Moments, class F>
void for_each_optimizer_table(Model<T>& model, Moments& optimizer, bool narrowed, F&& f) {
  f("m.", table(model.config, optimizer.m));
  f("v.", table(model.config, optimizer.v));
  if (optimizer.master.embedding.tokens) {
    f("master.", table(model.config, optimizer.master));
  } else if (narrowed) {
    f("master.", table(model.config, model.weights));
  }
}

template <class Device, class T, class Moments>
void save_checkpoint(Device& dev, const fs::path& out, Model<T>& model, const ModelLayout& layout, Moments& optimizer,
                     const Json& state) {
  const fs::path final_path = out / checkpoint_name(state.at("step").get<Index>()),
                 temporary = final_path.string() + ".tmp", training = temporary / "training";
  std::error_code error;
  fs::remove_all(temporary, error);
  fs::create_directories(training, error);
  require(!error, "cannot create ", training.string(), ": ", error.message());
  try {
    if (optimizer.master.embedding.tokens && layout.holds_float32()) {
      Model<float> master{model.config, optimizer.master};
      save_model(dev, temporary, master, layout);
    } else {
      save_model(dev, temporary, model, layout);
    }
    SafetensorsWriter writer(training / "optimizer.safetensors", {});
    for_each_optimizer_table(model, optimizer, layout.narrows<T>(), [&](const char* prefix, const auto& tensors) {
      write_tensors(dev, writer, prefix, tensors);
    });
    writer.finish();
    write_file_atomically(training / "state.json", state.dump(2) + "\n");
    fs::remove_all(final_path, error);
    fs::rename(temporary, final_path, error);
    require(!error, "cannot rename ", temporary.string(), " to ", final_path.string(), ": ", error.message());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
}

template <class Device, class T, class Moments>
void load_checkpoint(Device& dev, const fs::path& checkpoint, Model<T>& model, const ModelLayout& layout,
                     Moments& optimizer) {
  load_model(dev, checkpoint, model);
  const SafetensorsFile file(checkpoint / "training/optimizer.safetensors");
  for_each_optimizer_table(model, optimizer, layout.narrows<T>(),
                           [&](const char* prefix, const auto& tensors) { read_tensors(dev, file, prefix, tensors); });
}

}  // namespace streambp
