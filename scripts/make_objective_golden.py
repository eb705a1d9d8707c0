#!/usr/bin/env python3
"""Writes tests/golden_objectives/<model>.safetensors: losses and gradients of training objectives, in float64."""

import copy
import json
import math
import statistics
import zlib

import torch
from golden import (
    FLOAT32, arguments, assert_close, check_norm, check_rope, checkpoint_parameters, everything_in_float64,
    finite_difference_error, forward, gpt2, llama_like, make_model, write_safetensors,
)  # fmt: skip
from torch.nn.functional import logsigmoid

EXPLANATION = """
A file holds one tiny model and several cases. A case is an objective with its settings, a stream of N tokens, and the
expected results.

  __metadata__               config: the model's config.json, as a string
                             cases: {"<case>": {"objective": "sft" | "dpo" | "grpo", other settings}, ...}, as a string
  weights/<name>        F32  every parameter, named as in a checkpoint; a tied lm_head is not repeated

  <case>/tokens    [N]  I32  documents laid end to end, each a prompt and a completion
  <case>/targets   [N]  I32  the next token if it belongs to the completion, else -1
  <case>/positions [N]  I32  of each token in its document
  <case>/key_begin [N]  I32  the index in the stream of the document's first token
  <case>/reference [N]  F64  log-prob of the target under the reference model,
  <case>/old       [N]  F64  and under the policy that sampled the completions; 0 without a target
  <case>/advantage [N]  F64  the same for every token of a document
  <case>/logp      [N]  F64  log-prob of the target; 0 without a target
  <case>/loss      [1]  F64
  <case>/token_weights [N] F64    d loss / d logp
  <case>/grad/<name>    F64       d loss / d parameter
  <case>/metrics/<metric> [1] F64

A case has reference, old and advantage only if its loss uses them. The losses, with i = logp - reference:

  sft    The mean of -logp over all targets; with "mean": "documents", over each document's targets and then over
         documents.
  dpo    Documents 2k and 2k + 1 are the chosen and the rejected completion of one prompt. Each has a score, and d is
         the chosen one's minus the other's. The loss is the mean over pairs of, by "loss":
           sigmoid  -(1 - label_smoothing) log sigmoid(beta d) - label_smoothing log sigmoid(-beta d), score = sum of i
           ipo      (d - 1 / (2 beta))^2,                                                   score = mean of i
           simpo    -log sigmoid(beta d - margin),                                          score = mean of logp
         A document's reward is beta times the sum of i, for simpo times the mean of logp. Metrics: rewards_chosen and
         rewards_rejected, the means; margin, their difference; accuracy, the fraction of pairs in which the chosen
         document has the higher reward.
  grpo   With r = exp(logp - old), A the advantage and c = r kept within 1 - clip_low and 1 + clip_high, a token's
         loss is
           -min(r A, c A) + kl (exp(-i) + i - 1)
         Without old, the completions come from the current policy: old is logp as a constant. Depending on
         "normalise", the loss is the mean over documents of the mean over their targets (grpo), the mean over all
         targets (bnpo), or the sum over all targets divided by documents * max_length (dr_grpo). Metrics:
         clip_fraction, the fraction of targets with A > 0 and r above the range, or A < 0 and r below it; if kl is
         not 0 also kl, the mean of exp(-i) + i - 1.

These are the losses of TRL 1.16.0: SFTTrainer, DPOTrainer, GRPOTrainer, and for simpo CPOTrainer with cpo_alpha = 0.
There are two exceptions: the mean over documents, and sigmoid with smoothed labels, which DPOTrainer had up to 0.28 and
CPOTrainer still has; DPOTrainer does not smooth there since 0.29.

The script checks before it writes a file: token_weights against the derivatives worked out by hand, in plain Python; the
gradient against finite differences of the loss; that there are pairs of both outcomes, and tokens below, within and
above the range of r for both signs of A, none of them near a bound. The same versions of torch and transformers write
the same bytes on the same kind of processor.

Needs: pip install torch transformers safetensors      (the files were made with torch 2.15.0, transformers 5.23.0)
"""


# ---- Models; cases, with the inputs of each loss in addition to logp; lengths of documents ----

MODELS = {
    "qwen3": llama_like("Qwen3", vocab=31, hidden=12, heads=2, kv_heads=1, mlp=20, head_dim=8,
                        rope_parameters={"rope_theta": 1000.0, "rope_type": "default"}, attention_bias=False,
                        layer_types=["full_attention", "full_attention"], tie_word_embeddings=True),
    "gpt2": gpt2(vocab=29, hidden=12, heads=2, mlp=20),
}  # fmt: skip

