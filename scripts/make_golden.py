#!/usr/bin/env python3
"""Writes tests/golden/<case>.safetensors: losses and gradients of tiny models by transformers, in float64."""

import argparse
import copy
import json
import math
import os
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save

# Imported by name: they must be loaded before `everything_in_float64` changes the meaning of torch.float32.
from transformers import (
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

MODELS = [
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
]
FLOAT32 = torch.float32  # remains float32 inside `everything_in_float64`

EXPLANATION = """
Contents of a file, for N tokens and a vocabulary of V:

  __metadata__         config: the model's config.json, as a string
  weights/<name>       F32  every parameter, named as in a checkpoint; a tied lm_head is not repeated
  grad/<name>          F64  d loss / d parameter
  tokens    [N]        I32  one stream: a few documents laid end to end
  targets   [N]        I32  the next token of the document, or -1: no loss here
  positions [N]        I32  of each token in its document
  key_begin [N]        I32  the index in the stream of the document's first token
  logits    [N, V]     F64
  logp      [N]        F64  log-prob of the target, 0 where targets is -1
  loss      [1]        F64  mean of -logp over all targets of the stream

Each document goes through the model alone, so a trainer that packs documents must not let them attend to each other.
The last token of a document has no target, and neither has its first quarter, the "prompt".

The script checks its numbers before it writes a file: norms and RoPE against a few lines of plain Python, the gradient
against finite differences of the loss. The table shows the relative error of the finite differences; one float32 hidden
in the model would raise it to about 1e-3. The same versions of torch and transformers write the same bytes on the same
kind of processor.

The loss is that of SFT; make_objective_golden.py covers the other objectives.

Needs: pip install torch transformers safetensors      (the files were made with torch 2.15.0, transformers 5.23.0)
"""


# ---- Cases: a config.json in the form of published models, and the lengths of the documents ----


def gpt2(vocab, hidden, heads, mlp):
    return {
        "activation_function": "gelu_new",
        "architectures": [GPT2LMHeadModel.__name__],
        "bos_token_id": vocab - 1,
        "eos_token_id": vocab - 1,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": mlp,  # null means 4 * n_embd
        "n_layer": 2,
        "n_positions": 32,
        "vocab_size": vocab,
    }


def llama_like(model_class, vocab, hidden, heads, kv_heads, mlp, **more):
    gemma = model_class is Gemma3ForCausalLM
    return {
        "hidden_activation" if gemma else "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "architectures": [model_class.__name__],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 64,
        "model_type": "gemma3_text" if gemma else model_class.config_class.model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-05,
        "vocab_size": vocab,
        **more,
    }


LINEAR_ROPE = {"factor": 4.0, "rope_type": "linear"}
# With 32 original positions, wavelengths up to 8 are kept, and those from 32 on are stretched by the full factor.
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
# Qwen's files contain a window that is disabled.
NO_WINDOW = {"max_window_layers": 1, "sliding_window": 4, "use_sliding_window": False}

CASES = {
    "gpt2": (gpt2(vocab=61, hidden=24, heads=3, mlp=None), [23, 2, 17]),
    "gpt2_odd": (gpt2(vocab=47, hidden=20, heads=2, mlp=50), [2, 29, 13]),
    "llama2": (
        llama_like(LlamaForCausalLM, vocab=53, hidden=24, heads=3, kv_heads=3, mlp=40,
                   rope_scaling=None, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False),
        [23, 2, 17],
    ),
    "llama3": (
        llama_like(LlamaForCausalLM, vocab=59, hidden=32, heads=4, kv_heads=2, mlp=36, head_dim=8,
                   rope_scaling=LLAMA3_ROPE, rope_theta=100.0, attention_bias=False, mlp_bias=False,
                   tie_word_embeddings=True),
        [31, 3, 19],
    ),
    # The newer form: transformers 5 saves "rope_parameters", earlier ones rope_theta and rope_scaling.
    "llama_bias": (
        llama_like(LlamaForCausalLM, vocab=53, hidden=24, heads=2, kv_heads=1, mlp=36, head_dim=14,
                   rope_parameters={"rope_theta": 200.0, **LLAMA3_ROPE}, attention_bias=True, mlp_bias=True,
                   tie_word_embeddings=False),
        [14, 25, 2],
    ),
    "mistral": (
        llama_like(MistralForCausalLM, vocab=53, hidden=24, heads=3, kv_heads=1, mlp=44,
                   rope_theta=10000.0, sliding_window=5, tie_word_embeddings=False),
        [23, 2, 17, 5],
    ),
    "qwen2": (
        llama_like(Qwen2ForCausalLM, vocab=67, hidden=24, heads=4, kv_heads=2, mlp=44,
                   rope_theta=1000.0, tie_word_embeddings=True, **NO_WINDOW),
        [19, 1, 22],
    ),
    "qwen2_untied": (
        llama_like(Qwen2ForCausalLM, vocab=43, hidden=32, heads=4, kv_heads=1, mlp=34,
                   rope_theta=1000000.0, tie_word_embeddings=False, **NO_WINDOW),
        [2, 16, 27],
    ),
    "qwen3": (
        llama_like(Qwen3ForCausalLM, vocab=51, hidden=20, heads=3, kv_heads=1, mlp=48, head_dim=10,
                   rope_scaling=None, rope_theta=1000.0, attention_bias=False, tie_word_embeddings=False,
                   max_window_layers=2, sliding_window=None, use_sliding_window=False),
        [23, 2, 17],
    ),
    "qwen3_tied": (
        llama_like(Qwen3ForCausalLM, vocab=71, hidden=28, heads=4, kv_heads=2, mlp=38, head_dim=8,
                   rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}, attention_bias=False,
                   layer_types=["full_attention", "full_attention"], tie_word_embeddings=True),
        [20, 11, 2, 15],
    ),
    # Qwen3's published form, with 32 original positions.
    "qwen3_yarn": (
        llama_like(Qwen3ForCausalLM, vocab=47, hidden=20, heads=2, kv_heads=1, mlp=36, head_dim=16,
                   rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn"},
                   rope_theta=100.0, attention_bias=False, tie_word_embeddings=True),
        [40, 3, 19],
    ),
    "llama_yarn": (
        llama_like(LlamaForCausalLM, vocab=41, hidden=16, heads=2, kv_heads=2, mlp=28, head_dim=12,
                   rope_scaling={"beta_fast": 8.0, "beta_slow": 0.5, "factor": 6.0, "mscale": 1.0, "mscale_all_dim": 0.4,
                                 "original_max_position_embeddings": 24, "truncate": False, "type": "yarn"},
                   rope_theta=50.0, tie_word_embeddings=False),
        [29, 2, 14],
    ),
    "llama_linear": (
        llama_like(LlamaForCausalLM, vocab=37, hidden=16, heads=2, kv_heads=1, mlp=28, head_dim=8,
                   rope_scaling={"factor": 2.5, "type": "linear"}, rope_theta=1000.0, tie_word_embeddings=True),
        [17, 9],
    ),
    # These two depend on the length: transformers scales by that of a forward pass, and keeps dynamic NTK's frequencies until
    # a longer one, or one within max_position_embeddings. Here all documents have the frequencies of the longest.
    "llama_dynamic": (
        llama_like(LlamaForCausalLM, vocab=37, hidden=16, heads=2, kv_heads=1, mlp=28, head_dim=8,
                   rope_scaling={"factor": 3.0, "type": "dynamic"}, rope_theta=50.0, tie_word_embeddings=True)
        | {"max_position_embeddings": 16},
        [31, 17, 20],
    ),
    "qwen3_longrope": (
        llama_like(Qwen3ForCausalLM, vocab=37, hidden=16, heads=2, kv_heads=1, mlp=28, head_dim=8,
                   rope_parameters={"rope_theta": 50.0, "rope_type": "longrope", "original_max_position_embeddings": 16,
                                    "long_factor": [1.25, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.0, 1.25, 1.5]},
                   attention_bias=False, tie_word_embeddings=True),
        [17, 29, 21],
    ),
    # Short documents, and an attention factor.
    "llama_longrope": (
        llama_like(LlamaForCausalLM, vocab=41, hidden=16, heads=2, kv_heads=2, mlp=28, head_dim=8,
                   rope_scaling={"type": "longrope", "factor": 8.0, "attention_factor": 1.25,
                                 "original_max_position_embeddings": 32,
                                 "long_factor": [1.25, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.125, 1.25, 1.5]},
                   rope_theta=50.0, tie_word_embeddings=False),
        [32, 9],
    ),
    # The form of the published files, and the newer form with the type of every layer.
    "gemma3": (
        llama_like(Gemma3ForCausalLM, vocab=57, hidden=24, heads=3, kv_heads=1, mlp=36, head_dim=10,
                   attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False,
                   query_pre_attn_scalar=7, rope_local_base_freq=100.0, rope_theta=1000.0, rope_scaling=None,
                   pad_token_id=None, sliding_window=6, sliding_window_pattern=2),
        [23, 2, 17],
    ),
    "gemma3_scaled": (
        llama_like(Gemma3ForCausalLM, vocab=45, hidden=28, heads=4, kv_heads=2, mlp=32, head_dim=8,
                   query_pre_attn_scalar=8, pad_token_id=None, sliding_window=4, tie_word_embeddings=False,
                   layer_types=["full_attention", "sliding_attention"],
                   rope_parameters={"full_attention": {"rope_theta": 500.0, **LINEAR_ROPE},
                                    "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}}),
        [19, 11, 8],
    ),
}  # fmt: skip


# ---- The model, entirely in float64 ----


@contextmanager
def everything_in_float64():
    """Replaces float32 by float64 while a model is built and run.

    Casting the model is not enough: to stay accurate in bfloat16, transformers casts to float32 inside the computation
    (RMSNorm's input, RoPE's angles, and RoPE's frequencies when it builds the model). In this context, every name that
    transformers uses for float32 means float64.
    """
    with (
        patch.multiple(torch, float32=torch.float64, float=torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(FLOAT32)


def make_model(config, random):
    """A model with no parameter at a special value such as 0 or 1. All parameters are float32 numbers."""
    (model_class,) = [m for m in MODELS if m.__name__ in config["architectures"]]
    own_config = model_class.config_class.from_dict(copy.deepcopy(config))  # a copy: transformers changes it
    model = model_class._from_config(own_config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm_weight = parameter.ndim == 1 and name.endswith("weight") and model_class is not Gemma3ForCausalLM
            noise = 0.25 * torch.randn(parameter.shape, generator=random, dtype=torch.double)
            parameter.copy_((noise + 1 if norm_weight else noise).type(FLOAT32))
    return model


def checkpoint_parameters(model):
    """The parameters by their names in published checkpoints (GPT-2's have no prefix)."""
    return {name.removeprefix("transformer."): parameter for name, parameter in model.named_parameters()}


# ---- Tokens and loss ----


def make_stream(lengths, vocab, random):
    """Random documents of these lengths, laid end to end: tokens, targets, positions, key_begin."""
    tokens = torch.randint(vocab, [sum(lengths)], generator=random)
    targets, positions, key_begin = [], [], []
    for length in lengths:
        begin = len(targets)
        document = tokens[begin : begin + length].tolist()
        prompt = length // 4
        targets += [-1] * prompt + document[prompt + 1 :] + [-1]
        positions += range(length)
        key_begin += [begin] * length
    stream = {"tokens": tokens, "targets": targets, "positions": positions, "key_begin": key_begin}
    return {name: torch.as_tensor(values, dtype=torch.int32) for name, values in stream.items()}


def forward(model, stream, lengths):
    """Runs the documents one by one. Returns logits, log-probs of the targets and the mean loss."""
    documents = stream["tokens"].long().split(lengths)
    logits = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    targets = stream["targets"].long()
    has_target = targets >= 0
    logp = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * has_target
    return logits, logp, -logp.sum() / has_target.sum()


# ---- Checks ----


def check_norm(model, config):
    """Compares the final norm with its formula in plain Python floats (float64)."""
    norm = model.transformer.ln_f if "n_embd" in config else model.model.norm
    x = [math.sin(i) for i in range(len(norm.weight))]
    if "n_embd" in config:
        mean = sum(x) / len(x)
        centred = [v - mean for v in x]
        scale = 1 / math.sqrt(sum(v * v for v in centred) / len(x) + config["layer_norm_epsilon"])
        expected = [w * v * scale + b for w, v, b in zip(norm.weight.tolist(), centred, norm.bias.tolist())]
    else:
        scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + config["rms_norm_eps"])
        offset = 1 if config["model_type"] == "gemma3_text" else 0
        expected = [(offset + w) * v * scale for w, v in zip(norm.weight.tolist(), x)]
    assert_close("norm", norm(torch.tensor([x]))[0].tolist(), expected)


def check_rope(model, config, length):
    """Compares RoPE's cosines and sines with their formula in plain Python floats."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    if config["model_type"] == "gemma3_text":
        local = rope.get("sliding_attention") or {"rope_theta": config["rope_local_base_freq"]}
        check_turns(model, config, local, length, layer_type=["sliding_attention"])
        check_turns(model, config, rope.get("full_attention", rope), length, layer_type=["full_attention"])
    else:
        check_turns(model, config, rope, length)


def yarn(rope, frequencies):
    """YaRN's frequencies, and its factor of cosines and sines."""
    # The real number i at which theta^(-2i / dim) makes this many rotations in the original length.
    base = math.log(rope["rope_theta"]) / len(frequencies)
    first, last = (
        math.log(rope["original_max_position_embeddings"] / (2 * math.pi * rope.get(name, usual))) / base
        for name, usual in (("beta_fast", 32), ("beta_slow", 1))
    )
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    divided = [min(max((i - first) / (last - first), 0), 1) for i in range(len(frequencies))]
    assert divided[-1] == 1 and any(0 < d < 1 for d in divided), "a regime of yarn is missing"
    frequencies = [f * (1 - d) + f * d / rope["factor"] for f, d in zip(frequencies, divided)]
    factors = [0.1 * rope.get(name, usual) * math.log(rope["factor"]) + 1 for name, usual in (("mscale", 1), ("mscale_all_dim", 0))]
    return frequencies, factors[0] / factors[1]


def check_turns(model, config, rope, length, layer_type=()):
    dim, scale = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], 1
    kind, theta = rope.get("rope_type", rope.get("type")), rope["rope_theta"]
    if kind == "dynamic" and length > config["max_position_embeddings"]:
        stretch = rope["factor"] * length / config["max_position_embeddings"] - rope["factor"] + 1
        theta *= stretch ** (dim / (dim - 2))
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = [rope["original_max_position_embeddings"] * f / (2 * math.pi) for f in frequencies]
        keep = [min(max((t - low) / (high - low), 0), 1) for t in turns]
        assert keep[0] == 1 and keep[-1] == 0 and any(0 < k < 1 for k in keep), "a regime of llama3's rope is missing"
        frequencies = [f * (k + (1 - k) / rope["factor"]) for f, k in zip(frequencies, keep)]
    elif kind == "yarn":
        frequencies, scale = yarn(rope, frequencies)
    elif kind == "longrope":
        pretrained = rope["original_max_position_embeddings"]
        factor = rope.get("factor", config["max_position_embeddings"] / pretrained)
        scale = rope.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(pretrained)))
        factors = rope["long_factor" if length > pretrained else "short_factor"]
        frequencies = [f / factor for f, factor in zip(frequencies, factors, strict=True)]
    elif kind == "linear":
        frequencies = [f / rope["factor"] for f in frequencies]
    angles = [[p * f for f in frequencies] * 2 for p in range(length)]
    cosines, sines = model.model.rotary_emb(torch.ones(1), torch.arange(length)[None], *layer_type)
    for angle, cosine, sine in zip(angles, cosines[0].tolist(), sines[0].tolist()):
        assert_close("cosine", cosine, [scale * math.cos(a) for a in angle])
        assert_close("sine", sine, [scale * math.sin(a) for a in angle])


def assert_close(what, values, expected):
    error = max(abs(v - e) for v, e in zip(values, expected, strict=True))
    assert error < 1e-14, f"{what}: differs by {error:.1e} from a plain computation"


def finite_difference_error(model, loss_of_model, random):
    """The relative error of the gradient against the slope of the loss along a line.

    The line points uphill in every parameter, by a random amount, so errors cannot cancel.
    """
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters]
    line = [torch.randn(p.shape, generator=random).abs().copysign(p.grad) for p in parameters]
    length = math.sqrt(sum((d * d).sum().item() for d in line))
    slope = sum((d * p.grad).sum().item() for d, p in zip(line, parameters)) / length

    @torch.no_grad()
    def loss_at(distance):
        for parameter, origin, d in zip(parameters, start, line):
            parameter.copy_(origin + distance / length * d)
        return loss_of_model().item()

    h = 1e-5
    measured = (loss_at(h) - loss_at(-h)) / (2 * h)
    return abs(measured - slope) / abs(slope)


