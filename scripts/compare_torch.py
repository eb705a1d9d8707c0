#!/usr/bin/env python3
"""Compares with PyTorch: time and memory of a training step, the longest sequence, the gradient's error.

  scripts/compare_torch.py                                          on a GPU Qwen3-0.6B at 8192, else a tiny model
  scripts/compare_torch.py --busy 1                                 also beside a process that keeps one core busy
  scripts/compare_torch.py --model gpt2 --compile                   GPT-2 124M at 1024, PyTorch also with torch.compile
  scripts/compare_torch.py --model qwen3-4b --length 6144 24576 --chunk 2048 4096
  scripts/compare_torch.py --model qwen3-8b --memory-cap 80GiB --only torch-checkpoint torch-chunked stream

PyTorch runs the model class of transformers with its loss and SDPA attention. The rows:

  torch             as it is
  torch-checkpoint  gradient_checkpointing_enable with use_reentrant=False
  torch-chunked     also head and cross entropy for 1024 rows at a time, each under torch.utils.checkpoint, so that the
                    logits of the whole sequence are never in memory
  full, checkpoint, stream                             the modes of this program, as `streambp bench` measures them

All rows have the same sizes and types, random weights and tokens, and one sequence. A step with AdamW (PyTorch's is
fused) also clips the gradient. With bf16, PyTorch's moments are bfloat16 and there are no master weights, which is
adamw-bf16 in this program. The rows take turns, each turn in a new process that warms up first, so that a change
in the machine's speed affects all of them. The figures are medians over all turns. "speed-up" is the time of PyTorch's
fastest comparable row over the time of this program's row: full is compared with torch, checkpoint and stream with
torch-checkpoint and torch-chunked. "of its memory" compares with the same row.

On a GPU, memory counts weights, gradient, optimizer and activations, not the driver: what PyTorch's allocator handed out
(peak) and holds (reserved; with expandable segments, unless PYTORCH_CUDA_ALLOC_CONF is set). On a CPU it is the peak of
the process's resident memory, libraries included.

PyTorch multiplies matrices with MKL, which uses slower kernels on CPUs not made by Intel. --unlock-mkl makes it use
those for Intel's CPUs, so that PyTorch runs as fast as it can. It needs a C compiler.

Gradients are compared on a small model of the same family, for PyTorch and this program in the same type. The error of
a tensor is its largest difference from PyTorch's float64 gradient, over the largest entry of that gradient.

Exit codes: 0 success, 1 a row failed (out of memory is not a failure), 2 wrong usage.
Needs: pip install torch 'transformers>=4.56' safetensors numpy
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

TORCH = {"torch": "PyTorch", "torch-checkpoint": "PyTorch, checkpointing",
         "torch-chunked": "PyTorch, checkpointing + chunked loss"}  # fmt: skip
MODES = ["full", "checkpoint", "stream"]
OUT_OF_MEMORY = {"problem": "out of memory"}
TINY = {  # what `streambp train` trains by default; takes seconds on a CPU
    "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 352, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"  # replaces MKL's check for an Intel CPU


class Mistake(Exception):
    """An error that the user can fix."""


# ---- Programs ----


def in_child(do, **job):
    """Runs a job of torch_jobs.py in a child process, so that it starts with little memory, and returns the answer."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1", **os.environ}
    if job.get("preload"):
        environment["LD_PRELOAD"] = job["preload"]
    command = [sys.executable, Path(__file__).with_name("torch_jobs.py"), json.dumps({"do": do, **job})]
    try:
        child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=job.get("limit"))
    except subprocess.TimeoutExpired:
        return {"problem": f"stopped after {job['limit']} s (--limit)"}
    if child.returncode == -signal.SIGKILL:  # the system kills it when memory runs out
        return OUT_OF_MEMORY
    if child.returncode:
        sys.stderr.write(child.stderr if do != "about" else "")
        lines = child.stderr.strip().splitlines()
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return {"problem": "failed: " + (errors or lines or ["no message"])[-1]}
    return json.loads(child.stdout.splitlines()[-1])


