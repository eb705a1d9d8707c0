#!/usr/bin/env python3
"""How the norm of Gemma 4's gradient varies, and what bfloat16 makes of it: the table of docs/defects.md, "Gemma 4".

    scripts/sharp_attention.py [SEED]

Trains a small Gemma 4 on this documentation for 250 steps, multiplies the weights of its queries' norms by 1, 4 and 16, and computes
the gradient of 60 paragraphs each, in float32 and in bfloat16. Takes a few minutes on a CPU.

Needs: pip install torch safetensors, and build/streambp"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
SIZES = "--family gemma4 --hidden 128 --heads 4 --kv-heads 2 --layers 6 --mlp 256".split()


def train(out, *options):
    command = [ROOT / "build" / "streambp", "train", "--device", "cpu", "--out", out, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main():
    folder = Path(tempfile.mkdtemp())
    text = "".join(file.read_text() for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    (folder / "book.txt").write_text(text)
    paragraphs = [p for p in text.split("\n\n") if 150 < len(p) < 500]
    (folder / "paragraphs.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs))
    train(folder / "trained", *SIZES, "--data", folder / "book.txt", "--steps", "250", "--sample", "0", "--seed", (sys.argv + ["1"])[1])
    print(f"{'norms':>6}{'loss':>8}{'median norm':>13}{'largest':>9}{'bfloat16 / float32':>20}")
    for factor in (1, 4, 16):
        model = folder / f"times-{factor}"
        shutil.copytree(folder / "trained" / "best", model)
        weights = load_file(model / "model.safetensors")
        sharper = {name: w * factor if "q_norm" in name else w for name, w in weights.items()}
        save_file(sharper, model / "model.safetensors", {"format": "pt"})
        steps = {}
        for dtype in ("f32", "bf16"):
            run = train(folder / f"{factor}-{dtype}", "--model", model, "--data", folder / "paragraphs.jsonl", "--rate", "0", "--steps", "60",
                        "--batch", "1", "--pack", "1", "--eval-fraction", "0", "--dtype", dtype)  # fmt: skip
            steps[dtype] = [line for line in run if "gradient_norm" in line]
        norms = {dtype: [step["gradient_norm"] for step in run] for dtype, run in steps.items()}
        ratios = [narrow / wide for wide, narrow in zip(norms["f32"], norms["bf16"])]
        loss = statistics.median(step["loss"] for step in steps["f32"])
        print(f"{factor:6}{loss:8.2f}{statistics.median(norms['f32']):13.3g}{max(norms['f32']):9.3g}{min(ratios):13.2f} to {max(ratios):.2f}", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
