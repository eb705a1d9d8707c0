#!/usr/bin/env python3
"""Compares generation with PyTorch's: the time of a step, for one and for several sequences at once.

  scripts/compare_decoding.py out/run/step-000100 1 16       1 and 16 sequences, with the weights of this model directory

PyTorch runs transformers' generate(). Both sample from all tokens, and end no sequence early. A step gives each sequence
a token; streambp's is an average that includes its first and last steps, which have fewer sequences. "of bandwidth" is
the time to read all weights once over the time of a step. The two take turns, and the figures are medians.

--unlock-mkl: see compare_torch.py. Exit codes: 0 success, 2 wrong usage or a failure.
Needs: pip install torch 'transformers>=4.56' safetensors numpy
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

from compare_torch import Mistake, count, find_programs, in_child, run_streambp, say, write

TOKENS = 256  # of each sequence


def without_end(model, folder):
    """A copy of a model's folder, of links, that names no end token."""
    folder.mkdir()
    for file in Path(model).resolve().iterdir():
        copy = folder / file.name
        if file.name in ("config.json", "generation_config.json"):
            copy.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
        else:
            copy.symlink_to(file)
    return folder


def seconds_per_step(args, model, sequences):
    """The medians of PyTorch and this program, and the share of the bandwidth."""
    torch, ours, bandwidth = [], [], []
    for _ in range(args.turns):
        answer = in_child("decode", model=str(model), sequences=sequences, tokens=TOKENS, device=args.device,
                          dtype=args.dtype, preload=args.preload)  # fmt: skip
        if "problem" in answer:
            raise Mistake(f"PyTorch: {answer['problem']}")
        torch += answer["seconds"]
        *_, said = run_streambp(args.streambp, "generate", "--model", model, "--prompt", "The", "--samples", sequences,
                                "--length", TOKENS, "--temperature", 1, "--top-k", 0, "--top-p", 1, "--device", args.device,
                                "--dtype", args.dtype, "--stats")  # fmt: skip
        found = re.search(r"then ([\d.]+) tokens/s.*\(([\d.]+) ms to read", said, re.DOTALL)
        if not found:
            raise Mistake(f"{args.streambp} generate --stats does not show its speed; rebuild it")
        ours.append(sequences / float(found[1]))
        bandwidth.append(float(found[2]) / 1e3 / ours[-1])
    return map(statistics.median, (torch, ours, bandwidth))


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model directory that this program and transformers read")
    parser.add_argument("sequences", type=count(256), nargs="+", help="sequences at once; on a CPU at most 16")
    parser.add_argument("--streambp", default="build/streambp", help="the program (default: build/streambp)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="default: f32")
    parser.add_argument("--turns", type=count(1000), default=3, help="of each (default: 3)")
    parser.add_argument("--unlock-mkl", action="store_true", help="on a CPU: let MKL use its kernels for Intel's CPUs")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def run(args, folder):
    if not list(Path(args.model).glob("*.safetensors")):
        raise Mistake(f"{args.model}: not a folder with weights in safetensors")
    if max(args.sequences) > 16 and args.device == "cpu":
        raise Mistake(f"{max(args.sequences)} sequences: on a CPU this program generates at most 16 at once")
    versions = find_programs(args, folder)
    model = without_end(args.model, folder / "model")
    print(f"{args.model}, {args.dtype}, {TOKENS} tokens of each sequence, medians of {args.turns} turns, beside PyTorch "
          f"{versions['torch']}, transformers {versions['transformers']}\n")  # fmt: skip
    say("", "sequences", "ms per step", "tokens/s", "speed-up", "of bandwidth")
    results = []
    for sequences in args.sequences:
        torch, ours, share = seconds_per_step(args, model, sequences)
        for label, seconds, *more in [("PyTorch", torch), ("streambp", ours, f"{torch / ours:.2f}", f"{share:.2f}")]:
            say(label, sequences, f"{1e3 * seconds:.2f}", f"{sequences / seconds:.1f}", *more)
        results.append({"sequences": sequences, "torch": torch, "streambp": ours, "of_bandwidth": share})
    write(args.json, {"model": args.model, "dtype": args.dtype, **versions, "decode": results})


def main():
    args = options()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(args, Path(folder))
    except (Mistake, OSError) as problem:
        print(f"compare_decoding.py: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
