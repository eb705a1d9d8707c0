#!/usr/bin/env python3
"""Draw what streambp writes.

  streambp plan qwen3-8b --length 100000 --memory 80GiB --optimizer adamw-bf16 --timeline timeline.json
  scripts/plot.py timeline timeline.json docs/timeline.png          memory through one step, in the three modes

  streambp plan qwen3-8b --accumulate 2 --memory 80GiB --sweep sweep.json
  scripts/plot.py memory sweep.json docs/memory.png                 peak memory against length, in the three modes

  streambp plan qwen3-8b --length 16384 --curve --json curve.json
  scripts/plot.py curve curve.json docs/dial.png                    what more memory buys

  streambp train --out run
  scripts/plot.py loss run/metrics.jsonl loss.png                   loss; of several runs, name all of them

  streambp train --model base --objective dpo --data preferences.jsonl --eval-every 2 --out run
  scripts/plot.py preferences run/metrics.jsonl preferences.png     accuracy and margin of held-out pairs

  streambp train --model base --objective grpo --data prompts.jsonl --reward exact --eval-every 10 --out run
  scripts/plot.py rewards run/metrics.jsonl rewards.png             reward and entropy

  scripts/demo_lora.sh
  scripts/plot.py parts out/demo-lora docs/lora.png                 held-out loss of its runs, and their memory

  scripts/plot.py exchange docs/exchange.png                        how ranks exchange rows for heads around attention

Needs matplotlib 3.7 or later (pip install matplotlib).
"""

import argparse
import json
import os
import sys

MODES = [
    ("full", "#b0413e", "full memory: all activations kept"),
    ("checkpoint", "#d9a441", "gradient checkpointing: layer inputs kept"),
    ("stream", "#2a6f97", "StreamBP: layer inputs kept, layers in chunks"),
]

COLOURS = ["#b0413e", "#d9a441", "#2a6f97", "#4f772d"]


