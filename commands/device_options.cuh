// Where a command computes, and in which types.
#pragma once

#include "commands/options.cuh"
#include "training/engine.cuh"

namespace streambp {

struct DeviceOptions {
  std::string device = "auto", dtype = "auto", gradient = "auto", optimizer = "adamw";

  // Commands differ in the types and optimizers that they know.
  void add_to(CLI::App& app, const std::vector<std::string>& types, const std::vector<std::string>& optimizers) {
    auto option = [&](const char* name, std::string& value, const std::vector<std::string>& choices, const char* help) {
      app.add_option(name, value, help)->check(CLI::IsMember(choices))->capture_default_str()->group("Device");
    };
    option("--device", device, {"auto", "cpu", "cuda"}, "cuda: the first GPU; auto: a GPU if one can be used");
    option("--dtype", dtype, types, "Of weights and activations; auto: bf16 on a GPU, else f32");
    if (optimizers.empty()) return;
    option("--grad-dtype", gradient, {"auto", "f32", "bf16"},
           "Of the gradient between micro-batches, where weights are bf16; auto: bf16");
    option("--optimizer", optimizer, optimizers,
           "adamw: float32 moments and master weights; adamw-bf16: bf16 moments, no master, rounding by chance");
  }

  DeviceKind kind() const {
    if (device == "cpu" || dtype == "f64") {
      require(device != "cuda", "--dtype f64 runs on the CPU only; on a GPU use f32 or bf16");
      require(dtype != "bf16", "--dtype bf16 needs a GPU; on the CPU use f32");
      return DeviceKind::cpu;
    }
    const std::string reason = why_no_gpu();
    require(reason.empty() || device == "auto", "--device cuda: no GPU can be used: ", reason, "; use --device cpu");
    require(reason.empty() || dtype != "bf16", "--dtype bf16 needs a GPU, and no GPU can be used: ", reason,
            "; use --dtype f32");
    return reason.empty() ? DeviceKind::cuda : DeviceKind::cpu;
  }

  StepSettings settings(const Config& config, Index micro_batches) const {
    StepSettings s{config};
    s.device = kind();
    const bool on_gpu = s.device == DeviceKind::cuda;
    s.dtype = dtype == "f64" ? DType::f64 : on_gpu && dtype != "f32" ? DType::bf16 : DType::f32;
    s.optimizer = optimizer_named(optimizer);
    s.micro_batches = micro_batches;
    s.wide_gradient = gradient == "f32";
    s.tile = tile_of(s.device);
    require(!on_gpu || config.head_dim <= 256, "heads of ", config.head_dim,
            " are wider than the 256 that a GPU attends with; use --device cpu");
    require(s.dtype == DType::bf16 || s.optimizer != OptimizerKind::adamw_pure,
            "--optimizer adamw-bf16 goes with --dtype bf16, on a GPU");
    require(s.dtype == DType::bf16 || gradient != "bf16", "--grad-dtype bf16 goes with --dtype bf16, on a GPU");
    return s;
  }
};

// Refuses a step that the device has no room for, with what would fit.
inline void require_room(const StepSettings& s, Mode mode, Index rows, Index chunk, std::size_t wanted,
                         std::size_t room) {
  if (wanted <= room) return;
  const std::string needs =
      format("this run needs %s, and %s are free", human_bytes(wanted).c_str(), human_bytes(room).c_str());
  const Index longest = longest_for_budget(s, mode, chunk, room), fitting = chunk_for_budget(s, rows, room);
  require(longest > 0, needs, "; use a smaller model, or one of the narrower --dtype and --optimizer");
  fail(needs, ": in ", name(mode), " mode there is room for ", longest, " tokens at a time",
       fitting > 0 ? format("; for these %ld use --mode stream --chunk %ld or less", rows, fitting) : "");
}

}  // namespace streambp
