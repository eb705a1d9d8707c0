"""Wrong training steps of transformers' models, for check_referee.py --foreign. None is computed by streambp's own code.

A defect is a function that changes a model, or one of the keys that record_foreign() reads.
"""

import types

import torch
from torch.nn import functional as F

from dump_gradients import StepRecorder

FAMILIES = {"llama": "--hidden 32 --heads 4 --kv-heads 2 --layers 2", "qwen3": "--hidden 32 --heads 4 --kv-heads 2 --layers 2",
            "gpt2": "--hidden 32 --heads 4 --layers 2", "gemma3": "--hidden 32 --heads 4 --kv-heads 2 --layers 2"}


class Scale(torch.autograd.Function):
    """The same value, and another gradient."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(context, dy):
        return context.factor * dy, None


def scaled(value, factor):
    return (Scale.apply(value[0], factor), *value[1:]) if isinstance(value, tuple) else Scale.apply(value, factor)


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def inner(layer, name):
    """The module of a layer, in any family."""
    for candidate in {"attention": ("self_attn", "attn"), "mlp": ("mlp",), "attention_norm": ("input_layernorm", "ln_1"),
                      "mlp_norm": ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")}.get(name, (name,)):
        module = layer
        for part in candidate.split("."):
            module = getattr(module, part, None)
        if module is not None:
            return module
    raise ValueError(name)


def output(name, factor, only=None):
    """The gradient of a module's output is multiplied."""
    def change(model):
        for l, layer in enumerate(layers_of(model)):
            if only is None or l == only:
                inner(layer, name).register_forward_hook(lambda _, __, y: scaled(y, factor))
    return change


def entry(name, factor, only=None):
    """The gradient of a module's input is multiplied."""
    def change(model):
        for l, layer in enumerate(layers_of(model)):
            if only is not None and l != only:
                continue
            inner(layer, name).register_forward_pre_hook(
                lambda _, args, kwargs: (scaled(args, factor), kwargs) if args else
                (args, {**kwargs, "hidden_states": Scale.apply(kwargs["hidden_states"], factor)}), with_kwargs=True)
    return change


def attention(**wrong):
    """An attention with another mask, other heads or other gradients."""
    def change(model):
        padding = {}
        model.register_forward_pre_hook(lambda _, __, kwargs: padding.update(mask=kwargs["attention_mask"]), with_kwargs=True)

        def attend(module, q, k, v, _, scaling=None, sliding_window=None, **__):
            if module.layer_idx == wrong.get("only", module.layer_idx):
                q, k, v = (Scale.apply(x, wrong.get(name, 1)) for name, x in zip("qkv", (q, k, v)))
            groups = q.shape[1] // k.shape[1]
            share = (lambda x: x.repeat(1, groups, 1, 1)) if wrong.get("in_turn") else (
                lambda x: x.repeat_interleave(groups, 1))
            scores = q @ share(k).transpose(2, 3) * wrong.get("scaling", scaling or q.shape[-1] ** -0.5)
            n = torch.arange(q.shape[2])
            sees = (n[None] <= n[:, None] + wrong.get("ahead", 0)) | ((n[None] == 0) & (n[:, None] == 0))
            if wrong.get("window", sliding_window):
                sees &= n[:, None] - n[None] < wrong.get("window", sliding_window)
            sees = sees[None, None] & (padding["mask"][:, None, None] != 0)
            p = scores.masked_fill(~sees, -1e30).softmax(-1)
            if "p" in wrong:
                p = Scale.apply(p, wrong["p"])
            return (p @ share(v)).transpose(1, 2).contiguous(), p

        from transformers import AttentionInterface
        AttentionInterface.register("foreign", attend)
        model.config._attn_implementation = "foreign"
    return change


def rope(change_pair):
    def change(model):
        module = __import__(type(model).__module__, fromlist=["x"])
        right = module.apply_rotary_pos_emb
        module.apply_rotary_pos_emb = lambda q, k, cos, sin, *args, **kwargs: change_pair(right, q, k, cos, sin)
        return lambda: setattr(module, "apply_rotary_pos_emb", right)
    return change