DPO = {"objective": "dpo"}
GRPO = {"objective": "grpo", "clip_low": 0.2, "clip_high": 0.28, "max_length": 16}
CASES = {
    "sft": ({"objective": "sft"}, []),
    "sft_documents": ({"objective": "sft", "mean": "documents"}, []),
    "dpo": ({**DPO, "loss": "sigmoid", "beta": 0.1, "label_smoothing": 0}, ["reference"]),
    "dpo_smoothed": ({**DPO, "loss": "sigmoid", "beta": 0.4, "label_smoothing": 0.2}, ["reference"]),
    "ipo": ({**DPO, "loss": "ipo", "beta": 0.3}, ["reference"]),
    "simpo": ({**DPO, "loss": "simpo", "beta": 2.0, "margin": 0.5}, []),
    "grpo": ({**GRPO, "normalise": "grpo", "kl": 0}, ["advantage", "old"]),
    "grpo_kl": ({**GRPO, "normalise": "grpo", "kl": 0.05}, ["advantage", "old", "reference"]),
    "bnpo": ({**GRPO, "normalise": "bnpo", "kl": 0}, ["advantage", "old"]),
    "bnpo_kl": ({**GRPO, "normalise": "bnpo", "kl": 0.05}, ["advantage", "old", "reference"]),
    "dr_grpo": ({**GRPO, "normalise": "dr_grpo", "kl": 0}, ["advantage", "old"]),
    "dr_grpo_kl": ({**GRPO, "normalise": "dr_grpo", "kl": 0.05}, ["advantage", "old", "reference"]),
    "on_policy": ({**GRPO, "normalise": "bnpo", "kl": 0}, ["advantage"]),
}

# For each prompt: its length and the lengths of its completions.
LENGTHS = {
    "sft": [(3, [8]), (1, [1]), (5, [12])],
    "dpo": [(3, [5, 8]), (4, [7, 2]), (1, [1, 6]), (5, [9, 3])],
    "grpo": [(3, [9, 6, 7]), (4, [3, 16, 1])],
}
REWARDS = [[1.0, 0.0, 0.3], [0.5, 0.5, 0.5]]  # of the completions for grpo
NOISE = 0.3  # standard deviation of other models' log-probs around this model's
MARGIN = 0.01  # distance from kinks and jumps of losses and metrics


# ---- Inputs of the losses ----


def make_stream(prompts, vocab, random):
    """The stream of all prompts with each of their completions, and the lengths of its documents."""
    tokens, targets, positions, key_begin, lengths = [], [], [], [], []
    for length, completions in prompts:
        prompt = torch.randint(vocab, [length], generator=random).tolist()
        for count in completions:
            completion = torch.randint(vocab, [count], generator=random).tolist()
            key_begin += [len(tokens)] * (length + count)
            positions += range(length + count)
            tokens += prompt + completion
            targets += [-1] * (length - 1) + completion + [-1]
            lengths.append(length + count)
    stream = {"tokens": tokens, "targets": targets, "positions": positions, "key_begin": key_begin}
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in stream.items()}, lengths


def make_given(names, stream, lengths, logp, random):
    """The inputs other than logp: log-probs of other models, close to this model's, and advantages."""
    given = {}
    for name in names:
        if name == "advantage":
            values = torch.tensor([a for rewards in REWARDS for a in advantages(rewards)])
            given[name] = values.repeat_interleave(torch.tensor(lengths))
        else:
            near = (logp + NOISE * torch.randn(logp.shape, generator=random)).clamp(max=-0.01)
            given[name] = near.where(stream["targets"] >= 0, 0.0)
    return given


def advantages(rewards):
    """The rewards of one prompt's completions, minus their mean, in standard deviations."""
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def at_targets(values, stream, lengths):
    """One tensor per document: the values of the tokens that have a target."""
    return [v[t >= 0] for v, t in zip(values.split(lengths), stream["targets"].split(lengths))]


# ---- Objectives: each returns the loss and the metrics ----


def sft(settings, logp):
    if settings.get("mean") == "documents":
        return -torch.stack([of_document.mean() for of_document in logp]).mean(), {}
    return -torch.cat(logp).mean(), {}


