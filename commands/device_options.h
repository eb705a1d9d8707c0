// Options for the device and the types of a command.
#pragma once

#include "commands/model_options.h"
#include "training/engine.h"
#include "training/plan.h"

namespace streambp {

struct DeviceOptions {
  std::string device = "auto", dtype = "auto", gradient = "auto", optimizer = "adamw";
  bool planned = false;  // the device need not exist

  enum class Optimizers { none, optional, required };
  // Commands support different types, the default first.
  void add_to(OptionTable& options, const std::vector<std::string>& types, Optimizers optimizers) {
    dtype = types.front();
    options.section("Device");
    options.add("--device", &device,
                planned ? "Where the step runs; auto: cuda for bf16, else cpu"
                        : "cuda: a GPU, of several processes one each; auto: a GPU if one can be used",
                checks::one_of({"auto", "cpu", "cuda"}));
    options.add("--dtype", &dtype,
                "Type of weights and activations: " + join(types) + (planned ? "" : "; auto: bf16 on a GPU, else f32"),
                checks::one_of(types));
    if (optimizers == Optimizers::none) return;
    options.add("--grad-dtype", &gradient,
                "Type of the accumulated gradient for bf16 weights; auto: f32 for adapters and from "
                "--accumulate 16 on, else bf16",
                checks::one_of({"auto", "f32", "bf16"}));
    const bool optional = optimizers == Optimizers::optional;
    std::vector<std::string> names;
    for (const auto& [name, kind] : kOptimizers)
      if (optional || kind != OptimizerKind::none) names.push_back(name);
    options.add("--optimizer", &optimizer,
                std::string(optional ? "none: forward and backward only; " : "") +
                    "adamw: float32 moments, and master weights for bf16; adamw-bf16: bf16 moments, no master weights, "
                    "stochastic rounding; adamw-8bit: 8-bit moments, no master weights; muon: orthogonalised momentum "
                    "for the matrices of the layers, adamw for all others",
                checks::one_of(names));
  }

  DeviceKind kind() const {
    require(dtype != "f64" || device != "cuda", "--dtype f64 runs on the CPU only; on a GPU use f32 or bf16");
    if (device == "cpu" || dtype == "f64") return DeviceKind::cpu;
    if (planned) return device == "cuda" || dtype == "bf16" ? DeviceKind::cuda : DeviceKind::cpu;
    const std::string reason = why_no_gpu();
    require(reason.empty() || device == "auto", "--device cuda: no GPU can be used: ", reason, "; use --device cpu");
    if (!reason.empty()) return DeviceKind::cpu;
    [[maybe_unused]] static const bool told = [] {  // once
      if (const std::string note = gpu_note(); !note.empty()) print_error("streambp: note: %s\n", note);
      return true;
    }();
    return DeviceKind::cuda;
  }
  DType type_on(DeviceKind kind) const {
    if (dtype == "auto") return kind == DeviceKind::cuda ? DType::bf16 : DType::f32;
    return dtype == "f64" ? DType::f64 : dtype == "f32" ? DType::f32 : DType::bf16;
  }
  StepSettings settings(const Config& config, Index micro_batches) const {
    StepSettings s{config};
    s.device = kind();
    s.dtype = type_on(s.device);
    s.optimizer = optimizer_named(optimizer);
    s.micro_batches = micro_batches;
    const bool bf16 = s.dtype == DType::bf16;
    // From so many on, rounding after each of them loses twice as much as rounding once (docs/log.md).
    constexpr Index many = 16;
    s.wide_gradient =
        gradient == "f32" || (gradient == "auto" && bf16 && (!config.adapters.empty() || micro_batches >= many));
    s.tile = tile_of(s.device);
    require(bf16 || s.optimizer != OptimizerKind::adamw_bf16, "--optimizer adamw-bf16 needs --dtype bf16");
    require(bf16 || gradient == "auto", "--grad-dtype ", gradient, " needs --dtype bf16");
    return s;
  }
};

}  // namespace streambp