# ---- bfloat16 ----


def gradient_from(config, weights, stream, lengths, dtype):
    """The gradient with weights and activations in `dtype` and the loss in float32 or wider."""
    (model_class,) = [m for m in MODELS if m.__name__ in config["architectures"]]
    own_config = model_class.config_class.from_dict(copy.deepcopy(config))
    model = model_class._from_config(own_config, attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    documents = stream["tokens"].long().split(lengths)
    logits = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    targets = stream["targets"].long()
    torch.nn.functional.cross_entropy(logits.to(torch.promote_types(dtype, FLOAT32)), targets, ignore_index=-1).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def bfloat16_error(config, weights, stream, lengths):
    """The distance of PyTorch's bfloat16 gradient from its float64 gradient, for weights that bfloat16 can represent.

    |rounded - truth| / |truth|, with norms over all parameters together.
    """
    weights = {name: weight.detach().bfloat16().double() for name, weight in weights.items()}
    with everything_in_float64():
        truth = gradient_from(config, weights, stream, lengths, torch.double)
    rounded = gradient_from(config, weights, stream, lengths, torch.bfloat16)
    difference = sum(((rounded[name] - g) ** 2).sum().item() for name, g in truth.items())
    return math.sqrt(difference / sum((g**2).sum().item() for g in truth.values()))


# ---- Writing the cases ----


def write_safetensors(file, tensors, metadata):
    """Writes deterministically: `save` orders metadata arbitrarily, this keeps the given order."""
    content = save(tensors, metadata)
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:begin]) | {"__metadata__": metadata}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the tensors stay aligned
    # Written under a temporary name first, so that a file with the final name is always complete.
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(len(header).to_bytes(8, "little") + header + content[begin:])
    os.replace(unfinished, file)