def draw_memory(plt, args):
    with open(args.input) as file:
        sweep = json.load(file)
    gib = 2**30
    fig, ax = plt.subplots(figsize=(8, 4.8))
    for mode, colour, label in MODES:
        points = sweep["curve"][mode]
        ax.plot([p["length"] for p in points], [p["peak"] / gib for p in points], color=colour, label=label, linewidth=2.2)
        if "longest" in sweep:
            longest, budget = sweep["longest"][mode], sweep["memory"] / gib
            ax.plot([longest], [budget], "o", color=colour)
            ax.annotate(f"{longest:,}".replace(",", "\u202f"), (longest, budget), xytext=(7, -15), textcoords="offset points",
                        color=colour, fontweight="bold")
    if "longest" in sweep:
        budget = sweep["memory"] / gib
        ax.axhline(budget, color="#888888", linewidth=1, linestyle="--")
        ax.text(1050, budget * 1.02, f"{budget:g} GiB", color="#666666", va="bottom")
        ax.set_ylim(0, 1.4 * budget)
    ax.set_xscale("log")
    ticks = [1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000]
    ax.set_xticks(ticks, [f"{tick // 1000}k" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(1000, 260000)
    ax.set_xlabel("tokens in the stream")
    ax.set_ylabel("peak memory, GiB")
    ax.set_title(f"{sweep.get('name') or sweep['config']['model_type']}, {sweep['dtype']}, optimizer {sweep['optimizer']}: "
                 "one gradient, three ways")
    ax.legend(loc="lower right", frameon=False)
    return fig


KINDS = {  # from the bottom up; all other kinds are drawn on top as "other"
    "weights": ("weights", "#c9ced6"),
    "optimizer": ("optimizer state", "#a9b1bd"),
    "saved layer inputs": ("saved layer inputs", "#2a6f97"),
    "gradients": ("gradient", "#7a8594"),
    "keys and values": ("keys, values and their gradients", "#61a5c2"),
    "chunk activations": ("activations", "#b0413e"),
    "logits": ("logits", "#d9a441"),
}


def draw_timeline(plt, args):
    with open(args.input) as file:
        plan = json.load(file)
    gib, peta = 2**30, 1e15
    lines = {mode: [[b / gib for b in moment] for moment in line["bytes"]] for mode, line in plan["timeline"].items()}
    peaks = {mode: max(map(sum, line)) for mode, line in lines.items()}
    ceiling = min(1.1 * peaks["full"], 1.4 * peaks["checkpoint"])  # full memory may leave the picture
    fig, axes = plt.subplots(1, 3, figsize=(10.4, 4.6), sharex=True, sharey=True, layout="constrained")
    for ax, (mode, _, label) in zip(axes, MODES):
        columns = dict(zip(plan["kinds"], zip(*lines[mode])))
        kept = columns.pop("kept activations")
        columns["chunk activations"] = [a + b for a, b in zip(columns["chunk activations"], kept)]
        stack = [columns.pop(kind) for kind in KINDS]
        stack.append([sum(moment) for moment in zip(*columns.values())])
        flops = plan["timeline"][mode]["flops"] / peta
        work = [flops * i / (len(lines[mode]) - 1) for i in range(len(lines[mode]))]
        ax.stackplot(work, *stack, labels=[name for name, _ in KINDS.values()] + ["other"], linewidth=0,
                     colors=[colour for _, colour in KINDS.values()] + ["#dddddd"])
        name, _, what = label.partition(": ")
        ax.set_title(name, loc="left", fontsize=12, fontweight="bold", pad=20)
        ax.text(0, 1.02, what, transform=ax.transAxes, color="#555555")
        highest = work[[sum(moment) for moment in lines[mode]].index(peaks[mode])]
        outside = peaks[mode] > ceiling
        ax.annotate(f"{peaks[mode]:.1f} GiB" + (" \u2191" if outside else ""), (highest, min(peaks[mode], ceiling)),
                    xytext=(6, -16 if outside else 5), textcoords="offset points", fontweight="bold",
                    color="white" if outside else "black")
        if "memory" in plan:
            ax.axhline(plan["memory"] / gib, color="#333333", linewidth=1, linestyle="--")
        ax.set_xlabel("work done, PFLOP")
    axes[0].set_ylim(0, ceiling)
    axes[0].set_xlim(0, 1.02 * max(line["flops"] for line in plan["timeline"].values()) / peta)
    axes[0].set_ylabel("memory, GiB")
    if "memory" in plan:
        axes[2].annotate(f"budget {plan['memory'] / gib:g} GiB", (1, plan["memory"] / gib), xycoords=("axes fraction", "data"),
                         xytext=(0, 3), textcoords="offset points", ha="right", color="#333333")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=4, frameon=False)
    return fig


def draw_loss(plt, args):
    fig, ax = plt.subplots(figsize=(8, 4.8))
    alone = len(args.inputs) == 1
    for run, colour in zip(args.inputs, COLOURS):
        with open(run) as file:
            lines = [json.loads(line) for line in file]
        name = "" if alone else os.path.basename(os.path.dirname(os.path.abspath(run))) + ", "
        steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        held_out = [(line["step"], line["evaluation_loss"]) for line in lines if "evaluation_loss" in line]
        ax.plot(*zip(*steps), color="#2a6f97" if alone else colour, linewidth=0.8, alpha=0.6, label=f"{name}training")
        if held_out:
            ax.plot(*zip(*held_out), "o-", color=colour, label=f"{name}held out {held_out[-1][1]:.3f}")
    if not alone:
        ax.set_yscale("log")
        lowest, highest = ax.get_ylim()
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if lowest <= tick <= highest]
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_yticks([], minor=True)
    ax.set_xlabel("step")
    ax.set_ylabel("loss, nats per token")
    ax.legend(frameon=False)
    return fig


def draw_preferences(plt, args):
    with open(args.input) as file:
        lines = [json.loads(line) for line in file]
    fig, axes = plt.subplots(2, 1, figsize=(7.4, 4.6), sharex=True, height_ratios=[2, 3])
    panels = [
        ("accuracy", "accuracy", "fraction of pairs where the chosen completion has the higher reward"),
        ("margin", "margin", "mean reward of chosen minus rejected completions"),
    ]
    for ax, (name, label, title) in zip(axes, panels):
        training = [(line["step"], line[name]) for line in lines if name in line]
        held_out = [(line["step"], line["evaluation_" + name]) for line in lines if "evaluation_" + name in line]
        if not held_out:
            raise ValueError(f"no evaluation_{name}")
        ax.plot(*zip(*training), ".", color="#2a6f97", alpha=0.35, markeredgewidth=0, clip_on=False,
                label="training batches")
        ax.plot(*zip(*held_out), color="#b0413e", linewidth=2.2, label="held out")
        ax.set_ylabel(label)
        ax.set_title(title, loc="left", fontsize=10.5)
    axes[0].axhline(0.5, color="#888888", linewidth=1, linestyle="--")
    axes[0].set_ylim(-0.04, 1.06)
    axes[0].set_yticks([0, 0.5, 1])
    axes[0].legend(loc="lower right", frameon=False)
    axes[1].set_xlabel("step")
    axes[1].set_xlim(0, held_out[-1][0])
    axes[1].set_ylim(bottom=min(0, axes[1].get_ylim()[0]))
    return fig