def run_streambp(program, *arguments, limit=None):
    """Returns the program's output, its peak resident memory, and what it reported beside the output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([program, *map(str, arguments)], stdout=out, stderr=errors)
        timer = threading.Timer(limit or 1e6, child.kill)
        timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        stopped = timer.finished.is_set()
        timer.cancel()
        if stopped:
            raise Mistake(f"stopped after {limit} s (--limit)")
        child.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, errors):
            file.seek(0)
        if child.returncode:
            said = errors.read().strip().splitlines() or [f"{program} ended with exit code {child.returncode}"]
            raise Mistake(said[0].removeprefix("streambp: "))
        return out.read(), 1024 * usage.ru_maxrss, errors.read()


def check_program(program):
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        raise Mistake(f"{program} is not a program; build it (see README.md), or pass its path: --streambp PATH")
    needed = {"plan": ["--device"], "bench": ["--device", "--dtype", "--optimizer"], "verify": ["--tokens", "--save-gradient"]}
    for command, options in needed.items():
        text, *_ = run_streambp(program, command, "--help-all")
        for option in options:
            if option not in text:
                raise Mistake(f"{program} is too old: its {command} has no {option}; rebuild it")


def plan(args, folder, model, *more):
    run_streambp(args.streambp, "plan", model, "--dtype", args.dtype, "--optimizer", args.ours, "--accumulate", 1,
                 "--device", args.device, *more, "--json", folder / "plan.json")  # fmt: skip
    return json.loads((folder / "plan.json").read_text())


def bench(args, folder, length, mode, chunk):
    """One turn of a mode."""
    try:
        _, resident, _ = run_streambp(
            args.streambp, "bench", "--model", folder / "config.json", "--length", length, "--mode", mode,
            *(["--chunk", chunk, "--keep", args.keep] if mode == "stream" else []),
            "--repeat", args.repeat, "--optimizer", args.ours, "--device", args.device, "--dtype", args.dtype,
            "--json", folder / "bench.json", limit=args.limit)  # fmt: skip
    except Mistake as problem:
        said = str(problem)
        return OUT_OF_MEMORY if "no mode fits" in said else {"problem": said if said.startswith("stopped") else f"failed: {said}"}
    results = json.loads((folder / "bench.json").read_text())
    (run,) = results["runs"]
    return {"seconds": run["seconds"], "memory": run["memory"] if args.device == "cuda" else resident,
            "flops": run["flops"], "matmul_rate": results["matmul_rate"]}  # fmt: skip


# ---- Time and memory ----


@contextlib.contextmanager
def busy_processes(count):
    """While it lives, processes compute beside this one."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Row:
    """A way to compute the step. `baseline` names the rows it is compared with: "full" or "checkpointing"."""

    def __init__(self, label, baseline, ours, busy, turn):
        self.label, self.baseline, self.ours, self.busy, self.turn = label, baseline, ours, busy, turn
        self.answer = {}

    def take_turn(self):
        """Adds the seconds of another turn. A row that failed once takes no more turns."""
        if "problem" in self.answer:
            return
        answer, before = self.turn(), self.answer
        if self.busy and "seconds" in answer:
            with busy_processes(self.busy):
                beside = self.turn()
            answer = beside if "problem" in beside else answer | {"beside": beside["seconds"]}
        if "seconds" in answer and before:
            for seconds in ["seconds", "beside"] if self.busy else ["seconds"]:
                answer[seconds] = before[seconds] + answer[seconds]
            answer["memory"] = max(answer["memory"], before["memory"])
        self.answer = answer

    @property
    def seconds(self):
        return statistics.median(self.answer["seconds"]) if "seconds" in self.answer else None


def rows_of(args, folder, config, length):
    rows = []
    for name, label in TORCH.items():
        for compiled in ["", " compiled"][: 2 if args.compile else 1]:
            job = {"row": name + compiled, "config": config, "length": length, "device": args.device,
                   "dtype": args.dtype, "optimizer": args.optimizer, "preload": args.preload, "limit": args.limit}  # fmt: skip
            if name in args.only:
                rows.append(Row(label + (", compiled" if compiled else ""),
                                "full" if name == "torch" else "checkpointing", False, args.busy,
                                lambda job=job: in_child("measure", **job)))  # fmt: skip
    for mode in MODES:
        for chunk in args.chunk if mode == "stream" else args.chunk[:1]:
            if mode in args.only:
                rows.append(Row(f"streambp {mode}" + (f" {chunk}" if mode == "stream" else ""),
                                "full" if mode == "full" else "checkpointing", True, args.busy,
                                lambda mode=mode, chunk=chunk: bench(args, folder, length, mode, chunk)))  # fmt: skip
    return rows


