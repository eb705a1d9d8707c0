#!/usr/bin/env python3
"""Draw pictures for docs/ that no page shows.

  streambp plan qwen3-8b --accumulate 2 --memory 80GiB --sweep sweep.json
  scripts/plot.py memory sweep.json docs/memory.png                 peak memory against length, in four ways

  streambp plan qwen3-8b --length 16384 --curve --json curve.json
  scripts/plot.py curve curve.json docs/dial.png                    what more memory buys

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
    ("chunked-loss", "#5b8c5a", "the same, with a chunked loss"),
    ("stream", "#2a6f97", "StreamBP: layer inputs kept, layers in chunks"),
]


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
            last = mode == MODES[-1][0]  # below its line, where no other line is
            ax.annotate(f"{longest:,}".replace(",", "\u202f"), (longest, budget), xytext=(7, -15) if last else (-5, 5),
                        textcoords="offset points", ha="left" if last else "right", color=colour, fontweight="bold")
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
                 "one gradient, four ways")
    ax.legend(loc="lower right", frameon=False)
    return fig


RANKS = ["#2a6f97", "#d9a441", "#b0413e", "#5b8c5a"]


PARTS = [  # the last two: where the label is, in points from its dot
    ("full", "#b0413e", "all parameters", 0, 9),
    ("blocks", "#d9a441", "one layer at a time (BAdam)", 34, 9),
    ("lora", "#2a6f97", "adapters of rank 8 (LoRA)", 42, -9),
    ("lora-nf4", "#61a5c2", "adapters of a base in 4 bits (QLoRA)", -44, -9),
]


def draw_curve(plt, args):
    with open(args.input) as file:
        plan = json.load(file)
    gib = 2**30
    fig, ax = plt.subplots(figsize=(9.6, 4.8))
    curve = plan["curve"]
    memory, seconds = [p["peak"] / gib for p in curve], [p["seconds"] for p in curve]
    ax.plot(memory, seconds, "o-", color=MODES[-1][1], linewidth=2.2, label="chunks of "
            f"{curve[-1]['chunk']} rows, keeping what saves the most time")
    for (mode, colour, label), size in zip([MODES[0], MODES[1], MODES[-1]], (9, 13, 7)):
        usage = plan["usage"][mode]
        ax.plot([usage["peak"] / gib], [usage["seconds"]["total"]], "D", color=colour, markersize=size, label=label, zorder=3)
    for i, point in enumerate(curve):
        words = point["kept"].replace(", ", "\n")
        above = i % 2 == 0  # the line falls, so there is room above to the right, and below to the left
        ax.annotate(words, (memory[i], seconds[i]), xytext=(3, 5) if above else (-3, -5), textcoords="offset points",
                    ha="left" if above else "right", va="bottom" if above else "top", fontsize=7, color="#555555")
    shown = seconds + [plan["usage"][mode]["seconds"]["total"] for mode in ("full", "checkpoint", "stream")]
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


DRAWINGS = {"memory": draw_memory, "curve": draw_curve, "exchange": draw_exchange}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=DRAWINGS, help="what to draw")
    parser.add_argument("input", nargs="?", help="sweep.json or curve.json; not for exchange")
    parser.add_argument("output", help="the picture; its extension (.png, .svg) sets the format")
    args = parser.parse_args()
    if (args.kind == "exchange") == (args.input is not None):
        parser.error("exchange takes only the output" if args.input else f"{args.kind} takes an input and an output")
    if args.output.endswith((".json", ".jsonl")):
        parser.error(f"the last argument is the picture, not {args.output}")
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
        sys.exit(f"plot.py: {args.input}: {error}; did streambp write this file?")
    if fig.get_layout_engine() is None:
        fig.tight_layout()
    stem, ending = os.path.splitext(args.output)
    temporary = f"{stem}.tmp{ending}"
    fig.savefig(temporary, dpi=150)
    os.replace(temporary, args.output)


if __name__ == "__main__":
    main()
