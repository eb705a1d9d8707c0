// Golden data from PyTorch, made by scripts/make_golden.py: models, batches and their gradients in float64.
#pragma once

#include "data/files/checkpoint.h"
#include "tests/support.cuh"

namespace streambp {

// In the source tree, or in $STREAMBP_SOURCE.
inline fs::path golden_folder() {
  const char* elsewhere = std::getenv("STREAMBP_SOURCE");
  return fs::path(elsewhere ? elsewhere : STREAMBP_SOURCE) / "tests" / "golden";
}

inline std::vector<std::string> golden_cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(golden_folder())) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct Golden {
  explicit Golden(const std::string& name)
      : file(golden_folder() / (name + ".safetensors")),
        config(config_from_json(Json::parse(file.metadata().at("config")), name)),
        batch{numbers<std::int32_t>("tokens"), numbers<std::int32_t>("targets"), numbers<std::int32_t>("positions"),
              numbers<std::int32_t>("key_begin")} {
    config.rope_scaling.longest = batch.longest();
  }

  template <class V>
  std::vector<V> numbers(const std::string& name) const {
    std::vector<V> values(static_cast<std::size_t>(file.at(name).count));
    read(file.at(name), values.data());
    return values;
  }
  auto weights() const {
    return [this](auto& dev, auto& model) { read_tensors(dev, file, "weights/", table(model.config, model.weights)); };
  }

  SafetensorsFile file;
  Config config;
  Batch batch;
};

}  // namespace streambp