def compare(args, folder, config, length):
    """Seconds and memory of all rows at a length."""
    work = "forward and backward" if args.optimizer == "none" else f"training step with {args.optimizer}"
    print(f"\nOne {work}, {length} tokens:\n")
    rows = rows_of(args, folder, config, length)
    for turn in range(args.turns):
        for row in rows:
            if sys.stderr.isatty():
                print(f"\r\033[Kturn {turn + 1} of {args.turns}: {row.label}", end="", file=sys.stderr, flush=True)
            row.take_turn()
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    say("", "seconds", "tokens/s", "speed-up", "peak", "of its memory",
        "reserved" if args.device == "cuda" else "keeps" if args.busy else "")  # fmt: skip
    for row in rows:
        if row.seconds is None:
            say(row.label, row.answer["problem"])
            continue
        others = [o for o in rows if not o.ours and o.baseline == row.baseline and o.seconds] if row.ours else []
        best = min(others, key=lambda o: o.seconds, default=None)
        speed_up = best.seconds / row.seconds if best else None
        of_memory = row.answer["memory"] / best.answer["memory"] if best else None
        kept = row.seconds / statistics.median(row.answer["beside"]) if args.busy else None
        row.answer |= {"median": row.seconds, "tokens_per_second": length / row.seconds,
                       "speed_up": speed_up, "of_memory": of_memory, "kept": kept}  # fmt: skip
        say(row.label, f"{row.seconds:.3f}", f"{length / row.seconds:.0f}", f"{speed_up:.2f}" if best else "",
            human(row.answer["memory"]), f"{of_memory:.2f}" if best else "",
            human(row.answer["reserved"]) if "reserved" in row.answer else f"{kept:.2f}" if args.busy else "")  # fmt: skip
    rates = [row.answer["matmul_rate"] for row in rows if "matmul_rate" in row.answer]
    if rates:
        print(f"\nstreambp's matrix product: {statistics.median(rates) / 1e9:.0f} GFLOP/s")
    return [{"row": row.label, **row.answer} for row in rows]


def say(label, *cells):
    print((f"{label:48}" + "".join(f"{cell:>14}" for cell in cells)).rstrip(), flush=True)


def human(size):
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def compare_longest(args, folder, config, cap, gpu_memory):
    """The longest sequence of every row: PyTorch's by trial, this program's from its exact plan."""
    print(f"\nLongest sequence in {human(cap)}, PyTorch's to 5 %:\n")
    job = {"config": config, "cap": cap, "gpu_memory": gpu_memory, "device": args.device, "dtype": args.dtype,
           "optimizer": args.optimizer}  # fmt: skip
    answers = {label: in_child("longest", row=row, **job) for row, label in TORCH.items() if row in args.only}
    for chunk in args.chunk:
        tokens = plan(args, folder, folder / "config.json", "--memory", cap, "--chunk", chunk)["longest"]
        named = {f"streambp {m}" + (f" {chunk}" if m == "stream" else ""): m for m in MODES if m in args.only}
        answers |= {row: {"tokens": tokens[mode]} for row, mode in named.items()}
    for row, answer in answers.items():
        say(row, answer.get("problem") or f"{answer['tokens']} tokens")
    return [{"row": row, **answer} for row, answer in answers.items()]


def compare_gradients(args, folder, config):
    """The largest and the median error of the gradient's tensors."""
    length, chunk = (4500, 2048) if args.device == "cuda" else (600, 256)  # three chunks, the last of them cut
    print(f"\nRelative error of the gradient, {length} tokens through three layers of this family:\n")
    answer = in_child("agreement", config=config, folder=str(folder), streambp=args.streambp, device=args.device,
                      dtypes=["f32", "bf16"], length=length, chunk=chunk)  # fmt: skip
    if "problem" in answer:
        say("", answer["problem"])
        return [answer]
    say("", "median", "worst", "  in")
    for row in answer["rows"]:
        label, tensor = f"{row['program']} {row['dtype']}", f"  {row['worst_tensor']}"
        say(label, f"{row['median']:.1e}", f"{row['worst']:.1e}", tensor)
    return answer["rows"]


# ---- The command line ----


