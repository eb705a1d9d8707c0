"""Shared by the scripts that make golden data: tiny models of transformers in float64, checks of them, and files."""

import argparse
import copy
import json
import math
import os
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import save
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

# Their names in model_type, where these are not those of the classes in lower case.
FAMILIES = [
    "Arcee", "Cohere", "Cohere2", "Cwm", "Ernie4_5", "Exaone4", "Gemma", "Gemma2", "Gemma3", "Gemma4", "Glm", "Glm4", "Granite", "GraniteMoe", "GraniteMoeHybrid",
    "Helium", "HunYuanDenseV1", "Lfm2", "Lfm2Moe", "Lfm3", "Llama", "Ministral", "Ministral3", "Mistral", "Mixtral", "NanoChat", "Olmo2", "Olmo3", "OlmoHybrid", "Olmoe", "Phi3", "Qwen2",
    "Qwen3", "Qwen3Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "SeedOss", "SmolLM3", "Starcoder2", "GraniteSWA", "GptOss",
]  # fmt: skip
TYPES = {"Gemma3": "gemma3_text", "Gemma4": "gemma4_text", "GptOss": "gpt_oss", "GraniteSWA": "granite_swa", "HunYuanDenseV1": "hunyuan_v1_dense", "Lfm2Moe": "lfm2_moe", "OlmoHybrid": "olmo_hybrid", "Qwen3Moe": "qwen3_moe",
         "Qwen3Next": "qwen3_next", "Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text", "SeedOss": "seed_oss"}
ACTIVATIONS = {"Arcee": "relu2", "Gemma": "gelu", "Gemma2": "gelu_pytorch_tanh", "Gemma3": "gelu_pytorch_tanh",
               "Gemma4": "gelu_pytorch_tanh",
               "NanoChat": "relu2", "Starcoder2": "gelu_pytorch_tanh"}  # fmt: skip
EPSILONS = {"Cohere": "layer_norm_eps", "Cohere2": "layer_norm_eps", "Lfm2": "norm_eps", "Lfm2Moe": "norm_eps", "Lfm3": "norm_eps", "Starcoder2": "norm_epsilon"}
ONE_PLUS = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # their norms multiply by 1 + weight
# They must be loaded before `everything_in_float64` changes the meaning of torch.float32.
MODELS = {
    name: getattr(transformers, name)
    for name in ["GPT2LMHeadModel", *(f"{family}ForCausalLM" for family in FAMILIES)]
}
FLOAT32 = torch.float32  # remains float32 inside `everything_in_float64`


# ---- Models: a config.json in the form of published models, and the model entirely in float64 ----


def gpt2(vocab, hidden, heads, mlp):
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
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