def draw_rewards(plt, args):
    with open(args.input) as file:
        lines = [json.loads(line) for line in file]

    def curve(name):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if not points:
            raise ValueError(f"no {name}")
        return points

    fig, axes = plt.subplots(2, 1, figsize=(7.4, 4.6), sharex=True, height_ratios=[3, 2])
    axes[0].plot(*zip(*curve("reward")), ".", color="#2a6f97", alpha=0.6, markeredgewidth=0, clip_on=False,
                 label="sampled completions of each round")
    axes[0].plot(*zip(*curve("evaluation_reward")), "o-", color="#b0413e", linewidth=2.2, markersize=4, clip_on=False,
                 label="held out, greedy decoding")
    axes[0].set_ylabel("reward")
    axes[0].set_title("mean reward", loc="left", fontsize=10.5)
    axes[0].legend(loc="lower right", frameon=False)
    axes[1].plot(*zip(*curve("entropy")), color="#2a6f97", linewidth=1.6)
    axes[1].set_ylabel("nats per token")
    axes[1].set_title("entropy of the sampled tokens", loc="left", fontsize=10.5)
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlabel("step")
    axes[1].set_xlim(0, curve("reward")[-1][0])
    return fig


RANKS = ["#2a6f97", "#d9a441", "#b0413e", "#5b8c5a"]


PARTS = [  # the last two: where the label is, in points from its dot
    ("full", "#b0413e", "all parameters", 0, 9),
    ("blocks", "#d9a441", "one layer at a time (BAdam)", 34, 9),
    ("lora", "#2a6f97", "adapters of rank 8 (LoRA)", 42, -9),
    ("lora-nf4", "#61a5c2", "adapters of a base in 4 bits (QLoRA)", -44, -9),
]


