#!/usr/bin/env python3
"""Compares with PyTorch: time and memory of one forward and backward pass, the longest sequence, the gradient's error.

  scripts/compare_torch.py                                          on a GPU Qwen3-0.6B at 8192, else a tiny model
  scripts/compare_torch.py --model qwen3-4b --length 6144 24576 --chunk 2048 4096
  scripts/compare_torch.py --model qwen3-8b --memory-cap 80GiB --only torch-checkpoint torch-chunked stream

PyTorch runs the model class of transformers with its loss and SDPA attention. The rows:

  torch             as it is
  torch-checkpoint  gradient_checkpointing_enable with use_reentrant=False
  torch-chunked     also head and cross entropy for 1024 rows at a time, each under torch.utils.checkpoint, so that the
                    logits of the whole sequence are never in memory
  full, checkpoint, stream                             the modes of this program, as `streambp bench` measures them

All rows have the same sizes and types, random weights and tokens, one sequence, no optimizer. Each PyTorch row runs in
a separate process. Memory counts weights, gradient and activations, not the driver. On a GPU it is what PyTorch's
allocator handed out (peak) and holds (reserved; with expandable segments, unless PYTORCH_CUDA_ALLOC_CONF is set). On a
CPU it is resident memory: PyTorch's weights plus the growth of its process in the first step, library buffers included.

Gradients are compared on a small model of the same family, for PyTorch and this program in the same type. The error of
a tensor is its largest difference from PyTorch's float64 gradient, over the largest entry of that gradient.

Exit codes: 0 success, 1 a row failed (out of memory is not a failure), 2 wrong usage.
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

# Only in child processes: a child starts with the resident memory of its parent.
if "--child" in sys.argv:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import cross_entropy, linear
    from torch.utils.checkpoint import checkpoint
    from transformers.integrations import sdpa_attention

TORCH = {"torch": "PyTorch", "torch-checkpoint": "PyTorch, checkpointing",
         "torch-chunked": "PyTorch, checkpointing + chunked loss"}  # fmt: skip
MODES = ["full", "checkpoint", "stream"]
LOSS_ROWS = 1024
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
OUT_OF_MEMORY = {"problem": "out of memory"}
TINY = {  # takes seconds on a CPU
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 704, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


class Mistake(Exception):
    """An error that the user can fix."""


# ---- PyTorch in child processes: a job is a dictionary, and so is its answer ----


def in_child(do, **job):
    """Runs a job in a child process and returns its answer."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", **os.environ}
    command = [sys.executable, __file__, "--child", json.dumps({"do": do, **job})]
    child = subprocess.run(command, capture_output=True, text=True, env=environment)
    if child.returncode == -signal.SIGKILL:  # the system kills it when memory runs out
        return OUT_OF_MEMORY
    if child.returncode:
        sys.stderr.write(child.stderr if do != "about" else "")
        return {"problem": "failed: " + (child.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(child.stdout.splitlines()[-1])


def about(job):
    """Versions, and the GPU that PyTorch sees."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return versions | ({"gpu": gpu.name, "gpu_memory": gpu.total_memory} if gpu else {})


def attention_kernels(job, dtype):
    """On a GPU, all kernels but the quadratic math kernel. The flash kernel has no float32; the efficient kernel has, and
    needs keys and values repeated for every query head."""
    if job["device"] == "cpu":
        return contextlib.nullcontext()
    if dtype == "f32":
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])


def build(config, dtype, device):
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if config["model_type"] == "gpt2" else {}
    with torch.device(device):
        settings = transformers.AutoConfig.for_model(**config, **no_dropout)
        return transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=dtype).train()


def mean_loss(model, tokens, row):
    """The loss of next-token prediction. Without a padding mask, attention is plainly causal."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    inputs = {"input_ids": tokens, "attention_mask": None, "position_ids": positions, "use_cache": False}
    if row != "torch-chunked":
        return model(**inputs, labels=tokens).loss
    hidden, targets = model.base_model(**inputs).last_hidden_state[0, :-1], tokens[0, 1:]
    head = model.get_output_embeddings().weight

    def sum_of_losses(rows, targets):
        return cross_entropy(linear(rows, head).float(), targets, reduction="sum")

    chunks = zip(hidden.split(LOSS_ROWS), targets.split(LOSS_ROWS))
    return torch.stack([checkpoint(sum_of_losses, *c, use_reentrant=False) for c in chunks]).sum() / len(targets)


def model_of(job):
    torch.manual_seed(1)
    model = build(job["config"], getattr(torch, DTYPES[job["dtype"]]), job["device"])
    if job["row"] != "torch":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def step(model, job, length):
    """Seconds of one forward and backward."""
    synchronize = torch.cuda.synchronize if job["device"] == "cuda" else lambda: None
    tokens = torch.randint(job["config"]["vocab_size"], [1, length], device=job["device"])
    synchronize()
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    mean_loss(model, tokens, job["row"]).backward()
    synchronize()
    return time.perf_counter() - start


def or_out_of_memory(work):
    """Returns the result of `work`, or None if memory ran out."""
    try:
        return work()
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except RuntimeError as error:  # the CPU's allocator, or a library's own
        if "can't allocate memory" not in str(error) and "ALLOC_FAILED" not in str(error):
            raise


def measure(job):
    """Seconds and memory of a row at a length."""
    def resident():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def work():
        model = model_of(job)
        before = resident()
        step(model, job, job["length"])  # warms up
        grown = resident() - before  # later the process also keeps memory that it has freed
        if job["device"] == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [step(model, job, job["length"]) for _ in range(job["repeat"])]
        if job["device"] == "cuda":
            memory = {"memory": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        else:
            memory = {"memory": grown + sum(p.numel() * p.element_size() for p in model.parameters())}
        return {"seconds": seconds, **memory}

    with attention_kernels(job, job["dtype"]):
        return or_out_of_memory(work) or OUT_OF_MEMORY


def longest(job):
    """The longest sequence that runs under the cap, to about 5 %: doubling finds bounds, halving narrows them."""
    torch.cuda.set_per_process_memory_fraction(job["cap"] / job["gpu_memory"])

    def fits(length):
        fitted = or_out_of_memory(lambda: step(model, job, length)) is not None
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        return fitted

    with attention_kernels(job, job["dtype"]):
        model = or_out_of_memory(lambda: model_of(job))
        limit = job["config"].get("n_positions", 1 << 22)  # the limit of learned positions
        good, bad = 0, min(1024, limit)
        while model and good < limit and fits(bad):
            good, bad = bad, min(2 * bad, limit)
        while model and good < limit and bad - good > max(256, good // 20):
            middle = (good + bad) // 512 * 256
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return {"tokens": good}


# ---- Is the gradient the same? ----


def small_config(config):
    """A model of the same family and head width, with three small layers."""
    if config["model_type"] == "gpt2":
        sizes = {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_inner": 768, "n_positions": 8192}
    else:
        width = 4 * config["head_dim"]
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 3,
                 "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return config | sizes | {"vocab_size": 1000}


@contextlib.contextmanager
def everything_in_float64():
    """Makes float32 mean float64: in norms and rotary positions transformers casts to it for any type of the model."""
    names = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def randomise(model):
    """Sets weights that bfloat16 can represent, so that every type starts from the same weights. None is special."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1 if parameter.ndim == 1 and name.endswith("weight") else 0  # for norms
            parameter.normal_(centre, 0.05).copy_(parameter.bfloat16())


def published(name):
    """A parameter's name in published checkpoints. For GPT-2, transformers adds a prefix that these do not have."""
    return name.removeprefix("transformer.")


def gradient(model, tokens):
    mean_loss(model, tokens.to(model.device), "torch").backward()
    return {published(name): p.grad.double().cpu() for name, p in model.named_parameters()}


def streambp_gradient(job, dtype):
    folder = Path(job["folder"])
    file = folder / f"{dtype}.gradient"
    run_streambp(job["streambp"], "verify", "--model", folder, "--tokens", folder / "tokens", "--chunk", job["chunk"],
                 "--device", job["device"], "--dtype", dtype, "--save-gradient", file, accept=(0, 1))  # fmt: skip
    return {name: tensor.double() for name, tensor in load_file(file).items()}


def errors(gradient, truth):
    if set(truth) != set(gradient):
        raise Mistake(f"PyTorch and streambp name different tensors: {sorted(set(truth) ^ set(gradient))}")
    sizes = {name: ((gradient[name] - t).abs().max() / t.abs().max()).item() for name, t in truth.items()}
    worst = max(sizes, key=sizes.get)
    return {"worst": sizes[worst], "worst_tensor": worst, "median": statistics.median(sizes.values())}


def agreement(job):
    """The errors of PyTorch and of streambp against PyTorch in float64."""
    torch.manual_seed(1)
    config = small_config(job["config"])
    model = build(config, torch.float32, "cpu")
    randomise(model)
    tokens = torch.randint(config["vocab_size"], [1, job["length"]])
    folder = Path(job["folder"])
    model.config.save_pretrained(folder)
    save_file({published(n): p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors")
    (folder / "tokens").write_bytes(tokens.numpy().astype("<i4").tobytes())
    with everything_in_float64():
        exact = build(config, torch.float64, "cpu")
        exact.load_state_dict(model.state_dict())
        truth = gradient(exact, tokens)
    rows = []
    for dtype in job["dtypes"]:
        with attention_kernels(job, dtype):
            same = build(config, getattr(torch, DTYPES[dtype]), job["device"])
            same.load_state_dict(model.state_dict())
            rows.append({"dtype": dtype, "program": "PyTorch", **errors(gradient(same, tokens), truth)})
        rows.append({"dtype": dtype, "program": "streambp", **errors(streambp_gradient(job, dtype), truth)})
    return {"rows": rows}


# ---- This program ----


def run_streambp(program, *arguments, accept=(0,)):
    run = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if run.returncode not in accept:
        said = run.stderr.strip().splitlines() or [f"{program} ended with exit code {run.returncode}"]
        raise Mistake(said[0].removeprefix("streambp: "))
    return run.stdout


def check_program(program):
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        raise Mistake(f"{program} does not exist; build it (see README.md), or pass its path: --streambp PATH")
    needed = {"bench": ["--device", "--dtype", "--optimizer none"], "verify": ["--tokens", "--save-gradient"]}
    for command, options in needed.items():
        text = run_streambp(program, command, "--help")
        for option in options:
            if option not in text:
                raise Mistake(f"{program} is too old: its {command} has no {option}; rebuild it")


def plan(args, folder, model, *more):
    run_streambp(args.streambp, "plan", model, "--dtype", args.dtype, "--optimizer", "none", "--accumulate", 1, *more,
                 "--json", folder / "plan.json")  # fmt: skip
    return json.loads((folder / "plan.json").read_text())


def bench(args, folder, length):
    """The runs of `streambp bench` by mode; a mode that it skipped was out of memory."""
    modes = [m for m in MODES if m in args.only]
    labels = [m for m in modes if m != "stream"] + [f"stream {c}" for c in args.chunk if "stream" in modes]
    try:
        run_streambp(args.streambp, "bench", "--model", folder / "config.json", "--length", length, "--mode", *modes,
                     "--chunk", *args.chunk, "--repeat", args.repeat, "--optimizer", "none", "--device", args.device,
                     "--dtype", args.dtype, "--json", folder / "bench.json")  # fmt: skip
        runs = {run["mode"]: run for run in json.loads((folder / "bench.json").read_text())["runs"]}
        return {m: {k: runs[m][k] for k in ("seconds", "memory")} if m in runs else OUT_OF_MEMORY for m in labels}
    except Mistake as problem:
        said = OUT_OF_MEMORY if "no mode fits" in str(problem) else {"problem": f"failed: {problem}"}
        return dict.fromkeys(labels, said)


# ---- The tables ----


def say(label, *cells):
    print((f"{label:38}" + "".join(f"{cell:>13}" for cell in cells)).rstrip(), flush=True)


def human(size):
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def torch_rows(args, do, **job):
    job |= {"device": args.device, "dtype": args.dtype}
    return {TORCH[row]: in_child(do, row=row, **job) for row in TORCH if row in args.only}


def compare(args, folder, config, length):
    """Seconds and memory of all rows at a length."""
    print(f"\nOne forward and backward of {length} tokens:\n")
    say("", "seconds", "tokens/s", "of ckpt.", "peak", "reserved" if args.device == "cuda" else "")
    answers = torch_rows(args, "measure", config=config, length=length, repeat=args.repeat)
    if set(MODES) & set(args.only):
        answers |= {f"streambp {mode}": answer for mode, answer in bench(args, folder, length).items()}
    seconds = {row: statistics.median(answer["seconds"]) for row, answer in answers.items() if "seconds" in answer}
    baseline = seconds.get(TORCH["torch-checkpoint"])
    for row, answer in answers.items():
        if row not in seconds:
            say(row, answer["problem"])
            continue
        rate, ratio = length / seconds[row], seconds[row] / baseline if baseline else None
        answer |= {"median": seconds[row], "tokens_per_second": rate, "of_checkpointing": ratio}
        say(row, f"{seconds[row]:.3f}", f"{rate:.0f}", f"{ratio:.2f}" if baseline else "", human(answer["memory"]),
            human(answer["reserved"]) if "reserved" in answer else "")  # fmt: skip
    return [{"row": row, **answer} for row, answer in answers.items()]


def compare_longest(args, folder, config, cap, gpu_memory):
    """The longest sequence of every row: PyTorch's by trial, this program's from its exact plan."""
    print(f"\nLongest sequence in {human(cap)}, PyTorch's to 5 %:\n")
    answers = torch_rows(args, "longest", config=config, cap=cap, gpu_memory=gpu_memory)
    for chunk in args.chunk:
        tokens = plan(args, folder, folder / "config.json", "--memory", cap, "--chunk", chunk)["longest"]
        named = {f"streambp {m}" + (f" {chunk}" if m == "stream" else ""): m for m in MODES if m in args.only}
        answers |= {row: {"tokens": tokens[mode]} for row, mode in named.items()}
    for row, answer in answers.items():
        say(row, answer.get("problem") or f"{answer['tokens']} tokens")
    return [{"row": row, **answer} for row, answer in answers.items()]


def compare_gradients(args, folder, config):
    """The largest and the median error of the gradient's tensors."""
    on_gpu = args.device == "cuda"
    length, chunk = (4500, 2048) if on_gpu else (600, 256)  # three chunks, the last of them cut
    print(f"\nRelative error of the gradient, {length} tokens through three layers of this family:\n")
    answer = in_child("agreement", config=config, folder=str(folder), streambp=args.streambp, device=args.device,
                      dtypes=["f32", "bf16"] if on_gpu else ["f32"], length=length, chunk=chunk)  # fmt: skip
    if "problem" in answer:
        say("", answer["problem"])
        return [answer]
    say("", "median", "worst", "  in")
    for row in answer["rows"]:
        label, tensor = f"{row['program']} {row['dtype']}", f"  {row['worst_tensor']}"
        say(label, f"{row['median']:.1e}", f"{row['worst']:.1e}", tensor)
    return answer["rows"]


# ---- The command line ----


def count(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streambp", default="build/streambp", help="the program (default: build/streambp)")
    parser.add_argument("--model", help="a name streambp knows, a config.json, or tiny (default: qwen3-0.6b or tiny)")
    parser.add_argument("--length", type=count, nargs="+", help="tokens (default: 8192; cpu: 1024)")
    parser.add_argument("--chunk", type=count, nargs="+", help="of the stream rows (default: 4096; cpu: 256 512)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda, if PyTorch sees a GPU")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--repeat", type=count, default=3, help="measured runs per row, after a warm-up (default: 3)")
    parser.add_argument("--memory-cap", help="also find the longest sequence in this memory, such as 80GiB; GPU only")
    parser.add_argument("--only", nargs="+", choices=[*TORCH, *MODES], default=[*TORCH, *MODES], help="only these rows")
    parser.add_argument("--skip-agreement", action="store_true", help="skip the comparison of gradients")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    return parser.parse_args()


def prepare(args, folder):
    """Fills in defaults and checks the options. Returns the model's config, the memory cap, and versions."""
    args.streambp = os.path.abspath(args.streambp)
    check_program(args.streambp)
    if args.json and not args.json.absolute().parent.is_dir():
        raise Mistake(f"--json {args.json}: the folder does not exist")
    versions = in_child("about")
    if "problem" in versions:
        needs = "this needs torch, transformers 4.56 or later, safetensors and numpy; install them with pip"
        raise Mistake(f"{sys.executable}: {versions['problem'].removeprefix('failed: ')}: {needs}")
    args.device = args.device or ("cuda" if "gpu" in versions else "cpu")
    on_gpu = args.device == "cuda"
    if on_gpu and "gpu" not in versions:
        raise Mistake("--device cuda: PyTorch sees no GPU")
    args.dtype = args.dtype or ("bf16" if on_gpu else "f32")
    if args.dtype == "bf16" and not on_gpu:
        raise Mistake("--dtype bf16 needs a GPU; on a CPU use f32")
    args.length = args.length or [8192 if on_gpu else 1024]
    args.chunk = args.chunk or ([4096] if on_gpu else [256, 512])
    args.model = args.model or ("qwen3-0.6b" if on_gpu else "tiny")
    (folder / "tiny.json").write_text(json.dumps(TINY))
    model = folder / "tiny.json" if args.model == "tiny" else args.model
    planned = [plan(args, folder, model, "--chunk", chunk) for chunk in args.chunk]
    config = planned[0]["config"]  # as the program parsed it
    if max(args.length) > config.get("n_positions", max(args.length)):
        raise Mistake(f"--length {max(args.length)}: {args.model} has at most {config['n_positions']} positions")
    if args.memory_cap and not on_gpu:
        raise Mistake("--memory-cap needs a GPU: PyTorch can limit only the memory of a GPU")
    cap = plan(args, folder, model, "--memory", args.memory_cap)["memory"] if args.memory_cap else 0
    if cap > versions.get("gpu_memory", cap):
        raise Mistake(f"--memory-cap {args.memory_cap} is more than the GPU has: {human(versions['gpu_memory'])}")
    (folder / "config.json").write_text(json.dumps(config))
    return config, cap, versions


def write(file, result):
    if file:
        unfinished = file.with_name(file.name + ".unfinished")
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(unfinished, file)


def run(args, folder):
    config, cap, versions = prepare(args, folder)
    kernels = "flash, efficient or cuDNN kernel" if args.device == "cuda" else "kernel of PyTorch's choice"
    place = versions.get("gpu") if args.device == "cuda" else f"{os.cpu_count()} threads; peaks are of resident memory"
    print(f"{args.model}, {args.dtype}, median of {args.repeat}, on {place}")
    print(f"PyTorch {versions['torch']}, transformers {versions['transformers']}, SDPA attention: {kernels}")
    result = {"model": args.model, "config": config, "device": args.device, "dtype": args.dtype, "attention": kernels,
              **versions, "lengths": [], "longest": [], "agreement": []}  # fmt: skip
    for length in args.length:
        result["lengths"].append({"length": length, "rows": compare(args, folder, config, length)})
        write(args.json, result)
    if cap:
        result |= {"memory_cap": cap, "longest": compare_longest(args, folder, config, cap, versions["gpu_memory"])}
        write(args.json, result)
    if not args.skip_agreement:
        result["agreement"] = compare_gradients(args, folder, config)
        write(args.json, result)
    rows = [*result["longest"], *result["agreement"], *(row for l in result["lengths"] for row in l["rows"])]
    return 1 if any(row.get("problem", "").startswith("failed") for row in rows) else 0


JOBS = {job.__name__: job for job in (about, measure, longest, agreement)}


def main():
    if sys.argv[1:2] == ["--child"]:
        job = json.loads(sys.argv[2])
        print("\n" + json.dumps(JOBS[job["do"]](job)))
        return 0
    args = options()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run(args, Path(folder))
    except (Mistake, OSError) as problem:
        print(f"compare_torch.py: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
