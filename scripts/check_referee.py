#!/usr/bin/env python3
"""Judges real trainers: records a step of each with dump_gradients.py, and compares the verdict with what is known.

  scripts/check_referee.py                 all of them: transformers, TRL, PEFT, DDP and FSDP2 with two processes, Qwen3.5,
                                           mixtures of experts
  scripts/check_referee.py trainer ddp     only these, by the beginning of the name
  scripts/check_referee.py --random 100    random steps in float32 and bfloat16, which must all be right
  scripts/check_referee.py --foreign       wrong steps of transformers' models: how many are judged wrong, and named

Needs torch, transformers, trl, peft and datasets, and build/streambp. With an older transformers, such as 4.45, `trainer`
shows the mean of micro-batch means that it computed then; with 5.17, `experts-parallel` shows `router-foreign-slots`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from dump_gradients import StepRecorder, record_callback  # noqa: E402

PROGRAM = Path(__file__).parent.parent / "build" / "streambp"
RIGHT = "Right: rounding in float32"
# name: what `verify` must say
EXPECTED = {
    "trainer": RIGHT,
    "trainer-bf16": "Right: rounding in bfloat16",
    "trainer-clipped": "Right, but it is clipped to a norm of 0.5",
    "trainer-padding-learned": "padding has the label",
    "peft": RIGHT,
    "peft-zeros": RIGHT,
    "trl": RIGHT,
    "trl-padding-free": RIGHT,
    "hybrid": RIGHT,
    "hybrid-flattened": "(state-and-convolution-leak)",
    "gemma4": RIGHT,
    "gemma4-bf16": "Right: rounding in bfloat16",
    "gemma4-uncapped": "(logit-cap)",
    "loop": RIGHT,
    "loop-means": "(micro-batch-means)",
    "loop-sums": "(micro-batch-means), times 4: it is not divided by the 4 micro-batches",
    "loop-cleared": "(last-micro-batch)",
    "loop-scaled": "a loss scale of 1024 is left in it",
    "loop-detached": "the gradient of 1 tensor is zero (model.norm.weight)",
    "ddp": RIGHT,
    "ddp-means": "(rank-means)",
    "fsdp": RIGHT,
    "fsdp-means": "(rank-means)",
    "experts": RIGHT,
    "experts-still": "expert 3 of layer 0 has no gradient",
    "experts-detached": "expert 3 of layer 1 has no gradient in model.layers.1.mlp.experts.down_proj",
    "experts-parallel": RIGHT,
    "experts-parallel-router": "(router-foreign-slots), with experts on 2 ranks",
    "experts-parallel-accumulated": "WRONG, first in model.layers.1.self_attn.k_norm.weight",
    "experts-lora": RIGHT,
    "experts-lora-frozen": "8 of the 8 tensors of experts' adapters have no gradient: no expert moves.",
    "experts-lora-stashed": "4 of the 4 tensors of experts' adapters have no gradient: no expert moves.",
    "experts-lora-half": "4 of the 8 tensors of experts' adapters have no gradient: they do not move.",
    "experts-lora-unused": "(expert-adapters-unused)",
}


MODELS = {"gemma4": "--hidden 32 --heads 4 --kv-heads 2 --layers 3 --mlp 64",
          "llama": "--hidden 64 --layers 3", "qwen3_5": "--hidden 32 --heads 2 --kv-heads 1 --head-dim 16 --layers 4",
          "qwen3_moe": "--hidden 32 --heads 4 --kv-heads 2 --layers 2 --experts 8 --experts-per-token 2 --mlp 32"}


def new_model(folder, sizes):
    subprocess.run([PROGRAM, "train", "--family", folder.name, *sizes.split(), "--steps", "1", "--sample", "0", "--out",
                    folder], check=True, stdout=subprocess.DEVNULL)
    model = next(folder.glob("step-*"))
    if folder.name == "gemma4":  # the logits of a new model are small
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 0.5}))
    return model


def documents(count, seed=1):
    """Random documents of unequal length. The first third of each is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        length = int(torch.randint(10, 60, (1,), generator=generator))
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        yield {"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3:]}


def padded(rows, label=-100):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = lambda values, value: values + [value] * (longest - len(values))
    return {"input_ids": torch.tensor([fill(row["input_ids"], 0) for row in rows]),
            "labels": torch.tensor([fill(row["labels"], label) for row in rows]),
            "attention_mask": torch.tensor([fill([1] * len(row["input_ids"]), 0) for row in rows])}


def load(model, **options):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(model, **options).float()


def run_trainer(name, model, out):
    from transformers import Trainer, TrainingArguments
    options = dict(output_dir=str(out) + ".run", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1,
                   learning_rate=0.0, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
                   bf16=name.endswith("-bf16"), max_grad_norm=0.5 if name == "trainer-clipped" else 0.0)
    data, module = list(documents(8)), load(model)
    if name.startswith("trl"):
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer
        args = SFTConfig(**options, padding_free=name == "trl-padding-free", max_length=None,
                         dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(module, args=args, train_dataset=Dataset.from_list(data),
                             processing_class=AutoTokenizer.from_pretrained(model))
    else:
        if name.startswith("peft"):
            from peft import LoraConfig, get_peft_model
            module = get_peft_model(module, LoraConfig(r=4, lora_alpha=16, init_lora_weights=name == "peft-zeros",
                                                       target_modules=["q_proj", "v_proj", "down_proj"]))
            module.save_pretrained(str(out) + ".adapter")
        if name == "gemma4-uncapped":
            module.config.final_logit_softcapping = None
        from transformers import DataCollatorWithFlattening
        label = 0 if name == "trainer-padding-learned" else -100
        collator = DataCollatorWithFlattening() if name.endswith("flattened") else lambda rows: padded(rows, label)
        trainer = Trainer(module, TrainingArguments(**options, remove_unused_columns=False), train_dataset=data,
                          data_collator=collator)
    trainer.add_callback(record_callback(str(out)))
    trainer.train()


def run_loop(name, model, out, module=None, size=2):
    module = module or load(model).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    StepRecorder(module, optimizer, str(out))
    rows = list(documents(8))
    batches = [padded(rows[i:i + size]) for i in range(0, 8, size)]
    tokens = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
    if name == "loop-detached":
        norm = module.model.norm
        norm.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight.detach(), norm.variance_epsilon)
    for batch in batches:
        own = int((batch["labels"][:, 1:] >= 0).sum())
        share = {"loop-means": 1 / 4, "loop-sums": 1, "loop-cleared": 1}.get(name, own / tokens)
        if name == "loop-cleared":
            optimizer.zero_grad()
        (module(**batch).loss * share * (1024 if name == "loop-scaled" else 1)).backward()
    optimizer.step()


def run_rank(name, model, out):
    """One of two processes, with its own micro-batch."""
    import torch.distributed as dist
    dist.init_process_group("gloo")
    module = load(model).train()
    if name.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard
        for layer in module.model.layers:
            fully_shard(layer)
        fully_shard(module)
    else:
        module = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    StepRecorder(module, optimizer, str(out))
    batch = padded(list(documents(2 + dist.get_rank(), seed=dist.get_rank())))
    own = (batch["labels"][:, 1:] >= 0).sum().float()
    tokens = own.clone()
    dist.all_reduce(tokens)
    share = 1 if name.endswith("means") else 2 * own / tokens  # both average over the ranks
    (module(**batch).loss * share).backward()
    optimizer.step()
    dist.destroy_process_group()


def forget_foreign_slots():
    """Expert parallelism as in transformers 5.17 (#48687), in newer ones."""
    from transformers.distributed import expert_parallel as ep

    def call(self, x, index, weights):
        group = self.ep_mesh.get_group()
        x, weights = (ep._AllReduceBackward.apply(value, group) for value in (x, weights))
        foreign = index // self.num_local_experts != self.ep_mesh.get_local_rank()
        weights = ep._AllReduceBackward.apply(weights.masked_fill(foreign, 0.0), group)
        index = (index % self.num_local_experts).masked_fill(foreign, self.num_local_experts - 1)
        return ep._AllReduceForward.apply(self.experts_forward(x, index, weights), group)
    ep.AllReduceEP.__call__ = call


def detach_expert(experts, expert):
    """One expert is detached."""
    forward = experts.forward

    def call(x, index, weights):
        others = forward(x, index, weights.masked_fill(index == expert, 0.0))
        return others + (forward(x, index, weights) - others).detach()
    experts.forward = call


def lose_adapters(name):
    """Experts' adapters as in unsloth-zoo #606: a forward pass that does not use them, or has no gradient for them."""
    from peft.tuners.lora.layer import ParamWrapper
    lost = ("gate_up_proj", "down_proj") if name != "experts-lora-half" else ("down_proj",)
    factors = ParamWrapper.get_delta_factors
    if name.endswith(("stashed", "unused")):
        ParamWrapper.forward = lambda self, *args: self.base_layer(*args)
    else:
        def without_gradient(self, adapter):
            b, a, scale = factors(self, adapter)
            return (b.detach(), a.detach(), scale) if self.parameter_name in lost else (b, a, scale)
        ParamWrapper.get_delta_factors = without_gradient


def run_experts(name, model, out):
    """A mixture of experts; with `parallel`, in two processes with half of the experts each."""
    options, parallel = {}, name.startswith("experts-parallel")
    if parallel:
        import torch.distributed as dist
        from transformers.distributed import DistributedConfig
        dist.init_process_group("gloo")
        new = hasattr(DistributedConfig, "ep_size")
        if name.endswith("router") and new:
            forget_foreign_slots()
        how = {"ep_size": 2, "ep_implementation": "all_reduce"} if new else {"enable_expert_parallel": True}
        options = {"experts_implementation": "batched_mm", "distributed_config": DistributedConfig(tp_size=2, **how)}
    module = load(model, **options).train()
    if name == "experts-detached":
        detach_expert(module.model.layers[1].mlp.experts, 3)
    if name == "experts-still":
        for parameter in module.model.layers[0].mlp.experts.parameters():
            parameter.register_hook(lambda dw: dw.index_fill(0, torch.tensor([3]), 0))
    if name.startswith("experts-lora"):
        from peft import LoraConfig, get_peft_model
        module = get_peft_model(module, LoraConfig(
            r=4, lora_alpha=16, init_lora_weights=name.endswith("stashed"), target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
        module.save_pretrained(str(out) + ".adapter")
        if name != "experts-lora":
            lose_adapters(name)
    run_loop(name, model, out, module, 8 if parallel and not name.endswith("accumulated") else 2)
    if parallel:
        if dist.get_rank() > 0:  # the ranks read the same rows
            os.remove(f"{out}.batch.rank{dist.get_rank()}.safetensors")
        dist.destroy_process_group()


def check_random(model, folder, count):
    """Random padded and packed steps of a correct loop, half of them under autocast to bfloat16, but not of mixtures:
    rounding can change which experts a row chooses."""
    module = load(model).train()
    wrong = 0
    for i in range(count):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        optimizer.zero_grad()
        out = Path(folder, "random")
        StepRecorder(module, optimizer, str(out))
        rows = list(documents(2 + i % 5, seed=i))
        batches = [padded(rows[j:j + 2]) for j in range(0, len(rows), 2)]
        tokens = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1 and "qwen3_moe" not in str(model)):
            losses = [module(**batch).loss * int((batch["labels"][:, 1:] >= 0).sum()) / tokens for batch in batches]
        sum(losses).backward()
        optimizer.step()
        said = verdict(model, out, [])
        if said.returncode != 0:
            wrong += 1
            print(f"step {i} of {count}: {said.stdout.strip().splitlines()[-1]}")
    print(f"{count - wrong} of {count} correct steps of {Path(model).parent.name} are judged right")
    return wrong


def check_foreign(folder, wanted):
    from foreign_defects import FAMILIES, FOREIGN, prepare, record_foreign
    models = {}
    for family, sizes in FAMILIES.items():
        models[family] = new_model(Path(folder, family), sizes)
        prepare(models[family])
    counts = {"judged wrong": 0, "named": 0, "misnamed": 0, "false alarms": 0}
    chosen = {name: case for name, case in FOREIGN.items() if name.startswith(tuple(wanted))}
    for name, (family, defect, names) in chosen.items():
        out = Path(folder, name)
        record_foreign(defect, models[family], out, documents, padded)
        said = verdict(models[family], out, ["--minutes", "1"])
        last = [line for line in said.stdout.splitlines() if line.startswith(("Right", "WRONG", "Explained", "This step", "Not expl"))]
        explained = [line for line in last if line.startswith(("Explained", "This step"))]
        good = said.returncode == 0 if names == RIGHT else said.returncode == 1
        named = names != RIGHT and any(part in line for part in names for line in explained)
        counts["judged wrong"] += names != RIGHT and good
        counts["named"] += named
        counts["misnamed"] += names != RIGHT and bool(explained) and not named
        counts["false alarms"] += names == RIGHT and not good
        mark = "as expected" if named or (names == RIGHT and good) else "FALSE ALARM" if names == RIGHT else \
            "NOT JUDGED WRONG" if not good else "MISNAMED" if explained else "not named"
        print(f"{name:34} {mark}: {(last or [said.stderr.strip()])[-1][:260]}", flush=True)
    wrong = sum(names != RIGHT for _, _, names in chosen.values())
    print(f"of {wrong} wrong gradients: {counts}; {len(chosen) - wrong} right ones")
    return counts["judged wrong"] < wrong or counts["misnamed"] or counts["false alarms"]


def verdict(model, out, options):
    batches = sorted(out.parent.glob(f"{out.name}.batch.*"))
    return subprocess.run([PROGRAM, "verify", "--model", model, *options, "--batch", *batches, "--against",
                           f"{out}.gradient.safetensors"], capture_output=True, text=True)


def record(name, model, out):
    if name.startswith(("ddp", "fsdp", "experts-parallel")):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
    else:
        command = [sys.executable, __file__]
    return subprocess.run(command + ["--record", name, model, out], capture_output=True, text=True)


def main():
    if sys.argv[1:2] == ["--record"]:
        name, model, out = sys.argv[2:]
        runs = {"loop": run_loop, "ddp": run_rank, "fsdp": run_rank, "experts": run_experts}
        return runs.get(name.split("-")[0], run_trainer)(name, model, out)
    wanted = tuple(sys.argv[1:]) or ("",)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        if wanted[0] == "--foreign":
            sys.exit(1 if check_foreign(folder, wanted[1:] or ("",)) else 0)
        models = {kind: new_model(Path(folder, kind), sizes) for kind, sizes in MODELS.items()}
        if wanted[0] == "--random":
            sys.exit(1 if sum(check_random(model, folder, int(wanted[1])) for model in models.values()) else 0)
        for name, expected in EXPECTED.items():
            if not name.startswith(wanted):
                continue
            family = {"hybrid": "qwen3_5", "experts": "qwen3_moe", "gemma4": "gemma4"}.get(name.split("-")[0], "llama")
            out, model = Path(folder, name), models[family]
            recorded = record(name, model, out)
            if recorded.returncode != 0:
                print(f"{name:24} FAILED to record:\n{recorded.stderr[-2000:]}")
                failed.append(name)
                continue
            adapter = ["--adapter", f"{out}.adapter"] if os.path.exists(f"{out}.adapter") else []
            outcome = verdict(model, out, adapter)
            said = outcome.stdout + outcome.stderr
            code = 0 if "Right" in expected else 2 if "padding has" in expected else 1
            good = expected in said and outcome.returncode == code
            print(f"{name:24} {'as expected' if good else 'NOT AS EXPECTED'}: {said.strip().splitlines()[-1]}", flush=True)
            if not good:
                failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