def improvements(logp, reference):
    return logp if reference is None else [own - other for own, other in zip(logp, reference)]


def document_rewards(settings, logp, reference=None):
    reduce = torch.mean if settings["loss"] == "simpo" else torch.sum
    return settings["beta"] * torch.stack([reduce(i) for i in improvements(logp, reference)])


def dpo(settings, logp, reference=None):
    reward = document_rewards(settings, logp, reference)
    chosen, rejected = reward[0::2], reward[1::2]
    if settings["loss"] == "ipo":
        score = torch.stack([i.mean() for i in improvements(logp, reference)])
        losses = (score[0::2] - score[1::2] - 1 / (2 * settings["beta"])) ** 2
    else:
        logit = chosen - rejected - settings.get("margin", 0)
        smoothing = settings.get("label_smoothing", 0)
        losses = -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit)
    return losses.mean(), {
        "rewards_chosen": chosen.mean(),
        "rewards_rejected": rejected.mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean(),
    }


def grpo(settings, logp, advantage, old, reference=None):
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    ratio = [torch.exp(own - before) for own, before in zip(logp, old)]
    losses = [-torch.minimum(r * a, r.clamp(low, high) * a) for r, a in zip(ratio, advantage)]
    clipped = [(r > high) & (a > 0) | (r < low) & (a < 0) for r, a in zip(ratio, advantage)]
    metrics = {"clip_fraction": torch.cat(clipped).double().mean()}
    if settings["kl"] != 0:
        kl = [torch.exp(other - own) - (other - own) - 1 for own, other in zip(logp, reference)]
        losses = [loss + settings["kl"] * k for loss, k in zip(losses, kl)]
        metrics["kl"] = torch.cat(kl).mean()
    match settings["normalise"]:
        case "grpo":
            return torch.stack([of_document.mean() for of_document in losses]).mean(), metrics
        case "bnpo":
            return torch.cat(losses).mean(), metrics
        case "dr_grpo":
            return torch.cat(losses).sum() / (len(losses) * settings["max_length"]), metrics


OBJECTIVES = {"sft": sft, "dpo": dpo, "grpo": grpo}


# ---- Checks ----


def tells_apart(settings, logp, advantage=None, old=None, reference=None):
    """Whether the case covers every branch of its objective, with no value near a border between branches."""
    if settings["objective"] == "dpo":
        reward = document_rewards(settings, logp, reference)
        leads = reward[0::2] - reward[1::2]
        return leads.min() < 0 < leads.max() and leads.abs().min() > MARGIN
    if old is not None:
        seen = set()
        low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
        for r, a in zip(torch.exp(torch.cat(logp) - torch.cat(old)).tolist(), torch.cat(advantage).tolist()):
            if a != 0 and min(abs(r - low), abs(r - high)) < MARGIN:
                return False
            seen.add((a > 0, a < 0, r < low, r > high))
        return len(seen) == 9  # each sign of the advantage with each side of the range
    return True


def plain_weights(settings, stream, lengths, given, logp):
    """d loss / d logp of every token, from the derivatives worked out by hand, in plain Python floats."""
    given = {name: values.tolist() for name, values in given.items()}
    logp, targets = logp.tolist(), stream["targets"].tolist()
    reference, old, advantage = (given.get(name) for name in ("reference", "old", "advantage"))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    documents = [[t for t in range(end - n, end) if targets[t] >= 0] for end, n in zip(ends, lengths)]
    count = sum(map(len, documents))
    weights = [0.0] * len(logp)

    def score(document):
        total = sum(logp[t] - (reference[t] if reference else 0) for t in document)
        return total / len(document) if settings["loss"] in ("ipo", "simpo") else total

    for i, document in enumerate(documents):
        match settings["objective"]:
            case "sft":
                by_document = settings.get("mean") == "documents"
                slopes = [-1 / (len(documents) * len(document) if by_document else count)] * len(document)
            case "dpo":
                beta, d = settings["beta"], score(documents[i - i % 2]) - score(documents[i - i % 2 + 1])
                if settings["loss"] == "ipo":
                    slope = 2 * d - 1 / beta
                else:
                    sigmoid = 1 / (1 + math.exp(settings.get("margin", 0) - beta * d))
                    slope = beta * (sigmoid - 1 + settings.get("label_smoothing", 0))
                slope *= (-1 if i % 2 else 1) / (len(documents) / 2)
                slopes = [slope / (1 if settings["loss"] == "sigmoid" else len(document))] * len(document)
            case "grpo":
                whole = {"grpo": len(documents) * len(document), "bnpo": count,
                         "dr_grpo": len(documents) * settings["max_length"]}  # fmt: skip
                slopes = []
                for t in document:
                    ratio, slope = math.exp(logp[t] - old[t]) if old else 1.0, 0.0
                    stopped_above = advantage[t] > 0 and ratio > 1 + settings["clip_high"]
                    stopped_below = advantage[t] < 0 and ratio < 1 - settings["clip_low"]
                    if not (stopped_above or stopped_below):
                        slope -= ratio * advantage[t]
                    if settings["kl"]:
                        slope += settings["kl"] * (1 - math.exp(reference[t] - logp[t]))
                    slopes.append(slope / whole[settings["normalise"]])
        for t, slope in zip(document, slopes):
            weights[t] = slope
    return weights


