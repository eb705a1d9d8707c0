// An engine's weights in files: loading a model, saving and restoring checkpoints. Files and JSON take the compiler
// longer than the arithmetic of an engine, so they are compiled apart, in engine_cpu_files.cpp and
// engine_cuda_files.cu.
#pragma once

#include "data/files/checkpoint.h"
#include "memory/offloaded_weights.h"
#include "training/engine_on.h"

namespace streambp {

template <class Device, class T, class G>
std::size_t EngineFiles<Device, T, G>::load(const fs::path& directory, const fs::path& adapters) {
  const std::size_t bytes = load_model(dev, directory, trainer.model);
  if (!adapters.empty()) AdapterDirectory(adapters).load(dev, trainer.model);
  trainer.optimizer->start(dev, trainer.model);
  if (!adapters.empty())  // the master weights, without rounding
    AdapterDirectory(adapters).load(dev, trainer.model.config, trainer.optimizer->masters(trainer.model),
                                    trainer.ranks.all);
  return bytes;
}

template <class Device, class T, class G>
fs::path EngineFiles<Device, T, G>::save(const fs::path& out, const ModelLayout& layout, const Json& state) {
  require(!trainer.updating, "the last update failed halfway, so the weights cannot be saved");
  return save_checkpoint(dev, out, trainer.model, layout, *trainer.optimizer, state);
}

template <class Device, class T, class G>
void EngineFiles<Device, T, G>::restore(const fs::path& checkpoint, const ModelLayout& layout) {
  load_checkpoint(dev, checkpoint, trainer.model, layout, *trainer.optimizer);
}

template <class Device, class T, class G>
void EngineFiles<Device, T, G>::with_weights_of(const fs::path& directory, const std::function<void()>& f) {
  const Config& c = trainer.model.config;
  const bool base_is_frozen = !c.adapters.empty() && c.trained && c.trained->empty();
  const AdaptersOff<T> off(trainer.model);
  if (base_is_frozen) return f();
  OffloadedWeights<Device, T> present(dev, trainer.model);
  try {
    load_model(dev, directory, trainer.model);
    f();
  } catch (...) {  // restore the weights, so that they can still be saved
    present.restore();
    throw;
  }
  present.restore();
}

}  // namespace streambp
