#!/usr/bin/env python3
"""Makes golden data for GGUF files: what the gguf package's dequantisers make of random blocks, and small models in float32 that
llama.cpp's own converter has written. The models are those of the golden data for gradients (make_golden.py), so the tests know
their losses and gradients.

  python scripts/make_gguf_golden.py LLAMA_CPP       a checkout of llama.cpp

Needs: pip install torch transformers safetensors gguf sentencepiece"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parent.parent / "tests/golden"
# Not those with numbers that llama.cpp has no keys for, such as Gemma 3's query_pre_attn_scalar, or a factor of
# LFM2's experts.
CASES = ["gpt2", "llama_bias", "llama3", "qwen3", "qwen3_yarn", "gemma4", "phi3", "granite", "cohere", "olmo2", "lfm2", "qwen3_5", "qwen3_moe_all",
         "mixtral", "olmoe", "granitemoe", "qwen3_next", "gpt_oss"]


# Names in published files; % is the number of an expert.
def expert_names(module, gate, up, down, published=None):
    experts = (published or module) + ".experts.%."
    return {module + ".experts.gate_up_proj": [experts + gate, experts + up], module + ".experts.down_proj": [experts + down]}


PUBLISHED = {
    "olmoe": expert_names("mlp", "gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    "mixtral": expert_names("mlp", "w1.weight", "w3.weight", "w2.weight", "block_sparse_moe") | {"mlp.gate.weight": ["block_sparse_moe.gate.weight"]},
    "granitemoe": {"block_sparse_moe.experts.gate_up_proj": ["block_sparse_moe.input_linear.weight"],
                   "block_sparse_moe.experts.down_proj": ["block_sparse_moe.output_linear.weight"],
                   "block_sparse_moe.router.weight": ["block_sparse_moe.router.layer.weight"]},
}  # fmt: skip


def published(weights, name):
    """The weights under their names in published files, of experts one by one."""
    for tensor in list(weights):
        for end, names in PUBLISHED.get(name, {}).items():
            if not tensor.endswith("." + end):
                continue
            whole, layer = weights.pop(tensor), tensor[: -len(end)]
            if "%" not in names[0]:
                weights[layer + names[0]] = whole
                continue
            for e, expert in enumerate(whole):
                for piece, part in zip(names, expert.chunk(len(names))):
                    weights[layer + piece.replace("%", str(e))] = part.contiguous()
    return weights


# The converter names a tokenizer by a hash of the tokens of a text, and asks for its files; these models have none.
CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import convert_hf_to_gguf, conversion
def set_vocab(self):
    count = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list([chr(33 + i) for i in range(count)])
    self.gguf_writer.add_token_types([1] * count)
    self.gguf_writer.add_token_merges(["! !"])
conversion.get_model_class(sys.argv[2]).set_vocab = set_vocab
sys.argv = ["convert", sys.argv[3], "--outfile", sys.argv[4], "--outtype", "f32"] + ["--no-mtp"] * sys.argv[2].startswith(("Qwen3_5", "Qwen3Next"))
convert_hf_to_gguf.main()
"""


def blocks():
    from gguf import quants
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

    random, tensors = np.random.default_rng(1), {}
    halves = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": []}
    for name, places in halves.items():
        weights, size = GGML_QUANT_SIZES[Type[name]]
        raw = random.integers(0, 256, (3, 512 // weights, size), dtype=np.uint8)
        for place in places:  # scales that are finite
            scales = (random.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
            raw[..., place : place + 2] = scales.view(np.uint8).reshape(*raw.shape[:2], 2)
        if name == "MXFP4":
            raw[..., 0] = random.integers(0, 200, raw.shape[:2])
        raw = raw.reshape(3, -1)
        tensors[name] = torch.from_numpy(raw)
        tensors[name + ".numbers"] = torch.from_numpy(quants.dequantize(raw, Type[name]).astype(np.float32).reshape(3, 512))
        if name in ("Q8_0", "Q4_0"):
            numbers = (random.standard_normal((3, 512)) * 0.05).astype(np.float32)
            numbers[1, 32:64] = 0
            tensors[name + ".from"] = torch.from_numpy(numbers)
            tensors[name + ".quantised"] = torch.from_numpy(quants.quantize(numbers, Type[name]).reshape(3, -1).copy())
    save_file(tensors, GOLDEN / "gguf/blocks.safetensors")


def model(name, llama_cpp):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file, tempfile.TemporaryDirectory() as temporary:
        folder = f"{temporary}/{name}"  # the converter keeps its name
        Path(folder).mkdir()
        config = json.loads(file.metadata()["config"])
        if name == "gpt2":
            config["n_ctx"] = config["n_positions"]
        weights = {key[8:]: file.get_tensor(key).float().contiguous() for key in file.keys() if key.startswith("weights/")}
        save_file(published(weights, name), f"{folder}/model.safetensors", metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config))
        Path(folder, "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": {chr(33 + i): i for i in range(config["vocab_size"])}}}))
        subprocess.run([sys.executable, "-c", CONVERT, llama_cpp, config["architectures"][0], folder, str(GOLDEN / f"gguf/{name}.gguf")], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    (GOLDEN / "gguf").mkdir(exist_ok=True)
    blocks()
    for name in sys.argv[2:] or CASES:
        try:
            model(name, sys.argv[1])
            print(f"{name:<16}{(GOLDEN / f'gguf/{name}.gguf').stat().st_size:>9} bytes")
        except subprocess.CalledProcessError as error:
            print(f"{name:<16} failed: {error.stderr.decode()[-300:]}")


if __name__ == "__main__":
    main()
