#!/usr/bin/env python3
"""Beside PyTorch: seconds and memory of one forward and backward pass, the longest sequence, the error of the gradient.

  scripts/compare_torch.py                                          on a GPU Qwen3-0.6B at 8192, else a tiny model
  scripts/compare_torch.py --model qwen3-4b --length 6144 24576 --chunk 2048 4096
  scripts/compare_torch.py --model qwen3-8b --memory-cap 80GiB --only torch-checkpoint torch-chunked stream

PyTorch is transformers' own model class with its own loss and SDPA attention, unless a row says otherwise:

  torch             nothing else
  torch-checkpoint  gradient_checkpointing_enable, use_reentrant=False
  torch-chunked     the same, and head and cross entropy of 1024 rows at a time, each under torch.utils.checkpoint, so
                    that the logits of the whole sequence never exist
  full, checkpoint, stream                                          this program's modes, as `streambp bench` measures them

All have the same sizes and types, random weights, random tokens, one sequence, no optimizer. Every PyTorch row has a
process of its own. Memory is that of weights, gradients and activations together, without what the driver takes: on a GPU
what PyTorch's allocator has given out ("peak") and taken ("reserved"; with expandable segments, unless
PYTORCH_CUDA_ALLOC_CONF says otherwise), on a CPU PyTorch's weights and by how much its resident memory grew.

Gradients are compared on a small model of the same family: the error of a tensor is its largest difference from
PyTorch's gradient in float64 over its largest entry there, for PyTorch and for this program in the same type.

Exit codes: 0 done, 1 a row failed (one that is out of memory has not), 2 something to mend.
Needs: pip install torch 'transformers>=4.56' safetensors numpy
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

TORCH = {
    "torch": "PyTorch",
    "torch-checkpoint": "PyTorch, checkpointing",
    "torch-chunked": "PyTorch, checkpointing + chunked loss",
}
MODES = ["full", "checkpoint", "stream"]
BASELINE = "torch-checkpoint"
LOSS_ROWS = 1024
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
OUT_OF_MEMORY = {"problem": "out of memory"}

# What a CPU does in seconds.
TINY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 8192, "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 704,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip


class Mistake(Exception):
    """Something that the user can mend."""


# ---- PyTorch, in processes of its own: a job is a dictionary, and so is its answer ----


def in_child(do, **job):
    """The answer of a job. This process never imports torch itself, lest a child begin with its memory."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", **os.environ}
    command = [sys.executable, __file__, "--child", json.dumps({"do": do, **job})]
    child = subprocess.run(command, capture_output=True, text=True, env=environment)
    if child.returncode == -signal.SIGKILL:  # by the system, which does so when memory is out
        return OUT_OF_MEMORY
    if child.returncode:
        sys.stderr.write(child.stderr)
        return {"problem": "failed: " + (child.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(child.stdout.splitlines()[-1])


def about(job):
    """What PyTorch there is, and on what it can run."""
    import numpy, safetensors, torch, transformers  # noqa: F401, E401

    answer = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.cuda.is_available()}
    if answer["cuda"]:
        answer |= {"gpu": torch.cuda.get_device_name(), "memory": torch.cuda.get_device_properties(0).total_memory}
    return answer


def attention_kernels(device, dtype):
    """On a GPU never the quadratic math kernel. The flash kernel takes no float32, and the efficient one, which does,
    wants keys and values repeated for every query head."""
    if device == "cpu":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers.integrations import sdpa_attention

    if dtype == "f32":
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])


def build(config, dtype, device):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if config["model_type"] == "gpt2" else {}
    with torch.device(device):
        settings = AutoConfig.for_model(**config, **no_dropout)
        return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=dtype).train()