def draw_parts(plt, args):
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), width_ratios=[1.3, 1])
    for name, colour, label, x, y in PARTS:
        with open(os.path.join(args.input, name, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        held_out = [(line["step"], line["evaluation_loss"]) for line in lines if "evaluation_loss" in line]
        memory = max(line["memory"] for line in lines if "memory" in line) / 2**20
        left.plot(*zip(*held_out), color=colour, linewidth=1.8, label=label)
        right.plot(memory, held_out[-1][1], "o", color=colour, markersize=9)
        right.annotate(f"{name}\n{memory:.1f} MiB", (memory, held_out[-1][1]), xytext=(x, y), color=colour,
                       textcoords="offset points", ha="center", fontweight="bold")
    left.set_yscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks([], minor=True)
    left.set_xlabel("step")
    left.set_ylabel("held-out loss, nats per token")
    left.legend(frameon=False)
    right.set_xlabel("memory of a step, MiB")
    right.set_ylabel("held-out loss after the last step")
    right.set_xlim(0, 1.2 * right.get_xlim()[1])
    right.set_ylim(0, 1.3 * right.get_ylim()[1])
    return fig


def draw_curve(plt, args):
    with open(args.input) as file:
        plan = json.load(file)
    gib = 2**30
    fig, ax = plt.subplots(figsize=(9.6, 4.8))
    curve = plan["curve"]
    memory, seconds = [p["peak"] / gib for p in curve], [p["seconds"] for p in curve]
    ax.plot(memory, seconds, "o-", color=MODES[2][1], linewidth=2.2, label="chunks of "
            f"{curve[-1]['chunk']} rows, keeping what saves the most time")
    for (mode, colour, label), size in zip(MODES, (9, 13, 7)):
        usage = plan["usage"][mode]
        ax.plot([usage["peak"] / gib], [usage["seconds"]["total"]], "D", color=colour, markersize=size, label=label, zorder=3)
    for i, point in enumerate(curve):
        words = point["kept"].replace(", ", "\n")
        above = i % 2 == 0  # the line falls, so there is room above to the right, and below to the left
        ax.annotate(words, (memory[i], seconds[i]), xytext=(3, 5) if above else (-3, -5), textcoords="offset points",
                    ha="left" if above else "right", va="bottom" if above else "top", fontsize=7, color="#555555")
    shown = seconds + [plan["usage"][mode]["seconds"]["total"] for mode, *_ in MODES]
    low, high = min(shown), max(shown)
    ax.set_xlim(left=memory[0] - 0.18 * (memory[-1] - memory[0]))
    ax.set_ylim(low - 0.6 * (high - low), high + 0.45 * (high - low))
    ax.set_xlabel("memory of a step, GiB")
    ax.set_ylabel("predicted seconds of a step")
    tokens = f"{plan['usage']['stream']['length']:,}".replace(",", "\u202f")
    ax.set_title(f"{plan.get('name') or plan['config']['model_type']}, {plan['dtype']}, {tokens} tokens: memory buys time")
    ax.legend(loc="upper right", frameon=False, fontsize=9)
    return fig


def draw_exchange(plt, args):
    blocks, heads, chunk = 12, 8, 8  # rows and heads are drawn as blocks
    fig, axes = plt.subplots(1, 3, figsize=(8.6, 4.4))
    panels = [
        ("its rows, all heads", "norm, Q, K, V, RoPE", lambda row, head: row % 4),
        ("all rows, its heads", "attention", lambda row, head: head // 2),
        ("its rows, all heads", "output projection, MLP", lambda row, head: row % 4),
    ]
    for ax, (title, label, owner) in zip(axes, panels):
        for row in range(blocks):
            for head in range(heads):
                ax.add_patch(plt.Rectangle((head, row), 1, 1, facecolor=RANKS[owner(row, head)], edgecolor="white",
                                           linewidth=0.8, alpha=0.9 if row < chunk else 0.35))
        ax.set_xlim(0, heads)
        ax.set_ylim(blocks, 0)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(title, fontsize=10.5)
        ax.set_xlabel(f"{label}\n(columns: heads)")
        for spine in ax.spines.values():
            spine.set_visible(False)
    axes[0].set_ylabel("rows of the stream, in blocks of one tile")
    axes[0].annotate("", (-0.25, 0), xytext=(-0.25, chunk), annotation_clip=False,
                     arrowprops={"arrowstyle": "<->", "color": "#444444", "shrinkA": 0, "shrinkB": 0})
    axes[0].text(-0.45, chunk / 2, "one chunk", rotation=90, va="center", ha="right", color="#444444")
    axes[0].yaxis.set_label_coords(-0.2, 0.5)
    for left, right in zip(axes, axes[1:]):
        right.annotate("", (-0.25, blocks / 2), xytext=(-1.75, blocks / 2), annotation_clip=False,
                       arrowprops={"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.6})
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=colour) for colour in RANKS]
    fig.legend(handles, [f"rank {rank}" for rank in range(4)], loc="lower center", ncols=4, frameon=False)
    fig.tight_layout(rect=(0, 0.07, 1, 1), w_pad=4)
    fig.set_layout_engine("none")
    return fig


DRAWINGS = {"timeline": draw_timeline, "memory": draw_memory, "loss": draw_loss, "preferences": draw_preferences, "rewards": draw_rewards,
            "parts": draw_parts, "curve": draw_curve, "exchange": draw_exchange}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=DRAWINGS, help="what to draw")
    parser.add_argument("inputs", metavar="input", nargs="*",
                        help="timeline.json, sweep.json, curve.json, metrics.jsonl (for loss one or more) or the folder of a demonstration; not for exchange")
    parser.add_argument("output", help="the picture; its extension (.png, .svg) sets the format")
    args = parser.parse_args()
    if args.kind == "exchange" and args.inputs:
        parser.error("exchange takes only the output")
    most = len(COLOURS) if args.kind == "loss" else 1
    if args.kind != "exchange" and not 1 <= len(args.inputs) <= most:
        parser.error(f"{args.kind} takes {'one input' if most == 1 else f'one to {most} inputs'} and an output")
    if args.output.endswith((".json", ".jsonl")):
        parser.error(f"the last argument is the picture, not {args.output}")
    args.input = args.inputs[0] if args.inputs else None
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot.py: matplotlib is missing; pip install matplotlib, or apt-get install python3-matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False})
    try:
        fig = DRAWINGS[args.kind](plt, args)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"plot.py: {', '.join(args.inputs)}: {error}; did streambp write this file?")
    if fig.get_layout_engine() is None:
        fig.tight_layout()
    stem, ending = os.path.splitext(args.output)
    temporary = f"{stem}.tmp{ending}"
    fig.savefig(temporary, dpi=150)
    os.replace(temporary, args.output)


if __name__ == "__main__":
    main()