def detached_weight(path, only):
    """A weight that is used, but gets no gradient."""
    def change(model):
        module = inner(layers_of(model)[only], path)
        module.forward = types.MethodType(lambda self, x: F.linear(x, self.weight.detach(), self.bias), module)
    return change


def detached_stream(model):
    layers_of(model)[1].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))


def other_activation(function):
    def change(model):
        for layer in layers_of(model):
            layer.mlp.act_fn.forward = function
    return change


def norms_without_statistics(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            def forward(self, x):
                return self.weight * (x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
            module.forward = types.MethodType(forward, module)


def several(*changes):
    def change(model):
        undo = [change(model) for change in changes]
        return lambda: [u() for u in undo if u]
    return change


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum", **options)


def with_labels(change):
    def loss(logits, labels):
        changed = labels.clone()
        for row, right in zip(changed, labels):
            change(row, (right >= 0).nonzero()[:, 0])
        return cross_entropy(logits, changed)
    return loss


def z_loss(logits, labels):
    learned = labels[:, 1:] >= 0
    return cross_entropy(logits, labels) + 0.01 * (logits[:, :-1].logsumexp(-1)[learned] ** 2).sum()


def focal(logits, labels):
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum()


def every(change):
    def of(model):
        for name, p in model.named_parameters():
            p.grad = change(name, p).clone()
    return of


def one(part, change):
    return every(lambda name, p: change(p.grad) if part in name else p.grad)


def prepare(path):
    """Gives a new model weights that are not regular."""
    from safetensors.torch import load_file, save_file
    file, generator = path / "model.safetensors", torch.Generator().manual_seed(1)
    save_file({name: t.float() + 0.1 * torch.randn(t.shape, generator=generator) for name, t in load_file(file).items()},
              file, {"format": "pt"})


def record_foreign(defect, path, out, documents, padded):
    """Records a step of four micro-batches with a defect: of the model, or {"loss": ..., "gradient": ..., ...}."""
    from transformers import AutoModelForCausalLM
    d = defect if isinstance(defect, dict) else {"model": defect}
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").train()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0
    for name in ("resid_pdrop", "attn_pdrop", "embd_pdrop"):
        if hasattr(module.config, name):
            setattr(module.config, name, 0.0)
    undo = d["model"](module) if "model" in d else None
    rows = list(documents(8))
    batches = [padded(rows[i:i + 2]) for i in range(0, 8, 2)]
    tokens = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
    if d.get("stale"):
        module(**padded(list(documents(2, seed=9)))).loss.backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    StepRecorder(module, optimizer, str(out))
    for batch, share in zip(batches, d.get("shares", [1] * 4)):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(d.get("bf16"))):
            logits = module(**batch).logits
        own = int((batch["labels"][:, 1:] >= 0).sum())
        (d.get("loss", cross_entropy)(logits, batch["labels"]) * share / (4 * own if d.get("means") else tokens)).backward()
    if "gradient" in d:
        d["gradient"](module)
    optimizer.step()
    if undo:
        undo()


def clipped(norm):
    return every(lambda _, p: p.grad * min(1, norm / float(p.grad.norm())))


RIGHT, UNKNOWN = "Right: rounding in float32", ("Explained in part",)
ALL = 10 ** 6
# name: the family, the defect, and what a verdict that names it says
FOREIGN = {
    "mask-none-llama": ("llama", attention(ahead=ALL), ["attention-everywhere"]),
    "mask-none-gpt2": ("gpt2", attention(ahead=ALL), ["attention-everywhere"]),
    "mask-peeks-qwen3": ("qwen3", attention(ahead=1), ["attention-peeks"]),
    "mask-peeks-gemma3": ("gemma3", attention(ahead=1), ["attention-peeks"]),
    "mask-short-gpt2": ("gpt2", attention(ahead=-1), ["attention-short"]),
    "mask-short-qwen3": ("qwen3", attention(ahead=-1), ["attention-short"]),
    "mask-window-llama": ("llama", attention(window=8), ["(attention-window)"]),
    "mask-window-gpt2": ("gpt2", attention(window=5), ["(attention-window)"]),
    "rope-queries-llama": ("llama", rope(lambda f, q, k, cos, sin: (f(q, k, cos, sin)[0], k)), ["rope-of-queries"]),
    "rope-queries-qwen3": ("qwen3", rope(lambda f, q, k, cos, sin: (f(q, k, cos, sin)[0], k)), ["rope-of-queries"]),
    "rope-keys-qwen3": ("qwen3", rope(lambda f, q, k, cos, sin: (q, f(q, k, cos, sin)[1])), ["rope-of-keys"]),
    "rope-reversed-llama": ("llama", rope(lambda f, q, k, cos, sin: f(q, k, cos, -sin)), ["rope-reversed"]),
    "gqa-llama": ("llama", attention(in_turn=True), ["heads-in-turn"]),
    "gqa-qwen3": ("qwen3", attention(in_turn=True), ["heads-in-turn"]),
    "scores-unscaled-llama": ("llama", attention(scaling=1.0), ["scores-unscaled"]),
    "scores-by-width-qwen3": ("qwen3", attention(scaling=1 / 40), UNKNOWN),
    "smoothing-llama": ("llama", {"loss": lambda x, y: cross_entropy(x, y, label_smoothing=0.1)}, ["label-smoothing"]),
    "smoothing-gpt2": ("gpt2", {"loss": lambda x, y: cross_entropy(x, y, label_smoothing=0.05)}, ["label-smoothing"]),
    "smoothing-gemma3": ("gemma3", {"loss": lambda x, y: cross_entropy(x, y, label_smoothing=0.2)}, ["label-smoothing"]),
    "z-loss-qwen3": ("qwen3", {"loss": z_loss}, ["z-loss"]),
    "focal-llama": ("llama", {"loss": focal}, UNKNOWN),
    "first-not-learned-gpt2": ("gpt2", {"loss": with_labels(lambda row, at: row.__setitem__(at[0], -100))}, ["start-not-learned"]),
    "last-ten-learned-qwen3": ("qwen3", {"loss": with_labels(lambda row, at: row.__setitem__(at[:-10], -100))}, UNKNOWN),
    "decay-llama": ("llama", {"gradient": every(lambda _, p: p.grad + 0.01 * p.detach())}, ["(weight-decay)"]),
    "decay-gpt2": ("gpt2", {"gradient": every(lambda _, p: p.grad + 0.1 * p.detach() * (p.dim() > 1))}, ["(weight-decay-matrices)"]),
    "clipped-llama": ("llama", {"gradient": clipped(0.1)}, ["up to a factor"]),
    "clipped-gemma3": ("gemma3", {"gradient": clipped(0.05)}, ["up to a factor"]),
    "normalised-gpt2": ("gpt2", {"gradient": every(lambda _, p: p.grad / p.grad.norm())}, ["up to a factor"]),
    "twice-llama": ("llama", {"shares": [1, 2, 1, 1]}, ["micro-batch 1 2 times"]),
    "left-out-gpt2": ("gpt2", {"shares": [0, 1, 1, 1]}, ["micro-batch 0 0 times"]),
    "half-qwen3": ("qwen3", {"shares": [1, 1, 0.5, 1]}, ["micro-batch 2 0.5 times"]),
    "stale-llama": ("llama", {"stale": True}, ["was not zero"]),
    "stale-qwen3": ("qwen3", {"stale": True}, ["was not zero"]),
    "attention-detached-llama": ("llama", output("attention", 0), ["o_proj.weight is zero"]),
    "attention-doubled-qwen3": ("qwen3", output("attention", 2), ["(branch-attention)"]),
    "attention-doubled-1-gpt2": ("gpt2", output("attention", 2, only=1), ["(branch-attention), times 2, in layer 1"]),
    "attention-normed-llama": ("llama", entry("attention", 2), ["(branch-attention-norm)"]),
    "attention-input-gpt2": ("gpt2", entry("attention_norm", 0), ["(branch-attention-input)"]),
    "mlp-doubled-gpt2": ("gpt2", output("mlp", 2), ["(branch-mlp)"]),
    "mlp-halved-0-llama": ("llama", output("mlp", 0.5, only=0), ["(branch-mlp), times 0.5, in layer 0"]),
    "mlp-input-qwen3": ("qwen3", entry("mlp_norm", 0), ["(branch-mlp-input)"]),
    "mlp-input-1-gemma3": ("gemma3", entry("mlp_norm", 3, only=1), ["(branch-mlp-input)"]),
    "keys-detached-llama": ("llama", attention(k=0), ["(branch-keys)", "k_proj.weight is zero"]),
    "keys-doubled-gpt2": ("gpt2", attention(k=2), ["(branch-keys)"]),
    "values-doubled-qwen3": ("qwen3", attention(v=2), ["(branch-values)"]),
    "queries-tenth-1-gemma3": ("gemma3", attention(q=0.1, only=1), ["(branch-queries)"]),
    "scores-detached-llama": ("llama", attention(p=0), ["is zero"]),
    "scores-doubled-qwen3": ("qwen3", attention(p=2), ["(branch-scores)"]),
    "gate-halved-llama": ("llama", entry("mlp.act_fn", 0.5), ["(branch-gate)"]),
    "up-doubled-qwen3": ("qwen3", output("mlp.up_proj", 2), ["(branch-up)"]),
    "stream-detached-gpt2": ("gpt2", detached_stream, ["is zero", "are zero"]),
    "down-detached-llama": ("llama", detached_weight("mlp.down_proj", 0), ["is zero"]),
    "norms-llama": ("llama", norms_without_statistics, ["(branch-norms)"]),
    "gelu-llama": ("llama", other_activation(lambda x: F.gelu(x, approximate="tanh")), ["(activation)"]),
    "silu-gemma3": ("gemma3", other_activation(F.silu), ["(activation)"]),
    "relu-qwen3": ("qwen3", other_activation(F.relu), UNKNOWN),
    "sign-llama": ("llama", {"gradient": one("layers.1.mlp.up_proj", lambda g: -g)}, ["-1 times"]),
    "transposed-gpt2": ("gpt2", {"gradient": one("h.1.attn.c_proj.weight", lambda g: g.t())}, UNKNOWN),
    "noise-qwen3": ("qwen3", {"gradient": one("layers.0.mlp.up_proj", lambda g: g + 0.1 * g.std() * torch.randn(g.shape))}, UNKNOWN),
    "means-values-llama": ("llama", {"means": True, "model": attention(v=2)}, ["(micro-batch-means)"]),
    "means-gate-qwen3": ("qwen3", {"means": True, "model": entry("mlp.act_fn", 0.5)}, ["(micro-batch-means)"]),
    "sum-keys-gpt2": ("gpt2", {"shares": [1024] * 4, "model": attention(k=2)}, ["loss scale of 1024"]),
    "bf16-mask-none-llama": ("llama", {"bf16": 1, "model": attention(ahead=ALL)}, ["attention-everywhere"]),
    "bf16-smoothing-qwen3": ("qwen3", {"bf16": 1, "loss": lambda x, y: cross_entropy(x, y, label_smoothing=0.2)}, ["label-smoothing"]),
    "bf16-twice-llama": ("llama", {"bf16": 1, "shares": [1, 2, 1, 1]}, ["micro-batch 1"]),
    "bf16-values-qwen3": ("qwen3", {"bf16": 1, "model": attention(v=2)}, ["(branch-values)"]),
    "bf16-clipped-gpt2": ("gpt2", {"bf16": 1, "gradient": clipped(0.1)}, ["up to a factor"]),
    **{f"right-{family}": (family, {}, RIGHT) for family in FAMILIES},
    **{f"right-own-attention-{family}": (family, attention(), RIGHT) for family in FAMILIES},
    **{f"bf16-right-{family}": (family, {"bf16": 1}, RIGHT) for family in FAMILIES},
}