def count(most):
    def parse(text):
        if not text.isdigit() or not 0 < int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not an integer from 1 to {most}")
        return int(text)

    return parse


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streambp", default="build/streambp", help="the program (default: build/streambp)")
    parser.add_argument("--model", help="a name streambp knows, a config.json, or tiny (default: qwen3-0.6b or tiny)")
    parser.add_argument("--length", type=count(1 << 24), nargs="+", help="tokens (default: 8192; cpu: 1024)")
    parser.add_argument("--chunk", type=count(1 << 24), nargs="+", help="of the stream rows (default: 4096; cpu: 512)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda, if PyTorch sees a GPU")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="default: bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--optimizer", choices=["none", "adamw"], help="default: none on a GPU, adamw on a CPU")
    parser.add_argument("--turns", type=count(1000), help="of each row (default: 3; on a GPU 1)")
    parser.add_argument("--keep", default="nothing", help="of the stream rows, as in bench")
    parser.add_argument("--repeat", type=count(1000), default=2, help="streambp's measured steps in a turn (default: 2)")
    parser.add_argument("--compile", action="store_true", help="also measure PyTorch's rows under torch.compile")
    parser.add_argument("--unlock-mkl", action="store_true", help="on a CPU: let MKL use its kernels for Intel's CPUs")
    parser.add_argument("--memory-cap", help="also find the longest sequence in this memory, such as 80GiB; GPU only")
    parser.add_argument("--only", nargs="+", choices=[*TORCH, *MODES], default=[*TORCH, *MODES], help="only these rows")
    parser.add_argument("--busy", type=count(1024), help="CPU: also beside so many busy processes; each row keeps this share of its speed")
    parser.add_argument("--limit", type=count(1 << 20), help="stop a turn of a row after so many seconds")
    parser.add_argument("--skip-agreement", action="store_true", help="skip the comparison of gradients")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    return parser.parse_args()


def unlock_mkl(folder):
    """Builds a library that tells MKL that the CPU is Intel's. Returns its file."""
    (folder / "intel.c").write_text(INTEL)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "intel.so", folder / "intel.c"], check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise Mistake(f"--unlock-mkl: no library could be built: {problem}; install a C compiler") from problem
    return str(folder / "intel.so")


def find_programs(args, folder):
    """Checks both programs. Returns PyTorch's versions."""
    args.streambp = os.path.abspath(args.streambp)
    check_program(args.streambp)
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise Mistake(f"--json {args.json}: not a file in an existing folder")
    args.preload = unlock_mkl(folder) if args.unlock_mkl else None
    versions = in_child("about", preload=args.preload, device=args.device, dtype=args.dtype or "f32")
    if "problem" in versions:
        needs = "this needs torch, transformers 4.56 or later, safetensors and numpy; install them with pip"
        raise Mistake(f"{sys.executable}: {versions['problem'].removeprefix('failed: ')}: {needs}")
    return versions


def prepare(args, folder):
    """Fills in defaults and checks the options. Returns the model's config, the memory cap, and versions."""
    versions = find_programs(args, folder)
    args.device = args.device or ("cuda" if "gpu" in versions else "cpu")
    on_gpu = args.device == "cuda"
    if on_gpu and (args.unlock_mkl or args.busy):
        raise Mistake("--unlock-mkl and --busy are for --device cpu")
    if on_gpu and "gpu" not in versions:
        raise Mistake("--device cuda: PyTorch sees no GPU")
    args.dtype = args.dtype or ("bf16" if on_gpu else "f32")
    args.optimizer = args.optimizer or ("none" if on_gpu else "adamw")
    args.ours = "adamw-bf16" if args.optimizer == "adamw" and args.dtype == "bf16" else args.optimizer
    args.turns = args.turns or (1 if on_gpu else 3)
    args.length = args.length or [8192 if on_gpu else 1024]
    args.chunk = args.chunk or [4096 if on_gpu else 512]
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
    place = versions.get("gpu") if args.device == "cuda" else f"{len(os.sched_getaffinity(0))} CPU cores"
    print(f"{args.model}, {args.dtype}, medians of {args.turns} turns, on {place}")
    print(f"PyTorch {versions['torch']}, transformers {versions['transformers']}, SDPA attention: {kernels}")
    if args.device == "cpu":
        print(f"PyTorch's matrix product in {args.dtype}: {versions['matmul_rate'] / 1e9:.0f} GFLOP/s"
              + (", MKL unlocked" if args.unlock_mkl else ""))  # fmt: skip
    result = {"model": args.model, "config": config, "device": args.device, "dtype": args.dtype, "attention": kernels,
              "optimizer": args.optimizer, **versions, "lengths": [], "longest": [], "agreement": []}  # fmt: skip
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


def main():
    args = options()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run(args, Path(folder))
    except (Mistake, OSError) as problem:
        print(f"compare_torch.py: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