def make_case(name, folder):
    config, lengths = CASES[name]
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with everything_in_float64():
        model = make_model(config, random)
        stream = make_stream(lengths, config["vocab_size"], random)
        logits, logp, loss = forward(model, stream, lengths)
        loss.backward()
        parameters = checkpoint_parameters(model)
        tensors = {
            **{f"weights/{n}": p.detach().type(FLOAT32) for n, p in parameters.items()},
            **{f"grad/{n}": p.grad.contiguous() for n, p in parameters.items()},
            **stream,
            "logits": logits.detach(),
            "logp": logp.detach(),
            "loss": loss.detach()[None],
        }
        check_norm(model, config)
        if "n_embd" not in config:
            check_rope(model, config, max(lengths))
        error = finite_difference_error(model, lambda: forward(model, stream, lengths)[2], random)
        assert error < 1e-8, f"{name}: the gradient differs from the slope of the loss by {error:.1e}; is a float32 left in the model?"

    file = folder / f"{name}.safetensors"
    write_safetensors(file, tensors, {"config": json.dumps(config)})

    errors_file = folder / "bfloat16_errors.json"
    errors = json.loads(errors_file.read_text()) if errors_file.exists() else {}
    errors[name] = float(f"{bfloat16_error(config, dict(model.named_parameters()), stream, lengths):.3g}")
    errors_file.write_text(json.dumps(dict(sorted(errors.items())), indent=2) + "\n")

    count = sum(p.numel() for p in parameters.values())
    size = file.stat().st_size
    print(f"{name:14}{count:11,}{sum(lengths):8}{loss.item():9.4f}{error:19.1e}{size:12,}", flush=True)
    return size


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXPLANATION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, golden = ", ".join(CASES), Path(__file__).parents[1] / "tests" / "golden"
    parser.add_argument("case", nargs="*", default=list(CASES), help=f"cases to write (default: all): {names}")
    parser.add_argument("--out", type=Path, default=golden, help="folder to write to (default: tests/golden)")
    options = parser.parse_args()
    for name in options.case:
        if name not in CASES:
            parser.error(f"unknown case '{name}'; choose from {names}")

    torch.set_num_threads(1)  # fixes the order of sums: every run gives the same bits
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{'case':14}{'parameters':>11}{'tokens':>8}{'loss':>9}{'finite difference':>19}{'bytes':>12}")
    total = sum(make_case(name, options.out) for name in options.case)
    print(f"{'total':14}{total:59,}")


if __name__ == "__main__":
    main()
