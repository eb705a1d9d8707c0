#!/usr/bin/env python3
"""Writes tests/golden/optimizers/*.safetensors: updates by PyTorch's Muon and AdamW, and by bitsandbytes' 8-bit AdamW."""

import json
from unittest.mock import patch

import bitsandbytes
import torch
from golden import arguments, write_safetensors
from safetensors import safe_open

EXPLANATION = """
muon.safetensors           the weights of tests/golden/qwen3.safetensors after a step for each factor, with factor times the
                           gradient in that file; float64
  <name>            F64    Muon for the matrices of the layers, AdamW for all others
  __metadata__             factors, rate, decay, ...: the settings

adamw_8bit.safetensors     float32
  before, after     F32    a matrix, and after a step for each gradient
  gradients         F32    [steps, rows, columns]
  __metadata__             rate, ...: the settings

Needs: pip install torch bitsandbytes safetensors transformers (the files were made with torch 2.15.0, bitsandbytes 0.50.2)
"""

FACTORS = [1, -0.5, 3]
SETTINGS = {"rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}


def muon(golden):
    with safe_open(golden / "qwen3.safetensors", "pt") as file:
        names = [name.removeprefix("weights/") for name in file.keys() if name.startswith("weights/")]
        parameters = {name: torch.nn.Parameter(file.get_tensor(f"weights/{name}").double()) for name in names}
        gradients = {name: file.get_tensor(f"grad/{name}") for name in names}
    matrices = {name for name, p in parameters.items() if ".layers." in name and p.ndim == 2}
    rate, decay, eps = SETTINGS["rate"], SETTINGS["decay"], SETTINGS["eps"]
    optimizers = [
        torch.optim.Muon(
            [parameters[name] for name in names if name in matrices],
            lr=rate, weight_decay=decay, momentum=0.95, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [p for n, p in parameters.items() if n not in matrices and (p.ndim == 2) == is_matrix],
                 "weight_decay": decay if is_matrix else 0}
                for is_matrix in (True, False)
            ],
            lr=rate, betas=(SETTINGS["beta1"], SETTINGS["beta2"]), eps=eps,
        ),
    ]  # fmt: skip
    # PyTorch orthogonalises in bfloat16. In this context, its name for bfloat16 means float64.
    with patch.object(torch, "bfloat16", torch.float64):
        for factor in FACTORS:
            for name, parameter in parameters.items():
                parameter.grad = factor * gradients[name]
            for optimizer in optimizers:
                optimizer.step()
    tensors = {name: p.detach() for name, p in parameters.items()}
    write_safetensors(golden / "optimizers" / "muon.safetensors", tensors, {"settings": json.dumps({"factors": FACTORS, **SETTINGS})})


def adamw_8bit(golden):
    torch.manual_seed(1)
    before, gradients = torch.randn(8, 512), torch.randn(3, 8, 512)
    parameter = torch.nn.Parameter(before.clone())
    optimizer = bitsandbytes.optim.AdamW8bit(
        [parameter], lr=SETTINGS["rate"], betas=(SETTINGS["beta1"], SETTINGS["beta2"]), eps=SETTINGS["eps"],
        weight_decay=0, min_8bit_size=4096,
    )  # fmt: skip
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    tensors = {"before": before, "gradients": gradients, "after": parameter.detach()}
    write_safetensors(golden / "optimizers" / "adamw_8bit.safetensors", tensors, {"settings": json.dumps({**SETTINGS, "decay": 0})})


def main():
    golden = arguments(__doc__, EXPLANATION, "golden").out
    (golden / "optimizers").mkdir(exist_ok=True)
    muon(golden)
    adamw_8bit(golden)


if __name__ == "__main__":
    main()
