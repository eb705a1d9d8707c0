#!/usr/bin/env python3
"""Writes tests/golden/quantised/nf4.safetensors: weights in 4 bits by bitsandbytes, and their dequantised values."""

import bitsandbytes.functional as bnb
import torch
from golden import arguments, write_safetensors

EXPLANATION = """
For every case NAME:

  NAME/before              F32   the weights
  NAME                     U8    and NAME.absmax, ...: as bitsandbytes stores them in a checkpoint
  NAME/after               F32   the weights that bitsandbytes computes from these, in their type, as float32

Needs: pip install torch bitsandbytes safetensors transformers (the file was made with bitsandbytes 0.50.2, torch 2.15.0)
"""

CASES = {
    "bfloat16": ((96, 64), torch.bfloat16),
    "float16": ((300, 64), torch.float16),  # 300 scales: two blocks of scales
    "float32": ((5, 26), torch.float32),  # the last block is not full
    "tiny": ((7, 64), torch.float16),  # values below the normal range of float16
    "plain_scales": ((300, 64), torch.bfloat16),  # without double quantisation
}


def main():
    options = arguments(__doc__, EXPLANATION, "golden/quantised")
    torch.manual_seed(1)
    tensors = {}
    for name, (shape, dtype) in CASES.items():
        before = torch.randn(shape) * torch.rand(shape[0], 1) * (2e-5 if name == "tiny" else 0.1)
        before = before.to(dtype)
        codes, state = bnb.quantize_4bit(before, blocksize=64, quant_type="nf4", compress_statistics=name != "plain_scales")
        tensors |= {name: codes, f"{name}/before": before.float()}
        tensors |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        tensors[f"{name}/after"] = bnb.dequantize_4bit(codes, state).float()
    write_safetensors(options.out / "nf4.safetensors", tensors, {"made by": "scripts/make_quantised_golden.py"})


if __name__ == "__main__":
    main()
