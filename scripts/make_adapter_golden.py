#!/usr/bin/env python3
"""Writes tests/golden_adapters/<case>/: LoRA adapters saved by PEFT, and their gradients in float64."""

import json
import zlib

import torch
from golden import FLOAT32, arguments, everything_in_float64, forward, make_model, write_safetensors
from make_golden import CASES, make_stream
from peft import LoraConfig, get_peft_model

EXPLANATION = """
The base of a case is the model of tests/golden/<base>.safetensors, with the same tokens. A folder has

  adapter_config.json, adapter_model.safetensors     as PEFT saves them, with random adapters in float32
  gradient.safetensors                               grad/<name of the tensor in adapter_model.safetensors> F64,
                                                     logp [N] F64, loss [1] F64, and the name of the base

Needs: pip install torch transformers safetensors peft     (the files were made with torch 2.15.0, transformers 5.23.0,
peft 0.21.2)
"""

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "gpt2": ("gpt2", dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    # Layers chosen by a regular expression; ranks and alphas by patterns.
    "llama_patterns": (
        "llama_bias",
        dict(r=4, lora_alpha=6, target_modules=r".*\.(q|v|o|up|down)_proj",
             rank_pattern={r"layers\.0\.self_attn\.q_proj": 2, "down_proj": 1}, alpha_pattern={"v_proj": 3, "down_proj": 2}),
    ),
    "qwen3_rslora": ("qwen3", dict(r=5, lora_alpha=4, use_rslora=True, target_modules=LINEAR)),
    # Adapters of all experts at once, and of routers.
    "qwen3_moe": ("qwen3_moe", dict(r=2, lora_alpha=3, target_modules=["q_proj"],
                                    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"])),
    "gpt_oss": ("gpt_oss", dict(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"],
                                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"])),
    "mixtral_down": ("mixtral", dict(r=3, lora_alpha=3, target_modules=["o_proj"], target_parameters=["mlp.experts.down_proj"])),
    # Adapters of one layer, and two modules of the base that are trained too.
    "gemma3_and_norms": (
        "gemma3",
        dict(r=2, lora_alpha=4, target_modules=["q_proj", "o_proj", "down_proj"], layers_to_transform=[1],
             modules_to_save=["pre_feedforward_layernorm", "model.norm"]),
    ),
}  # fmt: skip


def name_in_file(name):
    """A parameter's name in adapter_model.safetensors."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def make_case(name, folder):
    base, settings = ADAPTERS[name]
    base_config, lengths = CASES[base]
    random = torch.Generator().manual_seed(zlib.crc32(base.encode()))
    with everything_in_float64():
        model = make_model(base_config, random)
        stream = make_stream(lengths, base_config["vocab_size"], random)
        own = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).double().eval()
        trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for parameter in trained.values():
                noise = 0.3 * torch.randn(parameter.shape, generator=own, dtype=torch.double)
                parameter.copy_((noise + parameter if parameter.ndim == 1 else noise).type(FLOAT32))
        _, logp, loss = forward(adapted, stream, lengths)
        loss.backward()
        gradient = {f"grad/{name_in_file(n)}": p.grad.clone().contiguous() for n, p in trained.items()}
    case = folder / name
    case.mkdir(parents=True, exist_ok=True)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.type(FLOAT32).save_pretrained(case, save_embedding_layers=False)
    config_file = case / "adapter_config.json"
    config = json.loads(config_file.read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # a set: its order is random
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (case / "README.md").unlink(missing_ok=True)
    (case / "adapter_model.safetensors").chmod(0o644)
    results = {**gradient, "logp": logp.detach(), "loss": loss.detach()[None]}
    write_safetensors(case / "gradient.safetensors", results, {"base": base})
    count = sum(p.numel() for p in trained.values())
    print(f"{name:18}{count:9,}{loss.item():9.4f}", flush=True)


def main():
    options = arguments(__doc__, EXPLANATION, "golden_adapters")
    print(f"{'case':18}{'trained':>9}{'loss':>9}")
    for name in ADAPTERS:
        make_case(name, options.out)


if __name__ == "__main__":
    main()