def llama_like(family, vocab, hidden, heads, kv_heads, mlp, **more):
    return {
        **({} if family in ("Lfm2", "Lfm2Moe", "Lfm3") else {"hidden_activation" if family in ("Gemma2", "Gemma3", "Gemma4") else "hidden_act": ACTIVATIONS.get(family, "silu")}),
        "architectures": [family + "ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "max_position_embeddings": 64,
        "model_type": TYPES.get(family, family.lower()),
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": kv_heads,
        EPSILONS.get(family, "rms_norm_eps"): 1e-05,
        "vocab_size": vocab,
        **more,
    }


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


def empty_model(config):
    model_class = MODELS[config["architectures"][0]]
    own_config = model_class.config_class.from_dict(copy.deepcopy(config))  # a copy: transformers changes it
    eager = config["model_type"] == "gemma2" or not model_class._supports_sdpa  # SDPA has no soft cap and no sinks
    attention = "eager" if eager else "sdpa"
    return model_class._from_config(own_config, attn_implementation=attention, experts_implementation="eager").eval()


def make_model(config, random):
    """A model with no parameter at a special value such as 0 or 1. All parameters are float32 numbers."""
    model = empty_model(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = config["model_type"] not in ONE_PLUS or name.endswith("linear_attn.norm.weight")
            norm_weight = parameter.ndim == 1 and name.endswith("weight") and plain
            noise = 0.25 * torch.randn(parameter.shape, generator=random, dtype=torch.double)
            parameter.copy_((noise + 1 if norm_weight else noise).type(FLOAT32))
            stretch_gates(name, parameter)
            if config["model_type"] == "olmo_hybrid" and name.endswith("conv1d.weight"):
                shrink_values(model.config, parameter)
            if config["model_type"] == "mixtral":
                stretch_routes(name, parameter)
            if name.endswith("gate_up_proj_bias"):
                reach_clamps(parameter)
            if name.endswith("sinks"):  # the first head attends to nothing, the second as if it had no sink
                parameter[:2] = torch.tensor([30, -30])
        for name, buffer in buffers_of(model).items():
            if name.endswith("expert_bias"):  # everyone chooses the first expert, and nobody the last
                buffer.copy_(torch.linspace(2, -2, len(buffer)))
            else:
                buffer.fill_(0.75 if ".0." in name else 1.25)
    return model


def buffers_of(model):
    """Those that are part of the model, and not trained."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(("expert_bias", "layer_scalar"))}


def stretch_routes(name, parameter):
    """Everyone chooses the first expert, and nobody the second."""
    if name.endswith(("embed_tokens.weight", "post_attention_layernorm.weight")):
        parameter[..., 0] += 2
    elif name.endswith(("o_proj.weight", "down_proj")):  # what is added to the residual stream
        parameter[..., 0, :] = 0
    elif name.endswith("mlp.gate.weight"):
        parameter[:, 0] = torch.tensor([2.5, -8] + [0] * (len(parameter) - 2))
    parameter.copy_(parameter.type(FLOAT32))


def reach_clamps(bias):
    """Gates and ups of the first columns of an expert are about the limits of GPT-OSS's activation."""
    bias[:, :6] += torch.tensor([7, 0, 0, 7, 0, -7]).type(FLOAT32)
    bias.copy_(bias.type(FLOAT32))


def stretch_gates(name, parameter):
    """Delta rules in all regimes: a head forgets everything at once, the others more and more slowly; beta near 0 and 1 or 2."""
    if name.endswith("linear_attn.A_log"):  # exp(-exp(7)) is 0, and exp(-exp(-4)) is 0.98
        parameter += torch.cat([torch.tensor([7.0]), torch.linspace(-1, -4, len(parameter) - 1)]).type(FLOAT32)
    if name.endswith(("linear_attn.in_proj_b.weight", "linear_attn.in_proj_ba.weight", "linear_attn.b_proj.weight")):
        parameter[1::2] *= 32
    parameter.copy_(parameter.type(FLOAT32))


def shrink_values(config, taps):
    """The epsilon of a delta rule's output norm is fixed and small: near zero, gradients would be steep and magnify rounding."""
    taps[-config.linear_num_value_heads * config.linear_value_head_dim :] /= 256


def checkpoint_parameters(model):
    """The parameters by their names in published checkpoints (GPT-2's have no prefix)."""
    return {name.removeprefix("transformer."): parameter for name, parameter in model.named_parameters()}


def outputs_of(model, stream, lengths):
    """Runs the documents one by one."""
    documents = stream["tokens"].long().split(lengths)
    return [model(document[None], use_cache=False) for document in documents]


def logits_of(model, stream, lengths):
    return torch.cat([output.logits[0] for output in outputs_of(model, stream, lengths)])


def balance_loss(config, outputs):
    """Of all documents together, as transformers computes it for one."""
    layers = zip(*(output.router_logits for output in outputs))
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    loss = load_balancing_loss_func(tuple(torch.cat(layer) for layer in layers), experts, config.num_experts_per_tok)
    return config.router_aux_loss_coef * loss


def forward(model, stream, lengths):
    """Logits, log-probs of the targets and the mean loss."""
    outputs, targets = outputs_of(model, stream, lengths), stream["targets"].long()
    logits = torch.cat([output.logits[0] for output in outputs])
    has_target = targets >= 0
    logp = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * has_target
    loss = -logp.sum() / has_target.sum()
    if getattr(model.config, "output_router_logits", False):
        loss = loss + balance_loss(model.config, outputs)
    return logits, logp, loss


# ---- Checks ----


def check_norm(model, config):
    """Compares the final norm with its formula in plain Python floats (float64)."""
    lfm = config["model_type"].startswith("lfm")
    norm = model.transformer.ln_f if "n_embd" in config else model.model.embedding_norm if lfm else model.model.norm
    x = [math.sin(i) for i in range(config.get("n_embd") or config["hidden_size"])]
    weight = norm.weight.tolist() if hasattr(norm, "weight") else [1] * len(x)
    bias, offset = [0] * len(x), 1 if config["model_type"] in ONE_PLUS else 0
    if "LayerNorm" in type(norm).__name__:
        bias, mean = getattr(norm, "bias", torch.zeros(len(x))).tolist(), sum(x) / len(x)
        x = [v - mean for v in x]
    names = ("layer_norm_epsilon", *EPSILONS.values(), "rms_norm_eps")
    epsilon = next(config[name] for name in names if name in config)
    scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + epsilon)
    expected = [(offset + w) * v * scale + b for w, v, b in zip(weight, x, bias)]
    assert_close("norm", norm(torch.tensor([[math.sin(i) for i in range(len(x))]]))[0].tolist(), expected)


def check_rope(model, config, length):
    """Compares RoPE's cosines and sines with their formula in plain Python floats."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    if config["model_type"] in ("gemma3_text", "gemma4_text", "lfm3", "olmo3"):
        local = rope.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq", rope.get("rope_theta"))}
        check_turns(model, config, local, length, layer_type=["sliding_attention"])
        wide = config | {"head_dim": config.get("global_head_dim") or config.get("head_dim")}
        check_turns(model, wide, rope.get("full_attention", rope), length, layer_type=["full_attention"])
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
    return frequencies, rope.get("attention_factor", factors[0] / factors[1])


def rope_of(model):
    return model.model.pos_emb if model.config.model_type == "lfm2_moe" else model.model.rotary_emb


def check_turns(model, config, rope, length, layer_type=()):
    dim, scale = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"], 1
    kind, theta = rope.get("rope_type", rope.get("type")), rope["rope_theta"]
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    if kind != "proportional":
        dim = int(dim * share)
    if "alpha" in rope:
        kind, theta = "default", theta * rope["alpha"] ** (dim / (dim - 2))
    if kind == "dynamic" and length > config["max_position_embeddings"]:
        stretch = rope["factor"] * length / config["max_position_embeddings"] - rope["factor"] + 1
        theta *= stretch ** (dim / (dim - 2))
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "proportional":
        frequencies = [f if i < int(share * dim // 2) else 0 for i, f in enumerate(frequencies)]
    elif kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = [rope["original_max_position_embeddings"] * f / (2 * math.pi) for f in frequencies]
        keep = [min(max((t - low) / (high - low), 0), 1) for t in turns]
        assert keep[0] == 1 and keep[-1] == 0 and any(0 < k < 1 for k in keep), "a regime of llama3's rope is missing"
        frequencies = [f * (k + (1 - k) / rope["factor"]) for f, k in zip(frequencies, keep)]
    elif kind == "yarn":
        frequencies, scale = yarn(rope, frequencies)
    elif kind == "longrope":
        pretrained = (rope | config)["original_max_position_embeddings"]
        factor = rope.get("factor", config["max_position_embeddings"] / pretrained)
        scale = rope.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(pretrained)))
        factors = rope["long_factor" if length > pretrained else "short_factor"]
        frequencies = [f / factor for f, factor in zip(frequencies, factors, strict=True)]
    elif kind == "linear":
        frequencies = [f / rope["factor"] for f in frequencies]
    if "ohere" in type(model).__name__:
        angles = [[p * f for f in frequencies for _ in range(2)] for p in range(length)]
    else:
        repeated = 1 if config["model_type"] == "gpt_oss" else 2  # its halves share a column
        angles = [[p * f for f in frequencies] * repeated for p in range(length)]
    cosines, sines = rope_of(model)(torch.ones(1), torch.arange(length)[None], *layer_type)
    for angle, cosine, sine in zip(angles, cosines[0].tolist(), sines[0].tolist()):
        assert_close("cosine", cosine, [scale * math.cos(a) for a in angle])
        assert_close("sine", sine, [scale * math.sin(a) for a in angle])


def check_routes(model, stream, lengths):
    """Of the experts with extreme weights or biases, one has all rows, and the other none."""
    for name, router in model.named_modules():
        if name.endswith((".mlp.gate", "feed_forward.gate")):
            router.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    chosen = []
    logits_of(model, stream, lengths)
    unused = model.config.num_experts - 1 if model.config.model_type == "lfm2_moe" else 1
    assert all((rows == 0).any(1).all() and not (rows == unused).any() for rows in chosen), "an expert is not as it should be"


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

    h = 1e-5  # without the third derivative, which is large in delta rules
    measured = (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h)
    return abs(measured - slope) / abs(slope)


# ---- The command line, and files ----


def arguments(doc, explanation, folder, cases=()):
    """The cases to write (all, unless the command line names some) and the folder to write to."""
    parser = argparse.ArgumentParser(
        description=doc, epilog=explanation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if cases:
        parser.add_argument("case", nargs="*", default=list(cases), help=f"to write (default: all): {', '.join(cases)}")
    tests = Path(__file__).parents[1] / "tests"
    parser.add_argument("--out", type=Path, default=tests / folder, help=f"folder to write to (default: tests/{folder})")
    options = parser.parse_args()
    for name in options.case if cases else []:
        if name not in cases:
            parser.error(f"unknown case '{name}'; choose from {', '.join(cases)}")
    torch.set_num_threads(1)  # fixes the order of sums: every run gives the same bits
    options.out.mkdir(parents=True, exist_ok=True)
    return options


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