def mean_loss(model, tokens, row):
    """Of predicting each token from those before it. No padding mask, so that attention is plainly causal."""
    import torch
    from torch.nn.functional import cross_entropy, linear
    from torch.utils.checkpoint import checkpoint

    inputs = {"input_ids": tokens, "attention_mask": None, "use_cache": False,
              "position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None]}  # fmt: skip
    if row != "torch-chunked":
        return model(**inputs, labels=tokens).loss
    hidden, targets = model.base_model(**inputs).last_hidden_state[0, :-1], tokens[0, 1:]
    head = model.get_output_embeddings().weight

    def sum_of_losses(rows, targets):
        return cross_entropy(linear(rows, head).float(), targets, reduction="sum")

    chunks = zip(hidden.split(LOSS_ROWS), targets.split(LOSS_ROWS))
    return torch.stack([checkpoint(sum_of_losses, *c, use_reentrant=False) for c in chunks]).sum() / len(targets)


class Runner:
    """A model of a row, and single steps of it."""

    def __init__(self, job):
        import torch

        self.torch, self.row, self.device, self.vocab = torch, job["row"], job["device"], job["config"]["vocab_size"]
        torch.manual_seed(1)
        self.model = build(job["config"], getattr(torch, DTYPES[job["dtype"]]), self.device)
        if self.row != "torch":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def step(self, length):
        """Seconds of one forward and backward."""
        tokens = self.torch.randint(self.vocab, [1, length], device=self.device)
        self.synchronize()
        start = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        mean_loss(self.model, tokens, self.row).backward()
        self.synchronize()
        return time.perf_counter() - start

    def fits(self, length):
        print(f"{self.row}: {length} tokens", file=sys.stderr, flush=True)
        fitted = not ran_out_of_memory(lambda: self.step(length))
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self.torch.cuda.empty_cache()
        return fitted

    def synchronize(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def ran_out_of_memory(work):
    import torch

    try:
        work()
        return False
    except (torch.OutOfMemoryError, MemoryError):
        return True
    except RuntimeError as error:  # the CPU's allocator, or a library's own
        if "can't allocate memory" in str(error) or "ALLOC_FAILED" in str(error):
            return True
        raise


def measure(job):
    """Seconds and memory of a row at a length."""
    import torch

    answer = {}

    def work():
        runner = Runner(job)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        runner.step(job["length"])  # warms up
        if job["device"] == "cuda":
            torch.cuda.reset_peak_memory_stats()
        answer["seconds"] = [runner.step(job["length"]) for _ in range(job["repeat"])]
        if job["device"] == "cuda":
            answer["memory"] = torch.cuda.max_memory_allocated()
            answer["reserved"] = torch.cuda.max_memory_reserved()
        else:
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
            answer["memory"] = grown + sum(p.numel() * p.element_size() for p in runner.model.parameters())

    with attention_kernels(job["device"], job["dtype"]):
        return OUT_OF_MEMORY if ran_out_of_memory(work) else answer


def longest(job):
    """The longest sequence, to about 5 %, that runs under the cap: doubled until it does not, then halved in between."""
    import torch

    torch.cuda.set_per_process_memory_fraction(job["cap"] / torch.cuda.get_device_properties(0).total_memory)
    runners = []
    with attention_kernels(job["device"], job["dtype"]):
        if ran_out_of_memory(lambda: runners.append(Runner(job))):
            return {"tokens": 0}
        fits, good, bad = runners[0].fits, 0, 1024
        while bad <= job["limit"] and fits(bad):
            good, bad = bad, 2 * bad
        bad = min(bad, job["limit"] + 1)
        while bad - good > max(256, good // 20):
            middle = (good + bad) // 512 * 256
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return {"tokens": good}


# ---- Is the gradient the same? ----


def small_config(config):
    """The same family and width of heads, in three small layers."""
    if config["model_type"] == "gpt2":
        return config | {"vocab_size": 1000, "n_embd": 256, "n_layer": 3, "n_head": 4, "n_inner": 768, "n_positions": 8192}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head, "hidden_size": 4 * head}
    return config | heads | {"vocab_size": 1000, "num_hidden_layers": 3, "intermediate_size": 12 * head}


@contextlib.contextmanager
def everything_in_float64():
    """Makes float32 mean float64: transformers casts to float32 in norms and rotary positions, whatever the model's type."""
    import torch

    names = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def randomise(model):
    """Weights of which none is special, and all are numbers that bfloat16 has: so every type starts from the same."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1 if parameter.ndim == 1 and name.endswith("weight") else 0  # that of a norm
            parameter.normal_(centre, 0.1 if parameter.ndim == 1 else 0.05).copy_(parameter.bfloat16())


def gradient(model, tokens):
    mean_loss(model, tokens.to(model.device), "torch").backward()
    return {name.removeprefix("transformer."): p.grad.double().cpu() for name, p in model.named_parameters()}


def streambp_gradient(job, dtype):
    from safetensors.torch import load_file

    file = Path(job["folder"]) / f"gradient-{dtype}.safetensors"
    run_streambp(job["streambp"], "verify", "--model", job["folder"], "--tokens", f"{job['folder']}/tokens", "--chunk",
                 job["chunk"], "--device", job["device"], "--dtype", dtype, "--save-gradient", file, accept=(0, 1))  # fmt: skip
    return {name.removeprefix("transformer."): g.double() for name, g in load_file(file).items()}


def errors(gradient, truth):
    if missing := set(truth) ^ set(gradient):
        raise Mistake(f"PyTorch and streambp name different tensors: {', '.join(sorted(missing))}")
    sizes = sorted(((gradient[n] - t).abs().max() / t.abs().max()).item() for n, t in truth.items())
    worst = max(truth, key=lambda n: ((gradient[n] - truth[n]).abs().max() / truth[n].abs().max()).item())
    return {"worst": sizes[-1], "tensor": worst, "median": statistics.median(sizes)}


def agreement(job):
    """The errors of PyTorch and of streambp against PyTorch in float64."""
    import torch

    torch.manual_seed(1)
    config = small_config(job["config"])
    model = build(config, torch.float32, "cpu")
    randomise(model)
    model.save_pretrained(job["folder"])
    tokens = torch.randint(config["vocab_size"], [1, job["length"]])
    (Path(job["folder"]) / "tokens").write_bytes(tokens[0].numpy().astype("<i4").tobytes())
    with everything_in_float64():
        exact = build(config, torch.float64, "cpu")
        exact.load_state_dict(model.state_dict())
        truth = gradient(exact, tokens)
    rows = []
    for dtype in job["dtypes"]:
        with attention_kernels(job["device"], dtype):
            same = build(config, getattr(torch, DTYPES[dtype]), job["device"])
            same.load_state_dict(model.state_dict())
            rows.append({"dtype": dtype, "program": "PyTorch", **errors(gradient(same, tokens), truth)})
        rows.append({"dtype": dtype, "program": "streambp", **errors(streambp_gradient(job, dtype), truth)})
    return {"rows": rows}


# ---- This program ----


def run_streambp(program, *arguments, accept=(0,)):
    """Runs a command and returns what it wrote to --json, if it was asked to."""
    run = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if run.returncode not in accept:
        said = (run.stderr.strip() or run.stdout.strip()).splitlines() or [f"exit code {run.returncode}"]
        raise Mistake(said[0])
    return json.loads(Path(arguments[-1]).read_text()) if arguments[-2] == "--json" else None


def check_program(program):
    if not os.access(program, os.X_OK) or not os.path.isfile(program):
        raise Mistake(f"there is no program {program}; build it (see README.md), or say where it is: --streambp")
    for command, options in {"bench": ["--device", "--dtype", "--optimizer"], "verify": ["--tokens", "--save-gradient"]}.items():
        text = subprocess.run([program, command, "--help"], capture_output=True, text=True).stdout
        for option in options:
            if option not in text:
                raise Mistake(f"{program} is too old: its {command} does not know {option}; build it again")


def plan(args, folder, model, *more):
    return run_streambp(args.streambp, "plan", model, "--dtype", args.dtype, "--optimizer", "none", "--accumulate", 1,
                        *more, "--json", folder / "plan.json")  # fmt: skip


def bench(args, folder, length, modes):
    """The runs of `streambp bench` by mode; a mode that does not fit is out of memory."""
    labels = [m for m in modes if m != "stream"] + [f"stream {c}" for c in args.chunk if "stream" in modes]
    try:
        answer = run_streambp(args.streambp, "bench", "--model", folder / "config.json", "--length", length, "--repeat",
                              args.repeat, "--optimizer", "none", "--device", args.device, "--dtype", args.dtype, "--chunk",
                              *args.chunk, "--mode", *modes, "--json", folder / "bench.json")  # fmt: skip
    except Mistake as problem:
        said = OUT_OF_MEMORY if "no mode fits" in str(problem) else {"problem": f"failed: {problem}"}
        return {label: said for label in labels}
    runs = {r["mode"]: {"seconds": r["seconds"], "memory": r["memory"]} for r in answer["runs"]}
    return {label: runs.get(label, OUT_OF_MEMORY) for label in labels}


# ---- The tables ----


def gib(size):
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB" if size is not None else ""


def say(label, *cells):
    print(f"{label:40}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def show(entry):
    if "problem" in entry:
        return say(entry["row"], entry["problem"])
    ratio = entry["of_checkpointing"]
    say(entry["row"], f"{entry['median']:.3f}", f"{entry['tokens_per_second']:.0f}", f"{ratio:.2f}" if ratio else "",
        gib(entry["memory"]), gib(entry["reserved"]) if "reserved" in entry else "")  # fmt: skip


def compare(args, folder, config, length, save):
    """Seconds and memory of all rows at a length."""
    print(f"\nOne forward and backward of {length} tokens:\n")
    say("", "seconds", "tokens/s", "of ckpt.", "peak", "reserved" if args.device == "cuda" else "")
    table, baseline = [], None

    def add(label, answer):
        nonlocal baseline
        entry = {"row": label, **answer}
        if "seconds" in answer:
            median = statistics.median(answer["seconds"])
            baseline = median if label == TORCH[BASELINE] else baseline
            entry |= {"median": median, "tokens_per_second": length / median}
        table.append(entry)

    for row in [r for r in TORCH if r in args.only]:
        job = {"row": row, "config": config, "length": length, "repeat": args.repeat}
        add(TORCH[row], in_child("measure", device=args.device, dtype=args.dtype, **job))
    if modes := [m for m in MODES if m in args.only]:
        for mode, answer in bench(args, folder, length, modes).items():
            add(f"streambp {mode}", answer)
    for entry in table:
        if "seconds" in entry:
            entry["of_checkpointing"] = entry["median"] / baseline if baseline else None
        show(entry)
    save("lengths", {"length": length, "rows": table})
