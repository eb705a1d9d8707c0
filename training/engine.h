// A model on a device, ready to train, evaluate and generate. Commands use only this interface, so they are independent
// of the device and its types, and only the engines behind it need nvcc.
//
//   engine_on.h            the engine, for any device and types, from Trainer and Generator
//   engine_cpu_f32.cpp ...   its instances, one translation unit each
//   engine_files.h         its weights in files, compiled apart
//   engine.cpp               picks the instance
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>

#include "generation/generate.h"
#include "parallel/processes.h"
#include "training/product_timing.h"
#include "training/settings.h"
#include "training/trainer.h"

namespace streambp {

namespace fs = std::filesystem;
using Json = nlohmann::json;
struct ModelLayout;

// Completes prompts, with a prefix cache. Must not outlive its engine.
class TextGenerator {
 public:
  using OnToken = std::function<void(std::size_t prompt, Continuation&)>;

  virtual ~TextGenerator() = default;
  virtual std::vector<Continuation> generate(const std::vector<Tokens>& prompts, const GenerationSettings& settings,
                                             const OnToken& on_token) = 0;
  virtual Index room() const = 0;   // maximum tokens of a sequence
  virtual Index steps() const = 0;  // forward passes so far
};

// The values of tensors, in the order of the table.
using HostTensors = std::vector<std::vector<double>>;

class Engine {
 public:
  virtual ~Engine() = default;

  // --- Weights ---

  // Sets random weights and a fresh optimizer.
  virtual void initialise(std::uint64_t seed, double spread = 0) = 0;
  // Loads the weights of a model directory and, if there is one, a directory of adapters. Resets the optimizer. Returns
  // the size of the model's weights in their files.
  virtual std::size_t load(const fs::path& model, const fs::path& adapters = {}) = 0;
  // Sets new adapters, which change nothing yet, and resets the optimizer.
  virtual void initialise_adapters(std::uint64_t seed) = 0;
  // See save_checkpoint.
  virtual fs::path save(const fs::path& out, const ModelLayout& layout, const Json& state) = 0;
  virtual void restore(const fs::path& checkpoint, const ModelLayout& layout) = 0;
  // Calls f with the weights of the model in this directory, then restores the present ones. If only adapters are
  // trained, it is their base: f is called with the adapters off.
  virtual void with_weights_of(const fs::path& model, const std::function<void()>& f) = 0;
  // Before restore(): only the block of this step is trained.
  virtual void train_block(const BlockSettings& blocks, Index step) = 0;
  // Rounds every weight to bfloat16, so that all types start from the same weights.
  virtual void round_weights() = 0;
  HostTensors weights() {
    return all_of([&](const OnTensor& f) { read_weights(f); });
  }
  // Calls f with the values of each tensor, in the order of the table.
  using OnTensor = std::function<void(std::vector<double> values)>;
  virtual void read_weights(const OnTensor& f) = 0;

  // --- Training ---

  // Called with the log-probs of batch i of a step.
  using OnLogps = std::function<void(std::size_t i, const std::vector<double>& logps)>;

  virtual StepResult step(const std::vector<Batch>& batches, const Schedule& schedule, const OptimizerSettings& s,
                          Index step, const OnLogps& on_logps = {}) = 0;
  // Computes the gradient of a step with these micro-batches, which can be read afterwards.
  virtual Measures accumulate(const std::vector<Batch>& batches, const Schedule& schedule,
                              const OnLogps& on_logps = {}) = 0;
  HostTensors gradient() {  // of the trained parameters
    return all_of([&](const OnTensor& f) { read_gradient(f); });
  }
  virtual void read_gradient(const OnTensor& f) = 0;
  virtual void release_gradient() = 0;
  // The log-probs of the targets of each batch.
  virtual std::vector<std::vector<double>> evaluate(const std::vector<Batch>& batches, const Schedule& schedule) = 0;

  // --- Generation ---

  virtual std::unique_ptr<TextGenerator> generator(const GenerationShape& shape) = 0;

  // --- The device ---

  virtual DeviceBase& device() = 0;
  virtual void synchronize() = 0;
  // Reasons to doubt bit-for-bit equality, such as a GPU library that changed its algorithm.
  virtual std::vector<std::string> warnings() = 0;
  virtual double link_rate() = 0;             // bytes that a rank sends to the others per second
  virtual void time_operations(bool on) = 0;  // a GPU times them on request; a CPU always does

 private:
  template <class F>
  static HostTensors all_of(F&& read) {
    HostTensors all;
    read([&](std::vector<double> values) { all.push_back(std::move(values)); });
    return all;
  }
};

// Creates an engine for a stream of `rows` tokens, in blocks of `capacity` bytes.
std::unique_ptr<Engine> make_engine(const StepSettings& settings, Index rows, const Capacity& capacity);

// --- The devices of this machine ---

// Each process on this machine uses its own GPU. Call before anything else here.
void choose_gpu(const Process& process);  // in the thread that makes the engine
// Why no GPU can be used; empty if one can.
std::string why_no_gpu();
// What the user should know about this process's GPU before it starts; usually empty.
std::string gpu_note();
Index gpus_for_ranks();  // of one kind; at most one without NCCL
// All GPUs, and what the program brings for them. Looking takes some memory on each GPU until the process ends.
struct FoundGpu {
  std::string name, capability, address;  // on the bus
  std::size_t free = 0, total = 0;
  std::string problem = {};  // why it cannot be used; empty if it can
};
std::vector<FoundGpu> found_gpus();
std::string gpu_software();
// How much a run may allocate, beside the buffers that connect the GPUs of these ranks. All ranks must call it.
std::size_t free_memory(DeviceKind device, const Ranks& hosts = {});
// How much far memory a run may allocate; of a CPU, in this directory.
std::size_t free_far_memory(DeviceKind device, const std::filesystem::path& directory);
std::string device_name(DeviceKind device);
std::string product_instructions();  // which ones the CPU uses, such as AVX2
std::string gpu_address();           // on the bus of this machine
// FLOP/s of large matrix products; on a GPU the better of our algorithm and the library's free choice.
double matmul_rate(DeviceKind device, DType dtype);
// On a GPU: the speed of the model's matrix products for this number of rows.
std::vector<ProductTiming> time_products(const StepSettings& settings, Index rows);
// Bytes read and written per second by a copy within the device's memory.
double copy_rate(DeviceKind device);
// Bytes per second to or from far memory, whichever is slower.
double far_rate(DeviceKind device, const std::filesystem::path& directory);
// Bytes per second when reading a large block of memory; on a GPU, of a copy.
double read_rate(DeviceKind device);

}  // namespace streambp
