// Model directories and training checkpoints.
//
//   DIR/config.json, model.safetensors                    a model, as Hugging Face lays it out
//   OUT/step-000100/                                      a checkpoint: a model directory and
//       optimizer.safetensors                             the moments, "m." and "v." before each name, and "master."
//                                                         where the weights have a float32 copy
//       state.json                                        the step and the options of the run
//
// A checkpoint is written under a temporary name and renamed when it is complete.
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "../model.cuh"
#include "config.cuh"
#include "safetensors.cuh"

namespace streambp {

namespace fs = std::filesystem;

// The entries of the table that make up one tensor of the file: one, or the parts of a fused tensor.
template <class T>
std::vector<Table<T>> by_stored_tensor(const Table<T>& table) {
  std::vector<Table<T>> groups;
  std::map<std::string, std::size_t> position;
  for (const Entry<T>& e : table) {
    const auto [found, is_new] = position.try_emplace(e.parameter.name, groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(e);
  }
  return groups;
}

inline std::vector<std::int64_t> stored_shape(const Parameter& p) {
  if (p.vector()) return {p.cols * p.parts};
  if (p.transposed) return {p.cols, p.rows * p.parts};
  return {p.rows, p.cols};
}

// Calls f(index of an element in its matrix, its index in the stored tensor).
template <class F>
void for_each_stored(const Parameter& p, F&& f) {
  for (Index i = 0; i < p.rows; ++i) {
    for (Index j = 0; j < p.cols; ++j) {
      const Index at = p.vector()     ? p.part * p.cols + j
                       : p.transposed ? j * p.rows * p.parts + p.part * p.rows + i
                                      : i * p.cols + j;
      f(static_cast<std::size_t>(i * p.cols + j), static_cast<std::size_t>(at));
    }
  }
}

// Reads every tensor of the table from the file, under prefix + name; refuses numbers that are none.
template <class Device, class T>
void read_tensors(Device& dev, const SafetensorsFile& file, const std::string& prefix, const Table<T>& table) {
  const std::string where = file.path().string();
  for (const Table<T>& parts : by_stored_tensor(table)) {
    const Parameter& p = parts.front().parameter;
    const auto& tensor = file.at(prefix + p.name);
    auto text = [](const std::vector<std::int64_t>& shape) { return Json(shape).dump(); };
    require(tensor.shape == stored_shape(p), where, ": tensor \"", prefix + p.name, "\" has shape ", text(tensor.shape),
            ", but the configuration asks for ", text(stored_shape(p)));
    std::vector<T> stored(static_cast<std::size_t>(tensor.count)), values;
    read(tensor, stored.data());
    require(std::all_of(stored.begin(), stored.end(), [](T x) { return std::isfinite(static_cast<double>(x)); }), where,
            ": tensor \"", prefix, p.name,
            "\" holds a NaN or an infinity; the file is damaged, use another one or an earlier checkpoint");
    for (const Entry<T>& e : parts) {
      values.resize(static_cast<std::size_t>(e.matrix->size()));
      for_each_stored(e.parameter, [&](std::size_t i, std::size_t at) { values[i] = stored[at]; });
      dev.upload(*e.matrix, values.data());
    }
  }
}

template <class Device, class T>
void write_tensors(Device& dev, SafetensorsWriter& writer, const std::string& prefix, const Table<T>& table) {
  const char* dtype = std::is_same_v<T, BFloat16> ? "BF16" : sizeof(T) == 4 ? "F32" : "F64";
  for (const Table<T>& parts : by_stored_tensor(table)) {
    const Parameter& p = parts.front().parameter;
    writer.add(prefix + p.name, dtype, stored_shape(p), [&dev, parts](std::ostream& out) {
      const Parameter& p = parts.front().parameter;
      std::vector<T> stored(static_cast<std::size_t>(p.rows * p.cols * p.parts));
      for (const Entry<T>& e : parts) {
        const std::vector<T> values = to_host(dev, *e.matrix);
        for_each_stored(e.parameter, [&](std::size_t i, std::size_t at) { stored[at] = values[i]; });
      }
      out.write(reinterpret_cast<const char*>(stored.data()), static_cast<std::streamsize>(stored.size() * sizeof(T)));
    });
  }
}

// Fills the weights from DIR/model.safetensors.
template <class Device, class T>
void load_model(Device& dev, const fs::path& dir, Model<T>& model) {
  read_tensors(dev, SafetensorsFile(dir / "model.safetensors"), "", table(model.config, model.weights));
}

template <class Device, class T>
void save_model(Device& dev, const fs::path& dir, Model<T>& model) {
  write_file_atomically(dir / "config.json", config_to_json(model.config).dump(2) + "\n");
  SafetensorsWriter writer(dir / "model.safetensors", {{"format", "pt"}});
  write_tensors(dev, writer, "", table(model.config, model.weights));
  writer.finish();
}

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
    if (name.size() > 20 || name.size() == 5 || !fs::exists(entry.path() / "state.json")) continue;
    const Index step = std::stoll(name.substr(5));
    if (step > newest_step) newest_step = step, newest = entry.path();
  }
  return newest;
}

// The moments, and the float32 copy of the weights where there is one, as tables under their prefixes.
template <class Moments, class F>
void for_each_optimizer_table(const Config& c, Moments& optimizer, F&& f) {
  f("m.", table(c, optimizer.m));
  f("v.", table(c, optimizer.v));
  if (optimizer.master.embedding) f("master.", table(c, optimizer.master));
}

template <class Device, class T, class Moments>
void save_checkpoint(Device& dev, const fs::path& out, Model<T>& model, Moments& optimizer, const Json& state) {
  const fs::path final_path = out / checkpoint_name(state.at("step").get<Index>()),
                 temporary = final_path.string() + ".tmp";
  std::error_code error;
  fs::remove_all(temporary, error);
  fs::create_directories(temporary, error);
  require(!error, "cannot create ", temporary.string(), ": ", error.message());
  try {
    save_model(dev, temporary, model);
    SafetensorsWriter writer(temporary / "optimizer.safetensors", {});
    for_each_optimizer_table(model.config, optimizer, [&](const char* prefix, const auto& tensors) {
      write_tensors(dev, writer, prefix, tensors);
    });
    writer.finish();
    write_file_atomically(temporary / "state.json", state.dump(2) + "\n");
    fs::remove_all(final_path, error);
    fs::rename(temporary, final_path, error);
    require(!error, "cannot rename ", temporary.string(), " to ", final_path.string(), ": ", error.message());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
}

}  // namespace streambp
