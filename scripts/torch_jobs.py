"""The jobs that compare_torch.py gives to child processes, each with its own PyTorch.

  torch_jobs.py JOB        JOB is a dictionary in JSON, "do" names the function; the last line of the output is the answer
"""

import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.integrations import sdpa_attention

LOSS_ROWS = 1024
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
OUT_OF_MEMORY = {"problem": "out of memory"}
SECONDS = 5  # of warm-up, and of measurement


def about(job):
    """Versions, the GPU that PyTorch sees, or the rate of its matrix product on the CPU."""
    answer = {"torch": torch.__version__, "transformers": transformers.__version__}
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    if job["device"] == "cpu" or not gpu:
        answer["matmul_rate"] = matmul_rate(DTYPES[job["dtype"]])
    return answer | ({"gpu": gpu.name, "gpu_memory": gpu.total_memory} if gpu else {})


def matmul_rate(dtype):
    """FLOPs per second of a large product on the CPU."""
    n, seconds = 2048, []
    a, b = (torch.randn(n, n).to(getattr(torch, dtype)) for _ in range(2))
    for _ in range(7):
        start = time.perf_counter()
        a @ b.T
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(seconds)


# ---- Time and memory ----


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


def mean_loss(model, tokens, chunked_loss=False):
    """The loss of next-token prediction. Without a padding mask, attention is plainly causal."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    inputs = {"input_ids": tokens, "attention_mask": None, "position_ids": positions, "use_cache": False}
    if not chunked_loss:
        return model(**inputs, labels=tokens).loss
    hidden, targets = model.base_model(**inputs).last_hidden_state[0, :-1], tokens[0, 1:]
    head = model.get_output_embeddings().weight

    def sum_of_losses(rows, targets):
        return cross_entropy(linear(rows, head).float(), targets, reduction="sum")

    chunks = zip(hidden.split(LOSS_ROWS), targets.split(LOSS_ROWS))
    return torch.stack([checkpoint(sum_of_losses, *c, use_reentrant=False) for c in chunks]).sum() / len(targets)


class Training:
    """A model and its optimizer."""

    def __init__(self, job):
        torch.manual_seed(1)
        self.job = job
        self.model = build(job["config"], getattr(torch, DTYPES[job["dtype"]]), job["device"])
        if "checkpoint" in job["row"] or "chunked" in job["row"]:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = None
        if job["optimizer"] == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.loss = torch.compile(mean_loss) if "compiled" in job["row"] else mean_loss

    def step(self, length):
        """Seconds of one step: forward, backward, gradient clipping and update, the last two with an optimizer only."""
        synchronize = torch.cuda.synchronize if self.job["device"] == "cuda" else lambda: None
        tokens = torch.randint(self.job["config"]["vocab_size"], [1, length], device=self.job["device"])
        synchronize()
        start = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        self.loss(self.model, tokens, "chunked" in self.job["row"]).backward()
        if self.optimizer:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        synchronize()
        return time.perf_counter() - start

    def steps(self, length):
        """Seconds of every step, at least one, until SECONDS have passed."""
        seconds = [self.step(length)]
        while sum(seconds) < SECONDS:
            seconds.append(self.step(length))
        return seconds


def attention(job):
    """SDPA alone: TFLOP/s of forward and backward in bfloat16, of every kernel that runs, also with a deterministic
    backward. 4096 columns of queries, 8 key/value heads; backward counts as 2.5 forwards."""
    length = job["length"]
    for width in job["widths"]:
        heads, flops = 4096 // width, 2 * length**2 * 4096
        q, k, v = (torch.randn(1, h, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (heads, 8, 8))
        dout = torch.randn_like(q)

        def step(events):
            events[0].record()
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            events[1].record()
            torch.autograd.grad(out, (q, k, v), dout)
            events[2].record()

        for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                label = f"SDPA {kernel.name.lower()}, heads of {width}" + (", deterministic" if deterministic else "")
                try:
                    runs = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(7)]
                    with sdpa_kernel(kernel):
                        for events in runs:
                            step(events)
                    torch.cuda.synchronize()
                except RuntimeError as error:
                    print(f"{label}: {str(error).splitlines()[0]}", flush=True)
                    continue
                forward, backward = (statistics.median(e[i].elapsed_time(e[i + 1]) for e in runs[2:]) / 1e3 for i in (0, 1))
                print(f"{label}: forward {flops / forward / 1e12:.0f}, backward {2.5 * flops / backward / 1e12:.0f} TFLOP/s", flush=True)
    return {}


def decode(job):
    """Seconds of a step, which gives each sequence a token, after the prompt and some first tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, DTYPES[job["dtype"]]))
    model.to(job["device"]).eval()
    prompt = torch.full([job["sequences"], 3], 1, device=job["device"])

    def seconds(tokens):
        start = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0, top_k=0,
                       top_p=1.0, pad_token_id=0, min_new_tokens=tokens, max_new_tokens=tokens).cpu()  # fmt: skip
        return time.perf_counter() - start

    seconds(16)  # warms up
    return {"seconds": [(seconds(16 + job["tokens"]) - seconds(16)) / job["tokens"] for _ in range(3)]}


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
    """Seconds of the steps, and peak memory."""

    def work():
        training = Training(job)
        training.steps(job["length"])  # warms up
        if job["device"] == "cuda":
            torch.cuda.reset_peak_memory_stats()
        answer = {"seconds": training.steps(job["length"])}
        if job["device"] == "cuda":
            return answer | {"memory": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return answer | {"memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

    with attention_kernels(job, job["dtype"]):
        return or_out_of_memory(work) or OUT_OF_MEMORY


def longest(job):
    """The longest sequence that runs under the cap, to about 5 %: doubling finds bounds, halving narrows them."""
    torch.cuda.set_per_process_memory_fraction(job["cap"] / job["gpu_memory"])

    def fits(length):
        fitted = or_out_of_memory(lambda: training.step(length)) is not None
        training.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        return fitted

    with attention_kernels(job, job["dtype"]):
        training = or_out_of_memory(lambda: Training(job))
        limit = job["config"].get("n_positions", 1 << 22)  # the limit of learned positions
        good, bad = 0, min(1024, limit)
        while training and good < limit and fits(bad):
            good, bad = bad, min(2 * bad, limit)
        while training and good < limit and bad - good > max(256, good // 20):
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
    """Sets weights that bfloat16 can represent, so that every type starts from the same weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1 if parameter.ndim == 1 and name.endswith("weight") else 0  # for norms
            parameter.normal_(centre, 0.05).copy_(parameter.bfloat16())


def published(name):
    """A parameter's name in published checkpoints. For GPT-2, transformers adds a prefix that these do not have."""
    return name.removeprefix("transformer.")


def gradient(model, tokens):
    mean_loss(model, tokens.to(model.device)).backward()
    return {published(name): p.grad.double().cpu() for name, p in model.named_parameters()}


def streambp_gradient(job, dtype):
    folder = Path(job["folder"])
    file = folder / f"{dtype}-gradient.safetensors"
    command = [job["streambp"], "verify", "--model", folder, "--tokens", folder / "tokens", "--chunk", job["chunk"],
               "--device", job["device"], "--dtype", dtype, "--save-gradient", file]  # fmt: skip
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if run.returncode not in (0, 1):  # 1: more error than verify tolerates, which the table shows
        raise RuntimeError(run.stderr.strip() or f"streambp verify ended with exit code {run.returncode}")
    return {name: tensor.double() for name, tensor in load_file(file).items()}


def errors(gradient, truth):
    if set(truth) != set(gradient):
        raise RuntimeError(f"PyTorch and streambp name different tensors: {sorted(set(truth) ^ set(gradient))}")
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


JOBS = {job.__name__: job for job in (about, measure, attention, decode, longest, agreement)}

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print("\n" + json.dumps(JOBS[asked["do"]](asked)))
