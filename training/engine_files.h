// An engine's weights in files: loading a model, saving and restoring checkpoints. Files and JSON take the compiler longer
// than the arithmetic of an engine, so their instances are compiled together, in engine_cpu_files.cpp and
// engine_cuda_files.cu; here are only declarations.
#pragma once

#include "training/engine.h"

namespace streambp {

template <class Device, class T, class G>
struct EngineFiles {
  Device& dev;
  Trainer<Device, T, G>& trainer;

  std::size_t load(const fs::path& directory, const fs::path& adapters);
  fs::path save(const fs::path& out, const ModelLayout& layout, const Json& state);
  void restore(const fs::path& checkpoint, const ModelLayout& layout);
  void with_weights_of(const fs::path& directory, const std::function<void()>& f);
};

}  // namespace streambp