# ---- Writing the files ----


def make_case(model, model_name, config, name):
    settings, given_names = CASES[name]
    random = torch.Generator().manual_seed(zlib.crc32(f"{model_name}/{name}".encode()))
    model = copy.deepcopy(model)  # a copy: the check moves the parameters
    while True:  # until a draw covers all branches of the objective
        stream, lengths = make_stream(LENGTHS[settings["objective"]], config["vocab_size"], random)
        _, logp, _ = forward(model, stream, lengths)
        given = make_given(given_names, stream, lengths, logp.detach(), random)
        inputs = {n: at_targets(values, stream, lengths) for n, values in given.items()}
        if tells_apart(settings, at_targets(logp.detach(), stream, lengths), **inputs):
            break
    if settings["objective"] == "grpo" and "old" not in given:
        inputs["old"] = at_targets(logp.detach(), stream, lengths)

    def loss_and_metrics(logp):
        return OBJECTIVES[settings["objective"]](settings, at_targets(logp, stream, lengths), **inputs)

    logp.retain_grad()
    loss, metrics = loss_and_metrics(logp)
    loss.backward()
    tensors = {
        **stream,
        **given,
        "logp": logp.detach().where(stream["targets"] >= 0, 0.0),
        "loss": loss.detach()[None],
        "token_weights": logp.grad,
        **{f"metrics/{n}": value.detach()[None] for n, value in metrics.items()},
        **{f"grad/{n}": p.grad.contiguous() for n, p in checkpoint_parameters(model).items()},
    }
    expected = plain_weights(settings, stream, lengths, given, logp.detach())
    assert_close(f"{model_name}/{name}: token_weights", tensors["token_weights"].tolist(), expected)
    error = finite_difference_error(model, lambda: loss_and_metrics(forward(model, stream, lengths)[1])[0], random)
    assert error < 1e-8, f"{model_name}/{name}: the gradient is off the loss's slope by {error:.1e}"
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{model_name:9}{name:15}{sum(lengths):6}{loss.item():11.6f}{error:19.1e}{size:11,}", flush=True)
    return {f"{name}/{n}": tensor for n, tensor in tensors.items()}


def make_file(model_name, folder):
    config = MODELS[model_name]
    with everything_in_float64():
        model = make_model(config, torch.Generator().manual_seed(zlib.crc32(model_name.encode())))
        check_norm(model, config)
        if "n_embd" not in config:
            check_rope(model, config, max(prompt + max(c) for of in LENGTHS.values() for prompt, c in of))
        parameters = checkpoint_parameters(model)
        tensors = {f"weights/{n}": p.detach().type(FLOAT32) for n, p in parameters.items()}
        for name in CASES:
            tensors |= make_case(model, model_name, config, name)

    settings = {name: settings for name, (settings, _) in CASES.items()}
    file = folder / f"{model_name}.safetensors"
    write_safetensors(file, tensors, {"config": json.dumps(config), "cases": json.dumps(settings)})
    count, size = sum(p.numel() for p in parameters.values()), file.stat().st_size
    print(f"{model_name:9}{f'{count:,} parameters, the file':51}{size:11,}")
    return size


def main():
    options = arguments(__doc__, EXPLANATION, "golden_objectives", MODELS)
    print(f"{'model':9}{'case':15}{'tokens':>6}{'loss':>11}{'finite difference':>19}{'bytes':>11}")
    total = sum(make_file(name, options.out) for name in options.case)
    print(f"{'total':9}{total:62,}")


if __name__ == "__main__":
    main()
